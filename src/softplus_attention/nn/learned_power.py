"""An attention's own learned parameters, as parameters of a module."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from softplus_attention.attentions.catalog import Attention
from softplus_attention.power import RAW_NAMES, initial_raw_power, learned_parameter


class LearnedParameters(nn.Module):
    """A module whose ``attention`` may have learned parameters and a learned power: "learned", "learned-log" or "".

    A learned power is computed from ``raw_power`` or ``raw_power_per_log`` (H,), which is unconstrained.
    """

    attention: Attention
    learned_kind: str
    learned_names: tuple[str, ...]

    def register_learned(self, num_heads: int, kind: str, device: torch.device | str | None = None) -> None:
        self.learned_kind, self.learned_names = kind, tuple(self.attention.learned_parameters(num_heads))
        for name, first in self.first_values(num_heads).items():
            self.register_parameter(name, nn.Parameter(first.to(device)))

    def first_values(self, num_heads: int) -> dict[str, Tensor]:
        """The initial values, by parameter name."""
        values = self.attention.learned_parameters(num_heads)
        if self.learned_kind:
            raw = initial_raw_power(self.learned_kind, self.attention.spec.sharpening)
            values[RAW_NAMES[self.learned_kind]] = torch.full((num_heads,), raw)
        return values

    def attention_parameters(self) -> dict[str, Tensor]:
        """``parameters`` of the attention's call: "power" (H,) if it is "learned", and so on."""
        parameters = {name: to_local(getattr(self, name)) for name in self.learned_names}
        if self.learned_kind:
            parameters |= learned_parameter(self.learned_kind, to_local(self.raw_parameter))
        return parameters

    @property
    def raw_parameter(self) -> nn.Parameter:
        return getattr(self, RAW_NAMES[self.learned_kind])


def to_local(parameter: Tensor) -> Tensor:
    """Under tensor parallelism, the heads of this process."""
    return parameter.to_local() if hasattr(parameter, "to_local") else parameter
