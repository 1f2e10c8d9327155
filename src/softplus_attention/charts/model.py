"""What a figure shows, once: the page draws it, matplotlib draws it, and its numbers are written as CSV."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

Number = float | None


@dataclass(frozen=True)
class Series:
    name: str
    x: Sequence[float]
    y: Sequence[Number]
    error: Sequence[Number] | None = None
    # Which colour and marker: one model has the same in every figure. The second round of colours is dashed, with marks
    # that are hollow. Of references, which dashes.
    look: int = 0
    dashed: bool = False
    reference: bool = False  # a line to compare with, not a measurement
    band: tuple[Sequence[Number], Sequence[Number]] | None = None  # the lower and the upper end


def columns_of(x_label: str, lines: Sequence[Series]) -> tuple[list[str], list[list[str]]]:
    """One row per x, one column per series."""
    places = sorted({x for series in lines for x in series.x})
    head = [x_label]
    columns: list[dict[float, Number]] = []
    for series in lines:
        named = {series.name: series.y}
        if series.error is not None:
            named[f"{series.name}: standard error"] = series.error
        if series.band is not None:
            named |= zip((f"{series.name}: 25%", f"{series.name}: 75%"), series.band, strict=True)
        head += named
        columns += [dict(zip(series.x, values, strict=True)) for values in named.values()]
    return head, [[shown(x), *(shown(column.get(x)) for column in columns)] for x in places]


@dataclass(frozen=True)
class LineChart:
    title: str
    x_label: str
    y_label: str
    series: Sequence[Series]
    caption: str = ""
    x_scale: str = "linear"  # or "log2"
    y_scale: str = "linear"  # or "log"
    times_of: float | None = None  # the length that is 1x
    y_range: tuple[Number, Number] = (None, None)
    baseline: Number = None  # a level to compare with, in sight always
    kind: str = field(default="lines", init=False)

    def table(self) -> tuple[list[str], list[list[str]]]:
        return columns_of(self.x_label, self.series)


@dataclass(frozen=True)
class BarChart:
    """A group of bars at each of ``places``; the x of a series are numbers of places."""

    title: str
    x_label: str
    y_label: str
    places: Sequence[str]
    series: Sequence[Series]
    caption: str = ""
    y_range: tuple[Number, Number] = (None, None)
    kind: str = field(default="bars", init=False)

    def table(self) -> tuple[list[str], list[list[str]]]:
        head, rows = columns_of(self.x_label, self.series)
        return head, [[self.places[int(row[0])].replace("\n", " "), *row[1:]] for row in rows]


@dataclass(frozen=True)
class HeatMap:
    title: str
    x_label: str
    y_label: str
    columns: Sequence[str]
    rows: Sequence[str]
    values: Sequence[Sequence[Number]]
    value_label: str
    low: float
    high: float
    caption: str = ""
    percent: bool = False
    kind: str = field(default="heat", init=False)

    def table(self) -> tuple[list[str], list[list[str]]]:
        head = [f"{self.y_label} / {self.x_label}", *self.columns]
        return head, [
            [name, *(shown(value) for value in row)] for name, row in zip(self.rows, self.values, strict=True)
        ]


@dataclass(frozen=True)
class AttentionMaps:
    """One model on one text: ``maps[(layer, head)]`` has r + 1 weights in row r."""

    title: str
    model: str
    text: str
    tokens: Sequence[str]
    tokens_per_cell: int
    maps: dict[tuple[int, int], Sequence[Sequence[float]]]
    caption: str = ""
    kind: str = field(default="maps", init=False)

    def table(self) -> tuple[list[str], list[list[str]]]:
        """The weights that are not zero."""
        head = ["layer", "head", "query", "key", "weight"]
        return head, [
            [str(layer), str(head_), str(query), str(key), shown(weight)]
            for (layer, head_), rows in self.maps.items()
            for query, row in enumerate(rows)
            for key, weight in enumerate(row)
            if weight
        ]


@dataclass(frozen=True)
class Table:
    title: str
    head: Sequence[str]
    body: Sequence[Sequence[str]]
    caption: str = ""

    def table(self) -> tuple[list[str], list[list[str]]]:
        return list(self.head), [list(row) for row in self.body]


Chart = LineChart | BarChart | HeatMap
Figure = Chart | AttentionMaps
Block = Figure | Table | str  # a string is a note for the reader


class SeriesStyles:
    """One colour and marker per model name, the same in every figure of the page."""

    def __init__(self) -> None:
        self.places: dict[str, int] = {}

    def of(self, name: str) -> int:
        return self.places.setdefault(name.lower(), len(self.places))


def shown(value: Number) -> str:
    """Four significant digits or more, whole numbers as they are, and nothing where there is no number."""
    if value is None:
        return ""
    if value == int(value) and abs(value) < 1e15:
        return str(int(value))
    return f"{value:.0f}" if 1e3 <= abs(value) < 1e15 else f"{value:.4g}"


def percent_words(share: Number) -> str:
    """Hundredths without the sign, of two significant digits where they are below 1: 0.036, not 0.0."""
    if share is None:
        return ""
    hundredths = 100 * share
    size = abs(hundredths)
    if size == 0 or size >= 9.95:
        return f"{hundredths:.0f}"
    if size >= 0.995:
        return f"{hundredths:.1f}"
    if size >= 1e-4:
        return f"{hundredths:.2g}"
    digits, _, power = f"{hundredths:.0e}".partition("e")
    return f"{digits}e{int(power)}"


def to_json(figure: Chart) -> dict[str, Any]:
    """What the page's script draws; it takes what is left out for None or false."""
    return {name: value for name, value in asdict(figure, dict_factory=without_defaults).items() if name != "caption"}


def without_defaults(items: list[tuple[str, Any]]) -> dict[str, Any]:
    return {name: value for name, value in items if value is not None and value is not False}


def slug(text: str) -> str:
    """Part of a file name, whatever the text was."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:60].strip("-") or "figure"
