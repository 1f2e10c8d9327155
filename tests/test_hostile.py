"""Hostile data: dominant and equal keys in long sequences, vectors of extreme size, and single NaN or Inf values."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import randn, run
from hostile_cases import ALL, FLOAT32_ONLY, HOSTILE, SETTINGS, SHORT, VALUES, Poisoned
from torch import Tensor

from softplus_attention import attention_weights, softplus_attention, softplus_attention_decode

pytestmark = pytest.mark.usefixtures("poisoned_memory")

THREADS = 2
T, D = 4096, 32
ROWS = 160
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


CASES = [(name, dtype) for name in HOSTILE for dtype in DTYPES] + [(name, torch.float32) for name in FLOAT32_ONLY]
IDS = [f"{name}-{str(dtype).removeprefix('torch.')}" for name, dtype in CASES]


def hostile(name: str, dtype: torch.dtype, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (randn(1, 1, T, D, seed=seed) for seed in (1, 2, 3))
    ALL[name](q, k)
    return q[:, :, -rows:].to(dtype), k.to(dtype), v.to(dtype)


def check_hostile(name: str, dtype: torch.dtype, power: Any, rows: int, offset: bool = True) -> None:
    q, k, v = hostile(name, dtype, rows)
    grad_out = randn(*q.shape, seed=4, dtype=dtype)
    options = {"impl": "chunked", "power": power, "offset": offset, "is_causal": True, "grad_out": grad_out}
    ours = run(softplus_attention, q, k, v, **options)
    exact = run(softplus_attention, q, k, v, **options, dtype=torch.float64)
    assert all(x.isfinite().all() for x in exact.values())
    assert ours["out"].isfinite().all()
    assert float(ours["out"].abs().max()) <= float(v.abs().max()) * 1.01, "an average must not exceed its values"
    for which in ("dq", "dk", "dv"):
        if float(exact[which].abs().max()) < torch.finfo(dtype).max / 2:
            assert ours[which].isfinite().all(), which
        else:
            assert dtype == torch.float16, which


@pytest.mark.parametrize(("power", "offset"), [(15, True), (31, True), (31, False)])
@pytest.mark.parametrize(("name", "dtype"), CASES, ids=IDS)
@pytest.mark.usefixtures("cpu_kernels")
def test_finite_output_and_gradients(name: str, dtype: torch.dtype, power: int, offset: bool) -> None:
    check_hostile(name, dtype, power, ROWS, offset)


@pytest.mark.slow
@pytest.mark.parametrize("power", [None, 1, 2.5, 15, 31])
@pytest.mark.parametrize(("name", "dtype"), CASES, ids=IDS)
def test_finite_output_and_gradients_of_all_rows(name: str, dtype: torch.dtype, power: Any) -> None:
    check_hostile(name, dtype, power, T)


@pytest.mark.parametrize("power", [None, 15, 31])
@pytest.mark.parametrize(("name", "dtype"), CASES, ids=IDS)
@pytest.mark.usefixtures("cpu_kernels")
def test_weights_sum_to_one(name: str, dtype: torch.dtype, power: Any) -> None:
    q, k, v = hostile(name, dtype, 16)
    weights = attention_weights(q, k, power=power, is_causal=True)
    assert (weights >= 0).all()
    torch.testing.assert_close(weights.sum(-1), torch.ones(1, 1, 16), rtol=0, atol=1e-5)
    out = softplus_attention(q, k, torch.ones_like(v), power=power, is_causal=True, impl="chunked")
    bound = max(1e-5, torch.finfo(dtype).eps)
    torch.testing.assert_close(out.float(), torch.ones(1, 1, 16, D), rtol=0, atol=bound)


@pytest.mark.parametrize("impl", ["reference", "chunked", "native"], indirect=True)
def test_a_dominant_key_takes_all(impl: str) -> None:
    q, k, v = hostile("dominant", torch.float32, ROWS)
    out = softplus_attention(q, k, v, power=15, is_causal=True, impl=impl)
    torch.testing.assert_close(out, v[:, :, 7:8].expand_as(out), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("exponent", [-83, -20, 13, 83])
@pytest.mark.parametrize("impl", ["reference", "chunked", "native"], indirect=True)
def test_the_size_of_the_vectors_does_not_matter(impl: str, exponent: int) -> None:
    """Powers of two (2^83 is 1e25) are exact: the output is bitwise equal, the gradients scale inversely."""
    q, k, v = (randn(1, 2, 50, D, seed=seed) for seed in (1, 2, 3))
    size = 2.0**exponent
    options = {"impl": impl, "is_causal": True, "grad_out": randn(1, 2, 50, D, seed=4)}
    plain = run(softplus_attention, q, k, v, **options)
    changed = run(softplus_attention, q * size, k / size, v, **options)
    changed["dq"] *= size
    changed["dk"] /= size
    torch.testing.assert_close(changed, plain, rtol=0, atol=0)


BAD = 17
POWERS_AND_OFFSETS = pytest.mark.parametrize(("power", "offset"), [(None, True), (15, True), (2.5, True), (2.5, False)])


@POWERS_AND_OFFSETS
@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES)
@pytest.mark.parametrize("which", ["q", "k", "v"])
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("impl", ["reference", "chunked"])
def test_non_finite_inputs_affect_only_visible_rows(
    impl: str, setting: str, which: str, value: float, power: Any, offset: bool
) -> None:
    case = Poisoned(impl, setting, which, value, power, train=False, offset=offset)
    bad = ~case.found["out"].isfinite()
    assert case.hit.any()
    assert not case.hit.all()
    if which == "v":
        assert torch.equal(bad[..., 3], case.hit)
        columns = [c for c in range(D) if c != 3]
        torch.testing.assert_close(
            case.found["out"][..., columns], case.clean["out"][..., columns], rtol=1e-5, atol=1e-6
        )
    else:
        assert torch.equal(bad.all(-1), case.hit)
        assert case.found["out"][case.hit].isnan().all()
    torch.testing.assert_close(case.found["out"][~case.hit], case.clean["out"][~case.hit], rtol=1e-5, atol=1e-6)


@POWERS_AND_OFFSETS
@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES)
@pytest.mark.parametrize("which", ["q", "k", "v"])
@pytest.mark.parametrize("setting", SETTINGS)
def test_clean_rows_and_keys_keep_clean_gradients(
    setting: str, which: str, value: float, power: Any, offset: bool
) -> None:
    case = Poisoned("chunked", setting, which, value, power, train=True, offset=offset)
    clean_rows, clean_keys = case.out_of_reach(case.hit)
    assert clean_rows.any()
    assert clean_keys.any()
    for name, chosen in (("dq", clean_rows), ("dk", clean_keys), ("dv", clean_keys)):
        found, expected = case.found[name][chosen], case.clean[name][chosen]
        assert found.isfinite().all(), name
        scale = float(case.clean[name].abs().max())
        assert float((found - expected).abs().max()) <= 1e-5 * scale, name


@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES)
@pytest.mark.parametrize("impl", ["reference", "chunked", "native"], indirect=True)
def test_bad_unit_keys_never_give_plausible_output(impl: str, value: float) -> None:
    q, k, v = randn(1, 2, 8, D, seed=1), randn(1, 2, SHORT, D, seed=2), randn(1, 2, SHORT, D, seed=3)
    k = torch.nn.functional.normalize(k, dim=-1)
    k[0, 0, BAD, 3] = value
    options = {"normalized_keys": True, "impl": impl}
    out = softplus_attention_decode(q, k, v, torch.tensor([SHORT]), **options)
    assert out[0, 0].isnan().all()
    assert out[0, 1].isfinite().all()


@pytest.mark.parametrize("impl", ["reference", "chunked", "native"], indirect=True)
def test_masked_keys_never_affect_the_result(impl: str) -> None:
    """Results are bitwise equal whether masked keys and values are zero, NaN or Inf."""
    q, k, v = (randn(1, 2, SHORT, D, seed=seed) for seed in (1, 2, 3))
    mask = torch.rand(SHORT, generator=torch.Generator().manual_seed(1)) < 0.6
    results = []
    for value in (0.0, torch.nan, torch.inf):
        unseen = ~mask[:, None]
        changed = (x.masked_fill(unseen, value) for x in (k, v))
        results.append(softplus_attention(q, *changed, attn_mask=mask, is_causal=True, impl=impl))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])
