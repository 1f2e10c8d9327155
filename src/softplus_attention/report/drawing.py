"""The figures of a report by matplotlib: the same as in the page, for papers and slides."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from softplus_attention.figures import COLOURS, MARKERS, STYLES, save
from softplus_attention.report.charts import AttentionMaps, Figure, HeatMap, LineChart, percent_words

# Names come from files: a dollar sign in them is no mathematics.
PLAIN_TEXT: Any = {"text.parse_math": False, "text.usetex": False}
LONGEST_NAME = 60
MOST_MAPS = 24 * 24
REFERENCES: Any = (":", "-.", (0, (6, 2)), (0, (1, 4)))


def draw(figure: Figure, path: Path) -> list[Path]:
    """``path`` with .png and .svg."""
    import matplotlib

    with matplotlib.rc_context(PLAIN_TEXT), warnings.catch_warnings():
        # Scripts that matplotlib's own font lacks come out as boxes.
        warnings.filterwarnings("ignore", message="Glyph")
        if isinstance(figure, LineChart):
            canvas = lines(figure)
        else:
            canvas = heat(figure) if isinstance(figure, HeatMap) else maps(figure)
        # Laid out once for both files: it costs as much as drawing.
        canvas.get_layout_engine().execute(canvas)
        canvas.set_layout_engine("none")
        return save(canvas, path)


def label(name: str) -> str:
    """matplotlib leaves names that begin with an underscore out of its legend."""
    cut = name if len(name) <= LONGEST_NAME else name[: LONGEST_NAME - 1] + "…"
    return " " + cut if cut.startswith("_") else cut


def lines(chart: LineChart) -> Any:
    from matplotlib.figure import Figure as Canvas
    from matplotlib.ticker import FuncFormatter, NullFormatter

    canvas = Canvas(figsize=(7.2, 4.4), layout="constrained")
    axes = canvas.subplots()
    for series in chart.series:
        there = [(place, value) for place, value in enumerate(series.y) if value is not None]
        x, y = [series.x[place] for place, _ in there], [value for _, value in there]
        bars = None if series.error is None else [max(series.error[place] or 0.0, 0.0) for place, _ in there]
        if series.reference:
            style = REFERENCES[series.look % len(REFERENCES)]
            axes.plot(x, y, label=label(series.name), color="#777777", linestyle=style, linewidth=1.5)
            continue
        look = series.look
        axes.errorbar(
            x,
            y,
            yerr=bars,
            label=label(series.name),
            color=COLOURS[look % len(COLOURS)],
            linestyle="--" if series.dashed else STYLES[look % len(STYLES)],
            marker=MARKERS[look % len(MARKERS)],
            markerfacecolor="none" if series.dashed else None,
            linewidth=2,
            capsize=3,
        )
    places = sorted({x for series in chart.series for x in series.x})
    if chart.x_scale == "log2" and places:
        axes.set_xscale("log", base=2)
        ticks = thinned(places, 9)
        base = chart.times_of
        axes.set_xticks(ticks, [f"{x:g}\n{x / base:g}x" if base else f"{x:g}" for x in ticks])
        axes.minorticks_off()
    elif places and all(x == int(x) for x in places):
        axes.set_xticks(thinned(places, 13))
    if chart.y_scale == "log":
        axes.set_yscale("log")
        # The usual labels are written in mathematics, which is not read here: names may hold a dollar.
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
    bottom, top = chart.y_range
    if bottom is not None:
        axes.set_ylim(bottom=bottom - 0.02 * ((top or axes.get_ylim()[1]) - bottom))
    if top is not None:
        axes.set_ylim(top=top * 1.02)
    axes.set_xlabel(chart.x_label)
    axes.set_ylabel(chart.y_label)
    axes.set_title(label(chart.title))
    axes.grid(alpha=0.3)
    if chart.series:
        axes.legend(frameon=False, fontsize=8)
    return canvas


def thinned(places: Sequence[float], most: int) -> list[float]:
    step = -(-len(places) // most)
    return list(places[::step])


def heat(chart: HeatMap) -> Any:
    from matplotlib.figure import Figure as Canvas

    rows, columns = len(chart.rows), len(chart.columns)
    canvas = Canvas(figsize=(max(4.0, 1.6 + 0.62 * columns), max(2.4, 1.2 + 0.38 * rows)), layout="constrained")
    axes = canvas.subplots()
    values = [[float("nan") if value is None else value for value in row] for row in chart.values]
    image = axes.imshow(values, cmap="cividis", vmin=chart.low, vmax=chart.high, aspect="auto")
    for r, row in enumerate(chart.values):
        for c, value in enumerate(row):
            words = cell_words(value, chart.percent)
            dark = value is not None and (value - chart.low) / ((chart.high - chart.low) or 1) < 0.5
            if columns <= 24:
                axes.text(c, r, words, ha="center", va="center", fontsize=8, color="white" if dark else "black")
    axes.set_xticks(range(columns), chart.columns, fontsize=8)
    axes.set_yticks(range(rows), chart.rows, fontsize=8)
    axes.set_xlabel(chart.x_label)
    axes.set_ylabel(chart.y_label)
    axes.set_title(label(chart.title), fontsize=10)
    scale = canvas.colorbar(image, ax=axes, label=chart.value_label)
    ends = [chart.low, (chart.low + chart.high) / 2, chart.high]
    scale.set_ticks(ends, labels=[f"{percent_words(end)}%" if chart.percent else f"{end:.2g}" for end in ends])
    return canvas


def cell_words(value: float | None, percent: bool) -> str:
    if value is None:
        return "-"
    if percent:
        return percent_words(value)
    return f"{value:.2g}"


def maps(chart: AttentionMaps) -> Any:
    """All heads of a model, a row of pictures per layer; each is scaled to its largest weight."""
    import numpy
    from matplotlib.figure import Figure as Canvas

    chosen = sorted(chart.maps)[:MOST_MAPS]
    layers, heads = sorted({layer for layer, _ in chosen}), sorted({head for _, head in chosen})
    size = 1.7 if len(layers) * len(heads) <= 64 else 0.9
    canvas = Canvas(figsize=(1 + size * len(heads), 0.8 + size * len(layers)), layout="constrained")
    axes = canvas.subplots(len(layers), len(heads), squeeze=False)
    for row, layer in enumerate(layers):
        for column, head in enumerate(heads):
            axis = axes[row, column]
            axis.set_xticks([])
            axis.set_yticks([])
            if column == 0:
                axis.set_ylabel(f"layer {layer}", fontsize=8)
            if row == 0:
                axis.set_title(f"head {head}", fontsize=8)
            if (layer, head) not in chart.maps:
                axis.set_visible(False)
                continue
            weights = chart.maps[layer, head]
            square = numpy.full((len(weights), len(weights)), numpy.nan)
            for place, line in enumerate(weights):
                square[place, : len(line)] = line
            square[square == 0] = numpy.nan
            axis.imshow(square, cmap="Blues", vmin=0, interpolation="nearest")
    canvas.suptitle(label(chart.title), fontsize=10)
    return canvas
