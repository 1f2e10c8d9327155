"""Figures of evaluation results, from their JSON alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from softplus_attention.report.figures import COLOURS, MARKERS, STYLES

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


def lengths_figure(results: Sequence[Result]) -> Any:
    """Loss by length; beside it, where the control was run, what the long context is worth."""
    trained = results[0]["model"]["training_length"]
    lengths = sorted({entry["length"] for result in results for entry in result["results"]["lengths"]})
    controlled = any(entry["control"] for result in results for entry in result["results"]["lengths"])
    figure, grid = figure_of(12.6 if controlled else 7.2, 4.6, 1, 2 if controlled else 1)
    for number, result in enumerate(results):
        entries = result["results"]["lengths"]
        grid[0, 0].plot(
            [e["length"] for e in entries], [e["loss"] for e in entries], label=result["model"]["name"], **look(number)
        )
        gains = [(e["length"], e["control"]) for e in entries if e["control"]]
        if gains:
            errors = [control["standard_error"] or 0 for _, control in gains]
            gained = [control["gain"] for _, control in gains]
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
        cells = {(cell["depth"], cell["length"]): cell["accuracy"] for cell in result["results"]["cells"]}
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
    """Accuracy by length, a panel per task."""
    tasks = sorted({result["results"]["task"] for result in results})
    figure, grid = figure_of(6.4 * len(tasks) + 0.4, 4.4, 1, len(tasks), sharey=True)
    for axes, task in zip(grid.flat, tasks, strict=True):
        chosen = [result for result in results if result["results"]["task"] == task]
        for number, result in enumerate(chosen):
            entries = result["results"]["lengths"]
            points = [entry["length"] for entry in entries], [entry["accuracy"] for entry in entries]
            axes.plot(*points, label=result["model"]["attention"], **look(number))
        lengths = sorted({entry["length"] for result in chosen for entry in result["results"]["lengths"]})
        length_axis(axes, lengths, chosen[0]["model"]["training_length"])
        axes.set_ylim(-0.03, 1.03)
        axes.set_title(task)
        axes.legend(frameon=False)
    grid[0, 0].set_ylabel("accuracy of the answer tokens")
    return figure


INSIDE = (
    ("stage1_entropy", "entropy of stage 1 (nats)"),
    ("entropy", "entropy of the final weights (nats)"),
    ("sink", "mass on the first token"),
    ("effective_keys", "effective number of keys"),
    ("zeros", "exact zeros among visible keys"),
    ("empty_tiles", "tiles without any weight"),
)


def inside_figure(results: Sequence[Result]) -> Any:
    """Each quantity by length: the mean over layers and heads, the middle half of the heads as a band."""
    figure, grid = figure_of(15, 8, 2, 3)
    lengths = sorted({entry["length"] for result in results for entry in result["results"]["lengths"]})
    trained = results[0]["model"]["training_length"]
    for axes, (word, title) in zip(grid.flat, INSIDE, strict=True):
        for number, result in enumerate(results):
            entries = result["results"]["lengths"]
            places = [entry["length"] for entry in entries]
            values = [sorted(head[word] for head in entry["heads"]) for entry in entries]
            axes.plot(places, [sum(v) / len(v) for v in values], label=result["model"]["name"], **look(number))
            low, high = ([v[int(share * (len(v) - 1))] for v in values] for share in (0.25, 0.75))
            axes.fill_between(places, low, high, color=COLOURS[number % len(COLOURS)], alpha=0.12, linewidth=0)
            frozen = [[h["stage1_entropy_frozen"] for h in entry["heads"]] for entry in entries]
            if word == "stage1_entropy" and frozen and None not in frozen[0]:
                means = [sum(v) / len(v) for v in frozen]
                colour = COLOURS[number % len(COLOURS)]
                axes.plot(places, means, ":", color=colour, label=f"{result['model']['name']}, log N frozen")
        if "entropy" in word:
            entries = results[0]["results"]["lengths"]
            equal = [entry["log_keys"] for entry in entries]
            axes.plot([entry["length"] for entry in entries], equal, "k:", alpha=0.6, label="equal weights")
        axes.set_title(title)
        length_axis(axes, lengths, trained, "length")
    grid[0, 0].legend(frameon=False, fontsize="small")
    return figure


def maps_figure(results: Sequence[Result], layer: int = 0) -> Any:
    """One layer's heads, a row of maps per model."""
    heads = max(sum(found["layer"] == layer for found in result["results"]["maps"]) for result in results)
    figure, grid = figure_of(2.3 * heads + 0.8, 2.5 * len(results) + 0.4, len(results), heads)
    for row, result in zip(grid, results, strict=True):
        chosen = [found for found in result["results"]["maps"] if found["layer"] == layer]
        for axes in row:
            axes.set_axis_off()
        for axes, found in zip(row, chosen, strict=False):
            size = result["results"]["size"]
            square = [line + [0.0] * (size - len(line)) for line in found["weights"]]
            axes.set_axis_on()
            axes.imshow(square, cmap="magma", vmin=0, interpolation="nearest")
            axes.set_xticks([])
            axes.set_yticks([])
            axes.set_title(f"{result['model']['name']}\nlayer {layer}, head {found['head']}", fontsize="small")
    return figure


FIGURES = {
    "lengths": lengths_figure,
    "passkey": passkey_figure,
    "synthetic": synthetic_figure,
    "inside": inside_figure,
    "maps": maps_figure,
}
