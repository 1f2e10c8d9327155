"""Sections for what `evaluate` measures: loss by length, pass keys, synthetic tasks, the attention's inside, tasks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from softplus_attention.charts.model import (
    AttentionMaps,
    HeatMap,
    LineChart,
    Number,
    Series,
    SeriesStyles,
    Table,
    shown,
)
from softplus_attention.evaluation.forms import form_of
from softplus_attention.evaluation.layers import mean
from softplus_attention.report.inside import LENGTH, inside_section
from softplus_attention.report.reading import (
    ResultSet,
    UnreadableError,
    count_of,
    mapping,
    number,
    number_of,
    rows_of,
    text_of,
    typed,
)
from softplus_attention.report.sections import (
    Block,
    Explorer,
    LoadedResult,
    Section,
    base_of,
    groups,
    measured,
    notes,
    where,
)


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


def lengths_section(found: ResultSet, styles: SeriesStyles) -> list[Block]:
    parts = groups(measured(found, "lengths", read_lengths))
    blocks: list[Block] = []
    for group, members in parts.items():
        folder, base = where(group, len(parts) > 1), base_of(members)
        series = [
            Series(m.label, *by_length(m.content, "loss"), by_length(m.content, "standard_error")[1], styles.of(m.name))
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
            gains = [gain_series(m, styles) for m in members]
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
        placed = [place_series(m, styles) for m in members]
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


def used_texts(members: Sequence[LoadedResult]) -> str:
    """What each was measured on: once where it is the same for all."""
    words = {m.label: text_count(m.results.get("used")) for m in members}
    different = {count for count in words.values() if count}
    if len(different) == 1 and all(words.values()):
        return f"{different.pop()}."
    return " ".join(f"{name}: {count}." for name, count in words.items() if count)


def text_count(used: Any) -> str:
    if not isinstance(used, dict):
        return ""
    return f"{used.get('sequences')} sequences of {used.get('longest')} tokens from {used.get('documents')} documents"


def gain_series(m: LoadedResult, styles: SeriesStyles) -> Series:
    rows = [row for row in m.content if row.get("control") is not None]
    values, errors = ([number_of(row["control"], name) for row in rows] for name in ("gain", "standard_error"))
    return Series(m.label, [row["length"] for row in rows], values, errors, styles.of(m.name))


def place_series(m: LoadedResult, styles: SeriesStyles) -> Series:
    places = (m.content[-1].get("positions") or []) if m.content else []
    ends = [place["end"] for place in places]
    return Series(m.label, ends, [number_of(place, "loss") for place in places], None, styles.of(m.name))


def read_passkey(results: dict[str, Any]) -> dict[tuple[int, float], Number]:
    cells: dict[tuple[int, float], Number] = {}
    for cell in rows_of(results, "cells"):
        depth = number_of(cell, "depth")
        if depth is None:
            raise UnreadableError("a cell without a `depth`")
        cells[count_of(cell, "length"), depth] = number_of(cell, "accuracy")
    return cells


def passkey_section(found: ResultSet, styles: SeriesStyles) -> list[Block]:
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
                styles.of(m.name),
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


def read_synthetic(results: dict[str, Any]) -> tuple[str, list[dict[str, Any]]]:
    rows = rows_of(results, "lengths")
    for row in rows:
        count_of(row, "length"), number_of(row, "accuracy"), number_of(row, "exact")
    return text_of(results, "task"), sorted(rows, key=lambda row: row["length"])


def synthetic_section(found: ResultSet, styles: SeriesStyles) -> list[Block]:
    parts = groups(measured(found, "synthetic", read_synthetic))
    blocks: list[Block] = []
    for group, members in parts.items():
        forms = [form_of(m.content[0], m.settings) for m in members]
        for form in dict.fromkeys(forms):
            those = [m for m, own in zip(members, forms, strict=True) if own == form]
            for name, words in (("accuracy", "answer tokens right"), ("exact", "sequences all right")):
                series = [Series(m.label, *by_length(m.content[1], name), None, styles.of(m.name)) for m in those]
                blocks.append(
                    LineChart(
                        f"{form}: {words}{where(group, len(parts) > 1)}",
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


def trained_at(members: Sequence[LoadedResult]) -> float | None:
    lengths = {
        number_of(training, "length")
        for training in (m.results.get("training") for m in members)
        if isinstance(training, dict)
    }
    return lengths.pop() if len(lengths) == 1 else None


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


def explorer_section(found: ResultSet, styles: SeriesStyles) -> list[Block]:
    """One explorer for all; it says where the maps side by side are of different texts."""
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


def downstream_section(found: ResultSet, styles: SeriesStyles) -> list[Block]:
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


def sections(found: ResultSet, styles: SeriesStyles) -> list[Section]:
    return [Section(title, make(found, styles)) for title, make in SECTIONS]
