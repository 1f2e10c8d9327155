"""Exponents and symbolic regression of predicted forces, and of the controls."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from softplus_attention.physics.distributions import distribution
from softplus_attention.physics.laws.enumeration import enumerated
from softplus_attention.physics.laws.exponents import fitted_exponents
from softplus_attention.physics.laws.operon import search
from softplus_attention.physics.measure import orbit_states, quality
from softplus_attention.physics.orbits import Array, simulate
from softplus_attention.physics.presets import PUBLISHED_OPERATORS, Experiment
from softplus_attention.physics.training import LABELS, stream


def law_settings(experiment: Experiment) -> dict[str, Any]:
    """The settings that affect the laws."""
    names = ("operators", "law_points", "law_samples", "law_scales", "law_length", "law_seconds", "law_restarts")
    return {name: getattr(experiment, name) for name in (*names, "nearest_points")}


def fit_laws(
    m1: Array, m2: Array, r: Array, force: Array, experiment: Experiment, *, enumerator: bool = True
) -> dict[str, Any]:
    """The laws of each random sample of points by genetic programming and enumeration, by the scale of the error."""
    found: dict[str, Any] = {}
    for scale in experiment.law_scales:
        samples: list[dict[str, Any]] = []
        for sample in range(experiment.law_samples):
            chosen = np.random.default_rng((7, sample)).permutation(len(force))[: experiment.law_points]
            points = (m1[chosen], m2[chosen], r[chosen], force[chosen])
            if (points[3] > 0).sum() < 20:
                samples.append({"failed": "fewer than 20 of the forces are positive"})
                continue
            begun = time.perf_counter()
            result: dict[str, Any] = {
                "operon": search(
                    *points,
                    scale=scale,
                    operators=experiment.operators,
                    length=experiment.law_length,
                    seconds=experiment.law_seconds,
                    restarts=experiment.law_restarts,
                    seed=sample,
                )
            }
            if enumerator:
                published = experiment.operators == PUBLISHED_OPERATORS
                unary, size = (("sin", "cos", "exp", "inv"), 6) if published else (("sqrt",), 7)
                result["enumerator"] = enumerated(*points, scale=scale, unary=unary, size=size)
            samples.append({**result, "seconds": time.perf_counter() - begun})
        found[scale] = samples
    return found


def nearest_to_training(arrays: dict[str, Array], experiment: Experiment, labels: int, seed: int) -> Any:
    """Indices of the test points whose states are nearest to labelled states, as in the published recipe."""
    from scipy.spatial import cKDTree

    systems = distribution(experiment.distribution).sample(labels, stream(seed, LABELS))
    orbits = simulate(systems, experiment.steps, velocities=True)
    assert orbits.velocities is not None
    trained = orbit_states(systems, orbits.positions, orbits.velocities).reshape(-1, 6)
    distance, _ = cKDTree(trained).query(arrays["inside/state"], workers=-1)
    return np.argsort(distance)[: experiment.nearest_points]


def points_for_laws(arrays: dict[str, Array], experiment: Experiment, labels: int, seed: int) -> dict[str, Array]:
    """The test points used for the regression."""
    inside = {name: arrays[f"inside/{name}"] for name in ("m1", "m2", "r", "true", "said", "system")}
    if not experiment.nearest_points:
        return inside
    chosen = nearest_to_training(arrays, experiment, labels, seed)
    return {name: values[chosen] for name, values in inside.items()}


def regress(arrays: dict[str, Array], experiment: Experiment, labels: int, seed: int) -> dict[str, Any]:
    """Quality, exponents and laws of the predicted force, and the control with the true force and the model's noise."""
    sets = {name.partition("/")[0] for name in arrays if name.endswith("/said") and not name.startswith("shown")}
    measured = {name: quality(arrays, name) for name in sorted(sets)}
    exponents = {}
    for name in sorted(sets):
        if (arrays[f"{name}/said"] > 0).sum() >= 8:
            m1, m2, r, predicted = (arrays[f"{name}/{column}"] for column in ("m1", "m2", "r", "said"))
            exponents[name] = fitted_exponents(m1, m2, r, predicted, arrays[f"{name}/system"].astype(np.int64))
    points = points_for_laws(arrays, experiment, labels, seed)
    result: dict[str, Any] = {
        "settings": law_settings(experiment),
        "quality": measured,
        "exponents": exponents,
        "laws": fit_laws(points["m1"], points["m2"], points["r"], points["said"], experiment),
    }
    noise = measured["inside"].get("ln_force_noise")
    if noise is not None:
        result["control_with_noise"] = control(points, experiment, noise)
    return result


def control(points: dict[str, Array], experiment: Experiment, noise: float) -> dict[str, Any]:
    """The same regression on the true force, with this standard deviation of noise on ln F."""
    factor = np.exp(noise * np.random.default_rng(11).standard_normal(len(points["true"])))
    columns = (points["m1"], points["m2"], points["r"], points["true"] * factor)
    return {
        "noise": noise,
        "exponents": fitted_exponents(*columns, system=points["system"].astype(np.int64)),
        "laws": fit_laws(*columns, experiment, enumerator=False),
    }


def true_control(arrays: dict[str, Array], experiment: Experiment, labels: int, seed: int) -> dict[str, Any]:
    """The same regression on the true force."""
    points = points_for_laws(arrays, experiment, labels, seed)
    return {"settings": law_settings(experiment), **control(points, experiment, 0.0)}
