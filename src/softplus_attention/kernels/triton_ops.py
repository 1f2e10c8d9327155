"""The Triton kernels as PyTorch knows them: schemas, shapes for tracing, and autograd."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from functools import partial
from typing import Any

import torch
from torch import Tensor

from softplus_attention.kernels.launch_cache import Scratch, current_device, key_of, replay
from softplus_attention.kernels.onlookers import traced_backward
from softplus_attention.kernels.ops import no_double_backward
from softplus_attention.kernels.triton import launch as triton_launch

_library = torch.library.Library("softplus_attention", "FRAGMENT")

_OPTIONS = (
    "Tensor? start, Tensor? end, Tensor? mask, bool is_causal, int? window, bool sharpen, float power, "
    "Tensor? power_rows, float[]? power_by_length, bool offset, float score_scale, bool normalized_keys"
)
# The inputs of the forward, whose last is `for_backward`, by their places; options begin after q, k and v.
_PROBLEM = [field.name for field in fields(triton_launch.Problem)]
_TENSORS = [_PROBLEM.index(name) for name in ("q", "k", "v", "start", "end", "mask", "power_rows")]
_POWER_ROWS = _PROBLEM.index("power_rows")
_library.define(
    f"triton_forward(Tensor q, Tensor k, Tensor v, {_OPTIONS}, bool for_backward) "
    "-> (Tensor out, Tensor rest, Tensor stats, Tensor flat, Tensor norms)"
)
_library.define(
    "triton_backward(Tensor grad_out, Tensor out, Tensor rest, Tensor stats, Tensor flat, Tensor norms, "
    f"Tensor q, Tensor k, Tensor v, {_OPTIONS}) -> (Tensor dq, Tensor dk, Tensor dv, Tensor d_power)"
)


def _forward_shapes(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    batch, heads, t_q, _ = q.shape
    if q.stride(1) < q.stride(2):  # a (B, T, H, D) tensor seen as (B, H, T, D): the output keeps that order
        out = q.new_empty(batch, t_q, heads, v.shape[3]).transpose(1, 2)
    else:
        out = q.new_empty(batch, heads, t_q, v.shape[3])
    for_backward = options[-1] and q.dtype != torch.float32
    return (
        out,
        torch.empty_like(out) if for_backward else q.new_empty(0),
        q.new_empty(3, batch, heads, t_q, dtype=torch.float32),
        q.new_empty(triton_launch.flat_size(batch, heads, t_q), dtype=torch.int32),
        q.new_empty(*k.shape[:2], triton_launch.norm_stride(k.shape[2]), dtype=torch.float32),
    )


def _triton_forward(
    q: Tensor, k: Tensor, v: Tensor, *options: Any, eagerly: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    kept = triton_launch.Kept(*_forward_shapes(q, k, v, *options))

    def launch_all() -> Scratch | None:
        problem = triton_launch.Problem(q, k, v, *options[:-1])
        triton_launch.key_norms(problem, kept.norms, kept.flat)
        return triton_launch.forward(problem, kept)

    if kept.out.numel() and k.shape[2]:
        powers = options[_POWER_ROWS - 3]
        key = key_of("forward", (q, k, v), powers, options) if eagerly else None
        with current_device(q):
            tensors = (q, k, v, *kept, *(() if powers is None else (powers,)))
            replay(key, tensors, launch_all)
    else:
        for x in (kept.out, kept.rest, kept.flat):
            x.zero_()
    return kept.out, kept.rest, kept.stats, kept.flat, kept.norms


def _backward_shapes(
    grad_out: Tensor,
    out: Tensor,
    rest: Tensor,
    stats: Tensor,
    flat: Tensor,
    norms: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *options: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    wants_power = options[_POWER_ROWS - 3] is not None
    d_power = stats.new_empty(stats.shape[1:] if wants_power else (0,))
    dq, dk, dv = (torch.empty_like(triton_launch.unit_last_stride(x)) for x in (q, k, v))
    return dq, dk, dv, d_power


def _triton_backward(
    grad_out: Tensor,
    out: Tensor,
    rest: Tensor,
    stats: Tensor,
    flat: Tensor,
    norms: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *options: Any,
    eagerly: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dq, dk, dv, d_power = _backward_shapes(grad_out, out, rest, stats, flat, norms, q, k, v, *options)
    kept = triton_launch.Kept(out, rest, stats, flat, norms)

    powers = options[_POWER_ROWS - 3]

    def launch_all() -> Scratch | None:
        problem = triton_launch.Problem(q, k, v, *options)
        return triton_launch.backward(problem, grad_out, kept, (dq, dk, dv), None if powers is None else d_power)

    if out.numel() and k.shape[2]:
        others = (rest, stats, flat, norms)
        key = key_of("backward", (grad_out, q, k, v, out), powers, options, others) if eagerly else None
        with current_device(q):
            of_powers = () if powers is None else (powers, d_power)
            tensors = (grad_out, q, k, v, *kept, dq, dk, dv, *of_powers)
            replay(key, tensors, launch_all)
    else:
        for x in (dq, dk, dv, d_power):
            x.zero_()
    return dq, dk, dv, d_power


for _key in ("CUDA", "CPU"):  # CPU tensors run in Triton's interpreter
    _library.impl("triton_forward", _triton_forward, _key)
    _library.impl("triton_backward", _triton_backward, _key)
torch.library.register_fake("softplus_attention::triton_forward", _forward_shapes, lib=_library)
torch.library.register_fake("softplus_attention::triton_backward", _backward_shapes, lib=_library)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    # Autograd keeps the tensors, and sees where one was changed since.
    ctx.save_for_backward(*(inputs[place] for place in _TENSORS), *output)
    ctx.set_materialize_grads(False)
    ctx.others = [None if place in _TENSORS else x for place, x in enumerate(inputs[: len(_PROBLEM)])]


def _grad(ctx: Any, grad_out: Tensor | None, *_others: Tensor | None) -> tuple[Any, ...]:
    return _grad_by(torch.ops.softplus_attention.triton_backward, ctx, grad_out)


def _grad_by(backward: Callable[..., Any], ctx: Any, grad_out: Tensor | None) -> tuple[Any, ...]:
    d_inputs: list[Tensor | None] = [None] * (len(_PROBLEM) + 1)  # and for_backward
    if grad_out is not None:
        saved, problem = ctx.saved_tensors, list(ctx.others)
        for place, x in zip(_TENSORS, saved, strict=False):
            problem[place] = x
        *d_inputs[:3], d_power = backward(grad_out, *saved[len(_TENSORS) :], *problem)
        power_rows = problem[_POWER_ROWS]
        if power_rows is not None and ctx.needs_input_grad[_POWER_ROWS]:
            d_inputs[_POWER_ROWS] = d_power.sum_to_size(power_rows.shape).to(power_rows.dtype)
    return tuple(d_inputs)


class EagerTriton(torch.autograd.Function):
    """The op where nothing but the caller has to see it: the same without the dispatcher, which takes Python long
    (docs/dev/kernels-log.md has the times)."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        output = _triton_forward(*inputs, eagerly=True)
        _save(ctx, inputs, output)
        return output[0]

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None) -> tuple[Any, ...]:  # type: ignore[override]
        by_op = grad_out is not None and traced_backward(grad_out)
        return _grad(ctx, grad_out) if by_op else _grad_by(partial(_triton_backward, eagerly=True), ctx, grad_out)


def eager(*inputs: Any) -> Tensor:
    """The output of ``triton.forward`` for plain tensors."""
    return EagerTriton.apply(*inputs) if inputs[-1] else _triton_forward(*inputs, eagerly=True)[0]


torch.library.register_autograd("softplus_attention::triton_forward", _grad, setup_context=_save, lib=_library)
torch.library.register_autograd("softplus_attention::triton_backward", no_double_backward, lib=_library)
