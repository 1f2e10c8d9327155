"""Decode of one new token per request over paged caches, on a CPU: pages are read in place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from softplus_attention.kernels.cpu import chunked, native
from softplus_attention.kernels.cpu.decode import row_weights
from softplus_attention.power import PowerRecord
from softplus_attention.reference import compute_dtype

PowerOfCounts = Callable[[Tensor], PowerRecord]


def decode_pages(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    window: int | None,
    power: PowerOfCounts,
    score_scale: float,
    normalized_keys: bool = True,
) -> Tensor | None:
    """q (B, H, D) -> (B, H, D_v), or None if the general path must run: the result is not finite, or without the C++
    kernels the keys are not normalised. ``power`` maps the number of keys that each request sees, (B,), to a power."""
    seen = seq_lens if window is None else seq_lens.clamp(max=window)
    ops = native.status().ops
    contiguous_rows = k_pages.stride(3) == 1 and v_pages.stride(3) == 1
    if ops is not None and q.dtype != torch.float64 and contiguous_rows:
        caches = (k_pages, v_pages, block_table, seq_lens - seen, seq_lens)
        return ops.decode(q, *caches, *power(seen), score_scale, normalized_keys)
    if not normalized_keys:
        return None
    out = q.new_empty(*q.shape[:2], v_pages.shape[3])
    groups: dict[int, list[int]] = {}  # requests with a similar number of keys are computed together
    for b, count in enumerate(seen.tolist()):
        groups.setdefault(count.bit_length(), []).append(b)
    with torch.autocast("cpu", enabled=False), torch.no_grad():
        unit = chunked.unit_and_inverse_norm(q.to(compute_dtype(q.dtype)))[0]
        for group in groups.values():
            index = torch.tensor(group)
            pages = (k_pages, v_pages, block_table[index], seq_lens[index], seen[index])
            out[index] = decode_group(unit[index], *pages, power, score_scale).to(out.dtype)
        return out if bool(out.isfinite().all()) else None


def decode_group(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    seen: Tensor,
    power: PowerOfCounts,
    score_scale: float,
) -> Tensor:
    """Unit queries q (B, H, D), each over the last ``seen`` keys of its request."""
    kv_heads, page = k_pages.shape[1:3]
    starts, ends = (seq_lens - seen) // page, (seq_lens + page - 1) // page
    table = zip(block_table.tolist(), starts.tolist(), ends.tolist(), strict=True)
    requests = [contiguous_runs(row[start:end]) for row, start, end in table]
    counts = seen.to(q.dtype)
    rows = (q * (counts.log() * score_scale)[:, None, None]).unflatten(1, (kv_heads, -1))
    scores = q.new_empty(*rows.shape[:3], int((ends - starts).max()), page)
    for target, row, runs in zip(scores, rows, requests, strict=True):
        parts = [row @ k_pages[run].to(q.dtype).mT for run in runs]  # (pages, H_kv, heads that share a key head, page)
        products = parts[0] if len(parts) == 1 else torch.cat(parts)
        target[:, :, : len(products)] = products.permute(1, 2, 0, 3)
    key, begin = torch.arange(scores.shape[3] * page), (seq_lens - seen - starts * page)[:, None]
    hidden = ((key < begin) | (key >= begin + seen[:, None]))[:, None, None]
    flat = scores.flatten(3).masked_fill_(hidden, 0)
    weights, norm = row_weights(flat, counts[:, None, None, None], power(seen), hidden)
    by_page = weights.unflatten(3, scores.shape[3:])
    out = torch.stack([weighted_values(*one, v_pages) for one in zip(by_page, requests, strict=True)])
    return (out / norm).flatten(1, 2)


def weighted_values(weights: Tensor, runs: Sequence[slice], v_pages: Tensor) -> Tensor:
    """The values of the pages ``runs``, summed with weights (H_kv, heads that share a key head, pages, page)."""
    weights = weights.permute(2, 0, 1, 3)
    out, done = weights.new_zeros(()), 0
    for run in runs:
        values = v_pages[run].to(weights.dtype)
        out = out + (weights[done : done + len(values)] @ values).sum(0)
        done += len(values)
    return out


def contiguous_runs(pages: list[int]) -> list[slice]:
    """Pages as slices of consecutive ones: servers often allocate a prompt's pages at once."""
    breaks = [i for i in range(1, len(pages)) if pages[i] != pages[i - 1] + 1]
    return [slice(pages[i], pages[j - 1] + 1) for i, j in pairwise([0, *breaks, len(pages)])]
