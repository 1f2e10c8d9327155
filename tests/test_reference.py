"""The reference against the equations of the method: plain loops, finite differences and an explicit backward."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from decode_cases import check_unit_vectors
from helpers import output_and_gradients, randn
from torch import Tensor

from softplus_attention import (
    PowerByLength,
    attention_weights,
    softplus_attention,
    softplus_attention_decode,
    softplus_attention_varlen,
)
from softplus_attention.reference import unit_keys
from softplus_attention.visibility import Visibility

D, T = 5, 7


@dataclass(frozen=True)
class Mode:
    """One way to call the op. ``sees(b, h, i, j)`` says which keys a row sees, for tensors (B, H, T, D)."""

    sees: Callable[[int, int, int, int], bool]
    options: dict[str, Any] = field(default_factory=dict)
    batch: int = 1
    heads: int = 2
    kv_heads: int = 2
    t_q: int = T
    t_k: int = T
    function: Callable[..., Tensor] = softplus_attention

    def qkv(self, seed: int, width: int = 4) -> tuple[Tensor, Tensor, Tensor]:
        """(B, H, T, D) tensors in float64."""
        q = randn(self.batch, self.heads, self.t_q, D, seed=seed, dtype=torch.float64)
        k = randn(self.batch, self.kv_heads, self.t_k, D, seed=seed + 1, dtype=torch.float64)
        v = randn(self.batch, self.kv_heads, self.t_k, width, seed=seed + 2, dtype=torch.float64)
        return q, k, v

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, power: Any, **more: Any) -> Tensor:
        """The op on (B, H, T, D) tensors, whatever layout the mode's function takes."""
        options = {"power": power, "impl": "reference", **self.options, **more}
        if self.function is softplus_attention_varlen:
            return self.function(*(x[0].transpose(0, 1) for x in (q, k, v)), **options).transpose(0, 1)[None]
        return self.function(q, k, v, **options)


MASK = torch.tensor(
    [
        [1, 0, 1, 1, 0, 1, 1],
        [0, 0, 0, 0, 0, 0, 0],  # N = 0
        [0, 0, 0, 1, 0, 0, 0],  # N = 1
        [1, 0, 0, 1, 0, 0, 1],  # N = 3
        [1, 1, 0, 1, 0, 0, 1],  # N = 4
        [1, 1, 1, 1, 1, 1, 1],
        [0, 1, 1, 1, 1, 1, 0],
    ],
    dtype=torch.bool,
)
START = torch.tensor([[0, 1, 0, 2, 3, 7, 1]], dtype=torch.int32)
END = torch.tensor([[7, 2, 5, 6, 3, 7, 9]], dtype=torch.int32)
CU_Q = torch.tensor([0, 2, 3, 7], dtype=torch.int32)
CU_K = torch.tensor([0, 2, 5, 9], dtype=torch.int32)
LENGTHS, STARTS = torch.tensor([6, 8], dtype=torch.int32), torch.tensor([0, 3], dtype=torch.int32)


def same_document(i: int, j: int, cu_q: Tensor, cu_k: Tensor) -> tuple[bool, int]:
    """Whether row i and key j are in one document, and the key at row i's position (aligned bottom-right)."""
    for a_q, b_q, a_k, b_k in zip(cu_q[:-1], cu_q[1:], cu_k[:-1], cu_k[1:], strict=True):
        if a_q <= i < b_q:
            return bool(a_k <= j < b_k), int(b_k - (b_q - i))
    raise AssertionError("a row outside all documents")


def packed_causal(i: int, j: int, cu_q: Tensor = CU_Q, cu_k: Tensor = CU_K) -> bool:
    inside, own = same_document(i, j, cu_q, cu_k)
    return inside and j <= own


def packed_options(cu_q: Tensor, cu_k: Tensor) -> dict[str, Any]:
    longest = {"max_seqlen_q": int(cu_q.diff().max()), "max_seqlen_k": int(cu_k.diff().max())}
    return {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, **longest}


DOCUMENTS = packed_options(CU_Q, CU_K)
packed_mode = partial(Mode, t_k=9, function=softplus_attention_varlen)
decode_mode = partial(Mode, batch=2, t_q=2, t_k=8, function=softplus_attention_decode)
MODES = {
    "full": Mode(lambda b, h, i, j: True),
    "causal": Mode(lambda b, h, i, j: j <= i, {"is_causal": True}),
    "causal-fewer-queries": Mode(lambda b, h, i, j: j <= i + 4, {"is_causal": True}, t_q=3),
    "causal-more-queries": Mode(lambda b, h, i, j: j <= i - 3, {"is_causal": True}, t_q=7, t_k=4),
    "cross": Mode(lambda b, h, i, j: True, t_q=3, t_k=6),
    "window": Mode(lambda b, h, i, j: i - 5 < j <= i, {"is_causal": True, "window": 5}),
    "window-of-one": Mode(lambda b, h, i, j: j == i, {"is_causal": True, "window": 1}),
    "window-of-three": Mode(lambda b, h, i, j: i - 3 < j <= i, {"is_causal": True, "window": 3}),
    "mask": Mode(lambda b, h, i, j: bool(MASK[i, j]), {"attn_mask": MASK}),
    "mask-causal": Mode(lambda b, h, i, j: bool(MASK[i, j]) and j <= i, {"attn_mask": MASK, "is_causal": True}),
    "ranges": Mode(lambda b, h, i, j: bool(START[0, i] <= j < END[0, i]), {"key_start": START, "key_end": END}),
    "gqa": Mode(lambda b, h, i, j: j <= i, {"is_causal": True, "enable_gqa": True}, heads=4, batch=2),
    "mqa": Mode(lambda b, h, i, j: True, {"enable_gqa": True}, heads=3, kv_heads=1),
    "score-scale": Mode(lambda b, h, i, j: j <= i, {"is_causal": True, "score_scale": 3.0}),
    "without-offset": Mode(lambda b, h, i, j: j <= i, {"is_causal": True, "offset": False}),
    "mask-without-offset": Mode(lambda b, h, i, j: bool(MASK[i, j]), {"attn_mask": MASK, "offset": False}),
    "packed": packed_mode(lambda b, h, i, j: packed_causal(i, j), {"is_causal": True, **DOCUMENTS}),
    "packed-window": packed_mode(
        lambda b, h, i, j: packed_causal(i, j) and j > same_document(i, j, CU_Q, CU_K)[1] - 2,
        {"is_causal": True, "window": 2, **DOCUMENTS},
    ),
    "packed-full": packed_mode(lambda b, h, i, j: same_document(i, j, CU_Q, CU_K)[0], DOCUMENTS),
    "decode": decode_mode(
        lambda b, h, i, j: bool(STARTS[b] <= j <= LENGTHS[b] - 2 + i),
        {"cache_seqlens": LENGTHS, "cache_starts": STARTS, "enable_gqa": True},
        kv_heads=1,
    ),
    "decode-without-offset": decode_mode(
        lambda b, h, i, j: bool(j <= LENGTHS[b] - 2 + i), {"cache_seqlens": LENGTHS, "offset": False}
    ),
    "decode-window": decode_mode(
        lambda b, h, i, j: bool(LENGTHS[b] - 2 + i - 4 < j <= LENGTHS[b] - 2 + i),
        {"cache_seqlens": LENGTHS, "window": 4},
    ),
}

POWERS: dict[str, Any] = {"lssa": None, "p1": 1, "p2.5": 2.5, "p3": 3, "p15": 15}
POWERS["by-length"] = PowerByLength(3.0, 2.0, 3)


def visible(mode: Mode) -> Tensor:
    shape = (mode.batch, mode.heads, mode.t_q, mode.t_k)
    return torch.tensor([mode.sees(*place) for place in itertools.product(*map(range, shape))]).view(shape)


def by_hand(
    mode: Mode, q: Tensor, k: Tensor, v: Tensor, power: Callable[[int, int, int, int], float | None]
) -> tuple[Tensor, Tensor]:
    """(output, weights) by the method's equations, one number at a time. ``power(b, h, i, n)`` is a row's power."""
    out = torch.zeros(*q.shape[:3], v.shape[3], dtype=torch.float64)
    weights = torch.zeros(*q.shape[:3], k.shape[2], dtype=torch.float64)
    share = mode.heads // mode.kv_heads
    scale = mode.options.get("score_scale") or math.log(q.shape[3])

    def unit(x: list[float]) -> list[float]:
        norm = math.sqrt(sum(c * c for c in x))
        return [c / norm for c in x] if norm else x

    for b in range(mode.batch):
        for h in range(mode.heads):
            for i in range(mode.t_q):
                seen = [j for j in range(mode.t_k) if mode.sees(b, h, i, j)]
                n = len(seen)
                if n == 0:
                    continue
                query = unit(q[b, h, i].tolist())
                f = {}
                for j in seen:
                    key = unit(k[b, h // share, j].tolist())
                    s = scale * math.log(n) * sum(x * y for x, y in zip(query, key, strict=True))
                    f[j] = max(s, 0.0) + math.log1p(math.exp(-abs(s)))
                a = {j: f[j] / sum(f.values()) for j in seen}
                p = power(b, h, i, n)
                final = a
                if p is not None:
                    offset = 1 if n > 3 and mode.options.get("offset", True) else 0
                    x = {j: max(n * a[j] - offset, 0.0) for j in seen}
                    if max(x.values()) > 2**-10:
                        w = {j: x[j] ** p if x[j] > 0 else 0.0 for j in seen}
                        final = {j: w[j] / sum(w.values()) for j in seen}
                for j, weight in final.items():
                    weights[b, h, i, j] = weight
                    out[b, h, i] += weight * v[b, h // share, j]
    return out, weights


def power_by_hand(power: Any) -> Callable[[int, int, int, int], float | None]:
    if isinstance(power, PowerByLength):
        return lambda b, h, i, n: power.base + power.slope * math.log(max(n, power.n0) / power.n0)
    return lambda b, h, i, n: power


@pytest.mark.parametrize("power", POWERS.values(), ids=POWERS)
@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_matches_equations_in_plain_loops(mode: Mode, power: Any) -> None:
    q, k, v = mode.qkv(seed=3)
    expected, _ = by_hand(mode, q, k, v, power_by_hand(power))
    torch.testing.assert_close(mode(q, k, v, power), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("shape", [(3,), (1, 1, 7), (2, 1, 1), (3, 1), (2, 3, 7), ()], ids=str)
def test_tensor_power_is_per_head_or_broadcast(shape: tuple[int, ...]) -> None:
    mode = Mode(lambda b, h, i, j: j <= i, {"is_causal": True}, batch=2, heads=3, kv_heads=3)
    q, k, v = mode.qkv(seed=8)
    power = 1 + 9 * randn(*shape, seed=1, dtype=torch.float64).abs()
    full = (power[:, None] if len(shape) == 1 else power).expand(2, 3, 7)
    expected, _ = by_hand(mode, q, k, v, lambda b, h, i, n: float(full[b, h, i]))
    torch.testing.assert_close(mode(q, k, v, power), expected, rtol=1e-12, atol=1e-12)


def test_normalized_keys_are_not_normalised() -> None:
    mode = MODES["decode"]
    q, k, v = mode.qkv(seed=5)
    k = k / k.norm(dim=-1, keepdim=True)
    expected, _ = by_hand(mode, q, k, v, lambda *_: 15)
    torch.testing.assert_close(mode(q, k, v, 15, normalized_keys=True), expected, rtol=1e-12, atol=1e-12)
    wrong = mode(q, 2 * k, v, 15, normalized_keys=True)
    assert not torch.allclose(wrong, expected), "the keys must not be normalised again"


@pytest.mark.parametrize("power", [None, 1, 15], ids=["lssa", "p1", "p15"])
@pytest.mark.parametrize("name", ["causal", "mask", "ranges", "window-of-three", "gqa", "without-offset"])
def test_weights_of_each_stage(name: str, power: Any) -> None:
    mode = MODES[name]
    q, k, v = mode.qkv(seed=4)
    _, expected = by_hand(mode, q, k, v, lambda *_: power)
    _, first = by_hand(mode, q, k, v, lambda *_: None)
    weights = attention_weights(q, k, power=power, **mode.options)
    torch.testing.assert_close(weights, expected, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(
        attention_weights(q, k, power=power, stage="normalised", **mode.options), first, rtol=1e-12, atol=1e-13
    )
    sees = visible(mode)
    torch.testing.assert_close(weights.sum(-1), sees.any(-1).double(), rtol=0, atol=1e-12)
    assert (weights[~sees] == 0).all()


def test_scores_are_scaled_by_log_d_and_log_n() -> None:
    q, k, _ = MODES["causal"].qkv(seed=9)
    scores = attention_weights(q, k, stage="scores", is_causal=True)
    cosine = torch.nn.functional.cosine_similarity(q[:, :, :, None], k[:, :, None], dim=-1)
    counts = torch.arange(1, T + 1, dtype=torch.float64)
    torch.testing.assert_close(scores, math.log(D) * counts.log()[:, None] * cosine, rtol=1e-12, atol=1e-12)


class TestSpecialRows:
    """Rows where the equations give 0/0, or which they treat separately."""

    def test_no_visible_key_gives_zero_and_zero_gradient(self) -> None:
        q, k, v = (x.requires_grad_() for x in MODES["mask"].qkv(seed=1))
        out = softplus_attention(q, k, v, attn_mask=MASK, impl="reference")
        assert (out[:, :, 1] == 0).all()
        grads = torch.autograd.grad(out[:, :, 1].sum(), (q, k, v))
        assert all((grad == 0).all() for grad in grads)

    def test_one_visible_key_is_copied(self) -> None:
        q, k, v = MODES["mask"].qkv(seed=1)
        out = softplus_attention(q, k, v, attn_mask=MASK, impl="reference")
        torch.testing.assert_close(out[:, :, 2], v[:, :, 3], rtol=0, atol=0)

    @pytest.mark.parametrize("n", [2, 3, 4, 5])
    def test_offset_starts_at_four_keys(self, n: int) -> None:
        q, k, _ = Mode(lambda *_: True, t_q=3, t_k=n).qkv(seed=n)
        weights = attention_weights(q, k, power=2)
        expected = (n * attention_weights(q, k, stage="normalised") - float(n > 3)).relu() ** 2
        torch.testing.assert_close(weights, expected / expected.sum(-1, keepdim=True), rtol=1e-12, atol=1e-14)
        assert (weights == 0).any() == (n > 3)

    @pytest.mark.parametrize("power", [1, 2.5, 15])
    def test_equal_keys_keep_stage_one(self, power: float) -> None:
        q, k, v = Mode(lambda *_: True, t_k=6).qkv(seed=2)
        k = k[:, :, :1].expand_as(k).contiguous()
        attend = partial(softplus_attention, impl="reference")
        sharpened, first_stage = (output_and_gradients(partial(attend, power=p), q, k, v) for p in (power, None))
        torch.testing.assert_close(sharpened[0], v.mean(-2, keepdim=True).expand(1, 2, 7, 4))
        torch.testing.assert_close(sharpened, first_stage, rtol=1e-12, atol=1e-14)

    @pytest.mark.parametrize(("spread", "sharpens"), [(2e-5, False), (2e-2, True)])
    def test_threshold_separates_equal_from_distinct_keys(self, spread: float, sharpens: bool) -> None:
        q, k, _ = Mode(lambda *_: True, t_k=6).qkv(seed=2)
        k = k[:, :, :1] + spread * randn(*k.shape, seed=5, dtype=torch.float64)
        first = attention_weights(q, k, power=None)
        largest = (6 * first - 1).amax(-1)
        assert ((largest > 2**-10) == sharpens).all()
        same = (attention_weights(q, k, power=15) - first).abs().amax(-1) == 0
        assert (same != sharpens).all()

    @pytest.mark.parametrize("power", [None, 3, 15])
    @pytest.mark.parametrize("which", ["q", "k"])
    def test_zero_vectors_have_zero_score_and_gradient(self, which: str, power: Any) -> None:
        mode = MODES["full"]
        tensors = dict(zip("qkv", mode.qkv(seed=6), strict=True))
        tensors[which][0, 0, 3] = 0
        expected, _ = by_hand(mode, *tensors.values(), lambda *_: power)
        leaves = {name: x.requires_grad_() for name, x in tensors.items()}
        out = mode(*leaves.values(), power)
        torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
        grads = torch.autograd.grad(out.square().sum(), list(leaves.values()))
        assert all(grad.isfinite().all() for grad in grads)
        own = dict(zip(leaves, grads, strict=True))[which]
        assert (own[0, 0, 3] == 0).all(), own[0, 0, 3]
        assert (own[0, 0, 2] != 0).any()

    def test_scores_far_below_zero_keep_their_weight(self) -> None:
        """A naive log(1 + e^s) is 0 below s = -17 in float32."""
        q = torch.zeros(1, 1, 1, 16)
        q[..., 0] = 1
        k = -q.repeat(1, 1, 8, 1)
        k[0, 0, 0] = torch.nn.functional.normalize(-q[0, 0, 0] + 0.1 * torch.ones(16), dim=0)
        weights = attention_weights(q, k, power=None, score_scale=14.0)
        exact = attention_weights(q.double(), k.double(), power=None, score_scale=14.0)
        torch.testing.assert_close(weights.double(), exact, rtol=1e-5, atol=0)
        assert weights.max() > 1.05 * weights.min()


@cache
def away_from_kinks(mode: str) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs where no x is near the kink of the relu and no row's largest x is near the threshold."""
    sees = visible(MODES[mode])
    counts = sees.sum(-1, keepdim=True)
    for seed in range(100, 200):
        q, k, v = MODES[mode].qkv(seed=10 * seed, width=3)
        _, first = by_hand(MODES[mode], q, k, v, lambda *_: None)
        x = torch.where(sees & (counts > 3), counts * first - 1, 1)
        if x.abs().min() > 1e-4 and (x.amax(-1) > 2**-8).all():
            return q, k, v
    raise AssertionError("no inputs found away from the kinks")


@pytest.mark.parametrize("power", POWERS.values(), ids=POWERS)
@pytest.mark.parametrize("name", ["full", "causal", "window", "mask", "packed", "decode"])
def test_gradcheck(name: str, power: Any) -> None:
    inputs = tuple(x.clone().requires_grad_() for x in away_from_kinks(name))
    # Fast mode compares random projections of the Jacobians; two modes check every element.
    fast = name not in ("causal", "mask")
    assert torch.autograd.gradcheck(lambda q, k, v: MODES[name](q, k, v, power), inputs, fast_mode=fast)


@pytest.mark.parametrize("name", sorted(set(MODES) - {"full", "causal", "window", "mask", "packed", "decode"}))
def test_gradcheck_of_other_modes(name: str) -> None:
    inputs = tuple(x.clone().requires_grad_() for x in away_from_kinks(name))
    assert torch.autograd.gradcheck(lambda q, k, v: MODES[name](q, k, v, 3), inputs, fast_mode=True)


@pytest.mark.parametrize("least", [1.0, 2.5, 14.0])
@pytest.mark.parametrize("shape", [(2,), (1, 1, 7), (1, 2, 7), ()], ids=str)
@pytest.mark.parametrize("name", ["causal", "mask", "without-offset"])
def test_gradcheck_of_the_power(name: str, shape: tuple[int, ...], least: float) -> None:
    q, k, v = away_from_kinks(name)
    # Finite differences evaluate both sides of p, so a power of exactly 1 cannot be checked.
    power = (least + 0.1 + randn(*shape, seed=3, dtype=torch.float64).abs()).requires_grad_()
    assert torch.autograd.gradcheck(lambda p: MODES[name](q, k, v, p), (power,))


def method_backward(
    q: Tensor, k: Tensor, v: Tensor, sees: Tensor, p: Tensor | float, d_out: Tensor, subtract: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(out, dq, dk, dv, dp per row) by the method's backward, with E saved by the forward and no other row sum."""
    counts = sees.sum(-1, keepdim=True).double()
    offset = ((counts > 3) & subtract).double()
    q_norm, k_norm = q.norm(dim=-1, keepdim=True), k.norm(dim=-1, keepdim=True)
    q_unit, k_unit = q / q_norm, k / k_norm
    scale = math.log(q.shape[-1]) * counts.log()
    s = scale * (q_unit @ k_unit.mT)
    f = torch.where(sees, torch.logaddexp(s, torch.zeros((), dtype=s.dtype)), 0)
    R = f.sum(-1, keepdim=True)
    x = (counts * f / R - offset).relu() * sees
    M = x.amax(-1, keepdim=True)
    u = x / M
    steepness = torch.where(u > 0, u.clamp(min=1e-300) ** (p - 1), 0)
    w = u * steepness
    W = w.sum(-1, keepdim=True)
    P = w / W
    out = P @ v
    E = (steepness / W) @ v - out * (steepness / W).sum(-1, keepdim=True)

    dP = d_out @ v.mT
    delta = (d_out * out).sum(-1, keepdim=True)
    eps = p * offset / (counts * M) * (d_out * E).sum(-1, keepdim=True)
    dx = p * steepness / (W * M) * (dP - delta)
    ds = sees * s.sigmoid() * counts / R * (dx - eps)
    dp = (P * torch.where(u > 0, u, 1).log() * (dP - delta)).sum(-1)
    dq, dk = scale * (ds @ k_unit), (ds * scale).mT @ q_unit

    def through_norm(g: Tensor, unit: Tensor, norm: Tensor) -> Tensor:
        return (g - unit * (unit * g).sum(-1, keepdim=True)) / norm

    return out, through_norm(dq, q_unit, q_norm), through_norm(dk, k_unit, k_norm), P.mT @ d_out, dp


LONG = 48
CU_LONG = torch.tensor([0, 1, 14, 17, 48], dtype=torch.int32)
long_mode = partial(Mode, t_q=LONG, t_k=LONG)
BACKWARD_MODES = {
    "full": long_mode(lambda b, h, i, j: True),
    "causal": long_mode(lambda b, h, i, j: j <= i, {"is_causal": True}),
    "window": long_mode(lambda b, h, i, j: i - 9 < j <= i, {"is_causal": True, "window": 9}),
    "without-offset": long_mode(lambda b, h, i, j: j <= i, {"is_causal": True, "offset": False}),
    "packed": long_mode(
        lambda b, h, i, j: packed_causal(i, j, CU_LONG, CU_LONG),
        {"is_causal": True, **packed_options(CU_LONG, CU_LONG)},
        function=softplus_attention_varlen,
    ),
}


@pytest.mark.parametrize("power", [2, 2.5, 3, 7, 15, 31])
@pytest.mark.parametrize("mode", BACKWARD_MODES.values(), ids=BACKWARD_MODES)
def test_explicit_backward_matches_autograd(mode: Mode, power: float) -> None:
    q, k, v = mode.qkv(seed=11, width=8)
    d_out = randn(1, 2, LONG, 8, seed=14, dtype=torch.float64)
    rows = torch.full((1, 2, LONG), float(power), dtype=torch.float64)
    autograd = output_and_gradients(mode, q, k, v, rows, grad_out=d_out)
    explicit = method_backward(q, k, v, visible(mode), power, d_out, mode.options.get("offset", True))
    for name, ours, theirs in zip(("out", "dq", "dk", "dv", "dp"), explicit, autograd, strict=True):
        scale = max(1.0, float(theirs.abs().max()))
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12 * scale, msg=lambda m, name=name: f"{name}: {m}")


def test_unit_keys() -> None:
    check_unit_vectors(unit_keys, "cpu", (torch.float32, torch.float64, torch.bfloat16, torch.float16))
    zero = torch.zeros(1, 1, 2, 8, requires_grad=True)
    unit_keys(zero).sum().backward()
    assert zero.grad.isfinite().all()


@pytest.mark.parametrize("window", [None, 1, 3])
@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("given", ["nothing", "ranges", "mask", "own key"])
@pytest.mark.parametrize(("t_q", "t_k"), [(5, 5), (1, 7), (3, 9), (6, 2)])
def test_counts_of_visible_keys(t_q: int, t_k: int, given: str, is_causal: bool, window: int | None) -> None:
    start = torch.arange(t_q, dtype=torch.int32)[None] % 3
    kwargs: dict[str, Any] = {
        "nothing": {},
        "ranges": {"key_start": start, "key_end": start + 4},
        "mask": {"mask": torch.arange(t_q * t_k).reshape(1, 1, t_q, t_k) % 3 > 0},
        "own key": {"query_key_index": start + 1},
    }[given]
    visibility = Visibility(t_q, t_k, torch.device("cpu"), is_causal, window if is_causal else None, **kwargs)
    dense = visibility.dense().sum(-1)
    assert torch.equal(visibility.counts().expand_as(dense).long(), dense)


def test_accepts_calls_of_sdpa() -> None:
    """SDPA's arguments in its order, with its defaults passed explicitly."""
    q, k, v = (randn(1, 2, 5, 8, seed=seed) for seed in range(3))
    mask = torch.ones(5, 5, dtype=torch.bool).tril()
    expected = softplus_attention(q, k, v, is_causal=True)
    for given in ((mask, 0.0, False), (None, 0.0, True)):
        assert F.scaled_dot_product_attention(q, k, v, *given, scale=None, enable_gqa=False).shape == expected.shape
        torch.testing.assert_close(softplus_attention(q, k, v, *given, scale=None, enable_gqa=False), expected)
    packed = [x[0].transpose(0, 1) for x in (q, k, v)]
    ends = torch.tensor([0, 5], dtype=torch.int32)
    out = softplus_attention_varlen(*packed, ends, ends, 5, 5, is_causal=True)
    torch.testing.assert_close(out.transpose(0, 1)[None], expected)


@pytest.mark.parametrize("impl", ["reference", "chunked"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_nonfinite_values_leave_no_plausible_gradient(impl: str, bad: float) -> None:
    """Rows that give it weight have NaN in the gradients of q and of the keys they see; other rows have none."""
    q, k, v = (randn(1, 1, 6, 4, seed=seed) for seed in range(3))
    v[0, 0, 2, 1] = bad
    given = [x.requires_grad_() for x in (q, k, v)]
    out = softplus_attention(*given, power=3, is_causal=True, impl=impl)
    affected = ~out.isfinite().all(-1)[0, 0]
    assert 0 < affected.sum() < 6
    dq, dk, dv = torch.autograd.grad(out.sum(), given)
    assert torch.equal(~dq.isfinite().all(-1)[0, 0], affected)
    assert not dk.isfinite().all()
    assert dv.isfinite().all()
