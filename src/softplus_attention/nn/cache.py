"""The key/value cache of one layer."""

from __future__ import annotations

import torch
from torch import Tensor

from softplus_attention import validation as check


def checked_starts(starts: Tensor | None) -> Tensor | None:
    if starts is not None and not isinstance(starts, Tensor):
        check.fail("starts", "an int32 tensor (B,)", type(starts).__name__, TypeError)
    if starts is not None and (starts.dim() != 1 or starts.dtype not in (torch.int32, torch.int64)):
        check.fail("starts", "an int32 tensor (B,)", check.describe_tensor(starts))
    return starts


def can_hold(kept: Tensor, x: Tensor) -> bool:
    """Whether the buffer ``kept`` has the dtype, device and sizes of ``x``, apart from the length."""
    same = kept.dtype == x.dtype and kept.device == x.device
    return same and kept.shape[:2] == x.shape[:2] and kept.shape[3] == x.shape[3]


class KeyValueCache:
    """The keys and values of one layer, for inference.

    It grows by doubling, or holds at most ``max_length`` tokens. Sequences may have different ``lengths``; ``starts``
    (B,) is the first real token of each if they are left-padded. Memory is allocated at the first ``append``. An
    attention that normalises its keys stores them normalised, so a decode step normalises only the new key.
    """

    def __init__(self, *, max_length: int | None = None, starts: Tensor | None = None) -> None:
        if max_length is not None and (type(max_length) is not int or max_length < 1):
            check.fail("max_length", "an int >= 1, or None for a cache that grows", repr(max_length))
        self.max_length, self.starts = max_length, checked_starts(starts)
        self.keys: Tensor | None = None
        self.values: Tensor | None = None
        self.lengths: Tensor | None = None
        # Known without synchronizing: an upper bound of the longest sequence, and whether all are that long.
        self.longest, self.even = 0, True

    def __len__(self) -> int:
        """An upper bound of the tokens in any sequence, exact if all are equally long."""
        return self.longest

    def positions(self, batch: int, new: int, device: torch.device) -> Tensor:
        """(B or 1, new): the positions of the next tokens, counted from each sequence's first real one."""
        step = torch.arange(new, device=device)
        if self.even and self.starts is None:
            return (step + self.longest)[None]
        lengths = torch.zeros(batch, device=device, dtype=torch.int64) if self.lengths is None else self.lengths
        first = lengths if self.starts is None else lengths - self.starts.to(device)
        return (first[:, None] + step).clamp(min=0)

    def append(self, k: Tensor, v: Tensor, counts: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Stores k and v (B, H_kv, T, D). The first ``counts`` (B,) of each sequence's T tokens are real, or all.

        Returns all keys and values, and the lengths including all T tokens, as this step's rows see them. Padding
        counts towards ``max_length`` too.
        """
        batch, _, new, _ = k.shape
        if torch.is_grad_enabled() and (k.requires_grad or v.requires_grad):
            raise RuntimeError("KeyValueCache keeps no gradients: call under torch.no_grad() or torch.inference_mode()")
        if counts is not None:
            check_counts("counts", counts, batch, new, k.device)
        if self.max_length is not None and self.longest + new > self.max_length:
            raise ValueError(
                f"KeyValueCache is full: {self.longest} of {self.max_length} tokens (`max_length`) are used, "
                f"{new} more do not fit; pass a larger `max_length`, or None for a cache that grows"
            )
        keys, values = self.reserve(k, v, self.longest + new)
        lengths = self.lengths
        if lengths is None:
            lengths = torch.zeros(batch, device=k.device, dtype=torch.int32)
        if self.even:
            keys[:, :, self.longest : self.longest + new] = k
            values[:, :, self.longest : self.longest + new] = v
        else:
            place = (lengths[:, None] + torch.arange(new, device=k.device))[:, None, :, None].to(torch.int64)
            keys.scatter_(2, place.expand_as(k), k)
            values.scatter_(2, place.expand_as(v), v)
        seen = lengths + new
        self.lengths = seen if counts is None else lengths + counts.to(torch.int32)
        self.even = self.even and counts is None
        self.longest += new
        return keys[:, :, : self.longest], values[:, :, : self.longest], seen

    def reserve(self, k: Tensor, v: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Buffers for ``length`` tokens. New memory is zeroed, since weight 0 times a stray NaN would be NaN."""
        for name, kept, x in (("k", self.keys, k), ("v", self.values, v)):
            if kept is not None and not can_hold(kept, x):
                if self.longest:
                    expected = f"as the cache holds them, {kept.dtype} (B, H_kv) = {tuple(kept.shape[:2])}"
                    check.fail(name, f"{expected} and {kept.shape[3]} wide on {kept.device}", check.describe_tensor(x))
                self.keys = self.values = None
        room = 0 if self.keys is None else self.keys.shape[2]
        if self.keys is None or self.values is None or room < length:
            size = self.max_length or max(length, 2 * room, 64)
            grown = []
            for old, like in ((self.keys, k), (self.values, v)):
                fresh = like.new_zeros(like.shape[0], like.shape[1], size, like.shape[3])
                if old is not None:
                    fresh[:, :, :room] = old
                grown.append(fresh)
            self.keys, self.values = grown
        return self.keys, self.values

    def reset(self, starts: Tensor | None = None) -> None:
        """Empties the cache and keeps its memory for the next sequences if it fits them."""
        self.starts = checked_starts(starts)
        self.lengths, self.longest, self.even = None, 0, True

    def reorder(self, order: Tensor) -> None:
        """Row b becomes the former row ``order[b]``, as in beam search. ``order`` may change the number of rows."""
        if self.keys is not None and self.values is not None:
            self.keys, self.values = self.keys.index_select(0, order), self.values.index_select(0, order)
        self.lengths = None if self.lengths is None else self.lengths.index_select(0, order)
        self.starts = None if self.starts is None else self.starts.index_select(0, order.to(self.starts.device))


def check_counts(name: str, counts: Tensor, batch: int, new: int, device: torch.device) -> None:
    """Checked here, since a wrong number would cause an unrelated error one step later."""
    check.check_cache_lengths(name, counts, batch, 0, new, device, validate=False)
