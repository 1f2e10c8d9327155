"""The Hopper kernels against the reference without a GPU, in the Gluon interpreter of tests/support."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from gluon_interpreter import InterpretedKernel
from helpers import (
    allowed_error,
    as_given,
    assert_many_equal_keys_have_no_weight,
    assert_outcomes_within_yardstick,
    assert_within_yardstick,
    largest_error,
    outcomes,
    output_and_gradients,
    randn,
    some_scores_below_zero,
    unit_in_the_last_place,
)
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton_cases import Case, assert_case

from softplus_attention import dispatch, softplus_attention
from softplus_attention.kernels.hopper import dkv as hopper_dkv
from softplus_attention.kernels.hopper import dq as hopper_dq
from softplus_attention.kernels.hopper import forward as hopper_forward
from softplus_attention.kernels.hopper import forward_fallback as hopper_fallback
from softplus_attention.kernels.hopper import launch as hopper_launch
from softplus_attention.kernels.hopper.common import program_position
from softplus_attention.kernels.hopper.forward import least_mean, softplus_above, terms_above
from softplus_attention.kernels.triton import common as triton_common
from softplus_attention.kernels.triton.common import softplus2

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter needs CPU tensors")

KERNELS = (
    (hopper_forward, "gluon_forward_kernel"),
    (hopper_fallback, "gluon_forward_again_kernel"),
    (hopper_dq, "gluon_dq_kernel"),
    (hopper_dkv, "gluon_dkv_kernel"),
)


def interpret(monkeypatch: pytest.MonkeyPatch, late_products: bool) -> tuple[list[str], list[InterpretedKernel]]:
    """Run the Hopper kernels in the interpreter. Returns the (growing) list of launched kernels, and the kernels."""
    ran: list[str] = []
    kernels = [InterpretedKernel(getattr(module, name), late_products, ran) for module, name in KERNELS]
    for (module, name), kernel in zip(KERNELS, kernels, strict=True):
        monkeypatch.setattr(module, name, kernel)
    monkeypatch.setattr(hopper_launch, "available", lambda device: True)
    monkeypatch.setattr(dispatch, "check_for_triton", lambda q: None)
    return ran, kernels


@pytest.fixture(params=[False, True], ids=["early products", "late products"])
def launches(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    return interpret(monkeypatch, request.param)[0]


@pytest.fixture
def late_kernels(monkeypatch: pytest.MonkeyPatch) -> list[InterpretedKernel]:
    return interpret(monkeypatch, late_products=True)[1]


CAREFUL = {"nan_safe_pass", "dq_carefully", "dkv_carefully"}  # recompute rare blocks


FORWARD = ["gluon_forward_kernel", "gluon_forward_again_kernel"]
BACKWARD = ["gluon_dq_kernel", "gluon_dq_kernel", "gluon_dkv_kernel", "gluon_dkv_kernel"]
SIZES = {"heads": 2, "kv_heads": 1, "d": 64, "dv": 64}
WIDE = SIZES | {"d": 128, "dv": 128}


@pytest.mark.parametrize(
    "case",
    [
        Case(dtype="bfloat16", t_q=150, t_k=170, **SIZES),
        Case(dtype="float16", t_q=170, t_k=150, power="3", layout="transposed", **SIZES),
        Case(dtype="bfloat16", t_q=17, t_k=64, power="31", **SIZES),
        Case(dtype="float16", t_q=130, t_k=77, mode="full", power="2", **SIZES),
        Case(dtype="bfloat16", t_q=130, t_k=200, power="None", **SIZES),
        Case(dtype="float16", t_q=65, t_k=130, mode="full", power="None", **SIZES),
        Case(dtype="bfloat16", t_q=130, t_k=130, **WIDE),
        Case(dtype="float16", t_q=70, t_k=140, mode="full", power="None", **WIDE),
        Case(dtype="bfloat16", t_q=200, t_k=330, mode="window", window=132, **(SIZES | {"heads": 1})),
        Case(dtype="bfloat16", t_q=130, t_k=130, power="per head", **SIZES),
        Case(dtype="bfloat16", t_q=150, t_k=170, mode="ranges", **SIZES),
    ],
    ids=str,
)
@pytest.mark.usefixtures("poisoned_memory")
def test_matches_reference(case: Case, launches: list[str]) -> None:
    assert_case(case, "cpu")
    assert launches == FORWARD + BACKWARD


@pytest.mark.parametrize(
    "case",
    [
        Case(dtype="float16", t_q=20, t_k=150, **(WIDE | {"heads": 3})),
        Case(dtype="float16", t_q=130, t_k=70, **WIDE),
        Case(dtype="bfloat16", t_q=140, t_k=140, mode="full", power="7", **SIZES),
        Case(dtype="bfloat16", t_q=150, t_k=130, mode="window", **SIZES),
        Case(dtype="float16", t_q=140, t_k=340, mode="window", window=100, **WIDE),
        Case(dtype="bfloat16", t_q=130, t_k=130, mode="window", window=2, power="None", **SIZES),
        Case(dtype="bfloat16", t_q=70, t_k=140, power="1", **SIZES),
        Case(dtype="bfloat16", t_q=70, t_k=140, power="2.5", **SIZES),
        Case(dtype="bfloat16", t_q=130, t_k=120, mode="full", power="per row", **WIDE),
        Case(dtype="float16", t_q=140, t_k=300, mode="window", window=100, power="by length", **SIZES),
        Case(dtype="bfloat16", t_q=200, t_k=210, mode="packed", power="None", **SIZES),
        Case(dtype="float16", t_q=200, t_k=210, mode="packed", **WIDE),
        Case(dtype="bfloat16", t_q=100, t_k=300, mode="cache", **SIZES),
        Case(dtype="bfloat16", t_q=90, t_k=150, mode="ranges", power="per row", **WIDE),
    ],
    ids=str,
)
@pytest.mark.usefixtures("poisoned_memory")
def test_ordinary_blocks_are_not_recomputed(case: Case, late_kernels: list[InterpretedKernel]) -> None:
    """Shared keys, rows without keys, partial blocks, windows, powers per row, ranges."""
    assert_case(case, "cpu")
    called = set().union(*(kernel.called for kernel in late_kernels))
    assert {"second_loop", "dq_loop", "dkv_loop"} <= called
    assert not called & CAREFUL


@pytest.mark.parametrize(
    ("dtype", "power", "by_product"),
    [(torch.bfloat16, 2.5, True), (torch.bfloat16, 1.5, False), (torch.bfloat16, 4, False), (torch.float16, 2, True)],
)
def test_small_powers_use_one_polynomial(
    dtype: torch.dtype, power: float, by_product: bool, late_kernels: list[InterpretedKernel]
) -> None:
    """Sums and weights use the same polynomial in one pass: many keys just below the average would reveal two."""
    q, k, v = (randn(1, 1, 100, 64, seed=seed, dtype=dtype) for seed in range(3))
    softplus_attention(q[:, :, :20], k, v, is_causal=True, power=power, impl="triton")
    assert ("logarithms" in late_kernels[0].called) == by_product


INFERENCE = {"dtype": "bfloat16", "power": "None", "gradients": False}


@pytest.mark.parametrize(
    "case",
    [
        Case(t_q=150, t_k=170, **INFERENCE, **SIZES),
        Case(t_q=130, t_k=200, mode="full", **INFERENCE, **WIDE),
        Case(t_q=200, t_k=200, mode="window", window=70, **INFERENCE, **SIZES),
        Case(t_q=150, t_k=170, mode="ranges", **INFERENCE, **SIZES),
    ],
    ids=str,
)
@pytest.mark.usefixtures("poisoned_memory")
def test_inference(case: Case, launches: list[str]) -> None:
    assert_case(case, "cpu")
    assert launches == FORWARD


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("power", [None, 15])
@pytest.mark.usefixtures("poisoned_memory")
def test_fallback_in_inference(power: float | None, dtype: torch.dtype, late_kernels: list[InterpretedKernel]) -> None:
    """The fallback pass finds the statistics it needs, although inference saves nothing else."""
    q, k, v = (randn(1, 1, 130, 64, seed=seed).to(dtype) for seed in range(3))
    plain = softplus_attention(q, k, v, power=power, is_causal=True, impl="reference")
    v[0, 0, 70, 3] = math.nan
    out = softplus_attention(q, k, v, power=power, is_causal=True, impl="triton")
    expected = softplus_attention(*(x.double() for x in (q, k, v)), power=power, is_causal=True, impl="reference")
    assert out.isnan().any()
    assert not (out.isnan() & expected.isfinite()).any()  # a weight may underflow in half precision
    others = torch.arange(64) != 3
    torch.testing.assert_close(out[..., others], plain[..., others], rtol=0.02, atol=0.02)
    assert "nan_safe_pass" in set().union(*(kernel.called for kernel in late_kernels))


@pytest.mark.parametrize(
    ("dtype", "d", "power"),
    [(torch.bfloat16, 64, 15), (torch.bfloat16, 128, 3), (torch.float16, 64, 15), (torch.float16, 128, 3)],
)
@pytest.mark.usefixtures("late_kernels")
def test_keys_that_share_a_direction(dtype: torch.dtype, d: int, power: int) -> None:
    """In one head negative scores are above the average, in the other they are not."""
    q, k, v = (randn(1, heads, 140, d, seed=seed) for seed, heads in enumerate((2, 1, 1)))
    q, k = q + torch.tensor([0.0, 2.0])[:, None, None], k + 1
    assert_within_yardstick(
        softplus_attention, *(x.to(dtype) for x in (q, k, v)), impl="triton", power=power, is_causal=True,
        enable_gqa=True,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("dtype", "power"), [(torch.bfloat16, 15), (torch.bfloat16, 3.7), (torch.float16, 31), (torch.float16, None)]
)
@pytest.mark.parametrize("opposite", [0.6, 3.0])
def test_rows_with_negative_scores_only(
    opposite: float, dtype: torch.dtype, power: float | None, late_kernels: list[InterpretedKernel]
) -> None:
    """Next to rows with scores of both signs. The first sum does not know their largest score, and float16 needs their
    sigmoids scaled."""
    q, k, v = some_scores_below_zero(opposite)
    assert_within_yardstick(
        softplus_attention, *(x.to(dtype) for x in (q, k, v)), impl="triton", power=power, is_causal=True
    )
    if power is not None:
        assert not set().union(*(kernel.called for kernel in late_kernels)) & CAREFUL


@pytest.mark.parametrize("power", [None, 15])
@pytest.mark.parametrize("size", [2.0**-80, 2.0**80, 0.0])
@pytest.mark.usefixtures("late_kernels")
def test_queries_of_every_size(size: float, power: float | None) -> None:
    """Squares overflow or underflow in one block but not in the next; a zero query has cosine 0."""
    q, k, v = (randn(1, 1, 130, 64, seed=seed).bfloat16() for seed in range(3))
    sizes = torch.ones(130, 1)
    sizes[1:64:2] = size
    assert_within_yardstick(
        softplus_attention, q * sizes.bfloat16(), k, v, impl="triton", power=power, is_causal=True, gradients=False
    )


@gluon.jit
def positions_kernel(Positions, heads, inverse, num_warps: gl.constexpr):
    """Store the block, head and sequence of every program, in the order in which programs start."""
    block, head, b = program_position(heads, inverse)
    started = gl.program_id(0) + gl.num_programs(0) * (gl.program_id(1) + gl.num_programs(1) * gl.program_id(2))
    gl.store(Positions + 3 * started, block)
    gl.store(Positions + 3 * started + 1, head)
    gl.store(Positions + 3 * started + 2, b)


@pytest.mark.parametrize("together", [1, 2, 6, 12])
def test_programs_start_with_the_longest_blocks(together: int) -> None:
    heads, batch, blocks = 4, 3, 2
    grid = (together, blocks, heads * batch // together)
    positions = torch.full((math.prod(grid), 3), -1, dtype=torch.int32)
    InterpretedKernel(positions_kernel, late_products=False)[grid](positions, heads, hopper_launch.inverse_of(heads), 4)
    found = positions.tolist()
    assert sorted(found) == [[x, y, z] for x in range(blocks) for y in range(heads) for z in range(batch)]
    for first in range(0, len(found), together):  # neighbours have equal length and neighbouring heads
        part = found[first : first + together]
        assert {block for block, _, _ in part} == {first // together % blocks}
        numbers = [b * heads + head for _, head, b in part]
        assert numbers == list(range(numbers[0], numbers[0] + together))
        assert numbers[0] == first // (together * blocks) * together


def test_grids_of_shared_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """A query head reads its share of the keys, a key head all queries that share it."""
    kernels = interpret(monkeypatch, late_products=False)[1]
    monkeypatch.setattr(hopper_launch, "NEARBY", 4 * 70 * 64 * 2)  # four times the keys, or values, of a head
    # Its cache depends on NEARBY.
    monkeypatch.setattr(hopper_launch, "heads_together", hopper_launch.heads_together.__wrapped__)
    q, k, v = (randn(2, heads, 70, 64, seed=seed).bfloat16() for seed, heads in enumerate((8, 2, 2)))
    given = [x.requires_grad_() for x in (q, k, v)]
    out = softplus_attention(*given, is_causal=True, enable_gqa=True, impl="triton")
    torch.autograd.grad(out, given, torch.ones_like(out))
    grids = {kernel.__name__: kernel.grids for kernel in kernels}
    assert grids["gluon_forward_kernel"] == [(8, 2, 2)]
    assert grids["gluon_dq_kernel"][0] == (8, 2, 2)
    assert grids["gluon_dkv_kernel"][0] == (1, 2, 4)  # eight times a head's: half a head, so one


@pytest.mark.parametrize("bad", [0.0, math.nan])
def test_grouping_of_heads_changes_no_number(
    bad: float, monkeypatch: pytest.MonkeyPatch, late_kernels: list[InterpretedKernel]
) -> None:
    """Also for blocks that are recomputed because of NaN."""
    q, k, v, grad = (randn(3, 4, 70, 64, seed=seed).bfloat16() for seed in range(4))
    k, v = k[:, :2], v[:, :2].clone()
    v[1, 1, 20, 3] += bad

    attend = partial(softplus_attention, is_causal=True, enable_gqa=True, impl="triton")

    def outcome(together: int) -> list[Tensor]:
        monkeypatch.setattr(hopper_launch, "heads_together", lambda heads, size: together)
        return output_and_gradients(attend, q, k, v, grad_out=grad)

    expected = outcome(6)
    for together in (1, 2, 3):
        torch.testing.assert_close(outcome(together), expected, rtol=0, atol=0, equal_nan=True)
    forward = next(kernel for kernel in late_kernels if kernel.__name__ == FORWARD[0])
    assert forward.grids == [(6, 2, 2), (1, 2, 12), (2, 2, 6), (3, 2, 4)]
    ran = set().union(*(kernel.called for kernel in late_kernels))
    assert ("nan_safe_pass" in ran) == math.isnan(bad)


@pytest.mark.parametrize("above", [False, True])
@pytest.mark.usefixtures("late_kernels")
def test_largest_score_below_zero_in_a_full_tile(above: bool) -> None:
    """The first sum knows the largest score of the tile at the edge, which is the row's only if it is above 0."""
    cosines = torch.linspace(-0.05, -0.017, 130)
    cosines[[5, 40, 70]] = torch.tensor([-0.004, -0.006, -0.008])
    if above:
        cosines[129] = 0.01
    q, v = randn(1, 1, 2, 64, seed=0), randn(1, 1, 130, 64, seed=1)
    unit = torch.nn.functional.normalize(q[:, :, :1], dim=-1)
    across = randn(1, 1, 130, 64, seed=2)
    across = torch.nn.functional.normalize(across - (across * unit).sum(-1, keepdim=True) * unit, dim=-1)
    k = 8 * (cosines[:, None] * unit + (1 - cosines.square()).sqrt()[:, None] * across)
    given = (x.to(torch.bfloat16) for x in (8 * unit.expand(1, 1, 2, 64), k, v))
    results = outcomes(softplus_attention, *given, "triton", 15, as_given, {"is_causal": True})
    assert_outcomes_within_yardstick(*results, names=["out"])


@pytest.mark.parametrize(
    ("dtype", "power"),
    [(torch.bfloat16, 3), (torch.bfloat16, 15), (torch.bfloat16, 31), (torch.bfloat16, 3.7), (torch.float16, 15)],
)
@pytest.mark.parametrize(("score_scale", "means"), [(8.0, (2.07, 9)), (3.8, (1.5, 2.07)), (0.9, (1.001, 1.2))])
def test_polynomials_by_mean_of_a_row(
    dtype: torch.dtype,
    power: float,
    score_scale: float,
    means: tuple[float, float],
    late_kernels: list[InterpretedKernel],
) -> None:
    """The mean selects the shortest polynomial, a longer one, or neither; small powers always use their own."""
    q, k, v = (randn(1, 1, length, 64, seed=seed) for seed, length in enumerate((6, 200, 200)))
    counts = torch.arange(195, 201)[:, None]
    cosines = torch.nn.functional.normalize(q, dim=-1) @ torch.nn.functional.normalize(k, dim=-1).mT
    f = torch.logaddexp(cosines * score_scale * counts.log(), torch.zeros(())) / math.log(2)
    mean = f.tril(194).sum(-1) / counts[:, 0]
    assert ((mean > means[0]) & (mean < means[1])).all()
    given = (x.to(dtype) for x in (q, k, v))
    options = {"impl": "triton", "power": power, "score_scale": score_scale, "is_causal": True}
    assert_within_yardstick(softplus_attention, *given, **options)
    assert ("softplus_above" in late_kernels[0].called) == (power == 3 or mean.min() > 1.2)


@pytest.mark.parametrize(("power", "noise"), [(15, 0.01), (15, 0.05), (31, 0.01), (31, 0.1), (7, 0.02)])
@pytest.mark.usefixtures("late_kernels")
def test_keys_that_are_nearly_equal(power: int, noise: float) -> None:
    """Rows with f' of 4 or 5 whose scores hardly differ: the power amplifies errors of f' in the weights, and in the
    gradients if the backward uses another polynomial than the forward."""
    q, k, v, shared = (randn(1, 1, length, 64, seed=seed) for seed, length in enumerate((64, 256, 256, 1)))
    shared = torch.nn.functional.normalize(shared, dim=-1)
    across = torch.nn.functional.normalize(q - (q * shared).sum(-1, keepdim=True) * shared, dim=-1)
    given = (8 * (0.13 * shared + 0.99 * across), 8 * shared + noise * k, v)
    results = outcomes(softplus_attention, *(x.bfloat16() for x in given), "triton", power, as_given, {})
    assert_outcomes_within_yardstick(*results, names=["out", "dk", "dv"])


@gluon.jit
def softplus_kernel(T, F, TERMS: gl.constexpr, LOG_MODE: gl.constexpr, num_warps: gl.constexpr):
    o = gl.arange(0, 4096, layout=gl.BlockedLayout([4], [32], [num_warps], [0]))
    t = gl.load(T + o)
    gl.store(F + o, softplus_above(t, TERMS, LOG_MODE) if TERMS > 0 else softplus2(t, LOG_MODE))


@pytest.mark.parametrize("fine", [triton_common.SHORT.value, triton_common.LONG.value])
def test_softplus_by_polynomials(fine: int) -> None:
    """Within a relative error, also for small values."""
    t, found = torch.linspace(-60, 60, 4096), torch.empty(4096)
    t[:2048] = torch.linspace(-3, 3, 2048)
    InterpretedKernel(softplus_kernel, late_products=False)[1, 1, 1](t, found, 0, fine, 4)
    right = torch.logaddexp2(t.double(), torch.zeros(()))
    allowed = 4e-4 if fine == triton_common.SHORT.value else 1.8e-6
    assert ((found - right).abs() <= allowed * right).all()


@pytest.mark.parametrize("fine", [triton_common.SHORT.value, triton_common.LONG.value])
@pytest.mark.parametrize("which", ["far", "near", "own"])
def test_softplus_above(which: str, fine: int) -> None:
    """Accurate above its mean, and below that mean wherever the exact value is."""
    t, found = torch.linspace(-60, 60, 4096), torch.empty(4096)
    t[:2048] = torch.linspace(-1, 3, 2048)
    terms = hopper_forward.OWN.value if which == "own" else terms_above(fine, which == "far")
    InterpretedKernel(softplus_kernel, late_products=False)[1, 1, 1](t, found, terms, fine, 4)
    right, least = torch.logaddexp2(t.double(), torch.zeros(())), least_mean(terms)
    above = right >= least
    allowed = 4e-4 if fine == triton_common.SHORT.value else 1.4e-6
    assert ((found - right).abs() <= allowed + right * 2**-23)[above].all()  # t itself is rounded
    assert (found[~above] < least + 1e-3).all()


def test_sum_over_many_tiles(launches: list[str]) -> None:
    """More tiles than one product of factors can hold."""
    q = randn(1, 1, 3, 64, seed=0, dtype=torch.bfloat16)
    k, v = (randn(1, 1, 98 * 64 + 5, 64, seed=seed, dtype=torch.bfloat16) for seed in (1, 2))
    ours, theirs = (softplus_attention(q, k, v, is_causal=True, impl=impl).double() for impl in ("triton", "reference"))
    truth = softplus_attention(q.double(), k.double(), v.double(), is_causal=True, impl="reference")
    assert largest_error(ours, truth) <= allowed_error(theirs, truth, q.dtype)
    assert launches == FORWARD


@pytest.mark.usefixtures("late_kernels")
def test_equal_keys_below_the_average_have_no_weight() -> None:
    """With a relative error of 1e-5 in their sum, 65,536 keys together would have 3% of the weight."""
    assert_many_equal_keys_have_no_weight(64, -0.26)


@pytest.mark.parametrize(
    ("score", "power", "options"),
    [(7.7, 2, {}), (-0.26, 1.5, {"key_start": torch.tensor([[0, 65536 - 70, 0]], dtype=torch.int32)})],
    ids=["by product", "masked"],
)
@pytest.mark.usefixtures("late_kernels")
@pytest.mark.slow
def test_equal_keys_by_each_summation(score: float, power: float, options: dict[str, Any]) -> None:
    assert_many_equal_keys_have_no_weight(64, score, power, rows=[0, 2], **options)


@pytest.mark.parametrize("power", [15, 3, 2.5, None])
def test_equal_keys_keep_the_first_stage(power: float | None, launches: list[str]) -> None:
    q, v = (randn(1, 1, 100, 64, seed=seed, dtype=torch.bfloat16) for seed in (0, 2))
    k = randn(1, 1, 1, 64, seed=1, dtype=torch.bfloat16).repeat(1, 1, 100, 1)
    out = softplus_attention(q, k, v, power=power, is_causal=True, impl="triton")
    mean = v.float().cumsum(2) / torch.arange(1, 101)[:, None]
    assert largest_error(out, mean) <= unit_in_the_last_place(mean, torch.bfloat16)
    ours, theirs, truth = outcomes(softplus_attention, q, k, v, "triton", power, as_given, {"is_causal": True})
    assert_outcomes_within_yardstick(ours, theirs, truth, ["out", "dk", "dv"])
    # Gradients of a row's scores sum to zero, and so does dq if all keys are equal: only rounding remains.
    assert float(truth["dq"].abs().max()) < 1e-12
    assert float(ours["dq"].abs().max()) < torch.finfo(q.dtype).eps * float(truth["dk"].abs().max())
    assert launches == FORWARD + FORWARD + BACKWARD


@pytest.mark.parametrize("which", ["q", "k", "v"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_non_finite_inputs_affect_only_visible_rows(
    which: str, bad: float, late_kernels: list[InterpretedKernel]
) -> None:
    """Unchanged: finite outputs, the query gradients of their rows, and the gradients of keys and values that only such
    rows see."""

    def outcome(values: dict[str, Tensor]) -> list[Tensor]:
        attend = partial(softplus_attention, is_causal=True, impl="triton")
        return [x[0, 0] for x in output_and_gradients(attend, *values.values(), grad_out=torch.ones_like(values["v"]))]

    values = {name: randn(1, 1, 140, 64, seed=seed, dtype=torch.bfloat16) for seed, name in enumerate("qkv")}
    out, dq, dk, dv = outcome(values)
    values[which][0, 0, 70, 3] = bad
    reference = softplus_attention(*values.values(), is_causal=True, impl="reference")[0, 0]
    bad_out, bad_dq, bad_dk, bad_dv = outcome(values)
    clear = reference.isfinite().all(-1)
    assert bad_out.isfinite().all(-1).tolist() == clear.tolist()
    assert clear[:70].all()
    assert not clear[70:].all()
    torch.testing.assert_close(bad_out[clear], out[clear], atol=1e-3, rtol=1e-2)  # a unit in the last place
    torch.testing.assert_close(bad_dq[clear], dq[clear], atol=2e-2, rtol=2e-2)
    if which == "q":
        torch.testing.assert_close(bad_dk[71:], dk[71:], atol=2e-2, rtol=2e-2)
        torch.testing.assert_close(bad_dv[71:], dv[71:], atol=2e-2, rtol=2e-2)
    assert set(late_kernels[0].ran) == {*FORWARD, *BACKWARD}


@pytest.mark.parametrize("which", ["q", "k", "v"])
def test_nan_with_heads_of_128(which: str, late_kernels: list[InterpretedKernel]) -> None:
    """Two heads that share keys: a NaN query does not affect the other head, NaN keys do not affect earlier rows."""
    values = {n: randn(1, 1 + (n == "q"), 70, 128, seed=seed, dtype=torch.bfloat16) for seed, n in enumerate("qkv")}
    values[which][0, 0, 40, 3] = float("nan")
    attend = partial(softplus_attention, is_causal=True, enable_gqa=True, impl="triton")
    out, dq, dk, dv = output_and_gradients(attend, *values.values(), grad_out=torch.ones_like(values["q"]))
    reference = attend(*values.values(), impl="reference")
    clear = reference.isfinite().all(-1)
    assert out.isfinite().all(-1).tolist() == clear.tolist()
    assert 0 < int(clear.sum()) < clear.numel()
    assert dq[clear].isfinite().all()
    if which == "q":
        assert dk[..., 41:, :].isfinite().all()
        assert dv[..., 41:, :].isfinite().all()
    assert {"dq_carefully", "dkv_carefully"} <= set().union(*(kernel.called for kernel in late_kernels))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_non_finite_values_with_windows_and_powers(bad: float, late_kernels: list[InterpretedKernel]) -> None:
    """Outputs and gradients of queries and powers in other rows are unchanged."""
    power = randn(2, 1, 200, seed=3).abs() * 5 + 1
    power[..., ::7] = 1
    q, k, v = (randn(2, 1, 200, 64, seed=seed, dtype=torch.bfloat16) for seed in range(3))

    def attend(q: Tensor, power: Tensor, impl: str = "triton") -> Tensor:
        return softplus_attention(q, k, v, power=power, is_causal=True, window=70, impl=impl)

    plain = output_and_gradients(attend, q, power, grad_out=torch.ones_like(q))
    v[0, 0, 90, 3] = bad
    clear = attend(q, power, "reference").isfinite().all(-1)
    assert clear[0, 0, :90].all()
    assert not clear[0, 0, 90:160].all()
    assert clear[0, 0, 160:].all()
    changed = output_and_gradients(attend, q, power, grad_out=torch.ones_like(q))
    assert changed[0].isfinite().all(-1).tolist() == clear.tolist()
    torch.testing.assert_close([x[clear] for x in changed], [x[clear] for x in plain], atol=2e-2, rtol=2e-2)
    assert CAREFUL - {"dkv_carefully"} <= set().union(*(kernel.called for kernel in late_kernels))


def documents(length: int) -> dict[str, Tensor]:
    """Key ranges of two sequences: documents that end inside a block or span several, and a block of rows without
    keys."""
    start = torch.zeros(2, length, dtype=torch.int32)
    start[0, 230:] = 230
    start[1, 40:] = 40
    end = torch.full_like(start, length)
    start[1, 128:192] = end[1, 128:192] = 200
    return {"key_start": start, "key_end": end}


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.usefixtures("late_kernels")
def test_documents(is_causal: bool) -> None:
    q, k, v = (randn(2, 1, 300, 64, seed=seed, dtype=torch.bfloat16) for seed in range(3))
    assert_within_yardstick(softplus_attention, q, k, v, impl="triton", power=15, is_causal=is_causal, **documents(300))


def test_nan_query_affects_no_other_document(late_kernels: list[InterpretedKernel]) -> None:
    q, k, v = (randn(2, 1, 130, 64, seed=seed, dtype=torch.bfloat16) for seed in range(3))

    attend = partial(softplus_attention, is_causal=True, impl="triton", **documents(130))
    plain = output_and_gradients(attend, q, k, v, grad_out=torch.ones_like(q))
    q[1, 0, 50, 3] = float("nan")
    changed = output_and_gradients(attend, q, k, v, grad_out=torch.ones_like(q))
    for found, expected in zip(changed[2:], plain[2:], strict=True):
        torch.testing.assert_close(found[0], expected[0], atol=0, rtol=0)
        torch.testing.assert_close(found[1, 0, :40], expected[1, 0, :40], atol=2e-2, rtol=2e-2)
    assert "dkv_carefully" in late_kernels[3].called
