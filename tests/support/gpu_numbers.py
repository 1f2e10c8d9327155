"""Numerical checks of the Triton kernels on a GPU: determinism, hostile data, a million keys, more than 2^31 elements.

Does not need pytest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from gpu_inputs import (
    DEVICE,
    HALF,
    D,
    assert_near,
    assert_raises,
    assert_same,
    calls,
    gpu_randn,
    peak_bytes,
    poisoned_memory,
    qkv,
    step,
)
from helpers import allowed_error, assert_within_yardstick, doubtful_rows, largest_error, run, unit_in_the_last_place
from hostile_cases import ALL, FLOAT32_ONLY, HOSTILE, SETTINGS, SHORT, VALUES, Poisoned
from torch import Tensor

from softplus_attention import softplus_attention, softplus_attention_decode

ON_GPU = DEVICE == "cuda"
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
LONG = 131072 if ON_GPU else 256
MANY = 2**31


def check_repeats(name: str) -> str:
    """Five runs agree bit for bit, forward and every gradient; uninitialised memory is NaN."""
    t, batch, heads, kv_heads = (1500, 4, 8, 2) if ON_GPU else (70, 2, 4, 2)
    kind, dtype, d = {"float32": ("causal", torch.float32, D), "D128": ("causal", HALF, 128)}.get(name, (name, HALF, D))
    attend = calls(t, heads)[kind]
    leaves = qkv(t, batch=batch, heads=heads, kv_heads=kv_heads, d=d, dtype=dtype)
    if kind == "power per head":
        powers = attend.keywords["power"].clone().requires_grad_()
        given = {x: y for x, y in attend.keywords.items() if x != "power"}
        leaves.append(powers)
        attend = lambda q, k, v, p: softplus_attention(q, k, v, power=p, **given)  # noqa: E731
    with poisoned_memory():
        first = step(attend, leaves)
        for i in range(4):
            assert_same(step(attend, leaves), first, f"run {i + 2}")
    assert_raises(lambda: assert_same([first[0]], [first[0] * 1.01]), "a difference went unnoticed")
    return f"5 runs of {len(first)} tensors, {sum(x.numel() for x in first):,} numbers"


def check_replays(d: int) -> str:
    """Calls replayed from the launch cache equal calls of the op, which are not cached: other tensors of the same kind,
    one tensor passed twice, other strides, another stream."""
    attend = partial(softplus_attention, is_causal=True, enable_gqa=True, impl="triton")
    options = (None, None, None, True, None, True, 15.0, None, None, True, math.log(d), False, True)

    def by_op(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.ops.softplus_attention.triton_forward(q, k, v, *options)[0]

    t = 300 if ON_GPU else 70
    for seed in range(4):
        q, k, v = qkv(t, batch=2, heads=2, kv_heads=2, d=d, seed=seed)
        contiguous = [x.contiguous().detach().requires_grad_() for x in (q, k, v)]
        packed = gpu_randn(2, 3, 2, t, d, seed=seed, dtype=HALF).requires_grad_()
        one = [packed[:, 0].detach().requires_grad_()]
        inputs: list[tuple[list[Tensor], Callable[..., Any]]] = [
            *[(leaves, lambda *x: x) for leaves in ([q, k, v], [k, q, v], contiguous)],
            *[(one, f) for f in (lambda x: (x, x, x), lambda x: (x, x + 1, x), lambda x: (x, x + 1, x + 2))],
            ([packed], lambda x: x.unbind(1)),
        ]
        for i, (leaves, split) in enumerate(inputs):
            results = (step(lambda *x, f=f, split=split: f(*split(*x)), leaves) for f in (attend, by_op))
            assert_same(*results, f"inputs {i}, draw {seed}")
    if ON_GPU:
        from softplus_attention.kernels import launch_cache

        assert launch_cache._calls, "no call was cached"
        expected = step(by_op, [q, k, v])
        torch.cuda.synchronize()
        with torch.cuda.stream(torch.cuda.Stream()):
            found = step(attend, [q, k, v])
        torch.cuda.synchronize()
        assert_same(found, expected, "another stream")
    return "28 calls and their gradients equal"


def check_expanded(d: int) -> str:
    """Keys and values expanded over sequences and heads: strides of 0 in the copy engine."""
    t = 500 if ON_GPU else 70
    q, k, v = (x.detach() for x in qkv(t, batch=3, heads=4, kv_heads=1, d=d))
    shared = [x[:1].expand(3, 2, t, d) for x in (k, v)]
    attend = partial(softplus_attention, is_causal=True, enable_gqa=True, impl="triton")
    of_one_key = [x[:, :, :1].expand(3, 1, t, d) for x in (k, v)]
    for given in (shared, of_one_key):
        found = step(attend, [x.detach().requires_grad_() for x in (q, *given)])
        assert_same(step(attend, [x.contiguous().detach().requires_grad_() for x in (q, *given)]), found)
    return f"twice {len(found)} tensors equal to those with contiguous inputs"


def check_decode_repeats() -> str:
    q, k, v = (x.detach() for x in qkv(20_000 if ON_GPU else 300, batch=3, heads=8))
    lengths = torch.tensor([k.shape[2], k.shape[2] // 2, 5], device=DEVICE)
    with poisoned_memory():
        outs = [softplus_attention_decode(q[:, :, :2], k, v, lengths, enable_gqa=True, impl="triton") for _ in range(5)]
    for out in outs[1:]:
        assert_same([out], [outs[0]])
    return "5 runs"


def hostile_qkv(name: str, dtype: torch.dtype, t: int, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (gpu_randn(1, heads, t, D, seed=seed, dtype=torch.float32) for seed in (1, 2, 3))
    ALL[name](q, k)
    return q.to(dtype), k.to(dtype), v.to(dtype)


def assert_average(out: Tensor, v: Tensor, what: str) -> None:
    assert out.isfinite().all(), f"{what}: out is not finite"
    assert float(out.abs().max()) <= float(v.abs().max()) * 1.01, f"{what}: an average exceeds its values"


def check_hostile(dtype: str, power: float, offset: bool = True) -> str:
    """All rows of 4,096 tokens: the output is finite, and so are gradients whose float64 values fit the dtype."""
    kind, t = DTYPES[dtype], 4096 if ON_GPU else 130
    names = [*HOSTILE, *(FLOAT32_ONLY if kind == torch.float32 else ())]
    too_large = 0
    for name in names:
        q, k, v = hostile_qkv(name, kind, t, 2)
        options = {"power": power, "offset": offset, "is_causal": True}
        options["grad_out"] = gpu_randn(*q.shape, seed=4, dtype=kind)
        ours = run(softplus_attention, q, k, v, impl="triton", **options)
        exact = run(softplus_attention, q, k, v, impl="reference", dtype=torch.float64, **options)
        assert_average(ours["out"], v, name)
        for which in ("dq", "dk", "dv"):
            assert exact[which].isfinite().all(), f"{name} {which}: the reference is not finite"
            fits = float(exact[which].abs().max()) < torch.finfo(kind).max / 2
            assert ours[which].isfinite().all() or not fits, f"{name} {which} is not finite"
            assert fits or kind == torch.float16, f"{name} {which}"
            too_large += not fits
    return f"{len(names)} kinds of data; {too_large} gradients beyond the dtype"


def check_some_equal(dtype: str) -> str:
    """Rows of equal scores, which have their own code path, do not change the other rows of their head."""
    t, kind = 320 if ON_GPU else 70, DTYPES[dtype]
    q, k, v = (x.detach().clone() for x in qkv(t, dtype=kind))
    options: dict[str, Any] = {"power": 15, "is_causal": True, "enable_gqa": True}
    grad_out = gpu_randn(*q.shape, seed=4, dtype=kind)
    without = run(softplus_attention, q, k, v, impl="triton", grad_out=grad_out, **options)
    q[:, 0, ::7] = 0
    others = q.abs().sum(-1) > 0
    found = run(softplus_attention, q, k, v, impl="triton", grad_out=grad_out, **options)
    for name in ("out", "dq"):
        assert_near(found[name][others], without[name][others], kind, f"{name} of the other rows")
    mean = v[:, 0].double().cumsum(1) / torch.arange(1, t + 1, device=DEVICE)[:, None]
    assert_near(found["out"][:, 0, 7::7], mean[:, 7::7], kind, "rows of equal scores, whose output is the mean of v")
    if kind != torch.float16:
        # float16 is as precise as the polynomial; its largest error comes from rows of four keys.
        assert_within_yardstick(softplus_attention, q, k, v, impl="triton", **options)
    return f"{int(others.sum())} rows next to {int((~others).sum())} rows of equal scores"


def check_crowd(dtype: str) -> str:
    """One key above the average and many equal keys just below it: the output is that key's value, however many keys
    there are and however low the power. At these scores the error of the kernels' logarithm is largest."""
    kind, powers = DTYPES[dtype], (2, 3, 4, 5, 15, 1.5, 2.01, 3.5)
    for count in (LONG // 8, LONG):
        per_cosine = math.log(D) * math.log(count) / math.log(2)
        q, k = torch.zeros(1, 1, 64, D, device=DEVICE), torch.zeros(1, 1, count, D, device=DEVICE)
        q[..., 0], k[..., 0], k[..., 1] = 1, -0.238 / per_cosine, 1
        k[..., count // 3, 0] = 0.31 / per_cosine
        v = gpu_randn(1, 1, count, D, seed=3, dtype=kind)
        for power in powers:
            out = softplus_attention(q.to(kind), k.to(kind), v, power=power, impl="triton")
            assert_near(out, v[:, :, count // 3, None].expand_as(out).double(), kind, f"{count:,} keys, power {power}")
    return f"powers {powers}, up to {LONG:,} keys"


def check_hostile_long(dtype: str, names: tuple[str, ...]) -> str:
    largest = 0.0
    for name in names:
        q, k, v = hostile_qkv(name, DTYPES[dtype], LONG, 1)
        grad_out = gpu_randn(*q.shape, seed=4, dtype=q.dtype)
        ours = run(softplus_attention, q, k, v, impl="triton", power=31, is_causal=True, grad_out=grad_out)
        assert_average(ours["out"], v, name)
        for which in ("dq", "dk", "dv"):
            assert ours[which].isfinite().all(), f"{name}: {which} is not finite"
            largest = max(largest, float(ours[which].abs().max()))
    return f"{len(names)} kinds of data, T={LONG:,}, p=31; largest gradient {largest:.1e}"


def check_poison(
    setting: str, dtype: str, power: Any, offset: bool = True, values: Mapping[str, float] = VALUES
) -> str:
    """A NaN or Inf affects only the outputs of rows that see it (in v: that give it weight).

    Gradients are unaffected in rows that do not see it, and in keys that no affected row sees.
    """
    kind, length = DTYPES[dtype], 320 if ON_GPU else SHORT
    for which in "qkv":
        for label, value in values.items():
            size: dict[str, Any] = {"length": length, "d": D, "dtype": kind, "device": DEVICE, "offset": offset}
            case = Poisoned("triton", setting, which, value, power, True, **size)
            where = f"{label} in {which}"
            bad = ~case.found["out"].isfinite()
            sure = ~case.doubtful
            assert (case.hit & sure).any(), f"{where}: no row is hit"
            assert (~case.hit & sure).any(), f"{where}: every row is hit"
            shown = bad[..., 3] if which == "v" else bad.all(-1)
            wrong = int((shown != case.hit)[sure].sum())
            assert not wrong, f"{where}: {wrong} rows are affected that should not be, or the reverse"
            if which == "v":
                columns = [c for c in range(D) if c != 3]
                assert_near(
                    case.found["out"][..., columns], case.clean["out"][..., columns], kind, f"{where}, other columns"
                )
            else:
                assert case.found["out"][case.hit].isnan().all(), f"{where}: Inf instead of NaN"
            clear = ~case.hit & sure
            assert_near(case.found["out"][clear], case.clean["out"][clear], kind, f"{where}, other rows")
            sees = case.sees[..., length * 17 // SHORT].clone() if which == "v" else case.hit
            sees[0], sees[1, :2] = False, False
            rows, keys = case.out_of_reach(sees)
            for name, chosen in (("dq", rows), ("dk", keys), ("dv", keys)):
                assert chosen.any()
                assert_near(case.found[name][chosen], case.clean[name][chosen], kind, f"{where}, {name}")
    return f"{3 * len(values)} bad numbers, outputs and gradients"


def last_rows(q: Tensor, k: Tensor, v: Tensor, out: Tensor, rows: int, power: Any) -> tuple[float, float]:
    """The error of the last rows of a causal forward against float64, and the error that the yardstick allows."""
    tail = q[:, :, -rows:]
    options: dict[str, Any] = {"is_causal": True}
    clear = ~doubtful_rows(softplus_attention, tail, k, **options)[..., None]
    options |= {"impl": "reference", "power": power}
    truth = softplus_attention(tail.double(), k.double(), v.double(), **options) * clear
    theirs = softplus_attention(tail, k, v, **options) * clear
    return largest_error(out[:, :, -rows:] * clear, truth), allowed_error(theirs, truth, q.dtype)


def assert_linear(peaks: list[int]) -> str:
    mib = ", ".join(f"{x / 2**20:.0f}" for x in peaks)
    for small, large in pairwise(peaks):
        assert 1.9 < large / small < 2.1, f"peaks of {mib} MiB are not linear in T"
    return f"peaks {mib} MiB"


def check_million(power: int | None) -> str:
    """Forward over 2^18, 2^19 and 2^20 tokens: memory is linear in T, and the last rows are within the yardstick."""
    peaks, report = [], []
    for t in (2**18, 2**19, 2**20):
        q, k, v = (x.detach() for x in qkv(t, batch=1, heads=1, kv_heads=1))
        with torch.no_grad():
            attend = partial(softplus_attention, q, k, v, power=power, is_causal=True, impl="triton")
            peak, out = peak_bytes(attend)
            peaks.append(peak)
            assert_average(out, v, f"T={t}")
            error, allowed = last_rows(q, k, v, out, 48, power)
        report.append(f"{error:.1e} of {allowed:.1e}")
        assert error <= allowed, f"T={t}: error {error:.3e}, allowed {allowed:.3e}"
    return f"{assert_linear(peaks)} beyond q, k, v; error {', '.join(report)}"


def check_training_memory() -> str:
    """Forward and backward over 2^15, 2^16 and 2^17 tokens."""
    peaks = []
    for t in (2**15, 2**16, 2**17):
        attend = partial(softplus_attention, is_causal=True, impl="triton")
        peak, results = peak_bytes(partial(step, attend, qkv(t, batch=1, heads=1, kv_heads=1)))
        assert all(x.isfinite().all() for x in results), f"T={t}"
        peaks.append(peak)
    return assert_linear(peaks)


# Shapes where an offset exceeds 2^31: of heads, of rows in a head, of scratch memory per row, of strides between heads.
LARGE_SHAPES = {
    "heads": {"t": 520, "batch": 66, "heads": 1024, "kv_heads": 1024},
    "rows": {"t": 270_000, "batch": 1, "heads": 128, "kv_heads": 128},
    "scratch": {"t": 512, "batch": 52_500, "heads": 16, "kv_heads": 1, "d": 16},
    "head strides": {"t": 270_000, "batch": 1, "heads": 128, "kv_heads": 128},
}


def check_large(name: str) -> str:
    """Heads beyond 2^31 elements equal the same heads computed alone, forward and backward."""
    shape = LARGE_SHAPES[name]
    window = 128 if shape["t"] > 1000 else None
    attend = partial(softplus_attention, is_causal=True, window=window, enable_gqa=True, impl="triton")
    leaves = qkv(**shape)
    if name == "head strides":
        leaves = tuple(x.detach().contiguous().requires_grad_() for x in leaves)
        assert leaves[0].stride(1) * (leaves[0].shape[1] - 1) > MANY
    q = leaves[0]
    assert q.numel() > MANY
    if name == "rows":
        assert q.stride(2) * q.shape[2] > MANY
    if name == "scratch":
        assert 5 * q[..., 0].numel() > MANY
    out = attend(*leaves)
    grad_out = gpu_randn(*out.shape[:2], 1, out.shape[3], seed=5).expand_as(out)
    grads = torch.autograd.grad(out, leaves, grad_out)
    shared = q.shape[1] // leaves[1].shape[1]
    for batch, kv_head in ((0, 0), (-1, -1), (q.shape[0] // 2, leaves[1].shape[1] // 2)):
        b = slice(batch % q.shape[0], batch % q.shape[0] + 1)
        kv = kv_head % leaves[1].shape[1]
        places = (slice(kv * shared, (kv + 1) * shared), slice(kv, kv + 1), slice(kv, kv + 1))
        alone = [x.detach()[b, place].clone().requires_grad_() for x, place in zip(leaves, places, strict=True)]
        expected = attend(*alone)
        expected_grads = torch.autograd.grad(expected, alone, grad_out[b, places[0]])
        found = [out.detach()[b, places[0]], *(x[b, place] for x, place in zip(grads, places, strict=True))]
        assert_same(found, [expected.detach(), *expected_grads], f"sequence {batch}, key head {kv_head}")
    return f"{q.numel():,} elements of q; 3 slices equal"


def check_large_cache(layout: str) -> str:
    """Sequences in caches of more than 2^31 elements equal the same sequences computed alone."""
    batch, heads, t, d = 5, 8, 2**19 + 40, 128
    shape = (batch, heads, t, d) if layout == "heads" else (batch, t, heads, d)
    k, v = (gpu_randn(*shape, seed=seed) for seed in (1, 2))
    if layout != "heads":
        k, v = k.transpose(1, 2), v.transpose(1, 2)
    assert k.numel() > MANY
    q = gpu_randn(batch, 4 * heads, 1, d, seed=3)
    lengths = torch.tensor([t, 3, t // 2, t - 7, t], device=DEVICE)
    out = softplus_attention_decode(q, k, v, lengths, enable_gqa=True, impl="triton")
    largest = 0.0
    for b in range(batch):
        alone = (x[b : b + 1].contiguous() for x in (q, k, v, lengths))
        expected = softplus_attention_decode(*alone, enable_gqa=True, impl="triton")
        assert expected.isfinite().all()
        # Alone, the keys are split differently, which changes the order of the sum.
        error, allowed = largest_error(out[b : b + 1], expected.double()), unit_in_the_last_place(expected, HALF)
        assert error <= allowed, f"sequence {b}: {error:.2e} from the sequence alone, allowed {allowed:.2e}"
        largest = max(largest, error)
    return f"{k.numel():,} elements of k; at most {largest:.1e} from each sequence alone"


def check_value_without_weight(name: str, d: int) -> str:
    """A non-finite value does not change the output and query gradient of rows that give it no weight."""
    results = []
    for value in (math.nan, 7.0):
        leaves = qkv(300 if ON_GPU else 70, batch=1, heads=2, kv_heads=2, d=d, dtype=DTYPES[name])
        with torch.no_grad():
            leaves[2][0, 0, 3] = value
        results.append(step(partial(softplus_attention, is_causal=True, impl="triton"), leaves))
    (out, dq, *_), (expected, expected_dq, *_) = ([x[0, 0] for x in result] for result in results)
    clear = out.isfinite().all(-1)
    assert 0 < int(clear[4:].sum()) < len(clear) - 4, f"{int(clear.sum())} of {len(clear)} rows give it no weight"
    for what, found, wanted in (("out", out, expected), ("dq", dq, expected_dq)):
        assert_near(found[clear], wanted[clear], DTYPES[name], what)
    return f"{int(clear.sum())} of {len(clear)} rows give it no weight"


REPEATED = ("causal", "full", "lssa", "window", "mask", "packed", "power per head", "float32", "D128")
LONG_FLOAT32 = ("dominant", "all-equal", "one-huge-component")
POISONED = [(setting, "bfloat16", 15) for setting in SETTINGS]
POISONED += [("causal", "bfloat16", None), ("causal", "bfloat16", 2.5)]
POISONED += [("causal", "float32", 15), ("packed", "float32", 15), ("causal", "float32", 2.5)]
BARE = [("causal", "bfloat16", 15), ("cache", "bfloat16", 2.5), ("window", "bfloat16", 2.5), ("causal", "float32", 2.5)]

CHECKS: dict[str, Callable[[], str]] = {
    **{f"hostile {x} p={p}": partial(check_hostile, x, p) for x in DTYPES for p in (15, 31)},
    **{f"hostile {x} p={p} without offset": partial(check_hostile, x, p, False) for x in DTYPES for p in (31, 5.5)},
    "hostile long float32": partial(check_hostile_long, "float32", LONG_FLOAT32),
    "hostile long bfloat16": partial(check_hostile_long, "bfloat16", tuple(HOSTILE)),
    **{f"some equal scores {x}": partial(check_some_equal, x) for x in DTYPES},
    **{f"one above a crowd {x}": partial(check_crowd, x) for x in DTYPES},
    **{f"repeats {x}": partial(check_repeats, x) for x in REPEATED},
    **{f"replays D{d}": partial(check_replays, d) for d in (64, 128)},
    **{f"expanded keys D{d}": partial(check_expanded, d) for d in (64, 128)},
    "repeats decode": check_decode_repeats,
    **{f"poison {x} {y} p={p}": partial(check_poison, x, y, p) for x, y, p in POISONED},
    **{f"poison {x} {y} p={p} without offset": partial(check_poison, x, y, p, False) for x, y, p in BARE},
    **{f"value without weight {x} D{d}": partial(check_value_without_weight, x, d) for x in DTYPES for d in (64, 128)},
    "million tokens p=15": partial(check_million, 15),
    "million tokens lssa": partial(check_million, None),
    "memory of training": check_training_memory,
}
# Run one at a time: each takes tens of gigabytes.
LARGE: dict[str, Callable[[], str]] = {
    **{f"int64 {x}": partial(check_large, x) for x in LARGE_SHAPES},
    **{f"int64 cache by {x}": partial(check_large_cache, x) for x in ("heads", "tokens")},
}
