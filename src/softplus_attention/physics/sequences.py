"""Orbits as sequences: position 0 holds the time step, then planet 1 .. planet K and the star follow for every step.

Two forms. "tokens": x and y each in bins, and a token for the time step. "continuous": the coordinates themselves,
with optional Gaussian noise on the input and none on the targets.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from softplus_attention.physics.distributions import Distribution
from softplus_attention.physics.orbits import Array, OrbitalSystems, force_on_planets, simulate
from softplus_attention.validation import fail, fail_choice

FORMS = ("continuous", "tokens")
TIME_STEP, PLANET, STAR = 0, 1, 2
IGNORED = -100
# A body's first position and first displacement cannot be predicted.
FIRST_PREDICTABLE_STEP = 2

Batch = dict[str, NDArray[np.generic]]
TARGETS: dict[str, int] = {"ln_force": 1, "force": 1, "vector": 2}


@dataclass(frozen=True)
class SequenceForm:
    """How orbits are encoded for a model."""

    kind: str = "continuous"
    positions: int = 65
    extent: float = 6.0
    bins: int = 512
    context_noise: float = 0.0

    def __post_init__(self) -> None:
        if self.kind not in FORMS:
            fail_choice("form", FORMS, self.kind)
        if self.positions < 4:
            fail("positions", "at least 4", self.positions)
        if not 0 <= self.context_noise < math.inf:
            fail("context_noise", "a finite number, at least 0", self.context_noise)
        if self.bins < 2:
            fail("bins", "at least 2", self.bins)

    def steps(self, planets: int) -> int:
        """The number of time steps that begin within the sequence."""
        return -(-(self.positions - 1) // (planets + 1))


def vocabulary(bins: int) -> int:
    """Tokens per coordinate: the bins, two time steps and padding."""
    return bins + 3


def roles(length: int, planets: int) -> NDArray[np.int64]:
    """The role of each position: ``TIME_STEP``, ``PLANET`` or ``STAR``."""
    place = np.arange(length) - 1
    kinds = np.where(place % (planets + 1) == planets, STAR, PLANET)
    kinds[0] = TIME_STEP
    return kinds


def interleaved(positions: Array, length: int) -> Array:
    """(S, steps, K + 1, 2) -> the first ``length`` bodies of each system, (S, length, 2)."""
    return positions.reshape(positions.shape[0], -1, 2)[:, :length]


def tokenise(coordinates: Array, bins: int, extent: float) -> NDArray[np.int64]:
    """The bin of each coordinate; values outside +- extent fall into the outermost bins."""
    return np.clip(np.floor((coordinates + extent) * (bins / (2 * extent))), 0, bins - 1).astype(np.int64)


def detokenise(tokens: NDArray[np.int64], bins: int, extent: float) -> Array:
    """The middle of each bin."""
    return (np.clip(tokens, 0, bins - 1).astype(np.float64) + 0.5) * (2 * extent / bins) - extent


def sequences(
    systems: OrbitalSystems, form: SequenceForm, rng: np.random.Generator, time_steps: tuple[float, ...]
) -> tuple[Batch, Array]:
    """Model inputs and targets of the systems, and the positions of their bodies (S, steps, K + 1, 2)."""
    steps = form.steps(systems.planets)
    places = simulate(systems, steps).positions
    bodies = interleaved(places, form.positions - 1)
    count = len(systems)
    kinds = np.broadcast_to(roles(form.positions, systems.planets), (count, form.positions))
    batch: Batch = {"roles": kinds, "bodies": np.full(count, systems.planets + 1, dtype=np.int64)}
    if form.kind == "tokens":
        tokens = tokenise(bodies, form.bins, form.extent)
        which = np.abs(np.asarray(time_steps)[None] - systems.time_step[:, None]).argmin(1)
        first = np.broadcast_to((form.bins + which)[:, None, None], (count, 1, 2))
        batch["coordinates"] = np.concatenate([first, tokens], 1)
        batch["targets"] = np.concatenate([tokens, np.full((count, 1, 2), IGNORED)], 1)
        return batch, places
    seen = bodies
    if form.context_noise:
        seen = bodies + form.context_noise * rng.standard_normal(bodies.shape)
    first = np.zeros((count, 1, 2))
    first[:, 0, 0] = np.log(systems.time_step)
    batch["coordinates"] = np.concatenate([first, seen], 1).astype(np.float32)
    targets = np.concatenate([bodies, np.full((count, 1, 2), np.nan)], 1)
    targets[:, : FIRST_PREDICTABLE_STEP * (systems.planets + 1)] = np.nan
    batch["targets"] = targets.astype(np.float32)
    return batch, places


def mixed_batch(
    drawn: Distribution, form: SequenceForm, count: int, most_planets: int, rng: np.random.Generator
) -> Batch:
    """``count`` sequences of systems with 1 to ``most_planets`` planets, uniformly."""
    planets = rng.integers(1, most_planets + 1, size=count)
    parts: list[Batch] = []
    for number in np.unique(planets):
        systems = drawn.sample(int((planets == number).sum()), rng, int(number))
        parts.append(sequences(systems, form, rng, drawn.time_steps)[0])
    if len(parts) == 1:
        return parts[0]
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def planet_positions(length: int) -> NDArray[np.int64]:
    """The planet's positions in a two-body sequence."""
    return np.arange(1, length, 2)


def force_targets(systems: OrbitalSystems, places: Array, target: str) -> Array:
    """The force on a single planet at each step: (S, steps, 1) of ln F or F, or the vector (S, steps, 2)."""
    if target not in TARGETS:
        fail_choice("target", TARGETS, target)
    vector = force_on_planets(systems, places)[:, :, 0]
    if target == "vector":
        return vector
    size = np.linalg.norm(vector, axis=-1, keepdims=True)
    return np.log(size) if target == "ln_force" else size


def labelled_batch(
    systems: OrbitalSystems,
    form: SequenceForm,
    target: str,
    rng: np.random.Generator,
    time_steps: tuple[float, ...],
    chosen: Callable[[int, int], NDArray[np.bool_]] | None = None,
) -> Batch:
    """Two-body sequences labelled with the force at each planet's position; NaN marks a missing label.

    ``chosen(systems, steps)`` returns the mask of labelled steps; by default all steps are labelled.
    """
    if len(systems) == 0:
        fail("labels", "at least one labelled system", 0)
    if systems.planets != 1:
        fail("systems", "of one planet each for force labels", f"{systems.planets} planets")
    batch, places = sequences(systems, form, rng, time_steps)
    del batch["targets"]
    values = force_targets(systems, places, target)
    if chosen is not None:
        picked = chosen(*values.shape[:2])
        if not picked.any():
            fail("labels", "at least one label", "none")
        values = np.where(picked[..., None], values, np.nan)
    labels = np.full((len(systems), form.positions, values.shape[-1]), np.nan)
    at = planet_positions(form.positions)
    labels[:, at] = values[:, : len(at)]
    return {**batch, "forces": labels.astype(np.float32)}
