"""What a figure shows, once: the page draws it, matplotlib draws it, and its numbers are written as CSV."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

Number = float | None
Cell = str | Number | tuple[Number, Number]  # a pair is a value and its standard error
Rows = Sequence[Sequence[Cell]]


MAX_DECIMALS = 6
WIDEST_RANGE = 1e5  # of a column: beyond it each number has digits of its own


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


def chart_columns(x_label: str, lines: Sequence[Series]) -> tuple[list[str], list[list[Cell]]]:
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
    return head, [[x, *(column.get(x) for column in columns)] for x in places]


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

    def table(self) -> tuple[list[str], Rows]:
        return chart_columns(self.x_label, self.series)


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

    def table(self) -> tuple[list[str], Rows]:
        rows = chart_columns("", self.series)[1]
        names = [self.places[place].replace("\n", " ") for place in sorted({int(x) for s in self.series for x in s.x})]
        head = [self.x_label, *chart_columns("", self.series)[0][1:]]
        return head, [[name, *row[1:]] for name, row in zip(names, rows, strict=True)]


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

    def table(self) -> tuple[list[str], Rows]:
        head = [f"{self.y_label} / {self.x_label}", *self.columns]
        return head, [[name, *row] for name, row in zip(self.rows, self.values, strict=True)]


@dataclass(frozen=True)
class HeatMaps:
    """Several side by side on one scale: by model, or by run."""

    title: str
    maps: Sequence[tuple[str, HeatMap]]  # each with what it is of
    caption: str = ""
    kind: str = field(default="heats", init=False)

    def table(self) -> tuple[list[str], Rows]:
        head = ["", *self.maps[0][1].table()[0]]
        return head, [[name, *row] for name, one in self.maps for row in one.table()[1]]


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

    def table(self) -> tuple[list[str], Rows]:
        """The weights that are not zero."""
        head = ["layer", "head", "query", "key", "weight"]
        return head, [
            [layer, head_, query, key, weight]
            for (layer, head_), rows in self.maps.items()
            for query, row in enumerate(rows)
            for key, weight in enumerate(row)
            if weight
        ]


@dataclass(frozen=True)
class Table:
    title: str
    head: Sequence[str]
    body: Rows
    caption: str = ""

    def table(self) -> tuple[list[str], Rows]:
        return list(self.head), self.body


Chart = LineChart | BarChart | HeatMap
Figure = Chart | HeatMaps | AttentionMaps
Block = Figure | Table | str  # a string is a note for the reader


class SeriesStyles:
    """One colour and marker per model name, the same in every figure of the page."""

    def __init__(self) -> None:
        self.places: dict[str, int] = {}

    def of(self, name: str) -> int:
        return self.places.setdefault(name.lower(), len(self.places))


def text_rows(rows: Rows) -> list[list[str]]:
    """Each cell with the digits that it has, for a file."""
    return [[cell_text(cell) for cell in row] for row in rows]


def cell_text(cell: Cell) -> str:
    if isinstance(cell, tuple):
        return shown(cell[0]) + (f" ± {shown(cell[1])}" if cell[1] is not None else "")
    return cell if isinstance(cell, str) else shown(cell)


def aligned_rows(rows: Rows) -> list[list[str]]:
    """As many decimals in all of a column, for the eye."""
    columns = [aligned_column(column) for column in zip(*rows, strict=True)]
    return [list(row) for row in zip(*columns, strict=True)]


def aligned_column(cells: Sequence[Cell]) -> list[str]:
    numbers = [part for c in cells if not isinstance(c, str) for part in (c if isinstance(c, tuple) else (c,))]
    sizes = [abs(part) for part in numbers if part]
    if all(size == int(size) for size in sizes) or max(sizes) > WIDEST_RANGE * min(sizes):
        return [cell_text(cell) for cell in cells]
    # Four digits of the largest number, or one of the smallest standard error.
    errors = [abs(cell[1]) for cell in cells if isinstance(cell, tuple) and cell[1]]
    decimals = -floor_log10(min(errors)) if errors else 3 - floor_log10(max(sizes))
    return [fixed_cell(cell, min(max(decimals, 0), MAX_DECIMALS)) for cell in cells]


def floor_log10(size: float) -> int:
    return int(f"{size:e}".partition("e")[2])


def fixed_cell(cell: Cell, decimals: int) -> str:
    if cell is None or isinstance(cell, str):
        return cell or ""
    if isinstance(cell, tuple):
        return " ± ".join(fixed_cell(part, decimals) for part in cell if part is not None)
    return f"{cell:.{decimals}f}"


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
