"""Which keys each query row sees.

Every mode of the op (causal, window, padding, packed documents, a cache with lengths) becomes one range of keys per
row, cut further by an optional boolean mask. N_i of the method is the number of keys that this leaves to row i, always.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

WIDEST = 2**31 - 1  # window in int32: no table of keys is longer


@dataclass(frozen=True)
class Visibility:
    """Rows of ``t_q`` queries over ``t_k`` keys.

    ``is_causal`` aligns the last row with the last key (bottom-right). ``window`` W leaves a row itself and the W - 1
    keys before it. ``key_start`` / ``key_end`` (B or 1, t_q) bound each row's range. ``mask`` is
    (B|1, H|1, t_q|1, t_k|1), True = visible. All of them apply together. ``own_key`` (B or 1, t_q) is the key a row
    stands on, where that is not ``row + t_k - t_q``. ``held_window`` is a window and ``longest`` the longest document
    that the ranges or the mask hold already.
    """

    t_q: int
    t_k: int
    device: torch.device
    is_causal: bool = False
    window: int | None = None
    key_start: Tensor | None = None
    key_end: Tensor | None = None
    mask: Tensor | None = None
    own_key: Tensor | None = None
    held_window: int | None = None
    longest: int | None = None

    def bounds(self) -> tuple[int | None, ...]:
        """No row sees more keys than any of these that is not None."""
        return self.t_k, self.window, self.held_window, self.longest

    def positions(self) -> Tensor:
        """(B or 1, t_q): the key each row stands on; distances (ALiBi) are measured from it."""
        if self.own_key is not None:
            return self.own_key
        offset = self.t_k - self.t_q
        return torch.arange(offset, offset + self.t_q, device=self.device, dtype=torch.int32)[None]

    def ranges(self) -> tuple[Tensor, Tensor]:
        """(start, end), each int32 (B or 1, t_q), 0 <= start <= end <= t_k: the keys a row may see before the mask."""
        zero = torch.zeros((1, self.t_q), device=self.device, dtype=torch.int32)
        start = zero if self.key_start is None else self.key_start.clamp(0, self.t_k).to(torch.int32)
        end = zero + self.t_k if self.key_end is None else self.key_end.clamp(0, self.t_k).to(torch.int32)
        if self.is_causal:
            end = torch.minimum(end, self.positions() + 1)
            if self.window is not None:
                start = torch.maximum(start, window_start(self.positions(), self.window))
        start, end = torch.broadcast_tensors(start, end)
        return start, torch.maximum(start, end)

    def rows(self, begin: int, end: int) -> Visibility:
        """The rows from ``begin`` to ``end`` alone, over the first keys, as many as are sure to hold all they see."""
        t_k = self.t_k
        if self.is_causal and self.own_key is None:
            t_k = max(0, min(t_k, t_k - self.t_q + end))
        mask = self.mask
        if mask is not None:
            mask = mask[:, :, begin:end] if mask.shape[2] > 1 else mask
            mask = mask[..., :t_k] if mask.shape[3] > 1 else mask
        own_key = self.positions()[:, begin:end]
        key_start, key_end = (None if x is None else x[:, begin:end] for x in (self.key_start, self.key_end))
        return replace(self, t_q=end - begin, t_k=t_k, key_start=key_start, key_end=key_end, mask=mask, own_key=own_key)

    def given_ranges(self) -> tuple[Tensor | None, Tensor | None]:
        """(key_start, key_end) within the keys, both or neither, without what ``is_causal`` and ``window`` add."""
        if self.key_start is None and self.key_end is None:
            return None, None
        return Visibility(self.t_q, self.t_k, self.device, key_start=self.key_start, key_end=self.key_end).ranges()

    def counts(self) -> Tensor:
        """N_i of every row, (B|1, H|1, t_q)."""
        if self.mask is not None:
            return self.counts_under_one_mask() if self.mask.shape[2] == 1 else self.dense().sum(-1, dtype=torch.int32)
        if self.is_causal and self.key_start is None and self.key_end is None and self.own_key is None:
            # The same in fewer operations: a decode step waits for the launch of each.
            return (self.positions() + 1).clamp(0, None if self.window is None else min(self.window, WIDEST))[:, None]
        start, end = self.ranges()
        return (end - start)[:, None]

    def counts_under_one_mask(self) -> Tensor:
        """The same for a mask of all rows alike (padding), in linear memory: keys up to a row's end less those up to
        its start."""
        assert self.mask is not None
        keys = self.mask[:, :, 0].expand(-1, -1, self.t_k)
        up_to = torch.nn.functional.pad(keys.cumsum(-1, dtype=torch.int32), (1, 0))  # (B|1, H|1, t_k + 1)
        start, end = (x[:, None].long() for x in self.ranges())  # (B|1, 1, t_q)
        shape = torch.broadcast_shapes(up_to.shape[:2], start.shape[:2])
        up_to, start, end = (x.expand(*shape, -1) for x in (up_to, start, end))
        return up_to.gather(-1, end) - up_to.gather(-1, start)

    def known_count(self) -> int | None:
        """N of all rows, where it is one number that follows from shapes: that of a decode step, say."""
        if torch.compiler.is_compiling() or any(
            x is not None for x in (self.mask, self.key_start, self.key_end, self.own_key)
        ):
            return None
        if not self.is_causal:
            return self.t_k
        return min(self.t_k, self.window or self.t_k) if self.t_q == 1 else None

    def dense(self) -> Tensor:
        """(B|1, H|1, t_q, t_k), True = visible."""
        start, end = self.ranges()
        key = torch.arange(self.t_k, device=self.device, dtype=torch.int32)
        visible = ((key >= start[..., None]) & (key < end[..., None]))[:, None]
        return visible if self.mask is None else visible & self.mask


def window_start(own_key: Tensor, window: int) -> Tensor:
    """The first key in the window of rows that stand on ``own_key``, int32; below 0 where it reaches further.

    Rows before the first key see none of it: held at -1, they do not leave int32.
    """
    return own_key.clamp(min=-1) + 1 - min(window, WIDEST)


def document_of(row: Tensor, cu_seqlens: Tensor) -> Tensor:
    """The number of the packed document that each row is of; rows beyond the last are of the last."""
    # All bounds, not a slice of them: inductor on CUDA misreads or refuses a view here.
    return (torch.bucketize(row, cu_seqlens, right=True) - 1).clamp(max=cu_seqlens.numel() - 2)


def packed(
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    total_q: int,
    total_k: int,
    *,
    is_causal: bool,
    window: int | None,
    longest: int | None = None,
) -> Visibility:
    """Documents laid end to end, of at most ``longest`` keys: a row sees its own document only."""
    row = torch.arange(total_q, device=cu_seqlens_q.device, dtype=torch.int32)
    document = document_of(row, cu_seqlens_q)
    start, end = cu_seqlens_k[document], cu_seqlens_k[document + 1]
    own_key = (row - cu_seqlens_q[document + 1] + end).to(torch.int32)
    if is_causal:
        end = torch.minimum(end, own_key + 1)
        if window is not None:
            start = torch.maximum(start, window_start(own_key, window))
    return Visibility(
        total_q,
        total_k,
        row.device,
        key_start=start[None],
        key_end=end[None],
        own_key=own_key[None],
        held_window=window,
        longest=longest,
    )


def cached(
    cache_seqlens: Tensor, cache_starts: Tensor | None, t_q: int, t_max: int, *, window: int | None
) -> Visibility:
    """New tokens at the end of caches of ``cache_seqlens`` keys each, causal among themselves."""
    row = torch.arange(t_q, device=cache_seqlens.device, dtype=torch.int32)
    own_key = (cache_seqlens[:, None] - t_q + row).to(torch.int32)
    start = (
        torch.zeros_like(own_key) if cache_starts is None else cache_starts[:, None].to(torch.int32).expand_as(own_key)
    )
    if window is not None:
        start = torch.maximum(start, window_start(own_key, window))
    return Visibility(t_q, t_max, row.device, key_start=start, key_end=own_key + 1, own_key=own_key, held_window=window)
