"""Figures of an experiment: orbits, force arrows, predicted against true F, Pareto fronts, length and probes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from softplus_attention.charts.draw import draw
from softplus_attention.charts.model import LineChart, Series
from softplus_attention.physics.stages import Folder, read_arrays, read_json
from softplus_attention.physics.summary import pretrained_force
from softplus_attention.utils.files import replacing


def draw_all(folder: Folder) -> list[Path]:
    """Draws every figure whose data exist; returns the paths."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    target = folder.path / "figures"
    target.mkdir(parents=True, exist_ok=True)
    drawn = []
    for paint in (orbits, force_arrows, said_against_true, pareto_fronts):
        figure = paint(folder, pyplot)
        if figure is not None:
            path = target / f"{paint.__name__}.png"
            with replacing(path) as file:
                figure.savefig(file, format="png", dpi=130, bbox_inches="tight")
            pyplot.close(figure)
            drawn.append(path)
    for chart in (length, probes):
        panels = chart(folder)
        if panels:
            drawn += draw(panels, target / chart.__name__)
    return drawn


def first_runs(folder: Folder, name: str) -> list[tuple[str, Path]]:
    """For each arm, the file of the first seed that has it."""
    found = []
    for arm in folder.experiment.arms:
        files = [folder.run(arm, seed) / name for seed in folder.experiment.seeds]
        file = next((file for file in files if file.is_file()), None)
        if file is not None:
            found.append((arm, file))
    return found


def grid(pyplot: Any, rows: int, columns: int, size: float = 3.0) -> tuple[Any, Any]:
    shape = (size * columns, size * rows)
    return pyplot.subplots(rows, columns, figsize=shape, squeeze=False, layout="constrained")


def orbits(folder: Folder, pyplot: Any) -> Any:
    """The planet's path relative to the star: true, and rolled out beyond the training length."""
    runs = first_runs(folder, "roll_out.npz")
    if not runs:
        return None
    figure, axes = grid(pyplot, len(runs), 3)
    for row, (arm, file) in enumerate(runs):
        arrays = read_arrays(file)
        given = folder.experiment.steps
        for column in range(3):
            axis = axes[row, column]
            for name, colour, width in (("true", "0.75", 3.0), ("said", "C3", 1.0)):
                way = arrays[name][column, :, 0] - arrays[name][column, :, 1]
                start = 0 if name == "true" else given
                axis.plot(*way[start:].T, color=colour, lw=width, label={"true": "true", "said": "rolled out"}[name])
            axis.plot(0, 0, "*", color="C1", ms=9)
            axis.set_aspect("equal")
            axis.set_title(f"{arm}, {given} steps given, to {len(way)}", fontsize=8)
            reach = 1.6 * np.abs(arrays["true"][column, :, 0] - arrays["true"][column, :, 1]).max()
            axis.set_xlim(-reach, reach)
            axis.set_ylim(-reach, reach)
    axes[0, 0].legend(fontsize=7)
    return figure


def shown_cells(folder: Folder) -> list[Any]:
    """For each arm, the pre-trained cell with most labels of the first seed that has forces."""
    cells = []
    for arm in folder.experiment.arms:
        found = [
            folder.cell(arm, seed, labels, True)
            for seed in folder.experiment.seeds
            for labels in sorted(folder.experiment.labels, reverse=True)
        ]
        cell = next((cell for cell in found if (cell.folder / "force.npz").is_file()), None)
        if cell is not None:
            cells.append(cell)
    return cells


def force_arrows(folder: Folder, pyplot: Any) -> Any:
    """True and predicted forces as arrows. If the target is a magnitude, both have the true direction."""
    cells = shown_cells(folder)
    if not cells:
        return None
    figure, axes = grid(pyplot, len(cells), 3)
    for row, cell in enumerate(cells):
        arrays = read_arrays(cell.folder / "force.npz")
        for column in range(3):
            axis = axes[row, column]
            way = arrays["shown/places"][column, :, 0] - arrays["shown/places"][column, :, 1]
            some = slice(folder.experiment.first_step, None, max(1, len(way) // 20))
            longest = np.linalg.norm(arrays["shown/true"][column, some], axis=-1).max()
            unit = 0.8 * np.linalg.norm(way, axis=-1).max() / longest
            axis.plot(*way.T, color="0.8", lw=1)
            for name, colour, width in (("true", "0.45", 0.012), ("said", "C3", 0.006)):
                arrows = arrays[f"shown/{name}"][column, some] * unit
                axis.quiver(*way[some].T, *arrows.T, color=colour, angles="xy", scale_units="xy", scale=1, width=width)
            axis.plot(0, 0, "*", color="C1", ms=9)
            axis.set_aspect("equal")
            axis.set_title(f"{cell.arm}, {cell.labels} labels", fontsize=8)
            # quiver adds no legend entry.
            for name, colour in (("true", "0.45"), ("said", "C3")):
                axis.plot([], [], color=colour, label=f"force, {'predicted' if name == 'said' else name}")
    axes[0, 0].legend(fontsize=7)
    return figure


def said_against_true(folder: Folder, pyplot: Any) -> Any:
    cells = shown_cells(folder)
    if not cells:
        return None
    figure, axes = grid(pyplot, 1, len(cells))
    for axis, cell in zip(axes[0], cells, strict=True):
        arrays = read_arrays(cell.folder / "force.npz")
        for name, colour in (("wider", "C0"), ("heavier", "C2"), ("inside", "C3")):
            if f"{name}/said" in arrays:
                some = slice(None, None, max(1, len(arrays[f"{name}/said"]) // 1500))
                axis.plot(
                    arrays[f"{name}/true"][some], arrays[f"{name}/said"][some], ".", ms=2, color=colour, label=name
                )
        ends = [arrays["inside/true"].min(), arrays["inside/true"].max()]
        axis.plot(ends, ends, color="k", lw=0.8)
        axis.set_xscale("log")
        axis.set_yscale("log")
        axis.set_xlabel("true F")
        axis.set_ylabel("predicted F")
        axis.set_title(f"{cell.arm}, {cell.labels} labels", fontsize=8)
    axes[0, 0].legend(fontsize=7, markerscale=4)
    return figure


def pareto_fronts(folder: Folder, pyplot: Any) -> Any:
    """Error against expression length, from predicted forces, true forces with the same noise, and true forces."""
    cells = [cell for cell in shown_cells(folder) if (cell.folder / "laws.json").is_file()]
    if not cells:
        return None
    scale = folder.experiment.law_scales[0]
    figure, axes = grid(pyplot, 1, len(cells))
    for axis, cell in zip(axes[0], cells, strict=True):
        found = read_json(cell.folder / "laws.json")
        truth = read_json(folder.path / "controls" / f"seed{cell.seed}.json")
        sources = {"predicted": found, "true + noise": found.get("control_with_noise"), "true": truth}
        for (name, source), colour in zip(sources.items(), ("C3", "C0", "0.4"), strict=True):
            sample = source["laws"][scale][0] if source else {}
            if "operon" not in sample:
                continue
            front = sample["operon"]["front"]
            axis.plot([c["length"] for c in front], [c["error"] for c in front], "o-", ms=3, color=colour, label=name)
            chosen = sample["operon"]["chosen"]["within"]
            axis.annotate(chosen["law"], (chosen["length"], chosen["error"]), fontsize=6, color=colour)
        axis.set_yscale("log")
        axis.set_xlabel("length")
        axis.set_ylabel(f"mean absolute error ({scale})")
        axis.set_title(f"{cell.arm}, {cell.labels} labels", fontsize=8)
    axes[0, 0].legend(fontsize=7)
    return figure


def length(folder: Folder) -> list[LineChart]:
    """Errors of force, next position and roll-out beyond the training length: median and range of the seeds."""
    found: dict[str, list[Any]] = {}
    for arm, seed in folder.runs():
        if (folder.run(arm, seed) / "long.json").is_file():
            found.setdefault(arm, []).append(read_json(folder.run(arm, seed) / "long.json"))
    panels: dict[str, Callable[[Any], dict[int, float]]] = {
        "1 - R^2 of the force": lambda run: {int(r["multiple"]): 1 - r["r2"] for r in pretrained_force(run)},
        "error of the next position, AU": lambda run: {r["multiple"]: r["error"] for r in run["next_place"]},
        "roll-out: distance from the ellipse, semi-major axes": lambda run: {
            r["multiple"]: r["median_ellipse_error"] for r in run["roll_out"]
        },
    }
    charts = []
    for title, values_of in panels.items():
        series = [
            curve(arm, [values_of(run) for run in runs], number) for number, (arm, runs) in enumerate(found.items())
        ]
        if found:
            charts.append(LineChart(title, "steps / trained steps", "", series, x_scale="log2", y_scale="log"))
    return charts


def curve(arm: str, seeds: list[dict[int, float]], look: int) -> Series:
    values = [[seed[multiple] for seed in seeds] for multiple in seeds[0]]
    band = ([min(row) for row in values], [max(row) for row in values]) if len(seeds) > 1 else None
    return Series(arm, list(seeds[0]), [float(np.median(row)) for row in values], look=look, band=band)


def probes(folder: Folder) -> list[LineChart]:
    charts = []
    for arm, file in first_runs(folder, "probes.json"):
        series = [
            Series(name, range(len(values)), np.maximum(values, -0.1).tolist(), look=number)
            for number, (name, values) in enumerate(read_json(file)["r2"].items())
        ]
        charts.append(LineChart(f"{arm}: linear probes", "layer", "R^2", series, y_range=(-0.1, 1.02)))
    return charts
