"""The decode kernels against the reference: small caches in Triton's interpreter; gpu_checks.py has larger ones.

Triton decides on import whether to interpret kernels. If it does not, these tests run in a separate process.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from decode_cases import POWERS, assert_agrees, caches, check_unit_vectors, decode
from helpers import randn, transposed
from huggingface_models import small_model, token_rows
from paged_cases import POWERS as PAGED_POWERS
from paged_cases import Batch
from stub_kernel import Kernel

from softplus_attention import dispatch, softplus_attention
from softplus_attention.catalog import attention
from softplus_attention.huggingface import SoftplusGPTConfig, SoftplusGPTForCausalLM
from softplus_attention.huggingface.attention import attend
from softplus_attention.power import PowerByLength
from softplus_attention.reference import unit

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if INTERPRETED or torch.cuda.is_available():
    import triton
    import triton.language as tl

    from softplus_attention.kernels import private_launch
    from softplus_attention.kernels.launch_cache import all_aligned, launch
    from softplus_attention.kernels.triton import decode_launch
    from softplus_attention.kernels.triton.decode import careful_squares, squares_by_product

    @triton.jit
    def squares_kernel(K, Inverse, Square, n_high, D: tl.constexpr, BD: tl.constexpr, BN: tl.constexpr):
        o_n = tl.arange(0, BN)
        b_inverse, b_square = careful_squares(K + o_n * D, o_n < n_high, BN, D, BD)
        tl.store(Inverse + o_n, b_inverse)
        tl.store(Square + o_n, b_square)

    @triton.jit
    def products_kernel(K, Square, D: tl.constexpr, BN: tl.constexpr):
        o_n, o_d = tl.arange(0, BN), tl.arange(0, D)
        tl.store(Square + o_n, squares_by_product(tl.load(K + o_n[:, None] * D + o_d[None, :])))


interpreted = pytest.mark.skipif(not INTERPRETED, reason="needs Triton's interpreter")
pytestmark = [pytest.mark.usefixtures("poisoned_memory"), pytest.mark.filterwarnings("ignore::RuntimeWarning")]

OFFSETS = pytest.mark.parametrize("offset", [True, False], ids=["with offset", "without"])
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["float32", "float16"])


@pytest.mark.skipif(INTERPRETED, reason="already in Triton's interpreter")
def test_in_the_interpreter() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--no-header", __file__],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


@interpreted
class TestReference:
    @DTYPES
    @pytest.mark.parametrize("power", POWERS.values(), ids=POWERS)
    def test_powers(self, power: Any, dtype: torch.dtype) -> None:
        assert_agrees(*caches(dtype, t_q=2), torch.tensor([150, 71]), power=power)

    @DTYPES
    @pytest.mark.parametrize("name", ["1", "15", "per head"])
    def test_without_offset(self, name: str, dtype: torch.dtype) -> None:
        assert_agrees(*caches(dtype, t_q=2), torch.tensor([150, 3]), power=POWERS[name], offset=False)

    @DTYPES
    @pytest.mark.parametrize(
        "shape",
        [
            {"h": 2, "d": 60, "dv": 100},
            {"h": 8, "t_q": 3, "d": 100, "dv": 60, "t_max": 131},
            {"h": 4, "h_kv": 1, "t_q": 3, "t_max": 64, "dv": 40},
            {"batch": 1, "h": 16, "h_kv": 1, "t_q": 5, "t_max": 40},
            {"h": 1, "h_kv": 1, "t_max": 7, "d": 32},
        ],
        ids=["no groups", "groups of 4", "one key head", "two blocks of rows", "less than a tile"],
    )
    def test_shapes(self, shape: dict[str, int], dtype: torch.dtype) -> None:
        q, k, v = caches(dtype, **shape)
        lengths = torch.full((q.shape[0],), k.shape[2], dtype=torch.int32)
        lengths[1:] -= 3
        assert_agrees(q, k, v, lengths)

    @pytest.mark.parametrize("d", [60, 64, 100, 128, 256])
    def test_raw_keys_of_many_lengths(self, d: int) -> None:
        """In half precision, where a matrix product computes their squares."""
        q, k, v = caches(torch.float16, batch=1, d=d, t_max=90)
        k *= torch.logspace(-2, 1, 90)[:, None]
        assert_agrees(q, k, v, torch.tensor([83]))

    @DTYPES
    def test_short_sequences(self, dtype: torch.dtype) -> None:
        q, k, v = caches(dtype, batch=6, h=2, h_kv=1, t_max=70)
        out = assert_agrees(q, k, v, torch.tensor([1, 2, 3, 4, 5, 70]))
        assert torch.equal(out[0, 0], v[0, 0, :1])

    @DTYPES
    @pytest.mark.parametrize("window", [None, 1, 40])
    def test_starts_and_windows(self, window: int | None, dtype: torch.dtype) -> None:
        q, k, v = caches(dtype, batch=3, t_q=3, t_max=140)
        assert_agrees(
            q,
            k,
            v,
            torch.tensor([140, 90, 11]),
            cache_starts=torch.tensor([66, 3, 0], dtype=torch.int32),
            window=window,
        )

    @DTYPES
    def test_rows_without_keys_are_zero(self, dtype: torch.dtype) -> None:
        q, k, v = caches(dtype, t_q=2, t_max=40)
        k[:], v[:] = float("nan"), float("nan")
        out = decode(q, k, v, torch.tensor([20, 1]), cache_starts=torch.tensor([20, 0]))
        assert torch.equal(out[0], torch.zeros_like(out[0]))
        assert torch.equal(out[1, :, 0], torch.zeros_like(out[1, :, 0]))

    @DTYPES
    def test_normalized_keys(self, dtype: torch.dtype) -> None:
        q, k, v = caches(dtype, t_max=100)
        k = torch.nn.functional.normalize(k.float(), dim=-1).to(dtype)
        assert_agrees(q, k, v, torch.tensor([100, 33]), normalized_keys=True)

    @DTYPES
    def test_score_scale(self, dtype: torch.dtype) -> None:
        assert_agrees(*caches(dtype), torch.tensor([150, 33]), score_scale=1.0, power=4)

    @DTYPES
    @pytest.mark.parametrize("power", [None, 15])
    def test_equal_scores_keep_the_first_stage(self, power: int | None, dtype: torch.dtype) -> None:
        q, k, v = caches(dtype)
        k[:] = k[:, :, :1]
        assert_agrees(q, k, v, torch.tensor([150, 33]), power=power)

    @DTYPES
    @pytest.mark.parametrize("power", [None, 15])
    def test_keys_that_all_point_away(self, power: int | None, dtype: torch.dtype) -> None:
        """Every f' is tiny, and half precision must still distinguish the weights."""
        q, k, v = caches(dtype, h=2, d=64)
        k[:] = -q[:, :, :1] + 0.05 * k
        assert_agrees(q, k, v, torch.tensor([150, 33]), power=power, score_scale=12.0)

    @DTYPES
    def test_one_key_that_takes_all(self, dtype: torch.dtype) -> None:
        q, k, v = caches(dtype, h=2)
        k[:] = -q[:, :, :1] + 0.1 * k
        k[:, :, 17] = q[:, :, 0]
        out = assert_agrees(q, k, v, torch.tensor([150, 33]))
        assert torch.allclose(out, v[:, :, 17:18], rtol=1e-3)

    @pytest.mark.parametrize("splits", [1, 3])
    def test_splits(self, splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
        q, k, v = caches(torch.float32, t_q=3, t_max=300)
        lengths = torch.tensor([300, 65])
        many = decode(q, k, v, lengths, cache_starts=torch.tensor([37, 0]))
        monkeypatch.setattr(decode_launch, "splits_for", lambda *_: splits)
        monkeypatch.setattr(decode_launch, "plan_for", decode_launch.plan_for.__wrapped__)
        few = assert_agrees(q, k, v, lengths, cache_starts=torch.tensor([37, 0]))
        assert torch.allclose(many, few, atol=1e-5)

    @pytest.mark.parametrize("power", [15, torch.tensor([2.0, 3.0, 5.0, 9.0])], ids=["15", "per head"])
    def test_more_sequences_than_a_grid_axis(self, power: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        q, k, v = (torch.cat([x, x.flip(2) * 0.5, x + 1]) for x in caches(torch.float32, t_q=2, t_max=70))
        monkeypatch.setattr(decode_launch, "MAX_ON_AXIS", 2 * k.shape[1])
        lengths, starts = torch.tensor([70, 21, 3, 44, 70, 2]), torch.tensor([0, 5, 0, 40, 1, 0])
        assert_agrees(q, k, v, lengths, cache_starts=starts, power=power)

    def test_strides(self) -> None:
        q, k, v = caches(torch.float32, t_q=2, t_max=70)
        lengths = torch.tensor([70, 21])
        expected = decode(q, k, v, lengths)
        out = decode(*(transposed(x) for x in (q, k, v)), lengths)
        assert torch.equal(out, expected)
        assert out.transpose(1, 2).is_contiguous()
        columns = [x.mT.contiguous().mT for x in (q, k, v)]
        assert torch.equal(decode(*columns, lengths), expected)

    @pytest.mark.parametrize("size", [1e-30, 1e30], ids=["tiny", "huge"])
    def test_vectors_of_extreme_size(self, size: float) -> None:
        q, k, v = caches(torch.float32, t_max=70)
        lengths = torch.tensor([70, 21])
        assert torch.allclose(decode(q * size, k * size, v, lengths), decode(q, k, v, lengths), atol=1e-5)

    @DTYPES
    def test_zero_vectors(self, dtype: torch.dtype) -> None:
        q, k, v = caches(dtype, t_max=70)
        q[:, 0], k[:, :, ::5] = 0, 0
        assert_agrees(q, k, v, torch.tensor([70, 21]))


@interpreted
@DTYPES
class TestNotFinite:
    """A NaN or Inf affects only the rows that see it (q, k) or give it weight (v)."""

    @pytest.mark.parametrize(
        ("bad", "power", "normalized_keys"),
        [("nan", None, False), ("nan", 15, True), ("inf", 15, False), ("inf", None, True), ("-inf", 2.5, True)],
    )
    @OFFSETS
    def test_key(self, bad: str, power: Any, normalized_keys: bool, offset: bool, dtype: torch.dtype) -> None:
        q, k, v = caches(dtype, t_q=2, t_max=70)
        k = torch.nn.functional.normalize(k.float(), dim=-1).to(dtype)
        lengths = torch.tensor([70, 21])
        options = {"power": power, "normalized_keys": normalized_keys, "offset": offset}
        before = decode(q, k, v, lengths, **options)
        k[0, 1, 69, 3] = float(bad)
        out = decode(q, k, v, lengths, **options)
        assert out[0, 2:, 1].isnan().all()
        out[0, 2:, 1] = before[0, 2:, 1]
        assert torch.equal(out, before)

    @pytest.mark.parametrize("power", [15, 2.5])
    @OFFSETS
    def test_query(self, power: float, offset: bool, dtype: torch.dtype) -> None:
        q, k, v = caches(dtype, t_q=2, t_max=70)
        lengths = torch.tensor([70, 21])
        before = decode(q, k, v, lengths, power=power, offset=offset)
        q[1, 1, 0, 2], q[0, 3, 1, 0] = float("nan"), float("inf")
        out = decode(q, k, v, lengths, power=power, offset=offset)
        for row in ((1, 1, 0), (0, 3, 1)):
            assert out[row].isnan().all()
            out[row] = before[row]
        assert torch.equal(out, before)

    @pytest.mark.parametrize("bad", [float("nan"), float("inf")])
    def test_value(self, bad: float, dtype: torch.dtype) -> None:
        """Head 0 attends to key 8 only, head 1 gives it no weight; they share their values."""
        q, k, v = caches(dtype, batch=1, h=2, h_kv=1, t_max=70)
        q[0, 1] = -q[0, 0]
        k[0, 0, 8] = q[0, 0, 0]
        lengths = torch.tensor([70])
        before = decode(q, k, v, lengths)
        v[0, 0, 8, 5] = bad
        out = decode(q, k, v, lengths)
        assert out[0, 0, 0, 5].isnan()
        out[0, 0, 0, 5] = before[0, 0, 0, 5]
        assert torch.allclose(out, before, rtol=1e-3, atol=1e-6)
        assert torch.equal(out[..., :5], before[..., :5])


@interpreted
class TestOp:
    def test_values_without_weight_are_not_read(self) -> None:
        """If one key has all the weight, every other value may be NaN."""
        q, k, v = caches(torch.float32, h=2)
        k[:] = -q[:, :, :1] + 0.1 * k
        k[:, :, 17] = q[:, :, 0]
        lengths = torch.tensor([150, 33])
        before = decode(q, k, v, lengths)
        others = torch.arange(150) != 17
        v[:, :, others] = float("nan")
        assert torch.equal(decode(q, k, v, lengths), before)

    def test_grid_depends_on_shapes(self) -> None:
        device = torch.device("cpu")
        assert decode_launch.splits_for(2048, 8, device) == 198
        assert decode_launch.splits_for(2048, 64, device) == 24, "25 would be 4 waves and 16 programs"
        assert decode_launch.splits_for(2048, 800, device) == 2, "1 would be 2 waves and 8 programs"
        assert decode_launch.splits_for(2048, 1, device) == 256
        assert decode_launch.splits_for(3, 8, device) == 3
        assert decode_launch.splits_for(2048, 5000, device) == 1
        assert decode_launch.splits_for(128, 64, device) == 12, "24 would leave 5 tiles per program"
        assert decode_launch.splits_for(64, 256, device) == 6, "a program has 10 tiles"
        assert decode_launch.splits_for(3000, 4, device) == 256, "the most programs leave 11 tiles for each"

    @DTYPES
    def test_without_lengths_all_keys_are_seen(self, dtype: torch.dtype) -> None:
        q, k, v = caches(dtype, t_q=2, t_max=70)
        assert torch.equal(decode(q, k, v, None), decode(q, k, v, torch.tensor([70, 70])))
        assert torch.equal(decode(q, k, v, None, window=9), decode(q, k, v, torch.tensor([70, 70]), window=9))

    def test_opcheck(self) -> None:
        q, k, v = caches(torch.float32, t_max=40)
        for offset in (True, False):
            options = (None, None, True, 15.0, None, None, offset, math.log(16), False)
            arguments = (q, k, v, torch.tensor([40, 9]), *options)
            torch.library.opcheck(torch.ops.softplus_attention.triton_decode.default, arguments)

    @pytest.mark.parametrize("empty", ["batch", "t_max"])
    def test_empty(self, empty: str) -> None:
        q, k, v = caches(torch.float32, **{empty: 0})
        out = decode(q, k, v, torch.zeros(q.shape[0], dtype=torch.int64))
        assert out.shape == (*q.shape[:3], v.shape[3])
        assert not out.any()


@interpreted
@pytest.mark.parametrize("d", [16, 40, 64])
def test_squares_of_keys_beyond_float32(d: int) -> None:
    """Only bfloat16 keys use this path, which the interpreter does not support: the test uses float32 keys."""
    sizes = torch.tensor([1.0, 1e-30, 1e30, 3e37, 0.0, 1e-38, 7.0] + [1.0] * 9)
    k = randn(16, d, seed=3, dtype=torch.float32).clamp(-8, 8) * sizes[:, None]
    k[6, 3] = float("nan")
    inverse, square = torch.full((2, 16), 7.0)
    squares_kernel[(1,)](k, inverse, square, 12, D=d, BD=max(16, triton.next_power_of_2(d)), BN=16)
    expected = k.double().square().sum(1)
    found = square.double() / inverse.double() ** 2
    for row in (0, 1, 2, 3, 7, 11):
        assert torch.isclose(found[row], expected[row], rtol=1e-6)
    assert square[:4].max() < 4 * d
    assert found[4] == 0
    assert found[6].isnan()
    assert (square[12:] == 0).all()


@interpreted
@pytest.mark.parametrize("bn", [32, 64])
@pytest.mark.parametrize("d", [64, 128])
def test_squares_by_product(d: int, bn: int) -> None:
    k = randn(bn, d, seed=4, dtype=torch.float16) * torch.logspace(-2, 1, bn)[:, None].half()
    k[5, 3], k[20] = float("nan"), 0
    square = torch.full((bn,), 7.0)
    products_kernel[(1,)](k, square, D=d, BN=bn)
    assert square.isnan().nonzero().tolist() == [[5]]
    assert square[20] == 0
    torch.testing.assert_close(square.double(), k.double().square().sum(1), rtol=1e-6, atol=0, equal_nan=True)


GPTS = ("softplus-gpt", "softplus-gpt learned", "softplus-gpt mix", "softplus-gpt bare")


@interpreted
class TestModel:
    """Every layer of a model runs decode steps with the decode kernels."""

    @pytest.mark.parametrize("family", ["llama", "mistral", *GPTS])
    def test_the_same_logits(self, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
        family, _, variant = family.partition(" ")
        mix = {"power": "learned-log", "window": 5, "global_every": 2}
        overrides = {"learned": {"power": "learned"}, "mix": mix, "bare": mix | {"attention": "lssar-without-offset"}}
        model, ids = small_model(family), token_rows(2, 12)
        if variant:
            model = SoftplusGPTForCausalLM(SoftplusGPTConfig(**model.config.to_dict() | overrides[variant])).eval()
            with torch.no_grad():  # heads that differ, away from their initial values
                for name, parameter in model.named_parameters():
                    if "raw_power" in name:
                        parameter.copy_(torch.linspace(0.5, 3.0, parameter.numel()))
                    elif parameter.dim() == 2:
                        parameter.mul_(4)
        steps, decode = [], decode_launch.decode

        def counted(*arguments: Any) -> Any:
            steps.append(decode(*arguments))
            return steps[-1]

        def last_logits() -> torch.Tensor:
            with torch.inference_mode():
                cache = model(ids[:, :-1], use_cache=True).past_key_values
                monkeypatch.setattr(decode_launch, "decode", counted)
                return model(ids[:, -1:], past_key_values=cache, use_cache=True).logits

        plain = last_logits()
        assert not steps, "CPU tensors must not run the kernels"
        monkeypatch.setattr(dispatch, "has_fused_kernel", lambda x: x.dtype != torch.float64)
        torch.testing.assert_close(last_logits(), plain, atol=1e-4, rtol=1e-4)
        assert len(steps) == model.config.num_hidden_layers

    def test_unit_keys_keep_tangents(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The kernel would silently drop the tangent, so PyTorch computes them."""
        monkeypatch.setattr(dispatch, "has_fused_kernel", lambda x: True)
        keys = randn(1, 2, 3, 8, seed=1)
        torch.testing.assert_close(dispatch.unit_keys(keys), unit(keys))
        monkeypatch.setattr(decode_launch, "unit_vectors", lambda k: pytest.fail("the kernel was called"))
        with torch.autograd.forward_ad.dual_level():
            torch.testing.assert_close(dispatch.unit_keys(keys), unit(keys))

    def test_power_on_another_device(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The kernel would read an invalid address."""
        monkeypatch.setattr(dispatch, "has_fused_kernel", lambda x: True)
        q, k = randn(1, 2, 1, 8, seed=1), randn(1, 2, 9, 8, seed=2)
        with torch.no_grad(), pytest.raises(ValueError, match="`power` must be on the device of the queries"):
            attend(attention("lssar"), q, k, k, None, True, parameters={"power": torch.ones(2, device="meta")})

    def test_when_the_kernels_run(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Not if gradients may be needed; under a profiler, through the registered op."""
        monkeypatch.setattr(dispatch, "has_fused_kernel", lambda x: True)
        q, k, v = randn(1, 2, 1, 8, seed=1), randn(1, 2, 9, 8, seed=2), randn(1, 2, 9, 8, seed=3)
        chosen, calls = attention("lssar", power=3, window=5), []
        expected = softplus_attention(q, k, v, power=3, is_causal=True, window=5, impl="reference")
        decode = decode_launch.decode
        monkeypatch.setattr(decode_launch, "decode", lambda *args: calls.append(args[0]) or decode(*args))

        def found(q: torch.Tensor = q) -> torch.Tensor:
            return attend(chosen, q, k, v, None, True)

        torch.testing.assert_close(found(q.clone().requires_grad_()), expected)
        assert not calls
        torch.testing.assert_close(found(), expected)
        with torch.profiler.profile() as profile:
            torch.testing.assert_close(found(), expected)
        assert len(calls) == 2
        assert any("triton_decode" in event.key for event in profile.key_averages())
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(q, q)
            with pytest.raises(RuntimeError, match="forward-mode gradients are not supported"):
                found(dual)
        with pytest.raises(RuntimeError, match=r"torch\.func transforms are not supported"):
            torch.func.vmap(found)(q[None])
        with pytest.raises(ValueError, match="`key` must be of a number of heads that divides"):
            found(randn(1, 3, 1, 8, seed=1))


@interpreted
def test_unit_vectors() -> None:
    check_unit_vectors(decode_launch.unit_vectors, "cpu", [torch.float32, torch.float16])


@interpreted
class TestLaunch:
    """Launches with a stub, since a compiled kernel needs a GPU; there ``check_launches`` runs real ones."""

    def test_cached_binary_receives_addresses(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(private_launch, "is_known", lambda: True)
        kernel, key, x, y = Kernel(), object(), torch.zeros(4), torch.zeros(4)
        launch(kernel, (1, 1, 1), (x,), (5, True), {"num_warps": 2}, key, 9)
        binary = kernel.binary
        launch(kernel, (2, 3, 4), (y,), (7, True), {"num_warps": 2}, key, 9)
        [(grid, (tensor, *numbers), options)] = kernel.calls
        assert tensor is x
        assert (grid, numbers, options) == ((1, 1, 1), [5, True], {"num_warps": 2})
        [run] = binary.run.launched
        metadata, rest = ("metadata", None, None, None), (None, None)  # and no hooks; no scratch
        if triton.__version__.startswith("3.6."):
            given = (*rest, *metadata)
        else:
            given = (*metadata, *rest, "annotations", "signature")
        assert run == (2, 3, 4, 9, "function", False, False, *given, y.data_ptr(), 7, True)
        assert binary.calls == []

    @pytest.mark.parametrize("why", ["hooks", "unknown version of Triton"])
    def test_triton_launches_the_binary(self, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """With launch hooks, or if the signature of ``run`` is unknown."""
        kernel, key, x = Kernel(), object(), torch.zeros(4)
        launch(kernel, (1, 1, 1), (x,), (), {}, key, None)
        if why == "hooks":
            monkeypatch.setattr(triton.knobs.runtime.launch_exit_hook, "calls", [print])
        else:
            monkeypatch.setattr(private_launch, "is_known", lambda: False)
        launch(kernel, (2, 1, 1), (x,), (7,), {"num_warps": 2}, key, None)
        [(grid, (tensor, number), options)] = kernel.binary.calls
        assert tensor is x
        assert (grid, number, options) == ((2, 1, 1), 7, {})
        assert kernel.binary.run.launched == []

    def test_new_keys_and_none_compile_again(self) -> None:
        kernel = Kernel()
        for key in (object(), object(), None, None):
            launch(kernel, (1, 1, 1), (), (), {}, key, None)
        assert len(kernel.calls) == 4

    def test_different_binaries_have_different_keys(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Launches with the same key differ only in numbers that the binary takes as arguments."""
        seen: dict[Any, list[Any]] = {}

        def record(kernel: Any, grid: Any, tensors: Any, numbers: Any, options: Any, key: Any, stream: Any) -> None:
            constants = [name for name in kernel.arg_names[len(tensors) :] if name.isupper()]
            dtypes = [x.dtype for x in tensors]
            seen.setdefault(key, []).append((numbers[len(numbers) - len(constants) :], dtypes, options))

        monkeypatch.setattr(decode_launch, "launch", record)
        powers = [15, 3, None, 2.5, PowerByLength(3.0, 1.0, 8), torch.tensor(3.0), torch.ones(4), torch.ones(1, 1, 1)]
        for dtype in (torch.float32, torch.float16):
            q, k, v = caches(dtype)
            for power in powers:
                for window in (None, 5, 2**40):
                    for lengths in (None, torch.tensor([150, 3])):
                        decode(q, k, v, lengths, power=power, window=window)
        for key, launches in seen.items():
            assert all(one == launches[0] for one in launches), key

    def test_window_longer_than_all_keys(self) -> None:
        q, k, v = caches(torch.float32)
        torch.testing.assert_close(decode(q, k, v, None, window=2**40), decode(q, k, v, None))

    @pytest.mark.parametrize(
        ("offset", "numbers", "expected"),
        [(0, (0, 16, 4096), True), (4, (16,), True), (1, (16,), False), (0, (16, 8), False), (0, (2**31,), False)],
    )
    def test_alignment(self, offset: int, numbers: tuple[int, ...], expected: bool) -> None:
        x = torch.zeros(64)
        assert x.data_ptr() % 16 == 0
        assert all_aligned((x, x[offset:]), numbers) == expected


@interpreted
class TestPages:
    """``softplus_attention_paged`` as on a GPU; unused slots of pages are NaN."""

    @pytest.mark.parametrize("window", [None, 5])
    @pytest.mark.parametrize("power", PAGED_POWERS)
    def test_matches_each_request_alone(self, power: str, window: int | None) -> None:
        """Prefill, decode and several speculated rows in one batch."""
        batch = Batch([40, 17, 23, 1, 31], [40, 1, 7, 1, 3], page=7, dtype=torch.float32)
        chosen = PAGED_POWERS[power]
        options = {"power": chosen.float() if isinstance(chosen, torch.Tensor) else chosen, "window": window}
        torch.testing.assert_close(batch.paged(impl="triton", **options), batch.alone(**options), rtol=1e-4, atol=1e-5)

    def test_decode(self) -> None:
        batch = Batch([40, 17, 23, 1, 31], [1] * 5, page=16, dtype=torch.float32)
        batch.k[1][:, :, :16], batch.v[1][:, :, :16] = batch.k[0][:, :, :16], batch.v[0][:, :, :16]
        batch.table[1, 0] = batch.table[0, 0]  # a shared prefix
        torch.testing.assert_close(batch.paged(impl="triton"), batch.alone(), rtol=1e-4, atol=1e-5)
