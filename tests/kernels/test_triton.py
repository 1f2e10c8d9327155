"""The Triton kernels against the reference, in Triton's interpreter and on a GPU."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import triton_cases
from helpers import (
    OutsideYardstickError,
    as_given,
    assert_many_equal_keys_have_no_weight,
    assert_within_yardstick,
    largest_error,
    outcomes,
    output_and_gradients,
    randn,
    some_scores_below_zero,
)
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from triton_cases import Case, assert_case, gpu_cases, interpreter_cases

from softplus_attention import softplus_attention, softplus_attention_decode
from softplus_attention.kernels.arguments import KernelArguments
from softplus_attention.kernels.triton import launch as triton_launch
from softplus_attention.power import power_record

interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter needs CPU tensors")

# No ranges, no mask, causal, no window, the power 15 with the offset, a score scale, raw keys.
PLAIN = (None, None, None, True, None, power_record(15), 4.0, False)


@interpreted
@pytest.mark.parametrize("case", interpreter_cases(), ids=str)
@pytest.mark.usefixtures("poisoned_memory")
def test_interpreted(case: Case) -> None:
    assert_case(case, "cpu")


@interpreted
@pytest.mark.parametrize(("dtype", "outside", "times", "fails"), [
    ("float32", [0], 1.5, False), ("float32", [0], 3.0, True), ("float32", [0, 2], 1.5, True),
    ("float32", [0, 1, 2], 1.5, True), ("float16", [0], 1.5, True),
])  # fmt: skip
def test_float32_cases_may_be_redrawn_once(
    dtype: str, outside: list[int], times: float, fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fake_draw(case: Case, device: str, draw: int) -> None:
        if draw in outside:
            raise OutsideYardstickError(str(draw), times)

    monkeypatch.setattr(triton_cases, "assert_draw", fake_draw)
    with pytest.raises(OutsideYardstickError) if fails else nullcontext():
        assert_case(Case(dtype=dtype), "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("case", gpu_cases(), ids=str)
def test_on_gpu(case: Case) -> None:
    assert_case(case, "cuda")


@interpreted
@pytest.mark.parametrize("by_token", [False, True])
def test_norms_of_keys_of_any_size(by_token: bool) -> None:
    """Keys whose squares overflow or underflow are scaled by a power of two first, which keeps every digit."""
    sizes = [0, 40, 62, 75, 126, -40, -62, -75, -90]
    k = randn(1, 70, 2, 16, seed=0).transpose(1, 2)
    if not by_token:
        k = k.contiguous()
    scaled = k * torch.tensor([2.0**n / 8 for n in sizes])[:, None, None, None]
    scaled[:, :, 3] = 0
    scaled[:, 1, 65, 1] = float("nan")
    arguments = KernelArguments(scaled, scaled, scaled, *PLAIN)
    norms, flat = torch.full((len(sizes), 2, 128), float("nan")), torch.full((64,), 7, dtype=torch.int32)
    triton_launch.key_norms(arguments, norms, flat)
    exact = (1 / k[0].double().norm(dim=-1)).float()
    for n, found in zip(sizes, norms, strict=True):
        expected = exact * 2.0 ** (3 - n)
        expected[:, 3], expected[1, 65] = 0, float("nan")
        torch.testing.assert_close(found[:, :70], expected, rtol=3e-7, atol=0, equal_nan=True)
        assert torch.equal(found[:, :64], norms[0, :, :64] * 2.0**-n)
    assert norms[:, :, 70:].isfinite().all()
    assert flat[: len(sizes) * 2 + 1].eq(0).all()


@interpreted
@pytest.mark.parametrize("power", [15, None])
@pytest.mark.parametrize("opposite", [0.6, 3.0])
def test_rows_with_negative_scores_only(opposite: float, power: int | None) -> None:
    """Sigmoids of 1e-4 and less, which float16 needs scaled, and keys that share a direction, which would reveal the
    errors of the short polynomial."""
    q, k, v = (x.half() for x in some_scores_below_zero(opposite))
    assert_within_yardstick(softplus_attention, q, k, v, impl="triton", power=power, is_causal=True)


@interpreted
def test_low_scores_of_tiny_keys_in_float16() -> None:
    """The factor that scales sigmoids leaves room for the division by a key's norm."""
    q, k, v = (randn(1, 1, length, 64, seed=seed) for seed, length in enumerate((32, 100, 100)))
    q, k = 0.3 * q - 1, 1e-5 * torch.nn.functional.normalize(0.3 * k + 1, dim=-1)
    given = [x.half().requires_grad_() for x in (q, k, v)]
    out = softplus_attention(*given, power=15, is_causal=True, impl="triton")
    grads = torch.autograd.grad(out, given, 1e-4 * randn(*out.shape, seed=3, dtype=torch.float16))
    assert all(x.isfinite().all() for x in grads)


@interpreted
def test_power_gradient_is_corrected_for_rounding() -> None:
    """The mean gain of a row comes from the output, which is a sum with half-precision weights. The power's gradient
    multiplies it by the logarithms of all keys: without a correction it would be as inaccurate as the reference's."""
    q, k, v = (randn(1, 4, 96, 32, seed=seed, dtype=torch.float16) for seed in range(3))
    power = torch.tensor([1.5, 2.5, 4, 9])
    ours, theirs, truth = outcomes(softplus_attention, q, k, v, "triton", power, as_given, {"is_causal": True})
    error, reference_error = (largest_error(x["dpower"], truth["dpower"]) for x in (ours, theirs))
    assert error < reference_error / 10, f"{error:.1e}, the reference's is {reference_error:.1e}"


@interpreted
@pytest.mark.parametrize("power", [15, 31, None])
def test_equal_keys_keep_the_first_stage(power: int | None) -> None:
    """Sharpening cannot separate equal scores: output and gradients are those of stage 1, the mean of v."""
    q, k, v = randn(1, 1, 40, 16, seed=0), randn(1, 1, 1, 16, seed=1).expand(1, 1, 40, 16), randn(1, 1, 40, 16, seed=2)
    attend = partial(softplus_attention, power=power, is_causal=True)
    ours, theirs = (output_and_gradients(partial(attend, impl=impl), q, k, v) for impl in ("triton", "chunked"))
    mean = v.cumsum(2) / torch.arange(1, 41)[:, None]
    torch.testing.assert_close(ours[0], mean, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=1e-4)


@interpreted
@pytest.mark.parametrize("which", ["q", "k", "v"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_non_finite_inputs_affect_only_visible_rows(which: str, bad: float) -> None:
    q, k, v = (randn(1, 1, 70, 16, seed=i) for i in range(3))
    clean = softplus_attention(q, k, v, is_causal=True, impl="triton")
    {"q": q, "k": k, "v": v}[which][0, 0, 30, 3] = bad
    out = softplus_attention(q, k, v, is_causal=True, impl="triton")
    expected = softplus_attention(q, k, v, is_causal=True, impl="chunked").isfinite().all(-1)[0, 0]
    assert out.isfinite().all(-1)[0, 0].tolist() == expected.tolist()
    assert expected[:30].all()
    assert not expected[30]
    torch.testing.assert_close(out[0, 0][expected], clean[0, 0][expected], atol=1e-6, rtol=1e-5)


@interpreted
@pytest.mark.parametrize("impl", ["triton", "chunked", "reference"])
@pytest.mark.parametrize("power", [15, None])
def test_masked_keys_may_be_nan(power: int | None, impl: str) -> None:
    """NaN in padded keys and values, and in queries of rows that see nothing, acts like zeros."""
    results = []
    for filling in (0.0, float("nan")):
        q, k, v = (randn(1, 2, 70, 16, seed=i) for i in range(3))
        k[:, :, 41:], v[:, :, 41:], q[:, :, 65:] = filling, filling, filling
        row = torch.arange(70, dtype=torch.int32)[None]
        end = torch.where(row < 65, (row + 1).clamp(max=41), 0)
        results.append(output_and_gradients(partial(softplus_attention, power=power, key_end=end, impl=impl), q, k, v))
    torch.testing.assert_close(*results, atol=1e-6, rtol=1e-5)


@interpreted
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("power", [15, "learned"])
def test_value_without_weight_affects_no_gradient(power: Any, bad: float) -> None:
    """A non-finite value does not change the output and the gradients of q and power in rows that give it no weight."""
    results = []
    for value in (bad, 7.0):
        q, k, v = (randn(1, 2, 70, 16, seed=seed) for seed in range(3))
        v[0, 0, 3] = value
        powers = [torch.full((1, 2, 70), 15.0)] if power == "learned" else []

        def attend(q: Tensor, k: Tensor, v: Tensor, power: Any = 15) -> Tensor:
            return softplus_attention(q, k, v, power=power, is_causal=True, impl="triton")

        results.append(output_and_gradients(attend, q, k, v, *powers, grad_out=torch.ones_like(q)))
    (out, dq, _, _, *dp), (expected, expected_dq, _, _, *expected_dp) = results
    clear = out[0, 0].isfinite().all(-1)
    assert clear[4:].any()
    assert not clear.all()
    for found, wanted in ((out, expected), (dq, expected_dq), *zip(dp, expected_dp, strict=True)):
        torch.testing.assert_close(found[0, 0][clear], wanted[0, 0][clear], atol=1e-5, rtol=1e-4)
        assert found[0, 1].isfinite().all()


@interpreted
@pytest.mark.parametrize("form", ["end alone", "one start for all", "transposed"])
def test_ranges_per_sequence(form: str) -> None:
    q, k, v = (randn(3, 2, 40, 16, seed=seed) for seed in range(3))
    end = torch.tensor([40, 7, 23], dtype=torch.int32)[:, None].expand(3, 40).contiguous()
    start = (torch.arange(40, dtype=torch.int32) // 8)[None]
    options = {
        "end alone": {"key_end": end},
        "one start for all": {"key_start": start, "key_end": end},
        "transposed": {"key_start": start.expand(3, 40).T.contiguous().T, "key_end": end},
    }[form]
    attend = partial(softplus_attention, **options)
    results = (output_and_gradients(partial(attend, impl=impl), q, k, v) for impl in ("triton", "reference"))
    torch.testing.assert_close(*results, atol=2e-4, rtol=2e-4)


@interpreted
@pytest.mark.parametrize("window", [2**31 - 1, 2**40])
def test_window_longer_than_all_keys(window: int) -> None:
    """Row index plus window would overflow int32."""
    qkv = [randn(1, 2, 70, 16, seed=seed) for seed in range(3)]
    attend = partial(softplus_attention, is_causal=True, impl="triton")
    results = (output_and_gradients(partial(attend, window=x), *qkv) for x in (window, None))
    torch.testing.assert_close(*results, atol=1e-5, rtol=1e-5)


@interpreted
def test_decode_steps_run_the_decode_kernel() -> None:
    q, k, v = randn(2, 4, 1, 16, seed=0), randn(2, 2, 90, 16, seed=1), randn(2, 2, 90, 16, seed=2)
    lengths = torch.tensor([90, 33])
    options = {"cache_starts": torch.tensor([4, 0]), "enable_gqa": True}
    with torch.profiler.profile() as profile:
        out = softplus_attention_decode(q, k, v, lengths, impl="triton", **options)
    assert "softplus_attention::triton_decode" in {event.key for event in profile.key_averages()}
    assert torch.equal(out, softplus_attention_decode(q, k, v, lengths, impl="triton", **options))
    expected = softplus_attention_decode(q, k, v, lengths, impl="reference", **options)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)


@interpreted
def test_refuses_bfloat16_in_the_interpreter() -> None:
    q = randn(1, 1, 4, 16, seed=0, dtype=torch.bfloat16)
    with pytest.raises(TypeError, match="`q` must be float16 or float32 in Triton's interpreter"):
        softplus_attention(q, q, q, impl="triton")


def test_refuses_cpu_tensors_without_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    q = randn(1, 1, 4, 16, seed=0)
    with pytest.raises(ValueError, match=r"`impl` must be .* for tensors on cpu, got 'triton'"):
        softplus_attention(q, q, q, impl="triton")


def test_refuses_float64() -> None:
    q = randn(1, 1, 4, 16, seed=0, dtype=torch.float64)
    with pytest.raises(TypeError, match="`q` must be float16, bfloat16 or float32 for impl='triton'"):
        softplus_attention(q, q, q, impl="triton")


@interpreted
def test_nan_without_offset() -> None:
    """Without the offset no row is recomputed for equal scores, so NaN has to be handled by itself."""
    from gpu_numbers import check_poison

    check_poison("causal", "float32", 2.5, offset=False, values={"nan": torch.nan})


@interpreted
@pytest.mark.slow
def test_equal_keys_below_the_average_have_no_weight() -> None:
    assert_many_equal_keys_have_no_weight(48, -0.3)


@interpreted
class TestWithoutTheDispatcher:
    """A plain call runs the kernels directly; under a dispatch mode it runs the registered op."""

    @staticmethod
    def results(path: str) -> tuple[torch.Tensor, ...]:
        q, k, v = (randn(1, 2, 40, 16, seed=seed).requires_grad_() for seed in range(3))
        power = torch.tensor([2.0, 5.0], requires_grad=True)
        seen: list[str] = []

        class RecordOps(TorchDispatchMode):
            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                seen.append(func._schema.name)
                return func(*args, **(kwargs or {}))

        with RecordOps() if path == "op" else nullcontext():
            out = softplus_attention(q, k, v, power=power, is_causal=True, impl="triton")
            gradients = torch.autograd.grad(out.square().sum(), (q, k, v, power))
        names = {f"softplus_attention::triton_{direction}" for direction in ("forward", "backward")}
        assert names & set(seen) == (names if path == "op" else set())
        return out, *gradients

    def test_same_numbers_as_the_op(self) -> None:
        torch.testing.assert_close(self.results("plain"), self.results("op"), rtol=0, atol=0)

    def test_nothing_is_saved_without_gradients(self) -> None:
        q, k, v = (randn(1, 1, 20, 16, seed=seed).requires_grad_() for seed in range(3))
        with torch.no_grad():
            assert softplus_attention(q, k, v, impl="triton").grad_fn is None
        assert softplus_attention(q.detach(), k.detach(), v.detach(), impl="triton").grad_fn is None
        out = softplus_attention(q, k.detach(), v.detach(), impl="triton")
        (gradient,) = torch.autograd.grad(out.sum(), (q,))
        assert out.requires_grad
        assert gradient.shape == q.shape

    def test_double_backward_raises(self) -> None:
        q, k, v = (randn(1, 1, 20, 16, seed=seed).requires_grad_() for seed in range(3))
        out = softplus_attention(q, k, v, impl="triton")
        (gradient,) = torch.autograd.grad(out.sum(), (q,), create_graph=True)
        with pytest.raises(RuntimeError, match="the gradient of a gradient is not implemented"):
            gradient.sum().backward()

    def test_batched_gradients(self) -> None:
        q, k, v = (randn(1, 1, 20, 16, seed=seed).requires_grad_() for seed in range(3))
        out = softplus_attention(q, k, v, impl="triton")
        directions = randn(3, *out.shape, seed=4)
        expected = [torch.autograd.grad(out, (q,), x, retain_graph=True)[0] for x in directions]
        (found,) = torch.autograd.grad(out, (q,), directions, is_grads_batched=True, retain_graph=True)
        assert torch.equal(found, torch.stack(expected))

    def test_retained_graph_gives_equal_gradients(self) -> None:
        q, k, v = (randn(1, 1, 70, 16, seed=seed).requires_grad_() for seed in range(3))
        out = softplus_attention(q, k, v, is_causal=True, impl="triton").sum()
        first = torch.autograd.grad(out, (q, k, v), retain_graph=True)
        torch.testing.assert_close(torch.autograd.grad(out, (q, k, v)), first, rtol=0, atol=0)
