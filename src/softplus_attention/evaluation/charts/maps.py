"""Attention maps of one text, a figure for each model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from softplus_attention.charts.model import AttentionMaps, Block, SeriesStyles
from softplus_attention.evaluation.charts.results import LoadedResult
from softplus_attention.utils.untrusted import UnreadableError, count_of, number, rows_of, text_of, typed

TITLE = "Attention explorer"


def read(results: dict[str, Any]) -> tuple[str, list[str], int, dict[tuple[int, int], list[list[float]]]]:
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


def charts(members: Sequence[LoadedResult], styles: SeriesStyles, folder: str = "") -> list[Block]:
    found: list[Block] = []
    for m in members:
        text, tokens, cell, maps = m.content
        name = m.label + folder
        caption = f"Rows are queries, columns are keys; {len(maps)} heads."
        found.append(AttentionMaps(f"Attention maps: {name}", name, text, tokens, cell, maps, caption))
    return found
