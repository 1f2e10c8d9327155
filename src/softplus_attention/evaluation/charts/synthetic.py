"""Synthetic tasks: accuracy by length, for each form of a task."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from softplus_attention.charts.model import Block, Series, SeriesStyles
from softplus_attention.evaluation.charts.results import LoadedResult, base_of, by_length, columns_by_length, notes
from softplus_attention.evaluation.forms import form_of
from softplus_attention.utils.untrusted import count_of, number_of, rows_of, text_of

TITLE = "Synthetic tasks"
QUANTITIES = (("accuracy", "answer tokens right"), ("exact", "sequences all right"))


def read(results: dict[str, Any]) -> tuple[str, list[dict[str, Any]]]:
    rows = rows_of(results, "lengths")
    for row in rows:
        count_of(row, "length"), number_of(row, "accuracy"), number_of(row, "exact")
    return text_of(results, "task"), sorted(rows, key=lambda row: row["length"])


def charts(members: Sequence[LoadedResult], styles: SeriesStyles, folder: str = "") -> list[Block]:
    blocks: list[Block] = []
    forms = [form_of(m.content[0], m.settings) for m in members]
    for form in dict.fromkeys(forms):
        those = [m for m, own in zip(members, forms, strict=True) if own == form]
        base = base_of(those) or trained_at(those)
        for place, (_, title) in enumerate(QUANTITIES):
            columns = [columns_by_length(m.content[1], *(name for name, _ in QUANTITIES)) for m in those]
            series = [
                Series(m.label, lengths, values[place], None, styles.of(m.name))
                for m, (lengths, values) in zip(those, columns, strict=True)
            ]
            caption = "Trained at 1x, tested beyond."
            blocks.append(by_length(f"{form}: {title}{folder}", title, series, caption, base, y_range=(0, 1)))
        blocks += notes(those)
    return blocks


def trained_at(members: Sequence[LoadedResult]) -> float | None:
    training = [m.results.get("training") for m in members]
    lengths = {number_of(record, "length") for record in training if isinstance(record, dict)}
    return lengths.pop() if len(lengths) == 1 else None
