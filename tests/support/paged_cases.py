"""Batches of requests with paged caches, and each request computed alone."""

from __future__ import annotations

from typing import Any

import torch
from helpers import randn
from torch import Tensor

from softplus_attention import PowerByLength, softplus_attention, softplus_attention_paged

HEADS, KV_HEADS, D, D_V = 4, 2, 12, 10


class Batch:
    """Requests with ``lengths`` keys and ``new`` rows, in shuffled pages; unused slots are NaN."""

    def __init__(self, lengths: list[int], new: list[int], page: int, dtype: torch.dtype = torch.float64) -> None:
        self.lengths, self.new = lengths, new
        self.q = [randn(1, HEADS, t, D, seed=i, dtype=dtype) for i, t in enumerate(new)]
        self.k = [randn(1, KV_HEADS, n, D, seed=50 + i, dtype=dtype) for i, n in enumerate(lengths)]
        self.v = [randn(1, KV_HEADS, n, D_V, seed=90 + i, dtype=dtype) for i, n in enumerate(lengths)]
        blocks = [-(-n // page) for n in lengths]
        free = torch.randperm(sum(blocks) + 3, generator=torch.Generator().manual_seed(0)).tolist()
        # Keys are stored as (D, page) within a page, to test strides.
        self.k_pages = torch.full((len(free), KV_HEADS, D, page), torch.nan, dtype=dtype).mT
        self.v_pages = torch.full((len(free), KV_HEADS, page, D_V), torch.nan, dtype=dtype)
        self.table = torch.full((len(lengths), max(blocks) + 1), 10**6, dtype=torch.int32)
        for b, n in enumerate(lengths):
            for block in range(blocks[b]):
                own = self.table[b, block] = free.pop()
                begin, end = block * page, min((block + 1) * page, n)
                self.k_pages[own, :, : end - begin] = self.k[b][0, :, begin:end]
                self.v_pages[own, :, : end - begin] = self.v[b][0, :, begin:end]
        self.seq_lens = torch.tensor(lengths, dtype=torch.int32)
        self.cu = torch.tensor([0, *torch.tensor(new).cumsum(0).tolist()], dtype=torch.int32)

    def paged(self, **options: Any) -> Tensor:
        q = torch.cat(self.q, 2)[0].transpose(0, 1)
        return softplus_attention_paged(
            q, self.k_pages, self.v_pages, self.table, self.seq_lens, self.cu, max(self.new), max(self.lengths),
            enable_gqa=True, **options,
        )  # fmt: skip

    def alone(self, impl: str = "reference", **options: Any) -> Tensor:
        out = [
            softplus_attention(q, k, v, is_causal=True, enable_gqa=True, impl=impl, **options)  # type: ignore[arg-type]
            for q, k, v in zip(self.q, self.k, self.v, strict=True)
        ]
        return torch.cat(out, 2)[0].transpose(0, 1)


POWERS = {
    "none": None,
    "15": 15,
    "per head": torch.tensor([1.0, 3, 7.5, 15], dtype=torch.float64),
    "by length": PowerByLength(3, slope=2, n0=8),
}
