"""The sharpening power of stage 2: its forms, checks and values per row."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from softplus_attention import validation as check

# Powers trained with the weights, one per head: a number, or a factor of log N. Their parameters have different names,
# so that saved weights of one kind are not loaded as the other.
LEARNED = "learned"
LEARNED_LOG = "learned-log"
RAW_NAMES = {LEARNED: "raw_power", LEARNED_LOG: "raw_power_per_log"}
# Of the constant factors tried, the best at the training length (docs/dev/log.md).
INITIAL_FACTOR = 0.6


def check_number(what: str, value: object, least: float, most: float) -> None:
    # Formatted only on failure: dynamo cannot format a symbolic number.
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{what} must be a number from {least:g} to {most:g}, got {value!r}")
    if not least <= value <= most:
        raise ValueError(f"{what} must be a number from {least:g} to {most:g}, got {value!r}")


@dataclass(frozen=True)
class PowerByLength:
    """A power that grows with the number of keys a row sees.

        p(N) = base + slope * log(max(N, n0) / n0)

    It is ``base`` up to ``n0`` keys (for example the training length) and grows by ``slope`` for each factor e beyond.
    The number of visible keys is known inside the op, so prefill, packed rows and decode steps agree.
    """

    base: float = 15.0
    slope: float = 0.0
    n0: float = 1024

    def __post_init__(self) -> None:
        for name, least in (("base", 1), ("slope", 0), ("n0", 1)):
            # Bounded so that everything computed from it fits float32.
            check_number(f"PowerByLength: `{name}`", getattr(self, name), least, 1e30)

    @classmethod
    def log_n(cls, factor: float) -> PowerByLength:
        """p(N) = max(1, factor * log N)."""
        check_number("PowerByLength.log_n: `factor`", factor, 0.02, 100)
        return cls(1, factor, math.exp(1 / factor))

    def at(self, counts: Tensor) -> Tensor:
        """The power of rows that see ``counts`` keys, in the dtype of ``counts``."""
        return self.base + self.slope * (counts.clamp(min=self.n0) / self.n0).log()


Power = int | float | Tensor | PowerByLength | None


class PowerRecord(NamedTuple):
    """A power on its way from the public call to the kernels: five arguments of every op's schema, in their order.

    ``sharpen`` False is LSSA. A row's power is taken from ``rows``, which broadcasts to (B, H, T_q), if given; else it
    is base + slope * log(max(N, n0) / n0) for ``by_length`` [base, slope, n0], if given; else ``constant``. With
    ``offset`` False no 1 is subtracted before the power is applied.
    """

    sharpen: bool
    constant: float
    rows: Tensor | None
    by_length: list[float] | None
    offset: bool

    @property
    def integer(self) -> int | None:
        """The power if it is the same integer in all rows, else None."""
        whole = self.sharpen and self.rows is None and self.by_length is None and self.constant.is_integer()
        return int(self.constant) if whole else None

    def of_counts(self, counts: Tensor) -> int | Tensor:
        """The power of rows that see ``counts`` keys; not for powers given as ``rows``."""
        if self.by_length is not None:
            return PowerByLength(*self.by_length).at(counts)
        integer = self.integer
        return counts.new_tensor(self.constant) if integer is None else integer

    @property
    def growth(self) -> tuple[float, float, float]:
        """base, slope and n0; not for powers given as ``rows``."""
        if self.by_length is None:
            return self.constant, 0.0, 1.0
        base, slope, n0 = self.by_length
        return base, slope, n0


def power_record(power: Power, offset: bool = True) -> PowerRecord:
    if power is None:
        return PowerRecord(False, 1.0, None, None, True)
    if isinstance(power, PowerByLength):
        return PowerRecord(True, 1.0, None, [float(power.base), float(power.slope), float(power.n0)], offset)
    if isinstance(power, Tensor):
        return PowerRecord(True, 1.0, broadcast_power(power), None, offset)
    return PowerRecord(True, float(power), None, None, offset)


def power_of_rows(power: Power, counts: Tensor) -> Tensor | float:
    """A number, or a tensor that broadcasts to (B, H, T_q, 1), in the dtype of ``counts`` (B|1, H|1, T_q)."""
    if power is None:
        raise AssertionError("LSSA has no power")
    if isinstance(power, PowerByLength):
        return power.at(counts)[..., None]
    return broadcast_power(power).to(counts.dtype)[..., None] if isinstance(power, Tensor) else float(power)


def broadcast_power(power: Tensor) -> Tensor:
    """A 1-D power is per head; every other shape already broadcasts to (B, H, T_q)."""
    return power[:, None] if power.dim() == 1 else power


def check_power(power: Power, full: tuple[int, int, int], device: torch.device, validate: bool) -> None:
    """``full`` is (B, H, T_q)."""
    if power is None or isinstance(power, PowerByLength):
        return
    kinds = "None (LSSA), a number >= 1, a tensor or a PowerByLength"
    if isinstance(power, Tensor):
        if not power.dtype.is_floating_point:
            check.fail("power", "a floating-point tensor", check.describe_tensor(power), TypeError)
        if power.device != device:
            check.fail("power", f"on the device of the queries, {device}", check.describe_tensor(power))
        shape = broadcast_power(power).shape
        if len(shape) > 3 or any(m not in (1, n) for m, n in zip(reversed(shape), reversed(full), strict=False)):
            check.fail("power", f"of shape (H,) or broadcastable to (B, H, T_q) = {full}", check.describe_tensor(power))
        if check.readable(power, validate) and power.numel() and not bool(((power >= 1) & (power < math.inf)).all()):
            check.fail("power", ">= 1 and finite", f"a tensor of values from {power.min():g} to {power.max():g}")
        return
    if isinstance(power, bool) or not isinstance(power, int | float):
        check.fail("power", kinds, repr(power), TypeError)
    if not 1 <= power <= 1.7976931348623157e308:  # the largest float; dynamo would make a global symbolic
        check.fail("power", f"{kinds}: below 1 the gradient is unbounded", power)


def is_learned(power: object) -> bool:
    return isinstance(power, str) and power in RAW_NAMES


def initial_raw_power(kind: str, power: float | PowerByLength | None) -> float:
    """The initial value of a head's raw parameter, for an attention of this ``power``."""
    if kind == LEARNED_LOG:
        start = INITIAL_FACTOR
    else:
        first = power.base if isinstance(power, PowerByLength) else power or 1
        # At p = 1 the parameter would be -inf, and its gradient 0.
        start = max(float(first) - 1, 1e-2)
    return start + math.log(-math.expm1(-start))


def learned_parameter(kind: str, raw: Tensor) -> dict[str, Tensor]:
    """The attention's parameter from the trained ``raw`` (H,), which is unconstrained."""
    positive = F.softplus(raw.float())
    return {"power_per_log": positive} if kind == LEARNED_LOG else {"power": 1 + positive}


def power_by_log(per_log: Tensor, counts: Tensor | int) -> Tensor:
    """max(1, ``per_log`` * log N), ``per_log`` being (H,).

    (B|1, H, T_q) for ``counts`` (B|1, H|1, T_q), or (H,) for an int that applies to all rows.
    """
    exact = per_log if per_log.dtype == torch.float64 else per_log.float()
    if isinstance(counts, int):
        return (exact * math.log(max(counts, 1))).clamp(min=1)
    return (exact[:, None] * counts.clamp(min=1).to(exact.dtype).log()).clamp(min=1)
