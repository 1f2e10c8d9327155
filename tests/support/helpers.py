"""Comparisons between implementations of the op: forward and every gradient, on any device."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from softplus_attention import softplus_attention, softplus_attention_decode, softplus_attention_varlen
from softplus_attention.reference import EQUAL_SCORES, attention_stages
from softplus_attention.visibility import Visibility

ROOT = Path(__file__).parents[2]
Attention = Callable[..., Tensor]
Layout = Callable[[Tensor], Tensor]


def as_given(x: Tensor) -> Tensor:
    return x


def transposed(x: Tensor) -> Tensor:
    """A (B, H, T, D) view of memory stored as (B, T, H, D)."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def randn(*shape: int, seed: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
    """Random numbers that are the same on every device and, up to rounding, in every dtype."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(device, dtype)


def some_scores_below_zero(opposite: float) -> tuple[Tensor, Tensor, Tensor]:
    """64 queries and 200 keys that share a direction. Ten queries point away from it, so that some of them have no
    score above 0 (``opposite`` 0.6), or none above -2 (``opposite`` 3)."""
    q, k, v = (randn(1, 1, length, 64, seed=seed) for seed, length in enumerate((64, 200, 200)))
    q[:, :, 20:30] -= opposite
    k = k + 1
    below = ((q @ k.mT).tril(136) <= 0).all(-1)[0, 0]
    assert below[20:30].any()
    assert not below.all()
    return q, k, v


def build_visibility(function: Attention, q: Tensor, k: Tensor, options: dict[str, Any]) -> Visibility:
    """The visibility of one call, with q and k as (B, H, T, D)."""
    window = options.get("window")
    if function is softplus_attention_varlen:
        cu_q, cu_k = options["cu_seqlens_q"], options["cu_seqlens_k"]
        causal = options.get("is_causal", False)
        return Visibility.from_documents(cu_q, cu_k, q.shape[2], k.shape[2], is_causal=causal, window=window)
    if function is softplus_attention_decode:
        starts = options.get("cache_starts")
        return Visibility.from_cache(options["cache_seqlens"], starts, q.shape[2], k.shape[2], window=window)
    mask = options.get("attn_mask")
    if mask is not None:
        mask = mask.reshape((1,) * (4 - mask.dim()) + mask.shape)
    given = {name: options[name] for name in ("is_causal", "window", "key_start", "key_end") if name in options}
    return Visibility(q.shape[2], k.shape[2], q.device, mask=mask, **given)


def doubtful_rows(function: Attention, q: Tensor, k: Tensor, **options: Any) -> Tensor:
    """Rows whose largest x is within a factor 2 of the threshold for keeping stage 1, so that rounding decides.

    The shape is (B, H, T_q), or (total, H) for packed documents.
    """
    is_packed = function is softplus_attention_varlen
    if not options.get("offset", True):
        return torch.zeros(q.shape[:-1], dtype=torch.bool, device=q.device)  # there is no threshold
    if is_packed:
        q, k = (x.transpose(0, 1)[None] for x in (q, k))
    visibility = build_visibility(function, q, k, options)
    normalized_keys = options.get("normalized_keys", False)
    stages = attention_stages(q.double(), k.double(), visibility, None, options.get("score_scale"), normalized_keys)
    x = stages.counts[..., None] * stages.normalised - (stages.counts > 3).double()[..., None]
    x = x.nan_to_num(nan=1.0)
    largest = x.amax(-1) if x.shape[-1] else x.new_zeros(x.shape[:-1])
    doubtful = (largest > EQUAL_SCORES / 2) & (largest < EQUAL_SCORES * 2)
    return doubtful[0].transpose(0, 1) if is_packed else doubtful


def run(
    function: Attention,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    impl: str,
    grad_out: Tensor | None = None,
    dtype: torch.dtype | None = None,
    layout: Layout = as_given,
    power: Any = 15,
    **options: Any,
) -> dict[str, Tensor]:
    """The output and, with ``grad_out``, the gradients of q, k, v and of a tensor power."""
    dtype = q.dtype if dtype is None else dtype
    leaves = {name: x.detach().to(dtype).clone() for name, x in (("q", q), ("k", k), ("v", v))}
    arguments = dict(leaves)
    if isinstance(power, Tensor):
        power = power.detach().to(torch.float64 if dtype == torch.float64 else power.dtype).clone()
        leaves["power"] = power
    for leaf in leaves.values():
        leaf.requires_grad_(grad_out is not None)
    q, k, v = (layout(x) for x in arguments.values())
    out = function(q, k, v, impl=impl, power=power, **options)
    result = {"out": out.detach()}
    if grad_out is not None:
        grads = torch.autograd.grad(out, list(leaves.values()), grad_out.to(dtype))
        result |= {f"d{name}": grad for name, grad in zip(leaves, grads, strict=True)}
    return result


def unit_in_the_last_place(x: Tensor, dtype: torch.dtype) -> float:
    """One unit in the last place of ``dtype`` at the size of the largest element of x."""
    largest = float(x.abs().max()) if x.numel() else 0.0
    return torch.finfo(dtype).eps * 2.0 ** math.floor(math.log2(largest)) if largest > 0 else 0.0


def largest_error(x: Tensor, truth: Tensor) -> float:
    return float((x.double() - truth).abs().max()) if x.numel() else 0.0


def allowed_error(low: Tensor, truth: Tensor, dtype: torch.dtype) -> float:
    """Twice the error of the low-precision reference, plus one unit in the last place at the scale of the truth."""
    return 2 * largest_error(low, truth) + unit_in_the_last_place(truth, dtype)


@contextmanager
def poisoned_memory(device: str = "cpu", warn_only: bool = False) -> Iterator[None]:
    """Uninitialised memory is NaN, which reveals reads of values that were never written."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    try:
        assert torch.empty(3, device=device).isnan().all()
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def output_and_gradients(
    attend: Callable[..., Tensor], *inputs: Tensor, grad_out: Tensor | None = None
) -> list[Tensor]:
    """The output of ``attend`` for copies of ``inputs``, and the gradients of the sum of its squares or for
    ``grad_out``."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    out = attend(*leaves)
    grad_out = 2 * out.detach() if grad_out is None else grad_out
    return [out.detach(), *torch.autograd.grad(out, leaves, grad_out)]


def run_compiled(*arguments: str, python_path: tuple[str, ...] = ()) -> str:
    """The output of a Python process without Triton's interpreter, which these tests may have enabled."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    if python_path:
        environment["PYTHONPATH"] = os.pathsep.join(str(ROOT / x) for x in python_path)
    run = subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-2000:]
    return run.stdout


def outcomes(
    function: Attention,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    impl: str,
    power: Any,
    layout: Layout,
    options: dict[str, Any],
    gradients: bool = True,
) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
    """Results of (implementation, reference in the same dtype, reference in float64), with doubtful rows set to 0."""
    shape = (*q.shape[:-1], v.shape[-1])
    grad_out = randn(*shape, seed=sum(shape), dtype=q.dtype, device=str(q.device))
    clear = ~doubtful_rows(function, layout(q), layout(k), **options)[..., None].expand(shape)
    grad_out = grad_out * clear
    common = {"grad_out": grad_out if gradients else None, "power": power, "layout": layout, **options}
    ours = run(function, q, k, v, impl=impl, **common)
    theirs = run(function, q, k, v, impl="reference", **common)
    truth = run(function, q, k, v, impl="reference", dtype=torch.float64, **common)
    for result in (ours, theirs, truth):
        result["out"] = result["out"] * clear
    return ours, theirs, truth


class OutsideYardstickError(AssertionError):
    """The error is finite, but ``times`` as large as allowed."""

    def __init__(self, message: str, times: float) -> None:
        super().__init__(message)
        self.times = times


def assert_within_yardstick(
    function: Attention,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    impl: str,
    power: Any = 15,
    layout: Layout = as_given,
    gradients: bool = True,
    **options: Any,
) -> None:
    """Compare ``impl`` with the low-precision reference: the forward and, with ``gradients``, every gradient.

    Its error against the float64 reference is at most twice the error of the reference in q's dtype, plus one unit in
    the last place at the tensor's scale.
    """
    results = outcomes(function, q, k, v, impl, power, layout, options, gradients)
    assert_outcomes_within_yardstick(*results)


def assert_outcomes_within_yardstick(
    ours: dict[str, Tensor], theirs: dict[str, Tensor], truth: dict[str, Tensor], names: Iterable[str] | None = None
) -> None:
    for name in truth if names is None else names:
        exact = truth[name]
        assert exact.isfinite().all(), f"{name}: the float64 reference is not finite"
        assert ours[name].shape == exact.shape, f"{name}: shape {tuple(ours[name].shape)}"
        assert ours[name].dtype == theirs[name].dtype, f"{name}: dtype {ours[name].dtype}"
        error, budget = largest_error(ours[name], exact), allowed_error(theirs[name], exact, ours[name].dtype)
        message = f"{name}: error {error:.3e}, allowed {budget:.3e} ({ours[name].dtype})"
        assert math.isfinite(error), message
        if error > budget:
            raise OutsideYardstickError(message, error / budget if budget else math.inf)


def assert_equal_in_float64(
    function: Attention,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    impl: str,
    power: Any = 15,
    layout: Layout = as_given,
    tolerance: float = 1e-10,
    **options: Any,
) -> None:
    """Compare ``impl`` with the reference in float64, relative to each tensor's scale."""
    ours, _, truth = outcomes(function, q.double(), k.double(), v.double(), impl, power, layout, options)
    for name, exact in truth.items():
        assert exact.isfinite().all(), f"{name}: the float64 reference is not finite"
        assert ours[name].shape == exact.shape, f"{name}: shape {tuple(ours[name].shape)}"
        scale = max(1.0, float(exact.abs().max())) if exact.numel() else 1.0
        error = largest_error(ours[name], exact)
        assert error <= tolerance * scale, f"{name}: error {error:.3e} at scale {scale:.3e} ({impl})"


def peak_memory(work: Callable[[], Any]) -> int:
    """Peak memory allocated by ``work`` in bytes. Counts the calling thread only, so run it on one thread."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        kept = work()
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    events.sort(key=lambda e: e.start_ns())
    held = peak = 0
    for event in events:
        held += event.nbytes()
        peak = max(peak, held)
    del kept
    return peak


def assert_many_equal_keys_have_no_weight(
    d: int, score: float, power: float = 1.5, rows: list[int] | None = None, **options: Any
) -> None:
    """One key above the average and 65,535 equal keys below it, with a low power, which amplifies small weights."""
    count = 65536
    per_cosine = math.log(d) * math.log(count) / math.log(2)
    q, k = torch.zeros(1, 1, 3, d), torch.zeros(1, 1, count, d)
    q[..., 0], k[..., 0], k[..., 1] = 1, score / per_cosine, 1
    k[..., count // 3, 0] = max(0.31, score + 0.3) / per_cosine
    v = randn(1, 1, count, d, seed=3, dtype=torch.float16)
    out = softplus_attention(q.half(), k.half(), v, power=power, impl="triton", **options)[:, :, rows or [0, 1, 2]]
    assert torch.equal(out, v[:, :, count // 3, None].expand_as(out))
