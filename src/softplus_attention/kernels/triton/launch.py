"""Launches of the Triton kernels: strides, block sizes, scratch tensors. Nothing here waits for the device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from softplus_attention.kernels.hopper import launch as hopper_launch
from softplus_attention.kernels.launch_cache import Scratch, addresses_of, current_stream, kinds, launch
from softplus_attention.kernels.triton import backward as bwd
from softplus_attention.kernels.triton import common
from softplus_attention.kernels.triton import forward as fwd
from softplus_attention.visibility import Visibility

LARGEST_INTEGER_POWER = 1023
NORM_BLOCK: int = common.NORM_BLOCK.value


@dataclass(frozen=True)
class Blocks:
    """Rows and keys of a tile, warps per program, depth of the software pipeline, registers per thread."""

    rows: int
    keys: int
    warps: int
    stages: int
    registers: int | None = None

    def options(self) -> dict[str, int]:
        options = {"BM": self.rows, "BN": self.keys, "STAGES": self.stages, "num_warps": self.warps}
        return options if self.registers is None else {**options, "maxnreg": self.registers}


class Kept(NamedTuple):
    """What a forward fills and a backward reads."""

    out: Tensor
    rest: Tensor  # where not empty, what rounding took from ``out``: the row sums of the backward need it
    stats: Tensor  # (3, B, H, T_q): sum f', max x, sum w; the last on Hopper only where a backward follows
    flat: Tensor  # by sequence and head whether any row has equal scores, and from ``flags_of`` on ``Again`` of gluon
    norms: Tensor  # (B, H_kv, norm_stride): 1 / ||k||


def padded(d: int) -> int:
    """The power of two that holds d. In plain Python, as below: Triton's own helpers take microseconds a call."""
    return max(16, 1 << (d - 1).bit_length())


def blocks_of(length: int, size: int) -> int:
    return (length + size - 1) // size


# The block sizes below are the fastest of those measured on an H200 (docs/dev/kernels-log.md). They depend on the
# head dimension only, never on a length: no length compiles anew.

# One shape for float32, so that all kernels round their products alike: the sums of the forward then fit the scores
# that the backward computes again, where a power of 15 would show the difference.
PRECISE_BLOCKS = Blocks(32, 32, 4, 1)


def forward_blocks(width: int, precise: bool, sharpen: bool) -> Blocks:
    if precise:
        return PRECISE_BLOCKS
    if width <= 64:
        return Blocks(64, 64, 4, 3, 168) if sharpen else Blocks(128, 64, 8, 3, 128)
    if width <= 128:
        return Blocks(128, 64, 8, 3) if sharpen else Blocks(128, 32, 8, 3, 128)
    return Blocks(64, 32, 4, 2)


def dq_blocks(width: int, precise: bool) -> Blocks:
    if precise:
        return PRECISE_BLOCKS
    if width <= 64:
        return Blocks(64, 32, 4, 3, 168)
    return Blocks(128, 64, 8, 2) if width <= 128 else Blocks(64, 32, 8, 1)


def dkv_blocks(width: int, precise: bool) -> Blocks:
    if precise:
        return PRECISE_BLOCKS
    if width <= 64:
        return Blocks(64, 64, 4, 2)
    return Blocks(64, 64, 4, 1) if width <= 128 else Blocks(64, 32, 8, 1)


def norm_stride(t_k: int) -> int:
    """Length of a row of inverse norms, as ``triton.common.norm_stride``."""
    return (t_k + NORM_BLOCK - 1) // NORM_BLOCK * NORM_BLOCK


def flags_of(batch: int, heads: int) -> int:
    """Numbers of ``Kept.flat`` before its list of blocks."""
    return hopper_launch.aligned(batch * heads)


def flat_size(batch: int, heads: int, t_q: int) -> int:
    return flags_of(batch, heads) + 1 + batch * heads * blocks_of(t_q, hopper_launch.ROWS)


def unit_last_stride(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def power_code(sharpen: bool, power: float, power_rows: Tensor | None, power_by_length: list[float] | None) -> int:
    """POWER as the kernels know it: 0 is LSSA, > 0 the power, -1 one that each row reads or computes."""
    if not sharpen:
        return 0
    plain = power_rows is None and power_by_length is None
    return int(power) if plain and power.is_integer() and power <= LARGEST_INTEGER_POWER else -1


def needs_long_polynomial(code: int, dtype: torch.dtype) -> bool:
    """Float16 rounds to less than the error of the short one. At p = 1 the slope jumps where a key crosses the average,
    and the gradient of a power adds up over all rows: both would show it too. Powers that are read per row may be 1."""
    return code in (1, -1) or dtype == torch.float16


def exactness(precise: bool, long: bool) -> int:
    """FINE as the kernels know it."""
    return int((common.SERIES if precise else common.LONG if long else common.SHORT).value)


@dataclass
class Problem:
    """The arguments that all kernels share, as the kernels take them."""

    q: Tensor
    k: Tensor
    v: Tensor
    start: Tensor | None
    end: Tensor | None
    mask: Tensor | None
    is_causal: bool
    window: int | None
    sharpen: bool
    power: float
    power_rows: Tensor | None
    power_by_length: list[float] | None
    offset: bool
    score_scale: float
    normalized_keys: bool

    def __post_init__(self) -> None:
        self.q, self.k, self.v = (unit_last_stride(x) for x in (self.q, self.k, self.v))
        self.batch, self.h, self.t_q, self.d = self.q.shape
        self.h_kv, self.t_k, self.dv = self.k.shape[1], self.k.shape[2], self.v.shape[3]
        self.shared = self.h // self.h_kv  # query heads of a key head
        if self.window is not None:  # no row sees more; a larger number would be beyond the kernels' int32
            self.window = min(self.window, max(self.t_k, 1))
        self.precise = self.q.dtype == torch.float32
        self.width = max(padded(self.d), padded(self.dv))
        self.code = power_code(self.sharpen, self.power, self.power_rows, self.power_by_length)
        self.range_stride = 0
        self.start_pointer = self.end_pointer = self.q  # never read
        if self.start is not None and self.end is not None:
            start, end = torch.broadcast_tensors(self.start.to(torch.int32), self.end.to(torch.int32))
            self.start, self.end = self.start_pointer, self.end_pointer = start.contiguous(), end.contiguous()
            self.range_stride = 0 if start.shape[0] == 1 else self.start.stride(0)
        self.counts: Tensor | None = None
        if self.mask is not None:
            self.counts = self.mask_counts()
        # As the kernels take a power that is no number: a pointer that may be read, and base, slope and n0.
        self.power_pointer = self.q
        self.power_strides: tuple[int, ...] = (0, 0, 0)
        self.growth = tuple(self.power_by_length or (self.power, 0.0, 1.0))
        if self.power_rows is not None:
            self.power_rows = self.power_rows.expand(self.batch, self.h, self.t_q)
            self.power_pointer, self.power_strides = self.power_rows, self.power_rows.stride()

    def mask_counts(self) -> Tensor:
        """N_i under a mask, (B|1, H|1, T_q) int32."""
        assert self.mask is not None
        ranges = (self.is_causal, self.window, self.start, self.end)
        return Visibility(self.t_q, self.t_k, self.q.device, *ranges, self.mask).counts()

    def rows_that_see(self, rows: int, keys: int) -> tuple[Tensor, Tensor]:
        """For ranges given per row: the rows [first, last) that may see a key of each block of keys, (B|1, key blocks),
        in blocks of so many rows."""
        start, end = self.start, self.end
        if start is None or end is None:
            return self.q, self.q  # never read
        tail = -self.t_q % rows
        some = end > start
        lowest = torch.nn.functional.pad(torch.where(some, start, self.t_k), (0, tail), value=self.t_k)
        highest = torch.nn.functional.pad(torch.where(some, end, 0), (0, tail), value=0)
        lowest = lowest.unflatten(1, (-1, rows)).amin(-1)  # (B|1, row blocks)
        highest = highest.unflatten(1, (-1, rows)).amax(-1)
        first_key = torch.arange(0, self.t_k, keys, device=start.device, dtype=torch.int32)[:, None]
        meets = (lowest[:, None] < first_key + keys) & (highest[:, None] > first_key)  # (B|1, key blocks, row blocks)
        index = torch.arange(meets.shape[-1], device=start.device, dtype=torch.int32)
        first = torch.where(meets, index, meets.shape[-1]).amin(-1)
        last = torch.where(meets, index + 1, 0).amax(-1)
        return (first * rows).to(torch.int32), (last * rows).clamp(max=self.t_q).to(torch.int32)

    def seen_stride(self, first_row: Tensor) -> int:
        return 0 if self.range_stride == 0 else first_row.stride(0)

    def shared_arguments(self) -> dict[str, Any]:
        nothing = self.q  # a pointer that is never read
        mask = None if self.mask is None else self.mask.expand(self.batch, self.h, self.t_q, self.t_k)
        counts = None if self.counts is None else self.counts.expand(self.batch, self.h, self.t_q)
        return {
            "Start": self.start_pointer,
            "End": self.end_pointer,
            "Mask": nothing if mask is None else mask.view(torch.uint8),
            "Counts": nothing if counts is None else counts,
            "Power": self.power_pointer,
            "t_q": self.t_q,
            "t_k": self.t_k,
            "h": self.h,
            "h_kv": self.h_kv,
            "window": self.window or 0,
            "growth": self.growth,
            "q_strides": self.q.stride()[:3],
            "k_strides": self.k.stride()[:3],
            "v_strides": self.v.stride()[:3],
            "range_stride": self.range_stride,
            "mask_strides": (0, 0, 0, 0) if mask is None else mask.stride(),
            "count_strides": (0, 0) if counts is None else counts.stride()[:2],
            "power_strides": self.power_strides,
            "CAUSAL": self.is_causal,
            "HAS_WINDOW": self.window is not None,
            "HAS_RANGES": self.start is not None,
            "HAS_MASK": mask is not None,
            "POWER": self.code,
            "OFFSET": self.offset,
            "FINE": exactness(self.precise, needs_long_polynomial(self.code, self.q.dtype)),
            "HAS_POWER_ROWS": self.power_rows is not None,
            "D": self.d,
            "DV": self.dv,
            "BD": padded(self.d),
            "BDV": padded(self.dv),
            "PRECISE": self.precise,
        }


def key_norms(problem: Problem, norms: Tensor, flat: Tensor) -> None:
    """Fills ``norms`` (B, H_kv, norm_stride) with 1 / ||k||; no head is flat, and no block waits, yet."""
    k, block = problem.k, 64
    grid = (norm_stride(problem.t_k) // block * problem.batch * problem.h_kv, 1, 1)
    numbers = (problem.t_k, problem.h_kv, k.stride()[:3], flags_of(problem.batch, problem.h) + 1)
    by_token = k.stride(1) < k.stride(2)
    constants = (problem.normalized_keys, by_token, problem.d, padded(problem.d), block)
    tensors = (k, norms, flat)
    addresses = addresses_of(tensors)
    alike = kinds(tensors, addresses, numbers)
    key = None if alike is None else ("key norms", k.device, constants, alike)
    arguments = (*numbers, *constants)
    launch(fwd.key_norms_kernel, grid, tensors, arguments, {}, key, current_stream(k.device), addresses)


def forward(problem: Problem, kept: Kept) -> Scratch | None:
    """Fills ``kept``; ``key_norms`` was there before. Returns what ``launch_cache.replay`` wants to know."""
    if hopper_launch.fits(problem, kept.out):
        return hopper_launch.forward(problem, kept)
    out, rest, stats, flat, norms = kept
    blocks = forward_blocks(problem.width, problem.precise, problem.sharpen)
    fwd.forward_kernel[(blocks_of(problem.t_q, blocks.rows) * problem.batch * problem.h,)](
        Q=problem.q, K=problem.k, V=problem.v, Out=out, Rest=rest, Norms=norms, Total=stats[0], Height=stats[1],
        Weight=stats[2], Flat=flat, HAS_REST=rest.numel() > 0, score_scale=problem.score_scale,
        out_strides=out.stride()[:3],
        **problem.shared_arguments(), **blocks.options(),
    )  # fmt: skip
    return None


def backward(
    problem: Problem,
    grad_out: Tensor,
    kept: Kept,
    grads: tuple[Tensor, Tensor, Tensor],
    grad_power: Tensor | None,
) -> Scratch | None:
    """Fills ``grads`` of q, k, v and, where asked, ``grad_power`` (B, H, T_q). Returns as ``forward``."""
    dq, dk, dv = grads
    grad_out = unit_last_stride(grad_out)
    if hopper_launch.fits(problem, kept.out, grad_out, *grads):
        return hopper_launch.backward(problem, grad_out, kept, grads, grad_power)
    out, rest, stats, flat, norms = kept
    shared = problem.shared_arguments()
    n_rows = problem.batch * problem.h * problem.t_q
    rows = stats.new_empty(8 if problem.precise else 6, n_rows)

    blocks = dq_blocks(problem.width, problem.precise)
    bwd.dq_kernel[(blocks_of(problem.t_q, blocks.rows) * problem.batch * problem.h,)](
        Q=problem.q, K=problem.k, V=problem.v, Out=out, Rest=rest, GradOut=grad_out, Norms=norms, Total=stats[0],
        Height=stats[1], Weight=stats[2], Flat=flat, HAS_REST=rest.numel() > 0, GradQ=dq,
        GradPower=stats if grad_power is None else grad_power, POWER_GRAD=grad_power is not None, Rows=rows,
        n_rows=n_rows, score_scale=problem.score_scale,
        out_strides=out.stride()[:3], grad_out_strides=grad_out.stride()[:3], dq_strides=dq.stride()[:3],
        **shared, **blocks.options(),
    )  # fmt: skip

    blocks = dkv_blocks(problem.width, problem.precise)
    first_row, last_row = problem.rows_that_see(blocks.rows, blocks.keys)
    bwd.dkv_kernel[(blocks_of(problem.t_k, blocks.keys) * problem.batch * problem.h_kv,)](
        Q=problem.q, K=problem.k, V=problem.v, GradOut=grad_out, Norms=norms, Flat=flat, Rows=rows,
        FirstRow=first_row, LastRow=last_row, GradK=dk, GradV=dv, n_rows=n_rows,
        grad_out_strides=grad_out.stride()[:3], dk_strides=dk.stride()[:3], dv_strides=dv.stride()[:3],
        seen_stride=problem.seen_stride(first_row), NORMALIZED_KEYS=problem.normalized_keys,
        **shared, **blocks.options(),
    )  # fmt: skip
    return None
