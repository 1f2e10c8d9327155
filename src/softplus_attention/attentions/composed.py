"""Any ``AttentionSpec`` by its equations, from the functions of the reference.

N_i is the number of keys that row i sees, so prefill, packed, padded and decode rows agree.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from softplus_attention.attentions.spec import AttentionSpec, Parameters, first_scale, power_for_call
from softplus_attention.power import Power, power_of_rows
from softplus_attention.reference import (
    choose_offset,
    compute_dtype,
    expand_kv_heads,
    l1_normalised,
    seen_by_some_row,
    sharpened,
    softplus,
    unit,
    weighted_sum,
)
from softplus_attention.visibility import Visibility

# Weights (B, H, rows, T_k) computed at a time without gradients; several tensors of this size are alive together.
MAX_WEIGHTS = {"cpu": 1 << 23, "cuda": 1 << 28}


def elu_plus_one(s: Tensor) -> Tensor:
    """s + 1 above zero, e^s below; torch's ELU plus 1 would round e^s away."""
    return torch.where(s > 0, s + 1, s.clamp(max=0).exp())


# Without qk_norm scores are unbounded, and softplus can underflow in a whole row, which then gives 0.
POSITIVE_MAPS: dict[str, Callable[[Tensor], Tensor]] = {
    "softplus": softplus,
    "exp": torch.exp,
    "sigmoid": torch.sigmoid,
    "relu": torch.relu,
    "elu1": elu_plus_one,
}


def alibi_slopes(heads: int) -> list[float]:
    """2^(-8/H), 2^(-16/H), ... for a power of two; else those of the next lower one, filled up from the next higher."""
    lower = 1 << (heads.bit_length() - 1)
    slopes = [2 ** (-8 * h / lower) for h in range(1, lower + 1)]
    return slopes + [2 ** (-4 * h / lower) for h in range(1, 2 * lower, 2)][: heads - lower]


def alibi_bias(heads: int, visibility: Visibility, dtype: torch.dtype) -> Tensor:
    """-slope_h |i - j| (B|1, H, T_q, T_k), where i is the key index of the row's own token."""
    slopes = torch.tensor(alibi_slopes(heads), dtype=dtype, device=visibility.device)[:, None, None]
    key = torch.arange(visibility.t_k, device=visibility.device)
    distance = (visibility.positions()[:, None, :, None] - key).abs()
    return -slopes * distance.to(dtype)


def scaled_queries(spec: AttentionSpec, q: Tensor, counts: Tensor, parameters: Parameters | None) -> Tensor:
    """The queries, scaled such that their products with the keys are the scores before any bias."""
    scale = spec.score_scale(q.shape[-1]) * (counts.clamp(min=1).log() if spec.log_n else torch.ones_like(counts))
    if spec.learned_scale:
        learned = (parameters or {}).get("ssmax_scale")
        scale = scale * (first_scale(spec) if learned is None else learned.to(q.dtype)[:, None])
    return (unit(q) if spec.qk_norm else q) * scale[..., None]


def entmax(scores: Tensor, visible: Tensor, alpha: float) -> Tensor:
    try:
        from entmax import entmax15, entmax_bisect
    except ImportError as error:
        message = "normaliser='entmax' needs the entmax package: pip install 'softplus-attention[baselines]'"
        raise ModuleNotFoundError(message, name="entmax") from error
    if not scores.shape[-1]:
        return scores
    # The package finds no threshold in a row with NaN or Inf: its scores are replaced by 0 and its result by NaN.
    bad = (visible & ~scores.isfinite()).any(-1, keepdim=True)
    scores = torch.where(visible & ~bad, scores, 0)
    # A score 1 / (alpha - 1) or more below the maximum has no weight. A floor just below that keeps the running sums of
    # the package exact: -inf would make them NaN, and a huge negative number would cancel the small ones.
    largest = torch.where(visible, scores.detach(), -torch.inf).amax(-1, keepdim=True)
    floor = torch.where(largest.isfinite(), largest, 0) - 2 / (alpha - 1)
    scores = torch.where(visible & (scores > floor), scores, floor)
    weights = entmax15(scores, -1) if alpha == 1.5 else entmax_bisect(scores, alpha, -1)
    return torch.where(visible, torch.where(bad, torch.nan, weights), 0)


def softmax(scores: Tensor, visible: Tensor) -> Tensor:
    hidden = torch.finfo(scores.dtype).min
    return torch.where(visible, torch.where(visible, scores, hidden).softmax(-1), 0)


def first_stage(spec: AttentionSpec, scores: Tensor, visible: Tensor, counts: Tensor) -> Tensor:
    if spec.normaliser == "entmax":
        return entmax(scores, visible, spec.alpha)
    if spec.normaliser == "l1" and spec.positive == "exp":
        return softmax(scores, visible)
    f = POSITIVE_MAPS[spec.positive](torch.where(visible, scores, 0))
    if spec.normaliser == "l1":
        return l1_normalised(f, visible)
    f = torch.where(visible, f, 0)
    return f / counts.clamp(min=1)[..., None] if spec.normaliser == "mean" else f


def second_stage(spec: AttentionSpec, a: Tensor, visible: Tensor, counts: Tensor, power: Power) -> Tensor:
    p = power_of_rows(power, counts)
    if spec.second_stage == "exp":
        return softmax(p * (counts[..., None] * a if spec.times_n else a), visible)
    offset = choose_offset(counts, spec.offset)
    # relu(a - o) = relu(N a - N o) / N: the factor 1 / N cancels, and the tolerance for equal scores keeps its meaning.
    return sharpened(a, visible, counts, p, offset if spec.times_n else offset * counts[..., None])


def composed_weights(
    spec: AttentionSpec,
    q: Tensor,
    k: Tensor,
    visibility: Visibility,
    parameters: Parameters | None = None,
) -> Tensor:
    """The final weights (B, H, T_q, T_k) of any spec, dense, in float32 or float64."""
    return weights_of_rows(spec, q, k, visibility, visibility.dense(), parameters, normalized_keys=False)


def weights_of_rows(
    spec: AttentionSpec,
    q: Tensor,
    k: Tensor,
    visibility: Visibility,
    visible: Tensor,
    parameters: Parameters | None,
    normalized_keys: bool,
) -> Tensor:
    dtype, heads = compute_dtype(q.dtype), q.shape[1]
    counts = visible.sum(-1).to(dtype)

    k = torch.where(seen_by_some_row(visible), k, 0).to(dtype)
    k = unit(k) if spec.qk_norm and not normalized_keys else k
    scores = scaled_queries(spec, q.to(dtype), counts, parameters) @ expand_kv_heads(k, heads).mT
    if spec.bias == "minus_log_n":
        # Sigmoid attention subtracts log n for a constant length n; with N_i prefill and decode rows agree.
        scores = scores - counts.clamp(min=1).log()[..., None]
    if spec.positions == "alibi":
        scores = scores + alibi_bias(heads, visibility, dtype)
    a = first_stage(spec, scores, visible, counts)
    if spec.second_stage == "none":
        return a
    return second_stage(spec, a, visible, counts, power_for_call(spec, parameters, lambda: counts))


def composed_attention(
    spec: AttentionSpec,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visibility: Visibility,
    parameters: Parameters | None = None,
    normalized_keys: bool = False,
) -> Tensor:
    """Any spec by its equations; half precision is computed in float32, weights and output are each rounded once."""
    rows = rows_at_once(q, k, v, parameters)
    if rows < visibility.t_q:
        return by_pieces(composed_attention, rows, spec, q, k, v, visibility, parameters, normalized_keys)
    dtype, visible = compute_dtype(q.dtype), visibility.dense()
    weights = weights_of_rows(spec, q, k, visibility, visible, parameters, normalized_keys).to(q.dtype).to(dtype)
    v = torch.where(seen_by_some_row(visible), v, 0)
    return weighted_sum(weights, expand_kv_heads(v, q.shape[1]).to(dtype)).to(q.dtype)


def rows_at_once(q: Tensor, k: Tensor, v: Tensor, parameters: Parameters | None) -> int:
    """The number of rows whose weights are computed at a time: all of them under autograd or a compiler."""
    given = (q, k, v, *(parameters or {}).values())
    if torch.compiler.is_compiling() or (torch.is_grad_enabled() and any(x.requires_grad for x in given)):
        return q.shape[2]
    most = MAX_WEIGHTS.get(q.device.type, MAX_WEIGHTS["cuda"])
    return max(1, most // max(1, q.shape[0] * q.shape[1] * k.shape[2]))


def by_pieces(
    attention: Callable[..., Tensor],
    rows: int,
    spec: AttentionSpec,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visibility: Visibility,
    parameters: Parameters | None,
    normalized_keys: bool,
) -> Tensor:
    """``attention`` over ``rows`` rows at a time; rows are independent."""
    pieces = []
    for begin in range(0, visibility.t_q, rows):
        end = min(begin + rows, visibility.t_q)
        seen = visibility.rows(begin, end)
        keys, values = k[:, :, : seen.t_k], v[:, :, : seen.t_k]
        given = parameters_of_rows(parameters, begin, end)
        pieces.append(attention(spec, q[:, :, begin:end], keys, values, seen, given, normalized_keys))
    return torch.cat(pieces, 2)


def parameters_of_rows(parameters: Parameters | None, begin: int, end: int) -> Parameters | None:
    """A 1-D parameter is per head; the others (B|1, H|1, T_q|1) are sliced."""
    by_row = {name: x for name, x in (parameters or {}).items() if x.dim() > 1 and x.shape[-1] > 1}
    return {**(parameters or {}), **{name: x[..., begin:end] for name, x in by_row.items()}}
