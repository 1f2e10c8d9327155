"""Launches of the Hopper kernels, and which calls they support: most of half precision on compute capability 9.0.

The kernels are imported on first use, since Gluon's interface still changes between Triton versions.
"""

from __future__ import annotations

import math
from functools import cache, lru_cache
from typing import Any

import torch
import triton
from torch import Tensor

from softplus_attention.kernels.arguments import (
    FALLBACK_PROGRAMS,
    INVERSE_BITS,
    KernelArguments,
    SavedForBackward,
    aligned,
)
from softplus_attention.kernels.arguments import ROW_BLOCK as ROWS  # of a program; also the keys of a tile
from softplus_attention.kernels.launch_cache import Scratch, collect_addresses, current_stream, kinds, launch

WARPS = 4  # Triton's default, passed by position as num_warps
WIDTHS = (64, 128)
HALVES = (torch.bfloat16, torch.float16)
TRITON_VERSIONS = ("3.6.", "3.7.")  # with which the kernels were tested
# By width: keys per tile and registers per thread, or rows per tile.
FORWARD_TILES = {64: (64, 168), 128: (64, None)}
DQ_TILES = {64: (64, None), 128: (32, None)}
DKV_ROWS = {64: 64, 128: 32}
MAX_KEYS_WITH_RANGES = 1 << 24  # float32 represents these integers exactly
LARGEST_STRIDE = 1 << 24  # between tokens: offsets inside a tile have 32 bits
LARGEST_STRIDE_OF_HEADS = 1 << 39  # and of sequences: a descriptor has 40 bits for the bytes
MAX_GRID = 65535  # programs along the second and third axis of a grid
NEARBY = 12 << 20  # bytes that concurrent programs read repeatedly, which should stay in the L2 cache


@cache
def available(device: torch.device) -> bool:
    return device.type == "cuda" and unsupported_device_reason(torch.cuda.get_device_capability(device)) is None


def unsupported_device_reason(capability: tuple[int, int]) -> str | None:
    """Why a device of that compute capability cannot run these kernels, or None."""
    if torch.version.hip is not None or capability != (9, 0):
        return f"compute capability is {capability[0]}.{capability[1]}, not 9.0 of CUDA"
    if not triton.__version__.startswith(TRITON_VERSIONS):
        return f"triton is {triton.__version__}, not {' or '.join(x.rstrip('.') for x in TRITON_VERSIONS)}"
    return None


def unsupported_shape_reason(width: int, length: int, dtype: torch.dtype) -> str | None:
    """Why a shape and dtype cannot use these kernels, or None."""
    if dtype not in HALVES:
        return f"{str(dtype).removeprefix('torch.')} is not half precision"
    if width not in WIDTHS:
        return f"heads are {width} wide, not {' or '.join(map(str, WIDTHS))}"
    return None if length > 1 else "there is one row or key"


def copyable(x: Tensor) -> bool:
    """Whether a descriptor can represent x, and threads can write its rows 16 bytes at a time."""
    batch, head, token, _ = x.stride()
    aligned = x.data_ptr() % 16 == 0 and (batch | head | token) % 16 == 0
    return aligned and token < LARGEST_STRIDE and max(batch, head) < LARGEST_STRIDE_OF_HEADS


def fits(call: KernelArguments, *others: Tensor) -> bool:
    """Half precision, no mask, with offset, heads of 64 or 128. Not for one row or key: Triton makes a length of 1 a
    constant, which would need separate binaries."""
    return (
        unsupported_shape_reason(call.d, min(call.t_q, call.t_k), call.q.dtype) is None
        and blocks_of(max(call.t_q, call.t_k)) <= MAX_GRID
        and call.batch * call.h**2 < 1 << INVERSE_BITS
        and call.d == call.dv
        and call.power.offset
        and call.mask is None
        and (call.start is None or call.t_k <= MAX_KEYS_WITH_RANGES)
        and available(call.q.device)
        and all(copyable(x) for x in (call.q, call.k, call.v, *others))
    )


def blocks_of(length: int) -> int:
    return (length + ROWS - 1) // ROWS  # in plain Python: Triton's own takes microseconds


@lru_cache(4096)
def heads_together(heads: int, size: float) -> int:
    """The divisor of ``heads`` for which that many heads, each of which reads ``size`` bytes, are nearest to NEARBY."""
    low = -(-heads // MAX_GRID)
    pairs = [(n, heads // n) for n in range(1, math.isqrt(heads) + 1) if heads % n == 0]
    return min((n for pair in pairs for n in pair if n >= low), key=lambda n: abs(math.log(n * size / NEARBY)))


def grid_of(length: int, heads: int, size: float) -> tuple[int, int, int]:
    """The grid over the blocks of a length in each of ``heads``: a group of heads from the longest blocks to the
    shortest, then the next group.

    Programs start in this order, first axis first. Head by head, the longest block of the last head would start when
    everything else is nearly done, and multiprocessors would idle.
    """
    together = heads_together(heads, size)
    return together, blocks_of(length), heads // together


def inverse_of(heads: int) -> int:
    """n * inverse >> INVERSE_BITS is n // heads if n * heads is below 1 << INVERSE_BITS."""
    return (1 << INVERSE_BITS) // heads + 1


def launch_twice(
    kernel: Any,
    fallback: Any,
    grid: tuple[int, int, int],
    tiled: tuple[tuple[Tensor, int], ...],
    tensors: tuple[Tensor, ...],
    numbers: tuple[Any, ...],
    constants: tuple[tuple[Any, ...], tuple[Any, ...]],
    registers: int | None = None,
) -> None:
    """Launches ``kernel``, then ``fallback`` for the few blocks that it has marked, each with its constants.

    ``tiled`` are the first arguments, each with the rows of a tile; ``kernel`` takes descriptors in their place.
    """
    from softplus_attention.kernels.hopper.tiles import Tiles

    device, both = tensors[0].device, (*[x for x, _ in tiled], *tensors)
    addresses = collect_addresses(both)
    stream, alike = current_stream(device), kinds(both, addresses, numbers)
    tiles = tuple([Tiles(x, rows) for x, rows in tiled])
    key = None if alike is None else (kernel.__name__, device, constants[0], alike)
    arguments, others = (*numbers, *constants[0], WARPS), addresses[len(tiles) :]
    launch(kernel, grid, tensors, arguments, {"maxnreg": registers}, key, stream, others, tiles)
    key = None if alike is None else (fallback.__name__, device, constants[1], alike)
    grid = (min(math.prod(grid), FALLBACK_PROGRAMS), 1, 1)
    launch(fallback, grid, both, (*numbers, *constants[1], WARPS), {}, key, stream, addresses)


def mask_constants(call: KernelArguments) -> tuple[bool, bool, bool, int]:
    """CAUSAL, HAS_WINDOW, HAS_RANGES and POWER, the first constants of every kernel."""
    return call.is_causal, call.window is not None, call.start is not None, call.power_code


def bytes_of_keys(call: KernelArguments) -> float:
    """Bytes of keys and values per query head."""
    return 2 * call.t_k * call.d * call.q.element_size() / call.shared


def bytes_of_rows(call: KernelArguments) -> float:
    """Bytes of queries and output gradients per key head."""
    return 2 * call.t_q * call.d * call.q.element_size() * call.shared


def forward(call: KernelArguments, saved: SavedForBackward) -> Scratch:
    """As ``triton.launch.forward``."""
    from softplus_attention.kernels.hopper.forward import gluon_forward_kernel
    from softplus_attention.kernels.hopper.forward_fallback import gluon_forward_again_kernel

    out, residual, stats, flags, norms = saved
    keys, registers = FORWARD_TILES[call.d]
    grid = grid_of(call.t_q, call.batch * call.h, bytes_of_keys(call))
    fallback_blocks = flags[-1 - math.prod(grid) :]
    tiled = ((call.q, ROWS), (call.k, keys), (call.v, keys))
    tensors = (
        out, residual, norms, *stats.unbind(), flags, fallback_blocks, call.start_pointer, call.end_pointer,
        call.power_pointer,
    )  # fmt: skip
    numbers = (
        call.t_q, call.t_k, call.shared, call.h_kv, inverse_of(call.h), call.window or 0,
        call.score_scale, call.growth, call.q.stride()[:3], call.k.stride()[:3], call.v.stride()[:3],
        out.stride()[:3], call.range_stride, call.power_strides,
    )  # fmt: skip
    constants = (*mask_constants(call), call.has_power_rows, residual.numel() > 0, call.d, keys)
    both = (constants, constants)
    launch_twice(gluon_forward_kernel, gluon_forward_again_kernel, grid, tiled, tensors, numbers, both, registers)
    return Scratch()


def backward(
    call: KernelArguments,
    grad_out: Tensor,
    saved: SavedForBackward,
    grads: tuple[Tensor, Tensor, Tensor],
    grad_power: Tensor | None,
) -> Scratch:
    """As ``triton.launch.backward``."""
    from softplus_attention.kernels.hopper.backward import terms_of_a_row

    dq, dk, dv = grads
    count = call.batch * call.h * blocks_of(call.t_q) * ROWS
    rows = saved.stats.new_empty(terms_of_a_row(call.power_code, call.start is not None) * count)
    # ``Fallback`` of both kernels: the number of blocks for the fallback, and room for their indices.
    of_queries = aligned(1 + count // ROWS)
    fallback_blocks = saved.equal_score_flags.new_zeros(of_queries + 1 + call.batch * call.h_kv * blocks_of(call.t_k))
    backward_of_queries(call, grad_out, saved, dq, grad_power, rows, fallback_blocks)
    backward_of_keys(call, grad_out, saved, rows, dk, dv, fallback_blocks[of_queries:])
    return Scratch((rows,), (fallback_blocks,))


def backward_of_queries(
    call: KernelArguments,
    grad_out: Tensor,
    saved: SavedForBackward,
    dq: Tensor,
    grad_power: Tensor | None,
    rows: Tensor,
    fallback_blocks: Tensor,
) -> None:
    """Fills ``dq``, ``grad_power`` if given, and ``rows``, the terms of each row for ``backward_of_keys``."""
    from softplus_attention.kernels.hopper.dq import gluon_dq_kernel

    out, residual, stats, _, norms = saved
    keys, registers = DQ_TILES[call.d]
    grid = grid_of(call.t_q, call.batch * call.h, bytes_of_keys(call))
    tiled = ((call.q, ROWS), (call.k, keys), (call.v, keys), (grad_out, ROWS))
    tensors = (
        out, residual, norms, *stats.unbind(), fallback_blocks, call.start_pointer, call.end_pointer,
        call.power_pointer, dq, stats if grad_power is None else grad_power, rows,
    )  # fmt: skip
    numbers = (
        call.t_q, call.t_k, call.shared, call.h_kv, inverse_of(call.h), call.window or 0,
        call.score_scale, call.growth, call.q.stride()[:3], call.k.stride()[:3], call.v.stride()[:3],
        out.stride()[:3], grad_out.stride()[:3], dq.stride()[:3], call.range_stride, call.power_strides,
    )  # fmt: skip
    constants = (
        *mask_constants(call), call.has_power_rows, grad_power is not None, call.d, keys, DKV_ROWS[call.d],
    )  # fmt: skip
    both = ((*constants, False), (*constants, True))
    launch_twice(gluon_dq_kernel, gluon_dq_kernel, grid, tiled, tensors, numbers, both, registers)


def backward_of_keys(
    call: KernelArguments,
    grad_out: Tensor,
    saved: SavedForBackward,
    rows: Tensor,
    dk: Tensor,
    dv: Tensor,
    fallback_blocks: Tensor,
) -> None:
    """Fills ``dk`` and ``dv``."""
    from softplus_attention.kernels.hopper.dkv import gluon_dkv_kernel

    grid = grid_of(call.t_k, call.batch * call.h_kv, bytes_of_rows(call))
    first_row, last_row = call.rows_that_see(DKV_ROWS[call.d], ROWS)
    of_rows = DKV_ROWS[call.d]
    tiled = ((call.q, of_rows), (call.k, ROWS), (call.v, ROWS), (grad_out, of_rows))
    tensors = (saved.norms, saved.equal_score_flags, fallback_blocks, rows, first_row, last_row, dk, dv)
    numbers = (
        call.t_q, call.t_k, call.shared, call.h_kv, inverse_of(call.h_kv), call.window or 0,
        call.q.stride()[:3], call.k.stride()[:3], call.v.stride()[:3], grad_out.stride()[:3],
        dk.stride()[:3], dv.stride()[:3], call.seen_stride(first_row),
    )  # fmt: skip
    constants = (*mask_constants(call), call.normalized_keys, call.d, DKV_ROWS[call.d])
    both = ((*constants, False), (*constants, True))
    launch_twice(gluon_dkv_kernel, gluon_dkv_kernel, grid, tiled, tensors, numbers, both)
