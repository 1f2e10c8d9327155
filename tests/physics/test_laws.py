"""Symbolic regression on known forces."""

from __future__ import annotations

import time

import numpy as np
import pytest

from softplus_attention.physics.laws.enumeration import enumerated
from softplus_attention.physics.laws.exponents import fitted_exponents
from softplus_attention.physics.laws.front import (
    NEWTON,
    Candidate,
    choose_by_score,
    choose_within,
    law_name,
    pareto_front,
    power_law,
)
from softplus_attention.physics.laws.operon import least_absolute_factor, prepared, search
from softplus_attention.physics.orbits import G

CHOSEN = ("within", "score")


def newton(noise: float, count: int = 1000) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(3)
    m1, m2 = np.exp(rng.uniform(np.log(0.3), np.log(3), (2, count)))
    r = rng.uniform(0.4, 4.5, count)
    return m1, m2, r, G * m1 * m2 / r**2 * np.exp(noise * rng.standard_normal(count))


@pytest.mark.parametrize(
    "noise", [pytest.param(0.0, marks=pytest.mark.slow), pytest.param(0.01, marks=pytest.mark.slow), 0.05]
)
def test_law_from_true_force(noise: float) -> None:
    data = newton(noise)
    begun = time.perf_counter()
    evolved = search(*data, seconds=20)
    listed = enumerated(*data, size=7)
    assert time.perf_counter() - begun < 60
    for rule in CHOSEN:
        assert evolved["chosen"][rule]["law"] == NEWTON
        assert listed["chosen"][rule]["law"] == NEWTON
    assert listed["chosen"]["within"]["length"] == 7


def test_law_from_true_force_on_linear_scale() -> None:
    data = newton(0.05)
    assert search(*data, scale="force", seconds=20)["chosen"]["within"]["law"] == NEWTON
    assert enumerated(*data, scale="force", size=7)["chosen"]["within"]["law"] == NEWTON


def test_enumerator_finds_other_laws() -> None:
    m1, m2, r, _ = newton(0)
    assert enumerated(m1, m2, r, m1 / r, size=5)["chosen"]["within"]["law"] == "m1 / r"
    assert enumerated(m1, m2, r, (m1 + m2) / r, size=5)["chosen"]["within"]["law"] == "no power law"
    assert enumerated(m1, m2, r, np.sqrt(m1) * r, size=5)["chosen"]["within"]["law"] == "m1^0.5 r"


def test_exponents_and_their_intervals() -> None:
    m1, m2, r, force = newton(0)
    exact = fitted_exponents(m1, m2, r, force)
    assert exact["exponents"] == pytest.approx({"m1": 1, "m2": 1, "r": -2}, abs=1e-12)
    assert exact["constant"] == pytest.approx(G)
    # 95% intervals contain the truth about that often, also with noise per system.
    rng = np.random.default_rng(0)
    covered = []
    for _ in range(200):
        systems = np.repeat(np.arange(60), 5)
        a, b = (np.repeat(np.exp(rng.uniform(-1, 1, 60)), 5) for _ in range(2))
        c = np.exp(rng.uniform(-1, 1, 300))
        noise = np.repeat(0.2 * rng.standard_normal(60), 5) + 0.1 * rng.standard_normal(300)
        low, high = fitted_exponents(a, b, c, a * b / c**2 * np.exp(noise), systems)["intervals"]["m1"]
        covered.append(low <= 1 <= high)
    assert 0.88 <= np.mean(covered) <= 0.99
    some = fitted_exponents(m1, m2, r, np.where(np.arange(1000) < 900, force, -1.0))
    assert some["points_left_out"] == 100
    with pytest.raises(ValueError, match="`force` must be positive at 8 or more points"):
        fitted_exponents(m1, m2, r, -force)


def candidate(length: int, error: float) -> Candidate:
    return Candidate(f"{length}", length, error, lambda X: X[:, 0])


def test_selection_rules() -> None:
    front = pareto_front([candidate(*x) for x in ((9, 0.99), (1, 10.0), (3, 9.0), (5, 1.05), (7, 1.0), (6, 2.0))], 10.0)
    assert [c.length for c in front] == [1, 3, 5, 7, 9]
    assert choose_within(front, 10.0).length == 5
    assert choose_by_score(front, 10.0).length == 5
    assert choose_within(pareto_front([candidate(5, 1e-9), candidate(7, 1e-10)], 1.0), 1.0).length == 5


def test_power_laws_in_any_form() -> None:
    X = np.exp(np.random.default_rng(0).uniform(-1, 1, (50, 3)))
    assert law_name(power_law(lambda X: 3 * X[:, 0] / (X[:, 2] * (X[:, 2] / X[:, 1])), X)) == NEWTON
    assert law_name(power_law(lambda X: X[:, 0] / X[:, 2] ** 2, X)) == "m1 / r^2"
    assert law_name(power_law(lambda X: np.cos(np.cos(2.19 * X[:, 0])), X)) == "no power law"
    assert law_name(power_law(lambda X: np.ones(len(X)), X)) == "1"


def test_factor_of_least_absolute_error() -> None:
    rng = np.random.default_rng(0)
    f = rng.uniform(0.1, 3, 200)
    y = 2 * f + rng.standard_cauchy(200)
    best = least_absolute_factor(f, y)
    errors = [np.abs(c * f - y).sum() for c in (best, best * 1.01, best * 0.99)]
    assert errors[0] == min(errors)


def test_bad_forces() -> None:
    m1, m2, r, force = newton(0, 50)
    with pytest.raises(ValueError, match="`force` must be positive at some points"):
        prepared(m1, m2, r, -force, "ln_force")
    with pytest.raises(ValueError, match="`scale` must be one of"):
        prepared(m1, m2, r, force, "log")
