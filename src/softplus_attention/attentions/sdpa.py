"""The softmax specs, by torch's fused kernels."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from softplus_attention.attentions.composed import (
    alibi_bias,
    by_pieces,
    composed_attention,
    rows_at_once,
    scaled_queries,
)
from softplus_attention.attentions.spec import AttentionSpec, Parameters
from softplus_attention.dispatch import transformed
from softplus_attention.reference import compute_dtype, expand_kv_heads, seen_by_some_row, unit
from softplus_attention.visibility import Visibility

# Smaller blocks would not fill the tiles of torch's kernels.
MIN_WINDOW_BLOCK = 64


def sdpa_attention(
    spec: AttentionSpec,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visibility: Visibility,
    parameters: Parameters | None = None,
    normalized_keys: bool = False,
) -> Tensor:
    """A softmax spec by torch's ``scaled_dot_product_attention``."""
    dtype, work = q.dtype, compute_dtype(q.dtype)
    if spec.positions != "alibi":
        k, v, visibility = slice_visible_keys(k, v, visibility)
    t_q, t_k, heads = visibility.t_q, visibility.t_k, q.shape[1]
    if t_k == 0:
        return composed_attention(spec, q, k, v, visibility, parameters, normalized_keys)
    bounds = (visibility.mask, visibility.key_start, visibility.key_end)
    unbiased = all(x is None for x in bounds) and visibility.is_bottom_right and spec.positions != "alibi"
    whole = unbiased and (visibility.window is None or visibility.window >= t_k)
    plain = whole and (not visibility.is_causal or t_q == 1 or t_q == t_k)
    window = visibility.window if unbiased and visibility.is_causal and t_q == t_k else None
    if window is not None and t_k <= 2 * max(window, MIN_WINDOW_BLOCK):
        window = None  # two blocks would cover all keys, as a dense mask does
    masked = not plain and window is None
    if masked and (rows := rows_at_once(q, k, v, parameters)) < t_q:
        return by_pieces(sdpa_attention, rows, spec, q, k, v, visibility, parameters, normalized_keys)
    visible = visibility.dense() if masked else None
    if visible is not None:
        seen = seen_by_some_row(visible)
        k, v = torch.where(seen, k, 0), torch.where(seen, v, 0)

    # Rounding a bias of -8 to bfloat16 changes a weight by 3%, and neighbouring distances beyond 256 become equal.
    run_in = work if spec.positions == "alibi" else dtype
    # SDPA takes one scale; what differs by row is multiplied into the queries.
    scale = spec.score_scale(q.shape[-1])
    if spec.qk_norm or spec.log_n or spec.learned_scale:
        q, scale = scaled_queries(spec, q.to(work), visibility.counts().to(work), parameters), 1.0
    k = unit(k.to(work)) if spec.qk_norm and not normalized_keys else k
    q, k, v = q.to(run_in), k.to(run_in), v.to(run_in)
    if window is not None:
        return windowed_sdpa(q, expand_kv_heads(k, heads), expand_kv_heads(v, heads), window, scale)
    if visible is None:
        grouped = False
        if k.shape[1] != heads:  # not `grouped = ...`: dynamo would make it a SymBool, which SDPA rejects
            grouped = True
        if visibility.is_causal and t_q == t_k:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=grouped)
        return F.scaled_dot_product_attention(q, k, v, scale=scale, enable_gqa=grouped)

    # With a mask and grouped heads torch has only its quadratic kernel: expand the heads instead.
    k, v = expand_kv_heads(k, heads), expand_kv_heads(v, heads)
    # A row that sees no key is NaN or uniform, depending on the kernel: let it see all keys, then set it to 0.
    sees = visible.any(-1, keepdim=True)
    mask = visible | ~sees
    if spec.positions == "alibi":
        mask = torch.where(mask, alibi_bias(heads, visibility, run_in), -torch.inf)
    return torch.where(sees, F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale), 0).to(dtype)


def slice_visible_keys(k: Tensor, v: Tensor, visibility: Visibility) -> tuple[Tensor, Tensor, Visibility]:
    """Slices the keys of a CPU decode step in which all sequences see the same range, as with a static cache. With a
    mask instead, torch's kernel reads the whole cache, and slowly."""
    ranged = visibility.key_end is not None or visibility.cache_seqlens is not None
    if visibility.t_q != 1 or not ranged or visibility.mask is not None or k.device.type != "cpu" or transformed(k, v):
        return k, v, visibility
    start, end = (x.flatten().tolist() for x in visibility.ranges())
    if len({*zip(start, end, strict=True)}) != 1:
        return k, v, visibility
    seen = slice(start[0], end[0])
    return k[:, :, seen], v[:, :, seen], Visibility(1, end[0] - start[0], k.device)


def windowed_sdpa(q: Tensor, k: Tensor, v: Tensor, window: int, scale: float) -> Tensor:
    """Causal softmax attention over ``window`` keys, in memory and time of T * 2 * window.

    The rows are split into blocks of at least ``window``, which see keys of their own block and the one before. The
    sequence is padded at its end to whole blocks; the causal mask hides the padding.
    """
    batch, heads, length, _ = q.shape
    block = max(window, MIN_WINDOW_BLOCK)
    blocks = (length + block - 1) // block
    q, k, v = (
        F.pad(x, (0, 0, 0, blocks * block - length)).reshape(batch * heads, blocks, block, x.shape[-1])
        for x in (q, k, v)
    )
    key = torch.arange(2 * block, device=q.device)
    row = key[block:, None]
    visible = (key <= row) & (key > row - window)
    first = F.scaled_dot_product_attention(q[:, :1], k[:, :1], v[:, :1], attn_mask=visible[:, block:], scale=scale)
    k, v = (torch.cat([x[:, :-1], x[:, 1:]], 2) for x in (k, v))
    later = F.scaled_dot_product_attention(q[:, 1:], k, v, attn_mask=visible, scale=scale)
    out = torch.cat([first, later], 1).reshape(batch, heads, blocks * block, v.shape[-1])
    return out[:, :, :length]
