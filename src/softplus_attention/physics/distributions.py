"""Distributions of orbital systems: two published ones, and one whose orbits determine the force."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from softplus_attention.physics.orbits import Array, OrbitalSystems
from softplus_attention.validation import fail, fail_choice

WEEK, HALF_YEAR = 7 * 0.0027, 180 * 0.0027
Range = tuple[float, float]


@dataclass(frozen=True)
class Distribution:
    """How systems are drawn. Ranges of masses, axes and eccentricities are used by "identifiable" and its variants."""

    name: str
    time_steps: tuple[float, ...]
    most_planets: int
    extent: float  # coordinates are within +- extent, except in rare systems
    planet_mass: Range = (0.3, 3.0)
    star_mass: Range = (0.3, 3.0)
    semi_major_axis: Range = (1.0, 3.0)
    eccentricity: Range = (0.0, 0.6)

    def sample(self, count: int, rng: np.random.Generator, planets: int = 1) -> OrbitalSystems:
        """``count`` systems of ``planets`` planets each."""
        if count < 1:
            fail("count", "at least 1", count)
        if not 1 <= planets <= self.most_planets:
            fail("planets", f"from 1 to {self.most_planets} in {self.name!r}", planets)
        shape = (count, planets)
        a, e, planet_mass, star_mass = self.elements(shape, rng)
        return OrbitalSystems(
            semi_major_axis=a,
            eccentricity=e,
            phase=rng.uniform(0, 2 * np.pi, shape),
            orientation=rng.uniform(0, 2 * np.pi, shape),
            planet_mass=planet_mass,
            star_mass=star_mass,
            centre=rng.standard_normal((count, 2)),
            time_step=np.asarray(self.time_steps)[rng.integers(len(self.time_steps), size=count)],
        )

    def elements(self, shape: tuple[int, int], rng: np.random.Generator) -> tuple[Array, Array, Array, Array]:
        count = shape[0]
        if self.name.startswith("identifiable"):
            return (
                log_uniform(self.semi_major_axis, shape, rng),
                rng.uniform(*self.eccentricity, shape),
                log_uniform(self.planet_mass, shape, rng),
                log_uniform(self.star_mass, (count,), rng),
            )
        e = np.minimum(rng.beta(0.867, 3.03, shape), 0.999)
        if self.name == "published-code":
            a = rng.uniform(0.3, 32, shape)
            planet_mass = np.clip(6.0e-8 + rng.gamma(0.3202, 1.1056e-3, shape), 1e-9, 1e-3)
            star_mass = np.clip(-0.679 + rng.lognormal(np.log(1.627), 0.2005, count), 0.1, 5)
        else:
            a = rng.uniform(0.3, 42, shape)
            planet_mass = log_uniform((1e-7, 1e-3), shape, rng)
            star_mass = rng.uniform(0.5, 5, count)
        return a, e, planet_mass, star_mass


def log_uniform(limits: Range, shape: tuple[int, ...], rng: np.random.Generator) -> Array:
    return np.exp(rng.uniform(np.log(limits[0]), np.log(limits[1]), shape))


IDENTIFIABLE = Distribution("identifiable", (0.06,), most_planets=10, extent=6.0)
DISTRIBUTIONS: dict[str, Distribution] = {
    # As in the published code.
    "published-code": Distribution("published-code", (WEEK, HALF_YEAR), most_planets=10, extent=50.0),
    # As in the text of the paper.
    "published-text": Distribution("published-text", (WEEK, HALF_YEAR), most_planets=10, extent=50.0),
    # Wide ranges of comparable masses, so that the star's motion shows both; every orbit is sampled finely enough.
    "identifiable": IDENTIFIABLE,
    # Out of distribution for "identifiable": heavier, and farther out.
    "identifiable-heavier": replace(
        IDENTIFIABLE, name="identifiable-heavier", planet_mass=(3.0, 6.0), star_mass=(3.0, 6.0)
    ),
    "identifiable-wider": replace(IDENTIFIABLE, name="identifiable-wider", semi_major_axis=(3.0, 4.5)),
}


def distribution(name: str) -> Distribution:
    if name not in DISTRIBUTIONS:
        fail_choice("distribution", DISTRIBUTIONS, name)
    return DISTRIBUTIONS[name]
