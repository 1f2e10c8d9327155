"""Power schedules: the sharpening power as a function of the training step.

    15                  constant
    3,7@0.1,15@0.3      stepped: 3; 7 from 10% of the steps on; 15 from 30% on
    ramp:3,15           linear from the first step to the last; ramp:3,15@0.5 reaches 15 after half of the steps
    log:1.5             1.5 log N for a row that sees N keys, at least 1, in training and after it
    learned             one power per head and layer, trained with the weights
    learned-log         one factor of log N per head and layer, trained with the weights

The power depends only on the step, so checkpoints do not store it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NoReturn

from softplus_attention.power import PowerByLength, is_learned
from softplus_attention.validation import fail

LOGARITHMIC = "log:"
FORMS = (
    "a number >= 1, steps such as 3,7@0.1,15@0.3, a ramp such as ramp:3,15 or ramp:3,15@0.5, log:1.5 (1.5 log N for "
    "N keys), learned, or learned-log"
)

CONSTANT_FORMS = "a number >= 1, or log:FACTOR (FACTOR times the log of the number of keys)"


@dataclass(frozen=True)
class PowerSchedule:
    """Powers at fractions of the steps; in between a ramp is linear and a stepped schedule constant."""

    points: tuple[tuple[float, float], ...]  # (fraction, power)
    is_ramp: bool = False
    rounded: bool = True

    def at(self, step: int, steps: int) -> float:
        """The power at ``step`` (from 0) of ``steps``."""
        if self.is_ramp:
            (_, first), (end, last) = self.points
            done = min(1.0, step / max(1.0, end * (steps - 1)))
            power = first + (last - first) * done
            return math.floor(power + 0.5) if self.rounded else as_number(power)
        power = self.points[0][1]
        for fraction, value in self.points:
            if step >= math.ceil(fraction * steps - 1e-9):
                power = value
        return as_number(power)

    def final(self, steps: int) -> float:
        return self.at(steps - 1, steps)

    def distinct(self, steps: int) -> int:
        """The number of different powers in a run, each of which is compiled once."""
        if self.is_ramp and not self.rounded:
            return steps
        return len({self.at(step, steps) for step in range(steps)})


def as_number(power: float) -> float:
    """An int if the value is whole, since integer powers have faster kernels."""
    return int(power) if float(power).is_integer() else power


def power_schedule(text: str | float | None, *, rounded: bool = True) -> PowerSchedule | None:
    """Parses a schedule; None for the attention's own power, a learned power, and a power by length."""
    if text is None or is_learned(text) or logarithmic_power(text) is not None:
        return None
    text = str(text).replace(" ", "")
    if text.startswith("ramp:"):
        return ramp(text, rounded)
    points = []
    for number, part in enumerate(text.split(",")):
        value, at, fraction = part.partition("@")
        if (number == 0) == bool(at):
            refuse(text)
        points.append((number_in(fraction, text) if at else 0.0, power_in(value, text)))
    fractions = [fraction for fraction, _ in points]
    if fractions != sorted(set(fractions)) or not 0 <= fractions[-1] < 1:
        fail("power", "steps at increasing fractions from 0 to below 1", repr(text))
    return PowerSchedule(tuple(points))


def logarithmic_power(text: str | float) -> PowerByLength | None:
    """The power of "log:1.5"; None for every other form."""
    text = str(text).replace(" ", "")
    if not text.startswith(LOGARITHMIC):
        return None
    slope = number_in(text.removeprefix(LOGARITHMIC), text)
    if not 0.02 <= slope <= 100:
        fail("power", "log:FACTOR with a factor from 0.02 to 100", repr(text))
    return PowerByLength.log_n(slope)


def constant_power(text: str, expected: str = CONSTANT_FORMS) -> float | PowerByLength:
    """Parses the single ``--power`` of commands that do not train."""
    logarithmic = text.startswith(LOGARITHMIC)
    try:
        number = float(text.removeprefix(LOGARITHMIC))
    except ValueError:
        fail("--power", expected, repr(text))
    if logarithmic:
        try:
            return PowerByLength.log_n(number)
        except ValueError as error:
            fail("--power", expected, f"{text!r}: {error}")
    if not 1 <= number < math.inf:
        fail("--power", expected, repr(text))
    return as_number(number)


def ramp(text: str, rounded: bool) -> PowerSchedule:
    first, comma, rest = text.removeprefix("ramp:").partition(",")
    last, at, end = rest.partition("@")
    if not comma:
        refuse(text)
    fraction = number_in(end, text) if at else 1.0
    if not 0 < fraction <= 1:
        fail("power", "a ramp that ends at a fraction of the steps above 0 and at most 1", repr(text))
    points = ((0.0, power_in(first, text)), (fraction, power_in(last, text)))
    return PowerSchedule(points, is_ramp=True, rounded=rounded)


def number_in(part: str, text: str) -> float:
    try:
        number = float(part)
    except ValueError:
        refuse(text)
    if not math.isfinite(number):
        refuse(text)
    return number


def power_in(part: str, text: str) -> float:
    power = number_in(part, text)
    if power < 1:
        fail("power", FORMS, repr(text))
    return power


def refuse(text: str) -> NoReturn:
    fail("power", FORMS, repr(text))
