"""Batches of requests with paged caches, and each request computed alone."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from helpers import randn
from torch import Tensor

from softplus_attention import PowerByLength, softplus_attention, softplus_attention_decode, softplus_attention_paged
from softplus_attention.kernels.cpu.pages import decode_pages
from softplus_attention.power import Power, power_record

HEADS, KV_HEADS, D, D_V = 4, 2, 12, 10


def fill_pages(
    k: list[Tensor], v: list[Tensor], page: int, *, shuffle: bool = True, unused: float = torch.nan
) -> tuple[Tensor, Tensor, Tensor]:
    """Pages of keys and of values, interleaved in memory, and the block table of requests with (H, T, D) keys."""
    blocks = [-(-x.shape[1] // page) for x in k]
    free = list(range(sum(blocks) + 3))
    if shuffle:
        free = torch.randperm(len(free), generator=torch.Generator().manual_seed(0)).tolist()
    pages = torch.full((len(free), k[0].shape[0], page, k[0].shape[2] + v[0].shape[2]), unused, dtype=k[0].dtype)
    table = torch.full((len(k), max(blocks) + 1), 10**6, dtype=torch.int32)
    for b, (keys, values) in enumerate(zip(k, v, strict=True)):
        for block, part in enumerate(torch.cat([keys, values], -1).split(page, 1)):
            table[b, block] = own = free.pop(0)
            pages[own, :, : part.shape[1]] = part
    return *pages.split([k[0].shape[2], v[0].shape[2]], -1), table


class Batch:
    """Requests with ``lengths`` keys and ``new`` rows, in shuffled pages; unused slots are NaN."""

    def __init__(self, lengths: list[int], new: list[int], page: int, dtype: torch.dtype = torch.float64) -> None:
        self.lengths, self.new = lengths, new
        self.q = [randn(1, HEADS, t, D, seed=i, dtype=dtype) for i, t in enumerate(new)]
        self.k = [randn(1, KV_HEADS, n, D, seed=50 + i, dtype=dtype) for i, n in enumerate(lengths)]
        self.v = [randn(1, KV_HEADS, n, D_V, seed=90 + i, dtype=dtype) for i, n in enumerate(lengths)]
        self.k_pages, self.v_pages, self.table = fill_pages([x[0] for x in self.k], [x[0] for x in self.v], page)
        self.k_pages = self.k_pages.mT.contiguous().mT  # stored as (D, page), to test strides
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


class DecodeBatch:
    """Requests with one new row each, for the decode kernels of paged caches on a CPU. Keys are raw, or unit vectors
    with ``normalized``."""

    scale = 2.5

    def __init__(
        self, lengths: list[int], page: int, heads: tuple[int, int], dtype: torch.dtype = torch.float64,
        d: int = 10, *, normalized: bool = False, shared: bool = False, **layout: Any,
    ) -> None:  # fmt: skip
        self.normalized, self.lengths = normalized, lengths
        self.q = randn(len(lengths), heads[0], d, seed=0, dtype=dtype)
        self.k = [randn(heads[1], n, d, seed=50 + n, dtype=dtype) for n in lengths]
        self.k = [F.normalize(k, dim=-1) for k in self.k] if normalized else self.k
        self.v = [randn(heads[1], n, 12, seed=90 + n, dtype=dtype) for n in lengths]
        shared = shared and page <= lengths[1]  # the first page of the first two requests
        if shared:
            self.k[1][:, :page], self.v[1][:, :page] = self.k[0][:, :page], self.v[0][:, :page]
        self.k_pages, self.v_pages, self.table = fill_pages(self.k, self.v, page, **layout)
        if shared:
            self.k_pages[self.table[1, 0]], self.v_pages[self.table[1, 0]] = torch.nan, torch.nan
            self.table[1, 0] = self.table[0, 0]

    def decode(self, window: int | None = None, power: Power = 15, offset: bool = True) -> Tensor | None:
        pages = (self.k_pages, self.v_pages, self.table, torch.tensor(self.lengths, dtype=torch.int32))
        power_of_rows = lambda seen: power_record(power, offset)  # noqa: E731
        return decode_pages(self.q, *pages, window, power_of_rows, self.scale, normalized_keys=self.normalized)

    def alone(self, dtype: torch.dtype | None = None, *, impl: Any = "reference", **options: Any) -> Tensor:
        out = []
        for q, k, v in zip(self.q, self.k, self.v, strict=True):
            cache = (x.to(dtype or x.dtype) for x in (q[None, :, None], k[None], v[None]))
            options |= {"score_scale": self.scale, "normalized_keys": self.normalized, "enable_gqa": True, "impl": impl}
            out.append(softplus_attention_decode(*cache, torch.tensor([k.shape[1]], dtype=torch.int32), **options))
        return torch.cat(out)[:, :, 0]


POWERS = {
    "none": None,
    "15": 15,
    "per head": torch.tensor([1.0, 3, 7.5, 15], dtype=torch.float64),
    "by length": PowerByLength(3, slope=2, n0=8),
}
