"""Least-squares fit of ln F on ln m1, ln m2 and ln r, with confidence intervals clustered by system."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from softplus_attention.physics.orbits import Array
from softplus_attention.validation import fail

NAMES = ("m1", "m2", "r")
# Two-sided 95% of a normal distribution.
DEVIATES = 1.959964


def coefficient_of_determination(predicted: Array, true: Array) -> float:
    """R^2 of the predictions themselves, not of a line fitted to them."""
    return float(1 - ((predicted - true) ** 2).sum() / ((true - true.mean()) ** 2).sum())


def fitted_exponents(
    m1: Array, m2: Array, r: Array, force: Array, system: NDArray[np.int64] | None = None
) -> dict[str, Any]:
    """Exponents, their 95% intervals, the constant and R^2 of the fit. Forces that are not positive are ignored.

    The intervals use the sandwich estimator with one cluster per ``system``, by default one per point.
    """
    usable = np.isfinite(force) & (force > 0)
    if usable.sum() < 8:
        fail("force", "positive at 8 or more points", f"{int(usable.sum())} positive of {len(force)}")
    logs = [np.log(np.asarray(x, dtype=np.float64)[usable]) for x in (m1, m2, r)]
    X = np.stack([np.ones_like(logs[0]), *logs], 1)
    y = np.log(np.asarray(force, dtype=np.float64)[usable])
    inverse = np.linalg.pinv(X.T @ X)
    beta = inverse @ (X.T @ y)
    residual = y - X @ beta
    clusters = np.arange(len(y)) if system is None else np.unique(system[usable], return_inverse=True)[1]
    groups = int(clusters.max()) + 1
    scores = np.zeros((groups, X.shape[1]))
    np.add.at(scores, clusters, X * residual[:, None])
    correction = groups / max(groups - 1, 1) * (len(y) - 1) / max(len(y) - X.shape[1], 1)
    variance = correction * inverse @ (scores.T @ scores) @ inverse
    half = DEVIATES * np.sqrt(np.diag(variance))
    return {
        "exponents": {name: float(b) for name, b in zip(NAMES, beta[1:], strict=True)},
        "intervals": {name: [float(b - h), float(b + h)] for name, b, h in zip(NAMES, beta[1:], half[1:], strict=True)},
        "constant": float(np.exp(beta[0])),
        "r2_of_fit": coefficient_of_determination(X @ beta, y),
        "points": int(usable.sum()),
        "points_left_out": int((~usable).sum()),
        "systems": groups,
    }
