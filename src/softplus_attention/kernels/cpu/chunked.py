"""The CPU path: exact attention over blocks of rows, forward and backward, in O(T * block) memory.

A tile holds some rows of some heads and all keys that those rows see, so both l1-normalisations and every row sum of
the backward are plain reductions inside the tile. Cores work on different tiles. Formulas: docs/method.md.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from softplus_attention.kernels.cpu import native
from softplus_attention.kernels.cpu.threads import for_each, one_by_one
from softplus_attention.power import PowerRecord
from softplus_attention.reference import EQUAL_SCORES, compute_dtype

# Elements of one tile buffer: small enough for a core's cache, large enough to amortize the overhead of operations.
TILE_ELEMENTS = 1 << 18
MIN_ROWS, MAX_ROWS = 64, 256
STEEP = 2**16  # above this power (1 - eps)^p is not 1
# With fewer scores in all (a decode step), starting threads costs more than it saves.
WORTH_THREADS = 1 << 17
POWER_ROWS = 5  # index in the options of the ops


@dataclass(frozen=True)
class Tile:
    """The rows ``rows`` of the key heads ``members`` of one group, over the keys ``keys``.

    ``counts`` is N_i; ``scale`` and ``offset`` follow from it. Each broadcasts to (members, heads per key head, rows).
    ``unseen`` lists the slices of keys that are hidden from some row, with a mask that is True where they are hidden.
    """

    group: int
    members: slice
    rows: slice
    keys: slice
    unseen: tuple[tuple[slice, Tensor], ...]
    counts: Tensor
    scale: Tensor
    offset: Tensor


class TiledInputs:
    """The inputs, laid out for tiling: (group, member, ...); a member is a key head and the query heads that share it.

    All sequences are one group if they have the same ranges and there is no mask; else each is a group of its own.
    """

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        start: Tensor,
        end: Tensor,
        mask: Tensor | None,
        power: PowerRecord,
        score_scale: float,
        normalized_keys: bool,
    ) -> None:
        batch, heads, self.t_q, _ = q.shape
        kv_heads = k.shape[1]
        self.shared = heads // kv_heads
        self.score_scale, self.sharpening = score_scale, power
        if bool((start == start[:1]).all()) and bool((end == end[:1]).all()):
            start, end = start[:1], end[:1]
        self.groups = 1 if mask is None and start.shape[0] == 1 else batch
        self.members = batch * kv_heads // self.groups

        # In a decode step the cache can be far longer than its visible part.
        self.first, last = int(start.min()), int(end.max())
        k, v = k[:, :, self.first : last], v[:, :, self.first : last]
        self.start, self.end = (x.expand(self.groups, -1) - self.first for x in (start, end))

        self.scores = batch * heads * self.t_q * (last - self.first)
        self.dtype = compute_dtype(q.dtype)
        self.row_blocks = self.blocks_of_rows(last - self.first)
        self.bounds = [self.bounds_of_blocks(group) for group in range(self.groups)]
        self.counts = (self.end - self.start).to(self.dtype)
        self.scale, self.offset = self.scale_and_offset(self.counts)
        self.q, self.inverse_q_norm = unit_and_inverse_norm(self.by_query(q.to(self.dtype)))
        k = self.by_key(k.to(self.dtype))
        self.inverse_k_norm: Tensor | None = None
        if normalized_keys:
            self.k = k
        else:
            self.k, self.inverse_k_norm = unit_and_inverse_norm(k)
        self.v = self.by_key(v.to(self.dtype))
        self.mask = None if mask is None else self.by_query(mask.expand(batch, heads, self.t_q, -1))
        self.power_rows = None
        if power.rows is not None:
            rows = power.rows.to(self.dtype).expand(batch, heads, self.t_q)
            self.power_rows = self.by_query(rows[..., None])[..., 0]

        # Matrix products take operands without NaN: 0 * NaN would be NaN in rows that give the vector no weight.
        self.clean_q, self.clean_k = cleaned(self.q), cleaned(self.k)
        if normalized_keys and self.clean_k is not self.k:
            self.k = torch.where(self.k.isfinite(), self.k, torch.nan)
        self.has_bad_scores = self.clean_q is not self.q or self.clean_k is not self.k
        self.bad_keys: list[list[int]] | None = None
        self.clean_v = cleaned(self.v)
        if self.clean_v is not self.v:
            bad = ~self.v.isfinite().all(-1).all(1)
            self.bad_keys = [row.nonzero().flatten().tolist() for row in bad]

    @classmethod
    def from_schema(cls, q: Tensor, k: Tensor, v: Tensor, *options: Any) -> TiledInputs:
        """From the inputs of the ops, in which a PowerRecord is flattened."""
        start, end, mask, *power, score_scale, normalized_keys = options
        return cls(q, k, v, start, end, mask, PowerRecord(*power), score_scale, normalized_keys)

    def by_query(self, x: Tensor) -> Tensor:
        """(B, H, ...) -> (group, member, heads per key head, ...)"""
        return x.reshape(self.groups, self.members, self.shared, *x.shape[2:])

    def by_key(self, x: Tensor) -> Tensor:
        """(B, H_kv, ...) -> (group, member, ...)"""
        return x.reshape(self.groups, self.members, *x.shape[2:])

    def blocks_of_rows(self, keys: int) -> list[slice]:
        least, most = max(1, MIN_ROWS // self.shared), max(1, MAX_ROWS // self.shared)
        block = min(most, max(TILE_ELEMENTS // max(1, self.shared * keys), least))
        return [slice(first, min(first + block, self.t_q)) for first in range(0, self.t_q, block)]

    def bounds_of_blocks(self, group: int) -> list[tuple[int, int, int, int]]:
        """For each block of rows: smallest and largest start, smallest and largest end."""
        extremes: list[Tensor] = []
        for rows in self.row_blocks:
            for x in (self.start, self.end):
                extremes += x[group, rows].aminmax()
        return [tuple(x) for x in torch.stack(extremes).view(-1, 4).tolist()]

    def scale_and_offset(self, counts: Tensor) -> tuple[Tensor, Tensor]:
        subtracts = self.sharpening.sharpen and self.sharpening.offset
        return self.score_scale * counts.clamp(min=1).log(), ((counts > 3) & subtracts).to(self.dtype)

    def strips(self) -> list[tuple[int, slice]]:
        """(group, members): parts with separate gradients of keys and values, which can run in parallel."""
        rows = self.row_blocks[0]
        per_member = max(1, self.shared * (rows.stop - rows.start) * self.k.shape[2])
        width = max(1, TILE_ELEMENTS // per_member)
        return [
            (group, slice(first, min(first + width, self.members)))
            for group in range(self.groups)
            for first in range(0, self.members, width)
        ]

    def tile(self, group: int, members: slice, block: int) -> Tile:
        rows = self.row_blocks[block]
        low, last_start, first_end, high = self.bounds[group][block]
        start, end = self.start[group, rows, None], self.end[group, rows, None]
        keys = slice(low, max(low, high))
        if self.mask is not None:
            key = torch.arange(low, keys.stop, dtype=torch.int32)
            seen = (key >= start) & (key < end) & self.mask_tile(group, members, rows, keys)
            counts = seen.sum(-1).to(self.dtype)
            hidden = ((slice(0, keys.stop - low), ~seen),)
            return Tile(group, members, rows, keys, hidden, counts, *self.scale_and_offset(counts))
        # All rows see the keys between the last start and the first end; only the edges need a mask.
        edges = [(low, last_start), (first_end, high)] if last_start < first_end else [(low, high)]
        unseen = []
        for a, b in edges:
            if a < b:
                key = torch.arange(a, b, dtype=torch.int32)
                unseen.append((slice(a - low, b - low), (key < start) | (key >= end)))
        terms = (x[group, rows] for x in (self.counts, self.scale, self.offset))
        return Tile(group, members, rows, keys, tuple(unseen), *terms)

    def mask_tile(self, group: int, members: slice, rows: slice, keys: slice) -> Tensor:
        assert self.mask is not None
        mask = self.mask[group, members, :, rows]
        return mask if mask.shape[-1] == 1 else mask[..., keys.start + self.first : keys.stop + self.first]


class Workspace:
    """Tile buffers, allocated once per call and thread."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.buffers: dict[str, Tensor] = {}

    def __call__(self, name: str, shape: tuple[int, ...]) -> Tensor:
        size = 1
        for n in shape:
            size *= n
        buffer = self.buffers.get(name)
        if buffer is None or buffer.numel() < size:
            buffer = self.buffers[name] = torch.empty(size, dtype=self.dtype)
        return buffer[:size].view(shape)


def workspace(buffers: threading.local, dtype: torch.dtype) -> Workspace:
    if not hasattr(buffers, "work"):
        buffers.work = Workspace(dtype)
    return buffers.work


def unit_and_inverse_norm(x: Tensor) -> tuple[Tensor, Tensor]:
    """(x / ||x||, 1 / ||x||), both 0 for a zero vector, with no overflow or underflow of the squares."""
    size = x.abs().amax(-1, keepdim=True)
    size.masked_fill_(size == 0, 1)
    x = x / size
    inverse = x.square().sum(-1, keepdim=True)
    inverse.masked_fill_(inverse == 0, torch.inf).rsqrt_()
    return x.mul_(inverse), inverse.div_(size)


def unit_backward(grad: Tensor, unit: Tensor, inverse_norm: Tensor, has_bad: bool) -> Tensor:
    """The gradient of x / ||x|| from that of the unit vector. A zero gradient stays zero even if the vector is NaN."""
    untouched = grad.any(-1, keepdim=True).logical_not_() if has_bad else None
    grad = (grad - unit * (unit * grad).sum(-1, keepdim=True)).mul_(inverse_norm)
    return grad if untouched is None else grad.masked_fill_(untouched, 0)


def cleaned(x: Tensor) -> Tensor:
    """x with non-finite vectors set to zero; x itself if there are none."""
    if x.sum().isfinite():
        return x
    finite = x.isfinite().all(-1, keepdim=True)
    return x if bool(finite.all()) else torch.where(finite, x, 0)


def softplus_(s: Tensor) -> Tensor:
    if s.dtype == torch.float64:
        return torch.logaddexp(s, s.new_zeros(()), out=s)
    return torch.ops.aten.softplus.out(s, out=s)


def integer_power(u: Tensor, exponent: int, out: Tensor) -> Tensor:
    """u^exponent by squaring, with 0^0 = 0: a key without weight has no slope either."""
    if exponent == 0:
        return torch.gt(u, 0, out=out)
    if exponent == 1:
        return out.copy_(u)
    torch.mul(u, u, out=out)
    for position, bit in enumerate(bin(exponent)[3:]):
        if position:
            out.mul_(out)
        if bit == "1":
            out.mul_(u)
    return out


class RowTerms:
    """Terms of a tile's rows for forward and backward (N, R, M of docs/method.md), each (m, shared * rows, 1)."""

    def __init__(self, problem: TiledInputs, tile: Tile) -> None:
        self.problem, self.tile = problem, tile
        self.q = problem.q[tile.group, tile.members, :, tile.rows]
        m, shared, rows, d = self.q.shape
        self.shape = (m, shared * rows, tile.keys.stop - tile.keys.start)
        self.counts, self.scale, self.offset = (
            self.column(x.expand(m, shared, rows)) for x in (tile.counts, tile.scale, tile.offset)
        )
        self.scaled_q = self.q.reshape(m, shared * rows, d) * self.scale
        self.k = problem.k[tile.group, tile.members, tile.keys]
        self.v = problem.v[tile.group, tile.members, tile.keys]
        self.power = self.powers()

    def column(self, x: Tensor) -> Tensor:
        return x.reshape(self.shape[0], self.shape[1], 1)

    def powers(self) -> int | Tensor | None:
        given, rows = self.problem.sharpening, self.problem.power_rows
        if rows is not None:
            return self.column(rows[self.tile.group, self.tile.members, :, self.tile.rows])
        return given.of_counts(self.counts) if given.sharpen else None

    def hide_(self, x: Tensor) -> Tensor:
        """Zero where a key is hidden from a row. The mask selects, so a hidden NaN has no effect."""
        m, shared = self.shape[0], self.problem.shared
        for part, unseen in self.tile.unseen:
            x.view(m, shared, -1, self.shape[2])[..., part].masked_fill_(unseen, 0)
        return x

    def use(self, total: Tensor, largest: Tensor) -> None:
        """Sets R = sum f and max f of each row, from which it follows which rows sharpen and how."""
        self.total, self.largest = total, largest
        if self.power is not None:
            height = self.counts * largest / total - self.offset  # M_i = max x
            self.sharp = height > EQUAL_SCORES
            self.all_sharp = bool(self.sharp.all())
            self.height = height if self.all_sharp else torch.where(self.sharp, height, 1)

    def relative_excess(self, f: Tensor, out: Tensor) -> Tensor:
        """u = x / M, zero in rows that do not sharpen."""
        mean, slope = self.offset * self.total / self.counts, self.counts / self.total / self.height
        if not self.all_sharp:
            mean, slope = torch.where(self.sharp, mean, 0), torch.where(self.sharp, slope, 0)
        # Subtract the mean first: near it the difference is then exact.
        return exactly_one_(torch.sub(f, mean, out=out).mul_(slope).clamp_(0, 1), f, self.largest, self.power)

    def raised(self, u: Tensor, below: int, out: Tensor) -> Tensor:
        """u^(p - below)"""
        if isinstance(self.power, int):
            return integer_power(u, self.power - below, out)
        assert self.power is not None
        torch.pow(u, self.power - below, out=out)
        return out.masked_fill_(u == 0, 0)


def exactly_one_(u: Tensor, f: Tensor, largest: Tensor, power: int | Tensor | None) -> Tensor:
    """Sets u to 1 at the largest f of each row. Rounding may leave a little less, which a steep power turns into 0."""
    steep = power is not None and (power > STEEP if isinstance(power, int) else bool((power > STEEP).any()))
    return u.masked_fill_(f == largest, 1) if steep else u


def add_bad_keys(out: Tensor, weights: Tensor, v: Tensor, keys: list[int]) -> None:
    """Adds the keys with non-finite values, which affect only rows that give them weight."""
    for key in keys:
        w = weights[:, :, key, None]
        value = v[:, key, None, :]
        bad = ~value.isfinite().all(-1, keepdim=True)
        out.add_(torch.where((w != 0) & bad, w * value, 0))


def bad_keys_of(problem: TiledInputs, tile: Tile) -> list[int]:
    if problem.bad_keys is None:
        return []
    return [key - tile.keys.start for key in problem.bad_keys[tile.group] if tile.keys.start <= key < tile.keys.stop]


def native_result(
    name: str, before: tuple[Tensor, ...], q: Tensor, k: Tensor, v: Tensor, *options: Any
) -> list[Tensor]:
    """The result of the C++ kernels, or empty if they are not available or do not support the call: masks, float64,
    empty tensors, numbers that are not finite, norms near the limits of float32, steep powers."""
    start, end, mask, *rest = options
    if mask is not None or q.dtype == torch.float64 or not (q.numel() and k.numel() and v.numel()):
        return []
    ops = native.status().ops
    return [] if ops is None else getattr(ops, name)(*before, q, k, v, start, end, *rest)


def attention_forward(q: Tensor, k: Tensor, v: Tensor, *options: Any, direct: bool = False) -> tuple[Tensor, Tensor]:
    """``chunked_forward`` of ``ops``."""
    if result := native_result("prefill_forward", (), q, k, v, *options):
        return result[0], result[1]
    out = q.new_empty(*q.shape[:3], v.shape[3])
    stats = q.new_empty(3, *q.shape[:3], dtype=compute_dtype(q.dtype))
    if out.numel():
        with torch.autocast("cpu", enabled=False):
            forward(TiledInputs.from_schema(q, k, v, *options), out, stats)
    return out, stats


def attention_backward(
    grad_out: Tensor, stats: Tensor, q: Tensor, k: Tensor, v: Tensor, *options: Any, direct: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``chunked_backward`` of ``ops``."""
    if result := native_result("prefill_backward", (grad_out, stats), q, k, v, *options):
        return result[0], result[1], result[2], result[3]
    wants_power = options[POWER_ROWS] is not None
    if not grad_out.numel():
        d_power = stats.new_zeros(stats.shape[1:] if wants_power else (0,))
        return q.new_zeros(q.shape), k.new_zeros(k.shape), v.new_zeros(v.shape), d_power
    with torch.autocast("cpu", enabled=False):
        problem = TiledInputs.from_schema(q, k, v, *options)
        dq, dk, dv, dp = backward(problem, grad_out, stats, k.shape[2], wants_power)
    dq, dk, dv = (x.reshape(like.shape).to(like.dtype).contiguous() for x, like in ((dq, q), (dk, k), (dv, v)))
    return dq, dk, dv, stats.new_empty(0) if dp is None else dp.reshape(stats.shape[1:])


def forward(problem: TiledInputs, out: Tensor, stats: Tensor) -> None:
    """Fills ``out`` (B, H, T_q, D_v) and ``stats`` (3, B, H, T_q): R = sum f, max f and W = sum w of each row."""
    out_by_query = problem.by_query(out)
    stats_by_query = [problem.by_query(x) for x in stats]
    buffers = threading.local()

    def work_on(piece: tuple[int, slice, int]) -> None:
        work = workspace(buffers, problem.dtype)
        tile = problem.tile(*piece)
        here = (tile.group, tile.members, slice(None), tile.rows)
        rows = RowTerms(problem, tile)
        shape = rows.shape
        if shape[2] == 0:
            out_by_query[here] = 0
            for x, neutral in zip(stats_by_query, (1, 0, 1), strict=True):
                x[here] = neutral
            return
        f = torch.bmm(rows.scaled_q, rows.k.mT, out=work("f", shape))
        rows.hide_(softplus_(f))
        total = f.sum(-1, keepdim=True)
        total.masked_fill_(rows.counts == 0, 1)
        largest = f.amax(-1, keepdim=True)
        rows.use(total, largest)
        weights, norm = f, total
        if rows.power is not None:
            u = rows.relative_excess(f, work("u", shape))
            weights = rows.raised(u, 0, work("w", shape))
            norm = weights.sum(-1, keepdim=True)
            if not rows.all_sharp:
                weights = torch.where(rows.sharp, weights, f)
                norm = torch.where(rows.sharp, norm, total)
        clean_v = problem.clean_v[tile.group, tile.members, tile.keys]
        result = torch.bmm(weights, clean_v)
        add_bad_keys(result, weights, rows.v, bad_keys_of(problem, tile))
        target = out_by_query[here]
        target.copy_(result.div_(norm).view(target.shape))
        for x, value in zip(stats_by_query, (total, largest, norm), strict=True):
            x[here] = value.view(x[here].shape)

    # The last rows of a causal problem are the longest: started first, they leave no core with a long tile at the end.
    blocks = reversed(range(len(problem.row_blocks)))
    run = for_each if problem.scores >= WORTH_THREADS else one_by_one
    run(work_on, [(*strip, block) for block in blocks for strip in problem.strips()])


def backward(
    problem: TiledInputs, grad_out: Tensor, stats: Tensor, keys: int, power_grad: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of q, k and v, of ``keys`` keys in all, in the compute dtype, and of each row's power (B, H, T_q)."""
    dtype = problem.dtype
    d_out = problem.by_query(grad_out.to(dtype))
    row_stats = [problem.by_query(x) for x in stats]
    dq, dk, dv = torch.zeros_like(problem.q), torch.zeros_like(problem.k), torch.zeros_like(problem.v)
    dp = torch.zeros_like(row_stats[0]) if power_grad else None
    buffers = threading.local()

    def work_on_tile(tile: Tile) -> None:
        work = workspace(buffers, dtype)
        here = (tile.group, tile.members, slice(None), tile.rows)
        there = (tile.group, tile.members, tile.keys)
        rows = RowTerms(problem, tile)
        shape = rows.shape
        if shape[2] == 0:
            return
        total, largest, norm = (rows.column(x[here]) for x in row_stats)
        rows.use(total, largest)
        g_out = d_out[here].reshape(shape[0], shape[1], -1)

        f = torch.bmm(rows.scaled_q, rows.k.mT, out=work("f", shape))
        slope = torch.sigmoid(f, out=work("slope", shape))
        rows.hide_(softplus_(f))
        if rows.power is None:
            weights = f.div_(total)
            steepness = None
        else:
            u = rows.relative_excess(f, work("u", shape))
            steepness = rows.raised(u, 1, work("steepness", shape))
            weights = torch.mul(u, steepness, out=work("w", shape)).div_(norm)
            if not rows.all_sharp:
                weights = torch.where(rows.sharp, weights, f.div_(total))
                steepness.masked_fill_(~rows.sharp, 1)
        if problem.has_bad_scores:
            rows.hide_(weights)
        dv[there].baddbmm_(weights.mT, g_out)

        g = torch.bmm(g_out, rows.v.mT, out=work("g", shape))  # dP
        for key in bad_keys_of(problem, tile):
            g[:, :, key].masked_fill_(weights[:, :, key] == 0, 0)
        g.sub_(torch.mul(weights, g, out=work("f", shape)).sum(-1, keepdim=True))  # dP - delta
        if dp is not None:
            log_u = torch.where(u > 0, u, 1).log_()
            dp[here] = torch.where(rows.sharp, log_u * weights * g, 0).sum(-1).view(dp[here].shape)
        if rows.power is None or steepness is None:
            slope.div_(total)
        else:
            power = float(rows.power) if isinstance(rows.power, int) else rows.power  # a large int would not fit torch
            g.mul_(steepness).mul_(
                torch.where(rows.sharp, power / norm / rows.height, 1 / rows.counts.clamp(min=1))
            )  # dx
            competition = rows.offset / rows.counts.clamp(min=1) * g.sum(-1, keepdim=True)  # eps
            g.sub_(torch.where(rows.sharp, competition, 0))
            slope.mul_(rows.counts / total)
        rows.hide_(g.mul_(slope))  # ds

        clean_k = problem.clean_k[there]
        dq_tile = torch.bmm(g, clean_k).mul_(rows.scale)
        dq[here] = dq_tile.view(dq[here].shape)
        clean_q = problem.clean_q[here].reshape(rows.scaled_q.shape) * rows.scale
        dk[there].baddbmm_(g.mT, clean_q)

    def work_on(strip: tuple[int, slice]) -> None:
        for block in range(len(problem.row_blocks)):
            work_on_tile(problem.tile(*strip, block))

    run = for_each if problem.scores >= WORTH_THREADS else one_by_one
    run(work_on, problem.strips())
    dq = unit_backward(dq, problem.q, problem.inverse_q_norm, problem.has_bad_scores)
    if problem.inverse_k_norm is not None:
        dk = unit_backward(dk, problem.k, problem.inverse_k_norm, problem.has_bad_scores)
    return dq, pad_keys(dk, problem.first, keys), pad_keys(dv, problem.first, keys), dp


def pad_keys(x: Tensor, first: int, keys: int) -> Tensor:
    """The gradient of all keys, zero for those that no row saw."""
    if x.shape[2] == keys:
        return x
    full = x.new_zeros(*x.shape[:2], keys, x.shape[3])
    full[:, :, first : first + x.shape[2]] = x
    return full
