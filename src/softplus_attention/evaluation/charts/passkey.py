"""Passkeys found, by length and by depth."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from softplus_attention.charts.model import Block, HeatMap, Number, Series, SeriesStyles
from softplus_attention.evaluation.charts.results import LENGTH, LoadedResult, base_of, by_length, length_names, notes
from softplus_attention.evaluation.layers import mean
from softplus_attention.utils.untrusted import UnreadableError, count_of, number_of, rows_of

TITLE = "Passkeys"
Cells = Mapping[tuple[int, float], Number]  # accuracy by length and depth


def read(results: dict[str, Any]) -> Cells:
    return cells_of(rows_of(results, "cells"), lambda cell: number_of(cell, "accuracy"))


def cells_of(rows: Sequence[dict[str, Any]], accuracy: Any) -> Cells:
    cells: dict[tuple[int, float], Number] = {}
    for cell in rows:
        depth = number_of(cell, "depth")
        if depth is None:
            raise UnreadableError("a cell without a `depth`")
        cells[count_of(cell, "length"), depth] = accuracy(cell)
    return cells


def charts(members: Sequence[LoadedResult], styles: SeriesStyles, folder: str = "") -> list[Block]:
    lengths = sorted({length for m in members for length, _ in m.content})
    if not lengths:
        return [*notes(members)]
    means = [mean_series(m.label, m.content, lengths, styles.of(m.name)) for m in members]
    blocks: list[Block] = [means_chart(f"Passkeys found, by length{folder}", means, base_of(members))]
    blocks += [depth_map(f"Passkey: {m.label}{folder}", m.content, lengths, m.training_length) for m in members]
    return blocks + notes(members)


def mean_series(name: str, cells: Cells, lengths: Sequence[int], look: int) -> Series:
    depths = sorted({depth for _, depth in cells})
    return Series(name, lengths, [mean([cells.get((n, d)) for d in depths]) for n in lengths], None, look)


def means_chart(title: str, means: Sequence[Series], base: float | None) -> Block:
    return by_length(title, "accuracy, mean over depths", means, "Exact match of the whole key.", base, y_range=(0, 1))


def depth_map(title: str, cells: Cells, lengths: Sequence[int], training_length: float | None) -> HeatMap:
    depths = sorted({depth for _, depth in cells})
    return HeatMap(
        title,
        LENGTH,
        "depth of the key",
        length_names(lengths, training_length),
        [f"{depth:.0%}" for depth in depths],
        [[cells.get((length, depth)) for length in lengths] for depth in depths],
        "accuracy",
        0,
        1,
        "0% is the beginning of the text, 100% its end.",
        percent=True,
    )
