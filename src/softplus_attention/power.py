"""The sharpening power of stage 2: how it is given, and what each row makes of it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class PowerByLength:
    """A power that grows with the number of keys a row sees.

        p(N) = base + slope * log(max(N, n0) / n0)

    It stays at ``base`` up to ``n0`` keys (the training length, say) and grows by ``slope`` for each factor e beyond.
    The number of visible keys is known inside the op, so prefill, packed rows and decode steps agree.
    """

    base: float = 15.0
    slope: float = 0.0
    n0: float = 1024

    def __post_init__(self) -> None:
        for name, least in (("base", 1), ("slope", 0), ("n0", 1)):
            value = getattr(self, name)
            expected = f"PowerByLength: `{name}` must be a finite number >= {least}, got {value!r}"
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise TypeError(expected)
            if not least <= value < float("inf"):
                raise ValueError(expected)

    def at(self, counts: Tensor) -> Tensor:
        """The power of rows that see ``counts`` keys, in the dtype of ``counts``."""
        return self.base + self.slope * (counts.clamp(min=self.n0) / self.n0).log()


Power = int | float | Tensor | PowerByLength | None


def power_of_rows(power: Power, counts: Tensor) -> Tensor | float:
    """The power as a number or as a tensor that broadcasts to (B, H, T_q); ``counts`` broadcasts so too."""
    if isinstance(power, PowerByLength):
        return power.at(counts)
    if isinstance(power, Tensor):
        return by_head_or_row(power)
    if power is None:
        raise AssertionError("LSSA has no power")
    return float(power)


def by_head_or_row(power: Tensor) -> Tensor:
    """A 1-D power belongs to the heads; every other shape already broadcasts to (B, H, T_q)."""
    return power[:, None] if power.dim() == 1 else power


def shape_of_power(power: Tensor) -> torch.Size:
    return by_head_or_row(power).shape
