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
# Positions looked at in a sequence. Neighbours say nearly the same, and twelve layers at all of 500 fill a machine.
POSITIONS = 50


def hidden_states(model: OrbitGPTForTrajectories, batch: dict[str, torch.Tensor]) -> list[Array]:
    """The residual stream at the positions of ``probed``, before layer 1 and after each layer, in float32."""
    device = next(model.parameters()).device
    length = batch["coordinates"].shape[1]
    at = torch.from_numpy(probed(length)).to(device)
    layers: list[list[Array]] = []
    for begin in range(0, batch["coordinates"].shape[0], SYSTEMS_AT_ONCE):
        part = {name: values[begin : begin + SYSTEMS_AT_ONCE].to(device) for name, values in batch.items()}
        with torch.no_grad():
            outputs = model(part["coordinates"], part["roles"], part["bodies"], output_hidden_states=True)
        layers.append([h[:, at].flatten(0, 1).float().cpu().numpy() for h in outputs.hidden_states or ()])
    return [np.concatenate(parts) for parts in zip(*layers, strict=True)]


def probed(length: int) -> Any:
    """The planet's positions in the second half; evenly spaced ones where there are many."""
    at = planet_positions(length)
    half = at[len(at) // 2 :]
    return half[np.linspace(0, len(half) - 1, min(len(half), POSITIONS)).round().astype(int)]


def probe_targets(systems: OrbitalSystems, places: Array, length: int) -> dict[str, Array]:
    """What is looked for at those positions, (points, columns) each."""
    steps = (probed(length) - 1) // 2
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


def linear_fit(
    states: Array, targets: dict[str, Array], states_test: Array, targets_test: dict[str, Array]
) -> dict[str, float]:
    """R^2 of each target on systems that the line was not fitted to, the mean over its columns."""
    states, states_test = states.astype(np.float64), states_test.astype(np.float64)
    mean, scale = states.mean(0), states.std(0) + 1e-12
    X = np.concatenate([(states - mean) / scale, np.ones((len(states), 1))], 1)
    X_test = np.concatenate([(states_test - mean) / scale, np.ones((len(states_test), 1))], 1)
    weights = np.linalg.solve(X.T @ X + RIDGE * len(X) * np.eye(X.shape[1]), X.T @ np.hstack(list(targets.values())))
    said = X_test @ weights
    found, column = {}, 0
    for name, true in targets_test.items():
        error = ((said[:, column : column + true.shape[1]] - true) ** 2).sum(0)
        found[name] = float((1 - error / ((true - true.mean(0)) ** 2).sum(0)).mean())
        column += true.shape[1]
    return found


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
    layers = [
        linear_fit(states, targets, states_test, targets_test)
        for states, states_test in zip(fitted, tested, strict=True)
    ]
    return {
        "systems": experiment.probe_systems,
        "points": len(fitted[0]),
        "r2": {name: [layer[name] for layer in layers] for name in targets},
    }
