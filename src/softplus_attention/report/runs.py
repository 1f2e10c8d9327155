"""Runs: the losses of training by step, the demo, and the record of every run."""

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
# By word of the log: title and axis.
FIGURES = {
    "loss": ("Training loss by step", "training loss (nats)"),
    "eval_loss": ("Validation loss by step", "validation loss (nats)"),
}
Logged = tuple[str, list[dict[str, Any]]]


def training_blocks(found: ResultSet, styles: SeriesStyles) -> list[Block]:
    runs: list[Logged] = checked(found, "training", lambda result: logged(result, found.folder))
    charts: list[Block] = []
    for word, (title, axis) in FIGURES.items():
        series = [line for name, rows in runs if (line := curve(name, rows, word, styles)) is not None]
        if series:
            caption = "At the training length, as it was logged; a step that was taken again counts once."
            charts.append(LineChart(title, "step", axis, series, caption))
    return charts


def logged(result: Result, folder: Path) -> Logged:
    """A run's name, and the rows of its log; none where it has no log yet."""
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
        raise UnreadableError(f"{LOG} must hold a JSON object in each line")
    return name, rows


def curve(name: str, rows: list[dict[str, Any]], word: str, styles: SeriesStyles) -> Series | None:
    """The last word on every step: a run that was cut repeats some."""
    points: dict[float, float | None] = {}
    for row in rows:
        if word in row and (step := number_of(row, "step")) is not None:
            points[step] = number_of(row, word)
    steps = sorted(points)
    return Series(name, steps, [points[step] for step in steps], None, styles.of(name)) if steps else None


DEMO_CAPTION = (
    "Models that differ in their attention alone, on the same works cut to longer and longer pieces{}. A flat line "
    "does not show by itself that the long context is used: the same tokens would have to be harder without it. In the "
    "study's models of 30M to 354M parameters softmax with QK-norm and log N had the lower loss."
)


def demo_blocks(found: ResultSet, styles: SeriesStyles) -> list[Block]:
    return list(checked(found, "demo", lambda r: demo_chart(r.data, f"Demo: loss by length ({r.path})", styles)))


def demo_members(found: ResultSet) -> list[LoadedResult]:
    """As results of `evaluate lengths`, for the table of models."""
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
    places = [length for length in lengths if length is not None]
    losses = mapping(data, "loss")
    series = []
    for name in losses:
        values = numbers_of(losses, name)
        if len(values) != len(places):
            raise UnreadableError(f"`loss` of {name} must have a number for each length")
        series.append(Series(name, places, values, None, styles.of(name)))
    texts = f" ({data['texts']} texts from {data.get('documents')} works)" if data.get("texts") else ""
    return LineChart(
        title,
        "length (bytes)",
        "validation loss (nats)",
        series,
        DEMO_CAPTION.format(texts),
        x_scale="log2",
        times_of=places[0],
    )


class RunRecord(NamedTuple):
    kind: str
    title: str
    line: str
    settings: dict[str, str]  # all of it that is not measurements


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
    words = [str(command)] if command else []
    if data.get("complete") is False or data.get("finished") is False:
        words.append("not finished")
    kept = {key: value for key, value in data.items() if key not in MEASUREMENTS and not is_table(value)}
    if is_table(starts):
        kept["starts"] = starts
    return RunRecord(result.kind, f"{name} ({result.path})", "; ".join(words), flat(kept))


def flat(data: Any, before: str = "") -> dict[str, str]:
    """Every value by the way to it; lists as they are."""
    if not isinstance(data, dict) or not data:
        return {before: data if isinstance(data, str) else json.dumps(data, ensure_ascii=False)}
    found: dict[str, str] = {}
    for name, value in data.items():
        found |= flat(value, f"{before}.{name}" if before else name)
    return found


MEASUREMENTS = {
    "results", "loss", "standard_error", "rows", "table", "cells", "controls", "pretraining", "probes", "long",
    "figures", "time", "memory", "evaluation", "training", "losses", "gradient_norms", "methods",
}  # fmt: skip
