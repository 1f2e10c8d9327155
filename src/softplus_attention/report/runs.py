"""Training losses by step, the demo, and the settings of every run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from softplus_attention.charts.model import LineChart, Series, SeriesStyles
from softplus_attention.evaluation.measures.loaded import LoadedResult
from softplus_attention.report.discovery import Result, ResultSet, is_table
from softplus_attention.report.sections import Block, checked
from softplus_attention.utils import untrusted
from softplus_attention.utils.results import MAX_FILE_BYTES
from softplus_attention.utils.untrusted import UnreadableError, mapping, number_of, numbers_of

LOG = "metrics.jsonl"
# Title and axis by key of the log.
FIGURES = {
    "loss": ("Training loss by step", "training loss (nats)"),
    "eval_loss": ("Validation loss by step", "validation loss (nats)"),
}
Logged = tuple[str, list[dict[str, Any]]]


def training_blocks(found: ResultSet, styles: SeriesStyles) -> list[Block]:
    runs: list[Logged] = checked(found, "training", lambda result: read_log(result, found.folder))
    charts: list[Block] = []
    for key, (title, axis) in FIGURES.items():
        series = [line for name, rows in runs if (line := curve(name, rows, key, styles)) is not None]
        if series:
            caption = "At the training length, as logged; of repeated steps the last one counts."
            charts.append(LineChart(title, "step", axis, series, caption))
    return charts


def read_log(result: Result, folder: Path) -> Logged:
    """The run's name and the rows of its log, which are empty without a log."""
    attention = str(mapping(result.data, "config").get("attention"))
    place = Path(result.path).parent
    name = attention if str(place) == "." else f"{place} ({attention})"
    path = folder / place / LOG
    if not path.exists():
        return name, []
    try:
        rows = untrusted.read_json_lines(path, MAX_FILE_BYTES)
    except untrusted.UntrustedFileError as error:
        raise UnreadableError(f"{LOG}: {error.reason}") from None
    except OSError as error:
        raise UnreadableError(f"{LOG}: {error.strerror}") from None
    if not all(isinstance(row, dict) for row in rows):
        raise UnreadableError(f"{LOG} must have one JSON object per line")
    return name, rows


def curve(name: str, rows: list[dict[str, Any]], key: str, styles: SeriesStyles) -> Series | None:
    """The last value of every step: a resumed run repeats some steps."""
    points: dict[float, float | None] = {}
    for row in rows:
        if key in row and (step := number_of(row, "step")) is not None:
            points[step] = number_of(row, key)
    steps = sorted(points)
    return Series(name, steps, [points[step] for step in steps], None, styles.of(name)) if steps else None


DEMO_CAPTION = (
    "Models that differ only in their attention, on the same works cut to increasing lengths{}. A flat line alone does "
    "not show that the long context is used; that takes a higher loss on the same tokens without it. In the study's "
    "models of 30M to 354M parameters, softmax with QK-norm and log N had the lower loss."
)


def demo_blocks(found: ResultSet, styles: SeriesStyles) -> list[Block]:
    return list(checked(found, "demo", lambda r: demo_chart(r.data, f"Demo: loss by length ({r.path})", styles)))


def demo_members(found: ResultSet) -> list[LoadedResult]:
    """The demo's models as results of `evaluate lengths`, for the table of models."""
    members = []
    for result in found.of("demo"):
        lengths, losses = numbers_of(result.data, "lengths"), mapping(result.data, "loss")
        settings = result.data["settings"] if isinstance(result.data["settings"], dict) else {}
        arms = settings["arms"] if isinstance(settings.get("arms"), dict) else {}
        for name in losses:
            rows = [{"length": n, "loss": loss} for n, loss in zip(lengths, losses[name], strict=True)]
            model = {"attention": arms[name].get("attention")} if isinstance(arms.get(name), dict) else {}
            members.append(LoadedResult(name, lengths[0], True, {}, {}, rows, model=model))
    return members


def demo_chart(data: dict[str, Any], title: str, styles: SeriesStyles) -> LineChart:
    lengths = numbers_of(data, "lengths")
    if not lengths or any(length is None or length <= 0 for length in lengths):
        raise UnreadableError("`lengths` must be numbers above 0")
    x_values = [length for length in lengths if length is not None]
    losses = mapping(data, "loss")
    series = []
    for name in losses:
        values = numbers_of(losses, name)
        if len(values) != len(x_values):
            raise UnreadableError(f"`loss` of {name} must have one number per length")
        series.append(Series(name, x_values, values, None, styles.of(name)))
    texts = f" ({data['texts']} texts from {data.get('documents')} works)" if data.get("texts") else ""
    return LineChart(
        title,
        "length (bytes)",
        "validation loss (nats)",
        series,
        DEMO_CAPTION.format(texts),
        x_scale="log2",
        times_of=x_values[0],
    )


class RunRecord(NamedTuple):
    kind: str
    title: str
    line: str
    settings: dict[str, str]  # everything except measurements


def run_records(found: ResultSet) -> list[RunRecord]:
    return [run_record(result) for result in found.results]


def run_record(result: Result) -> RunRecord:
    data = result.data
    model = data.get("model")
    name = f"{model.get('name')}: {result.kind}" if isinstance(model, dict) else result.kind
    made = data.get("made") if isinstance(data.get("made"), dict) else data
    assert made is not None
    starts = data.get("starts")
    command = starts[-1].get("command") if starts and is_table(starts) else made.get("command")
    parts = [str(command)] if command else []
    if data.get("complete") is False or data.get("finished") is False:
        parts.append("not finished")
    kept = {key: value for key, value in data.items() if key not in MEASUREMENTS and not is_table(value)}
    if is_table(starts):
        kept["starts"] = starts
    return RunRecord(result.kind, f"{name} ({result.path})", "; ".join(parts), flatten(kept))


def flatten(data: Any, prefix: str = "") -> dict[str, str]:
    """Every value by its path, such as "config.layers"; lists stay whole."""
    if not isinstance(data, dict) or not data:
        return {prefix: data if isinstance(data, str) else json.dumps(data, ensure_ascii=False)}
    found: dict[str, str] = {}
    for name, value in data.items():
        found |= flatten(value, f"{prefix}.{name}" if prefix else name)
    return found


MEASUREMENTS = {
    "results", "loss", "standard_error", "rows", "table", "cells", "controls", "pretraining", "probes", "long",
    "figures", "time", "memory", "evaluation", "training", "losses", "gradient_norms", "methods",
}  # fmt: skip
