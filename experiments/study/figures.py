"""The figures of the study: loss and gain by length, each as PNG, SVG and the CSV file of its numbers.

python -m experiments.study.figures
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from experiments.study.records import (
    BASELINE,
    SMALL,
    Curve,
    Size,
    Spread,
    gain_at,
    gain_error_at,
    loss_at,
    option_words,
    read_study,
)
from experiments.study.sizes import OURS_WIDE, THEIRS_WIDE, parameters
from softplus_attention.charts.draw import COLOURS, MARKERS, save
from softplus_attention.report.study import MIX, ROTARY
from softplus_attention.utils.files import csv_text

ROOT = Path(__file__).parents[2]
WINDOW_COLOUR = "#777777"
# The last of COLOURS is too near to the windows' grey.
ARM_COLOURS = (
    *COLOURS[:-1],
    *("#8C510A", "#7B3294", "#1B7837", "#A6192E", "#808000", "#5D3FD3", "#003F5C", "#F28E8E", "#00CED1"),
    *("#B8860B", "#FF1493", "#2F4F4F", "#9ACD32", "#D2691E"),
)
ARM_MARKERS = (*MARKERS, "<", "h", ">", "p", "d", "8", "H", "$o$", "$x$", "$w$", "$z$", "$a$", "$m$")
NEAR_NO_GAIN = 0.5
APART = 0.04  # of two arms' bars at one length, as a power of two


@dataclass(frozen=True)
class Line:
    name: str
    look: dict[str, Any]
    points: dict[int, Spread]
    bars: dict[int, float]  # half the range of the seeds, or the standard error of a gain


def look_of(arm: str, size: Size) -> dict[str, Any]:
    """Line styles by family; colour and marker by the arm's place among those of its size and kind."""
    family, place = size.arms[arm][0].family, list(size.of_kind(size.arms[arm][0].kind).arms).index(arm)
    style = {"lssar": "-", "lssa": "-."}.get(family, "--" if "max" in arm else ":")
    # A second round of colours has other markers.
    marker = ARM_MARKERS[(place + place // len(ARM_COLOURS)) % len(ARM_MARKERS)]
    return {
        "color": ARM_COLOURS[place % len(ARM_COLOURS)], "linestyle": style, "marker": marker, "markersize": 5,
        "linewidth": 2.2 if family == "lssar" else 1.6,
    }  # fmt: skip


def points_of(
    size: Size, curves: Sequence[Curve], value_at: Callable[[Sequence[Curve], int], Spread | None]
) -> dict[int, Spread]:
    return {multiple: found for multiple in size.multiples if (found := value_at(curves, multiple)) is not None}


def window_lines(size: Size) -> list[Line]:
    """In grey, the softmaxes with a sliding window."""
    names = [(arm, option) for arm in size.of_family(BASELINE) for option in size.options(arm)]
    windows = [(arm, option) for arm, option in names if option.startswith("window")]
    lines = []
    for (arm, option), marker in zip(windows, "x+1234", strict=False):
        points = points_of(size, size.curves(arm, option), loss_at)
        look = {"color": WINDOW_COLOUR, "linestyle": "--", "linewidth": 1, "marker": marker}
        lines.append(Line(f"{arm}, {option_words(option)}", look, points, {}))
    return [line for line in lines if line.points]


def best_at_the_end(lines: Sequence[Line]) -> list[Line]:
    """The one with the lowest loss at the longest length that any of them has."""
    longest = max((max(line.points) for line in lines), default=0)
    there = [line for line in lines if longest in line.points and math.isfinite(line.points[longest].mean)]
    return sorted(there, key=lambda line: line.points[longest].mean)[:1]


def loss_lines(size: Size, kind: str) -> list[Line]:
    """The arms, and the windows: the bar that counts. Beside a mix of layers the best of them is enough."""
    lines = []
    for arm in size.of_kind(kind).arms:
        points = points_of(size, size.curves(arm), loss_at)
        bars = {multiple: found.half_range for multiple, found in points.items() if found.count > 1}
        lines.append(Line(arm, look_of(arm, size), points, bars))
    shown = [line for line in lines if line.points]
    windows = window_lines(size) if kind == ROTARY else best_at_the_end(window_lines(size))
    return shown + windows if shown else []


def gain_lines(size: Size, kind: str) -> list[Line]:
    lines = []
    for arm in size.of_kind(kind).arms:
        curves = size.curves(arm)
        points = points_of(size, curves, gain_at)
        errors = points_of(size, curves, gain_error_at)
        bars = {multiple: error.mean for multiple, error in errors.items()}
        lines.append(Line(arm, look_of(arm, size), points, bars))
    return [line for line in lines if line.points]


@dataclass(frozen=True)
class StudyFigure:
    quantity: str  # "loss" or "gain"
    kind: str

    def title(self, size: Size, between: str = ", ") -> str:
        words = {"loss": "Loss by length", "gain": "Gain of the context beyond the training length"}
        return f"{words[self.quantity]}{between}{size.name}, {self.kind}"

    def lines(self, size: Size) -> list[Line]:
        return {"loss": loss_lines, "gain": gain_lines}[self.quantity](size, self.kind)


FIGURES = {
    "study-loss": StudyFigure("loss", ROTARY),
    "study-gain": StudyFigure("gain", ROTARY),
    "study-loss-mix": StudyFigure("loss", MIX),
    "study-gain-mix": StudyFigure("gain", MIX),
}


def csv_of(lines: Sequence[Line], length: int) -> str:
    rows = [
        [line.name, str(multiple * length), str(multiple), f"{found.mean:.5f}", str(found.count), error]
        for line in lines
        for multiple, found in line.points.items()
        for error in [f"{line.bars[multiple]:.5f}" if multiple in line.bars else ""]
    ]
    return csv_text(["line", "tokens", "times", "nats", "seeds", "bar"], rows)


def close_up(quantity: str, lines: Sequence[Line]) -> tuple[float, float] | None:
    """Limits around the lines that stay near where they began, or near no gain; nothing where all do or none does."""
    values = [found.mean for line in lines for found in line.points.values() if math.isfinite(found.mean)]
    if not values:
        return None
    if quantity == "gain":
        lowest = [min(found.mean for found in line.points.values()) for line in lines]
        near = [value for value in lowest if value >= -NEAR_NO_GAIN]
        return (min(near) - 0.05, max(*values, 0.0) + 0.03) if 0 < len(near) < len(lowest) else None
    starts = [line.points[min(line.points)].mean for line in lines]
    top = max((start for start in starts if math.isfinite(start)), default=min(values)) + 0.15
    return (min(values) - 0.05, top) if max(values) > top + 0.3 else None


def figure_of(width: float, height: float, rows: int, columns: int) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False)


def length_axis(axes: Any, lengths: Sequence[int], trained: int) -> None:
    axes.axvline(trained, color="#888888", alpha=0.4, linewidth=6, zorder=0)
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [f"{length}\n{length / trained:.4g}x" for length in lengths])
    axes.minorticks_off()
    axes.set_xlabel("length of the sequence (tokens, and times the training length)")
    axes.grid(alpha=0.3)


def draw(name: str, size: Size, lines: Sequence[Line], path: Path) -> None:
    length = size.any_run.config["sequence_length"]
    figure = FIGURES[name]
    near = close_up(figure.quantity, lines)
    canvas, grid = figure_of(13.6 if near else 8.6, 4.8, 1, 2 if near else 1)
    for axes in grid.flat:
        for place, line in enumerate(lines):
            # Standard errors are wide: side by side they can be read.
            aside = APART * (place - (len(lines) - 1) / 2) if figure.quantity == "gain" else 0.0
            x = [multiple * length * 2**aside for multiple in line.points]
            y = [found.mean for found in line.points.values()]
            bars = [line.bars.get(multiple, 0.0) for multiple in line.points]
            axes.errorbar(x, y, bars if line.bars else None, capsize=2, elinewidth=1, label=line.name, **line.look)
        shown = sorted({multiple * length for line in lines for multiple in line.points})
        length_axis(axes, shown, length)
        axes.set_ylabel(f"{figure.quantity} (nats per token)")
        axes.set_title(figure.title(size, between="\n"))
        if figure.quantity == "gain":
            axes.axhline(0, color="#888888", linewidth=1)
    if near:
        grid[0, 1].set_ylim(*near)
        grid[0, 1].set_title("the same, close up")
    # The legend's order is that of the lines' right ends, from the top.
    handles, labels = grid[0, 0].get_legend_handles_labels()
    ends = [list(line.points.values())[-1].mean for line in lines]
    order = sorted(range(len(lines)), key=lambda place: -ends[place] if math.isfinite(ends[place]) else -math.inf)
    canvas.legend(
        [handles[place] for place in order], [labels[place] for place in order],
        loc="outside right center", frameon=False, fontsize=8, handlelength=3.5,
    )  # fmt: skip
    save(canvas, path)


def best_lines(sizes: Sequence[Size]) -> tuple[list[Line], list[Line]]:
    """The best LSSAR of the mix and the strongest softmax, heads of 128: their losses, and the gap between them."""
    losses, differences = [], []
    trained = sorted((size for size in sizes if {OURS_WIDE, THEIRS_WIDE} <= size.arms.keys()), key=parameters)
    for size, colour, marker in zip(trained, COLOURS, MARKERS, strict=False):
        model = f"{parameters(size) / 1e6:.0f}M"
        points = {arm: points_of(size, size.curves(arm), loss_at) for arm in (THEIRS_WIDE, OURS_WIDE)}
        for arm, words, style in ((THEIRS_WIDE, "softmax", "--"), (OURS_WIDE, "LSSAR", "-")):
            look = {"color": colour, "linestyle": style, "marker": marker, "markersize": 5, "linewidth": 1.8}
            bars = {multiple: found.half_range for multiple, found in points[arm].items() if found.count > 1}
            losses.append(Line(f"{words}, {model}", look, points[arm], bars))
        gaps = {
            multiple: Spread(ours.mean - theirs.mean, 0.0, min(ours.count, theirs.count))
            for multiple, ours in points[OURS_WIDE].items()
            if (theirs := points[THEIRS_WIDE].get(multiple)) is not None
        }
        differences.append(Line(f"LSSAR less softmax, {model}", look, gaps, {}))
    return losses, differences


def draw_best(losses: Sequence[Line], differences: Sequence[Line], length: int, path: Path) -> None:
    canvas, grid = figure_of(12.6, 4.6, 1, 2)
    for axes, lines in zip(grid.flat, (losses, differences), strict=True):
        for line in lines:
            x, y = ([m * length for m in line.points], [found.mean for found in line.points.values()])
            bars = [line.bars.get(multiple, 0.0) for multiple in line.points]
            axes.errorbar(x, y, bars if line.bars else None, capsize=2, elinewidth=1, label=line.name, **line.look)
        length_axis(axes, sorted({m * length for line in lines for m in line.points}), length)
        axes.legend(frameon=False, fontsize=8, handlelength=3.5, ncols=2)
    grid[0, 0].set_title("The loss falls with length")
    grid[0, 0].set_ylabel("loss (nats per token)")
    grid[0, 1].set_title("LSSAR less softmax: below 0, LSSAR is better")
    grid[0, 1].set_ylabel("difference (nats per token)")
    grid[0, 1].axhline(0, color="#888888", linewidth=1)
    most = max((abs(found.mean) for line in differences for found in line.points.values()), default=0.0)
    grid[0, 1].set_ylim(-2 * most, 2 * most)
    save(canvas, path)


@dataclass(frozen=True)
class Drawing:
    csv: str  # the numbers that it shows
    write: Callable[[Path], None]  # at a path, whose ending is of no account


def figure_data(sizes: Sequence[Size]) -> dict[str, Drawing]:
    """By file name without its ending."""
    found = {}
    for size in sizes:
        length = size.any_run.config["sequence_length"]
        for name, figure in FIGURES.items():
            lines = figure.lines(size)
            if lines:
                found[f"{name}-{size.name}"] = Drawing(csv_of(lines, length), partial(draw, name, size, lines))
    losses, differences = best_lines(sizes)
    if losses:
        length = next(size for size in sizes if OURS_WIDE in size.arms).any_run.config["sequence_length"]
        csv = csv_of([*losses, *differences], length)
        found["study-best"] = Drawing(csv, partial(draw_best, losses, differences, length))
    return found


def stale_figures(folder: Path, data: Mapping[str, Drawing]) -> list[str]:
    """Without a drawing, or with one of other numbers."""

    def is_current(stem: str, csv: str) -> bool:
        files = [folder / f"{stem}{suffix}" for suffix in (".csv", ".png", ".svg")]
        return all(file.exists() for file in files) and files[0].read_text() == csv

    return [stem for stem, drawing in data.items() if not is_current(stem, drawing.csv)]


def write_figures(folder: Path, data: Mapping[str, Drawing]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for stem, drawing in data.items():
        drawing.write(folder / stem)
        (folder / f"{stem}.csv").write_text(drawing.csv)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.study.figures", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--results", type=Path, default=ROOT / "results" / "study")
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "figures")
    options = parser.parse_args(arguments)
    data = figure_data([size for size in read_study(options.results) if size.name not in SMALL])
    write_figures(options.output, data)
    print(f"{options.output}: {', '.join(data)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
