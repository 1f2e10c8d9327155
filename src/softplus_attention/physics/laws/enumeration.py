"""Exhaustive enumeration of expressions up to a size, each with one free factor.

A check of genetic programming: a law that both find comes from the data, not from the search.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from softplus_attention.physics.laws.exponents import NAMES
from softplus_attention.physics.laws.front import Candidate, describe_front, pareto_front
from softplus_attention.physics.laws.operon import least_absolute_factor, prepared
from softplus_attention.physics.orbits import Array

BINARY: dict[str, Callable[[Array, Array], Array]] = {
    "+": np.add,
    "-": np.subtract,
    "*": np.multiply,
    "/": np.divide,
}
UNARY: dict[str, Callable[[Array], Array]] = {
    "sqrt": np.sqrt,
    "square": np.square,
    "inv": np.reciprocal,
    "sin": np.sin,
    "cos": np.cos,
    "exp": np.exp,
}
COMMUTES = ("+", "*")
SCREENED_POINTS = 96
# Of each size, the best expressions at the screening points that are evaluated at all points.
KEPT = 20

Part = tuple[int, NDArray[np.int64]]
Made = tuple[str, tuple[int, int], tuple[int, int]]


@dataclass(frozen=True)
class Level:
    """The distinct expressions of one size: their values at the screening points and their construction."""

    values: Array  # (expressions, points)
    made: list[Made]  # operator, (size, index) of each part


def enumerated(
    m1: Array,
    m2: Array,
    r: Array,
    force: Array,
    *,
    scale: str = "ln_force",
    size: int = 8,
    unary: tuple[str, ...] = ("sqrt",),
    seed: int = 0,
) -> dict[str, Any]:
    """The front and the chosen laws among all expressions of up to ``size`` symbols."""
    features, target = prepared(m1, m2, r, force, scale)
    chosen = np.random.default_rng(seed).permutation(len(features))[:SCREENED_POINTS]
    levels = grow(features[chosen].T, size, unary)
    spread = float(np.abs(target - np.median(target)).mean())
    candidates = []
    for length, level in levels.items():
        if not level.made:
            continue
        errors = compute_errors(level.values, target[chosen], scale)
        for index in np.argsort(errors)[:KEPT]:
            if np.isfinite(errors[index]):
                candidates.append(build_candidate(levels, length, int(index), features, target, scale))
    return describe_front(pareto_front(candidates, spread), features, spread)


def grow(variables: Array, size: int, unary: tuple[str, ...]) -> dict[int, Level]:
    """All distinct expressions by size. Of those that agree at the screening points only the shortest is kept."""
    levels = {1: Level(variables, [(name, (0, 0), (0, 0)) for name in NAMES])}
    known = {row.tobytes() for row in keys(variables)}
    for length in range(2, size + 1):
        values: list[Array] = []
        made: list[Made] = []
        for block, operator, left, right in combined(levels, length, unary):
            greatest = np.abs(block).max(1)
            usable = np.isfinite(block).all(1) & (greatest < 1e12) & (greatest > 1e-12)
            for index, key in zip(np.flatnonzero(usable), keys(block[usable]), strict=True):
                digest = key.tobytes()
                if digest not in known:
                    known.add(digest)
                    values.append(block[index])
                    made.append((operator, (left[0], int(left[1][index])), (right[0], int(right[1][index]))))
        levels[length] = Level(np.stack(values) if values else np.empty((0, variables.shape[1])), made)
    return levels


def combined(levels: dict[int, Level], length: int, unary: tuple[str, ...]) -> Iterator[tuple[Array, str, Part, Part]]:
    """Blocks of expressions of this length, with the operator and the size and indices of its operands."""
    with np.errstate(all="ignore"):
        inner = levels[length - 1].values
        one = (length - 1, np.arange(len(inner)))
        for operator in unary if len(inner) else ():
            yield UNARY[operator](inner), operator, one, one
        for first in range(1, length - 1):
            second = length - 1 - first
            a, b = levels[first].values, levels[second].values
            left, right = (grid.ravel() for grid in np.indices((len(a), len(b))))
            for operator, function in BINARY.items():
                if len(left) and not (operator in COMMUTES and first > second):
                    yield function(a[left], b[right]), operator, (first, left), (second, right)


def keys(values: Array) -> NDArray[np.int64]:
    """Keys that are equal for equal expressions: eight digits of their values at four points."""
    some = values[:, :4]
    with np.errstate(all="ignore"):
        exponent = np.floor(np.log10(np.maximum(np.abs(some), 1e-300)))
        digits = np.round(some / 10.0**exponent * 1e7)
    return np.concatenate([digits, exponent], 1).astype(np.int64)


def compute_errors(values: Array, target: Array, scale: str) -> Array:
    """The mean absolute error of each row with its best factor."""
    with np.errstate(all="ignore"):
        if scale == "ln_force":
            difference = target - np.log(values)
            return np.abs(difference - np.median(difference, axis=1, keepdims=True)).mean(1)
        ratio, weight = target / values, np.abs(values)
        order = np.argsort(ratio, axis=1)
        total = np.cumsum(np.take_along_axis(weight, order, 1), 1)
        middle = (total < total[:, -1:] / 2).sum(1)
        factor = np.take_along_axis(ratio, np.take_along_axis(order, middle[:, None], 1), 1)
        return np.abs(factor * values - target).mean(1)


def build_candidate(
    levels: dict[int, Level], length: int, index: int, features: Array, target: Array, scale: str
) -> Candidate:
    def evaluate(X: Array) -> Array:
        with np.errstate(all="ignore"):
            return evaluate_law(levels, length, index, X)

    values = evaluate(features)
    with np.errstate(all="ignore"):
        if scale == "ln_force":
            difference = target - np.log(values)
            error = float(np.abs(difference - np.median(difference)).mean())
        else:
            error = float(np.abs(least_absolute_factor(values, target) * values - target).mean())
    return Candidate(format_law(levels, length, index), length, error, evaluate)


def evaluate_law(levels: dict[int, Level], length: int, index: int, X: Array) -> Array:
    operator, left, right = levels[length].made[index]
    if operator in NAMES:
        return X[:, NAMES.index(operator)]
    if operator in UNARY:
        return UNARY[operator](evaluate_law(levels, *left, X))
    return BINARY[operator](evaluate_law(levels, *left, X), evaluate_law(levels, *right, X))


def format_law(levels: dict[int, Level], length: int, index: int) -> str:
    operator, left, right = levels[length].made[index]
    if operator in NAMES:
        return operator
    if operator in UNARY:
        return f"{operator}({format_law(levels, *left)})"
    return f"({format_law(levels, *left)} {operator} {format_law(levels, *right)})"
