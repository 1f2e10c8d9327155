"""Results of symbolic regression: the Pareto front, the selection rules, and the name of a law."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from softplus_attention.physics.laws.exponents import NAMES
from softplus_attention.physics.orbits import Array

# Errors that differ by less than this fraction of the target's spread count as equal (rounding).
ROUNDING = 1e-6
# Rule "within": the shortest expression whose error is at most this times the lowest.
FACTOR = 1.1
# Maximum range of the local exponents of a power law over the data.
MAX_RANGE = 0.03
# An exponent is rounded to a half-integer within this relative distance (absolute below 1): genetic programming on ln F
# multiplies all exponents by a common factor.
NEAR = 0.06

Evaluate = Callable[[Array], Array]


@dataclass(frozen=True)
class Candidate:
    """An expression in (m1, m2, r): ``evaluate`` takes the features (N, 3) and gives F up to a constant factor."""

    expression: str
    length: int
    error: float
    evaluate: Evaluate


def pareto_front(candidates: Sequence[Candidate], spread: float) -> list[Candidate]:
    """From short to long; each is better than all shorter ones by more than rounding."""
    front: list[Candidate] = []
    best = np.inf
    for candidate in sorted(candidates, key=lambda c: (c.length, c.error)):
        if np.isfinite(candidate.error) and candidate.error < best - ROUNDING * spread:
            front.append(candidate)
            best = candidate.error
    return front


def choose_within(front: Sequence[Candidate], spread: float) -> Candidate:
    """The shortest whose error is at most ``FACTOR`` times the lowest."""
    lowest = min(candidate.error for candidate in front)
    return next(c for c in front if c.error <= FACTOR * lowest + ROUNDING * spread)


def choose_by_score(front: Sequence[Candidate], spread: float) -> Candidate:
    """The greatest decrease of ln error per unit of length from the previous one: the rule of the published recipe."""
    if len(front) == 1:
        return front[0]
    floor = ROUNDING * spread

    def score(before: Candidate, after: Candidate) -> float:
        return float(np.log(max(before.error, floor) / max(after.error, floor)) / (after.length - before.length))

    scores = [score(before, after) for before, after in pairwise(front)]
    return front[1 + int(np.argmax(scores))]


RULES: dict[str, Callable[[Sequence[Candidate], float], Candidate]] = {
    "within": choose_within,
    "score": choose_by_score,
}


def local_exponents(evaluate: Evaluate, features: Array) -> Array | None:
    """d ln F / d ln x at each point for each feature, (N, 3); None if F changes sign."""
    factor = 1.25
    at = evaluate(features)
    found = np.empty_like(features)
    with np.errstate(all="ignore"):
        for column in range(features.shape[1]):
            moved = features.copy()
            moved[:, column] *= factor
            found[:, column] = np.log(evaluate(moved) / at) / np.log(factor)
    return found if np.isfinite(found).all() else None


def power_law(evaluate: Evaluate, features: Array) -> dict[str, float] | None:
    """The exponents if the expression equals a product of powers over the data, in whatever form; else None."""
    found = local_exponents(evaluate, features)
    if found is None or np.ptp(found, axis=0).max() > MAX_RANGE:
        return None
    return {name: float(value) for name, value in zip(NAMES, np.median(found, axis=0), strict=True)}


def law_name(exponents: dict[str, float] | None) -> str:
    """Such as "m1 m2 / r^2", or "no power law"."""
    if exponents is None:
        return "no power law"
    above: list[str] = []
    below: list[str] = []
    for name in NAMES:
        value = exponents[name]
        simple = round(value * 2) / 2
        power = simple if abs(value - simple) < NEAR * max(1.0, abs(simple)) else round(value, 2)
        if power:
            text = name if abs(power) == 1 else f"{name}^{abs(power):g}"
            (above if power > 0 else below).append(text)
    return (" ".join(above) or "1") + (" / " + " ".join(below) if below else "")


NEWTON = "m1 m2 / r^2"


def describe_front(front: Sequence[Candidate], features: Array, spread: float) -> dict[str, Any]:
    """The front and the choice of each rule, as JSON."""
    points = features[:: max(1, len(features) // 100)]
    named = {id(c): law_name(power_law(c.evaluate, points)) for c in front}
    chosen = {}
    for rule, choose in RULES.items():
        candidate = choose(front, spread)
        chosen[rule] = {
            "law": named[id(candidate)],
            "expression": candidate.expression,
            "length": candidate.length,
            "error": candidate.error,
        }
    return {
        "front": [
            {"length": c.length, "error": c.error, "expression": c.expression, "law": named[id(c)]} for c in front
        ],
        "chosen": chosen,
    }
