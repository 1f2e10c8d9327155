"""Registration of the fused implementations with PyTorch: schemas, fake implementations for tracing, autograd.

Imports torch only: an implementation is imported with its first call. Schemas and names are part of exported programs.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.autograd import profiler

from softplus_attention.kernels.arguments import empty_backward, empty_forward, empty_output
from softplus_attention.power import PowerRecord
from softplus_attention.reference import compute_dtype

_library = torch.library.Library("softplus_attention", "DEF")
# The fields of a PowerRecord; then with the other arguments of the scores.
_POWER = "bool sharpen, float power, Tensor? power_rows, float[]? power_by_length, bool offset"
_SCORES = f"{_POWER}, float score_scale, bool normalized_keys"
_RANGES = f"Tensor start, Tensor end, Tensor? mask, {_SCORES}"
# ``Visibility.kernel_arguments``
_VISIBLE = f"Tensor? start, Tensor? end, Tensor? mask, bool is_causal, int? window, {_SCORES}"
ONCE = (
    "softplus_attention: the gradient of a gradient is not implemented in the fused backward; "
    "use impl='reference' where double backward is needed"
)


def needs_dispatcher(*tensors: Tensor) -> bool:
    """Whether a compiler, tracer, dispatch mode, profiler or tensor subclass must see the op. All other calls avoid the
    overhead of PyTorch's dispatcher (docs/dev/kernels-log.md)."""
    return (
        torch.compiler.is_compiling()
        or profiler._is_profiler_enabled
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._get_tracing_state() is not None
        or not all(type(x) is Tensor or type(x) is torch.nn.Parameter for x in tensors)
    )


def backward_needs_dispatcher(grad: Tensor) -> bool:
    """The same for a backward, which may also be differentiated or batched itself."""
    return (
        torch.is_grad_enabled()
        or torch._C._are_functorch_transforms_active()
        or torch._C._functorch.is_legacy_batchedtensor(grad)
        or needs_dispatcher(grad)
    )


class FusedAttention:
    """An implementation of prefill: its ops ``<name>_forward`` and ``<name>_backward``, and their gradients.

    ``options`` follow q, k and v in both schemas, ``last`` only in that of the forward. ``outputs`` are those of the
    forward; ``first_saved`` and those after it are saved for the backward. ``module`` has the implementations,
    ``attention_forward`` and ``attention_backward``, which take the same inputs.
    """

    def __init__(
        self,
        name: str,
        module: str,
        *,
        devices: str,
        options: str,
        outputs: list[str],
        first_saved: str,
        shapes: tuple[Callable[..., Any], Callable[..., Any]],
        last: str = "",
    ) -> None:
        self.module = module
        self.first_saved = outputs.index(first_saved)
        names = [f"Tensor {x}" for x in ("q", "k", "v")] + options.split(", ")
        self.backward_inputs, self.forward_inputs = len(names), len(names) + bool(last)
        self.tensors = [i for i, x in enumerate(names) if x.startswith("Tensor")]
        self.power_rows = names.index("Tensor? power_rows")
        forward, backward = f"{name}_forward", f"{name}_backward"
        inputs, after = ", ".join(names), f", {last}" if last else ""
        results, saved = (", ".join(f"Tensor {x}" for x in some) for some in (outputs, outputs[self.first_saved :]))
        _library.define(f"{forward}({inputs}{after}) -> ({results})")
        _library.define(
            f"{backward}(Tensor grad_out, {saved}, {inputs}) -> (Tensor dq, Tensor dk, Tensor dv, Tensor d_power)"
        )
        for device in devices.split():
            _library.impl(forward, lambda *inputs: self.forward(*inputs), device)
            _library.impl(backward, lambda *inputs: self.backward(*inputs), device)
        for op, fake in zip((forward, backward), shapes, strict=True):
            torch.library.register_fake(f"softplus_attention::{op}", fake, lib=_library)
        self.forward_op = getattr(torch.ops.softplus_attention, forward)
        self.backward_op = getattr(torch.ops.softplus_attention, backward)
        register = torch.library.register_autograd
        register(f"softplus_attention::{forward}", self.gradients, setup_context=self.save, lib=_library)
        register(f"softplus_attention::{backward}", no_double_backward, lib=_library)

    def forward(self, *inputs: Any, **direct: bool) -> tuple[Tensor, ...]:
        return implementation(self.module).attention_forward(*inputs, **direct)

    def backward(self, *inputs: Any, **direct: bool) -> tuple[Tensor, ...]:
        return implementation(self.module).attention_backward(*inputs, **direct)

    def save(self, ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        # By save_for_backward, so that autograd detects in-place changes.
        ctx.save_for_backward(*[inputs[i] for i in self.tensors], *output[self.first_saved :])
        ctx.set_materialize_grads(False)
        ctx.options = [None if i in self.tensors else x for i, x in enumerate(inputs[: self.backward_inputs])]

    def gradients(
        self, ctx: Any, grad_out: Tensor | None, *_others: Tensor | None, direct: bool = False
    ) -> tuple[Any, ...]:
        gradients: list[Tensor | None] = [None] * self.forward_inputs
        if grad_out is None:
            return tuple(gradients)
        saved, inputs = ctx.saved_tensors, list(ctx.options)
        for i, x in zip(self.tensors, saved, strict=False):
            inputs[i] = x
        given = (grad_out, *saved[len(self.tensors) :], *inputs)
        *gradients[:3], d_power = self.backward(*given, direct=True) if direct else self.backward_op(*given)
        power = inputs[self.power_rows]
        if power is not None and ctx.needs_input_grad[self.power_rows - self.forward_inputs]:
            gradients[self.power_rows] = d_power.sum_to_size(power.shape).to(power.dtype)
        return tuple(gradients)

    def __call__(self, *inputs: Any, gradients: bool) -> Tensor:
        """The output; through the dispatcher only if something must see the op there."""
        if needs_dispatcher(*[inputs[i] for i in self.tensors if inputs[i] is not None]):
            return self.forward_op(*inputs)[0]
        if gradients:
            return DirectAttention.apply(self, *inputs)
        return self.forward(*inputs, direct=True)[0]


class DirectAttention(torch.autograd.Function):
    """The same forward and backward without the dispatcher."""

    @staticmethod
    def forward(ctx: Any, attention: FusedAttention, *inputs: Any) -> Tensor:
        output = attention.forward(*inputs, direct=True)
        attention.save(ctx, inputs, output)
        ctx.attention = attention
        return output[0]

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None) -> tuple[Any, ...]:  # type: ignore[override]
        direct = grad_out is not None and not backward_needs_dispatcher(grad_out)
        return None, *ctx.attention.gradients(ctx, grad_out, direct=direct)


def no_double_backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
    raise RuntimeError(ONCE)


_modules: dict[str, Any] = {}


def implementation(name: str) -> Any:
    """Cached: importing a loaded module again takes a microsecond."""
    module = _modules.get(name)
    if module is None:
        module = _modules[name] = import_module(f"softplus_attention.kernels.{name}")
    return module


def _chunked_forward_shapes(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    return q.new_empty(*q.shape[:3], v.shape[3]), q.new_empty(3, *q.shape[:3], dtype=compute_dtype(q.dtype))


def _chunked_backward_shapes(_grad: Tensor, stats: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
    d_power = stats.new_empty((0,) if inputs[chunked.power_rows] is None else stats.shape[1:])
    return *(x.new_empty(x.shape) for x in inputs[:3]), d_power


def _triton_forward_shapes(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> tuple[Tensor, ...]:
    return tuple(empty_forward(q, k, v, for_backward=options[-1]))


def _triton_backward_shapes(_grad: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
    _out, _rest, stats, _flat, _norms, q, k, v, *options = inputs
    return empty_backward(stats, q, k, v, options[triton.power_rows - 3])


chunked = FusedAttention(
    "chunked",
    "cpu.chunked",
    devices="CPU",
    options=_RANGES,
    outputs=["out", "stats"],
    first_saved="stats",
    shapes=(_chunked_forward_shapes, _chunked_backward_shapes),
)
triton = FusedAttention(
    "triton",
    "triton.launch",
    devices="CUDA CPU",  # CPU tensors run in Triton's interpreter
    options=_VISIBLE,
    last="bool for_backward",
    outputs=["out", "rest", "stats", "flat", "norms"],
    first_saved="out",
    shapes=(_triton_forward_shapes, _triton_backward_shapes),
)


class FusedDecode:
    """An implementation of decoding, without gradients: its op ``name``, which runs ``decode`` of ``module``."""

    def __init__(self, name: str, module: str, *, devices: str, inputs: str, shape: Callable[..., Tensor]) -> None:
        self.module = module
        _library.define(f"{name}({inputs}, {_SCORES}) -> Tensor")
        for device in devices.split():
            _library.impl(name, lambda *inputs: self.decode(*inputs), device)
        torch.library.register_fake(f"softplus_attention::{name}", shape, lib=_library)
        self.op = getattr(torch.ops.softplus_attention, name)

    def decode(self, *inputs: Any) -> Tensor:
        return implementation(self.module).decode(*inputs[:-7], PowerRecord(*inputs[-7:-2]), *inputs[-2:])

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *options: Any) -> Tensor:
        # The dispatcher takes as long as launching a kernel.
        return (self.op if needs_dispatcher(q, k, v) else self.decode)(q, k, v, *options)


chunked_decode = FusedDecode(
    "chunked_decode",
    "cpu.decode",
    devices="CPU",
    inputs="Tensor q, Tensor k, Tensor v, Tensor start, Tensor end",
    shape=lambda q, k, v, *_: _chunked_forward_shapes(q, k, v)[0],
)
triton_decode = FusedDecode(
    "triton_decode",
    "triton.decode_launch",
    devices="CUDA CPU",
    inputs="Tensor q, Tensor k_cache, Tensor v_cache, Tensor? cache_seqlens, Tensor? cache_starts, int? window",
    shape=lambda q, k, v, *_: empty_output(q, v),
)
