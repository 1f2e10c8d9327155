"""Chart data, shared by the report page, matplotlib and the CSV files."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

Number = float | None
Cell = str | Number | tuple[Number, Number]  # a pair: value and standard error
Rows = Sequence[Sequence[Cell]]


MAX_DECIMALS = 6
WIDEST_RANGE = 1e5  # max / min of a column; beyond it numbers are not aligned


@dataclass(frozen=True)
class Series:
    name: str
    x: Sequence[float]
    y: Sequence[Number]
    error: Sequence[Number] | None = None
    # Index of colour and marker, the same for a model in every figure; of references, of the dash pattern. Indices
    # beyond the palette are dashed with hollow markers.
    look: int = 0
    dashed: bool = False
    reference: bool = False  # a line to compare with, not a measurement
    band: tuple[Sequence[Number], Sequence[Number]] | None = None  # lower and upper bounds


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
    times_of: float | None = None  # the length labelled 1x
    y_range: tuple[Number, Number] = (None, None)
    baseline: Number = None  # a horizontal reference line, always in view
    kind: str = field(default="lines", init=False)

    def table(self) -> tuple[list[str], Rows]:
        return chart_columns(self.x_label, self.series)


@dataclass(frozen=True)
class BarChart:
    """A group of bars at each of ``places``; the x of a series are indices into them."""

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
    """Several heat maps on one scale, for example one per model or run."""

    title: str
    maps: Sequence[tuple[str, HeatMap]]  # (name, map)
    caption: str = ""
    kind: str = field(default="heats", init=False)

    def table(self) -> tuple[list[str], Rows]:
        head = ["", *self.maps[0][1].table()[0]]
        return head, [[name, *row] for name, one in self.maps for row in one.table()[1]]


@dataclass(frozen=True)
class AttentionMaps:
    """Attention maps of one model on one text: row r of ``maps[(layer, head)]`` has r + 1 weights."""

    title: str
    model: str
    text: str
    tokens: Sequence[str]
    tokens_per_cell: int
    maps: dict[tuple[int, int], Sequence[Sequence[float]]]
    caption: str = ""
    kind: str = field(default="maps", init=False)

    def table(self) -> tuple[list[str], Rows]:
        """The nonzero weights."""
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
Block = Figure | Table | str  # a string is a note


class SeriesStyles:
    """Assigns one colour and marker to each model name, for all figures of a page."""

    def __init__(self) -> None:
        self.places: dict[str, int] = {}

    def of(self, name: str) -> int:
        return self.places.setdefault(name.lower(), len(self.places))


def text_rows(rows: Rows) -> list[list[str]]:
    """Cells as text with their own digits, for CSV files."""
    return [[cell_text(cell) for cell in row] for row in rows]


def cell_text(cell: Cell) -> str:
    if isinstance(cell, tuple):
        return shown(cell[0]) + (f" ± {shown(cell[1])}" if cell[1] is not None else "")
    return cell if isinstance(cell, str) else shown(cell)


def aligned_rows(rows: Rows) -> list[list[str]]:
    """Cells as text with the same number of decimals in each column, for display."""
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
    """At least four significant digits; integers in full; "" for None."""
    if value is None:
        return ""
    if value == int(value) and abs(value) < 1e15:
        return str(int(value))
    return f"{value:.0f}" if 1e3 <= abs(value) < 1e15 else f"{value:.4g}"


def percent_words(share: Number) -> str:
    """Percent without the sign, with two significant digits below 1: 0.036, not 0.0."""
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
    """The figure as JSON for the page's script, which reads missing fields as None or false."""
    return {name: value for name, value in asdict(figure, dict_factory=without_defaults).items() if name != "caption"}


def without_defaults(items: list[tuple[str, Any]]) -> dict[str, Any]:
    return {name: value for name, value in items if value is not None and value is not False}


def slug(text: str) -> str:
    """``text`` as part of a file name."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:60].strip("-") or "figure"
