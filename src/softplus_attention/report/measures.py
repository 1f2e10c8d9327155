"""Sections for what `evaluate` measures: loss by length, pass keys, synthetic tasks, the attention's inside, tasks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from softplus_attention.report.charts import AttentionMaps, HeatMap, LineChart, Number, Series, Table, shown
from softplus_attention.report.reading import (
    Found,
    UnreadableError,
    count_of,
    mapping,
    number,
    number_of,
    rows_of,
    text_of,
    typed,
)
from softplus_attention.report.sections import Block, Explorer, Looks, Measured, Section, groups, measured, notes, where

LENGTH = "length (tokens)"


def base_of(members: Sequence[Measured]) -> float | None:
    """The training length, where all have the same."""
    lengths = {member.training_length for member in members}
    return lengths.pop() if len(lengths) == 1 else None


def by_length(rows: Sequence[dict[str, Any]], name: str) -> tuple[list[float], list[Number]]:
    return [row["length"] for row in rows], [number_of(row, name) for row in rows]


def read_lengths(results: dict[str, Any]) -> list[dict[str, Any]]:
    rows = rows_of(results, "lengths")
    for row in rows:
        count_of(row, "length")
        for name in ("loss", "standard_error"):
            number_of(row, name)
        for place in rows_of(row, "positions") if row.get("positions") is not None else []:
            count_of(place, "first"), count_of(place, "end"), number_of(place, "loss")
        if row.get("control") is not None:
            for name in ("window", "full", "short", "gain", "standard_error"):
                number_of(mapping(row, "control"), name)
    return sorted(rows, key=lambda row: row["length"])


def lengths_section(found: Found, looks: Looks) -> list[Block]:
    parts = groups(measured(found, "lengths", read_lengths))
    blocks: list[Block] = []
    for group, members in parts.items():
        folder, base = where(group, len(parts) > 1), base_of(members)
        series = [
            Series(m.label, *by_length(m.content, "loss"), by_length(m.content, "standard_error")[1], looks.of(m.name))
            for m in members
        ]
        blocks.append(
            LineChart(
                f"Loss by length{folder}",
                LENGTH,
                "mean loss (nats)",
                series,
                "The same documents cut to each length; mean over all positions. Bars are standard errors. "
                + used_texts(members),
                x_scale="log2",
                times_of=base,
            )
        )
        controls = [
            [m.label, shown(row["length"]), *(shown(number_of(row["control"], n)) for n in CONTROL)]
            for m in members
            for row in m.content
            if row.get("control") is not None
        ]
        if controls:
            gains = [gain_series(m, looks) for m in members]
            blocks.append(
                LineChart(
                    f"What the context beyond the window is worth{folder}",
                    LENGTH,
                    "gain (nats)",
                    [series for series in gains if series.x],
                    "The control: the loss of the same target tokens with the last tokens only, minus that with the "
                    "whole context. Above 0 the long context is used; at 0 a flat curve means that it is ignored.",
                    x_scale="log2",
                    times_of=base,
                )
            )
        placed = [place_series(m, looks) for m in members]
        if any(series.x for series in placed):
            blocks.append(
                LineChart(
                    f"Loss by position at the longest length{folder}",
                    "position in the sequence",
                    "mean loss (nats)",
                    [series for series in placed if series.x],
                    "Means over buckets of positions, drawn at the end of each bucket.",
                    x_scale="log2",
                    times_of=base,
                )
            )
        if controls:
            head = ["model", "length", "window", "full context", "short context", "gain", "standard error"]
            blocks.append(Table(f"The control{folder}", head, controls, "Losses in nats on the same target tokens."))
        blocks += notes(members)
    return blocks


CONTROL = ("window", "full", "short", "gain", "standard_error")


def used_texts(members: Sequence[Measured]) -> str:
    used = members[0].results.get("used")
    if not isinstance(used, dict):
        return ""
    return f"{used.get('sequences')} sequences of {used.get('longest')} tokens from {used.get('documents')} documents."


def gain_series(m: Measured, looks: Looks) -> Series:
    rows = [row for row in m.content if row.get("control") is not None]
    values, errors = ([number_of(row["control"], name) for row in rows] for name in ("gain", "standard_error"))
    return Series(m.label, [row["length"] for row in rows], values, errors, looks.of(m.name))


def place_series(m: Measured, looks: Looks) -> Series:
    places = (m.content[-1].get("positions") or []) if m.content else []
    ends = [place["end"] for place in places]
    return Series(m.label, ends, [number_of(place, "loss") for place in places], None, looks.of(m.name))


def read_passkey(results: dict[str, Any]) -> dict[tuple[int, float], Number]:
    cells: dict[tuple[int, float], Number] = {}
    for cell in rows_of(results, "cells"):
        depth = number_of(cell, "depth")
        if depth is None:
            raise UnreadableError("a cell without a `depth`")
        cells[count_of(cell, "length"), depth] = number_of(cell, "accuracy")
    return cells


def passkey_section(found: Found, looks: Looks) -> list[Block]:
    parts = groups(measured(found, "passkey", read_passkey))
    blocks: list[Block] = []
    for group, members in parts.items():
        folder, base = where(group, len(parts) > 1), base_of(members)
        lengths = sorted({length for m in members for length, _ in m.content})
        depths = sorted({depth for m in members for _, depth in m.content})
        if not lengths:
            blocks += notes(members)
            continue
        means = [
            Series(
                m.label,
                lengths,
                [mean([m.content.get((n, d)) for d in depths]) for n in lengths],
                None,
                looks.of(m.name),
            )
            for m in members
        ]
        blocks.append(
            LineChart(
                f"Pass keys found, by length{folder}",
                LENGTH,
                "accuracy, mean over depths",
                means,
                "Exact match of the whole key.",
                x_scale="log2",
                times_of=base,
                y_range=(0, 1),
            )
        )
        for m in members:
            names = [f"{n}" + (f"\n{n / m.training_length:g}x" if m.training_length else "") for n in lengths]
            values = [[m.content.get((n, d)) for n in lengths] for d in depths]
            blocks.append(
                HeatMap(
                    f"Pass key: {m.label}{folder}",
                    LENGTH,
                    "depth of the key",
                    names,
                    [f"{d:.0%}" for d in depths],
                    values,
                    "accuracy",
                    0,
                    1,
                    "0% is the beginning of the text, 100% its end.",
                    percent=True,
                )
            )
        blocks += notes(members)
    return blocks


def mean(values: Sequence[Number]) -> Number:
    there = [value for value in values if value is not None]
    return sum(there) / len(there) if there else None


def read_synthetic(results: dict[str, Any]) -> tuple[str, list[dict[str, Any]]]:
    rows = rows_of(results, "lengths")
    for row in rows:
        count_of(row, "length"), number_of(row, "accuracy"), number_of(row, "exact")
    return text_of(results, "task"), sorted(rows, key=lambda row: row["length"])


def synthetic_section(found: Found, looks: Looks) -> list[Block]:
    parts = groups(measured(found, "synthetic", read_synthetic))
    blocks: list[Block] = []
    for group, members in parts.items():
        for task in dict.fromkeys(m.content[0] for m in members):
            those = [m for m in members if m.content[0] == task]
            for name, words in (("accuracy", "answer tokens right"), ("exact", "sequences all right")):
                series = [Series(m.label, *by_length(m.content[1], name), None, looks.of(m.name)) for m in those]
                blocks.append(
                    LineChart(
                        f"{task}: {words}{where(group, len(parts) > 1)}",
                        LENGTH,
                        words,
                        series,
                        "Trained at 1x, tested beyond.",
                        x_scale="log2",
                        times_of=base_of(those) or trained_at(those),
                        y_range=(0, 1),
                    )
                )
            blocks += notes(those)
    return blocks


def trained_at(members: Sequence[Measured]) -> float | None:
    lengths = {
        number_of(training, "length")
        for training in (m.results.get("training") for m in members)
        if isinstance(training, dict)
    }
    return lengths.pop() if len(lengths) == 1 else None


# name in the files, title, axis label, whether it is a share of 0 to 1
INSIDE = (
    ("entropy", "Entropy of the weights", "entropy (nats)", False),
    ("sink", "Weight on the first token", "share of the weight", True),
    ("effective_keys", "Effective number of keys", "keys", False),
    ("zeros", "Weights that are exactly 0", "share of the weights", True),
    ("empty_tiles", "Tiles without any weight", "share of the tiles", True),
)


def read_inside(results: dict[str, Any]) -> list[dict[str, Any]]:
    rows = rows_of(results, "lengths")
    for row in rows:
        count_of(row, "length"), number_of(row, "log_keys")
        for head in rows_of(row, "heads"):
            count_of(head, "layer"), count_of(head, "head")
            for name in ("stage1_entropy", "stage1_entropy_frozen", *(name for name, *_ in INSIDE)):
                number_of(head, name)
    return sorted(rows, key=lambda row: row["length"])


def over_heads(row: dict[str, Any], name: str) -> Number:
    return mean([number_of(head, name) for head in row["heads"]])


def inside_section(found: Found, looks: Looks) -> list[Block]:
    parts = groups([m for m in measured(found, "inside", read_inside) if m.content])
    blocks: list[Block] = []
    for group, members in parts.items():
        folder, base = where(group, len(parts) > 1), base_of(members)
        blocks.append(stage1_chart(members, looks, folder, base))
        for name, title, label, share in INSIDE:
            series = [series_by_length(m, name, looks) for m in members]
            if all(value is None for line in series for value in line.y):
                continue
            wide = "log" if name == "effective_keys" and all_positive(series) else "linear"
            limits = (0, None) if share else (None, None)
            blocks.append(
                LineChart(
                    f"{title}, by length{folder}",
                    LENGTH,
                    label,
                    series,
                    "Mean over layers and heads.",
                    x_scale="log2",
                    y_scale=wide,
                    times_of=base,
                    y_range=limits,
                )
            )
        for name, title, label, share in INSIDE[:2]:
            limits = (0, None) if share else (None, None)
            lines = [series_by_layer(m, name, looks) for m in members]
            caption = f"Mean over heads, at the longest length measured: {longest_words(members)}."
            blocks.append(LineChart(f"{title}, by layer{folder}", "layer", label, lines, caption, y_range=limits))
        for m in members:
            blocks += [head_map(m, *words, members, folder) for words in INSIDE[:2]]
        blocks += notes(members)
    return blocks


def longest_words(members: Sequence[Measured]) -> str:
    lengths = {m.content[-1]["length"] for m in members}
    if len(lengths) == 1:
        return f"{lengths.pop()} tokens"
    return ", ".join(f"{m.name} at {m.content[-1]['length']}" for m in members)


def all_positive(series: Sequence[Series]) -> bool:
    return all(value is None or value > 0 for line in series for value in line.y)


def series_by_length(m: Measured, name: str, looks: Looks, words: str = "", dashed: bool = False) -> Series:
    values = [over_heads(row, name) for row in m.content]
    return Series(m.label + words, [row["length"] for row in m.content], values, None, looks.of(m.name), dashed)


def series_by_layer(m: Measured, name: str, looks: Looks) -> Series:
    heads = m.content[-1]["heads"]
    layers = sorted({head["layer"] for head in heads})
    values = [mean([number_of(head, name) for head in heads if head["layer"] == layer]) for layer in layers]
    return Series(m.label, layers, values, None, looks.of(m.name))


def stage1_chart(members: Sequence[Measured], looks: Looks, folder: str, base: float | None) -> LineChart:
    series = []
    for m in members:
        series.append(series_by_length(m, "stage1_entropy", looks))
        frozen = series_by_length(m, "stage1_entropy_frozen", looks, ", log N held", dashed=True)
        if any(value is not None for value in frozen.y):
            series.append(frozen)
    longest = max(members, key=lambda m: m.content[-1]["length"])
    equal = by_length(longest.content, "log_keys")
    if any(value is not None for value in equal[1]):
        series.append(Series("equal weights (log N)", *equal, reference=True))
    return LineChart(
        f"Entropy of stage 1, by length{folder}",
        LENGTH,
        "entropy (nats)",
        series,
        "Mean over layers and heads, before re-weighting. Dashed: the same queries and keys with log N held at that of "
        "the training length.",
        x_scale="log2",
        times_of=base,
    )


def head_map(
    m: Measured, name: str, title: str, label: str, share: bool, members: Sequence[Measured], folder: str
) -> HeatMap:
    """The colours mean the same for all members."""
    row = m.content[-1]
    values = {(head["layer"], head["head"]): number_of(head, name) for head in row["heads"]}
    layers, heads = sorted({layer for layer, _ in values}), sorted({head for _, head in values})
    every = [number_of(head, name) for member in members for head in member.content[-1]["heads"]]
    return HeatMap(
        f"{title}: {m.label}{folder}",
        "head",
        "layer",
        [str(head) for head in heads],
        [str(layer) for layer in layers],
        [[values.get((layer, head)) for head in heads] for layer in layers],
        label,
        0,
        max([*(value for value in every if value is not None), 1e-9]),
        f"Every layer and head at {row['length']} tokens.",
        percent=share,
    )


def read_maps(results: dict[str, Any]) -> tuple[str, list[str], int, dict[tuple[int, int], list[list[float]]]]:
    tokens = typed(results, "tokens", list, "a list")
    maps = {}
    for entry in rows_of(results, "maps"):
        rows = typed(entry, "weights", list, "a list")
        for place, row in enumerate(rows):
            if not isinstance(row, list) or len(row) != place + 1:
                raise UnreadableError(f"row {place} of `weights` must have {place + 1} numbers")
            if any(number(weight, "weights") is None or weight < 0 for weight in row):
                raise UnreadableError(f"row {place} of `weights` must hold numbers from 0 up")
        if len(rows) != len(tokens):
            raise UnreadableError(f"`weights` must have a row for each of the {len(tokens)} tokens, got {len(rows)}")
        maps[count_of(entry, "layer"), count_of(entry, "head")] = rows
    if not maps:
        raise UnreadableError("`maps` is empty")
    return text_of(results, "text"), [str(token) for token in tokens], count_of(results, "tokens_per_cell"), maps


def explorer_section(found: Found, looks: Looks) -> list[Block]:
    """One explorer for all; the files of one text can be compared."""
    members = measured(found, "maps", read_maps)
    folders = {m.result.group for m in members}
    shown_maps = []
    for m in members:
        text, tokens, cell, maps = m.content
        name = m.label + where(m.result.group, len(folders) > 1)
        caption = f"Rows are queries, columns are keys; {len(maps)} heads."
        shown_maps.append(AttentionMaps(f"Attention maps: {name}", name, text, tokens, cell, maps, caption))
    return [Explorer(shown_maps)] if shown_maps else []


def read_downstream(results: dict[str, Any]) -> list[dict[str, Any]]:
    rows = rows_of(results, "tasks")
    for row in rows:
        text_of(row, "task"), text_of(row, "metric"), number_of(row, "value"), number_of(row, "standard_error")
        number_of(row, "samples")
    return rows


def downstream_section(found: Found, looks: Looks) -> list[Block]:
    parts = groups(measured(found, "downstream", read_downstream))
    blocks: list[Block] = []
    for group, members in parts.items():
        cells = {}
        for m in members:
            for row in m.content:
                error = number_of(row, "standard_error")
                words = shown(number_of(row, "value")) + (f" ± {shown(error)}" if error is not None else "")
                cells[row["task"], row["metric"], shown(number_of(row, "samples")), m.label] = words
        rows = list(dict.fromkeys(key[:3] for key in cells))
        names = list(dict.fromkeys(m.label for m in members))
        body = [[*row, *(cells.get((*row, name), "") for name in names)] for row in rows]
        title = f"Downstream tasks{where(group, len(parts) > 1)}"
        caption = "By lm-evaluation-harness; ± is the standard error it gives."
        blocks.append(Table(title, ["task", "metric", "samples", *names], body, caption))
        blocks += notes(members)
    return blocks


SECTIONS = (
    ("Loss by length", lengths_section),
    ("Pass keys", passkey_section),
    ("Synthetic tasks", synthetic_section),
    ("Inside the attention", inside_section),
    ("Attention explorer", explorer_section),
    ("Downstream tasks", downstream_section),
)


def sections(found: Found, looks: Looks) -> list[Section]:
    return [Section(title, make(found, looks)) for title, make in SECTIONS]
