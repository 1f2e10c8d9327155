"""Beyond the trained number of steps: the next place, roll-outs and the force at 2 to 16 times it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from softplus_attention.physics.distributions import distribution
from softplus_attention.physics.exponents import coefficient_of_determination
from softplus_attention.physics.modeling_orbit_gpt import OrbitGPTForForce, OrbitGPTForTrajectories
from softplus_attention.physics.orbits import Array, OrbitalSystems, simulate
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
from softplus_attention.physics.training import LONG, stream, to_tensors

POSITIONS_AT_ONCE = 1 << 16


def long_form(experiment: Experiment, multiple: int) -> Any:
    return replace(experiment.clean_form, positions=1 + multiple * (experiment.positions - 1))


def long_systems(experiment: Experiment, seed: int) -> OrbitalSystems:
    return distribution(experiment.distribution).sample(experiment.long_systems, stream(seed, LONG))


def in_parts(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> Array:
    """The model's predictions for a batch that may not fit at once."""
    device = next(model.parameters()).device
    rows = max(1, POSITIONS_AT_ONCE // batch["coordinates"].shape[1])
    out = []
    for begin in range(0, batch["coordinates"].shape[0], rows):
        part = {name: values[begin : begin + rows].to(device) for name, values in batch.items()}
        with torch.no_grad():
            out.append(model(**part).predictions.double().cpu().numpy())
    return np.concatenate(out)


def bucket(multiple: int, multiples: tuple[int, ...], steps: int) -> slice:
    """The steps that lie beyond the multiple before this one."""
    before = max((m for m in multiples if m < multiple), default=0)
    return slice(before * steps, multiple * steps)


def next_places(model: OrbitGPTForTrajectories, experiment: Experiment, seed: int) -> list[dict[str, float]]:
    """The error of the next place with all that came before given, by how far along the sequence it lies."""
    model.eval()
    most, steps = max(experiment.multiples), experiment.steps
    drawn, systems = distribution(experiment.distribution), long_systems(experiment, seed)
    form = long_form(experiment, most)
    batch, places = sequences(systems, form, stream(seed, LONG, 1), drawn.time_steps)
    tensors = to_tensors({name: values for name, values in batch.items() if name != "targets"})
    said = in_parts(model, tensors)
    if experiment.form == "tokens":
        said = detokenise(said.argmax(-1), experiment.bins, form.extent)
    # Position p says the body at p + 1: from position 0 on, all bodies in order.
    said = said[:, :-1].reshape(len(systems), -1, 2, 2)
    error = np.linalg.norm(said - places[:, : said.shape[1]], axis=-1)
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
    """Places (S, steps, 2, 2): the trained number of steps given, the others each from the model's own before it."""
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
            said = outputs.predictions[:, -1:]
            if experiment.form == "tokens":
                token = said.argmax(-1)
                place = (
                    torch.from_numpy(detokenise(token.cpu().numpy(), experiment.bins, form.extent)).float().to(device)
                )
                coordinates = token.clamp(max=experiment.bins - 1)
            else:
                coordinates = place = said.float()
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


def orbit_errors(systems: OrbitalSystems, said: Array, true: Array) -> tuple[Array, Array]:
    """In semi-major axes: how far the planet is from its place, and how far from its ellipse, (S, steps) each."""
    a, e, orientation = systems.semi_major_axis, systems.eccentricity, systems.orientation
    place = np.linalg.norm(said[:, :, 0] - true[:, :, 0], axis=-1) / a
    relative = said[:, :, 0] - said[:, :, 1]
    angle = np.arctan2(relative[..., 1], relative[..., 0]) - orientation
    ellipse = a * (1 - e**2) / (1 + e * np.cos(angle))
    return place, np.abs(np.linalg.norm(relative, axis=-1) - ellipse) / a


def roll_outs(
    model: OrbitGPTForTrajectories, experiment: Experiment, seed: int
) -> tuple[list[dict[str, float]], dict[str, Array]]:
    """Errors by multiple of the trained steps, and some of the orbits for a picture."""
    systems = long_systems(experiment, seed)
    multiples = tuple(m for m in experiment.multiples if m > 1)
    steps = experiment.steps * max(multiples)
    said = roll_out(model, experiment, systems, steps, seed)
    true = simulate(systems, steps).positions
    place, ellipse = orbit_errors(systems, said, true)
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
    return rows, {"said": said[shown, :kept], "true": true[shown, :kept]}


def force_by_length(model: OrbitGPTForForce, experiment: Experiment, seed: int) -> list[dict[str, float]]:
    """R^2 of the force (of ln F where that is the target) by how far along the sequence it lies."""
    model.eval()
    most = max(experiment.multiples)
    drawn, systems = distribution(experiment.distribution), long_systems(experiment, seed)
    form = long_form(experiment, most)
    batch = labelled_batch(systems, form, experiment.target, stream(seed, LONG, 1), drawn.time_steps)
    del batch["forces"]
    at = planet_positions(form.positions)
    said = in_parts(model, to_tensors(batch))[:, at]
    true = force_targets(systems, simulate(systems, form.steps(1)).positions, experiment.target)[:, : len(at)]
    rows = []
    for multiple in experiment.multiples:
        part = bucket(multiple, experiment.multiples, experiment.steps)
        late = slice(max(part.start, experiment.first_step), part.stop)
        rows.append(
            {
                "multiple": multiple,
                "r2": coefficient_of_determination(said[:, late], true[:, late]),
                "rmse": float(np.sqrt(((said[:, late] - true[:, late]) ** 2).mean())),
            }
        )
    return rows


__all__ = ["force_by_length", "next_places", "roll_out", "roll_outs"]
