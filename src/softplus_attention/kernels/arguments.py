"""The arguments of a call as the GPU kernels take them: sizes, strides, pointers, codes. Imports no triton."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from softplus_attention.power import PowerRecord
from softplus_attention.visibility import Visibility

# Compile-time constants of the kernels (by way of triton.common).
NORM_BLOCK = 128
ROW_BLOCK = 64  # rows of a warp group on Hopper
INVERSE_BITS = 30  # of the fixed-point inverse by which a program multiplies in place of a division
FALLBACK_PROGRAMS = 256  # that share the blocks left to the fallback on Hopper
# log2(1 + e) by a polynomial of four or seven terms, or a series: relative errors of 4e-4, 1.4e-6 and 1e-7.
SHORT, LONG, SERIES = 0, 1, 2
MAX_INTEGER_POWER = 1023


class SavedForBackward(NamedTuple):
    """Written by the forward and read by the backward."""

    out: Tensor
    out_residual: Tensor  # if not empty, the rounding error of ``out``, which the backward's row sums need
    stats: Tensor  # (3, B, H, T_q): sum f', max x, sum w; on Hopper the last only if a backward follows
    # Per sequence and head, whether any row has equal scores; from ``flag_count`` on, the blocks that Hopper's forward
    # leaves to its fallback.
    equal_score_flags: Tensor
    norms: Tensor  # (B, H_kv, norm_stride): 1 / ||k||


def padded(d: int) -> int:
    """The next power of two, at least 16. In plain Python, as below: Triton's helpers take microseconds per call."""
    return max(16, 1 << (d - 1).bit_length())


def blocks_of(length: int, size: int) -> int:
    return (length + size - 1) // size


def aligned(count: int) -> int:
    """``count`` int32 rounded up to a multiple of 16 bytes."""
    return (count + 3) // 4 * 4


def norm_stride(t_k: int) -> int:
    """The length of a row of inverse norms, as ``triton.common.norm_stride``."""
    return blocks_of(t_k, NORM_BLOCK) * NORM_BLOCK


def flag_count(batch: int, heads: int) -> int:
    """The number of entries of ``equal_score_flags`` before its list of blocks."""
    return aligned(batch * heads)


def unit_last_stride(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def empty_output(q: Tensor, v: Tensor) -> Tensor:
    """(B, H, T_q, D_v), with the memory layout (B, T, H, D) if q has it; for one row both are the same."""
    batch, heads, t_q, _ = q.shape
    if t_q > 1 and q.stride(1) < q.stride(2):
        return q.new_empty(batch, t_q, heads, v.shape[3]).transpose(1, 2)
    return q.new_empty(batch, heads, t_q, v.shape[3])


def empty_forward(q: Tensor, k: Tensor, v: Tensor, for_backward: bool) -> SavedForBackward:
    batch, heads, t_q, _ = q.shape
    out = empty_output(q, v)
    flags = flag_count(batch, heads) + 1 + batch * heads * blocks_of(t_q, ROW_BLOCK)
    return SavedForBackward(
        out,
        torch.empty_like(out) if for_backward and q.dtype != torch.float32 else q.new_empty(0),
        q.new_empty(3, batch, heads, t_q, dtype=torch.float32),
        q.new_empty(flags, dtype=torch.int32),
        q.new_empty(*k.shape[:2], norm_stride(k.shape[2]), dtype=torch.float32),
    )


def empty_backward(
    stats: Tensor, q: Tensor, k: Tensor, v: Tensor, power_rows: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dq, dk, dv and d_power, which is empty if the power is not a tensor."""
    dq, dk, dv = (
        torch.empty_like(x) if x.stride(-1) == 1 else torch.empty_like(x, memory_format=torch.contiguous_format)
        for x in (q, k, v)
    )
    return dq, dk, dv, stats.new_empty((0,) if power_rows is None else stats.shape[1:])


def power_code(power: PowerRecord) -> int:
    """POWER of the kernels: 0 is LSSA, > 0 the power, -1 a power that each row reads or computes."""
    if not power.sharpen:
        return 0
    integer = power.integer
    return integer if integer is not None and integer <= MAX_INTEGER_POWER else -1


def needs_long_polynomial(code: int, dtype: torch.dtype) -> bool:
    """Float16 rounds to less than the error of the short polynomial. That error would also show at p = 1, where the
    slope jumps as a key crosses the average, and in the gradient of a power, which is summed over all rows. Powers that
    are read per row may be 1."""
    return code in (1, -1) or dtype == torch.float16


def log_mode(precise: bool, code: int, dtype: torch.dtype) -> int:
    """LOG_MODE of the kernels."""
    return SERIES if precise else LONG if needs_long_polynomial(code, dtype) else SHORT


@dataclass
class KernelArguments:
    """The arguments shared by the prefill kernels, as the kernels take them."""

    q: Tensor
    k: Tensor
    v: Tensor
    start: Tensor | None
    end: Tensor | None
    mask: Tensor | None
    is_causal: bool
    window: int | None
    power: PowerRecord
    score_scale: float
    normalized_keys: bool

    @classmethod
    def from_schema(cls, q: Tensor, k: Tensor, v: Tensor, *options: Any) -> KernelArguments:
        """From the inputs of the ops: ``ops.TRITON_OPTIONS``."""
        start, end, mask, is_causal, window, *power, score_scale, normalized_keys = options
        visible = (start, end, mask, is_causal, window)
        return cls(q, k, v, *visible, PowerRecord(*power), score_scale, normalized_keys)

    def __post_init__(self) -> None:
        self.q, self.k, self.v = (unit_last_stride(x) for x in (self.q, self.k, self.v))
        self.batch, self.h, self.t_q, self.d = self.q.shape
        self.h_kv, self.t_k, self.dv = self.k.shape[1], self.k.shape[2], self.v.shape[3]
        self.shared = self.h // self.h_kv  # query heads per key head
        if self.window is not None:  # a larger one changes nothing, and might not fit the kernels' int32
            self.window = min(self.window, max(self.t_k, 1))
        self.precise = self.q.dtype == torch.float32
        self.width = max(padded(self.d), padded(self.dv))
        self.range_stride = 0
        self.start_pointer = self.end_pointer = self.q  # never read
        if self.start is not None and self.end is not None:
            start, end = torch.broadcast_tensors(self.start.to(torch.int32), self.end.to(torch.int32))
            self.start, self.end = self.start_pointer, self.end_pointer = start.contiguous(), end.contiguous()
            self.range_stride = 0 if start.shape[0] == 1 else self.start.stride(0)
        self.counts: Tensor | None = None
        if self.mask is not None:
            visible = (self.is_causal, self.window, self.start, self.end, self.mask)
            self.counts = Visibility(self.t_q, self.t_k, self.q.device, *visible).counts()
        # For a power that is not one number: a pointer to powers per row, and base, slope and n0.
        self.power_code, self.growth = power_code(self.power), self.power.growth
        self.power_pointer = self.q
        self.power_strides: tuple[int, ...] = (0, 0, 0)
        self.has_power_rows = self.power.rows is not None
        if self.power.rows is not None:
            self.power_pointer = self.power.rows.expand(self.batch, self.h, self.t_q)
            self.power_strides = self.power_pointer.stride()

    def rows_that_see(self, rows: int, keys: int) -> tuple[Tensor, Tensor]:
        """For each block of ``keys`` keys, (B|1, key blocks), the rows [first, last) that may see one of them, in whole
        blocks of ``rows`` rows. Only for ranges given per row."""
        start, end = self.start, self.end
        if start is None or end is None:
            return self.q, self.q  # never read
        tail = -self.t_q % rows
        nonempty = end > start
        lowest = torch.nn.functional.pad(torch.where(nonempty, start, self.t_k), (0, tail), value=self.t_k)
        highest = torch.nn.functional.pad(torch.where(nonempty, end, 0), (0, tail), value=0)
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
        unused = self.q  # a pointer that is never read
        mask = None if self.mask is None else self.mask.expand(self.batch, self.h, self.t_q, self.t_k)
        counts = None if self.counts is None else self.counts.expand(self.batch, self.h, self.t_q)
        return {
            "Start": self.start_pointer,
            "End": self.end_pointer,
            "Mask": unused if mask is None else mask.view(torch.uint8),
            "Counts": unused if counts is None else counts,
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
            "POWER": self.power_code,
            "OFFSET": self.power.offset,
            "LOG_MODE": log_mode(self.precise, self.power_code, self.q.dtype),
            "HAS_POWER_ROWS": self.has_power_rows,
            "D": self.d,
            "DV": self.dv,
            "BD": padded(self.d),
            "BDV": padded(self.dv),
            "PRECISE": self.precise,
        }
