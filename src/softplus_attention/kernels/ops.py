"""The op as PyTorch knows it: schemas, shapes for tracing, and autograd. Implementations register themselves below."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from softplus_attention.kernels.cpu import chunked
from softplus_attention.power import PowerByLength
from softplus_attention.reference import compute_dtype

_library = torch.library.Library("softplus_attention", "DEF")

# `sharpen` False is LSSA. The power is `power_rows` where given, else base + slope * log(max(N, n0) / n0) for a
# `power_by_length` of (base, slope, n0), else `power`. `offset` False subtracts no 1 before it.
_OPTIONS = (
    "Tensor start, Tensor end, Tensor? mask, bool sharpen, float power, Tensor? power_rows, float[]? power_by_length, "
    "bool offset, float score_scale, bool normalized_keys"
)
_library.define(f"chunked_forward(Tensor q, Tensor k, Tensor v, {_OPTIONS}) -> (Tensor out, Tensor stats)")
_library.define(
    f"chunked_backward(Tensor grad_out, Tensor stats, Tensor q, Tensor k, Tensor v, {_OPTIONS}) "
    "-> (Tensor dq, Tensor dk, Tensor dv, Tensor d_power)"
)

ONCE = (
    "softplus_attention: the gradient of a gradient is not implemented in the fused backward; "
    "use impl='reference' where double backward is needed"
)


class Options(NamedTuple):
    """What the schemas call by these names, in their order."""

    start: Tensor
    end: Tensor
    mask: Tensor | None
    sharpen: bool
    power: float
    power_rows: Tensor | None
    power_by_length: list[float] | None
    offset: bool
    score_scale: float
    normalized_keys: bool

    def problem(self, q: Tensor, k: Tensor, v: Tensor) -> chunked.Problem:
        by_length = None if self.power_by_length is None else PowerByLength(*self.power_by_length)
        sharpening = chunked.Sharpening(self.power, self.power_rows, by_length, self.offset) if self.sharpen else None
        bounds = (self.start, self.end, self.mask)
        return chunked.Problem(q, k, v, *bounds, self.score_scale, self.normalized_keys, sharpening)


_TENSORS = ("start", "end", "mask", "power_rows")
_POWER_ROWS = 3 + Options._fields.index("power_rows")  # its place among the op's inputs, after q, k and v


@torch.library.impl(_library, "chunked_forward", "CPU")
def _chunked_forward(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    out, stats = _forward_shapes(q, k, v)
    if out.numel():
        with torch.autocast("cpu", enabled=False):
            chunked.forward(Options(*options).problem(q, k, v), out, stats)
    return out, stats


@torch.library.impl(_library, "chunked_backward", "CPU")
def _chunked_backward(
    grad_out: Tensor, stats: Tensor, q: Tensor, k: Tensor, v: Tensor, *options: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    chosen = Options(*options)
    if not grad_out.numel():
        d_power = stats.new_empty(0) if chosen.power_rows is None else stats.new_zeros(stats.shape[1:])
        return q.new_zeros(q.shape), k.new_zeros(k.shape), v.new_zeros(v.shape), d_power
    with torch.autocast("cpu", enabled=False):
        problem = chosen.problem(q, k, v)
        dq, dk, dv, dp = chunked.backward(problem, grad_out, stats, k.shape[2], chosen.power_rows is not None)
    dq, dk, dv = (x.reshape(like.shape).to(like.dtype).contiguous() for x, like in ((dq, q), (dk, k), (dv, v)))
    return dq, dk, dv, stats.new_empty(0) if dp is None else dp.reshape(stats.shape[1:])


def _forward_shapes(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    out = q.new_empty(*q.shape[:3], v.shape[3])
    return out, q.new_empty(3, *q.shape[:3], dtype=compute_dtype(q.dtype))


def _forward_fake(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    return _forward_shapes(q, k, v)


def _backward_fake(
    grad_out: Tensor, stats: Tensor, q: Tensor, k: Tensor, v: Tensor, *options: Any
) -> tuple[Tensor, ...]:
    d_power = stats.new_empty(0) if Options(*options).power_rows is None else stats.new_empty(stats.shape[1:])
    return *(x.new_empty(x.shape) for x in (q, k, v)), d_power


torch.library.register_fake("softplus_attention::chunked_forward", _forward_fake, lib=_library)
torch.library.register_fake("softplus_attention::chunked_backward", _backward_fake, lib=_library)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, *options = inputs
    named = Options(*options)._asdict()
    # Autograd keeps the tensors, and sees where one was changed since.
    ctx.save_for_backward(q, k, v, *(named.pop(name) for name in _TENSORS), output[1])
    ctx.set_materialize_grads(False)
    ctx.others = named


def _chunked_grad(ctx: Any, grad_out: Tensor | None, _grad_stats: Tensor | None) -> tuple[Any, ...]:
    d_inputs: list[Tensor | None] = [None] * (3 + len(Options._fields))
    if grad_out is not None:
        q, k, v, *tensors, stats = ctx.saved_tensors
        options = Options(**dict(zip(_TENSORS, tensors, strict=True)), **ctx.others)
        dq, dk, dv, d_power = torch.ops.softplus_attention.chunked_backward(grad_out, stats, q, k, v, *options)
        d_inputs[:3] = dq, dk, dv
        if options.power_rows is not None and ctx.needs_input_grad[_POWER_ROWS]:
            d_inputs[_POWER_ROWS] = d_power.sum_to_size(options.power_rows.shape).to(options.power_rows.dtype)
    return tuple(d_inputs)


def no_double_backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
    raise RuntimeError(ONCE)


torch.library.register_autograd("softplus_attention::chunked_forward", _chunked_grad, setup_context=_save, lib=_library)
torch.library.register_autograd("softplus_attention::chunked_backward", no_double_backward, lib=_library)
