"""One new token of each request over caches in pages, on a CPU: every page is read where it lies."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

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
            runs = neighbours(block_table[b, first : last + 1].tolist())
            if seen not in records:
                records[seen] = power(seen)
            own = (unit[b], [k_pages[run] for run in runs], [v_pages[run] for run in runs])
            out[b] = one_request(*own, length - seen - first * page, seen, records[seen], score_scale)
        return out if bool(out.isfinite().all()) else None


def neighbours(pages: list[int]) -> list[slice]:
    """Pages as slices of those that follow one another: servers give a prompt its pages at once."""
    breaks = [i for i in range(1, len(pages)) if pages[i] != pages[i - 1] + 1]
    return [slice(pages[i], pages[j - 1] + 1) for i, j in pairwise([0, *breaks, len(pages)])]


def one_request(
    q: Tensor, k: list[Tensor], v: list[Tensor], begin: int, seen: int, power: PowerRecord, score_scale: float
) -> Tensor:
    """The unit vectors q (H, D) over the ``seen`` keys from ``begin`` of k, each (n, H_kv, page, D)."""
    _, kv_heads, page, _ = k[0].shape
    scale = torch.tensor(float(seen), dtype=q.dtype).log() * score_scale
    rows = (q * scale).reshape(kv_heads, -1, q.shape[1])
    scores = torch.cat([rows @ part.to(q.dtype).mT for part in k])  # (n, H_kv, heads that share a key head, page)
    n = len(scores)
    scores = scores.permute(1, 2, 0, 3).reshape(1, kv_heads, -1, n * page)[..., begin : begin + seen].contiguous()
    weights, norm = row_weights(scores, seen, power)
    spread = F.pad(weights, (begin, n * page - begin - seen))[0].unflatten(-1, (n, page)).permute(2, 0, 1, 3)
    parts = zip(spread.split([len(part) for part in v]), v, strict=True)
    out = sum((part @ values.to(q.dtype)).sum(0) for part, values in parts)
    return (out / norm[0]).flatten(0, 1)
