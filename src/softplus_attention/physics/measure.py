"""Measurements of orbit models: linear probes of the layers, predicted forces, errors beyond the training length."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from softplus_attention.physics.distributions import DISTRIBUTIONS, Distribution, distribution
from softplus_attention.physics.laws.exponents import coefficient_of_determination
from softplus_attention.physics.modeling_orbit_gpt import OrbitGPTForForce, OrbitGPTForTrajectories
from softplus_attention.physics.orbits import Array, OrbitalSystems, force_on_planets, simulate
from softplus_attention.physics.presets import Experiment
from softplus_attention.physics.sequences import (
    PLANET,
    STAR,
    detokenise,
    force_targets,
    labelled_batch,
    planet_positions,
    sequences,
)
from softplus_attention.physics.training import (
    LONG,
    PROBE,
    TEST,
    partial_choice,
    partial_systems,
    stream,
    to_tensors,
)

POSITIONS_AT_ONCE = 1 << 16
RIDGE = 1e-6
SYSTEMS_AT_ONCE = 64
# Probed positions of a sequence. Neighbours are nearly equal, and twelve layers at all 500 do not fit into memory.
POSITIONS = 50
SHOWN = 4

# ---- linear probes: ridge regression from each layer, without tuning


def hidden_states(model: OrbitGPTForTrajectories, batch: dict[str, torch.Tensor]) -> list[Array]:
    """The residual stream at the positions of ``probed``, before layer 1 and after each layer, in float32."""
    device = next(model.parameters()).device
    length = batch["coordinates"].shape[1]
    at = torch.from_numpy(probed(length)).to(device)
    layers: list[list[Array]] = []
    for part in split_batch(batch, SYSTEMS_AT_ONCE, device):
        with torch.no_grad():
            outputs = model(part["coordinates"], part["roles"], part["bodies"], output_hidden_states=True)
        layers.append([h[:, at].flatten(0, 1).float().cpu().numpy() for h in outputs.hidden_states or ()])
    return [np.concatenate(parts) for parts in zip(*layers, strict=True)]


def split_batch(batch: dict[str, torch.Tensor], size: int, device: torch.device) -> Iterator[dict[str, torch.Tensor]]:
    for begin in range(0, batch["coordinates"].shape[0], size):
        yield {name: values[begin : begin + size].to(device) for name, values in batch.items()}


def probed(length: int) -> Any:
    """The planet's positions in the second half, at most ``POSITIONS`` of them, evenly spaced."""
    at = planet_positions(length)
    half = at[len(at) // 2 :]
    return half[np.linspace(0, len(half) - 1, min(len(half), POSITIONS)).round().astype(int)]


def probe_targets(systems: OrbitalSystems, places: Array, length: int) -> dict[str, Array]:
    """The targets at the positions of ``probed``, (points, columns) each."""
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
    """R^2 of each target on held-out systems, averaged over its columns."""
    states, states_test = states.astype(np.float64), states_test.astype(np.float64)
    mean, scale = states.mean(0), states.std(0) + 1e-12
    X = np.concatenate([(states - mean) / scale, np.ones((len(states), 1))], 1)
    X_test = np.concatenate([(states_test - mean) / scale, np.ones((len(states_test), 1))], 1)
    weights = np.linalg.solve(X.T @ X + RIDGE * len(X) * np.eye(X.shape[1]), X.T @ np.hstack(list(targets.values())))
    predicted = X_test @ weights
    found, column = {}, 0
    for name, true in targets_test.items():
        error = ((predicted[:, column : column + true.shape[1]] - true) ** 2).sum(0)
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


# ---- predicted forces


def test_distributions(experiment: Experiment) -> dict[str, Distribution]:
    """ "inside" is the training distribution; "heavier" and "wider" are out of distribution, if defined."""
    inside = distribution(experiment.distribution)
    found = {"inside": inside}
    for key in ("heavier", "wider"):
        beyond = DISTRIBUTIONS.get(f"{experiment.distribution}-{key}")
        if beyond is not None:
            found[key] = replace(beyond, time_steps=inside.time_steps)
    return found


def predicted_forces(model: OrbitGPTForForce, experiment: Experiment, seed: int) -> dict[str, Array]:
    """Arrays "SET/NAME": m1, m2, r, true F, predicted F ("said"), system and step of each point; some whole orbits."""
    model.eval()
    arrays: dict[str, Array] = {}
    for number, (name, drawn) in enumerate(test_distributions(experiment).items()):
        partly = name == "inside" and experiment.partial_systems
        systems = (
            partial_systems(experiment, seed)
            if partly
            else drawn.sample(experiment.test_systems, stream(seed, TEST, number))
        )
        found, places, vectors = predict_forces(model, experiment, systems, drawn)
        if partly:
            labelled = partial_choice(experiment, seed, len(systems), places.shape[1])
            keep = ~labelled[found["system"], found["step"]]
            found = {key: values[keep] for key, values in found.items()}
        arrays |= {f"{name}/{key}": values for key, values in found.items()}
        if name == "inside":
            arrays["shown/places"], arrays["shown/said"] = places[:SHOWN], vectors[:SHOWN]
            arrays["shown/true"] = force_on_planets(systems[:SHOWN], places[:SHOWN])[:, :, 0]
    return arrays


def predict_forces(
    model: OrbitGPTForForce, experiment: Experiment, systems: OrbitalSystems, drawn: Distribution
) -> tuple[dict[str, Any], Array, Array]:
    form = experiment.clean_form
    batch = labelled_batch(systems, form, experiment.target, stream(0, TEST, 9), drawn.time_steps)
    del batch["forces"]
    at = planet_positions(form.positions)
    steps = len(at)
    predicted = predict_in_parts(model, to_tensors(batch))[:, at]
    orbits = simulate(systems, steps, velocities=experiment.nearest_points > 0)
    places = orbits.positions
    true = force_on_planets(systems, places)[:, :, 0]
    size = np.linalg.norm(true, axis=-1)
    if experiment.target == "vector":
        vectors, predicted_size = predicted, np.linalg.norm(predicted, axis=-1)
    else:
        predicted_size = np.exp(predicted[..., 0]) if experiment.target == "ln_force" else predicted[..., 0]
        # The model predicts only the magnitude: use the true direction.
        vectors = true * (predicted_size / size)[..., None]
    kept = tested_steps(experiment, steps)
    relative = places[:, :, 0] - places[:, :, 1]
    index, step = np.meshgrid(np.arange(len(systems)), kept, indexing="ij")
    found: dict[str, Any] = {
        "system": index.ravel(),
        "step": step.ravel(),
        "m1": np.repeat(systems.planet_mass[:, 0], len(kept)),
        "m2": np.repeat(systems.star_mass, len(kept)),
        "r": np.linalg.norm(relative, axis=-1)[:, kept].ravel(),
        "true": size[:, kept].ravel(),
        "said": predicted_size[:, kept].ravel(),
    }
    if experiment.target == "vector":
        found["true_vector"], found["said_vector"] = true[:, kept].reshape(-1, 2), predicted[:, kept].reshape(-1, 2)
    if orbits.velocities is not None:
        found["state"] = orbit_states(systems, places, orbits.velocities)[:, kept].reshape(-1, 6)
    return found, places, vectors


def tested_steps(experiment: Experiment, steps: int) -> Any:
    """The tested steps of each system: all from ``first_step`` on, or ``test_steps`` of these."""
    first, count = experiment.first_step, experiment.test_steps
    return np.arange(first, steps) if not count else np.linspace(first, steps - 1, count).round().astype(np.int64)


def orbit_states(systems: OrbitalSystems, places: Array, velocities: Array) -> Array:
    """Relative position, relative velocity and both masses at each step, (S, steps, 6)."""
    masses = np.stack([systems.planet_mass[:, 0], systems.star_mass], -1)
    masses = np.broadcast_to(masses[:, None], (*places.shape[:2], 2))
    return np.concatenate([places[:, :, 0] - places[:, :, 1], velocities[:, :, 0] - velocities[:, :, 1], masses], -1)


def quality(arrays: dict[str, Array], name: str) -> dict[str, Any]:
    """R^2 of F, R^2 of ln F (of positive predictions), and bias and spread of the error of ln F."""
    true, predicted = arrays[f"{name}/true"], arrays[f"{name}/said"]
    usable = predicted > 0
    result: dict[str, Any] = {
        "points": len(true),
        "r2_force": coefficient_of_determination(predicted, true),
        "not_positive": int((~usable).sum()),
    }
    if usable.sum() > 8:
        error = np.log(predicted[usable]) - np.log(true[usable])
        result |= {
            "r2_ln_force": coefficient_of_determination(np.log(predicted[usable]), np.log(true[usable])),
            "ln_force_bias": float(error.mean()),
            "ln_force_rmse": float(np.sqrt((error**2).mean())),
            "ln_force_noise": float(error.std()),
        }
    if f"{name}/true_vector" in arrays:
        result["r2_vector"] = coefficient_of_determination(arrays[f"{name}/said_vector"], arrays[f"{name}/true_vector"])
    return result


# ---- beyond the training length


def long_form(experiment: Experiment, multiple: int) -> Any:
    return replace(experiment.clean_form, positions=1 + multiple * (experiment.positions - 1))


def long_systems(experiment: Experiment, seed: int) -> OrbitalSystems:
    return distribution(experiment.distribution).sample(experiment.long_systems, stream(seed, LONG))


def predict_in_parts(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> Array:
    """The model's predictions, computed in parts that fit into memory."""
    rows = max(1, POSITIONS_AT_ONCE // batch["coordinates"].shape[1])
    out = []
    for part in split_batch(batch, rows, next(model.parameters()).device):
        with torch.no_grad():
            out.append(model(**part).predictions.double().cpu().numpy())
    return np.concatenate(out)


def bucket(multiple: int, multiples: tuple[int, ...], steps: int) -> slice:
    """The steps between the previous multiple and this one."""
    before = max((m for m in multiples if m < multiple), default=0)
    return slice(before * steps, multiple * steps)


def next_places(model: OrbitGPTForTrajectories, experiment: Experiment, seed: int) -> list[dict[str, float]]:
    """The error of the next position, teacher-forced, by position in the sequence."""
    model.eval()
    most, steps = max(experiment.multiples), experiment.steps
    drawn, systems = distribution(experiment.distribution), long_systems(experiment, seed)
    form = long_form(experiment, most)
    batch, places = sequences(systems, form, stream(seed, LONG, 1), drawn.time_steps)
    tensors = to_tensors({name: values for name, values in batch.items() if name != "targets"})
    predicted = predict_in_parts(model, tensors)
    if experiment.form == "tokens":
        predicted = detokenise(predicted.argmax(-1), experiment.bins, form.extent)
    # Position p predicts the body at p + 1, so predictions from position 0 on are all bodies in order.
    predicted = predicted[:, :-1].reshape(len(systems), -1, 2, 2)
    error = np.linalg.norm(predicted - places[:, : predicted.shape[1]], axis=-1)
    way = np.linalg.norm(np.diff(places, axis=1), axis=-1)
    straight = np.linalg.norm(places[:, 2:] - (2 * places[:, 1:-1] - places[:, :-2]), axis=-1)
    rows = []
    for multiple in experiment.multiples:
        part = bucket(multiple, experiment.multiples, steps)
        late = slice(max(part.start, experiment.first_step), part.stop)
        rows.append(
            {
                "multiple": multiple,
                "error": float(np.sqrt((error[:, late] ** 2).mean())),
                "usual_way": float(np.sqrt((way[:, late] ** 2).mean())),
                "straight_line_error": float(np.sqrt((straight[:, late] ** 2).mean())),
            }
        )
    return rows


def roll_out(
    model: OrbitGPTForTrajectories, experiment: Experiment, systems: OrbitalSystems, steps: int, seed: int
) -> Array:
    """Positions (S, steps, 2, 2): the first ``experiment.steps`` are given, the rest is generated autoregressively."""
    model.eval()
    device = next(model.parameters()).device
    drawn, form = distribution(experiment.distribution), experiment.clean_form
    batch, places = sequences(systems, form, stream(seed, LONG, 2), drawn.time_steps)
    given = to_tensors({name: values for name, values in batch.items() if name != "targets"})
    known = [
        torch.from_numpy(places[:, step, body]).float().to(device) for step in range(form.steps(1)) for body in (0, 1)
    ]
    with torch.no_grad():
        outputs = model(**{name: values.to(device) for name, values in given.items()}, use_cache=True)
        while len(known) < 2 * steps:
            predicted = outputs.predictions[:, -1:]
            if experiment.form == "tokens":
                token = predicted.argmax(-1)
                place = (
                    torch.from_numpy(detokenise(token.cpu().numpy(), experiment.bins, form.extent)).float().to(device)
                )
                coordinates = token.clamp(max=experiment.bins - 1)
            else:
                coordinates = place = predicted.float()
            known.append(place[:, 0])
            role = PLANET if len(known) % 2 else STAR
            outputs = model(
                coordinates,
                torch.full(coordinates.shape[:2], role, device=device),
                past_key_values=outputs.past_key_values,
                use_cache=True,
                earlier=known[-3][:, None],
                previous=known[-2][:, None],
            )
    return torch.stack(known[: 2 * steps], 1).unflatten(1, (steps, 2)).double().cpu().numpy()


def orbit_errors(systems: OrbitalSystems, predicted: Array, true: Array) -> tuple[Array, Array]:
    """Distances of the planet from its true position and from its ellipse, in semi-major axes, (S, steps) each."""
    a, e, orientation = systems.semi_major_axis, systems.eccentricity, systems.orientation
    place = np.linalg.norm(predicted[:, :, 0] - true[:, :, 0], axis=-1) / a
    relative = predicted[:, :, 0] - predicted[:, :, 1]
    angle = np.arctan2(relative[..., 1], relative[..., 0]) - orientation
    ellipse = a * (1 - e**2) / (1 + e * np.cos(angle))
    return place, np.abs(np.linalg.norm(relative, axis=-1) - ellipse) / a


def roll_outs(
    model: OrbitGPTForTrajectories, experiment: Experiment, seed: int
) -> tuple[list[dict[str, float]], dict[str, Array]]:
    """Errors by multiple of the training length, and a few orbits for the figure."""
    systems = long_systems(experiment, seed)
    multiples = tuple(m for m in experiment.multiples if m > 1)
    steps = experiment.steps * max(multiples)
    predicted = roll_out(model, experiment, systems, steps, seed)
    true = simulate(systems, steps).positions
    place, ellipse = orbit_errors(systems, predicted, true)
    rows = []
    for multiple in multiples:
        part = bucket(multiple, experiment.multiples, experiment.steps)
        rows.append(
            {
                "multiple": multiple,
                "median_place_error": float(np.median(place[:, part])),
                "median_ellipse_error": float(np.median(ellipse[:, part])),
                "worst_tenth_ellipse_error": float(np.quantile(ellipse[:, part], 0.9)),
            }
        )
    shown = slice(0, 4)
    kept = 4 * experiment.steps
    return rows, {"said": predicted[shown, :kept], "true": true[shown, :kept]}


def force_by_length(model: OrbitGPTForForce, experiment: Experiment, seed: int) -> list[dict[str, float]]:
    """R^2 and RMSE of the target by position in the sequence."""
    model.eval()
    most = max(experiment.multiples)
    drawn, systems = distribution(experiment.distribution), long_systems(experiment, seed)
    form = long_form(experiment, most)
    batch = labelled_batch(systems, form, experiment.target, stream(seed, LONG, 1), drawn.time_steps)
    del batch["forces"]
    at = planet_positions(form.positions)
    predicted = predict_in_parts(model, to_tensors(batch))[:, at]
    true = force_targets(systems, simulate(systems, form.steps(1)).positions, experiment.target)[:, : len(at)]
    rows = []
    for multiple in experiment.multiples:
        part = bucket(multiple, experiment.multiples, experiment.steps)
        late = slice(max(part.start, experiment.first_step), part.stop)
        rows.append(
            {
                "multiple": multiple,
                "r2": coefficient_of_determination(predicted[:, late], true[:, late]),
                "rmse": float(np.sqrt(((predicted[:, late] - true[:, late]) ** 2).mean())),
            }
        )
    return rows
