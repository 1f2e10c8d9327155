"""Decode of one new token over a cache, on a CPU: every key and value is read once.

The general path first checks all keys and values for NaN, so that those of weight 0 have no effect. Here that check is
skipped: only if the result is not finite, the general path computes it again.
"""

from __future__ import annotations

import torch
from torch import Tensor

from softplus_attention.kernels.cpu import chunked, native
from softplus_attention.power import PowerRecord
from softplus_attention.reference import EQUAL_SCORES, compute_dtype

# Up to this many keys, and where squares of norms leave float32, keys are normalised bit for bit as in the general
# path: otherwise rows in which no key stands out much differ by 1e-5. With more keys that would triple a step's time.
SMALL = 512


def decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    start: Tensor,
    end: Tensor,
    power: PowerRecord,
    score_scale: float,
    normalized_keys: bool,
) -> Tensor:
    """``chunked_decode`` of ``ops``."""
    if not (q.numel() and v.shape[3]):
        return q.new_empty(*q.shape[:3], v.shape[3])
    ops = native.status().ops
    if ops is not None and q.dtype != torch.float64:
        found = ops.decode(q, k, v, None, start, end, *power, score_scale, normalized_keys)
        return general(q, k, v, start, end, power, score_scale, normalized_keys) if found is None else found
    out = q.new_empty(*q.shape[:3], v.shape[3])
    # An exported program may be called with gradients enabled, which this does not support.
    with torch.autocast("cpu", enabled=False), torch.no_grad():
        for rows, (first, last) in ranges_of_sequences(start, end, q.shape[0]):
            keys = (rows, slice(None), slice(first, last))
            sliced = power
            if power.rows is not None and power.rows.dim() == 3 and power.rows.shape[0] > 1:
                sliced = power._replace(rows=power.rows[rows])
            out[rows] = one_token(q[rows], k[keys], v[keys], sliced, score_scale, normalized_keys)
    if bool(out.isfinite().all()):
        return out
    return general(q, k, v, start, end, power, score_scale, normalized_keys)


def general(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    start: Tensor,
    end: Tensor,
    power: PowerRecord,
    score_scale: float,
    normalized_keys: bool,
) -> Tensor:
    with torch.autocast("cpu", enabled=False), torch.no_grad():
        return chunked.attention_forward(q, k, v, start, end, None, *power, score_scale, normalized_keys)[0]


def ranges_of_sequences(start: Tensor, end: Tensor, batch: int) -> list[tuple[slice, tuple[int, int]]]:
    """Sequences and their range of keys: all together if they share one range, else one by one."""
    ranges = torch.stack([start[:, 0], end[:, 0]], -1).tolist()
    if all(r == ranges[0] for r in ranges):
        return [(slice(0, batch), (ranges[0][0], ranges[0][1]))]
    return [(slice(i, i + 1), (first, last)) for i, (first, last) in enumerate(ranges)]


def one_token(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    power: PowerRecord,
    score_scale: float,
    normalized_keys: bool,
) -> Tensor:
    """q (B, H, 1, D) over keys (B, H_kv, N, D), all of which are visible."""
    dtype = compute_dtype(q.dtype)
    batch, heads, _, width = q.shape
    n = k.shape[2]
    if n == 0:
        return q.new_zeros(batch, heads, 1, v.shape[3])
    k, v = k.to(dtype), v.to(dtype)
    # (B, H_kv, heads that share a key head, ...)
    q = chunked.unit_and_inverse_norm(q.to(dtype))[0].reshape(batch, k.shape[1], -1, width)
    scale = torch.tensor(float(n), dtype=dtype).log() * score_scale
    q = q.mul_(scale)
    if normalized_keys:
        scores = q @ k.mT
    elif n <= SMALL or bool(((norms := torch.linalg.vector_norm(k, dim=-1)) < 1e-15).any() | (norms > 1e15).any()):
        scores = q @ chunked.unit_and_inverse_norm(k)[0].mT
    else:
        # Dividing the scores by the norms avoids writing normalised keys.
        scores = (q @ k.mT).div_(norms[..., None, :])
    weights, norm = row_weights(scores, n, power)
    return (weights @ v).div_(norm).reshape(batch, heads, 1, -1)


def row_weights(
    scores: Tensor, n: int | Tensor, power: PowerRecord, hidden: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The weights (B, H_kv, heads that share a key head, keys) of rows that see n keys, and their normaliser.

    ``n`` is one number, or (B, 1, 1, 1) if some keys are ``hidden``. ``scores`` are overwritten.
    """
    if not bool(scores.isfinite().all()):
        scores = torch.where(scores.isfinite(), scores, torch.nan)  # softplus would turn -inf into 0
    f = chunked.softplus_(scores)
    if hidden is not None:
        f.masked_fill_(hidden, 0)
    total = f.sum(-1, keepdim=True)
    weights, norm = f, total
    if power.sharpen:
        subtracted = float(power.offset) * (n > 3)
        largest = f.amax(-1, keepdim=True)
        height = (largest * n).div_(total).sub_(subtracted)
        sharp = height > EQUAL_SCORES
        safe = torch.where(sharp, height, 1)
        u = (f * (n / total / safe)).sub_(subtracted / safe).clamp_(0, 1)
        given = power_of(power, n, scores)
        weights = raised(chunked.exactly_one_(u, f, largest, given), given)
        norm = weights.sum(-1, keepdim=True)
        if not bool(sharp.all()):
            weights, norm = torch.where(sharp, weights, f), torch.where(sharp, norm, total)
    return weights, norm


def power_of(power: PowerRecord, n: int | Tensor, like: Tensor) -> int | Tensor:
    if power.rows is None:
        return power.of_counts(n if isinstance(n, Tensor) else like.new_tensor(float(n)))
    batch, kv_heads, shared, _ = like.shape
    rows = power.rows.to(like.dtype).expand(batch, kv_heads * shared, 1)
    return rows.reshape(batch, kv_heads, shared, 1)


def raised(u: Tensor, power: int | Tensor) -> Tensor:
    if isinstance(power, int):
        return chunked.integer_power(u, power, torch.empty_like(u))
    return u.pow(power).masked_fill_(u == 0, 0)
