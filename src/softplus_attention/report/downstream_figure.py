"""The figure of downstream tasks, from their result files alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from softplus_attention.charts.draw import COLOURS
from softplus_attention.report.evaluation_figures import Result, figure_of

# The first of these that a task has is drawn; the table has all.
ACCURACIES = ("acc", "acc_norm", "exact_match")
HATCHES = ("", "//", "..", "\\\\", "xx", "--", "++", "oo")
WIDTH = 0.8


def is_accuracy(row: Mapping[str, Any]) -> bool:
    # ruler's metrics are named by the length of the text.
    metric = str(row["metric"]).partition(" ")[0]
    return row["value"] is not None and (metric in ACCURACIES or metric.isdecimal())


def accuracies(result: Result) -> dict[tuple[str, str], Mapping[str, Any]]:
    """One row for each task that was asked for; the parts of a group only where it has no number of its own."""
    rows = [row for row in result["results"]["tasks"] if is_accuracy(row)]
    found: dict[tuple[str, str], Mapping[str, Any]] = {}
    for asked in dict.fromkeys(row.get("asked", row["task"]) for row in rows):
        whole = [row for row in rows if row["task"] == asked]
        for row in whole or [row for row in rows if row.get("asked", row["task"]) == asked]:
            metrics = [other["metric"] for other in rows if other["task"] == row["task"]]
            best = [name for name in ACCURACIES if name in metrics][:1] or metrics
            if row["metric"] in best:
                found[row["task"], row["metric"]] = row
    return found


def downstream_figure(results: Sequence[Result]) -> Any:
    """Accuracy by task, a bar for each model with the harness's standard error; None where there is no accuracy."""
    by_model = [accuracies(result) for result in results]
    places = list(dict.fromkeys(key for found in by_model for key in found))
    if not places:
        return None
    width = WIDTH / len(results)
    figure, grid = figure_of(max(6.4, 1.2 + 1.1 * len(places) * max(1.0, 0.35 * len(results))), 4.6)
    axes = grid[0, 0]
    for number, (result, found) in enumerate(zip(results, by_model, strict=True)):
        shown = [(place, found[key]) for place, key in enumerate(places) if key in found]
        axes.bar(
            [place + (number - (len(results) - 1) / 2) * width for place, _ in shown],
            [row["value"] for _, row in shown],
            0.92 * width,
            yerr=[row["standard_error"] or 0 for _, row in shown],
            label=result["model"]["name"],
            color=COLOURS[number % len(COLOURS)],
            hatch=HATCHES[number % len(HATCHES)],
            edgecolor="white",
            error_kw={"capsize": 3, "ecolor": "#333333"},
        )
    axes.set_xticks(range(len(places)), [f"{task}\n{metric}" for task, metric in places], fontsize="small")
    axes.set_ylim(0, 1)
    axes.set_ylabel("accuracy (± the standard error)")
    axes.set_title("Downstream tasks, by lm-evaluation-harness")
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
    axes.legend(frameon=False)
    return figure
