"""Softmax attention over two sets of keys with one normalisation, in linear memory, forward and backward.

A causal row sees the last ``near`` keys (its own included) with exact rotations, and of the keys before those all or
the first ``most_far``, with separate queries and keys: clipped or grouped positions, or the attention sink of a window.
The parts are computed by torch's fused attention and merged with their log-sum-exps.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

EVERYTHING = 1 << 62
MAX_ROWS = 4096  # of a block
DENSE_ROWS = 256  # of a block if torch has no fused attention that returns log-sum-exps

Part = Literal["near", "far"]


class Piece(NamedTuple):
    """Rows of a block and a range of keys. The rows see all of them ("full"), or, with as many rows as keys, the
    triangle key <= row ("causal") or key > row ("strict")."""

    part: Part
    rows: tuple[int, int]
    keys: tuple[int, int]
    form: Literal["full", "causal", "strict"] = "full"


@dataclass(frozen=True)
class Reach:
    """What a group of heads sees: the last ``near`` keys, and of the keys before those the first ``most_far``.

    If a row has n > ``level`` far keys, each is weighted by ``level`` / n: together they count as ``level`` keys.
    """

    near: int = EVERYTHING
    most_far: int = EVERYTHING
    level: int = EVERYTHING


def level_bias(first: int, end: int, reach: Reach, like: Tensor) -> Tensor | None:
    """(rows,) the bias on the far scores of the rows at positions [first, end); None if it is 0."""
    if end - reach.near <= reach.level:
        return None
    seen = torch.arange(first - reach.near + 1, end - reach.near + 1, device=like.device, dtype=torch.float64)
    return -(seen.clamp(min=reach.level) / reach.level).log().to(torch.promote_types(like.dtype, torch.float32))


def blocks(first: int, rows: int, near: int) -> Iterator[tuple[int, int]]:
    """(first, end) positions of blocks of at most ``near`` rows; no block crosses position ``near``."""
    end = first + rows
    while first < end:
        last = min(end, first + min(near, MAX_ROWS))
        if first < near < last:
            last = near
        yield first, last
        first = last


def pieces(first: int, end: int, reach: Reach) -> Iterator[Piece]:
    """The pieces of the block of rows at positions [first, end)."""
    near, rows = reach.near, (first, end)
    if end - first == 1:  # a decode step: one piece of each part
        yield Piece("near", rows, (max(0, first - near + 1), end))
    else:
        if (begin := max(0, end - near)) < first:
            yield Piece("near", rows, (begin, first))
        yield Piece("near", rows, rows, "causal")
        if first >= near:
            yield Piece("near", (first, end - 1), (first - near + 1, end - near), "strict")
    if first < near or not reach.most_far:
        return
    yield Piece("far", rows, (0, min(reach.most_far, first - near + 1)))
    # The first row sees the far keys before ``begin``; each later row sees one more.
    begin, last = first - near + 1, min(reach.most_far, end - near)
    if begin < last:
        yield Piece("far", (first + 1, first + 1 + last - begin), (begin, last), "causal")
        if first + 1 + last - begin < end:
            yield Piece("far", (first + 1 + last - begin, end), (begin, last))


def has_fused(q: Tensor) -> bool:
    """Whether torch has a fused attention for ``q`` that returns log-sum-exps."""
    return q.device.type == "cpu" or (q.device.type == "cuda" and q.dtype in (torch.float16, torch.bfloat16))


def piece_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """(output, log-sum-exp) of q (N, G, T, D) over k, v (N, G, T_k, D), which the G heads may share."""
    if not has_fused(q):
        parts = []
        for begin in range(0, q.shape[-2], DENSE_ROWS):
            scores = dense_scores(q, k, causal, scale, begin)
            log_sum = scores.logsumexp(-1)
            parts.append((((scores - log_sum[..., None]).exp().to(v.dtype) @ v), log_sum))
        return torch.cat([out for out, _ in parts], -2), torch.cat([log_sum for _, log_sum in parts], -1)
    if q.device.type == "cpu":
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)
    found = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=scale)
    return found[0], found[1]


def dense_scores(q: Tensor, k: Tensor, causal: bool, scale: float, begin: int) -> Tensor:
    q = q[..., begin : begin + DENSE_ROWS, :]
    dtype = torch.promote_types(q.dtype, torch.float32)
    scores = (q.to(dtype) @ k.to(dtype).mT) * scale
    if causal:
        row = torch.arange(begin, begin + q.shape[-2], device=q.device)[:, None]
        scores = scores.masked_fill(torch.arange(k.shape[-2], device=q.device) > row, float("-inf"))
    return scores


def piece_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, log_sum: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of a piece, from the merged output and log-sum-exp of all pieces."""
    if q.device.type == "cpu" and has_fused(q):
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, log_sum, 0.0, causal, scale=scale
        )
    dtype = torch.promote_types(q.dtype, torch.float32)
    delta = (grad.to(dtype) * out.to(dtype)).sum(-1)
    grad_q, grad_k, grad_v = [], torch.zeros_like(k, dtype=dtype), torch.zeros_like(v, dtype=dtype)
    for begin in range(0, q.shape[-2], DENSE_ROWS):
        part = slice(begin, begin + DENSE_ROWS)
        weights = (dense_scores(q, k, causal, scale, begin) - log_sum[..., part, None]).exp()
        by_score = weights * (grad[..., part, :].to(dtype) @ v.to(dtype).mT - delta[..., part, None]) * scale
        grad_q.append(by_score @ k.to(dtype))
        grad_k += by_score.mT @ q[..., part, :].to(dtype)
        grad_v += weights.mT @ grad[..., part, :].to(dtype)
    return torch.cat(grad_q, -2), grad_k, grad_v


class _Views:
    """The tensors of a call, laid out for pieces: dimension 0 is batch and key heads, dimension 1 the query heads of
    each key head, to which keys are expanded without copies."""

    def __init__(self, first: int, end: int, near: tuple[Tensor, ...], far: tuple[Tensor, ...] | None) -> None:
        heads = near[1].shape[1]
        self.group = near[0].shape[1] // heads
        self.first = first
        self.near_begin = end - near[1].shape[2]
        self.parts: dict[str, tuple[Tensor, ...]] = {"near": self.layout(near)}
        if far is not None:
            self.parts["far"] = self.layout(far)

    def layout(self, part: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        q, k, v = part
        return (q.unflatten(1, (-1, self.group)).flatten(0, 1), *(x.flatten(0, 1) for x in (k, v)))

    def slices(self, piece: Piece) -> tuple[slice, slice]:
        shift = self.near_begin if piece.part == "near" else 0
        rows = slice(piece.rows[0] - self.first, piece.rows[1] - self.first)
        return rows, slice(piece.keys[0] - shift, piece.keys[1] - shift)

    def cut(self, piece: Piece) -> tuple[Tensor, Tensor, Tensor]:
        """q (N, G, rows, D), k and v (N, 1 or G, keys, D), flipped if needed so that a triangle is causal."""
        rows, keys = self.slices(piece)
        q, k, v = self.parts[piece.part]
        q, k, v = q[:, :, rows], k[:, keys], v[:, keys]
        if piece.form == "strict":
            q, k, v = q.flip(-2), k.flip(-2), v.flip(-2)
        if piece.form == "full" and q.shape[2] == 1:  # query heads as rows, so that keys are read once
            return q.transpose(1, 2), k[:, None], v[:, None]
        return q, k[:, None].expand(-1, self.group, -1, -1), v[:, None].expand(-1, self.group, -1, -1)


def unflip(x: Tensor, piece: Piece, folded: bool, dim: int) -> Tensor:
    """Undo the layout changes of ``_Views.cut``."""
    if folded:
        return x.transpose(1, 2)
    return x.flip(dim) if piece.form == "strict" else x


def forward(views: _Views, end: int, reach: Reach, scale: float) -> tuple[Tensor, Tensor]:
    """The output (N, G, T, D) and its log-sum-exps (N, G, T)."""
    first = views.first
    outs, log_sums = [], []
    for begin, stop in blocks(first, end - first, reach.near):
        out: Any = None
        for piece in pieces(begin, stop, reach):
            q, k, v = views.cut(piece)
            folded = q.shape[1] != views.group
            piece_out, log_sum = piece_forward(q, k, v, piece.form != "full", scale)
            piece_out, log_sum = unflip(piece_out, piece, folded, -2), unflip(log_sum, piece, folded, -1)
            if piece.part == "far" and (bias := level_bias(*piece.rows, reach, log_sum)) is not None:
                log_sum = log_sum + bias
            if out is None:  # the first piece has all rows
                out, total = piece_out, log_sum
                continue
            rows = slice(piece.rows[0] - begin, piece.rows[1] - begin)
            merged = torch.logaddexp(total[..., rows], log_sum)
            if out.dtype != log_sum.dtype:
                out = out.to(log_sum.dtype)
            old_share, new_share = (torch.exp(x - merged)[..., None] for x in (total[..., rows], log_sum))
            part = out[..., rows, :] * old_share + piece_out * new_share
            if rows == slice(0, stop - begin):
                out, total = part, merged
            else:
                out[..., rows, :], total[..., rows] = part, merged
        outs.append(out)
        log_sums.append(total)
    if len(outs) == 1:
        return outs[0], log_sums[0]
    return torch.cat(outs, -2), torch.cat(log_sums, -1)


class TwoParts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, first: int, end: int, reach: Reach, scale: float, *tensors: Tensor) -> Tensor:
        views = _Views(first, end, tensors[:3], tensors[3:] or None)
        out, log_sum = forward(views, end, reach, scale)
        out = out.to(tensors[0].dtype)
        ctx.save_for_backward(*tensors, out, log_sum)
        ctx.settings = first, end, reach, scale
        return out.unflatten(0, (tensors[0].shape[0], -1)).flatten(1, 2)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        *tensors, out, log_sum = ctx.saved_tensors
        first, end, reach, scale = ctx.settings
        views = _Views(first, end, tuple(tensors[:3]), tuple(tensors[3:]) or None)
        grad = grad.unflatten(1, (-1, views.group)).flatten(0, 1)
        dtype = torch.promote_types(tensors[0].dtype, torch.float32)
        grads = {name: [torch.zeros_like(x, dtype=dtype) for x in part] for name, part in views.parts.items()}
        for begin, stop in blocks(first, end - first, reach.near):
            for piece in pieces(begin, stop, reach):
                rows, keys = views.slices(piece)
                q, k, v = views.cut(piece)
                piece_grad, piece_out, piece_log_sum = grad[:, :, rows], out[:, :, rows], log_sum[..., rows]
                if piece.part == "far" and (bias := level_bias(*piece.rows, reach, log_sum)) is not None:
                    piece_log_sum = piece_log_sum - bias
                folded = q.shape[1] != views.group
                by_q, by_k, by_v = piece_backward(
                    unflip(piece_grad, piece, folded, -2).contiguous(),
                    q,
                    k,
                    v,
                    unflip(piece_out, piece, folded, -2).contiguous(),
                    unflip(piece_log_sum, piece, folded, -1).contiguous(),
                    piece.form != "full",
                    scale,
                )
                grads[piece.part][0][:, :, rows] += unflip(by_q, piece, folded, -2)
                for total, part in zip(grads[piece.part][1:], (by_k, by_v), strict=True):
                    part = part.sum(1, dtype=dtype)
                    total[:, keys] += part.flip(-2) if piece.form == "strict" else part
        found = [
            x.to(tensors[0].dtype).reshape(like.shape)
            for x, like in zip([y for part in grads.values() for y in part], tensors, strict=True)
        ]
        return None, None, None, None, *found


def two_part_attention(
    near: tuple[Tensor, Tensor, Tensor],
    far: tuple[Tensor, Tensor, Tensor] | None,
    first: int,
    reach: Reach,
    scale: float,
) -> Tensor:
    """The output (B, H, T, D) of the rows from position ``first`` on.

    near: q (B, H, T, D), and k, v (B, H_kv, N, D) of the last N positions up to the last row's.
    far: q for the far keys, and k, v (B, H_kv, M, D) of the first M positions. None if no row sees any.
    """
    end = first + near[0].shape[2]
    if far is None:
        reach = replace(reach, most_far=0)
    needed = min(end, reach.near + end - first - 1)
    if near[1].shape[2] < needed:
        raise ValueError(f"near keys: expected the last {needed} positions, got {near[1].shape[2]}")
    if far is not None and far[1].shape[2] < (needed := min(reach.most_far, max(0, end - reach.near))):
        raise ValueError(f"far keys: expected the first {needed} positions, got {far[1].shape[2]}")
    if far is not None and end <= reach.near:
        far = None
    tensors = (*near, *(far or ()))
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        return TwoParts.apply(first, end, reach, scale, *tensors)
    out, _ = forward(_Views(first, end, near, far), end, reach, scale)
    return out.to(near[0].dtype).unflatten(0, (near[0].shape[0], -1)).flatten(1, 2)


def dense_two_parts(
    near: tuple[Tensor, Tensor, Tensor],
    far: tuple[Tensor, Tensor, Tensor] | None,
    first: int,
    reach: Reach,
    scale: float,
) -> Tensor:
    """The reference for ``two_part_attention``, with dense weights."""
    (q, k, v), end = near, first + near[0].shape[2]
    group = q.shape[1] // k.shape[1]
    row = torch.arange(first, end, device=q.device)[:, None]
    key = torch.arange(end - k.shape[2], end, device=q.device)
    scores = (q @ k.repeat_interleave(group, 1).mT * scale).masked_fill(
        (key > row) | (key <= row - reach.near), float("-inf")
    )
    values = v.repeat_interleave(group, 1)
    if far is not None:
        q, k, v = far
        key = torch.arange(k.shape[2], device=q.device)
        hidden = (key > row - reach.near) | (key >= reach.most_far)
        beyond = q @ k.repeat_interleave(group, 1).mT * scale
        if (bias := level_bias(first, end, reach, beyond)) is not None:
            beyond = beyond + bias[:, None]
        beyond = beyond.masked_fill(hidden, float("-inf"))
        scores, values = torch.cat([beyond, scores], -1), torch.cat([v.repeat_interleave(group, 1), values], -2)
    return scores.softmax(-1) @ values
