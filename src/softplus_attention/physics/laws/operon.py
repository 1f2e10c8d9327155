"""Symbolic regression with pyoperon: genetic programming on two objectives, error and length."""

from __future__ import annotations

from typing import Any

import numpy as np

from softplus_attention.physics.laws.exponents import NAMES
from softplus_attention.physics.laws.front import Candidate, Evaluate, describe_front, pareto_front
from softplus_attention.physics.orbits import Array
from softplus_attention.validation import fail, fail_choice

SCALES = ("ln_force", "force")


def prepared(m1: Array, m2: Array, r: Array, force: Array, scale: str) -> tuple[Array, Array]:
    """Features and target divided by their medians: in raw units the search fails even on exact data."""
    if scale not in SCALES:
        fail_choice("scale", SCALES, scale)
    features = np.stack([m1 / np.median(m1), m2 / np.median(m2), r / np.median(r)], 1)
    if scale == "force":
        return features, force / np.median(np.abs(force))
    usable = force > 0
    if not usable.any():
        fail("force", "positive at some points", "none")
    return features[usable], np.log(force[usable] / np.median(force[usable]))


def search(
    m1: Array,
    m2: Array,
    r: Array,
    force: Array,
    *,
    scale: str = "ln_force",
    operators: str = "add,sub,mul,div",
    length: int = 15,
    seconds: int = 20,
    generations: int = 60,
    restarts: int = 1,
    seed: int = 0,
) -> dict[str, Any]:
    """The front and the chosen laws of F(m1, m2, r), by mean absolute error of F or of ln F.

    All ``restarts`` share one front: a single one sometimes misses the law, mostly in noisy data.
    """
    from pyoperon.sklearn import SymbolicRegressor

    features, target = prepared(m1, m2, r, force, scale)
    symbols = f"{operators},constant,variable" + (",log" if scale == "ln_force" else "")
    candidates = []
    for restart in range(restarts):
        engine = SymbolicRegressor(
            allowed_symbols=symbols,
            objectives=["mae", "length"],
            population_size=500,
            pool_size=500,
            generations=generations,
            max_evaluations=10_000_000,
            optimizer_iterations=3,
            max_length=length,
            n_threads=1,
            max_time=seconds,
            random_state=restarts * seed + restart,
        )
        engine.fit(features, target)
        candidates += [candidate(engine, found, features, target, scale) for found in engine.pareto_front_]
    spread = float(np.abs(target - np.median(target)).mean())
    return describe_front(pareto_front(candidates, spread), features, spread)


def candidate(engine: Any, found: dict[str, Any], features: Array, target: Array, scale: str) -> Candidate:
    """pyoperon adds a factor and an offset; on F the offset is dropped if that raises the error by at most 10%."""
    import pyoperon

    tree, expression = found["tree"], found["model"]
    for index, name in enumerate(NAMES, 1):
        expression = expression.replace(f"X{index}", name)

    def raw(X: Array) -> Array:
        return np.asarray(engine.evaluate_model(tree, X), dtype=np.float64)

    error = float(np.abs(raw(features) - target).mean())
    evaluate: Evaluate = raw
    if scale == "ln_force":

        def evaluate(X: Array) -> Array:
            with np.errstate(all="ignore"):
                return np.exp(raw(X))
    else:
        nodes = list(tree.Nodes)
        has_offset = len(nodes) > 2 and nodes[-1].Type == pyoperon.NodeType.Add and nodes[-2].IsConstant
        core = pyoperon.Tree(nodes[:-2]).UpdateNodes() if has_offset else None
        if core is not None:

            def without_offset(X: Array) -> Array:
                return np.asarray(engine.evaluate_model(core, X), dtype=np.float64)

            bare = without_offset(features)
            factor = least_absolute_factor(bare, target)
            if np.isfinite(factor) and np.abs(factor * bare - target).mean() <= 1.1 * error:
                evaluate = without_offset
    return Candidate(expression, int(found["length"]), error, evaluate)


def least_absolute_factor(values: Array, target: Array) -> float:
    """The c that minimises the sum of \\|c values - target\\|: a weighted median of the ratios."""
    weight = np.abs(values)
    with np.errstate(all="ignore"):
        ratio = target / values
    usable = np.isfinite(ratio) & (weight > 0)
    if not usable.any():
        return float("nan")
    order = np.argsort(ratio[usable])
    total = np.cumsum(weight[usable][order])
    return float(ratio[usable][order][np.searchsorted(total, total[-1] / 2)])
