"""Downstream tasks: accuracy as bars, and every metric in a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from softplus_attention.charts.model import BarChart, Block, Series, SeriesStyles, Table, shown
from softplus_attention.evaluation.charts.results import LoadedResult, notes, with_error
from softplus_attention.utils.untrusted import number_of, rows_of, text_of

TITLE = "Downstream tasks"
# The first of these that a task has is drawn; the table has all.
ACCURACIES = ("acc", "acc_norm", "exact_match")
Rows = Sequence[Mapping[str, Any]]


def read(results: dict[str, Any]) -> list[dict[str, Any]]:
    rows = rows_of(results, "tasks")
    for row in rows:
        text_of(row, "task"), text_of(row, "metric"), number_of(row, "value"), number_of(row, "standard_error")
        number_of(row, "samples")
    return rows


def charts(members: Sequence[LoadedResult], styles: SeriesStyles, folder: str = "") -> list[Block]:
    return [*bars(members, styles, folder), table(members, folder), *notes(members)]


def bars(members: Sequence[LoadedResult], styles: SeriesStyles, folder: str) -> list[Block]:
    found = [accuracies(m.content) for m in members]
    places = list(dict.fromkeys(key for own in found for key in own))
    series = []
    for m, own in zip(members, found, strict=True):
        there = [place for place, key in enumerate(places) if key in own]
        values, errors = (
            [number_of(own[places[place]], name) for place in there] for name in ("value", "standard_error")
        )
        series.append(Series(m.label, there, values, errors, styles.of(m.name)))
    names = [f"{task}\n{metric}" for task, metric in places]
    title, caption = f"Accuracy on downstream tasks{folder}", "By lm-evaluation-harness. Bars are standard errors."
    return [BarChart(title, "", "accuracy", names, series, caption, (0, 1))] if places else []


def is_accuracy(row: Mapping[str, Any]) -> bool:
    # ruler's metrics are named by the length of the text.
    metric = str(row["metric"]).partition(" ")[0]
    return row["value"] is not None and (metric in ACCURACIES or metric.isdecimal())


def accuracies(content: Rows) -> dict[tuple[str, str], dict[str, Any]]:
    """One row for each task that was asked for; the parts of a group only where it has no number of its own."""
    rows = [row for row in content if is_accuracy(row)]
    found: dict[tuple[str, str], Any] = {}
    for asked in dict.fromkeys(row.get("asked", row["task"]) for row in rows):
        whole = [row for row in rows if row["task"] == asked]
        for row in whole or [row for row in rows if row.get("asked", row["task"]) == asked]:
            metrics = [other["metric"] for other in rows if other["task"] == row["task"]]
            best = [name for name in ACCURACIES if name in metrics][:1] or metrics
            if row["metric"] in best:
                found[row["task"], row["metric"]] = row
    return found


def table(members: Sequence[LoadedResult], folder: str) -> Table:
    cells = {}
    for m in members:
        for row in m.content:
            key = (row["task"], row["metric"], shown(number_of(row, "samples")), m.label)
            cells[key] = with_error(number_of(row, "value"), number_of(row, "standard_error"))
    names = list(dict.fromkeys(m.label for m in members))
    body = [[*row, *(cells.get((*row, name), "") for name in names)] for row in dict.fromkeys(key[:3] for key in cells)]
    caption = "By lm-evaluation-harness; ± is the standard error it gives."
    return Table(f"{TITLE}{folder}", ["task", "metric", "samples", *names], body, caption)
