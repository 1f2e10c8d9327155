"""Loss by length, what the context beyond the window is worth, and loss by position."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from softplus_attention.charts.model import Block, Number, Series, SeriesStyles, Table, shown
from softplus_attention.evaluation.charts.results import LoadedResult, base_of, by_length, columns_by_length, notes
from softplus_attention.utils.untrusted import count_of, mapping, number_of, rows_of

TITLE = "Loss by length"
CONTROL = ("window", "full", "short", "gain", "standard_error")


def read(results: dict[str, Any]) -> list[dict[str, Any]]:
    rows = rows_of(results, "lengths")
    for row in rows:
        count_of(row, "length")
        for name in ("loss", "standard_error"):
            number_of(row, name)
        for place in rows_of(row, "positions") if row.get("positions") is not None else []:
            count_of(place, "first"), count_of(place, "end"), number_of(place, "loss")
        if row.get("control") is not None:
            for name in CONTROL:
                number_of(mapping(row, "control"), name)
    return sorted(rows, key=lambda row: row["length"])


def charts(members: Sequence[LoadedResult], styles: SeriesStyles, folder: str = "") -> list[Block]:
    base = base_of(members)
    caption = "The same documents cut to each length; mean over all positions. "
    losses = [loss_series(m, styles) for m in members]
    blocks: list[Block] = [by_length(TITLE + folder, "mean loss (nats)", losses, caption + used_texts(members), base)]
    gains = [series for series in (gain_series(m, styles) for m in members) if series.x]
    if gains:
        caption = (
            "The control: the loss of the same target tokens with the last tokens only, minus that with the whole "
            "context. Above 0 the long context is used; at 0 a flat curve means that it is ignored."
        )
        title = f"What the context beyond the window is worth{folder}"
        blocks.append(by_length(title, "gain (nats)", gains, caption, base, baseline=0))
    placed = [series for series in (position_series(m, styles) for m in members) if series.x]
    if placed:
        chart = by_length(f"Loss by position at the longest length{folder}", "mean loss (nats)", placed, "", base)
        caption = "Means over buckets of positions, drawn at the end of each bucket."
        blocks.append(replace(chart, x_label="position in the sequence", caption=caption))
    if gains:
        controls = [
            [m.label, shown(row["length"]), *(shown(number_of(row["control"], name)) for name in CONTROL)]
            for m in members
            for row in controlled(m)
        ]
        head = ["model", "length", "window", "full context", "short context", "gain", "standard error"]
        blocks.append(Table(f"The control{folder}", head, controls, "Losses in nats on the same target tokens."))
    return blocks + notes(members)


def loss_points(m: LoadedResult) -> tuple[list[float], list[Number]]:
    lengths, (losses,) = columns_by_length(m.content, "loss")
    return lengths, losses


def loss_series(m: LoadedResult, styles: SeriesStyles) -> Series:
    return Series(m.label, *loss_points(m), None, styles.of(m.name))


def controlled(m: LoadedResult) -> list[dict[str, Any]]:
    return [row for row in m.content if row.get("control") is not None]


def gain_series(m: LoadedResult, styles: SeriesStyles) -> Series:
    rows = controlled(m)
    values, errors = ([number_of(row["control"], name) for row in rows] for name in ("gain", "standard_error"))
    return Series(m.label, [row["length"] for row in rows], values, errors, styles.of(m.name))


def position_series(m: LoadedResult, styles: SeriesStyles) -> Series:
    places = (m.content[-1].get("positions") or []) if m.content else []
    losses = [number_of(place, "loss") for place in places]
    return Series(m.label, [place["end"] for place in places], losses, None, styles.of(m.name))


def used_texts(members: Sequence[LoadedResult]) -> str:
    """What each was measured on: once where it is the same for all."""
    counts = {m.label: text_count(m.results.get("used")) for m in members}
    different = {count for count in counts.values() if count}
    if len(different) == 1 and all(counts.values()):
        return f"{different.pop()}."
    return " ".join(f"{name}: {count}." for name, count in counts.items() if count)


def text_count(used: Any) -> str:
    if not isinstance(used, dict):
        return ""
    return f"{used.get('sequences')} sequences of {used.get('longest')} tokens from {used.get('documents')} documents"
