"""Attention over paged caches, as inference servers use: prefill and decode of requests of different lengths."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from softplus_attention import validation as check
from softplus_attention.dispatch import Impl, transformed, wants_gradient
from softplus_attention.functional import softplus_attention_decode
from softplus_attention.kernels import ops
from softplus_attention.power import Power, check_power, power_record

Decode = Callable[..., Tensor]
OneRow = Callable[..., Tensor | None]


def softplus_attention_paged(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    cu_seqlens_q: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    normalized_keys: bool = False,
    power: Power = 15,
    score_scale: float | None = None,
    offset: bool = True,
    window: int | None = None,
    enable_gqa: bool = False,
    impl: Impl = "auto",
    validate: bool = False,
) -> Tensor:
    """``softplus_attention`` of new tokens over paged caches.

    q (total, H, D) holds the new rows of B requests one after another: request b has rows ``cu_seqlens_q[b]`` to
    ``cu_seqlens_q[b + 1]``, which are the last of its ``seq_lens[b]`` tokens and causal among themselves; their keys
    and values are already in the pages. Key j of request b is ``k_pages[block_table[b, j // page], :, j % page]`` with
    k_pages (pages, H_kv, page, D) of any strides; requests may share pages. Pages without a visible key are never
    read: with a ``window`` those before it may be reused. A power tensor is per head. If a request has more than one
    new row, the lengths are read from the GPU, which synchronizes once.

    Returns (total, H, D_v).
    """
    if isinstance(power, Tensor) and power.dim() != 1:
        check.fail("power", "a number, a PowerByLength or a tensor (H,), one per head", check.describe_tensor(power))
    decode = partial(
        softplus_attention_decode,
        normalized_keys=normalized_keys,
        power=power,
        score_scale=score_scale,
        offset=offset,
        enable_gqa=enable_gqa,
        impl=impl,
        validate=validate,
    )
    pages = (k_pages, v_pages, block_table, seq_lens)
    lengths = (cu_seqlens_q, max_seqlen_q, max_seqlen_k)
    attend = partial(attend_pages, decode, q, *pages, *lengths, window, validate)
    tensors = (q, k_pages, v_pages)
    if impl not in ("auto", "chunked") or any(not isinstance(x, Tensor) or x.device.type != "cpu" for x in tensors):
        return attend()
    if transformed(*tensors) or wants_gradient(*tensors, power) or torch.is_autocast_enabled("cpu"):
        return attend()

    def one_row(q: Tensor, k_pages: Tensor, v_pages: Tensor, *rest: Any) -> Tensor | None:
        names = ("q", "k_pages", "v_pages")
        samples = (q[:1, :, None], k_pages[:1], v_pages[:1])
        check.check_qkv(*samples, layout="(B, H, T, D)", enable_gqa=enable_gqa, names=names)
        check.check_window(window, is_causal=True)
        check.check_offset(offset)
        check_power(power, (q.shape[0], q.shape[1], 1), q.device, validate)
        scale = check.check_score_scale(score_scale, q.shape[-1], (window, max_seqlen_k))
        record = power_record(power, offset)
        decode_pages = ops.implementation("cpu.pages").decode_pages
        return decode_pages(q, k_pages, v_pages, *rest, lambda seen: record, scale, normalized_keys)

    return attend(one_row)


def attend_pages(
    decode: Decode,
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    cu_seqlens_q: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    window: int | None,
    validate: bool = False,
    one_row: OneRow | None = None,
) -> Tensor:
    """Any attention's ``decode`` over pages: requests with one new row as one batch, the others one by one.

    ``one_row`` is a faster implementation for the former; it returns None for calls that it does not support.
    """
    check_pages(q, k_pages, v_pages, block_table, seq_lens, cu_seqlens_q, max_seqlen_q, max_seqlen_k, validate)
    requests = seq_lens.shape[0]
    attend = partial(attend_rows, decode, k_pages, v_pages, window=window)

    def decode_rows(q: Tensor, block_table: Tensor, seq_lens: Tensor, longest: int) -> Tensor:
        out = one_row(q, k_pages, v_pages, block_table, seq_lens, window) if one_row else None
        return attend(q[:, :, None], block_table, seq_lens, longest)[:, :, 0] if out is None else out

    if max_seqlen_q == 1 and q.shape[0] == requests:
        return decode_rows(q, block_table, seq_lens, max_seqlen_k)
    ends, lengths = cu_seqlens_q.tolist(), seq_lens.tolist()
    out = q.new_empty(q.shape[0], q.shape[1], v_pages.shape[-1])
    decoding = [b for b in range(requests) if ends[b + 1] - ends[b] == 1]
    if decoding:
        index = torch.tensor(decoding, device=q.device)
        rows = torch.tensor([ends[b] for b in decoding], device=q.device)
        longest = max(lengths[b] for b in decoding)
        out[rows] = decode_rows(q[rows], block_table[index], seq_lens[index], longest)
    for b in range(requests):
        begin, end = ends[b], ends[b + 1]
        if end - begin > 1:
            rows = q[begin:end].transpose(0, 1)[None]
            out[begin:end] = attend(rows, block_table[b : b + 1], seq_lens[b : b + 1], lengths[b])[0].transpose(0, 1)
    return out


def attend_rows(
    decode: Decode,
    k_pages: Tensor,
    v_pages: Tensor,
    q: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    longest: int,
    *,
    window: int | None,
) -> Tensor:
    """q (B, H, T_q, D): every request has T_q new rows. The pages that they see are copied into contiguous caches."""
    page, rows = k_pages.shape[2], q.shape[2]
    columns = max(1, -(-longest // page))
    if window is not None and (seen := (window + rows - 2) // page + 2) < columns:
        first = (seq_lens - rows - window + 1).clamp(min=0) // page
        table = block_table.gather(
            1, (first[:, None] + torch.arange(seen, device=q.device)).clamp(max=columns - 1).to(torch.int64)
        )
        # A page that clamping repeats lies beyond the request's end.
        seq_lens = seq_lens - (first * page).to(seq_lens.dtype)
    else:
        table = block_table[:, :columns]
    beyond = torch.arange(table.shape[1], device=q.device) * page >= seq_lens[:, None]
    table = table.masked_fill(beyond, 0)  # unused entries of the table may be invalid page numbers
    return decode(q, gather_pages(k_pages, table), gather_pages(v_pages, table), seq_lens, window=window)


def gather_pages(pages: Tensor, table: Tensor) -> Tensor:
    """Pages (pages, H, page, D) of a table (B, n) -> (B, H, n * page, D), in one copy."""
    found = pages.transpose(0, 1)[:, table.to(torch.int64)]
    return found.flatten(2, 3).transpose(0, 1)


def check_pages(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    cu_seqlens_q: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    validate: bool,
) -> None:
    if not isinstance(q, Tensor) or q.dim() != 3:
        check.fail("q", "a tensor (total, H, D)", check.describe_tensor(q))
    for name, pages in (("k_pages", k_pages), ("v_pages", v_pages)):
        if not isinstance(pages, Tensor) or pages.dim() != 4 or pages.shape[:3] != k_pages.shape[:3]:
            expected = "a tensor (pages, H_kv, page, D), with the same first three sizes for keys and values"
            check.fail(name, expected, check.describe_tensor(pages))
    if not isinstance(block_table, Tensor) or block_table.dim() != 2 or block_table.is_floating_point():
        check.fail("block_table", "an int32 tensor (B, blocks)", check.describe_tensor(block_table))
    for name, value in (("max_seqlen_q", max_seqlen_q), ("max_seqlen_k", max_seqlen_k)):
        if isinstance(value, bool) or not isinstance(value, int | torch.SymInt) or value < 1:
            check.fail(name, "an int >= 1", repr(value))
    check.check_cu_seqlens("cu_seqlens_q", cu_seqlens_q, q.shape[0], max_seqlen_q, q.device, validate)
    requests = cu_seqlens_q.numel() - 1
    check.check_cache_lengths("seq_lens", seq_lens, requests, 1, max_seqlen_k, q.device, validate)
    if block_table.shape[0] != requests:
        check.fail("block_table", f"a row for each of the {requests} requests", check.describe_tensor(block_table))
    if max_seqlen_k > block_table.shape[1] * k_pages.shape[2]:
        most = f"at most the {block_table.shape[1]} pages of {k_pages.shape[2]} keys that `block_table` has"
        check.fail("max_seqlen_k", most, max_seqlen_k)
