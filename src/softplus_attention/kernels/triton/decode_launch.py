"""Launches of the decode kernels. A step is short and runs once per layer and token, so host time counts too."""

from __future__ import annotations

from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from softplus_attention.kernels.arguments import (
    blocks_of,
    empty_output,
    log_mode,
    padded,
    power_code,
    unit_last_stride,
)
from softplus_attention.kernels.launch_cache import all_aligned, current_device, current_stream, launch
from softplus_attention.kernels.triton import decode as kernels
from softplus_attention.power import PowerRecord

# Measured on an H200 (docs/dev/kernels-log.md). A multiprocessor runs 3 programs of scores_kernel at a time, and 6 of
# values_kernel (heads of 128, few rows): 12 are whole waves of both.
PROGRAMS_PER_MULTIPROCESSOR = 12
PROGRAMS_AT_A_TIME = 3
# With fewer tiles than this for a program there are half as many programs: else their fixed costs would dominate.
FEW_TILES = 8
MAX_SPLITS = 256
MAX_ON_AXIS = 65_535  # CUDA's limit of a grid's second axis
SCRATCH_UNIT: int = kernels.SCRATCH_UNIT.value
VECTOR_NUMBERS = 1024  # per program of unit_kernel
# Keys with N * w / W below this add less than the output's dtype can represent.
NEGLIGIBLE = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-14, torch.float16: 2.0**-14}


class Plan(NamedTuple):
    """Grid, sizes and compile-time ``constants``, which follow from shapes alone."""

    grid: tuple[int, int, int]
    rows: int
    splits: int
    f_stride: int
    f_units: int
    partial_units: int
    scratch: int
    heavy: bool
    precise: bool
    constants: tuple[int, ...]  # BD, BDV, BR, BM, BN


@lru_cache(maxsize=4096)
def plan_for(
    batch: int, h: int, h_kv: int, t_q: int, t_max: int, d: int, dv: int, precise: bool, device: torch.device
) -> Plan:
    rows = h // h_kv * t_q
    bd, bdv = padded(d), padded(dv)
    width = max(bd, bdv)
    bm, bn = rows_and_keys(rows, width, precise)
    row_blocks = blocks_of(rows, bm)
    tiles = blocks_of(t_max, bn)
    splits = splits_for(tiles, batch * h_kv * row_blocks, device)
    f_stride = tiles * bn  # whole tiles, so that rows of the scratch are aligned for any t_max
    f_units = blocks_of(batch * h_kv * rows * f_stride, SCRATCH_UNIT)
    partials = batch * h_kv * rows * splits
    partial_units = blocks_of(partials, SCRATCH_UNIT)
    scratch = (f_units + 3 * partial_units) * SCRATCH_UNIT + partials * dv
    # Block sizes as measured on an H200 (docs/dev/kernels-log.md); a heavy tile needs the registers of more threads.
    heavy = precise or bm * width >= 32 * 128
    grid = (splits, batch * h_kv, row_blocks)
    constants = (bd, bdv, min(bm, 1 << (rows - 1).bit_length()), bm, bn)
    return Plan(grid, rows, splits, f_stride, f_units, partial_units, scratch, heavy, precise, constants)


def rows_and_keys(rows: int, width: int, precise: bool) -> tuple[int, int]:
    """BM, BN: a matrix product needs at least 16 rows; registers limit their number."""
    narrow = width <= 128
    most_rows = (32 if narrow else 16) if precise else (64 if narrow else 32)
    return min(most_rows, padded(rows)), 64 if narrow and not precise else 32


@cache
def multiprocessors(index: int | None) -> int:
    return 132 if index is None else torch.cuda.get_device_properties(index).multi_processor_count


def splits_for(tiles: int, programs: int, device: torch.device) -> int:
    """The number of splits of the keys, from shapes alone; each split has ``programs`` programs."""
    count = multiprocessors(device.index if device.type == "cuda" else None)
    wanted = PROGRAMS_PER_MULTIPROCESSOR * count
    splits = whole_waves(wanted, programs, count)
    if tiles < FEW_TILES * splits:
        splits = whole_waves(wanted // 2, programs, count)
    return min(splits, tiles)


def whole_waves(wanted: int, programs: int, count: int) -> int:
    """Of two numbers of splits the one with fewer waves per split: a few programs too many take a wave of their own."""
    fewer = max(1, wanted // programs)
    splits = min((fewer, fewer + 1), key=lambda x: blocks_of(programs * x, PROGRAMS_AT_A_TIME * count) / x)
    return min(splits, MAX_SPLITS)


def decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cache_seqlens: Tensor | None,
    cache_starts: Tensor | None,
    window: int | None,
    power: PowerRecord,
    score_scale: float,
    normalized_keys: bool,
) -> Tensor:
    """``softplus_attention_decode`` without gradients; without ``cache_seqlens`` the whole cache is visible.

    Nothing here synchronizes.
    """
    out = empty_output(q, v_cache)
    batch, h, t_q, d = q.shape
    h_kv, t_max, dv = k_cache.shape[1], k_cache.shape[2], v_cache.shape[3]
    if not out.numel() or not t_max:
        return out.zero_()
    if batch * h_kv > MAX_ON_AXIS:
        most = MAX_ON_AXIS // h_kv
        for rows in (slice(first, first + most) for first in range(0, batch, most)):
            lengths, starts = (None if x is None else x[rows] for x in (cache_seqlens, cache_starts))
            sliced = power if power.rows is None else power._replace(rows=power.rows.expand(batch, h, t_q)[rows])
            caches = (k_cache[rows], v_cache[rows], lengths, starts, window)
            out[rows] = decode(q[rows], *caches, sliced, score_scale, normalized_keys)
        return out
    q, k, v = unit_last_stride(q), unit_last_stride(k_cache), unit_last_stride(v_cache)
    dtype, device = q.dtype, q.device
    plan = plan_for(batch, h, h_kv, t_q, t_max, d, dv, dtype == torch.float32, device)
    scratch = torch.empty(plan.scratch, dtype=torch.float32, device=device)
    # In place of missing tensors: pointers that are never read.
    lengths = scratch if cache_seqlens is None else cache_seqlens.contiguous()
    starts = scratch if cache_starts is None else cache_starts.contiguous()
    powers = scratch if power.rows is None else power.rows.expand(batch, h, t_q)
    power_strides = (0, 0, 0) if power.rows is None else powers.stride()
    q_strides, k_strides, v_strides = q.stride()[:3], k.stride()[:3], v.stride()[:3]
    out_strides = out.stride()[:3]

    code = power_code(power)
    visible = (cache_seqlens is not None, cache_starts is not None, window is not None)
    bd, bdv, br, bm, bn = plan.constants
    precise, heavy = plan.precise, plan.heavy
    numbers = (plan.rows, t_q, t_max, h_kv, plan.splits, min(window or 0, t_max), plan.f_units, plan.partial_units)
    fine = log_mode(precise, code, dtype)
    # Measured on an H200 (docs/dev/kernels-log.md): square raw keys by a product, with as few registers as it allows.
    by_product = bd >= 64 and not normalized_keys
    few_registers = {"maxnreg": 128} if by_product and bd == 128 and not heavy else {}

    key: tuple[Any, ...] | None = None
    if all_aligned((q, k, v, lengths, starts, powers), (*q_strides, *k_strides, *v_strides, *out_strides)):
        dtypes = (dtype, lengths.dtype, starts.dtype, powers.dtype)
        powers_given = (power.rows is not None, power_strides)
        key = (device, dtypes, plan.constants, d, dv, visible, normalized_keys, code, power.offset, powers_given, heavy)
    with current_device(q):
        stream = current_stream(device)
        launch(
            kernels.scores_kernel, plan.grid, (q, k, scratch, lengths, starts), (
                *numbers, score_scale, q_strides, k_strides, plan.f_stride, *visible, normalized_keys,
                dtype != torch.float16, precise, fine, d, bd, bm, bn, 3 if heavy else 4, by_product,
            ),
            {"num_warps": 8 if heavy else 4, **few_registers}, key and ("scores", *key), stream,
        )  # fmt: skip
        lift = 4096.0 if dtype == torch.float16 else 1.0
        launch(
            kernels.values_kernel, plan.grid, (v, scratch, lengths, starts, powers), (
                *numbers, NEGLIGIBLE[dtype], power.growth, v_strides, power_strides, plan.f_stride, *visible, code,
                power.rows is not None, power.offset, dv, bdv, br, bm, bn, 64, lift, 3, fine,
            ),
            {"num_warps": 8} if heavy else {"num_warps": 2, "maxnreg": 168}, key and ("values", *key), stream,
        )  # fmt: skip
        launch(
            kernels.combine_kernel, (batch * h_kv * plan.rows, 1, 1), (scratch, out), (
                plan.rows, t_q, h_kv, plan.splits, plan.f_units, plan.partial_units, out_strides, dv, bdv, 32,
            ),
            {"num_warps": 4}, key and ("sums", *key), stream,
        )  # fmt: skip
    return out


def unit_vectors(x: Tensor) -> Tensor:
    """x / ||x|| along the last dimension of (B, H, T, D), in x's dtype, zero for a zero vector: no gradient."""
    x = unit_last_stride(x)
    out = torch.empty_like(x)
    batch, heads, t, d = x.shape
    rows, width = batch * heads * t, padded(d)
    if not rows:
        return out
    per_program = max(1, VECTOR_NUMBERS // width)
    strides, out_strides = x.stride()[:3], out.stride()[:3]
    key: tuple[Any, ...] | None = None
    if all_aligned((x, out), (*strides, *out_strides)):
        key = ("unit", x.device, x.dtype, d)
    with current_device(x):
        launch(
            kernels.unit_kernel, (blocks_of(rows, per_program), 1, 1), (x, out),
            (rows, heads, t, strides, out_strides, d, width, per_program), {"num_warps": 4}, key,
            current_stream(x.device),
        )  # fmt: skip
    return out
