"""The figures of the study: loss and gain by length, each as PNG, SVG and CSV.

python -m experiments.study.figures
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

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
from softplus_attention.charts.draw import COLOURS, draw
from softplus_attention.charts.model import LineChart, Series
from softplus_attention.report.study import MIX, ROTARY
from softplus_attention.utils.files import csv_text

ROOT = Path(__file__).parents[2]
NEAR_NO_GAIN = 0.5
LENGTH = "length of the sequence (tokens, and times the training length)"
LOGN = "softmax-qknorm-logn"


def by_multiple(
    size: Size, curves: Sequence[Curve], value_at: Callable[[Sequence[Curve], int], Spread | None]
) -> dict[int, Spread]:
    return {multiple: found for multiple in size.multiples if (found := value_at(curves, multiple)) is not None}


def line(
    name: str, size: Size, points: Mapping[int, Spread], bars: Mapping[int, float], look: int, *, window: bool = False
) -> Series:
    length = size.any_run.config["sequence_length"]
    error = [bars.get(multiple) for multiple in points] if bars else None
    x, y = [float(multiple * length) for multiple in points], [found.mean for found in points.values()]
    return Series(name, x, y, error, look % len(COLOURS), dashed=look >= len(COLOURS), reference=window)


def loss_line(name: str, size: Size, arm: str, look: int, option: str | None = None) -> Series:
    """Error bars are half the range of the seeds."""
    points = by_multiple(size, size.curves(arm, option), loss_at)
    bars = {multiple: found.half_range for multiple, found in points.items() if found.count > 1}
    return line(name, size, points, {} if option else bars, look, window=option is not None)


def gain_line(size: Size, arm: str, look: int) -> Series:
    """Error bars are standard errors."""
    curves = size.curves(arm)
    errors = {multiple: found.mean for multiple, found in by_multiple(size, curves, gain_error_at).items()}
    return line(arm, size, by_multiple(size, curves, gain_at), errors, look)


def window_lines(size: Size) -> list[Series]:
    """Baselines with a sliding window, whose loss does not rise with length, as references."""
    options = [(arm, option) for arm in size.of_family(BASELINE) for option in size.options(arm)]
    windows = [(arm, option) for arm, option in options if option.startswith("window")]
    made = [
        loss_line(f"{arm}, {option_words(option)}", size, arm, look, option)
        for look, (arm, option) in enumerate(windows)
    ]
    return [series for series in made if series.x]


def last_loss(series: Series) -> float:
    last = series.y[-1]
    return last if last is not None and math.isfinite(last) else math.inf


@dataclass(frozen=True)
class StudyFigure:
    quantity: str  # "loss" or "gain"
    kind: str

    def title(self, size: Size) -> str:
        names = {"loss": "Loss by length", "gain": "Gain of the context beyond the training length"}
        return f"{names[self.quantity]}, {size.name}, {self.kind}"

    def lines(self, size: Size) -> list[Series]:
        arms = enumerate(size.of_kind(self.kind).arms)
        if self.quantity == "gain":
            made = [gain_line(size, arm, look) for look, arm in arms]
        else:
            made = [loss_line(arm, size, arm, look) for look, arm in arms]
        shown = [series for series in made if series.x]
        if self.quantity == "loss" and shown:
            windows = sorted(window_lines(size), key=last_loss)
            shown += windows if self.kind == ROTARY else windows[:1]  # for a mix of layers, only the best
        return shown

    def charts(self, size: Size) -> list[LineChart]:
        """One chart, or two if some lines diverge from the rest."""
        lines = self.lines(size)
        if not lines:
            return []
        length = size.any_run.config["sequence_length"]
        label = f"{self.quantity} (nats per token)"
        chart = LineChart(self.title(size), LENGTH, label, lines, x_scale="log2", times_of=length)
        near = close_up(self.quantity, lines)
        return [chart] if near is None else [chart, replace(chart, title="the same, close up", y_range=near)]


FIGURES = {
    "study-loss": StudyFigure("loss", ROTARY),
    "study-gain": StudyFigure("gain", ROTARY),
    "study-loss-mix": StudyFigure("loss", MIX),
    "study-gain-mix": StudyFigure("gain", MIX),
}


def close_up(quantity: str, lines: Sequence[Series]) -> tuple[float, float] | None:
    """Limits around the lines that stay near their first loss, or near a gain of 0; None if all do or none does."""
    values = [value for series in lines for value in series.y if value is not None and math.isfinite(value)]
    if not values:
        return None
    if quantity == "gain":
        lowest = [min(value for value in series.y if value is not None) for series in lines]
        near = [value for value in lowest if value >= -NEAR_NO_GAIN]
        return (min(near) - 0.05, max(*values, 0.0) + 0.03) if 0 < len(near) < len(lowest) else None
    top = max((series.y[0] or 0.0 for series in lines if math.isfinite(series.y[0] or math.nan)), default=0.0) + 0.15
    return (min(values) - 0.05, top) if max(values) > top + 0.3 else None


def overview(sizes: Sequence[Size]) -> list[LineChart]:
    """The main finding in one chart: positions in every layer against local and global layers, at one size."""
    size = next((size for size in sizes if {LOGN, "lssar-p15", OURS_WIDE, THEIRS_WIDE} <= size.arms.keys()), None)
    if size is None:
        return []
    lines = [
        loss_line("LSSAR, p = 15, rotary positions", size, "lssar-p15", 0),
        loss_line("softmax + QK-norm + log N, rotary positions", size, LOGN, 1),
        loss_line("LSSAR, learned power, local and global layers", size, OURS_WIDE, 2),
        loss_line("softmax + QK-norm + log N, local and global layers", size, THEIRS_WIDE, 3),
    ]
    length = size.any_run.config["sequence_length"]
    title = f"{parameters(size) / 1e6:.0f}M parameters, trained on {length} tokens at a time"
    return [LineChart(title, LENGTH, "validation loss (nats per token)", lines, x_scale="log2", times_of=length)]


def best(sizes: Sequence[Size]) -> list[LineChart]:
    """The losses of the best LSSAR and the best softmax of the mix with heads of 128, and the gap between them."""
    losses, gaps = [], []
    trained = sorted((size for size in sizes if {OURS_WIDE, THEIRS_WIDE} <= size.arms.keys()), key=parameters)
    for look, size in enumerate(trained):
        model = f"{parameters(size) / 1e6:.0f}M"
        theirs, ours = (by_multiple(size, size.curves(arm), loss_at) for arm in (THEIRS_WIDE, OURS_WIDE))
        losses += [
            replace(loss_line(f"softmax, {model}", size, THEIRS_WIDE, look), dashed=True),
            loss_line(f"LSSAR, {model}", size, OURS_WIDE, look),
        ]
        both = {m: Spread(ours[m].mean - theirs[m].mean, 0.0, 1) for m in ours if m in theirs}
        gaps.append(line(f"LSSAR - softmax, {model}", size, both, {}, look))
    if not trained:
        return []
    length = trained[0].any_run.config["sequence_length"]
    loss = LineChart("The loss falls with length", LENGTH, "loss (nats per token)", losses, "", "log2", times_of=length)
    title = "LSSAR - softmax: below 0, LSSAR is better"
    return [loss, replace(loss, title=title, y_label="difference (nats per token)", series=gaps)]


def make_figures(sizes: Sequence[Size]) -> dict[str, list[LineChart]]:
    """The charts of each figure, by file name without suffix."""
    found = {f"{name}-{size.name}": figure.charts(size) for size in sizes for name, figure in FIGURES.items()}
    found |= {"study-best": best(sizes), "study-overview": overview(sizes)}
    return {name: charts for name, charts in found.items() if charts}


def figure_csv(charts: Sequence[LineChart]) -> str:
    """The numbers of all lines; lines of a close-up are the same and appear once."""
    lines = {series.name: series for chart in charts for series in chart.series}
    rows = [
        [name, f"{x:g}", "" if y is None else f"{y:.5f}", "" if bar is None else f"{bar:.5f}"]
        for name, series in lines.items()
        for x, y, bar in zip(series.x, series.y, series.error or [None] * len(series.x), strict=True)
    ]
    return csv_text(["line", "tokens", "nats", "bar"], rows)


def stale_figures(folder: Path, figures: Mapping[str, Sequence[LineChart]]) -> list[str]:
    """Names of figures that are missing, or whose CSV file has other numbers."""

    def is_current(stem: str, csv: str) -> bool:
        files = [folder / f"{stem}{suffix}" for suffix in (".csv", ".png", ".svg")]
        return all(file.exists() for file in files) and files[0].read_text() == csv

    return [stem for stem, charts in figures.items() if not is_current(stem, figure_csv(charts))]


def write_figures(folder: Path, figures: Mapping[str, Sequence[LineChart]]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for stem, charts in figures.items():
        draw(charts, folder / stem)
        (folder / f"{stem}.csv").write_text(figure_csv(charts))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.study.figures", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--results", type=Path, default=ROOT / "results" / "study")
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "figures")
    options = parser.parse_args(arguments)
    figures = make_figures([size for size in read_study(options.results) if size.name not in SMALL])
    write_figures(options.output, figures)
    print(f"{options.output}: {', '.join(figures)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
