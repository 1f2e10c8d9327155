"""Hostile inputs for any implementation and device: extreme vectors, and a single NaN or infinity."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from helpers import randn, run
from torch import Tensor

from softplus_attention import (
    attention_weights,
    softplus_attention,
    softplus_attention_decode,
    softplus_attention_varlen,
)


def dominant(q: Tensor, k: Tensor) -> None:
    """All queries match one key, and every other key points away: x reaches N."""
    q[:] = q[..., :1, :]
    k[:] = -q[..., :1, :] + 0.1 * k
    k[..., 7, :] = q[..., 0, :]


def near_identical(q: Tensor, k: Tensor) -> None:
    k[:] = k[..., :1, :] + 0.02 * k


def all_equal(q: Tensor, k: Tensor) -> None:
    k[:] = k[..., :1, :]


def scaled(size: float) -> Callable[[Tensor, Tensor], None]:
    def change(q: Tensor, k: Tensor) -> None:
        q *= size
        k *= size

    return change


def zero_vectors(q: Tensor, k: Tensor) -> None:
    q[..., ::3, :] = 0
    k[..., ::5, :] = 0


def all_zero(q: Tensor, k: Tensor) -> None:
    q[:] = 0
    k[:] = 0


def one_huge_component(q: Tensor, k: Tensor) -> None:
    """The squares overflow, and the other components vanish next to the huge one."""
    q[..., 0] = 1e30
    k[..., 1] = -1e30


HOSTILE = {
    "dominant": dominant,
    "near-identical": near_identical,
    "all-equal": all_equal,
    "huge-1e4": scaled(1e4),
    "tiny-1e-6": scaled(1e-6),
    "zero-vectors": zero_vectors,
    "all-zero": all_zero,
}
FLOAT32_ONLY = {"huge-1e25": scaled(1e25), "tiny-1e-25": scaled(1e-25), "one-huge-component": one_huge_component}
ALL = HOSTILE | FLOAT32_ONLY


# One bad number in (1, 1) of a batch of two sequences and two key heads; two query heads read each key head.
VALUES = {"nan": torch.nan, "inf": torch.inf, "minus-inf": -torch.inf}
SETTINGS = ("full", "causal", "window", "mask", "mask-causal", "packed", "cache")
SHORT = 40


def by_packing(cu: Tensor, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """The sequences concatenated, each divided into documents by ``cu``."""
    batch, _, length, _ = q.shape
    every = torch.cat([cu[:1], *(cu[1:] + i * length for i in range(batch))])
    flat = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))
    lengths = {"cu_seqlens_q": every, "cu_seqlens_k": every, "max_seqlen_q": length, "max_seqlen_k": length}
    out = softplus_attention_varlen(*flat, **lengths, is_causal=True, **options)
    return out.unflatten(0, (batch, length)).transpose(1, 2)


def by_cache(lengths: Tensor, starts: Tensor, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    return softplus_attention_decode(q[:, :, : new_rows(q.shape[2])], k, v, lengths, cache_starts=starts, **options)


def new_rows(length: int) -> int:
    return length * 3 // 4


def setting_of(name: str, length: int, device: str) -> tuple[Callable[..., Tensor], dict[str, Any], Tensor]:
    """A function, its options, and the visibility mask of shape (..., rows, length)."""
    row, key = torch.arange(length, device=device)[:, None], torch.arange(length, device=device)
    causal = key <= row
    if name == "full":
        return softplus_attention, {}, torch.ones_like(causal)
    if name == "causal":
        return softplus_attention, {"is_causal": True}, causal
    if name == "window":
        window = length * 6 // SHORT
        return softplus_attention, {"is_causal": True, "window": window}, causal & (key > row - window)
    if name in ("mask", "mask-causal"):
        generator = torch.Generator().manual_seed(5)
        mask = (torch.rand(2, 1, length, length, generator=generator) < 0.5).to(device)
        if name == "mask":
            return softplus_attention, {"attn_mask": mask}, mask
        return softplus_attention, {"attn_mask": mask, "is_causal": True}, mask & causal
    if name == "packed":
        cu = torch.tensor([0, length * 9 // SHORT, length * 30 // SHORT, length], dtype=torch.int32, device=device)
        document = torch.bucketize(key, cu[1:].long(), right=True)
        return partial(by_packing, cu), {}, causal & (document[:, None] == document)
    rows, start = new_rows(length), length * 3 // SHORT
    lengths = torch.tensor([length, length * 35 // SHORT], device=device)
    starts = torch.tensor([start, 0], device=device)
    own = row[:rows] - rows + lengths[:, None, None, None]
    return partial(by_cache, lengths, starts), {}, (own >= key) & (key >= starts[:, None, None, None])


class Poisoned:
    """A clean run, a run with one bad number, and the rows that it may affect."""

    def __init__(
        self,
        impl: str,
        setting: str,
        which: str,
        value: float,
        power: Any,
        train: bool,
        *,
        offset: bool = True,
        length: int = SHORT,
        d: int = 32,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
    ) -> None:
        function, options, sees = setting_of(setting, length, device)
        options = {**options, "impl": impl, "power": power, "offset": offset, "enable_gqa": True}
        shapes = enumerate((4, 2, 2))
        tensors = {
            name: randn(2, h, length, d, seed=h + s, dtype=dtype, device=device)
            for name, (s, h) in zip("qkv", shapes, strict=True)
        }
        bad = {name: x.clone() for name, x in tensors.items()}
        key = length * 17 // SHORT
        bad[which][1, 2 if which == "q" else 1, key, 3] = value
        rows = sees.shape[-2]
        options["grad_out"] = randn(2, 4, rows, d, seed=9, dtype=dtype, device=device) if train else None
        self.clean, self.found = (run(function, *x.values(), **options) for x in (tensors, bad))

        self.sees = sees.expand(2, 4, rows, length)
        self.hit = torch.zeros(2, 4, rows, dtype=torch.bool, device=device)
        # Rows whose weight for the bad value may underflow, depending on the precision.
        self.doubtful = torch.zeros_like(self.hit)
        if which == "q":
            self.hit[1, 2, key] = self.sees[1, 2, key].any()
        elif which == "k":
            self.hit[1, 2:] = self.sees[1, 2:, :, key]
        else:
            inputs = (tensors["q"][:, :, :rows].double(), tensors["k"].double())
            given = {"power": power, "offset": offset, "attn_mask": self.sees, "enable_gqa": True}
            weight = attention_weights(*inputs, **given)[1, 2:, :, key]
            self.hit[1, 2:] = weight > 0
            share = attention_weights(*inputs, stage="normalised", **given)[1, 2:, :, key]
            count = self.sees[1, 2:].sum(-1)
            x = count * share - ((count > 3) & offset).double()
            self.doubtful[1, 2:] = self.sees[1, 2:, :, key] & (weight < 1e-8) & (x > -0.02)

    def out_of_reach(self, hit: Tensor) -> tuple[Tensor, Tensor]:
        """Masks of rows (2, 4, length) and keys (2, 2, length) whose gradients no row of ``hit`` affects."""
        rows = torch.ones(self.sees.shape[:2] + self.sees.shape[3:], dtype=torch.bool, device=hit.device)
        rows[:, :, : hit.shape[2]] = ~hit
        touched = (hit[..., None] & self.sees).any(2)  # keys visible to a bad row
        return rows, ~touched.unflatten(1, (2, 2)).any(2)
