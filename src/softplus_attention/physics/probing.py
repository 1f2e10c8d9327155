"""Linear probes: what can be read off each layer of a model of orbits by a line, without tuning anything."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from softplus_attention.physics.distributions import distribution
from softplus_attention.physics.modeling_orbit_gpt import OrbitGPTForTrajectories
from softplus_attention.physics.orbits import Array, OrbitalSystems
from softplus_attention.physics.presets import Experiment
from softplus_attention.physics.sequences import force_targets, planet_positions, sequences
from softplus_attention.physics.training import PROBE, stream, to_tensors

RIDGE = 1e-6
SYSTEMS_AT_ONCE = 64


def hidden_states(model: OrbitGPTForTrajectories, batch: dict[str, torch.Tensor]) -> list[Array]:
    """The residual stream at the planet's positions in the second half, before layer 1 and after each layer."""
    device = next(model.parameters()).device
    length = batch["coordinates"].shape[1]
    at = torch.from_numpy(second_half(length)).to(device)
    layers: list[list[Array]] = []
    for begin in range(0, batch["coordinates"].shape[0], SYSTEMS_AT_ONCE):
        part = {name: values[begin : begin + SYSTEMS_AT_ONCE].to(device) for name, values in batch.items()}
        with torch.no_grad():
            outputs = model(part["coordinates"], part["roles"], part["bodies"], output_hidden_states=True)
        layers.append([h[:, at].flatten(0, 1).double().cpu().numpy() for h in outputs.hidden_states or ()])
    return [np.concatenate(parts) for parts in zip(*layers, strict=True)]


def second_half(length: int) -> Any:
    at = planet_positions(length)
    return at[len(at) // 2 :]


def probe_targets(systems: OrbitalSystems, places: Array, length: int) -> dict[str, Array]:
    """What is looked for at those positions, (points, columns) each."""
    steps = (second_half(length) - 1) // 2
    e, a, orientation = systems.eccentricity[:, 0], systems.semi_major_axis[:, 0], systems.orientation[:, 0]

    def repeated(*columns: Array) -> Array:
        return np.repeat(np.stack(columns, 1), len(steps), axis=0)

    return {
        "force vector": force_targets(systems, places, "vector")[:, steps].reshape(-1, 2),
        "ln force": force_targets(systems, places, "ln_force")[:, steps].reshape(-1, 1),
        "ln semi-major axis": repeated(np.log(a)),
        "eccentricity": repeated(e),
        "eccentricity vector": repeated(e * np.cos(orientation), e * np.sin(orientation)),
        "ln period": repeated(np.log(systems.period[:, 0])),
    }


def linear_fit(states: Array, targets: Array, states_test: Array, targets_test: Array) -> float:
    """R^2 on systems that the line was not fitted to, the mean over columns."""
    mean, scale = states.mean(0), states.std(0) + 1e-12
    X = np.concatenate([(states - mean) / scale, np.ones((len(states), 1))], 1)
    X_test = np.concatenate([(states_test - mean) / scale, np.ones((len(states_test), 1))], 1)
    gram = X.T @ X
    weights = np.linalg.solve(gram + RIDGE * len(X) * np.eye(len(gram)), X.T @ targets)
    error = ((X_test @ weights - targets_test) ** 2).sum(0)
    return float((1 - error / ((targets_test - targets_test.mean(0)) ** 2).sum(0)).mean())


def probe(model: OrbitGPTForTrajectories, experiment: Experiment, seed: int) -> dict[str, Any]:
    """R^2 by target and layer; layer 0 is the embedding."""
    model.eval()
    drawn, form = distribution(experiment.distribution), experiment.clean_form
    found: list[tuple[list[Array], dict[str, Array]]] = []
    for part in range(2):
        rng = stream(seed, PROBE, part)
        systems = drawn.sample(experiment.probe_systems, rng)
        batch, places = sequences(systems, form, rng, drawn.time_steps)
        found.append((hidden_states(model, to_tensors(batch)), probe_targets(systems, places, form.positions)))
    (fitted, targets), (tested, targets_test) = found
    return {
        "systems": experiment.probe_systems,
        "points": len(fitted[0]),
        "r2": {
            name: [
                linear_fit(states, targets[name], states_test, targets_test[name])
                for states, states_test in zip(fitted, tested, strict=True)
            ]
            for name in targets
        },
    }
