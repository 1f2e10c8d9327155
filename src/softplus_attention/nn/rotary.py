"""Rotary positions without a length limit."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from softplus_attention import validation as check
from softplus_attention.reference import compute_dtype


class RotaryEmbedding(nn.Module):
    """Rotary positions without a length limit: angles are computed from the positions in every call.

    The first ``fraction`` of a head's dimensions is rotated, dimension i with dimension i + half of them. Angles are
    float64 where the device supports it: in float32 the angle of position 1e6 is wrong by several hundredths. There
    are no buffers to save, cast or extend.
    """

    def __init__(self, head_dim: int, *, theta: float = 10_000.0, fraction: float = 1.0) -> None:
        super().__init__()
        if not 0 < fraction <= 1:
            check.fail("fraction", "above 0 and at most 1", fraction)
        if not theta > 0:
            check.fail("theta", "above 0", theta)
        rotated = round(head_dim * fraction)
        if rotated < 2 or rotated % 2:
            check.fail("head_dim", "such that an even number of its dimensions is rotated", f"{rotated} of {head_dim}")
        # With dynamic shapes dynamo keeps an int attribute constant, but makes a float symbolic.
        theta = int(theta) if float(theta).is_integer() else theta
        self.head_dim, self.theta, self.fraction, self.rotated = head_dim, theta, fraction, rotated

    def cos_sin(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """The tables of ``rotate`` for positions (..., T)."""
        exact = torch.float32 if positions.device.type == "mps" else torch.float64
        exponent = torch.arange(0, self.rotated, 2, device=positions.device, dtype=exact) / self.rotated
        angle = positions.to(exact)[..., None] * torch.exp(-math.log(self.theta) * exponent)
        return rotation_tables(angle.cos().to(dtype), angle.sin().to(dtype))

    def forward(self, x: Tensor, positions: Tensor | None = None, *, offset: int = 0) -> Tensor:
        """x (B, H, T, D) rotated to ``positions``, (T,) or (B, T), or to offset, offset + 1, ..."""
        if x.dim() != 4 or x.shape[-1] != self.head_dim:
            check.fail("x", f"a tensor (B, H, T, {self.head_dim})", check.describe_tensor(x))
        if positions is None:
            positions = torch.arange(offset, offset + x.shape[2], device=x.device)
        check_positions("positions", positions, x.shape[0], x.shape[2])
        cos, sin = self.cos_sin(positions, compute_dtype(x.dtype))
        return rotate(x, cos, sin)

    def extra_repr(self) -> str:
        return f"{self.head_dim}, theta={self.theta:g}" + ("" if self.fraction == 1 else f", fraction={self.fraction}")


def rotation_tables(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin of the angles, (..., T, half), as ``rotate`` takes them: (..., 1, T, 2 * half)."""
    return torch.cat([cos, cos], -1).unsqueeze(-3), torch.cat([-sin, sin], -1).unsqueeze(-3)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x (B, H, T, D) rotated by ``rotation_tables``, in their dtype; columns beyond the tables are unchanged.

    The signs are in the table to save operations: in a decode step the launch of each one costs time.
    """
    rotated = cos.shape[-1]
    turning = x[..., :rotated] if rotated < x.shape[-1] else x
    exact = turning.to(cos.dtype)
    turned = torch.addcmul(exact * cos, exact.roll(rotated // 2, -1), sin).to(x.dtype)
    return torch.cat([turned, x[..., rotated:]], -1) if rotated < x.shape[-1] else turned


def check_positions(name: str, positions: Tensor, batch: int, length: int) -> None:
    if not isinstance(positions, Tensor):
        check.fail(name, f"a tensor (T,) or (B, T) = ({batch}, {length})", type(positions).__name__, TypeError)
    if tuple(positions.shape) not in ((length,), (1, length), (batch, length)):
        check.fail(name, f"of shape (T,) or (B, T) = ({batch}, {length})", check.describe_tensor(positions))
