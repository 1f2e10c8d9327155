"""Which keys each query row sees.

Every mode of the op (causal, window, padding, packed documents, a cache with lengths) becomes one range of keys per
row and an optional boolean mask. N_i of the method is always the number of keys that row i sees under both.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from softplus_attention import validation as check

MAX_WINDOW = 2**31 - 1  # that int32 holds; no sequence is longer


@dataclass(frozen=True)
class Visibility:
    """Rows of ``t_q`` queries over ``t_k`` keys.

    ``is_causal`` is aligned bottom-right. With ``window`` W a row sees its own key and the W - 1 before it.
    ``key_start`` / ``key_end`` (B or 1, t_q) bound each row's range. ``mask`` is (B|1, H|1, t_q|1, t_k|1), True =
    visible. All of them apply together.

    ``query_key_index`` (B or 1, t_q) is the key index of each row's own token, if it is not ``row + t_k - t_q``.
    ``applied_window`` and ``max_document_length`` are limits that the ranges or the mask already include. ``is_cache``
    says that the rows are the newest tokens of caches; ``cache_seqlens`` (B,) is the filled length of each cache, and
    ``cache_starts`` (B,) its first real key.
    """

    t_q: int
    t_k: int
    device: torch.device
    is_causal: bool = False
    window: int | None = None
    key_start: Tensor | None = None
    key_end: Tensor | None = None
    mask: Tensor | None = None
    query_key_index: Tensor | None = None
    applied_window: int | None = None
    max_document_length: int | None = None
    is_cache: bool = False
    cache_seqlens: Tensor | None = None
    cache_starts: Tensor | None = None

    @classmethod
    def from_call(
        cls,
        q: Tensor,
        k: Tensor,
        is_causal: bool,
        attn_mask: Tensor | None,
        window: int | None,
        key_start: Tensor | None,
        key_end: Tensor | None,
    ) -> Visibility:
        """From the arguments of ``softplus_attention``, which are checked here."""
        batch, heads, t_q, _ = q.shape
        t_k = k.shape[2]
        check.check_causal(is_causal)
        check.check_window(window, is_causal)
        mask = check.check_mask(attn_mask, (batch, heads, t_q, t_k), q.device)
        key_start = check.check_bounds("key_start", key_start, batch, t_q, q.device)
        key_end = check.check_bounds("key_end", key_end, batch, t_q, q.device)
        return cls(t_q, t_k, q.device, is_causal, window, key_start, key_end, mask)

    @classmethod
    def from_documents(
        cls,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        total_q: int,
        total_k: int,
        *,
        is_causal: bool,
        window: int | None,
        max_document_length: int | None = None,
    ) -> Visibility:
        """Packed documents: a row sees only keys of its own document."""
        row = torch.arange(total_q, device=cu_seqlens_q.device, dtype=torch.int32)
        document = document_indices(row, cu_seqlens_q)
        start, end = cu_seqlens_k[document], cu_seqlens_k[document + 1]
        index = (row - cu_seqlens_q[document + 1] + end).to(torch.int32)
        if is_causal:
            end = torch.minimum(end, index + 1)
            if window is not None:
                start = torch.maximum(start, window_start(index, window))
        return cls(
            total_q,
            total_k,
            row.device,
            key_start=start[None],
            key_end=end[None],
            query_key_index=index[None],
            applied_window=window,
            max_document_length=max_document_length,
        )

    @classmethod
    def from_cache(
        cls, cache_seqlens: Tensor, cache_starts: Tensor | None, t_q: int, t_max: int, *, window: int | None
    ) -> Visibility:
        """The newest tokens of caches filled to ``cache_seqlens`` keys, causal among themselves."""
        return cls(
            t_q,
            t_max,
            cache_seqlens.device,
            True,
            window,
            is_cache=True,
            cache_seqlens=cache_seqlens,
            cache_starts=cache_starts,
        )

    def bounds(self) -> tuple[int | None, ...]:
        """Upper bounds on the number of keys that a row sees; None is no bound."""
        return self.t_k, self.window, self.applied_window, self.max_document_length

    @property
    def is_bottom_right(self) -> bool:
        """Whether the key of row i's own token is ``i + t_k - t_q``."""
        return self.query_key_index is None and self.cache_seqlens is None

    def positions(self) -> Tensor:
        """(B or 1, t_q): the key index of each row's own token, from which ALiBi measures distances."""
        if self.query_key_index is not None:
            return self.query_key_index
        if self.cache_seqlens is not None:
            first = (self.cache_seqlens[:, None] - self.t_q).to(torch.int32)
            if self.t_q == 1:  # in a decode step each operation costs time
                return first
            return first + torch.arange(self.t_q, device=self.device, dtype=torch.int32)
        offset = self.t_k - self.t_q
        return torch.arange(offset, offset + self.t_q, device=self.device, dtype=torch.int32)[None]

    def first_keys(self) -> Tensor | None:
        """``key_start``, or ``cache_starts`` for each row."""
        if self.cache_starts is None:
            return self.key_start
        return self.cache_starts[:, None].expand(-1, self.t_q)

    def ranges(self) -> tuple[Tensor, Tensor]:
        """(start, end), each int32 (B or 1, t_q), 0 <= start <= end <= t_k: the keys a row may see before the mask."""
        zero = torch.zeros((1, self.t_q), device=self.device, dtype=torch.int32)
        given = self.first_keys()
        start = zero if given is None else given.clamp(0, self.t_k).to(torch.int32)
        end = zero + self.t_k if self.key_end is None else self.key_end.clamp(0, self.t_k).to(torch.int32)
        if self.is_causal:
            index = self.positions()
            end = torch.minimum(end, index + 1)
            if self.window is not None:
                start = torch.maximum(start, window_start(index, self.window))
        start, end = torch.broadcast_tensors(start, end)
        return start, torch.maximum(start, end)

    def rows(self, begin: int, end: int) -> Visibility:
        """Only the rows [begin, end), over a prefix of the keys that contains all that they see."""
        t_k = self.t_k
        if self.is_causal and self.is_bottom_right:
            t_k = max(0, min(t_k, t_k - self.t_q + end))
        mask = self.mask
        if mask is not None:
            mask = mask[:, :, begin:end] if mask.shape[2] > 1 else mask
            mask = mask[..., :t_k] if mask.shape[3] > 1 else mask
        key_start, key_end = (None if x is None else x[:, begin:end] for x in (self.first_keys(), self.key_end))
        return replace(
            self,
            t_q=end - begin,
            t_k=t_k,
            key_start=key_start,
            key_end=key_end,
            mask=mask,
            query_key_index=self.positions()[:, begin:end],
            is_cache=False,
            cache_seqlens=None,
            cache_starts=None,
        )

    def kernel_arguments(self) -> tuple[Tensor | None, Tensor | None, Tensor | None, bool, int | None]:
        """start, end (both or neither), mask, is_causal, window, in the order of the fused kernels' schemas.

        ``is_causal`` and ``window`` are aligned bottom-right there; for caches the ranges already include them.
        """
        if self.cache_seqlens is not None:
            return *self.ranges(), self.mask, False, None
        if self.key_start is None and self.key_end is None:
            return None, None, self.mask, self.is_causal, self.window
        given = Visibility(self.t_q, self.t_k, self.device, key_start=self.key_start, key_end=self.key_end)
        return *given.ranges(), self.mask, self.is_causal, self.window

    def cache_arguments(self, batch: int) -> tuple[Tensor | None, Tensor | None, int | None]:
        """cache_seqlens, cache_starts, window for the decode kernel; None is no limit."""
        if self.key_start is None or self.key_end is None:
            return self.cache_seqlens, self.cache_starts, self.window
        end, start = (x[:, -1].expand(batch).contiguous() for x in (self.key_end, self.key_start))
        return end, start, None

    def counts(self) -> Tensor:
        """N_i of every row, (B|1, H|1, t_q)."""
        if self.mask is not None:
            return self.counts_of_shared_mask() if self.mask.shape[2] == 1 else self.dense().sum(-1, dtype=torch.int32)
        if self.is_causal and self.key_start is None and self.key_end is None and self.is_bottom_right:
            # The same in fewer operations: in a decode step the launch of each one costs time.
            most = None if self.window is None else min(self.window, MAX_WINDOW)
            return (self.positions() + 1).clamp(0, most)[:, None]
        start, end = self.ranges()
        return (end - start)[:, None]

    def counts_of_shared_mask(self) -> Tensor:
        """``counts`` for one mask row shared by all queries (padding): differences of a cumsum, in linear memory."""
        assert self.mask is not None
        keys = self.mask[:, :, 0].expand(-1, -1, self.t_k)
        up_to = torch.nn.functional.pad(keys.cumsum(-1, dtype=torch.int32), (1, 0))  # (B|1, H|1, t_k + 1)
        start, end = (x[:, None].long() for x in self.ranges())  # (B|1, 1, t_q)
        shape = torch.broadcast_shapes(up_to.shape[:2], start.shape[:2])
        up_to, start, end = (x.expand(*shape, -1) for x in (up_to, start, end))
        return up_to.gather(-1, end) - up_to.gather(-1, start)

    def known_count(self) -> int | None:
        """N if it is the same for all rows and follows from shapes, as in a decode step; else None."""
        given = (self.mask, self.key_start, self.key_end, self.query_key_index, self.cache_seqlens)
        if torch.compiler.is_compiling() or any(x is not None for x in given):
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


def checked_documents(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    is_causal: bool,
    window: int | None,
    enable_gqa: bool,
    validate: bool,
) -> Visibility:
    """Checks the arguments of ``softplus_attention_varlen``."""
    check.check_qkv(q, k, v, layout="(total, H, D)", enable_gqa=enable_gqa, names=("q", "k", "v"))
    check.check_causal(is_causal)
    check.check_window(window, is_causal)
    for name, value in (("max_seqlen_q", max_seqlen_q), ("max_seqlen_k", max_seqlen_k)):
        if isinstance(value, bool) or not isinstance(value, int | torch.SymInt):
            check.fail(name, "an int >= 0", repr(value), TypeError)
        if value < 0:
            check.fail(name, "an int >= 0", repr(value))
    totals = (q.shape[0], k.shape[0])
    check.check_cu_seqlens("cu_seqlens_q", cu_seqlens_q, totals[0], max_seqlen_q, q.device, validate)
    check.check_cu_seqlens("cu_seqlens_k", cu_seqlens_k, totals[1], max_seqlen_k, q.device, validate)
    if cu_seqlens_q.shape != cu_seqlens_k.shape:
        expected = f"of as many documents as `cu_seqlens_q`, {cu_seqlens_q.numel() - 1}"
        check.fail("cu_seqlens_k", expected, cu_seqlens_k.numel() - 1)
    return Visibility.from_documents(
        cu_seqlens_q, cu_seqlens_k, *totals, is_causal=is_causal, window=window, max_document_length=max_seqlen_k
    )


def checked_cache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cache_seqlens: Tensor,
    cache_starts: Tensor | None,
    window: int | None,
    enable_gqa: bool,
    validate: bool,
    normalized_keys: bool,
) -> Visibility:
    """Checks the arguments of ``softplus_attention_decode``."""
    names = ("q", "k_cache", "v_cache")
    check.check_qkv(q, k_cache, v_cache, layout="(B, H, T, D)", enable_gqa=enable_gqa, names=names)
    check.check_window(window, is_causal=True)
    batch, t_q, t_max = q.shape[0], q.shape[2], k_cache.shape[2]
    check.check_cache_lengths("cache_seqlens", cache_seqlens, batch, t_q, t_max, q.device, validate)
    if cache_starts is not None:
        check.check_cache_lengths("cache_starts", cache_starts, batch, 0, t_max, q.device, validate)
    if validate and normalized_keys:
        key = torch.arange(t_max, device=q.device)
        starts = 0 if cache_starts is None else cache_starts[:, None]
        check.check_unit_keys(k_cache, (key >= starts) & (key < cache_seqlens[:, None]))
    return Visibility.from_cache(cache_seqlens, cache_starts, t_q, t_max, window=window)


def window_start(index: Tensor, window: int) -> Tensor:
    """int32: the first key in the window of rows whose own key is ``index``; may be negative.

    Rows before the first key see no key; clamped to -1 they cannot overflow int32.
    """
    return index.clamp(min=-1) + 1 - min(window, MAX_WINDOW)


def document_indices(row: Tensor, cu_seqlens: Tensor) -> Tensor:
    """The index of each row's document; rows past the end belong to the last one."""
    # All bounds, not a slice of them: inductor on CUDA misreads or rejects a view here.
    return (torch.bucketize(row, cu_seqlens, right=True) - 1).clamp(max=cu_seqlens.numel() - 2)
