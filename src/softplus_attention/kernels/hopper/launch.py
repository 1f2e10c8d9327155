"""Launches of the Hopper kernels, and what they are for: most of half precision on compute capability 9.0.

The kernels are imported where they are first used: Gluon is a part of Triton whose interface still moves.
"""

from __future__ import annotations

import math
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any

import torch
import triton
from torch import Tensor

from softplus_attention.kernels.launch_cache import Scratch, addresses_of, current_stream, kinds, launch
from softplus_attention.kernels.triton.common import AGAIN_PROGRAMS, INVERSE_BITS, ROW_BLOCK

if TYPE_CHECKING:
    from softplus_attention.kernels.triton.launch import Kept, Problem

ROWS: int = ROW_BLOCK.value  # of a program, and the keys of a tile
AGAIN: int = AGAIN_PROGRAMS.value
WARPS = 4  # Triton's default: given by position it sets no option
WIDTHS = (64, 128)
HALVES = (torch.bfloat16, torch.float16)
TRITON_VERSIONS = ("3.6.", "3.7.")  # those the kernels were compiled with
# By width: keys of a tile and registers of a thread, or rows of a tile.
FORWARD_TILES = {64: (64, 168), 128: (64, None)}
DQ_TILES = {64: (64, None), 128: (32, None)}
DKV_ROWS = {64: 64, 128: 32}
MOST_KEYS_WITH_RANGES = 1 << 24  # that a float32 can count
LARGEST_STRIDE = 1 << 24  # between tokens: offsets inside a tile are 32 bits
LARGEST_STRIDE_OF_HEADS = 1 << 39  # and of sequences: a descriptor has 40 bits for the bytes
MOST_OF_A_GRID = 65535  # programs along its second and third axis
NEARBY = 12 << 20  # bytes: what programs that run at one time read more than once is to stay in the second-level cache


@cache
def available(device: torch.device) -> bool:
    return device.type == "cuda" and unavailable(torch.cuda.get_device_capability(device)) is None


def unavailable(capability: tuple[int, int]) -> str | None:
    """What keeps these kernels from a device of that compute capability, in words; None where nothing does."""
    if torch.version.hip is not None or capability != (9, 0):
        return f"compute capability is {capability[0]}.{capability[1]}, not 9.0 of CUDA"
    if not triton.__version__.startswith(TRITON_VERSIONS):
        return f"triton is {triton.__version__}, not {' or '.join(x.rstrip('.') for x in TRITON_VERSIONS)}"
    return None


def unfit(width: int, length: int, dtype: torch.dtype) -> str | None:
    """Why a shape and dtype cannot use these kernels, or None: what ``fits`` asks before it looks at tensors."""
    if dtype not in HALVES:
        return f"{str(dtype).removeprefix('torch.')} is not half precision"
    if width not in WIDTHS:
        return f"heads are {width} wide, not {' or '.join(map(str, WIDTHS))}"
    return None if length > 1 else "there is one row or key"


def copyable(x: Tensor) -> bool:
    """Whether a descriptor can have it, and threads can write its rows 16 bytes at a time."""
    batch, head, token, _ = x.stride()
    aligned = x.data_ptr() % 16 == 0 and (batch | head | token) % 16 == 0
    return aligned and token < LARGEST_STRIDE and max(batch, head) < LARGEST_STRIDE_OF_HEADS


def fits(problem: Problem, *others: Tensor) -> bool:
    """Half precision, no mask, the offset, heads of 64 or 128; not one row or key, which is a constant to Triton and
    has binaries of its own."""
    return (
        unfit(problem.d, min(problem.t_q, problem.t_k), problem.q.dtype) is None
        and blocks_of(max(problem.t_q, problem.t_k)) <= MOST_OF_A_GRID
        and problem.batch * problem.h**2 < 1 << INVERSE_BITS.value
        and problem.d == problem.dv
        and problem.offset
        and problem.mask is None
        and (problem.start is None or problem.t_k <= MOST_KEYS_WITH_RANGES)
        and available(problem.q.device)
        and all(copyable(x) for x in (problem.q, problem.k, problem.v, *others))
    )


def aligned(count: int) -> int:
    """As many int32 or a few more, so that what follows them begins at a multiple of 16 bytes."""
    return (count + 3) // 4 * 4


def blocks_of(length: int) -> int:
    return (length + ROWS - 1) // ROWS  # in plain Python: Triton's own takes microseconds


@lru_cache(4096)
def heads_together(heads: int, size: float) -> int:
    """How many heads, each of which reads ``size`` bytes, come to NEARBY: of the numbers that divide ``heads`` the one
    next to it."""
    low = -(-heads // MOST_OF_A_GRID)
    pairs = [(n, heads // n) for n in range(1, math.isqrt(heads) + 1) if heads % n == 0]
    return min((n for pair in pairs for n in pair if n >= low), key=lambda n: abs(math.log(n * size / NEARBY)))


def grid_of(length: int, heads: int, size: float) -> tuple[int, int, int]:
    """Programs for the blocks of a length in each of ``heads``: of some heads together, from the longest blocks to the
    shortest, and then of the next.

    Programs start in this order, those along the first axis one after the other. Head by head, the last head's longest
    block would start when all else is nearly done, and multiprocessors would wait for it.
    """
    together = heads_together(heads, size)
    return together, blocks_of(length), heads // together


def inverse_of(heads: int) -> int:
    """n * inverse >> INVERSE_BITS is n // heads, as long as n * heads is below 1 << INVERSE_BITS."""
    return (1 << INVERSE_BITS.value) // heads + 1


def launch_twice(
    kernel: Any,
    again: Any,
    grid: tuple[int, int, int],
    tiled: tuple[tuple[Tensor, int], ...],
    tensors: tuple[Tensor, ...],
    numbers: tuple[Any, ...],
    constants: tuple[tuple[Any, ...], tuple[Any, ...]],
    registers: int | None = None,
) -> None:
    """``kernel``, and ``again`` for the few blocks that it has left to a second look, each with its constants.

    Of the tensors that come first ``kernel`` copies tiles, of so many rows, and takes descriptors in their place.
    """
    from softplus_attention.kernels.hopper.tiles import Tiles

    device, both = tensors[0].device, (*[x for x, _ in tiled], *tensors)
    addresses = addresses_of(both)
    stream, alike = current_stream(device), kinds(both, addresses, numbers)
    tiles = tuple([Tiles(x, rows) for x, rows in tiled])
    key = None if alike is None else (kernel.__name__, device, constants[0], alike)
    arguments, others = (*numbers, *constants[0], WARPS), addresses[len(tiles) :]
    launch(kernel, grid, tensors, arguments, {"maxnreg": registers}, key, stream, others, tiles)
    key = None if alike is None else (again.__name__, device, constants[1], alike)
    grid = (min(math.prod(grid), AGAIN), 1, 1)
    launch(again, grid, both, (*numbers, *constants[1], WARPS), {}, key, stream, addresses)


def sight(problem: Problem) -> tuple[bool, bool, bool, int]:
    """CAUSAL, HAS_WINDOW, HAS_RANGES and POWER, with which the constants of every kernel begin."""
    return problem.is_causal, problem.window is not None, problem.start is not None, problem.code


def bytes_of_keys(problem: Problem) -> float:
    """And of values, for each head of queries."""
    return 2 * problem.t_k * problem.d * problem.q.element_size() / problem.shared


def bytes_of_rows(problem: Problem) -> float:
    """Queries and gradients of outputs, for each head of keys."""
    return 2 * problem.t_q * problem.d * problem.q.element_size() * problem.shared


def forward(problem: Problem, kept: Kept) -> Scratch:
    """As ``triton.launch.forward``."""
    from softplus_attention.kernels.hopper.forward import gluon_forward_kernel
    from softplus_attention.kernels.hopper.forward_fallback import gluon_forward_again_kernel

    out, rest, stats, flat, norms = kept
    keys, registers = FORWARD_TILES[problem.d]
    grid = grid_of(problem.t_q, problem.batch * problem.h, bytes_of_keys(problem))
    again = flat[-1 - math.prod(grid) :]
    tiled = ((problem.q, ROWS), (problem.k, keys), (problem.v, keys))
    tensors = (
        out, rest, norms, *stats.unbind(), flat, again, problem.start_pointer, problem.end_pointer,
        problem.power_pointer,
    )  # fmt: skip
    numbers = (
        problem.t_q, problem.t_k, problem.shared, problem.h_kv, inverse_of(problem.h), problem.window or 0,
        problem.score_scale, problem.growth, problem.q.stride()[:3], problem.k.stride()[:3], problem.v.stride()[:3],
        out.stride()[:3], problem.range_stride, problem.power_strides,
    )  # fmt: skip
    constants = (*sight(problem), problem.power_rows is not None, rest.numel() > 0, problem.d, keys)
    both = (constants, constants)
    launch_twice(gluon_forward_kernel, gluon_forward_again_kernel, grid, tiled, tensors, numbers, both, registers)
    return Scratch()


def backward(
    problem: Problem,
    grad_out: Tensor,
    kept: Kept,
    grads: tuple[Tensor, Tensor, Tensor],
    grad_power: Tensor | None,
) -> Scratch:
    """As ``triton.launch.backward``."""
    from softplus_attention.kernels.hopper.backward import terms_of_a_row

    dq, dk, dv = grads
    count = problem.batch * problem.h * blocks_of(problem.t_q) * ROWS
    rows = kept.stats.new_empty(terms_of_a_row(problem.code, problem.start is not None) * count)
    # ``Again`` of the kernels: how many blocks need a second look, none yet, and room for which.
    of_queries = aligned(1 + count // ROWS)
    again = kept.flat.new_zeros(of_queries + 1 + problem.batch * problem.h_kv * blocks_of(problem.t_k))
    backward_of_queries(problem, grad_out, kept, dq, grad_power, rows, again)
    backward_of_keys(problem, grad_out, kept, rows, dk, dv, again[of_queries:])
    return Scratch((rows,), (again,))


def backward_of_queries(
    problem: Problem,
    grad_out: Tensor,
    kept: Kept,
    dq: Tensor,
    grad_power: Tensor | None,
    rows: Tensor,
    again: Tensor,
) -> None:
    """Fills ``dq``, ``grad_power`` where asked, and ``rows``, the terms of each row that the keys' gradients need."""
    from softplus_attention.kernels.hopper.dq import gluon_dq_kernel

    out, rest, stats, _, norms = kept
    keys, registers = DQ_TILES[problem.d]
    grid = grid_of(problem.t_q, problem.batch * problem.h, bytes_of_keys(problem))
    tiled = ((problem.q, ROWS), (problem.k, keys), (problem.v, keys), (grad_out, ROWS))
    tensors = (
        out, rest, norms, *stats.unbind(), again, problem.start_pointer, problem.end_pointer, problem.power_pointer, dq,
        stats if grad_power is None else grad_power, rows,
    )  # fmt: skip
    numbers = (
        problem.t_q, problem.t_k, problem.shared, problem.h_kv, inverse_of(problem.h), problem.window or 0,
        problem.score_scale, problem.growth, problem.q.stride()[:3], problem.k.stride()[:3], problem.v.stride()[:3],
        out.stride()[:3], grad_out.stride()[:3], dq.stride()[:3], problem.range_stride, problem.power_strides,
    )  # fmt: skip
    constants = (
        *sight(problem), problem.power_rows is not None, grad_power is not None, problem.d, keys, DKV_ROWS[problem.d],
    )  # fmt: skip
    both = ((*constants, False), (*constants, True))
    launch_twice(gluon_dq_kernel, gluon_dq_kernel, grid, tiled, tensors, numbers, both, registers)


def backward_of_keys(
    problem: Problem, grad_out: Tensor, kept: Kept, rows: Tensor, dk: Tensor, dv: Tensor, again: Tensor
) -> None:
    """Fills ``dk`` and ``dv``."""
    from softplus_attention.kernels.hopper.dkv import gluon_dkv_kernel

    grid = grid_of(problem.t_k, problem.batch * problem.h_kv, bytes_of_rows(problem))
    first_row, last_row = problem.rows_that_see(DKV_ROWS[problem.d], ROWS)
    of_rows = DKV_ROWS[problem.d]
    tiled = ((problem.q, of_rows), (problem.k, ROWS), (problem.v, ROWS), (grad_out, of_rows))
    tensors = (kept.norms, kept.flat, again, rows, first_row, last_row, dk, dv)
    numbers = (
        problem.t_q, problem.t_k, problem.shared, problem.h_kv, inverse_of(problem.h_kv), problem.window or 0,
        problem.q.stride()[:3], problem.k.stride()[:3], problem.v.stride()[:3], grad_out.stride()[:3],
        dk.stride()[:3], dv.stride()[:3], problem.seen_stride(first_row),
    )  # fmt: skip
    constants = (*sight(problem), problem.normalized_keys, problem.d, DKV_ROWS[problem.d])
    both = ((*constants, False), (*constants, True))
    launch_twice(gluon_dkv_kernel, gluon_dkv_kernel, grid, tiled, tensors, numbers, both)
