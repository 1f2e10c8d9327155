"""``evaluate inside``: entropy, sink, effective keys, zeros and empty tiles by length, layer and head."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from softplus_attention.charts.model import Block, HeatMap, HeatMaps, LineChart, Number, Series, SeriesStyles, Table
from softplus_attention.evaluation import layers
from softplus_attention.evaluation.layers import QUANTITIES, LayerGroup
from softplus_attention.evaluation.measures.base import (
    CsvTable,
    Measure,
    Outcome,
    Result,
    Results,
    add_integer,
    add_text_arguments,
    check_at_least,
    documents_for,
    measure_each,
    measure_lengths_in_turn,
    parse_lengths,
    resolve_models,
    skipped_lines,
    split_by_feasibility,
)
from softplus_attention.evaluation.measures.loaded import (
    LENGTH,
    LoadedResult,
    by_length,
    common_training_length,
    length_names,
    notes,
)
from softplus_attention.utils.progress import Progress
from softplus_attention.utils.results import ResultFile
from softplus_attention.utils.untrusted import count_of, number_of, rows_of

if TYPE_CHECKING:
    from softplus_attention.evaluation.models import LoadedModel
    from softplus_attention.evaluation.texts import Documents

MAX_BATCH_TOKENS = 4096  # limits the memory of the weights of one head
# Columns of the table: log N, then those of SHOWN.
HEADS = ("log N", "stage 1", "frozen", "final", "first key", "eff. keys", "zeros", "empty tiles")
SHOWN = [name for name in QUANTITIES if name != "mass"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_text_arguments(parser)
    parser.add_argument("--lengths", default="1,2,4,8,16", help="as in `evaluate lengths` (default: %(default)s)")
    add_integer(parser, "--sequences", "number of texts", 4)
    add_integer(parser, "--blocks", "maximum number of blocks of 64 rows per sequence", 8)


def run(options: argparse.Namespace) -> Outcome:
    check_at_least(options, sequences=1, blocks=1)
    specs, training_length = resolve_models(options)
    lengths = parse_lengths(options.lengths, training_length)
    settings = {"sequences": options.sequences, "blocks": options.blocks}

    def measure(loaded: LoadedModel) -> Result:
        return measure_inside(loaded, documents_for(options, loaded), lengths, options.output, **settings)

    return measure_each(options, specs, training_length, measure)


def measure_inside(
    loaded: LoadedModel,
    documents: Documents,
    lengths: Sequence[int],
    folder: Path | None,
    *,
    sequences: int = 4,
    blocks: int = 8,
    progress: Progress | None = None,
) -> Result:
    from softplus_attention.evaluation.inside import TILE, look_inside
    from softplus_attention.evaluation.lengths import cut_documents
    from softplus_attention.evaluation.memory import TooLongError, is_out_of_memory, sequences_at_once
    from softplus_attention.evaluation.texts import check_vocabulary

    model, trained = loaded.model, loaded.training_length
    check_vocabulary(documents, model)
    found, skipped, longest = split_by_feasibility(lengths, documents.longest, loaded.longest)
    texts = cut_documents(documents.at_least(longest), longest, sequences)
    settings = {"data": documents.source, "longest": longest, "sequences": len(texts.rows), "blocks": blocks}
    empty = {"rows": f"of the last half of each sequence, {blocks} blocks of {TILE} at most", "lengths": []}
    file = ResultFile(folder, "inside", loaded.description(), settings, model.device, empty)
    file.results["skipped"] = skipped

    def measure(length: int, title: str) -> Result:
        rows = texts.rows[:, :length]  # the beginnings of the same texts at every length
        started = time.perf_counter()
        try:
            at_once = min(sequences_at_once(model, length, MAX_BATCH_TOKENS), len(rows))
            inside = look_inside(model, rows, blocks=blocks, frozen_length=trained, at_once=at_once)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            raise TooLongError(str(error)) from error
        return {
            "length": length,
            "times": length / trained,
            "sequences": len(rows),
            "rows": sum(end - first for first, end in inside.blocks) * len(rows),
            "log_keys": inside.log_keys,
            "heads": inside.heads(),
            "seconds": round(time.perf_counter() - started, 2),
        }

    name = f"{loaded.spec.name}, inside"
    return measure_lengths_in_turn(file, found, name, progress or Progress(), measure, (TooLongError,))


def table(results: Results) -> str:
    """Means over the heads of layers that see the same number of keys; the files have every layer and head."""
    rows: dict[str, list[tuple[int, list[Number]]]] = {}
    for result in results:
        entries = result["results"]["lengths"]
        for group in layers.layer_groups(entries):
            title = ", ".join(filter(None, (result["model"]["name"], group.label)))
            rows[title] = [
                (e["length"], [layers.log_keys(e, group), *(layers.mean_over_heads(e, group, name) for name in SHOWN)])
                for e in entries
            ]
    width = max(20, *(len(title) + 2 for title in rows))
    lines = ["means over rows, layers and heads; entropies in nats"]
    lines.append(f"{'':<{width}}length" + "".join(f"{head:>12}" for head in HEADS))
    for title, entries in rows.items():
        for number, (length, values) in enumerate(entries):
            cells = "".join(f"{'-' if value is None else f'{value:.4g}':>12}" for value in values)
            lines.append(f"{title if number == 0 else '':<{width}}{length:>6}{cells}")
    return "\n".join([*lines, *skipped_lines(results)])


def csv_rows(results: Results) -> CsvTable:
    rows = []
    for result in results:
        for entry in result["results"]["lengths"]:
            for head in entry["heads"]:
                log_keys = layers.head_log_keys(entry, head)
                place = [result["model"]["name"], entry["length"], log_keys, head["layer"], head["head"]]
                rows.append([*place, *(head[name] for name in QUANTITIES)])
    return ["model", "length", "log_keys", "layer", "head", *QUANTITIES], rows


TITLE = "Inside the attention"


class Quantity(NamedTuple):
    name: str  # in result files
    title: str
    label: str
    is_share: bool = False  # from 0 to 1


ENTROPY = Quantity("entropy", "Entropy of the weights", "entropy (nats)")
SINK = Quantity("sink", "Weight on the first token", "fraction of the weight", True)
STAGE1 = Quantity("stage1_entropy", "Entropy of stage 1", "entropy (nats)")
BY_LENGTH = (
    ENTROPY,
    SINK,
    Quantity("effective_keys", "Effective number of keys", "keys"),
    Quantity("zeros", "Weights that are exactly 0", "fraction of the weights", True),
    Quantity("empty_tiles", "Tiles without any weight", "fraction of the tiles", True),
)
HELD = "stage1_entropy_frozen"
HELD_SUFFIX = ", log N fixed"
HELD_CAPTION = "Hollow marks: the same queries and keys with log N fixed at that of the training length."


def read(results: dict[str, Any]) -> list[dict[str, Any]]:
    rows = rows_of(results, "lengths")
    for row in rows:
        count_of(row, "length"), number_of(row, "log_keys")
        for head in rows_of(row, "heads"):
            count_of(head, "layer"), count_of(head, "head")
            for name in ("log_keys", STAGE1.name, HELD, *(quantity.name for quantity in BY_LENGTH)):
                number_of(head, name)
    return sorted(rows, key=lambda row: row["length"])


class Part(NamedTuple):
    """Layers of one model that see the same number of keys."""

    member: LoadedResult
    group: LayerGroup

    @property
    def rows(self) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = self.member.content
        return rows

    @property
    def name(self) -> str:
        return self.member.label + (f", {self.group.label}" if self.group.label else "")

    def series(self, name: str, styles: SeriesStyles, suffix: str = "", is_share: bool = False) -> Series:
        value = layers.share_of_log_keys if is_share else layers.mean_over_heads
        values = [value(row, self.group, name) for row in self.rows]
        band = None if suffix else layers.middle_half(self.rows, self.group, name, is_share)
        lengths, look = [row["length"] for row in self.rows], styles.of(self.member.name)
        return Series(self.name + suffix, lengths, values, None, look, dashed=bool(suffix), band=band)

    def has(self, name: str) -> bool:
        return any(layers.mean_over_heads(row, self.group, name) is not None for row in self.rows)


def charts(members: Sequence[LoadedResult], styles: SeriesStyles, folder: str = "") -> list[Block]:
    measured = [m for m in members if m.content]
    if not measured:
        return [*notes(members)]
    parts = [[Part(m, layer_group) for layer_group in layers.layer_groups(m.content)] for m in measured]
    widest, narrower = [own[0] for own in parts], [part for own in parts for part in own[1:]]
    base = common_training_length(measured)
    blocks = by_length_charts(widest, styles, f"{', global layers' if narrower else ''}{folder}", base)
    if narrower:
        blocks += by_length_charts(narrower, styles, f", local layers{folder}", base)
    steady = steady_table([part for own in parts for part in own], folder)
    blocks += [steady] if steady.body else []
    blocks += [by_layer_chart(measured, quantity, styles, folder) for quantity in (STAGE1, ENTROPY, SINK)]
    for name, suffix in ((STAGE1.name, ""), (HELD, HELD_SUFFIX)):
        shares = [(m.label, share_map(m, name)) for m in measured]
        shares = [(label, one) for label, one in shares if any(v is not None for row in one.values for v in row)]
        if shares:
            caption = "Mean over heads; 1 is the entropy of equal weights over the keys visible to the layer."
            blocks.append(HeatMaps(f"Entropy of stage 1 / log N{suffix}{folder}", shares, caption))
    for quantity in (STAGE1, ENTROPY, SINK):
        maps = [(m.label, head_map(m, quantity, measured)) for m in measured if quantity in head_quantities(m)]
        if maps:
            caption = f"Every layer and head at {longest_length(measured)}."
            blocks.append(HeatMaps(f"{quantity.title}, by head{folder}", maps, caption))
    return blocks + notes(members)


def by_layer_chart(members: Sequence[LoadedResult], quantity: Quantity, styles: SeriesStyles, folder: str) -> LineChart:
    lines = [series_by_layer(m, quantity.name, styles) for m in members]
    caption = f"Mean over heads at the longest measured length: {longest_length(members)}."
    if quantity is STAGE1:
        held = [series_by_layer(m, HELD, styles, HELD_SUFFIX) for m in members]
        lines += [line for line in held if any(value is not None for value in line.y)]
        caption += f" {HELD_CAPTION}"
    limits = (0, None) if quantity.is_share else (None, None)
    return LineChart(f"{quantity.title}, by layer{folder}", "layer", quantity.label, lines, caption, y_range=limits)


def by_length_charts(parts: Sequence[Part], styles: SeriesStyles, suffix: str, base: float | None) -> list[Block]:
    grouped = any(part.group.label for part in parts)
    means = f"Mean over {'the heads of these layers' if grouped else 'layers and heads'}"
    means += "; the band is the middle half of the heads"
    equal = equal_series(parts)
    held = [part for part in parts if part.has(HELD)]
    titles = [f"Entropy of stage 1{share}, by length{suffix}" for share in ("", " / log N")]
    entropies = [stage1_series(parts, held, styles, is_share) for is_share in (False, True)]
    captions = [f"Before re-weighting. {means}.", f"1 is the entropy of equal weights. {means}."]
    captions = [f"{caption} {HELD_CAPTION}" if held else caption for caption in captions]
    blocks: list[Block] = [
        by_length(titles[0], STAGE1.label, [*entropies[0], *equal], captions[0], base),
        by_length(titles[1], "entropy / log N", entropies[1], captions[1], base, y_range=(0, 1), baseline=1),
    ]
    for quantity in BY_LENGTH:
        series = [part.series(quantity.name, styles) for part in parts]
        if all(value is None for line in series for value in line.y):
            continue
        scale = "log" if quantity.name == "effective_keys" and all_positive(series) else "linear"
        lines = [*series, *equal] if quantity is ENTROPY else series
        limits = (0, None) if quantity.is_share else (None, None)
        title = f"{quantity.title}, by length{suffix}"
        blocks.append(by_length(title, quantity.label, lines, f"{means}.", base, y_scale=scale, y_range=limits))
    return blocks


def stage1_series(parts: Sequence[Part], held: Sequence[Part], styles: SeriesStyles, is_share: bool) -> list[Series]:
    growing = [part.series(STAGE1.name, styles, is_share=is_share) for part in parts]
    return growing + [part.series(HELD, styles, HELD_SUFFIX, is_share) for part in held]


def equal_series(parts: Sequence[Part]) -> list[Series]:
    curves = layers.equal_weights([(part.name, layers.log_keys_curve(part.rows, part.group)) for part in parts])
    return [
        Series(name, list(curve), list(curve.values()), look=place, reference=True)
        for place, (name, curve) in enumerate(curves)
    ]


STEADY = "Growth of stage 1's entropy, with log N and with log N fixed"
STEADY_CAPTION = (
    "In nats, from the training length (or the shortest measured) to the longest. If log N keeps the entropy constant, "
    "it changes by about 0 with log N and by more with log N fixed; equal weights change as much as log N. Shares are "
    "fractions of log N at both ends. Empty cells: the scores have no log N."
)
STEADY_HEAD = [
    "model", "from", "to", "equal weights", "with log N", "log N fixed", "share with log N", "share with log N fixed",
]  # fmt: skip


def steady_table(parts: Sequence[Part], folder: str) -> Table:
    body = []
    for part in parts:
        trained = [row for row in part.rows if row["length"] == part.member.training_length]
        ends = (trained or part.rows)[0], part.rows[-1]
        if ends[0] is ends[1]:
            continue
        equal = [layers.log_keys(row, part.group) for row in ends]
        entropies = [[layers.mean_over_heads(row, part.group, name) for row in ends] for name in (STAGE1.name, HELD)]
        shares = [[layers.share_of_log_keys(row, part.group, name) for row in ends] for name in (STAGE1.name, HELD)]
        changes = [format_change(*pair) for pair in (equal, *entropies)]
        body.append([part.name, *(row["length"] for row in ends), *changes, *(format_range(*pair) for pair in shares)])
    return Table(f"{STEADY}{folder}", STEADY_HEAD, body, STEADY_CAPTION)


def format_change(first: Number, last: Number) -> str:
    return "" if first is None or last is None else f"{last - first:+.2f}"


def format_range(first: Number, last: Number) -> str:
    return "" if first is None or last is None else f"{first:.2f} to {last:.2f}"


def longest_length(members: Sequence[LoadedResult]) -> str:
    lengths = {m.content[-1]["length"] for m in members}
    if len(lengths) == 1:
        return f"{lengths.pop()} tokens"
    return ", ".join(f"{m.name} at {m.content[-1]['length']}" for m in members)


def all_positive(series: Sequence[Series]) -> bool:
    return all(value is None or value > 0 for line in series for value in line.y)


def layer_numbers(row: dict[str, Any]) -> list[int]:
    return sorted({head["layer"] for head in row["heads"]})


def one_layer(layer: int) -> LayerGroup:
    return LayerGroup("", frozenset([layer]))


def series_by_layer(m: LoadedResult, name: str, styles: SeriesStyles, suffix: str = "") -> Series:
    row = m.content[-1]
    numbers = layer_numbers(row)
    values = [layers.mean_over_heads(row, one_layer(layer), name) for layer in numbers]
    return Series(m.label + suffix, numbers, values, None, styles.of(m.name), dashed=bool(suffix))


def share_map(m: LoadedResult, name: str) -> HeatMap:
    """Stage 1's entropy / log N of each layer by length."""
    numbers = sorted({layer for row in m.content for layer in layer_numbers(row)})
    lengths = [row["length"] for row in m.content]
    return HeatMap(
        m.label,
        LENGTH,
        "layer",
        length_names(lengths, m.training_length),
        [str(layer) for layer in numbers],
        [[layers.share_of_log_keys(row, one_layer(layer), name) for row in m.content] for layer in numbers],
        "of log N",
        0,
        1,
    )


def head_quantities(m: LoadedResult) -> list[Quantity]:
    """Stage 1's entropy is left out if it equals that of the final weights."""
    is_same = all(head.get(STAGE1.name) == head.get(ENTROPY.name) for row in m.content for head in row["heads"])
    return [ENTROPY, SINK] if is_same else [STAGE1, ENTROPY, SINK]


def head_map(m: LoadedResult, quantity: Quantity, members: Sequence[LoadedResult]) -> HeatMap:
    """All members share one colour scale."""
    row = m.content[-1]
    values = {(head["layer"], head["head"]): number_of(head, quantity.name) for head in row["heads"]}
    heads = sorted({head for _, head in values})
    every = [number_of(head, quantity.name) for member in members for head in member.content[-1]["heads"]]
    largest = max((value for value in every if value is not None), default=0)
    return HeatMap(
        m.label,
        "head",
        "layer",
        [str(head) for head in heads],
        [str(layer) for layer in layer_numbers(row)],
        [[values.get((layer, head)) for head in heads] for layer in layer_numbers(row)],
        quantity.label,
        0,
        largest if largest > 0 else 1,
        percent=quantity.is_share,
    )


MEASURE = Measure(
    name="inside",
    place=4,
    help="entropy, sink, effective keys, zeros and empty tiles by layer, head and length",
    description="Statistics of the attention weights for each layer and head by length: the entropy of stage 1 (also "
    "with log N fixed at that of the training length) and of the final weights, the mass on the first token, the "
    "effective number of keys, exact zeros, and tiles of 64 by 64 without any weight. Computed one block of rows at a "
    "time, in memory linear in the length.",
    add_arguments=add_arguments,
    run=run,
    table=table,
    csv={"inside": csv_rows},
    title=TITLE,
    read=read,
    charts=charts,
    drawn=lambda block: isinstance(block, LineChart),  # the heat maps per head are in the report
)
