"""The losses of training runs by step, from the log that lies beside each run's record."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from softplus_attention.charts.model import LineChart, Series, SeriesStyles
from softplus_attention.report.reading import Result, ResultSet, UnreadableError, mapping, number_of
from softplus_attention.report.sections import Block, checked
from softplus_attention.utils import untrusted
from softplus_attention.utils.results import LARGEST_FILE

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
        rows = untrusted.read_json_lines(path, LARGEST_FILE)
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
