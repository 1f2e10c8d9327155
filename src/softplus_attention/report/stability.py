"""Training at high learning rates and in half precision: results of experiments/stability.py."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from softplus_attention.charts.model import LineChart, Series, SeriesStyles
from softplus_attention.report.discovery import Result, ResultSet
from softplus_attention.report.sections import Block, checked
from softplus_attention.utils.untrusted import UnreadableError, number_of, text_of, typed

LAST = 5  # number of final logged losses that are averaged
# Title, axis and caption by field of a run.
FIGURES = {
    "loss": ("Loss by learning rate", "loss at the end (nats)", "Runs with infinite or NaN losses have no point."),
    "score": ("Largest score by learning rate", "largest score", "Absolute value before softmax or softplus."),
}


@dataclass(frozen=True)
class Trained:
    arm: str
    group: tuple[str, str]  # size and precision
    rate: float
    loss: float | None  # None if the run stopped
    score: float | None


def final_loss(logged: Sequence[Any]) -> float | None:
    """Mean of the last losses; None if one is not finite, which the logs have as a string."""
    last = [loss for loss in logged[-LAST:] if isinstance(loss, int | float) and not isinstance(loss, bool)]
    return math.fsum(last) / len(last) if last and len(last) == len(logged[-LAST:]) else None


def read_run(result: Result) -> Trained:
    data = result.data
    rate = number_of(data, "learning_rate")
    if rate is None or rate <= 0:
        raise UnreadableError("`learning_rate` must be above 0")
    pairs = typed(data, "losses", list, "a list")
    if not all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
        raise UnreadableError("`losses` must be pairs of a step and a loss")
    loss = None if data.get("stopped") is not None else final_loss([loss for _, loss in pairs])
    group = (text_of(data, "size"), text_of(data, "precision"))
    return Trained(text_of(data, "arm"), group, rate, loss, number_of(data, "largest_score"))


def stability_blocks(found: ResultSet, styles: SeriesStyles) -> list[Block]:
    runs: list[Trained] = checked(found, "stability", read_run)
    blocks: list[Block] = []
    for group in dict.fromkeys(run.group for run in runs):
        mine = sorted((run for run in runs if run.group == group), key=lambda run: run.rate)
        arms = dict.fromkeys(run.arm for run in mine)
        for name, (title, axis, caption) in FIGURES.items():
            series = [
                Series(
                    arm,
                    [run.rate for run in mine if run.arm == arm],
                    [getattr(run, name) for run in mine if run.arm == arm],
                    look=styles.of(arm),
                )
                for arm in arms
            ]
            scale = "log" if name == "score" else "linear"
            heading = f"{title} ({', '.join(group)})"
            blocks.append(LineChart(heading, "learning rate", axis, series, caption, x_scale="log2", y_scale=scale))
    return blocks
