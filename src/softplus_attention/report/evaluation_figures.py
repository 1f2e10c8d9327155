"""Figures of evaluation results, from their JSON alone."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from softplus_attention.charts.draw import COLOURS, MARKERS, REFERENCES, STYLES
from softplus_attention.evaluation import layers
from softplus_attention.evaluation.forms import form_of

Result = Mapping[str, Any]


def look(number: int) -> dict[str, Any]:
    return {
        "color": COLOURS[number % len(COLOURS)],
        "linestyle": STYLES[number % len(STYLES)],
        "marker": MARKERS[number % len(MARKERS)],
        "linewidth": 2,
    }


def figure_of(width: float, height: float, rows: int = 1, columns: int = 1, **words: Any) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False, **words)


def length_axis(axes: Any, lengths: Sequence[int], trained: int, words: str = "length of the sequence") -> None:
    axes.axvline(trained, color="#888888", alpha=0.4, linewidth=6, zorder=0)
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [f"{length}\n{length / trained:.4g}x" for length in lengths])
    axes.minorticks_off()
    axes.set_xlabel(f"{words} (tokens, and times the training length)")
    axes.grid(alpha=0.3)


def drawn(value: float | None) -> float:
    """NaN, which is left out of a line, where a result holds none."""
    return math.nan if value is None else value


def lengths_figure(results: Sequence[Result]) -> Any:
    """Loss by length; beside it, where the control was run, what the long context is worth."""
    trained = results[0]["model"]["training_length"]
    lengths = sorted({entry["length"] for result in results for entry in result["results"]["lengths"]})
    controlled = any(entry["control"] for result in results for entry in result["results"]["lengths"])
    figure, grid = figure_of(12.6 if controlled else 7.2, 4.6, 1, 2 if controlled else 1)
    for number, result in enumerate(results):
        entries = result["results"]["lengths"]
        losses = [drawn(e["loss"]) for e in entries]
        grid[0, 0].plot([e["length"] for e in entries], losses, label=result["model"]["name"], **look(number))
        gains = [(e["length"], e["control"]) for e in entries if e["control"]]
        if gains:
            errors = [control["standard_error"] or 0 for _, control in gains]
            gained = [drawn(control["gain"]) for _, control in gains]
            grid[0, 1].errorbar([n for n, _ in gains], gained, errors, capsize=3, **look(number))
    grid[0, 0].set_ylabel("loss (nats per token)")
    grid[0, 0].set_title("Loss by length, mean over all positions")
    grid[0, 0].legend(frameon=False)
    if controlled:
        grid[0, 1].axhline(0, color="#888888", linewidth=1)
        grid[0, 1].set_ylabel("gain (nats per token)")
        grid[0, 1].set_title(f"What the context beyond {trained} tokens is worth")
    for axes in grid.flat:
        length_axis(axes, lengths, trained)
    return figure


def passkey_figure(results: Sequence[Result]) -> Any:
    """A heat map per model: length by depth."""
    figure, grid = figure_of(4.6 * len(results) + 0.6, 3.9, 1, len(results), sharey=True)
    for axes, result in zip(grid.flat, results, strict=True):
        cells = {(cell["depth"], cell["length"]): drawn(cell["accuracy"]) for cell in result["results"]["cells"]}
        depths, lengths = (sorted({key[place] for key in cells}) for place in (0, 1))
        values = [[cells.get((depth, length), float("nan")) for length in lengths] for depth in depths]
        image = axes.imshow(values, vmin=0, vmax=1, cmap="cividis", aspect="auto")
        for row, line in enumerate(values):
            for column, value in enumerate(line):
                shown = "" if value != value else f"{100 * value:.0f}"
                axes.text(column, row, shown, ha="center", va="center", color="black" if value > 0.5 else "white")
        trained = result["model"]["training_length"]
        axes.set_xticks(range(len(lengths)), [f"{n}\n{n / trained:.3g}x" for n in lengths])
        axes.set_yticks(range(len(depths)), [f"{100 * depth:.0f}%" for depth in depths])
        axes.set_xlabel("length (tokens, and times the training length)")
        axes.set_title(result["model"]["name"])
    grid[0, 0].set_ylabel("depth of the pass key")
    figure.colorbar(image, ax=grid, label="exact match")
    return figure


def synthetic_figure(results: Sequence[Result]) -> Any:
    """Accuracy by length, a panel per task and form of it."""
    forms = [form_of(result["results"]["task"], result["settings"]) for result in results]
    panels = sorted(set(forms))
    figure, grid = figure_of(6.4 * len(panels) + 0.4, 4.4, 1, len(panels), sharey=True)
    for axes, panel in zip(grid.flat, panels, strict=True):
        chosen = [result for result, form in zip(results, forms, strict=True) if form == panel]
        for number, result in enumerate(chosen):
            entries = result["results"]["lengths"]
            points = [entry["length"] for entry in entries], [entry["accuracy"] for entry in entries]
            axes.plot(*points, label=result["model"]["attention"], **look(number))
        lengths = sorted({entry["length"] for result in chosen for entry in result["results"]["lengths"]})
        length_axis(axes, lengths, chosen[0]["model"]["training_length"])
        axes.set_ylim(-0.03, 1.03)
        axes.set_title(panel)
        axes.legend(frameon=False)
    grid[0, 0].set_ylabel("accuracy of the answer tokens")
    return figure


# name in the files, title, and whether it is drawn as a share of log N
INSIDE = (
    ("stage1_entropy", "entropy of stage 1 (nats)", False),
    ("stage1_entropy", "entropy of stage 1 / log N", True),
    ("entropy", "entropy of the final weights (nats)", False),
    ("sink", "mass on the first token", False),
    ("effective_keys", "effective number of keys", False),
    ("zeros", "exact zeros among visible keys", False),
    ("empty_tiles", "tiles without any weight", False),
)
FROZEN = "stage1_entropy_frozen"


@dataclass(frozen=True)
class Part:
    """Layers of one model that see the same number of keys; ``number`` is the model's look."""

    result: Result
    number: int
    group: layers.LayerGroup

    @property
    def rows(self) -> Sequence[Mapping[str, Any]]:
        rows: Sequence[Mapping[str, Any]] = self.result["results"]["lengths"]
        return rows

    @property
    def name(self) -> str:
        return self.result["model"]["name"] + (f", {self.group.words}" if self.group.words else "")

    @property
    def curve(self) -> layers.Curve:
        return layers.log_keys_curve(self.rows, self.group)

    def means(self, word: str, is_share: bool) -> list[float]:
        value = layers.share_of_log_keys if is_share else layers.mean_of
        return [drawn(value(row, self.group, word)) for row in self.rows]

    def band(self, word: str, is_share: bool) -> tuple[list[float], list[float]]:
        """Where the middle half of the heads lies."""
        ends: tuple[list[float], list[float]] = [], []
        for row in self.rows:
            most = layers.log_keys(row, self.group) if is_share else 1.0
            heads = [head[word] for head in layers.heads_in(row, self.group)]
            values = sorted(value / most for value in heads if value is not None and most)
            for end, share in zip(ends, (0.25, 0.75), strict=True):
                end.append(values[int(share * (len(values) - 1))] if values else math.nan)
        return ends


def inside_figure(results: Sequence[Result]) -> Any:
    """Each quantity by length: the mean over the heads of layers that see the same, their middle half as a band.

    Where a model mixes layers, those that see less are drawn below, apart.
    """
    parts = [
        [Part(result, number, group) for group in layers.layer_groups(result["results"]["lengths"])]
        for number, result in enumerate(results)
    ]
    widest, narrower = [own[0] for own in parts], [part for own in parts for part in own[1:]]
    panes = [widest, narrower] if narrower else [widest]
    lengths = sorted({entry["length"] for result in results for entry in result["results"]["lengths"]})
    trained = results[0]["model"]["training_length"]
    figure, grid = figure_of(19, 8.4 * len(panes), 2 * len(panes), 4)
    for pane, shown in enumerate(panes):
        *axes_of, legend = grid[2 * pane : 2 * pane + 2].flat
        kind = ("global layers: ", "local layers: ")[pane] if narrower else ""
        for axes, (word, title, is_share) in zip(axes_of, INSIDE, strict=True):
            draw_inside(axes, shown, word, is_share)
            axes.set_title(kind + title)
            length_axis(axes, lengths, trained, "length")
        legend.set_axis_off()
        lines, names = axes_of[0].get_legend_handles_labels()
        legend.legend(lines, names, frameon=False, loc="center left")
    return figure


def draw_inside(axes: Any, parts: Sequence[Part], word: str, is_share: bool) -> None:
    for part in parts:
        places = [row["length"] for row in part.rows]
        axes.plot(places, part.means(word, is_share), label=part.name, **look(part.number))
        colour = COLOURS[part.number % len(COLOURS)]
        axes.fill_between(places, *part.band(word, is_share), color=colour, alpha=0.12, linewidth=0)
        frozen = part.means(FROZEN, is_share)
        if word == "stage1_entropy" and not all(math.isnan(value) for value in frozen):
            words: dict[str, Any] = {"linestyle": ":", "marker": MARKERS[part.number % len(MARKERS)], "linewidth": 1.2}
            axes.plot(places, frozen, color=colour, fillstyle="none", label=f"{part.name}, log N frozen", **words)
    if "entropy" in word and not is_share:
        curves = layers.equal_weights([(part.name, part.curve) for part in parts])
        for number, (name, curve) in enumerate(curves):
            style = REFERENCES[number % len(REFERENCES)]
            axes.plot(list(curve), list(curve.values()), color="black", alpha=0.6, linestyle=style, label=name)
    if is_share:
        axes.axhline(1, color="black", alpha=0.6, linestyle=":")
        axes.set_ylim(0, 1.04)


MOST_LAYERS = 16


def maps_figure(results: Sequence[Result], head: int | None = None) -> Any:
    """A row of maps per layer, a column per model: the mean over heads, or one head. Each to the scale of its largest.

    Of a deep model layers spread evenly are shown; all of them are in the files.
    """
    import numpy
    from matplotlib.colors import PowerNorm

    numbers = sorted({found["layer"] for result in results for found in result["results"]["maps"]})
    kept = numbers if len(numbers) <= MOST_LAYERS else evenly(numbers, MOST_LAYERS)
    figure, grid = figure_of(2.6 * len(results) + 1.2, 2.5 * len(kept) + 0.9, len(kept), len(results))
    for column, result in enumerate(results):
        for row, layer in enumerate(kept):
            axes = grid[row, column]
            axes.set_xticks([])
            axes.set_yticks([])
            if column == 0:
                axes.set_ylabel(f"layer {layer}")
            chosen = [
                found["weights"]
                for found in result["results"]["maps"]
                if found["layer"] == layer and head in (None, found["head"])
            ]
            if not chosen:
                axes.set_axis_off()
                continue
            square = mean_map(chosen)
            largest = float(numpy.nanmax(square))
            # By the square root: weights far below the largest are still seen.
            norm = PowerNorm(0.5, vmin=0, vmax=largest or 1)
            axes.set_facecolor("#dddddd")
            axes.imshow(square, cmap="magma", norm=norm, interpolation="nearest")
            axes.set_title((f"{result['model']['name']}\n" if row == 0 else "") + f"largest {largest:.3g}", fontsize=9)
    heads = "mean over heads" if head is None else f"head {head}"
    rows = "" if kept == numbers else f"; {len(kept)} of {len(numbers)} layers"
    texts = {result["results"]["text"] for result in results}
    different = "; the texts are NOT the same" if len(texts) > 1 else ""
    figure.suptitle(f"{heads}{rows}{different}", fontsize=10)
    return figure


def mean_map(maps: Sequence[Sequence[Sequence[float]]]) -> Any:
    """The mean as a square; what cannot be seen is NaN."""
    import numpy

    size = len(maps[0])
    square = numpy.full((size, size), numpy.nan)
    for place, lines in enumerate(zip(*maps, strict=True)):
        square[place, : place + 1] = numpy.mean(lines, axis=0)
    return square


def evenly(numbers: Sequence[int], most: int) -> list[int]:
    step = (len(numbers) - 1) / (most - 1)
    return [numbers[round(place * step)] for place in range(most)]


FIGURES = {
    "lengths": lengths_figure,
    "passkey": passkey_figure,
    "synthetic": synthetic_figure,
    "inside": inside_figure,
    "maps": maps_figure,
}
