"""Baseline attentions over long sequences: windows in blocks, and weights computed for a few rows at a time."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from helpers import largest_error, output_and_gradients, peak_memory, randn
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from softplus_attention import PowerByLength
from softplus_attention.attentions import composed, sdpa
from softplus_attention.attentions.catalog import attend_composed
from softplus_attention.catalog import ABLATIONS, ATTENTIONS, LSSAR, SOFTMAX, attention
from softplus_attention.visibility import Visibility

WINDOWED = ["softmax", "softmax-qknorm-logn", "ssmax", "softmax-logn"]


def inputs(
    batch: int, heads: int, t_q: int, t_k: int | None = None, *, kv_heads: int | None = None, values: int = 7
) -> tuple[Tensor, Tensor, Tensor]:
    t_k, kv_heads = t_q if t_k is None else t_k, heads if kv_heads is None else kv_heads
    shapes = (batch, heads, t_q, 12), (batch, kv_heads, t_k, 12), (batch, kv_heads, t_k, values)
    q, k, v = (randn(*shape, seed=i, dtype=torch.float64) for i, shape in enumerate(shapes))
    return q, k, v


def forbid(what: str) -> Callable[..., Any]:
    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError(what)

    return refuse


class TestWindow:
    @pytest.mark.parametrize("name", WINDOWED)
    @settings(max_examples=25)
    @given(data=st.data())
    def test_matches_reference(self, name: str, data: st.DataObject) -> None:
        kv_heads, shared = data.draw(st.integers(1, 2)), data.draw(st.integers(1, 2))
        batch, heads = data.draw(st.integers(1, 2)), kv_heads * shared
        length, window = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 45))
        block = data.draw(st.sampled_from([1, 4, 64]))
        # SDPA's fused CPU kernel needs values as wide as keys.
        values = data.draw(st.sampled_from([7, 12]))
        scales = [torch.linspace(0.2, 0.9, heads, dtype=torch.float64)] if name == "ssmax" else []

        def attend(q: Tensor, k: Tensor, v: Tensor, *scales: Tensor, impl: str) -> Tensor:
            learned = dict(zip(["ssmax_scale"], scales, strict=False))
            options: dict[str, Any] = {"is_causal": True, "window": window, "enable_gqa": True}
            return attention(name)(q, k, v, impl=impl, parameters=learned, **options)

        given = (*inputs(batch, heads, length, kv_heads=kv_heads, values=values), *scales)
        grad_out = randn(batch, heads, length, values, seed=9, dtype=torch.float64)
        expected = output_and_gradients(partial(attend, impl="reference"), *given, grad_out=grad_out)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sdpa, "MIN_WINDOW_BLOCK", block)
            if length > 2 * max(window, block):
                patch.setattr(Visibility, "dense", forbid("dense"))
            found = output_and_gradients(partial(attend, impl="sdpa"), *given, grad_out=grad_out)
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)

    @pytest.mark.parametrize("length", [255, 256, 257])
    @pytest.mark.parametrize("window", [1, 63, 65, 127])
    def test_default_block_size(self, length: int, window: int) -> None:
        q, k, v = inputs(1, 2, length)
        out, expected = (
            attention("softmax-logn")(q, k, v, is_causal=True, window=window, impl=impl)
            for impl in ("sdpa", "reference")
        )
        torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-10)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
    def test_low_precision(self, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
        """At most twice the error of the dense mask against float64, forward and every gradient."""
        low = [x.to(dtype) for x in inputs(2, 2, 300, values=12)]
        grad_out = randn(2, 2, 300, 12, seed=5, dtype=torch.float64)

        def step(dtype: torch.dtype) -> list[Tensor]:
            attend = partial(attention("softmax"), is_causal=True, window=70)
            return output_and_gradients(attend, *(x.to(dtype) for x in low), grad_out=grad_out.to(dtype))

        truth, blocks = step(torch.float64), step(dtype)
        monkeypatch.setattr(sdpa, "MIN_WINDOW_BLOCK", 300)
        dense = step(dtype)
        for x, y, z in zip(truth, blocks, dense, strict=True):
            assert y.dtype == dtype
            assert largest_error(y, x) <= 2 * largest_error(z, x) + torch.finfo(dtype).eps * float(x.abs().max())

    def test_memory_is_linear(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(Visibility, "dense", forbid("dense"))
        peaks = []
        for length in (8192, 16384):
            q, k, v = (randn(1, 1, length, 16, seed=i) for i in range(3))

            attend = partial(attention("softmax-qknorm-logn"), is_causal=True, window=128)
            peaks.append(peak_memory(partial(output_and_gradients, attend, q, k, v)))
        assert peaks[1] < 2.5 * peaks[0]
        assert peaks[1] < 16384 * 16384 / 4  # a dense mask of one byte per pair is four times that

    # Keys of the fake-tensor cache compare every symbolic size, which takes longer than the cache saves.
    @torch._dynamo.config.patch(fake_tensor_cache_enabled=False)
    def test_compiled_for_every_length(self) -> None:
        torch._dynamo.reset()
        counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
        windowed = attention("softmax-logn", window=70)
        compiled = torch.compile(windowed.__call__, backend=counter, fullgraph=True, dynamic=True)
        for length in (300, 280, 512, 777):
            attends = (partial(x, is_causal=True) for x in (compiled, windowed))
            results = (output_and_gradients(attend, *inputs(1, 2, length)) for attend in attends)
            torch.testing.assert_close(*results, rtol=1e-10, atol=1e-10)
        assert counter.frame_count == 2  # with and without padding to whole blocks
        torch._dynamo.reset()

    def test_other_calls_keep_their_mask(self) -> None:
        """Windows with ranges or masks, and with fewer rows than keys, use a mask."""
        q, k, v = inputs(2, 2, 150)
        calls: list[dict[str, Any]] = [
            {"key_start": torch.tensor([[3], [90]], dtype=torch.int32).expand(2, 150)},
            {"key_end": torch.full((1, 150), 140, dtype=torch.int32)},
            {"attn_mask": torch.arange(150) != 17},
        ]
        for name in ("softmax", "softmax-alibi"):
            for options in [{}, *calls] if name == "softmax-alibi" else calls:
                for rows in (150, 20, 1):
                    cut = {key: x[:, -rows:] if key.startswith("key") else x for key, x in options.items()}
                    out, expected = (
                        attention(name)(q[:, :, -rows:], k, v, is_causal=True, window=9, impl=impl, **cut)
                        for impl in ("sdpa", "reference")
                    )
                    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-10)


EVERYTHING = list(ATTENTIONS | ABLATIONS)
COMPOSED = [name for name in EVERYTHING if not attention(name).spec.is_softplus_attention]
LENGTH = 23


def in_pieces(monkeypatch: pytest.MonkeyPatch, rows: float, attend: Callable[[], Tensor], keys: int = LENGTH) -> Tensor:
    """``attend()`` with room for ``rows`` rows of 2 x 4 x ``keys`` weights. Asserts that it was computed in pieces."""
    made: list[int] = []
    dense = Visibility.dense

    def counted(self: Visibility) -> Tensor:
        made.append(self.t_q)
        return dense(self)

    with monkeypatch.context() as patch, torch.no_grad():
        patch.setitem(composed.MAX_WEIGHTS, "cpu", int(rows * 2 * 4 * keys))
        patch.setattr(Visibility, "dense", counted)
        out = attend()
    assert len(made) > 1
    assert max(made) <= max(1, rows)
    return out


def visibility_options(kind: str) -> dict[str, Any]:
    """Arguments that restrict which keys a row sees."""
    start = torch.tensor([[2], [7]], dtype=torch.int32).expand(2, LENGTH)
    end = torch.tensor([[LENGTH - 3], [LENGTH]], dtype=torch.int32).expand(2, LENGTH)
    mask = torch.rand(2, 4, LENGTH, LENGTH, generator=torch.Generator().manual_seed(3)) > 0.3
    return {
        "causal": {"is_causal": True},
        "both sides": {},
        "window": {"is_causal": True, "window": 5},
        "padding": {"is_causal": True, "key_start": start, "key_end": end},
        "padding to both sides": {"key_start": start, "key_end": end},
        "mask": {"attn_mask": mask, "is_causal": True},
        "mask of keys": {"attn_mask": mask[:, :1, :1]},
        "mask of rows": {"attn_mask": mask[..., :1], "is_causal": True},
    }[kind]


KINDS = ["causal", "both sides", "window", "padding", "padding to both sides", "mask", "mask of keys", "mask of rows"]


class TestPieces:
    @pytest.mark.parametrize("rows", [0.3, 1, 5, 22])
    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("name", ["sigmoid", "relu", "sigmoid-l1-reweighted", "lssar-with-exp", "softmax-alibi"])
    def test_match_the_whole(self, name: str, kind: str, rows: float, monkeypatch: pytest.MonkeyPatch) -> None:
        q, k, v = inputs(2, 4, LENGTH, kv_heads=2)

        def attend() -> Tensor:
            return attention(name)(q, k, v, enable_gqa=True, **visibility_options(kind))

        torch.testing.assert_close(in_pieces(monkeypatch, rows, attend), attend(), rtol=1e-10, atol=1e-12)

    @pytest.mark.parametrize("name", COMPOSED)
    def test_of_every_attention(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """With ``impl="reference"`` and NaN in masked keys and values."""
        q, k, v = inputs(2, 4, LENGTH)
        k[:, :, 20:], v[:, :, 20:] = torch.nan, torch.nan
        end = torch.full((1, LENGTH), 20, dtype=torch.int32)

        def attend() -> Tensor:
            return attention(name)(q, k, v, is_causal=True, key_end=end, impl="reference")

        out = in_pieces(monkeypatch, 4, attend)
        assert out.isfinite().all()
        torch.testing.assert_close(out, attend(), rtol=1e-10, atol=1e-12)

    @pytest.mark.parametrize("shape", [(4,), (2, 4, LENGTH), (2, 1, LENGTH), (4, LENGTH), (2, 4, 1), ()])
    @pytest.mark.parametrize("stage", ["relu_power", "exp"])
    def test_powers_of_rows(self, shape: tuple[int, ...], stage: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        q, k, v = inputs(2, 4, LENGTH)
        power = 1 + 6 * torch.rand(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        spec = LSSAR.but(positive="exp", second_stage=stage)

        def attend(power: Tensor = power) -> Tensor:
            return attention(spec)(q, k, v, is_causal=True, parameters={"power": power})

        out = in_pieces(monkeypatch, 4, attend)
        torch.testing.assert_close(out, attend(), rtol=1e-10, atol=1e-12)
        if shape and shape[-1] == LENGTH:
            assert not torch.allclose(attend(power.flip(-1)), out)

    def test_powers_and_scales_by_length(self, monkeypatch: pytest.MonkeyPatch) -> None:
        q, k, v = inputs(2, 4, LENGTH)
        learned = {"ssmax_scale": torch.linspace(0.2, 0.9, 4, dtype=torch.float64)}
        growing = attention(LSSAR.but(positive="sigmoid", power=PowerByLength(3, 2, 4)))

        def powers() -> Tensor:
            return growing(q, k, v, is_causal=True)

        def scales() -> Tensor:
            return attention("ssmax")(q, k, v, is_causal=True, parameters=learned, impl="reference")

        for attend in (powers, scales):
            torch.testing.assert_close(in_pieces(monkeypatch, 4, attend), attend(), rtol=1e-10, atol=1e-12)

    @pytest.mark.parametrize("name", ["sigmoid", "lssar-with-elu1", "softmax-alibi", "softmax"])
    def test_decode_and_packed_rows(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """Each row has its own position in the keys, which determines N and the distances of ALiBi."""
        q, k, v = inputs(2, 4, 9, LENGTH)
        cu = torch.tensor([0, 4, 4, 9], dtype=torch.int32)
        for seen in (
            Visibility.from_cache(torch.tensor([12, 20]), torch.tensor([0, 3]), 9, LENGTH, window=None),
            Visibility.from_cache(torch.tensor([LENGTH, 10]), None, 9, LENGTH, window=4),
            Visibility.from_documents(
                cu, torch.tensor([0, 8, 11, LENGTH], dtype=torch.int32), 9, LENGTH, is_causal=True, window=None
            ),
            Visibility(9, LENGTH, q.device, is_causal=True),
        ):

            def attend(seen: Visibility = seen) -> Tensor:
                return attend_composed(attention(name).spec, q, k, v, seen)

            torch.testing.assert_close(in_pieces(monkeypatch, 2, attend), attend(), rtol=1e-10, atol=1e-12)

    @pytest.mark.parametrize("name", ["sigmoid", "lssar-with-exp", "entmax", "softmax-alibi"])
    def test_more_rows_than_keys(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """The first rows see no key, and their piece has no keys at all."""
        q, k, v = inputs(2, 4, LENGTH, 9)

        def attend() -> Tensor:
            return attention(name)(q, k, v, is_causal=True)

        out = in_pieces(monkeypatch, 3, attend, keys=9)
        assert (out[:, :, : LENGTH - 9] == 0).all()
        torch.testing.assert_close(out, attend(), rtol=1e-10, atol=1e-12)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_in_low_precision(self, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
        q, k, v = (x.to(dtype) for x in inputs(2, 4, LENGTH))
        for name in ("sigmoid", "relu", "lssar-with-exp", "softmax-alibi"):

            def attend(name: str = name, wide: Callable[[Tensor], Tensor] = lambda x: x) -> Tensor:
                return attention(name)(wide(q), wide(k), wide(v), is_causal=True)

            truth = attend(wide=Tensor.double)
            pieces, whole = in_pieces(monkeypatch, 4, attend), attend()
            assert pieces.dtype == dtype
            allowed = 2 * largest_error(whole, truth) + torch.finfo(dtype).eps * float(truth.abs().max())
            assert largest_error(pieces, truth) <= allowed

    def test_memory(self) -> None:
        """At the default size: less than half a tensor of all weights, and no dense mask."""
        q, k, v = (randn(1, 2, 8192, 8, seed=i) for i in range(3))
        start = torch.full((1, 8192), 5, dtype=torch.int32)
        for name, options in (("relu", {}), ("softmax", {"key_start": start})):

            def work(name: str = name, options: dict[str, Any] = options) -> Tensor:
                return attention(name)(q, k, v, is_causal=True, **options)

            weights = 4 * 2 * 8192 * 8192
            assert peak_memory(work) < weights / 2

    def test_not_with_gradients_or_when_tracing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        q, k, v = inputs(2, 4, LENGTH)
        power = torch.full((4,), 3.0, dtype=torch.float64, requires_grad=True)
        expected = attention("softmax-reweighted")(q, k, v, is_causal=True, parameters={"power": power})
        monkeypatch.setitem(composed.MAX_WEIGHTS, "cpu", 1)
        by_pieces = composed.by_pieces
        for module in (composed, sdpa):
            monkeypatch.setattr(module, "by_pieces", forbid("pieces"))
        out = attention("softmax-reweighted")(q, k, v, is_causal=True, parameters={"power": power})
        assert torch.equal(out, expected)
        assert out.requires_grad
        for name in ("sigmoid", "softmax-alibi"):
            torch._dynamo.reset()
            compiled = torch.compile(attention(name).__call__, fullgraph=True, backend="eager")
            traced = compiled(q, k, v, is_causal=True)
            with pytest.raises(AssertionError, match="pieces"):
                attention(name)(q, k, v, is_causal=True)
            with monkeypatch.context() as patch:
                for module in (composed, sdpa):
                    patch.setattr(module, "by_pieces", by_pieces)
                eager = attention(name)(q, k, v, is_causal=True)
            torch.testing.assert_close(traced, eager, rtol=1e-10, atol=1e-12)
        torch._dynamo.reset()

    def test_plain_softmax_is_never_split(self, monkeypatch: pytest.MonkeyPatch) -> None:
        q, k, v = inputs(1, 1, 200)
        forms: list[dict[str, Any]] = [{}, {"is_causal": True}, {"is_causal": True, "window": 3}]
        expected = [attention(SOFTMAX)(q, k, v, impl="reference", **options) for options in forms]
        monkeypatch.setitem(composed.MAX_WEIGHTS, "cpu", 1)
        monkeypatch.setattr(sdpa, "by_pieces", forbid("pieces"))
        for options, whole in zip(forms, expected, strict=True):
            torch.testing.assert_close(attention(SOFTMAX)(q, k, v, **options), whole)


@settings(max_examples=60)
@given(data=st.data())
def test_rows_of_a_visibility(data: st.DataObject) -> None:
    t_q, t_k = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 9))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    is_causal = data.draw(st.booleans())

    def bound() -> Tensor | None:
        shape = (data.draw(st.integers(1, 2)), t_q)
        return torch.randint(-1, t_k + 2, shape, generator=generator) if data.draw(st.booleans()) else None

    mask = None
    if data.draw(st.booleans()):
        shape = (2, 1, data.draw(st.sampled_from([1, t_q])), data.draw(st.sampled_from([1, t_k])))
        mask = torch.rand(shape, generator=generator) > 0.3
    window = data.draw(st.none() | st.integers(1, 5)) if is_causal else None
    own = torch.randint(0, t_k, (2, t_q), generator=generator) if data.draw(st.booleans()) else None
    whole = Visibility(t_q, t_k, torch.device("cpu"), is_causal, window, bound(), bound(), mask, own)
    begin = data.draw(st.integers(0, t_q - 1))
    end = data.draw(st.integers(begin + 1, t_q))
    piece = whole.rows(begin, end)
    dense = whole.dense()[:, :, begin:end]
    assert torch.equal(piece.dense(), dense[..., : piece.t_k])
    assert not dense[..., piece.t_k :].any()
    assert torch.equal(piece.positions(), whole.positions()[:, begin:end])
    again = piece.rows(0, end - begin)
    assert torch.equal(again.dense(), piece.dense())
