"""The gap in loss between the best LSSAR and the best softmax by model size, and a linear fit of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from experiments.study.records import Run, Size

OURS, THEIRS = "lssar-learned-log-global3", "softmax-qknorm-logn-learned-global3"
WIDE = "-wide"
OURS_WIDE, THEIRS_WIDE = f"{OURS}{WIDE}", f"{THEIRS}{WIDE}"  # heads of 128 in place of 64
OURS_192, THEIRS_192 = f"{OURS_WIDE}192", f"{THEIRS_WIDE}192"
OURS_256, THEIRS_256 = f"{OURS_WIDE}256", f"{THEIRS_WIDE}256"
MIN_SIZES = 3  # a line fits two sizes exactly


@dataclass(frozen=True)
class Slope:
    """Nats per factor of ten in parameters. The standard error is None if no arm has several seeds."""

    value: float
    error: float | None


def on_one_text(sizes: Sequence[Size]) -> list[list[Size]]:
    """Sizes with both arms, grouped by training text and sorted by parameters; only groups of several sizes.

    Groups whose sizes differ only in their parameters come first.
    """
    groups: dict[str, list[Size]] = {}
    for size in sizes:
        if OURS in size.arms and THEIRS in size.arms:
            groups.setdefault(size.any_run.data, []).append(size)
    several = [sorted(group, key=parameters) for group in groups.values() if len(group) > 1]
    return sorted(several, key=lambda group: not alike(group))


def with_wide_heads(sizes: Sequence[Size]) -> list[Size]:
    """Sizes that were also trained with heads of 128, with these runs in place of the others."""
    found = [size for size in sizes if OURS_WIDE in size.arms and THEIRS_WIDE in size.arms]
    return [replace(size, arms={OURS: size.arms[OURS_WIDE], THEIRS: size.arms[THEIRS_WIDE]}) for size in found]


def parameters(size: Size) -> int:
    return size.any_run.parameters


def alike(sizes: Sequence[Size]) -> bool:
    """Whether the sizes agree in training length and tokens."""
    return len({(size.any_run.config["sequence_length"], size.any_run.tokens) for size in sizes}) == 1


def losses(runs: Sequence[Run], multiple: int) -> list[float]:
    return [run.own.loss[multiple] for run in runs if multiple in run.own.loss]


def gap_at(size: Size, multiple: int) -> float | None:
    """The mean loss of LSSAR minus that of softmax."""
    ours, theirs = (losses(size.arms[arm], multiple) for arm in (OURS, THEIRS))
    return sum(ours) / len(ours) - sum(theirs) / len(theirs) if ours and theirs else None


def degrees_of_freedom(sizes: Sequence[Size], multiple: int) -> int:
    """Degrees of freedom of ``variance_of_a_seed``: the number of runs beyond the first of each arm and size."""
    return sum(max(0, len(losses(size.arms[arm], multiple)) - 1) for size in sizes for arm in (OURS, THEIRS))


def variance_of_a_seed(sizes: Sequence[Size], multiple: int) -> float | None:
    """The variance of runs around the mean of their arm, pooled over arms and sizes."""
    squares, freedom = 0.0, degrees_of_freedom(sizes, multiple)
    for size in sizes:
        for arm in (OURS, THEIRS):
            found = losses(size.arms[arm], multiple)
            mean = sum(found) / max(1, len(found))
            squares += sum((loss - mean) ** 2 for loss in found)
    return squares / freedom if freedom else None


def slope_at(sizes: Sequence[Size], multiple: int) -> Slope | None:
    """Weighted least squares of the gaps: a gap of n and m seeds has the weight 1 / (1 / n + 1 / m)."""
    points = [(size, gap) for size in sizes if (gap := gap_at(size, multiple)) is not None]
    if len(points) < MIN_SIZES:
        return None
    x = [math.log10(parameters(size)) for size, _ in points]
    # The variance of a gap, in units of the variance of one run.
    variances = [sum(1 / len(losses(size.arms[arm], multiple)) for arm in (OURS, THEIRS)) for size, _ in points]
    weights = [1 / variance for variance in variances]
    center = sum(w * value for w, value in zip(weights, x, strict=True)) / sum(weights)
    spread = sum(w * (value - center) ** 2 for w, value in zip(weights, x, strict=True))
    products = zip(weights, x, points, strict=True)
    value = sum(w * (place - center) * gap for w, place, (_, gap) in products) / spread
    of_a_seed = variance_of_a_seed(sizes, multiple)
    return Slope(value, None if of_a_seed is None else math.sqrt(of_a_seed / spread))


def step_ratio(size: Size) -> float | None:
    """Step time relative to softmax, for runs alone on the GPU with the same commit and machine."""
    alone = {arm: [run for run in size.arms[arm] if run.processes == 1] for arm in (OURS, THEIRS)}
    for ours in alone[OURS]:
        for theirs in alone[THEIRS]:
            if (ours.commit, ours.machine) == (theirs.commit, theirs.machine):
                return ours.step_seconds / theirs.step_seconds
    return None
