"""Launches of the Triton kernels: entry points of the ops, block sizes. Nothing here synchronizes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from softplus_attention.kernels.arguments import (
    KernelArguments,
    SavedForBackward,
    blocks_of,
    empty_backward,
    empty_forward,
    flag_count,
    norm_stride,
    padded,
    unit_last_stride,
)
from softplus_attention.kernels.hopper import launch as hopper_launch
from softplus_attention.kernels.launch_cache import (
    Scratch,
    collect_addresses,
    current_device,
    current_stream,
    kinds,
    launch,
    replay,
    replay_key,
)
from softplus_attention.kernels.triton import backward as bwd
from softplus_attention.kernels.triton import forward as fwd

POWER_ROWS = 7  # index in the options


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


# The block sizes below are the fastest of those measured on an H200 (docs/dev/kernels-log.md). They depend only on the
# head dimension, so no length needs a recompilation.

# One shape for float32, so that all kernels round products in the same way: the scores that the backward recomputes
# must match the forward's sums, since a power of 15 would amplify the difference.
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


def attention_forward(q: Tensor, k: Tensor, v: Tensor, *options: Any, direct: bool = False) -> SavedForBackward:
    """``triton_forward`` of ``ops``; ``direct`` calls do not come through the dispatcher."""
    saved = empty_forward(q, k, v, options[-1])

    def launch_all() -> Scratch | None:
        call = KernelArguments.from_schema(q, k, v, *options[:-1])
        key_norms(call, saved.norms, saved.equal_score_flags)
        return forward(call, saved)

    if saved.out.numel() and k.shape[2]:
        powers = options[POWER_ROWS]
        key = replay_key("forward", (q, k, v), powers, options) if direct else None
        with current_device(q):
            replay(key, (q, k, v, *saved, *(() if powers is None else (powers,))), launch_all)
    else:
        for x in (saved.out, saved.out_residual, saved.equal_score_flags):
            x.zero_()
    return saved


def attention_backward(
    grad_out: Tensor,
    out: Tensor,
    out_residual: Tensor,
    stats: Tensor,
    equal_score_flags: Tensor,
    norms: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *options: Any,
    direct: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``triton_backward`` of ``ops``."""
    powers = options[POWER_ROWS]
    saved = SavedForBackward(out, out_residual, stats, equal_score_flags, norms)
    dq, dk, dv, d_power = empty_backward(stats, q, k, v, powers)

    def launch_all() -> Scratch | None:
        call = KernelArguments.from_schema(q, k, v, *options)
        return backward(call, grad_out, saved, (dq, dk, dv), None if powers is None else d_power)

    if out.numel() and k.shape[2]:
        key = replay_key("backward", (grad_out, q, k, v, out), powers, options, saved[1:]) if direct else None
        with current_device(q):
            of_powers = () if powers is None else (powers, d_power)
            replay(key, (grad_out, q, k, v, *saved, dq, dk, dv, *of_powers), launch_all)
    else:
        for x in (dq, dk, dv, d_power):
            x.zero_()
    return dq, dk, dv, d_power


def key_norms(call: KernelArguments, norms: Tensor, equal_score_flags: Tensor) -> None:
    """Fills ``norms`` (B, H_kv, norm_stride) with 1 / ||k||, and clears ``equal_score_flags``."""
    k, block = call.k, 64
    grid = (norm_stride(call.t_k) // block * call.batch * call.h_kv, 1, 1)
    numbers = (call.t_k, call.h_kv, k.stride()[:3], flag_count(call.batch, call.h) + 1)
    by_token = k.stride(1) < k.stride(2)
    constants = (call.normalized_keys, by_token, call.d, padded(call.d), block)
    tensors = (k, norms, equal_score_flags)
    addresses = collect_addresses(tensors)
    alike = kinds(tensors, addresses, numbers)
    key = None if alike is None else ("key norms", k.device, constants, alike)
    arguments = (*numbers, *constants)
    launch(fwd.key_norms_kernel, grid, tensors, arguments, {}, key, current_stream(k.device), addresses)


def forward(call: KernelArguments, saved: SavedForBackward) -> Scratch | None:
    """Fills ``saved``, given the norms of ``key_norms``. Returns the scratch memory for ``launch_cache.replay``; None
    if the call cannot be replayed."""
    if hopper_launch.fits(call, saved.out):
        return hopper_launch.forward(call, saved)
    out, residual, stats, flags, norms = saved
    blocks = forward_blocks(call.width, call.precise, call.power.sharpen)
    fwd.forward_kernel[(blocks_of(call.t_q, blocks.rows) * call.batch * call.h,)](
        Q=call.q, K=call.k, V=call.v, Out=out, Residual=residual, Norms=norms, Total=stats[0], Height=stats[1],
        Weight=stats[2], Flat=flags, HAS_REST=residual.numel() > 0, score_scale=call.score_scale,
        out_strides=out.stride()[:3],
        **call.shared_arguments(), **blocks.options(),
    )  # fmt: skip
    return None


def backward(
    call: KernelArguments,
    grad_out: Tensor,
    saved: SavedForBackward,
    grads: tuple[Tensor, Tensor, Tensor],
    grad_power: Tensor | None,
) -> Scratch | None:
    """Fills ``grads`` of q, k, v and, if given, ``grad_power`` (B, H, T_q). Returns the same as ``forward``."""
    dq, dk, dv = grads
    grad_out = unit_last_stride(grad_out)
    if hopper_launch.fits(call, saved.out, grad_out, *grads):
        return hopper_launch.backward(call, grad_out, saved, grads, grad_power)
    out, residual, stats, flags, norms = saved
    shared = call.shared_arguments()
    n_rows = call.batch * call.h * call.t_q
    rows = stats.new_empty(8 if call.precise else 6, n_rows)

    blocks = dq_blocks(call.width, call.precise)
    bwd.dq_kernel[(blocks_of(call.t_q, blocks.rows) * call.batch * call.h,)](
        Q=call.q, K=call.k, V=call.v, Out=out, Residual=residual, GradOut=grad_out, Norms=norms, Total=stats[0],
        Height=stats[1], Weight=stats[2], Flat=flags, HAS_REST=residual.numel() > 0, GradQ=dq,
        GradPower=stats if grad_power is None else grad_power, POWER_GRAD=grad_power is not None, Rows=rows,
        n_rows=n_rows, score_scale=call.score_scale,
        out_strides=out.stride()[:3], grad_out_strides=grad_out.stride()[:3], dq_strides=dq.stride()[:3],
        **shared, **blocks.options(),
    )  # fmt: skip

    blocks = dkv_blocks(call.width, call.precise)
    first_row, last_row = call.rows_that_see(blocks.rows, blocks.keys)
    bwd.dkv_kernel[(blocks_of(call.t_k, blocks.keys) * call.batch * call.h_kv,)](
        Q=call.q, K=call.k, V=call.v, GradOut=grad_out, Norms=norms, Flat=flags, Rows=rows,
        FirstRow=first_row, LastRow=last_row, GradK=dk, GradV=dv, n_rows=n_rows,
        grad_out_strides=grad_out.stride()[:3], dk_strides=dk.stride()[:3], dv_strides=dv.stride()[:3],
        seen_stride=call.seen_stride(first_row), NORMALIZED_KEYS=call.normalized_keys,
        **shared, **blocks.options(),
    )  # fmt: skip
    return None
