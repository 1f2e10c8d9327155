"""Exact two-body orbits in the plane, many systems at once. Units: AU, year, solar mass.

Each planet moves on a Kepler ellipse about its star; planets do not attract each other. A single planet and its star
move about their centre of mass, which is at rest; with more planets the star is at rest, as in the published data.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from softplus_attention.validation import fail

Array = NDArray[np.float64]

G = 39.4784176044
# Elements per chunk: the intermediates fit into the CPU cache.
CHUNK = 8192
MAX_ITERATIONS = 20
RESIDUAL = 4e-15


@dataclass(frozen=True)
class OrbitalSystems:
    """S systems of K planets each. Angles in radians.

    ``phase`` is the mean anomaly at time 0, ``orientation`` the direction of periapsis as seen from the star; orbits
    run counter-clockwise.
    """

    semi_major_axis: Array  # (S, K)
    eccentricity: Array  # (S, K)
    phase: Array  # (S, K)
    orientation: Array  # (S, K)
    planet_mass: Array  # (S, K)
    star_mass: Array  # (S,)
    centre: Array  # (S, 2)
    time_step: Array  # (S,)

    def __post_init__(self) -> None:
        for field in fields(self):
            object.__setattr__(self, field.name, np.asarray(getattr(self, field.name), dtype=np.float64))
        if self.semi_major_axis.ndim != 2 or not self.semi_major_axis.shape[1]:
            fail("semi_major_axis", "of shape (systems, planets >= 1)", self.semi_major_axis.shape)
        systems, planets = self.semi_major_axis.shape
        shapes: dict[str, tuple[int, ...]] = {"star_mass": (systems,), "time_step": (systems,), "centre": (systems, 2)}
        for field in fields(self):
            expected = shapes.get(field.name, (systems, planets))
            values = getattr(self, field.name)
            if values.shape != expected:
                fail(field.name, f"of shape {expected}", values.shape)
            if not np.isfinite(values).all():
                fail(field.name, "finite", "NaN or infinity")
        for name in ("semi_major_axis", "planet_mass", "star_mass", "time_step"):
            values = getattr(self, name)
            if values.size and values.min() <= 0:
                unbound = " (a negative one is an unbound orbit)" if name == "semi_major_axis" else ""
                fail(name, f"positive{unbound}", f"{values.min():g}")
        e = self.eccentricity
        if e.size and not (e.min() >= 0 and e.max() < 1):
            fail("eccentricity", "from 0 to below 1: the orbit must be bound", f"{e.min():g} to {e.max():g}")

    def __len__(self) -> int:
        return int(self.semi_major_axis.shape[0])

    def __getitem__(self, index: Any) -> OrbitalSystems:
        """Selects systems by a slice or an array of indices."""
        return replace(self, **{field.name: getattr(self, field.name)[index] for field in fields(self)})

    @property
    def planets(self) -> int:
        return int(self.semi_major_axis.shape[1])

    @property
    def gravitational_parameter(self) -> Array:
        """G (m + M) of each planet's relative motion, (S, K)."""
        return G * (self.planet_mass + self.star_mass[:, None])

    @property
    def period(self) -> Array:
        return 2 * np.pi * np.sqrt(self.semi_major_axis**3 / self.gravitational_parameter)


@dataclass(frozen=True)
class Orbits:
    """Bodies in the order planet 1 .. planet K, star: (S, steps, K + 1, 2)."""

    positions: Array
    velocities: Array | None


def systems_from_state(
    position: Array,
    velocity: Array,
    planet_mass: Array,
    star_mass: Array,
    time_step: float,
    centre: Array | None = None,
) -> OrbitalSystems:
    """Systems of one planet from its position and velocity relative to the star, (S, 2) each. Orbits must be bound."""
    position, velocity = np.atleast_2d(position).astype(np.float64), np.atleast_2d(velocity).astype(np.float64)
    planet_mass, star_mass = np.atleast_1d(planet_mass), np.atleast_1d(star_mass)
    for name, mass in (("planet_mass", planet_mass), ("star_mass", star_mass)):
        if mass.min() <= 0:
            fail(name, "positive", f"{mass.min():g}")
    mu = G * (planet_mass + star_mass)
    r = np.linalg.norm(position, axis=-1)
    energy = (velocity**2).sum(-1) / 2 - mu / r
    if energy.max() >= 0:
        fail(
            "velocity", "below the escape velocity: the orbit must be bound", f"an energy of {energy.max():g} per mass"
        )
    spin = position[:, 0] * velocity[:, 1] - position[:, 1] * velocity[:, 0]
    if spin.min() <= 0:
        fail("velocity", "of a counter-clockwise orbit", f"an angular momentum of {spin.min():g} per mass")
    a = -mu / (2 * energy)
    towards = np.stack([velocity[:, 1], -velocity[:, 0]], -1) * (spin / mu)[:, None] - position / r[:, None]
    e = np.linalg.norm(towards, axis=-1)
    orientation = np.arctan2(towards[:, 1], towards[:, 0])
    along, across = np.cos(orientation), np.sin(orientation)
    x = position[:, 0] * along + position[:, 1] * across
    y = position[:, 1] * along - position[:, 0] * across
    anomaly = np.arctan2(y / np.sqrt(1 - e**2), x + a * e)
    count = len(a)
    return OrbitalSystems(
        semi_major_axis=a[:, None],
        eccentricity=e[:, None],
        phase=(anomaly - e * np.sin(anomaly))[:, None],
        orientation=orientation[:, None],
        planet_mass=planet_mass[:, None],
        star_mass=star_mass,
        centre=np.zeros((count, 2)) if centre is None else centre,
        time_step=np.full(count, time_step),
    )


def eccentric_anomaly(mean_anomaly: Array, eccentricity: Array) -> tuple[Array, Array, Array]:
    """E with E - e sin E = M for M from -pi to pi, and its sine and cosine: Danby's start and fourth-order step."""
    M, e = mean_anomaly, eccentricity
    E = M + np.copysign(0.85, M) * e
    sine, cosine = np.sin(E), np.cos(E)
    for _ in range(MAX_ITERATIONS):
        f = E - e * sine
        f -= M
        if np.abs(f).max(initial=0) <= RESIDUAL:
            break
        slope = 1 - e * cosine
        half_curve, sixth = 0.5 * e * sine, e * cosine / 6
        step = -f / (slope - f * half_curve / slope)
        step = -f / (slope + step * half_curve + step * step * sixth)
        E = E + step
        sine, cosine = np.sin(E), np.cos(E)
    return E, sine, cosine


def simulate(systems: OrbitalSystems, steps: int, *, first: int = 0, velocities: bool = False) -> Orbits:
    """Positions (and velocities) at ``first``, ``first + 1``, ... times the time step of each system."""
    if steps < 1:
        fail("steps", "at least 1", steps)
    count, planets = systems.semi_major_axis.shape
    positions = np.empty((count, steps, planets + 1, 2))
    speeds = np.empty_like(positions) if velocities else None
    rows = max(1, CHUNK // (steps * planets))
    for begin in range(0, count, rows):
        part = slice(begin, min(begin + rows, count))
        simulate_part(systems[part], steps, first, positions[part], None if speeds is None else speeds[part])
    return Orbits(positions, speeds)


def simulate_part(systems: OrbitalSystems, steps: int, first: int, positions: Array, velocities: Array | None) -> None:
    a, e, mu = systems.semi_major_axis, systems.eccentricity, systems.gravitational_parameter
    motion = np.sqrt(mu / a**3)
    turn = 2 * np.pi
    # (S, steps, K), reduced to -pi .. pi so that the residual of Kepler's equation reaches rounding error.
    per_step = (motion * systems.time_step[:, None])[:, None]
    M = systems.phase[:, None] + per_step * (first + np.arange(steps))[None, :, None]
    M -= turn * np.round(M * (1 / turn))
    _, sine, cosine = eccentric_anomaly(M, np.broadcast_to(e[:, None], M.shape))

    minor = a * np.sqrt(1 - e**2)
    along, across = np.cos(systems.orientation), np.sin(systems.orientation)
    alone = systems.planets == 1
    share = systems.star_mass / (systems.star_mass + systems.planet_mass[:, 0]) if alone else np.ones(len(systems))

    def place(out: Array, x: Array, y: Array, offset: Array) -> None:
        """Rotates the relative motion (x, y) and divides it between planet and star."""
        for axis, (over_x, over_y) in enumerate(((along, -across), (across, along))):
            relative = x * over_x[:, None] + y * over_y[:, None]
            out[:, :, :-1, axis] = relative * share[:, None, None] + offset[:, axis, None, None]
            if alone:
                out[:, :, -1, axis] = relative[..., 0] * (share - 1)[:, None] + offset[:, axis, None]
            else:
                out[:, :, -1, axis] = offset[:, axis, None]

    place(positions, a[:, None] * (cosine - e[:, None]), minor[:, None] * sine, systems.centre)
    if velocities is not None:
        rate = motion[:, None] / (1 - e[:, None] * cosine)
        place(velocities, -a[:, None] * sine * rate, minor[:, None] * cosine * rate, np.zeros_like(systems.centre))


def force_on_planets(systems: OrbitalSystems, positions: Array) -> Array:
    """The star's force on each planet, G m M / r^2 towards the star, (S, steps, K, 2)."""
    towards = positions[:, :, -1:] - positions[:, :, :-1]
    r = np.linalg.norm(towards, axis=-1, keepdims=True)
    product = G * systems.planet_mass * systems.star_mass[:, None]
    return product[:, None, :, None] * towards / r**3


def energy_and_spin(systems: OrbitalSystems, orbits: Orbits) -> tuple[Array, Array]:
    """Energy and angular momentum of each planet's relative motion, per reduced mass: (S, steps, K) each."""
    if orbits.velocities is None:
        fail("orbits", "simulated with velocities=True", "only positions")
    relative = orbits.positions[:, :, :-1] - orbits.positions[:, :, -1:]
    velocity = orbits.velocities[:, :, :-1] - orbits.velocities[:, :, -1:]
    r = np.linalg.norm(relative, axis=-1)
    energy = (velocity**2).sum(-1) / 2 - systems.gravitational_parameter[:, None] / r
    return energy, relative[..., 0] * velocity[..., 1] - relative[..., 1] * velocity[..., 0]
