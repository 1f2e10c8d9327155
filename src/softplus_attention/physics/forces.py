"""The force that a tuned model says for systems it was not tuned on, as arrays for everything that comes after."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from softplus_attention.physics.distributions import DISTRIBUTIONS, Distribution, distribution
from softplus_attention.physics.exponents import coefficient_of_determination
from softplus_attention.physics.long_sequences import in_parts
from softplus_attention.physics.modeling_orbit_gpt import OrbitGPTForForce
from softplus_attention.physics.orbits import Array, OrbitalSystems, force_on_planets, simulate
from softplus_attention.physics.presets import Experiment
from softplus_attention.physics.sequences import labelled_batch, planet_positions
from softplus_attention.physics.training import TEST, partial_choice, partial_systems, stream, to_tensors

SHOWN = 4


def tested_on(experiment: Experiment) -> dict[str, Distribution]:
    """ "inside" as trained, and beyond what was trained on where such a distribution is known."""
    inside = distribution(experiment.distribution)
    found = {"inside": inside}
    for word in ("heavier", "wider"):
        beyond = DISTRIBUTIONS.get(f"{experiment.distribution}-{word}")
        if beyond is not None:
            found[word] = replace(beyond, time_steps=inside.time_steps)
    return found


def said_forces(model: OrbitGPTForForce, experiment: Experiment, seed: int) -> dict[str, Array]:
    """Arrays by "set/name": m1, m2, r, true and said F at each point, its system and step; some orbits with forces."""
    model.eval()
    arrays: dict[str, Array] = {}
    for number, (name, drawn) in enumerate(tested_on(experiment).items()):
        partly = name == "inside" and experiment.partial_systems
        systems = (
            partial_systems(experiment, seed)
            if partly
            else drawn.sample(experiment.test_systems, stream(seed, TEST, number))
        )
        found, places, vectors = forces_of(model, experiment, systems, drawn)
        if partly:
            labelled = partial_choice(experiment, seed, len(systems), places.shape[1])
            keep = ~labelled[found["system"], found["step"]]
            found = {word: values[keep] for word, values in found.items()}
        arrays |= {f"{name}/{word}": values for word, values in found.items()}
        if name == "inside":
            arrays["shown/places"], arrays["shown/true"] = (
                places[:SHOWN],
                force_on_planets(systems[:SHOWN], places[:SHOWN])[:, :, 0],
            )
            arrays["shown/said"] = vectors[:SHOWN]
    return arrays


def forces_of(
    model: OrbitGPTForForce, experiment: Experiment, systems: OrbitalSystems, drawn: Distribution
) -> tuple[dict[str, Any], Array, Array]:
    form = experiment.clean_form
    batch = labelled_batch(systems, form, experiment.target, stream(0, TEST, 9), drawn.time_steps)
    del batch["forces"]
    at = planet_positions(form.positions)
    steps = len(at)
    said = in_parts(model, to_tensors(batch))[:, at]
    orbits = simulate(systems, steps, velocities=experiment.nearest_points > 0)
    places = orbits.positions
    true = force_on_planets(systems, places)[:, :, 0]
    size = np.linalg.norm(true, axis=-1)
    if experiment.target == "vector":
        vectors, said_size = said, np.linalg.norm(said, axis=-1)
    else:
        said_size = np.exp(said[..., 0]) if experiment.target == "ln_force" else said[..., 0]
        # Only the magnitude was asked for: the direction is the true one.
        vectors = true * (said_size / size)[..., None]
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
        "said": said_size[:, kept].ravel(),
    }
    if experiment.target == "vector":
        found["true_vector"], found["said_vector"] = true[:, kept].reshape(-1, 2), said[:, kept].reshape(-1, 2)
    if orbits.velocities is not None:
        found["state"] = states_of(systems, places, orbits.velocities)[:, kept].reshape(-1, 6)
    return found, places, vectors


def tested_steps(experiment: Experiment, steps: int) -> Any:
    """At which steps of each test system the force is kept: all from the first on, or so many, evenly."""
    first, count = experiment.first_step, experiment.test_steps
    return np.arange(first, steps) if not count else np.linspace(first, steps - 1, count).round().astype(np.int64)


def states_of(systems: OrbitalSystems, places: Array, velocities: Array) -> Array:
    """Relative place and velocity and the two masses at each step, (S, steps, 6)."""
    masses = np.stack([systems.planet_mass[:, 0], systems.star_mass], -1)
    masses = np.broadcast_to(masses[:, None], (*places.shape[:2], 2))
    return np.concatenate([places[:, :, 0] - places[:, :, 1], velocities[:, :, 0] - velocities[:, :, 1], masses], -1)


def quality(arrays: dict[str, Array], name: str) -> dict[str, Any]:
    """R^2 of F and of ln F (where the said force is positive), and the spread of ln F about the truth."""
    true, said = arrays[f"{name}/true"], arrays[f"{name}/said"]
    usable = said > 0
    result: dict[str, Any] = {
        "points": len(true),
        "r2_force": coefficient_of_determination(said, true),
        "not_positive": int((~usable).sum()),
    }
    if usable.sum() > 8:
        apart = np.log(said[usable]) - np.log(true[usable])
        result |= {
            "r2_ln_force": coefficient_of_determination(np.log(said[usable]), np.log(true[usable])),
            "ln_force_bias": float(apart.mean()),
            "ln_force_rmse": float(np.sqrt((apart**2).mean())),
            "ln_force_noise": float(apart.std()),
        }
    if f"{name}/true_vector" in arrays:
        result["r2_vector"] = coefficient_of_determination(arrays[f"{name}/said_vector"], arrays[f"{name}/true_vector"])
    return result
