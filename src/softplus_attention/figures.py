"""Figures, drawn by matplotlib: each as PNG and SVG, in colours that are told apart without seeing colour."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from softplus_attention.utils.files import replacing

# Okabe and Ito's colours, with a line style each: the order is the order of the curves.
COLOURS = ("#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999999")
STYLES = ("-", "--", "-", "-.", ":", "--", "-.", ":")
MARKERS = ("o", "s", "D", "^", "v", "P", "X", "*")


def length_figure(curves: Mapping[str, Sequence[float]], lengths: Sequence[int], title: str, unit: str) -> Any:
    """Loss against sequence length; the first length is the one trained at."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 4.4), layout="constrained")
    axes = figure.subplots()
    for number, (name, losses) in enumerate(curves.items()):
        look: dict[str, Any] = {"color": COLOURS[number % len(COLOURS)], "linestyle": STYLES[number % len(STYLES)]}
        axes.plot(lengths, losses, label=name, marker=MARKERS[number % len(MARKERS)], linewidth=2, **look)
    axes.axvspan(lengths[0] * 0.9, lengths[0] * 1.1, color="#888888", alpha=0.15, linewidth=0)
    axes.annotate("trained here", (lengths[0], axes.get_ylim()[1]), xytext=(6, -12), textcoords="offset points")
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [f"{n}\n{n // lengths[0]}x" for n in lengths])
    axes.minorticks_off()
    axes.set_xlabel(f"length of the sequence ({unit}, and times the training length)")
    axes.set_ylabel("validation loss (nats)")
    axes.set_title(title)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    return figure


def save(figure: Any, path: Path) -> list[Path]:
    """``path`` with .png and .svg."""
    import matplotlib

    png, svg = (path.with_suffix(suffix) for suffix in (".png", ".svg"))
    # The same figure gives the same file: no date, no random identifiers.
    with matplotlib.rc_context({"svg.hashsalt": "softplus-attention", "svg.fonttype": "none"}):
        with replacing(png) as file:
            figure.savefig(file, format="png", dpi=160)
        with replacing(svg) as file:
            figure.savefig(file, format="svg", metadata={"Date": None})
    return [png, svg]
