"""Draws charts with matplotlib as PNG and SVG, in a colour-blind-safe palette."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from softplus_attention.charts.model import (
    AttentionMaps,
    BarChart,
    Figure,
    HeatMap,
    HeatMaps,
    LineChart,
    Series,
    percent_words,
)
from softplus_attention.utils.files import replacing

# Okabe and Ito's palette, with a line style for each; curves take them in order.
COLOURS = ("#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999999")
STYLES = ("-", "--", "-", "-.", ":", "--", "-.", ":")
MARKERS = ("o", "s", "D", "^", "v", "P", "X", "*")
HATCHES = ("", "//", "..", "\\\\", "xx", "--", "++", "oo")
REFERENCES: Any = (":", "-.", (0, (6, 2)), (0, (1, 4)))
# Names come from files, so a dollar sign is not math mode.
PLAIN_TEXT: Any = {"text.parse_math": False, "text.usetex": False}
LONGEST_NAME = 60
MAX_MAPS = 24 * 24
# matplotlib limits images to 65,536 pixels a side.
MAX_INCHES = 400.0
DPI = 160
SVG_DPI = 72
LEGEND_INSIDE = 8  # series; longer legends go outside the axes
HEAT_COLUMNS = 4


FORMATS = ("png", "svg")


def draw(
    figures: Figure | Sequence[Figure], path: Path, columns: int = 3, formats: Sequence[str] = FORMATS
) -> list[Path]:
    """Writes ``path`` as .png and .svg; several figures become panels of one picture."""
    import matplotlib

    with matplotlib.rc_context(PLAIN_TEXT), warnings.catch_warnings():
        # Glyphs missing in matplotlib's font are drawn as boxes.
        warnings.filterwarnings("ignore", message="Glyph")
        canvas = picture(figures if isinstance(figures, Sequence) else [figures], columns)
        if (engine := canvas.get_layout_engine()) is not None:
            # One layout for both files: it takes as long as drawing.
            engine.execute(canvas)
            canvas.set_layout_engine("none")
        return save(canvas, path, formats)


def save(canvas: Any, path: Path, formats: Sequence[str] = FORMATS) -> list[Path]:
    """Writes ``path`` as .png and .svg, drawing each once; ``savefig`` would draw twice."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    paths = {name: path.with_suffix(f".{name}") for name in formats}
    # Reproducible files: no date, no random ids.
    with matplotlib.rc_context({"svg.hashsalt": "softplus-attention", "svg.fonttype": "none"}):
        if "png" in paths:
            with replacing(paths["png"]) as file:
                canvas.set_dpi(DPI)
                FigureCanvasAgg(canvas).print_png(file)
        if "svg" in paths:
            with replacing(paths["svg"]) as file:
                canvas.set_dpi(SVG_DPI)
                FigureCanvasSVG(canvas).print_svg(file, metadata={"Date": None})
    return list(paths.values())


def picture(figures: Sequence[Figure], columns: int = 3) -> Any:
    """A matplotlib figure with a panel for each figure, in rows."""
    from matplotlib.figure import Figure as Canvas

    columns = 2 if len(figures) == 4 else min(columns, len(figures))
    sizes = [figure_size(figure) for figure in figures]
    widths = [max(width for width, _ in sizes[column::columns]) for column in range(columns)]
    heights = [max(height for _, height in sizes[row : row + columns]) for row in range(0, len(sizes), columns)]
    size = (min(sum(widths), MAX_INCHES), min(sum(heights), MAX_INCHES))
    # Known margins avoid constrained layout, which takes a third of the time.
    known = margins(figures[0]) if len(figures) == 1 and isinstance(figures[0], LineChart | HeatMaps) else None
    canvas = Canvas(figsize=size, layout="constrained" if known is None else None)
    if len(figures) == 1:
        panels = [canvas]
        if known is not None:
            left, right, bottom, top = known
            canvas.subplots_adjust(left / size[0], bottom / size[1], 1 - right / size[0], 1 - top / size[1], 0.3, 0.75)
    else:
        grid = canvas.subfigures(len(heights), columns, squeeze=False, width_ratios=widths, height_ratios=heights)
        panels = list(grid.flat)
    for figure, panel in zip(figures, panels, strict=False):
        if isinstance(figure, LineChart):
            draw_lines(figure, panel)
        elif isinstance(figure, BarChart):
            draw_bars(figure, panel)
        elif isinstance(figure, HeatMap):
            draw_heat_map(panel.subplots(), figure, panel)
        elif isinstance(figure, HeatMaps):
            draw_heat_maps(figure, panel)
        else:
            draw_attention_maps(figure, panel)
    if len({figure.text for figure in figures if isinstance(figure, AttentionMaps)}) > 1:
        canvas.suptitle("the texts are NOT the same")
    return canvas


def figure_size(figure: Figure) -> tuple[float, float]:
    """Width and height in inches."""
    if isinstance(figure, LineChart):
        names = [len(label(series.name)) for series in figure.series]
        is_long = len(names) > LEGEND_INSIDE
        return 7.2 + is_long * 0.09 * max(names, default=0), max(4.4, is_long * 0.17 * len(names))
    if isinstance(figure, BarChart):
        return max(6.4, 1.2 + 1.1 * len(figure.places) * max(1.0, 0.35 * len(figure.series))), 4.6
    if isinstance(figure, HeatMap):
        return max(4.0, 1.6 + 0.62 * len(figure.columns)), max(2.4, 1.2 + 0.38 * len(figure.rows))
    if isinstance(figure, HeatMaps):
        sizes = [figure_size(one) for _, one in figure.maps]
        columns = min(HEAT_COLUMNS, len(sizes))
        return columns * max(w for w, _ in sizes), -(-len(sizes) // columns) * max(h for _, h in sizes) + 0.4
    layers, heads = layers_and_heads(figure)
    size = 1.7 if len(layers) * len(heads) <= 64 else 0.9
    return 1 + size * len(heads), 0.8 + size * len(layers)


def margins(figure: LineChart | HeatMaps) -> tuple[float, float, float, float]:
    """Left, right, bottom and top margins in inches, for labels, legend and colour bar."""
    if isinstance(figure, HeatMaps):
        return 0.6 + 0.07 * max(len(name) for _, one in figure.maps for name in one.rows), 1.1, 0.75, 0.75
    return 0.85, figure_size(figure)[0] - 7.2 + 0.15, 0.75, 0.4


def label(name: str) -> str:
    """Shortens a name, and puts a space before a leading underscore, which matplotlib would leave out of the legend."""
    cut = name if len(name) <= LONGEST_NAME else name[: LONGEST_NAME - 1] + "…"
    return " " + cut if cut.startswith("_") else cut


def draw_lines(chart: LineChart, canvas: Any) -> None:
    from matplotlib.ticker import FuncFormatter, NullFormatter

    axes = canvas.subplots()
    for series in chart.series:
        draw_series(axes, series)
    places = sorted({x for series in chart.series for x in series.x})
    if chart.x_scale == "log2" and places:
        axes.set_xscale("log", base=2)
        ticks = thinned(places, 9)
        base = chart.times_of
        axes.set_xticks(ticks, [f"{x:g}\n{x / base:.4g}x" if base else f"{x:g}" for x in ticks])
        axes.minorticks_off()
        if base and places[0] <= base <= places[-1]:
            axes.axvline(base, color="#888888", alpha=0.4, linewidth=6, zorder=0)
    elif places and all(x == int(x) for x in places):
        axes.set_xticks(thinned(places, 13))
    if chart.baseline is not None:
        axes.axhline(chart.baseline, color="#888888", linewidth=1, zorder=0)
    if chart.y_scale == "log":
        axes.set_yscale("log")
        # The default labels use math mode, which is off (PLAIN_TEXT).
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
    bottom, top = chart.y_range
    if bottom is not None:
        axes.set_ylim(bottom=bottom - 0.02 * ((top or axes.get_ylim()[1]) - bottom))
    if top is not None:
        axes.set_ylim(top=top * 1.02)
    axes.set_xlabel(chart.x_label)
    axes.set_ylabel(chart.y_label)
    axes.set_title(label(chart.title), y=1.0)
    axes.grid(alpha=0.3)
    if len(chart.series) > LEGEND_INSIDE:
        axes.legend(frameon=False, fontsize=7, loc="upper left", bbox_to_anchor=(1.01, 1.0))
    elif chart.series:
        axes.legend(frameon=False, fontsize=8)


def draw_series(axes: Any, series: Series) -> None:
    present = [(place, value) for place, value in enumerate(series.y) if value is not None]
    x, y = [series.x[place] for place, _ in present], [value for _, value in present]
    if series.reference:
        style = REFERENCES[series.look % len(REFERENCES)]
        axes.plot(x, y, label=label(series.name), color="#777777", linestyle=style, linewidth=1.5)
        return
    colour = COLOURS[series.look % len(COLOURS)]
    dashed = series.dashed or series.look // len(COLOURS) % 2 == 1
    errors = None if series.error is None else [max(series.error[place] or 0.0, 0.0) for place, _ in present]
    axes.errorbar(
        x,
        y,
        yerr=errors,
        label=label(series.name),
        color=colour,
        linestyle="--" if dashed else STYLES[series.look % len(STYLES)],
        marker=MARKERS[series.look % len(MARKERS)],
        markerfacecolor="none" if dashed else None,
        linewidth=2,
        capsize=3,
    )
    if series.band is not None:
        low, high = ([float("nan") if value is None else value for value in end] for end in series.band)
        axes.fill_between(series.x, low, high, color=colour, alpha=0.12, linewidth=0)


def thinned(places: Sequence[float], most: int) -> list[float]:
    step = -(-len(places) // most)
    return list(places[::step])


def draw_bars(chart: BarChart, canvas: Any) -> None:
    axes = canvas.subplots()
    width = 0.8 / max(1, len(chart.series))
    for number, series in enumerate(chart.series):
        present = [(x, place) for place, x in enumerate(series.x) if series.y[place] is not None]
        errors = None if series.error is None else [series.error[place] or 0 for _, place in present]
        axes.bar(
            [x + (number - (len(chart.series) - 1) / 2) * width for x, _ in present],
            [series.y[place] for _, place in present],
            0.92 * width,
            yerr=errors,
            label=label(series.name),
            color=COLOURS[series.look % len(COLOURS)],
            hatch=HATCHES[series.look % len(HATCHES)],
            edgecolor="white",
            error_kw={"capsize": 3, "ecolor": "#333333"},
        )
    axes.set_xticks(range(len(chart.places)), [label(place) for place in chart.places], fontsize="small")
    axes.set_ylim(*chart.y_range)
    axes.set_xlabel(chart.x_label)
    axes.set_ylabel(chart.y_label)
    axes.set_title(label(chart.title), y=1.0)
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
    axes.legend(frameon=False, fontsize=8)


def draw_heat_maps(chart: HeatMaps, canvas: Any) -> None:
    columns = min(HEAT_COLUMNS, len(chart.maps))
    rows = -(-len(chart.maps) // columns)
    panels = canvas.subplots(rows, columns, squeeze=False)
    for place, axes in enumerate(panels.flat):
        if place >= len(chart.maps):
            axes.set_visible(False)
            continue
        is_last = place == len(chart.maps) - 1
        draw_heat_map(axes, chart.maps[place][1], canvas if is_last else None, panels)
    canvas.suptitle(label(chart.title), fontsize=10)


def draw_heat_map(axes: Any, chart: HeatMap, canvas: Any, panels: Any = None) -> None:
    """Draws a heat map; ``canvas`` gets the colour bar, shared by all ``panels`` if given."""
    values = [[float("nan") if value is None else value for value in row] for row in chart.values]
    image = axes.imshow(values, cmap="cividis", vmin=chart.low, vmax=chart.high, aspect="auto")
    for r, row in enumerate(chart.values):
        for c, value in enumerate(row):
            text = format_cell(value, chart.percent)
            dark = value is not None and (value - chart.low) / ((chart.high - chart.low) or 1) < 0.5
            if len(chart.columns) <= 24:
                axes.text(c, r, text, ha="center", va="center", fontsize=8, color="white" if dark else "black")
    axes.set_xticks(range(len(chart.columns)), chart.columns, fontsize=8)
    axes.set_yticks(range(len(chart.rows)), chart.rows, fontsize=8)
    axes.set_xlabel(chart.x_label)
    axes.set_ylabel(chart.y_label)
    axes.set_title(label(chart.title), y=1.0, fontsize=10)
    if canvas is None:
        return
    if canvas.get_layout_engine() is not None or panels is None:
        scale = canvas.colorbar(image, ax=axes if panels is None else list(panels.flat), label=chart.value_label)
    else:
        right, width = panels[0, -1].get_position().x1, canvas.bbox.width / canvas.get_figure(root=True).dpi
        place = canvas.add_axes((right + 0.15 / width, 0.25, 0.12 / width, 0.5))
        scale = canvas.colorbar(image, cax=place, label=chart.value_label)
    ends = [chart.low, (chart.low + chart.high) / 2, chart.high]
    scale.set_ticks(ends, labels=[f"{percent_words(end)}%" if chart.percent else f"{end:.2g}" for end in ends])


def format_cell(value: float | None, percent: bool) -> str:
    if value is None:
        return "-"
    if percent:
        return percent_words(value)
    return f"{value:.2g}"


def layers_and_heads(chart: AttentionMaps) -> tuple[list[int], list[int]]:
    chosen = sorted(chart.maps)[:MAX_MAPS]
    return sorted({layer for layer, _ in chosen}), sorted({head for _, head in chosen})


def draw_attention_maps(chart: AttentionMaps, canvas: Any) -> None:
    """All heads of a model, one row per layer; each map is scaled to its largest weight."""
    import numpy

    layers, heads = layers_and_heads(chart)
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
