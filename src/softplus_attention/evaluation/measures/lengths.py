"""``evaluate lengths``: loss by length, gain from context beyond the training length, loss by position."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile
from math import fsum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from softplus_attention.charts.model import Block, Cell, Number, Series, SeriesStyles, Table
from softplus_attention.evaluation.measures.base import (
    CsvTable,
    Measure,
    Outcome,
    Result,
    Results,
    add_integer,
    add_old_name,
    add_text_arguments,
    by_length_table,
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
    LoadedResult,
    by_length,
    columns_by_length,
    common_training_length,
    notes,
)
from softplus_attention.utils import counted
from softplus_attention.utils.progress import Progress
from softplus_attention.utils.results import ResultFile
from softplus_attention.utils.untrusted import count_of, mapping, number_of, numbers_of, rows_of
from softplus_attention.validation import fail

if TYPE_CHECKING:
    from softplus_attention.evaluation.models import LoadedModel
    from softplus_attention.evaluation.texts import Documents

CONTROL_FRACTION = 0.25
MIN_RISE = 0.01  # nats: a smaller increase of the loss does not count


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_text_arguments(parser)
    parser.add_argument(
        "--lengths",
        default="1,2,4,8,16,32,64",
        help="multiples of the training length (1,2,4 or 2x,8x), or tokens (512,4096); numbers without x are tokens "
        "unless the first is 1; each must divide the longest (default: %(default)s)",
    )
    add_integer(parser, "--sequences", "maximum number of sequences of the longest length", 32)
    parser.add_argument(
        "--control",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="score the end of each sequence again without the long context (default: on)",
    )
    parser.add_argument(
        "--control-fraction",
        dest="control_share",
        type=float,
        default=CONTROL_FRACTION,
        metavar="X",
        help="last fraction of each sequence, scored again with only 1x context; at least half a training length "
        "(default: %(default)s)",
    )
    add_old_name(parser, "--control-share", type=float)


def run(options: argparse.Namespace) -> Outcome:
    from softplus_attention.training import distributed

    check_at_least(options, sequences=1)
    check_fraction("--control-fraction", options.control_share)
    specs, training_length = resolve_models(options)
    lengths = parse_lengths(options.lengths, training_length)
    settings = {name: getattr(options, name) for name in ("sequences", "control", "control_share")}
    settings["group"] = distributed.everybody()

    def measure(loaded: LoadedModel) -> Result:
        return measure_lengths(loaded, documents_for(options, loaded), lengths, options.output, **settings)

    return measure_each(options, specs, training_length, measure)


def check_fraction(argument: str, fraction: float) -> None:
    if not 0 <= fraction <= 1:
        fail(argument, "a fraction of the sequence, from 0 to 1", fraction)


def measure_lengths(
    loaded: LoadedModel,
    documents: Documents,
    lengths: Sequence[int],
    folder: Path | None,
    *,
    sequences: int | None = 32,
    control: bool = True,
    control_share: float = CONTROL_FRACTION,
    progress: Progress | None = None,
    group: Any = None,
) -> Result:
    """Content of the result file; lengths finished in an earlier run with the same settings are reused.

    ``group``: processes that share each sequence; all call this function, rank 0 writes the file.
    """
    from softplus_attention.evaluation.lengths import LengthEvaluator, cut_documents
    from softplus_attention.evaluation.loss import TokenLoss
    from softplus_attention.evaluation.memory import TooLongError
    from softplus_attention.evaluation.texts import check_vocabulary
    from softplus_attention.training import distributed

    check_fraction("control_share", control_share)
    writes = group is None or distributed.is_rank0()
    progress = progress or Progress(silent=not writes)
    model = loaded.model
    check_vocabulary(documents, model)
    found, skipped, longest = split_by_feasibility(lengths, documents.longest, loaded.longest)
    texts = cut_documents(documents.at_least(longest), longest, sequences)
    settings = {"data": documents.source, "longest": longest, "sequences": len(texts.rows), "control": control}
    settings |= {"first_length": found[0], "control_share": control_share}
    file = ResultFile(
        folder if writes else None,
        "lengths",
        loaded.description(),
        settings,
        model.device,
        {"lengths": [], "skipped": []},
    )
    if group is not None:
        file.results |= distributed.broadcast_from_rank0(lambda: file.results)
    file.results |= {
        "documents": [{"length": length, "long_enough": documents.long_enough(length)} for length in lengths],
        "used": {"documents": texts.documents, "sequences": len(texts.rows), "longest": texts.longest},
        "skipped": skipped,
    }
    evaluator = LengthEvaluator(
        model, TokenLoss(model, group), texts, found[0], loaded.training_length, control, control_share
    )

    def measure(length: int, title: str) -> Result:
        return evaluator.at(length, lambda done, of: progress.update(f"{title}: {100 * done // of}%"))

    return measure_lengths_in_turn(file, found, loaded.spec.name, progress, measure, (TooLongError,))


def number(value: float | None, sign: str = "") -> str:
    return "not finite" if value is None else f"{value:{sign}.4f}"


def table(results: Results) -> str:
    """Loss of each model by length, then the gain from context beyond the training length."""
    trained = results[0]["model"]["training_length"]
    rows = {result["model"]["name"]: result["results"]["lengths"] for result in results}
    losses = {name: {entry["length"]: number(entry["loss"]) for entry in own} for name, own in rows.items()}
    lines = by_length_table("loss (nats per token)", losses, trained)
    gains = {
        name: {e["length"]: number(e["control"]["gain"], "+") for e in own if e["control"]}
        for name, own in rows.items()
        if any(entry["control"] for entry in own)
    }
    if gains:
        lines.append(f"\ngain from context beyond {trained} tokens on the same target tokens (negative: it hurts)")
        every = {name: {length: gains[name].get(length, "-") for length in losses[name]} for name in gains}
        lines += by_length_table("", every, trained)[2:]
    used = results[0]["results"]["used"]
    lines.append(
        f"\n{counted(used['sequences'], 'text')} of {used['longest']} tokens from "
        f"{counted(used['documents'], 'document')} of at least that length"
    )
    lines += skipped_lines(results)
    if len({result["settings"]["data"]["fingerprint"] for result in results}) > 1:
        lines.append("the models have different tokenizers: losses per token are not comparable between them")
    return "\n".join(lines)


def csv_rows(results: Results) -> CsvTable:
    head = ["model", "attention", "length", "times", "loss", "standard_error", "full_context", "short_context", "gain"]
    rows = []
    for result in results:
        for entry in result["results"]["lengths"]:
            control = entry["control"] or {}
            values = [entry[name] for name in ("length", "times", "loss", "standard_error")]
            values += [control.get(name) for name in ("full", "short", "gain")]
            rows.append([result["model"]["name"], result["model"]["attention"], *values])
    return head, rows


def position_rows(results: Results) -> CsvTable:
    rows = [
        [result["model"]["name"], entry["length"], part["first"], part["end"], part["loss"]]
        for result in results
        for entry in result["results"]["lengths"]
        for part in entry["positions"]
    ]
    return ["model", "length", "first_position", "end_position", "loss"], rows


TITLE = "Loss by length"
CONTROL = ("window", "full", "short", "gain", "standard_error")


def read(results: dict[str, Any]) -> list[dict[str, Any]]:
    rows = rows_of(results, "lengths")
    for row in rows:
        count_of(row, "length")
        for name in ("loss", "standard_error", "times"):
            number_of(row, name)
        if "by_text" in row:
            numbers_of(row, "by_text")
        for place in rows_of(row, "positions") if row.get("positions") is not None else []:
            count_of(place, "first"), count_of(place, "end"), number_of(place, "loss")
        if row.get("control") is not None:
            for name in CONTROL:
                number_of(mapping(row, "control"), name)
    return sorted(rows, key=lambda row: row["length"])


def charts(members: Sequence[LoadedResult], styles: SeriesStyles, folder: str = "") -> list[Block]:
    base = common_training_length(members)
    caption = "The same documents cut to each length; mean over all positions. "
    losses = [loss_series(m, styles) for m in members]
    blocks: list[Block] = [by_length(TITLE + folder, "mean loss (nats)", losses, caption + used_texts(members), base)]
    blocks += differences(members, styles, folder)
    gains = [series for series in (gain_series(m, styles) for m in members) if series.x]
    if gains:
        caption = (
            "The control: the loss of the same target tokens with 1x context only, minus that with the full context. "
            "Above 0 the long context is used; at 0 a flat loss curve only means that it is ignored."
        )
        title = f"Gain from context beyond the training length{folder}"
        blocks.append(by_length(title, "gain (nats)", gains, caption, base, baseline=0))
    placed = [series for series in (position_series(m, styles) for m in members) if series.x]
    if placed:
        chart = by_length(f"Loss by position at the longest length{folder}", "mean loss (nats)", placed, "", base)
        caption = "Means over buckets of positions, plotted at the end of each bucket."
        blocks.append(replace(chart, x_label="position in the sequence", caption=caption))
    if gains:
        controls = [
            [m.label, row["length"], *(number_of(row["control"], name) for name in CONTROL[:-2]), control_gain(row)]
            for m in members
            for row in controlled(m)
        ]
        head = ["model", "length", "window", "full context", "short context", "gain"]
        blocks.append(Table(f"The control{folder}", head, controls, "Losses in nats on the same target tokens."))
    return blocks + notes(members)


def differences(members: Sequence[LoadedResult], styles: SeriesStyles, folder: str) -> list[Block]:
    """Paired differences of models on the same texts, whose errors are smaller than those of each loss."""
    reference = next((m for m in members if m.model.get("attention") == "softmax"), members[0] if members else None)
    if reference is None:
        return []
    rows = {row["length"]: row for row in reference.content}
    series = []
    for m in members:
        shared = [row for row in m.content if m is not reference and are_paired(m, reference, row, rows)]
        pairs = [paired(row["by_text"], rows[row["length"]]["by_text"]) for row in shared]
        if shared:
            means, errors = [mean for mean, _ in pairs], [error for _, error in pairs]
            series.append(Series(m.label, [row["length"] for row in shared], means, errors, styles.of(m.name)))
    caption = "Below 0 is better. Bars are standard errors of the paired differences over texts."
    title = f"Loss minus that of {reference.label}{folder}"
    return (
        [by_length(title, "difference (nats)", series, caption, common_training_length(members), baseline=0)]
        if series
        else []
    )


def are_paired(m: LoadedResult, reference: LoadedResult, row: dict[str, Any], rows: dict[int, dict[str, Any]]) -> bool:
    same = all(m.settings.get(name) == reference.settings.get(name) for name in ("data", "longest", "sequences"))
    own, other = row.get("by_text"), rows.get(row["length"], {}).get("by_text")
    return same and own is not None and other is not None and len(own) == len(other) and None not in [*own, *other]


def paired(first: Sequence[float], second: Sequence[float]) -> tuple[float, Number]:
    """The mean difference and its standard error."""
    values = [one - other for one, other in zip(first, second, strict=True)]
    mean = fsum(values) / len(values) if values else 0.0
    if len(values) < 2:
        return mean, None
    return mean, (fsum((value - mean) ** 2 for value in values) / (len(values) - 1) / len(values)) ** 0.5


def trained_row(m: LoadedResult) -> dict[str, Any] | None:
    """The row at the training length, or at the shortest length beyond it."""
    rows = [row for row in m.content if row.get("loss") is not None and row["length"] >= (m.training_length or 0)]
    return rows[0] if rows else None


def rise(row: dict[str, Any], first: dict[str, Any]) -> tuple[float, bool]:
    """Loss minus that at 1x, and whether it exceeds both two standard errors and MIN_RISE."""
    above = row["loss"] - first["loss"]
    texts, others = row.get("by_text") or [], first.get("by_text") or []
    error = paired(texts, others)[1] if len(texts) == len(others) and None not in [*texts, *others] else None
    return above, above > max(MIN_RISE, 2 * (error or 0.0))


def verdict(m: LoadedResult) -> str:
    """One line: up to which length the loss holds, and the gain from context beyond 1x."""
    first = trained_row(m)
    if first is None or not m.training_length:
        return ""
    rows = [row for row in m.content if row["length"] >= first["length"]]
    holds = list(takewhile(lambda row: row.get("loss") is not None and not rise(row, first)[1], rows))
    line = f"{m.label}: holds to {times(holds[-1], m)}"
    if len(holds) < len(rows) and rows[-1].get("loss") is not None:
        line += f", loses {rise(rows[-1], first)[0]:.2f} nats at {times(rows[-1], m)}"
    controls = controlled(m)
    if controls and (gain := control_gain(controls[-1]))[0] is not None:
        error = f" ± {gain[1]:.3f}" if gain[1] is not None else ""
        line += f"; context beyond 1x worth {gain[0]:.3f}{error} nats at {times(controls[-1], m)}"
    return f"{line}."


def times(row: dict[str, Any], m: LoadedResult) -> str:
    return f"{row['length'] / (m.training_length or row['length'] or 1):.4g}x"


SUMMARY_HEAD = [
    "model", "attention", "parameters", "training length", "loss at 1x", "longest", "loss at longest", "gain",
]  # fmt: skip


def summary_row(m: LoadedResult) -> list[Cell]:
    """Cells of the table of models."""
    first, last = trained_row(m), m.content[-1] if m.content else None
    controls = controlled(m)
    parameters = number_of(m.model, "parameters")
    return [
        m.label,
        str(m.model.get("attention") or ""),
        f"{parameters / 1e6:.3g}M" if parameters else "",
        m.training_length,
        None if first is None else number_of(first, "loss"),
        "" if last is None else times(last, m),
        None if last is None else number_of(last, "loss"),
        control_gain(controls[-1]) if controls else None,
    ]


def loss_points(m: LoadedResult) -> tuple[list[float], list[Number]]:
    lengths, (losses,) = columns_by_length(m.content, "loss")
    return lengths, losses


def loss_series(m: LoadedResult, styles: SeriesStyles) -> Series:
    return Series(m.label, *loss_points(m), None, styles.of(m.name))


def controlled(m: LoadedResult) -> list[dict[str, Any]]:
    return [row for row in m.content if row.get("control") is not None]


def control_gain(row: dict[str, Any]) -> tuple[Number, Number]:
    return number_of(row["control"], "gain"), number_of(row["control"], "standard_error")


def gain_series(m: LoadedResult, styles: SeriesStyles) -> Series:
    rows = controlled(m)
    values, errors = ([control_gain(row)[place] for row in rows] for place in (0, 1))
    return Series(m.label, [row["length"] for row in rows], values, errors, styles.of(m.name))


def position_series(m: LoadedResult, styles: SeriesStyles) -> Series:
    places = (m.content[-1].get("positions") or []) if m.content else []
    losses = [number_of(place, "loss") for place in places]
    return Series(m.label, [place["end"] for place in places], losses, None, styles.of(m.name))


def used_texts(members: Sequence[LoadedResult]) -> str:
    """The texts of each model, stated once if all have the same."""
    counts = {m.label: text_count(m.results.get("used")) for m in members}
    different = {count for count in counts.values() if count}
    if len(different) == 1 and all(counts.values()):
        return f"{different.pop()}."
    return " ".join(f"{name}: {count}." for name, count in counts.items() if count)


def text_count(used: Any) -> str:
    if not isinstance(used, dict):
        return ""
    return f"{used.get('sequences')} sequences of {used.get('longest')} tokens from {used.get('documents')} documents"


MEASURE = Measure(
    name="lengths",
    place=1,
    help="loss by length, and whether the long context is used",
    description="Mean loss over all positions of the same documents cut to 1 to 64 times the training length, and loss "
    "by position. The control compares the loss on the same target tokens with the full context and with only the last "
    "1x tokens, because a model that ignores distant tokens has a flat curve too. Under torchrun each sequence is "
    "split over all processes, for lengths that do not fit on one device.",
    add_arguments=add_arguments,
    run=run,
    table=table,
    csv={"lengths": csv_rows, "lengths-positions": position_rows},
    title=TITLE,
    read=read,
    charts=charts,
    shares_sequences=True,
)
