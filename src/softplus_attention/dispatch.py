"""Chooses the implementation of a call; handles autocast, compilers and function transforms."""

from __future__ import annotations

import os
import sys
from functools import partial
from importlib.util import find_spec
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad

from softplus_attention import reference
from softplus_attention import validation as check
from softplus_attention.kernels import ops
from softplus_attention.kernels.dtensor import CONTEXT_PARALLEL, attend_dtensors, is_dtensor
from softplus_attention.power import Power, check_power, power_record
from softplus_attention.reference import reference_attention, without_autocast
from softplus_attention.visibility import Visibility

Impl = Literal["auto", "triton", "chunked", "reference"]
IMPLS = ("auto", "triton", "chunked", "reference")
# The decode kernel takes calls without gradients of up to this many new rows; the prefill kernel takes longer ones.
MAX_DECODE_ROWS = 16
NO_TRITON = "triton is not installed (pip install 'softplus-attention[triton]')"
# Evaluated once: torch.compile cannot trace find_spec.
HAS_TRITON = find_spec("triton") is not None


class Choice(NamedTuple):
    impl: str
    reason: str


def choose(device: torch.device | str, dtype: torch.dtype = torch.float32) -> Choice:
    """What impl="auto" runs, and why."""
    device = torch.device(device)
    if device.type == "cpu":
        return Choice("chunked", "CPU tensors: row blocks in linear memory")
    if device.type == "cuda" and dtype != torch.float64:
        if not HAS_TRITON:
            return Choice("reference", f"{NO_TRITON}: quadratic memory")
        return Choice("triton", "CUDA tensors: fused kernels in linear memory")
    return Choice("reference", f"no fused kernel for {dtype} on {device.type}: quadratic memory")


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visibility: Visibility,
    power: Power,
    score_scale: float | None,
    impl: Impl = "auto",
    *,
    offset: bool = True,
    validate: bool = False,
    normalized_keys: bool = False,
) -> Tensor:
    """The dispatch behind all public functions, prefill and decode; shapes are already checked."""
    if impl not in IMPLS:
        check.fail("impl", f"one of {IMPLS}", repr(impl))
    refuse_context_parallel()
    if is_dtensor(q) or is_dtensor(k):
        kwargs: dict[str, Any] = {"offset": offset, "validate": validate, "normalized_keys": normalized_keys}
        attend_local = partial(attend, score_scale=score_scale, impl=impl, **kwargs)
        return attend_dtensors(attend_local, q, k, v, visibility, power)
    score_scale = check.check_score_scale(score_scale, q.shape[-1], visibility.bounds())
    check_power(power, (q.shape[0], q.shape[1], q.shape[2]), q.device, validate)
    check.check_offset(offset)
    chosen = impl if impl != "auto" else "triton" if has_fused_kernel(q) else choose(q.device, q.dtype).impl
    if impl == "auto" and is_exported_to_onnx():
        chosen = "reference"  # ONNX supports only torch's own operators
    if chosen == "reference":
        with without_autocast(q.device):
            return reference_attention(q, k, v, visibility, power, score_scale, normalized_keys, offset)
    refuse_transforms(chosen, q, k, v, power)
    if chosen == "triton":
        check_for_triton(q)
    elif q.device.type != "cpu":
        check.fail("impl", f"'auto', 'triton' or 'reference' for tensors on {q.device}", repr(impl))
    gradients = wants_gradient(q, k, v, power)
    options = (*power_record(power, offset), score_scale, normalized_keys)
    new_rows = q.shape[2] if visibility.is_cache and not gradients else 0
    if chosen == "triton":
        if 0 < new_rows <= MAX_DECODE_ROWS:
            return ops.triton_decode(q, k, v, *visibility.cache_arguments(q.shape[0]), *options)
        return ops.triton(q, k, v, *visibility.kernel_arguments(), *options, gradients, gradients=gradients)
    if new_rows == 1:
        return ops.chunked_decode(q, k, v, *visibility.ranges(), *options)
    return ops.chunked(q, k, v, *visibility.ranges(), visibility.mask, *options, gradients=gradients)


def refuse_context_parallel() -> None:
    """torch's context_parallel shards the sequence but replaces only SDPA: here each rank would see only its shard."""
    if torch.compiler.is_compiling():
        return
    module = sys.modules.get(CONTEXT_PARALLEL)
    if module is not None and F.scaled_dot_product_attention in getattr(module, "_replaced_functions", ()):
        raise RuntimeError(
            "inside torch's context_parallel each rank would attend to its own part of the sequence only; use "
            "softplus_attention.distributed, or `softplus-attention train --context-parallel`"
        )


def is_exported_to_onnx() -> bool:
    return "torch.onnx" in sys.modules and torch.onnx.is_in_onnx_export()


def unit_keys(k: Tensor) -> Tensor:
    """Keys (B, H, T, D) as unit vectors in their own dtype, as a cache holds them for ``normalized_keys=True``."""
    fused = has_fused_kernel(k) and not wants_gradient(k) and not transformed(k)
    return ops.implementation("triton.decode_launch").unit_vectors(k) if fused else reference.unit_keys(k)


def transformed(*tensors: Tensor) -> bool:
    """Whether a torch.func transform, forward-mode gradient or ``ops.needs_dispatcher`` case applies to the call."""
    transforms = torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0
    return transforms or ops.needs_dispatcher(*tensors)


def has_fused_kernel(x: Tensor) -> bool:
    return x.is_cuda and HAS_TRITON and x.dtype != torch.float64


def refuse_transforms(impl: str, *tensors: object) -> None:
    """torch.func and forward-mode differentiation would silently bypass a fused op."""
    compiling = torch.compiler.is_compiling()
    # While compiling, tangents cannot be inspected; vmap and grad of the op are handled by the compiler.
    forward_mode = forward_ad._current_level >= 0 and (
        compiling or any(isinstance(x, Tensor) and forward_ad.unpack_dual(x).tangent is not None for x in tensors)
    )
    functional = not compiling and torch._C._are_functorch_transforms_active()
    if forward_mode or functional:
        what = "torch.func transforms" if functional else "forward-mode gradients"
        raise RuntimeError(f"softplus_attention: {what} are not supported by impl={impl!r}; use impl='reference'")


def autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Casts as autocast does for scaled_dot_product_attention: all but float64, to the autocast dtype."""
    first = tensors[0]
    if not isinstance(first, Tensor):
        return tensors
    kind = first.device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(
        x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() and x.dtype != torch.float64 else x
        for x in tensors
    )


def check_for_triton(q: Tensor) -> None:
    if q.dtype == torch.float64:
        check.fail("q", "float16, bfloat16 or float32 for impl='triton'", check.describe_tensor(q), TypeError)
    if not HAS_TRITON:
        raise ImportError(f"impl='triton': {NO_TRITON}")
    if q.is_cuda:
        return
    if not triton_interprets():
        check.fail("impl", f"'auto', 'chunked' or 'reference' for tensors on {q.device}", "'triton'")
    if q.dtype == torch.bfloat16:
        expected = "float16 or float32 in Triton's interpreter, which computes bfloat16 products wrongly"
        check.fail("q", expected, "bfloat16", TypeError)


def wants_gradient(*tensors: object) -> bool:
    return torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in tensors)


def triton_interprets() -> bool:
    """Whether Triton runs its kernels in its interpreter, which takes CPU tensors: for tests."""
    return os.environ.get("TRITON_INTERPRET") == "1"
