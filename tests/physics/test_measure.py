"""Linear probes of orbit models."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from softplus_attention.physics.distributions import distribution
from softplus_attention.physics.measure import POSITIONS, hidden_states, linear_fit, probe_targets, probed
from softplus_attention.physics.modeling_orbit_gpt import OrbitGPTForTrajectories
from softplus_attention.physics.orbits import force_on_planets
from softplus_attention.physics.presets import preset
from softplus_attention.physics.sequences import planet_positions, sequences
from softplus_attention.physics.training import to_tensors, usual_displacement


def test_probe_finds_linear_targets() -> None:
    rng = np.random.default_rng(0)
    states, states_test = rng.normal(5, 3, (4000, 6)), rng.normal(5, 3, (1000, 6))
    line = rng.normal(size=(6, 2))
    noise, noise_test = rng.normal(size=(4000, 1)), rng.normal(size=(1000, 1))
    half, half_test = states[:, :1] + 3 * noise, states_test[:, :1] + 3 * noise_test
    found = linear_fit(
        states,
        {"line": states @ line + 7, "noise": noise, "half noise": half},
        states_test,
        {"line": states_test @ line + 7, "noise": noise_test, "half noise": half_test},
    )
    assert found["line"] == pytest.approx(1, abs=1e-6)
    assert abs(found["noise"]) < 0.02
    assert found["half noise"] == pytest.approx(0.5, abs=0.05)


def test_probe_matches_least_squares() -> None:
    rng = np.random.default_rng(1)
    states, states_test = rng.normal(size=(300, 8)), rng.normal(size=(100, 8))
    true, true_test = rng.normal(size=(300, 2)) + states[:, :2], rng.normal(size=(100, 2)) + states_test[:, :2]
    X, X_test = (np.hstack([x, np.ones((len(x), 1))]) for x in (states, states_test))
    predicted = X_test @ np.linalg.lstsq(X, true, rcond=None)[0]
    expected = (1 - ((predicted - true_test) ** 2).sum(0) / ((true_test - true_test.mean(0)) ** 2).sum(0)).mean()
    assert linear_fit(states, {"x": true}, states_test, {"x": true_test})["x"] == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("positions", [49, 201, 1000], ids=lambda n: f"{n} positions")
def test_probed_positions(positions: int) -> None:
    at, planets = probed(positions), planet_positions(positions)
    assert set(at) <= set(planets[len(planets) // 2 :])
    assert len(set(at)) == len(at) == min(POSITIONS, len(planets) - len(planets) // 2)
    assert at[-1] == planets[-1]


def test_states_match_targets() -> None:
    experiment = preset("smoke")
    form, drawn = experiment.clean_form, distribution(experiment.distribution)
    rng = np.random.default_rng(2)
    systems = drawn.sample(3, rng)
    batch, places = sequences(systems, form, rng, drawn.time_steps)
    model = OrbitGPTForTrajectories(experiment.config("lssar", usual_displacement(experiment)))
    model.eval()
    states = hidden_states(model, to_tensors(batch))
    targets = probe_targets(systems, places, form.positions)
    at = probed(form.positions)
    assert {len(layer) for layer in states} == {3 * len(at)} == {len(values) for values in targets.values()}
    with torch.no_grad():
        alone = model(**{n: x[1:2] for n, x in to_tensors(batch).items() if n != "targets"}, output_hidden_states=True)
    assert np.allclose(states[2][len(at)], alone.hidden_states[2][0, at[0]].numpy(), atol=1e-5)
    step = (at[0] - 1) // 2
    force = np.linalg.norm(force_on_planets(systems, places)[1, step, 0])
    assert targets["ln force"][len(at), 0] == pytest.approx(np.log(force))
