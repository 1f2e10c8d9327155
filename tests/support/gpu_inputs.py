"""Inputs, kinds of calls and comparisons shared by the GPU checks. Does not need pytest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import helpers
import torch
from helpers import largest_error, unit_in_the_last_place
from hostile_cases import by_packing
from torch import Tensor

from softplus_attention import PowerByLength, softplus_attention

# Without a GPU, small checks run in Triton's interpreter, which tests the checks themselves.
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float16
D = 64 if DEVICE == "cuda" else 16
Attend = Callable[..., Tensor]  # (q, k, v) -> output
poisoned_memory = partial(helpers.poisoned_memory, DEVICE, warn_only=True)


def gpu_randn(*shape: int, seed: int, dtype: torch.dtype = HALF) -> Tensor:
    """Random numbers generated on the device, since tensors may be large."""
    return torch.randn(shape, generator=torch.Generator(DEVICE).manual_seed(seed), dtype=dtype, device=DEVICE)


def qkv(
    t: int, *, batch: int = 2, heads: int = 4, kv_heads: int = 2, d: int = D, dtype: torch.dtype = HALF, seed: int = 0
) -> list[Tensor]:
    """Leaves q, k, v (B, H, T, D), stored as (B, T, H, D) like the outputs of projections."""
    sizes = (heads, kv_heads, kv_heads)
    tensors = (gpu_randn(batch, t, h, d, seed=10 * seed + i, dtype=dtype).transpose(1, 2) for i, h in enumerate(sizes))
    return [x.requires_grad_() for x in tensors]


def documents(t: int, seed: int = 0) -> Tensor:
    """cu_seqlens of three documents, whose boundaries depend on the seed."""
    first, second = (t * 2 // 7, t * 5 // 9) if seed == 0 else (t // 3 - seed, t * 7 // 8 + seed)
    return torch.tensor([0, first, second, t], dtype=torch.int32, device=DEVICE)


def calls(t: int, heads: int = 4) -> dict[str, Attend]:
    """Every kind of call with grouped-query heads, as a function of q, k and v."""
    plain = partial(softplus_attention, enable_gqa=True, impl="triton")
    row = torch.arange(t, device=DEVICE, dtype=torch.int32)[None]
    mask = torch.rand(1, 1, t, t, generator=torch.Generator(DEVICE).manual_seed(3), device=DEVICE) < 0.7
    powers = torch.linspace(1.5, 15, heads, device=DEVICE)
    return {
        "causal": partial(plain, is_causal=True),
        "full": plain,
        "lssa": partial(plain, is_causal=True, power=None),
        "window": partial(plain, is_causal=True, window=37),
        "mask": partial(plain, attn_mask=mask),
        "ranges": partial(plain, key_start=row // 3, key_end=row + 1),
        "packed": partial(by_packing, documents(t), enable_gqa=True, impl="triton"),
        "power per head": partial(plain, is_causal=True, power=powers),
        "power by length": partial(plain, is_causal=True, power=PowerByLength(3, 2, 16)),
    }


def step(attend: Attend, leaves: Sequence[Tensor], seed: int = 99) -> list[Tensor]:
    """The output and every gradient."""
    out = attend(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, gpu_randn(*out.shape, seed=seed, dtype=out.dtype))]


def assert_same(found: Sequence[Tensor], expected: Sequence[Tensor], what: str = "") -> None:
    """Equal bit for bit, and finite."""
    for i, (x, y) in enumerate(zip(found, expected, strict=True)):
        assert y.isfinite().all(), f"{what} tensor {i} is not finite"
        assert x.dtype == y.dtype, f"{what} tensor {i}: {x.dtype}, expected {y.dtype}"
        assert x.shape == y.shape, f"{what} tensor {i}: {tuple(x.shape)}, expected {tuple(y.shape)}"
        if not torch.equal(x, y):
            differ = int((x != y).sum())
            largest = float((x.double() - y.double()).abs().max())
            raise AssertionError(f"{what} tensor {i}: {differ} of {x.numel()} differ, by {largest:.3e} at most")


def assert_near(found: Tensor, expected: Tensor, dtype: torch.dtype, what: str) -> None:
    """Equal up to the order of a sum: 1e-5 of the scale in float32, one unit in the last place in half precision."""
    assert found.isfinite().all(), f"{what}: not finite"
    scale = float(expected.abs().max())
    allowed = 1e-5 * scale if dtype == torch.float32 else unit_in_the_last_place(expected, dtype)
    assert largest_error(found, expected.double()) <= allowed, f"{what}: off by {largest_error(found, expected):.1e}"


def assert_raises(work: Callable[[], Any], why: str) -> None:
    """Verify that a check is able to fail."""
    try:
        work()
    except (AssertionError, RuntimeError):
        return
    raise AssertionError(why)


def peak_bytes(work: Callable[[], Any]) -> tuple[int, Any]:
    """Peak memory in bytes above what was allocated before, and the result."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = work()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before, result
