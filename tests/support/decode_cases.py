"""Test cases of the decode kernels. Does not need pytest, so that they run on a GPU machine without it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from helpers import allowed_error, doubtful_rows, largest_error, randn
from torch import Tensor

from softplus_attention import PowerByLength, softplus_attention_decode
from softplus_attention.power import power_record
from softplus_attention.reference import unit

POWERS = {
    "lssa": None,
    "1": 1,
    "3": 3,
    "15": 15,
    "2.5": 2.5,
    "per head": torch.tensor([1.0, 3.0, 15.0, 31.0]),
    "per row": 1 + 10 * torch.rand(2, 4, 2, generator=torch.Generator().manual_seed(5)),
    "by length": PowerByLength(3.0, 4.0, 16),
}
GPU_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Tensor | None,
    *,
    power: Any = 15,
    cache_starts: Tensor | None = None,
    window: int | None = None,
    score_scale: float | None = None,
    normalized_keys: bool = False,
    offset: bool = True,
) -> Tensor:
    scale = math.log(q.shape[-1]) if score_scale is None else score_scale
    return torch.ops.softplus_attention.triton_decode(
        q, k, v, lengths, cache_starts, window, *power_record(power, offset), scale, normalized_keys
    )


def reference(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, **options: Any) -> Tensor:
    return softplus_attention_decode(q, k, v, lengths, enable_gqa=True, impl="reference", **options)


def caches(
    dtype: torch.dtype,
    *,
    batch: int = 2,
    h: int = 4,
    h_kv: int = 2,
    t_q: int = 1,
    t_max: int = 150,
    d: int = 16,
    dv: int = 16,
    device: str = "cpu",
) -> tuple[Tensor, Tensor, Tensor]:
    q = randn(batch, h, t_q, d, seed=1, dtype=dtype, device=device)
    k = randn(batch, h_kv, t_max, d, seed=2, dtype=dtype, device=device)
    return q, k, randn(batch, h_kv, t_max, dv, seed=3, dtype=dtype, device=device)


def assert_agrees(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, *, garbage: bool = True, **options: Any) -> Tensor:
    """Compare the kernels with the low-precision yardstick; with ``garbage`` unused parts of the cache are NaN."""
    clear = ~doubtful_rows(
        softplus_attention_decode, q, k, cache_seqlens=lengths, **{n: x for n, x in options.items() if n != "power"}
    )[..., None]
    truth = reference(q.double(), k.double(), v.double(), lengths, **options) * clear
    theirs = reference(q, k, v, lengths, **options) * clear
    if garbage:
        starts = options.get("cache_starts")
        for b, end in enumerate(lengths.tolist()):
            for x in (k, v):
                x[b, :, end:] = float("nan")
                if starts is not None:
                    x[b, :, : int(starts[b])] = float("nan")
    ours = decode(q, k, v, lengths, **options)
    assert ours.dtype == q.dtype
    assert ours.shape == truth.shape
    assert truth.isfinite().all()
    error, budget = largest_error(ours * clear, truth), allowed_error(theirs, truth, q.dtype)
    assert error <= budget, f"error {error:.3e}, allowed {budget:.3e}"
    return ours


def check_powers(d: int, dtype: torch.dtype) -> str:
    failures = []
    calls = [(name, True) for name in POWERS] + [("15", False), ("per head", False)]
    for name, offset in calls:
        q, k, v = caches(dtype, h_kv=1, t_q=2, t_max=3001, d=d, dv=d, device="cuda")
        lengths, starts = torch.tensor([3001, 777], device="cuda"), torch.tensor([0, 130], device="cuda")
        power = POWERS[name].cuda() if isinstance(POWERS[name], Tensor) else POWERS[name]
        try:
            assert_agrees(q, k, v, lengths, power=power, cache_starts=starts, offset=offset)
        except AssertionError as error:
            failures.append(f"p {name}{'' if offset else ' without offset'}: {error}")
    assert not failures, "; ".join(failures)
    return f"{len(calls)} calls within the yardstick"


def check_value(bad: float, rows: int) -> None:
    """Head 0 attends to key 8 only, the other heads give it no weight; they share their values."""
    q, k, v = caches(torch.bfloat16, batch=1, h=rows + 1, h_kv=1, t_max=2000, d=128, dv=128, device="cuda")
    q[0, 1:] = -q[0, :1]
    k[0, 0, 8] = q[0, 0, 0]
    lengths = torch.tensor([2000], device="cuda")
    before = decode(q, k, v, lengths)
    v[0, 0, 8, 5] = bad
    out = decode(q, k, v, lengths)
    assert out[0, 0, 0, 5].isnan()
    assert out[0, 1:].isfinite().all()
    assert torch.equal(out[..., :5], before[..., :5])


def check_key(power: Any) -> None:
    q, k, v = caches(torch.bfloat16, t_max=2000, d=128, dv=128, device="cuda")
    k[0, 0, 1000, 3] = float("nan")
    k[0, 1, 1999, 0] = float("-inf")
    out = decode(q, k, v, torch.tensor([2000, 900], device="cuda"), power=power)
    assert out[0].isnan().all()
    assert out[1].isfinite().all()


def check_not_finite() -> str:
    for bad in (float("nan"), float("inf")):
        for rows in (1, 16, 48):
            check_value(bad, rows)
    for power in (None, 15, 2.5):
        check_key(power)
    return "9 calls"


def check_graph() -> str:
    """One captured graph replayed with other lengths, queries and caches."""
    q, k, v = caches(torch.bfloat16, t_max=5000, d=128, dv=128, device="cuda")
    lengths = torch.tensor([5000, 1], device="cuda")
    decode(q, k, v, lengths)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = decode(q, k, v, lengths)
    for first, second in ((5000, 1), (3, 64), (65, 4999)):
        lengths.copy_(torch.tensor([first, second]))
        graph.replay()
        assert torch.equal(out, decode(q, k, v, lengths))
        for x in (q, k, v):
            x.copy_(x.roll(1, 2) * 1.25)
        graph.replay()
        assert torch.equal(out, decode(q, k, v, lengths))
    return "6 replays of one capture equal to eager"


def check_launches() -> str:
    """A launch reuses the binary of a similar earlier one; odd strides, pointers and dtypes need their own."""
    room = torch.zeros(2 * 2 * 640 * 65 + 8, device="cuda", dtype=torch.bfloat16)
    for t_max in (64, 65, 640):
        q, k, v = caches(torch.bfloat16, t_max=t_max, d=64, dv=64, device="cuda")
        whole = torch.tensor([0, t_max, t_max], device="cuda")
        expected = reference(q, k, v, whole[1:])
        for offset, row in ((0, 64), (1, 64), (8, 64), (0, 65)):
            placed = room[offset:].as_strided(k.shape, (2 * t_max * row, t_max * row, row, 1)).copy_(k)
            for _ in range(2):
                assert torch.allclose(decode(q, placed, v, None), expected, atol=0.02, rtol=0.02)
        # Powers that a binary reads, computes or contains as a constant, with the same dtype and strides.
        for power in (2.5, torch.tensor(15.0, device="cuda"), 3.5, PowerByLength(15.0, 0.0, 8), 15):
            for _ in range(2):
                own = power.item() if isinstance(power, Tensor) else power
                out = decode(q, k, v, None, power=power)
                assert torch.allclose(out, reference(q, k, v, whole[1:], power=own), atol=0.02, rtol=0.02)
                bare = reference(q, k, v, whole[1:], power=own, offset=False)
                assert torch.allclose(decode(q, k, v, None, power=power, offset=False), bare, atol=0.02, rtol=0.02)
        powers = torch.full((2, 4, 1), 15.0, device="cuda")
        for lengths in (None, whole[1:].clone(), whole[1:], whole[1:].int()):
            for power in (15, powers, powers[:1, :, :1]):
                for _ in range(2):
                    out = decode(q, k, v, lengths, power=power)
                    assert torch.allclose(out, expected, atol=0.02, rtol=0.02)
    return "156 launches with odd and even strides, pointers, lengths and powers"


def check_unit_vectors(unit_vectors: Callable[[Tensor], Tensor], device: str, dtypes: Sequence[torch.dtype]) -> None:
    """Exact up to rounding for every size, layout and head dimension; zero keys stay zero, and non-finite keys affect
    only themselves."""
    for dtype in dtypes:
        for d in (64, 5, 100, 256):
            for size in (1.0, 1e-35, 1e30) if dtype != torch.float16 else (1.0, 1e-3, 1e3):
                x = (torch.randn(2, 7, 3, d, device=device) * size).to(dtype)
                for keys in (x, x.transpose(1, 2), x[:, 1:, :1], x.expand(2, 7, 3, d)[..., : d - 1]):
                    expected = unit(keys.double())
                    for _ in range(2):
                        found = unit_vectors(keys)
                        assert (found.dtype, found.shape) == (dtype, keys.shape)
                        worst = (found.double() - expected).abs().max().item()
                        assert worst <= torch.finfo(dtype).eps, f"{dtype} D={d} size {size:g}: {worst:.3g}"
    keys = torch.randn(1, 2, 4, 8, device=device)
    keys[0, 0, 0], keys[0, 0, 1, 2], keys[0, 0, 2, 3] = 0.0, float("inf"), float("nan")
    found = unit_vectors(keys)
    assert found[0, 0, 0].eq(0).all()
    assert [bool(found[0, 0, row].isnan().any()) for row in range(4)] == [False, True, True, False]
    assert found[0, 1].isfinite().all()
    assert unit_vectors(keys[:, :, :0]).shape == (1, 2, 0, 8)


def check_unit_vectors_on_gpu() -> str:
    from softplus_attention.kernels.triton.decode_launch import unit_vectors

    check_unit_vectors(unit_vectors, "cuda", GPU_DTYPES)
    return "every size, layout and head dimension up to rounding"


CHECKS: dict[str, Callable[[], str]] = {
    **{
        f"decode {str(dtype).removeprefix('torch.')} D{d}": partial(check_powers, d, dtype)
        for dtype in GPU_DTYPES
        for d in (256, 128, 100, 64)
    },
    "decode not finite": check_not_finite,
    "graph decode": check_graph,
    "decode launches": check_launches,
    "decode unit vectors": check_unit_vectors_on_gpu,
}
