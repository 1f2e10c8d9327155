"""The method in plain PyTorch, dense and slow: the reference that every other implementation is tested against.

The equations are those of docs/method.md, in the same order. Half-precision inputs are computed in float32; the weights
and the output are each rounded once to the inputs' dtype.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from softplus_attention.power import Power, power_of_rows
from softplus_attention.visibility import Visibility

# A row whose largest x is not above this has equal scores up to rounding, and keeps its stage-1 weights.
EQUAL_SCORES = 2.0**-10


class Stages(NamedTuple):
    """The intermediate results, each (B, H, T_q, T_k); ``counts`` is (B|1, H|1, T_q)."""

    counts: Tensor
    scores: Tensor
    normalised: Tensor
    sharpened: Tensor


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Disables autocast: the inputs are already cast, and the computation inside stays in float32."""
    return nullcontext() if device.type == "meta" else torch.autocast(device.type, enabled=False)


def unit(x: Tensor) -> Tensor:
    """x / ||x||, zero for a zero vector, with no overflow or underflow of the squares."""
    size = x.detach().abs().amax(-1, keepdim=True)
    x = x / torch.where(size == 0, 1, size)
    square = x.square().sum(-1, keepdim=True)
    return x * torch.where(square == 0, 0, torch.where(square == 0, 1, square).rsqrt())


def unit_keys(k: Tensor) -> Tensor:
    """Unit keys for a cache, in their own dtype.

    The norm is computed in float64, where squares of the smaller dtypes cannot overflow. This takes few operations;
    in a decode step the launch of each one costs time.
    """
    wants_gradient = torch.is_grad_enabled() and k.requires_grad  # the gradient of a zero key would be infinite
    if k.dtype == torch.float64 or k.device.type == "mps" or wants_gradient:
        return unit(k.to(compute_dtype(k.dtype))).to(k.dtype)
    length = torch.linalg.vector_norm(k, dim=-1, keepdim=True, dtype=torch.float64).clamp_min_(1e-300)
    if torch.compiler.is_compiling():  # the compiler fuses both operations, and rejects some tensors as `out`
        return (k / length).to(k.dtype)
    return torch.div(k, length, out=torch.empty_like(k))


def softplus(s: Tensor) -> Tensor:
    """log(1 + e^s); F.softplus is linear above 20, which is not exact in float64."""
    return torch.logaddexp(s, s.new_zeros(())) if s.dtype == torch.float64 else F.softplus(s)


def length_scaled_scores(q: Tensor, k: Tensor, counts: Tensor, score_scale: float) -> Tensor:
    """s_ij = score_scale * log(N_i) * (q_i . k_j), for unit vectors q and k."""
    return (q * (score_scale * counts.clamp(min=1).log())[..., None]) @ k.mT


def l1_normalised(f: Tensor, visible: Tensor) -> Tensor:
    """f / sum f over the visible keys; zero for a row that sees none. The mask selects: a masked NaN has no effect."""
    f = torch.where(visible, f, 0)
    total = f.sum(-1, keepdim=True)
    return f / torch.where(total == 0, 1, total)


def sharpened(a: Tensor, visible: Tensor, counts: Tensor, power: Tensor | float, offset: Tensor | float) -> Tensor:
    """relu(N a - o)^p, l1-normalised; a row of equal scores keeps its first-stage weights."""
    x = torch.relu(counts[..., None] * a - offset)
    largest = x.detach().amax(-1, keepdim=True) if x.shape[-1] else x.new_zeros(*x.shape[:-1], 1)
    distinct = largest > EQUAL_SCORES
    u = torch.where(distinct, x, 0) / torch.where(distinct, largest, 1)
    w = torch.where(u > 0, torch.where(u > 0, u, 1) ** power, 0)
    return torch.where(distinct, l1_normalised(w, visible), a)


def choose_offset(counts: Tensor, offset: bool) -> Tensor:
    """o_i: 1, but 0 in rows that see at most three keys, and in all rows if ``offset`` is False."""
    return ((counts > 3) & offset).to(counts.dtype)[..., None]


def weighted_sum(weights: Tensor, v: Tensor) -> Tensor:
    """weights @ v; values of weight 0 are ignored even if they are NaN, other non-finite values give NaN."""
    finite = v.isfinite()
    bad = (weights.detach() != 0).to(v.dtype) @ (~finite).to(v.dtype)
    # Multiplied by the weights, so that their gradient is NaN too.
    return weights @ torch.where(finite, v, 0) + torch.where(bad > 0, torch.nan, 0.0) * weights.sum(-1, keepdim=True)


def seen_by_some_row(visible: Tensor) -> Tensor:
    """(B|1, 1, T_k, 1). Keys that no row sees may hold NaN, and 0 * NaN is NaN in a matrix product."""
    return visible.any(-2).any(1, keepdim=True)[..., None]


def expand_kv_heads(x: Tensor, heads: int) -> Tensor:
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)


def attention_stages(
    q: Tensor,
    k: Tensor,
    visibility: Visibility,
    power: Power,
    score_scale: float | None = None,
    normalized_keys: bool = False,
    offset: bool = True,
) -> Stages:
    """Both stages for q (B, H, T_q, D) and k (B, H_kv, T_k, D), in float32 or float64; for LSSA the first only."""
    dtype = compute_dtype(q.dtype)
    score_scale = math.log(q.shape[-1]) if score_scale is None else score_scale
    visible = visibility.dense()
    counts = visible.sum(-1).to(dtype)

    q, k = torch.where(visible.any(-1)[..., None], q, 0), torch.where(seen_by_some_row(visible), k, 0)
    q, k = q.to(dtype), expand_kv_heads(k, q.shape[1]).to(dtype)
    k = torch.where(k.isfinite(), k, torch.nan) if normalized_keys else unit(k)
    scores = length_scaled_scores(unit(q), k, counts, score_scale)
    a = l1_normalised(softplus(scores), visible)
    if power is None:
        return Stages(counts, scores, a, a)
    p, o = power_of_rows(power, counts), choose_offset(counts, offset)
    return Stages(counts, scores, a, sharpened(a, visible, counts, p, o))


def reference_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visibility: Visibility,
    power: Power,
    score_scale: float | None = None,
    normalized_keys: bool = False,
    offset: bool = True,
) -> Tensor:
    """The op, by the equations."""
    dtype = compute_dtype(q.dtype)
    weights = attention_stages(q, k, visibility, power, score_scale, normalized_keys, offset).sharpened
    weights = weights.to(q.dtype).to(dtype)
    v = torch.where(seen_by_some_row(visibility.dense()), v, 0)
    return weighted_sum(weights, expand_kv_heads(v, q.shape[1]).to(dtype)).to(q.dtype)
