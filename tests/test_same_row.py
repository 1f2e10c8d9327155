"""Many ways to compute the rows of one text agree, since N_i is the number of keys that a row sees."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import randn
from torch import Tensor

from softplus_attention import PowerByLength, softplus_attention, softplus_attention_decode, softplus_attention_varlen

pytestmark = pytest.mark.usefixtures("poisoned_memory")

THREADS = 2
T, D, HEADS = 37, 20, 4
PAD = 11
WIDER = T + PAD
KEYS = torch.arange(WIDER)
OPTIONS: dict[str, dict[str, Any]] = {
    "p15": {"power": 15},
    "p1": {"power": 1},
    "p2.5": {"power": 2.5},
    "lssa": {"power": None},
    "by-length": {"power": PowerByLength(3.0, 4.0, 8)},
    "per-head": {"power": torch.tensor([1.0, 2.5, 7.0, 15.0])},
    "score-scale": {"power": 3, "score_scale": 5.0},
    "gqa": {"power": 15, "kv_heads": 2},
    "window": {"power": 15, "window": 6},
    "without-offset": {"power": 3, "offset": False},
}


class Text:
    """q, k, v of one sequence (1, H, T, D) and the options of the call."""

    def __init__(self, impl: str, options: dict[str, Any]) -> None:
        options = dict(options)
        kv_heads = options.pop("kv_heads", HEADS)
        self.q = randn(1, HEADS, T, D, seed=1)
        self.k, self.v = (randn(1, kv_heads, T, D, seed=seed) for seed in (2, 3))
        self.options = {**options, "enable_gqa": kv_heads != HEADS, "impl": impl}

    def attend(self, q: Tensor, k: Tensor, v: Tensor, **more: Any) -> Tensor:
        return softplus_attention(q, k, v, **{**self.options, "is_causal": True, **more})

    def decode(self, q: Tensor, k: Tensor, v: Tensor, lengths: list[int], **more: Any) -> Tensor:
        return softplus_attention_decode(q, k, v, torch.tensor(lengths, dtype=torch.int32), **self.options, **more)

    def padded(self, left: int, right: int, value: float) -> tuple[Tensor, Tensor, Tensor]:
        """The text in row 1 of a batch of two, padded with ``value``; another text fills row 0."""
        total = left + T + right
        result = []
        for seed, x in ((11, self.q), (12, self.k), (13, self.v)):
            other = randn(1, x.shape[1], total, D, seed=seed)
            result.append(torch.cat((other, F.pad(x, (0, 0, left, right), value=value))))
        return tuple(result)


def prefill(text: Text) -> Tensor:
    return text.attend(text.q, text.k, text.v)


def prefill_by_rows(text: Text) -> Tensor:
    """Each row alone, over the keys up to its position, without a mask."""
    options = {**text.options, "window": None}
    window = text.options.get("window") or T
    rows = []
    for i in range(T):
        seen = slice(max(0, i + 1 - window), i + 1)
        rows.append(softplus_attention(text.q[:, :, i : i + 1], text.k[:, :, seen], text.v[:, :, seen], **options))
    return torch.cat(rows, dim=2)


def chunked_prefill(text: Text) -> Tensor:
    pieces, at = [], 0
    for size in (1, 2, 13, 21):
        end = at + size
        pieces.append(text.attend(text.q[:, :, at:end], text.k[:, :, :end], text.v[:, :, :end]))
        at = end
    assert at == T
    return torch.cat(pieces, dim=2)


def batched(text: Text) -> Tensor:
    return text.attend(*text.padded(0, 0, 0.0))[1:]


def packed(text: Text) -> Tensor:
    ends = [0, 5, 6, 6 + T, 6 + T + 20]
    cu = torch.tensor(ends, dtype=torch.int32)
    tensors = []
    for seed, x in ((11, text.q), (12, text.k), (13, text.v)):
        whole = randn(ends[-1], x.shape[1], D, seed=seed)
        whole[6 : 6 + T] = x[0].transpose(0, 1)
        tensors.append(whole)
    longest = {"max_seqlen_q": T, "max_seqlen_k": T}
    out = softplus_attention_varlen(
        *tensors, cu_seqlens_q=cu, cu_seqlens_k=cu, is_causal=True, **longest, **text.options
    )
    return out[6 : 6 + T].transpose(0, 1)[None]


def packed_with_a_past(text: Text) -> Tensor:
    """The last rows of the text over all of its keys, packed with another document: packed chunked prefill."""
    new = 9
    cu_q = torch.tensor([0, 4, 4 + new], dtype=torch.int32)
    cu_k = torch.tensor([0, 8, 8 + T], dtype=torch.int32)
    q = torch.cat((randn(4, HEADS, D, seed=11), text.q[0, :, -new:].transpose(0, 1)))
    k, v = (
        torch.cat((randn(8, x.shape[1], D, seed=seed), x[0].transpose(0, 1)))
        for seed, x in ((12, text.k), (13, text.v))
    )
    out = softplus_attention_varlen(
        q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, max_seqlen_q=new, max_seqlen_k=T, is_causal=True, **text.options
    )
    return out[4:].transpose(0, 1)[None]


def left_padded(text: Text, **mask: Tensor) -> Tensor:
    return text.attend(*text.padded(PAD, 0, torch.nan), **mask)[1:, :, PAD:]


def left_padded_by_mask(text: Text) -> Tensor:
    return left_padded(text, attn_mask=torch.stack([KEYS >= 0, KEYS >= PAD])[:, None, None])


def left_padded_by_start(text: Text) -> Tensor:
    return left_padded(text, key_start=torch.tensor([[0], [PAD]], dtype=torch.int32).expand(2, WIDER))


def right_padded(text: Text, **mask: Tensor) -> Tensor:
    """Causal rows never see later keys, so that no mask is needed."""
    return text.attend(*text.padded(0, PAD, torch.nan), **mask)[1:, :, :T]


def right_padded_by_mask(text: Text) -> Tensor:
    return right_padded(text, attn_mask=torch.stack([KEYS >= 0, KEYS < T])[:, None, None])


def right_padded_by_end(text: Text) -> Tensor:
    return right_padded(text, key_end=torch.tensor([[WIDER], [T]], dtype=torch.int32).expand(2, WIDER))


def by_dense_mask(text: Text) -> Tensor:
    key, row = torch.arange(T), torch.arange(T)[:, None]
    window = text.options.get("window") or T
    mask = (key <= row) & (key > row - window)
    return text.attend(text.q, text.k, text.v, attn_mask=mask, is_causal=False, window=None)


def by_ranges(text: Text) -> Tensor:
    row = torch.arange(T, dtype=torch.int32)[None]
    window = text.options.get("window") or T
    ranges = {"key_start": (row + 1 - window).clamp(min=0), "key_end": row + 1}
    return text.attend(text.q, text.k, text.v, **ranges, is_causal=False, window=None)


def decode_steps(text: Text) -> Tensor:
    """Token by token, with NaN in unused slots of the caches."""
    k, v = (torch.full((1, x.shape[1], T + 5, D), torch.nan) for x in (text.k, text.v))
    rows = []
    for i in range(T):
        k[:, :, i], v[:, :, i] = text.k[:, :, i], text.v[:, :, i]
        rows.append(text.decode(text.q[:, :, i : i + 1], k, v, [i + 1]))
    return torch.cat(rows, dim=2)


def decode_several(text: Text) -> Tensor:
    """The last three tokens at once, in a batch with a shorter sequence."""
    q, k, v = text.padded(0, PAD, torch.nan)
    q = torch.cat((q[:1, :, 17:20], text.q[:, :, -3:]))
    return text.decode(q, k, v, [20, T])[1:]


def decode_left_padded(text: Text) -> Tensor:
    _, k, v = text.padded(PAD, 4, torch.nan)
    starts = torch.tensor([0, PAD], dtype=torch.int32)
    q = torch.cat((randn(1, HEADS, 2, D, seed=7), text.q[:, :, -2:]))
    return text.decode(q, k, v, [30, PAD + T], cache_starts=starts)[1:]


def decode_normalised_keys(text: Text) -> Tensor:
    _, k, v = text.padded(0, PAD, torch.nan)
    q = torch.cat((randn(1, HEADS, 2, D, seed=7), text.q[:, :, -2:]))
    return text.decode(q, F.normalize(k, dim=-1), v, [30, T], normalized_keys=True)[1:]


WAYS: list[Callable[[Text], Tensor]] = [
    *(prefill_by_rows, chunked_prefill, batched, packed, packed_with_a_past, by_dense_mask, by_ranges),
    *(left_padded_by_mask, left_padded_by_start, right_padded, right_padded_by_mask, right_padded_by_end),
    *(decode_steps, decode_several, decode_left_padded, decode_normalised_keys),
]


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__.replace("_", "-"))
@pytest.mark.parametrize("impl", ["reference", "chunked", "native"], indirect=True)
def test_same_rows(impl: str, way: Callable[[Text], Tensor], options: dict[str, Any]) -> None:
    text = Text(impl, options)
    expected, found = prefill(text), way(text)
    assert expected.isfinite().all()
    # Some ways compute only the last rows.
    torch.testing.assert_close(found, expected[:, :, -found.shape[2] :], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("window", [T, T + 1, 10 * T])
@pytest.mark.parametrize("impl", ["reference", "chunked", "native"], indirect=True)
def test_window_over_all_keys_changes_nothing(impl: str, window: int) -> None:
    text = Text(impl, {"power": 15})
    torch.testing.assert_close(text.attend(text.q, text.k, text.v, window=window), prefill(text), rtol=0, atol=0)


@pytest.mark.parametrize("impl", ["reference", "chunked", "native"], indirect=True)
def test_cross_attention_counts_the_source(impl: str) -> None:
    """Without a mask every row sees all keys, so a row does not depend on the number of rows."""
    text = Text(impl, {"power": PowerByLength(3.0, 4.0, 8)})
    whole = softplus_attention(text.q, text.k, text.v, **text.options)
    alone = softplus_attention(text.q[:, :, 5:6], text.k, text.v, **text.options)
    torch.testing.assert_close(alone, whole[:, :, 5:6], rtol=1e-5, atol=1e-5)
    masked = torch.ones(1, 1, 1, T, dtype=torch.bool)
    masked[..., 30:] = False
    short = softplus_attention(text.q, text.k[:, :, :30], text.v[:, :, :30], **text.options)
    padded = softplus_attention(text.q, text.k, text.v, attn_mask=masked, **text.options)
    torch.testing.assert_close(padded, short, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_gradients_of_packed_and_padded_sequences(options: dict[str, Any], cpu_kernels: str) -> None:
    text = Text("chunked", options)
    weight = randn(1, HEADS, T, D, seed=9)
    grads = []
    # With a mask tensor PyTorch operations run, which round differently.
    masked = [by_dense_mask] if cpu_kernels == "torch" else []
    for way in (prefill, packed, left_padded_by_start, *masked):
        for x in (text.q, text.k, text.v):
            x.requires_grad_()
        grads.append(torch.autograd.grad((way(text) * weight).sum(), (text.q, text.k, text.v)))
    for others in grads[1:]:
        for name, ours, theirs in zip("qkv", others, grads[0], strict=True):
            scale = float(theirs.abs().max())
            torch.testing.assert_close(
                ours / scale, theirs / scale, rtol=1e-5, atol=1e-5, msg=lambda m, name=name: name + m
            )
