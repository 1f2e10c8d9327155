"""One new token of each request over caches in pages, on a CPU: pages that lie one after another are read where they
are, others are copied whole."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from softplus_attention.kernels.cpu import chunked
from softplus_attention.kernels.cpu.decode import row_weights
from softplus_attention.power import PowerRecord
from softplus_attention.reference import compute_dtype

PowerOfCount = Callable[[int], PowerRecord]


def decode_pages(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    window: int | None,
    power: PowerOfCount,
    score_scale: float,
) -> Tensor | None:
    """q (B, H, D), keys of length 1 -> (B, H, D_v). None where a number is not finite: then the general path has to
    look which keys a row sees. ``power`` is that of a row which sees so many keys."""
    out = q.new_empty(*q.shape[:2], v_pages.shape[3])
    page, records = k_pages.shape[2], dict[int, PowerRecord]()
    with torch.autocast("cpu", enabled=False), torch.no_grad():
        unit = chunked.unit_and_inverse_norm(q.to(compute_dtype(q.dtype)))[0]
        for b, length in enumerate(seq_lens.tolist()):
            seen = length if window is None else min(length, window)
            first, last = (length - seen) // page, (length - 1) // page
            keys, values = pages_of(k_pages, v_pages, block_table[b, first : last + 1])
            if seen not in records:
                records[seen] = power(seen)
            out[b] = one_request(unit[b], keys, values, length - seen - first * page, seen, records[seen], score_scale)
        return out if bool(out.isfinite().all()) else None


def pages_of(k_pages: Tensor, v_pages: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """(n, H_kv, page, D) each."""
    found = table.tolist()
    if found == list(range(found[0], found[0] + len(found))):
        return k_pages[found[0] : found[0] + len(found)], v_pages[found[0] : found[0] + len(found)]
    return k_pages.index_select(0, table), v_pages.index_select(0, table)


def one_request(
    q: Tensor, k: Tensor, v: Tensor, begin: int, seen: int, power: PowerRecord, score_scale: float
) -> Tensor:
    """The unit vectors q (H, D) over the ``seen`` keys from ``begin`` of k (n, H_kv, page, D)."""
    n, kv_heads, page, _ = k.shape
    scale = torch.tensor(float(seen), dtype=q.dtype).log() * score_scale
    rows = (q * scale).reshape(kv_heads, -1, q.shape[1])
    scores = (rows @ k.to(q.dtype).mT).permute(1, 2, 0, 3).reshape(1, kv_heads, rows.shape[1], n * page)
    scores = scores[..., begin : begin + seen].contiguous()
    weights, norm = row_weights(scores, seen, power)
    spread = F.pad(weights, (begin, n * page - begin - seen))[0].unflatten(-1, (n, page)).permute(2, 0, 1, 3)
    return ((spread @ v.to(q.dtype)).sum(0) / norm[0]).flatten(0, 1)
