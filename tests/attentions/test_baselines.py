"""Baseline attentions and ablations: each against its formula, and all call modes against each other."""

from __future__ import annotations

import builtins
import math
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import output_and_gradients, randn
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from softplus_attention import PowerByLength, softplus_attention
from softplus_attention.attentions import catalog
from softplus_attention.attentions.composed import alibi_slopes, composed_attention, composed_weights
from softplus_attention.baselines import AttentionSpec
from softplus_attention.catalog import ABLATIONS, ATTENTIONS, LSSA, LSSAR, SOFTMAX, Attention, attention, names
from softplus_attention.reference import reference_attention, unit
from softplus_attention.visibility import Visibility

B, H, T, D = 2, 4, 21, 12
EVERYTHING = list(ATTENTIONS | ABLATIONS)
SOFTMAXES = [name for name, spec in (ATTENTIONS | ABLATIONS).items() if spec.is_softmax]


def inputs(
    t_q: int = T, t_k: int = T, *, seed: int = 0, dtype: torch.dtype = torch.float64, kv_heads: int = H
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = (B, H, t_q, D), (B, kv_heads, t_k, D), (B, kv_heads, t_k, 7)
    q, k, v = (torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes)
    return q, k, v


def assert_close(x: Tensor | list[Tensor], y: Tensor | list[Tensor], tolerance: float = 1e-10) -> None:
    torch.testing.assert_close(x, y, rtol=tolerance, atol=tolerance)


def by_rows(name: str, q: Tensor, k: Tensor) -> Tensor:
    """The causal weights of a named attention, row by row from its formula."""
    weights = torch.zeros(B, H, T, T, dtype=q.dtype)
    for b in range(B):
        for h in range(H):
            for i in range(T):
                n = i + 1
                dot, log_n = k[b, h, :n] @ q[b, h, i], math.log(n)
                cosine = dot / q[b, h, i].norm() / k[b, h, :n].norm(dim=-1)
                distance = torch.arange(i, -1, -1).to(q.dtype)
                s = dot / math.sqrt(D)
                if name in ("softmax", "softmax-nope", "softmax-window"):
                    row = s.softmax(-1)
                elif name == "softmax-qknorm-logn":
                    row = (math.log(D) * log_n * cosine).softmax(-1)
                elif name == "ssmax":
                    row = (0.43 * log_n * s).softmax(-1)
                elif name == "softmax-alibi":
                    row = (s - 4.0 ** -(h + 1) * distance).softmax(-1)
                elif name == "sigmoid":
                    row = 1 / (1 + n * (-s).exp())
                elif name == "relu":
                    row = s.clamp(min=0) / n
                elif name == "entmax":
                    from entmax import entmax15

                    row = entmax15(s, -1)
                else:
                    f = (1 + (math.log(D) * log_n * cosine).exp()).log()
                    row = f / f.sum()
                    if name != "lssa":
                        x = (n * row - int(n > 3)).clamp(min=0) ** (3 if name == "lssar-p3" else 15)
                        row = x / x.sum()
                weights[b, h, i, :n] = row
    return weights


@pytest.mark.parametrize("name", names())
def test_named_attention_matches_its_formula(name: str) -> None:
    q, k, v = inputs()
    expected = by_rows(name, q, k)
    subject = attention(name)
    assert_close(subject.weights(q, k, is_causal=True), expected)
    assert_close(subject(q, k, v, is_causal=True), expected @ v)
    assert_close(subject(q, k, v, is_causal=True, impl="reference"), expected @ v)


def test_softmax_matches_torch() -> None:
    q, k, v = inputs()
    for is_causal in (False, True):
        expected = F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)
        for impl in ("auto", "sdpa", "reference"):
            assert_close(attention("softmax")(q, k, v, is_causal=is_causal, impl=impl), expected)


@pytest.mark.parametrize("alpha", [1.25, 1.5, 2.0])
def test_entmax_row_by_row(alpha: float) -> None:
    from entmax import entmax_bisect

    q, k, _ = inputs()
    q = 3 * q
    weights = attention("entmax", alpha=alpha).weights(q, k, is_causal=True)
    for i in range(T):
        scores = q[:, :, i, None] @ k[:, :, : i + 1].mT / math.sqrt(D)
        assert_close(weights[:, :, i, : i + 1], entmax_bisect(scores, alpha, -1, n_iter=80)[:, :, 0], 1e-7)
        assert (weights[:, :, i, i + 1 :] == 0).all()
    assert (weights == 0).sum() > T * (T - 1) / 2 * B * H  # sparse beyond the mask


def test_entmax_with_distant_scores_and_hidden_keys() -> None:
    from entmax import entmax15

    q = torch.ones(1, 1, 1, 16)
    k = torch.linspace(-2000, 500, 50_000)[:, None].expand(-1, 16)[None, None] / 4
    weights = attention("entmax").weights(q, k, key_end=torch.tensor([[400]], dtype=torch.int32))
    scores = (k[..., :400, :] @ q.mT)[..., 0] / 4
    assert_close(weights[:, :, 0, :400], entmax15(scores.double(), -1).float(), 1e-3)
    assert (weights[..., 400:] == 0).all()
    assert_close(weights.sum(-1), torch.ones(1, 1, 1), 1e-5)


@pytest.mark.parametrize("power", [15, 3, 2.5, PowerByLength(3, 2, 8), None])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("offset", [True, False])
def test_composed_lssar_matches_reference(power: Any, dtype: torch.dtype, offset: bool) -> None:
    q, k, v = inputs(5, dtype=dtype, kv_heads=2)
    mask = torch.rand(B, 1, 5, T, generator=torch.Generator().manual_seed(1)) > 0.4
    visibility = Visibility(5, T, q.device, is_causal=True, window=9, mask=mask)
    spec = LSSA if power is None else LSSAR.but(power=power, offset=offset)
    ours = reference_attention(q, k, v, visibility, power, offset=offset)
    assert torch.equal(composed_attention(spec, q, k, v, visibility), ours)


def test_lssar_runs_through_the_op(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = inputs()
    expected = softplus_attention(q, k, v, power=7, is_causal=True, window=5, score_scale=1.0)

    def refuse(*_: Any, **__: Any) -> Tensor:
        raise AssertionError("composed")

    monkeypatch.setattr(catalog, "composed_attention", refuse)
    assert torch.equal(attention("lssar", power=7, log_d=False, window=5)(q, k, v, is_causal=True), expected)
    without = softplus_attention(q, k, v, power=15, offset=False)
    assert torch.equal(attention("lssar-without-offset")(q, k, v), without)
    with pytest.raises(AssertionError, match="composed"):
        attention("lssar", qk_norm=False)(q, k, v)


@pytest.mark.parametrize("name", EVERYTHING)
def test_every_mode_gives_the_same_rows(name: str) -> None:
    subject = attention(name)
    q, k, v = inputs(dtype=torch.float32)
    # Among the ablations are powers and scores that multiply the rounding of the weights.
    tolerance = 1e-5 if name in ATTENTIONS else 1e-4
    rows = subject(q, k, v, is_causal=True)
    assert rows.isfinite().all()
    assert rows.abs().max() > 0.1

    assert_close(subject(q, k, v, is_causal=True, window=T), rows, tolerance)
    lengths = torch.full((B,), T, dtype=torch.int32)
    for new in (1, 3, T):
        junk = torch.full((B, H, 6, D), torch.nan)
        caches = torch.cat([k, junk], 2), torch.cat([v, junk[..., :7]], 2)
        assert_close(subject.decode(q[:, :, -new:], *caches, lengths), rows[:, :, -new:], tolerance)
    assert_close(subject(q[:, :, -2:], k, v, is_causal=True), rows[:, :, -2:], tolerance)

    pad = 5
    padded = [torch.cat([torch.full_like(x[:, :, :pad], torch.nan), x], 2) for x in (k, v)]
    start = torch.full((B, T), pad, dtype=torch.int32)
    assert_close(subject(q, *padded, is_causal=True, key_start=start), rows, tolerance)
    mask = torch.arange(T + pad) >= pad
    assert_close(subject(q, *padded, is_causal=True, attn_mask=mask[None, None, None]), rows, tolerance)
    starts = torch.full((B,), pad, dtype=torch.int32)
    assert_close(subject.decode(q[:, :, -3:], *padded, lengths + pad, cache_starts=starts), rows[:, :, -3:], tolerance)

    short = 8
    first = subject(q[:, :, :short], k[:, :, :short], v[:, :, :short], is_causal=True)
    packed = [torch.cat([x[0, :, :short], x[1]], 1).transpose(0, 1) for x in (q, k, v)]
    cu = torch.tensor([0, short, short + T], dtype=torch.int32)
    options = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": T, "max_seqlen_k": T, "is_causal": True}
    assert_close(subject.varlen(*packed, **options), torch.cat([first[0], rows[1]], 1).transpose(0, 1), tolerance)


@pytest.mark.parametrize("name", EVERYTHING)
def test_empty_rows_and_their_gradients_are_zero(name: str) -> None:
    q, k, v = (x.requires_grad_() for x in inputs())
    mask = torch.rand(B, 1, T, T, generator=torch.Generator().manual_seed(0)) > 0.3
    mask[:, :, 4] = False
    mask[0, :, 9] = False
    out = attention(name)(q, k, v, is_causal=True, attn_mask=mask)
    assert out.isfinite().all()
    assert (out[:, :, 4] == 0).all()
    assert (out[0, :, 9] == 0).all()
    assert (out[1, :, 9] != 0).any()
    grads = torch.autograd.grad(out.square().sum(), (q, k, v))
    assert all(x.isfinite().all() for x in grads)
    assert (grads[0][:, :, 4] == 0).all()
    assert all(x.abs().max() > 0 for x in grads)


@pytest.mark.parametrize("name", EVERYTHING)
def test_no_keys_at_all(name: str) -> None:
    q, k, v = inputs(3, 0)
    assert torch.equal(attention(name)(q, k, v, is_causal=True), torch.zeros(B, H, 3, 7, dtype=q.dtype))


@pytest.mark.parametrize("name", SOFTMAXES)
@settings(max_examples=10)
@given(data=st.data())
def test_sdpa_matches_reference(name: str, data: st.DataObject) -> None:
    t_q, t_k = data.draw(st.integers(1, 12)), data.draw(st.integers(1, 12))
    is_causal = data.draw(st.booleans())
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    options: dict[str, Any] = {"is_causal": is_causal, "enable_gqa": True}
    if is_causal:
        options["window"] = data.draw(st.none() | st.integers(1, 14))
    else:
        assume(attention(name).spec.window is None)
    if data.draw(st.booleans()):
        options["attn_mask"] = torch.rand(B, data.draw(st.sampled_from((1, H))), t_q, t_k, generator=generator) > 0.4
    if data.draw(st.booleans()):
        options["key_start"] = torch.randint(0, t_k, (B, t_q), generator=generator, dtype=torch.int32)
    scales = [torch.linspace(0.2, 0.9, H, dtype=torch.float64)] if name == "ssmax" else []

    def attend(q: Tensor, k: Tensor, v: Tensor, *scales: Tensor, impl: str) -> Tensor:
        learned = dict(zip(["ssmax_scale"], scales, strict=False))
        return attention(name)(q, k, v, impl=impl, parameters=learned, **options)

    given = (*inputs(t_q, t_k, kv_heads=2), *scales)
    assert_close(*(output_and_gradients(partial(attend, impl=impl), *given) for impl in ("sdpa", "reference")))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", SOFTMAXES)
def test_sdpa_in_half_precision(name: str, dtype: torch.dtype) -> None:
    """Within twice the error of the low-precision reference plus the effect of one rounding of the scores, of at most
    ``largest``: unlike here, the reference does not round its queries after scaling."""
    q, k, v = inputs(dtype=dtype)
    subject = attention(name)
    exact = subject(q.double(), k.double(), v.double(), is_causal=True)
    low = (subject(q, k, v, is_causal=True, impl="reference").double() - exact).abs().max()
    out = subject(q, k, v, is_causal=True, impl="sdpa")
    assert out.dtype == dtype
    spec = subject.spec
    x, y = (unit(z.double()) if spec.qk_norm else z.double() for z in (q, k))
    largest = (x @ y.mT).abs().max() * spec.score_scale(D) * (math.log(T) if spec.log_n else 1)
    rounding = largest * torch.finfo(dtype).eps / 2
    assert (out.double() - exact).abs().max() <= 2 * low + rounding * v.double().abs().max()


def test_alibi_in_half_precision_separates_neighbours() -> None:
    """All scores are 0, so that only the bias counts; one key has a value, at a distance that bfloat16 rounds."""
    k = torch.zeros(1, H, 300, D, dtype=torch.bfloat16)
    v = torch.zeros_like(k)
    v[:, :, 299 - 259] = 1
    subject = attention("softmax-alibi")
    exact = subject(k.double(), k.double(), v.double(), is_causal=True)[:, :, -1]
    for impl in ("sdpa", "reference"):
        out = subject(k, k, v, is_causal=True, impl=impl)[:, :, -1].double()
        torch.testing.assert_close(out, exact, rtol=2**-8, atol=0)


def test_autocast_casts_like_sdpa() -> None:
    q, k, v = inputs(dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for name in ("softmax", "sigmoid", "lssar"):
            assert attention(name)(q, k, v, is_causal=True).dtype == torch.bfloat16
    low = attention("softmax-alibi")(q.bfloat16(), k.bfloat16(), v.bfloat16(), is_causal=True)
    assert low.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("name", "impl"),
    [(name, "sdpa") for name in ("ssmax", "softmax-alibi", "softmax-qknorm-logn")]
    + [(name, "reference") for name in ("ssmax", "sigmoid", "relu", "entmax", "softmax-alibi", "lssar-then-exp")]
    + [(name, "reference") for name in ("lssar-with-elu1", "lssar-without-l1", "lssa-without-qk-norm")],
)
def test_gradients(name: str, impl: str) -> None:
    subject = attention(name)
    q, k, v = (x[:1, :2, :6].clone().requires_grad_() for x in inputs())
    learned = [x.double().requires_grad_() for x in subject.learned_parameters(2).values()]

    def run(q: Tensor, k: Tensor, v: Tensor, *values: Tensor) -> Tensor:
        parameters = dict(zip(subject.learned_parameters(2), values, strict=True))
        return subject(q, k, v, is_causal=True, impl=impl, parameters=parameters)

    assert torch.autograd.gradcheck(run, (q, k, v, *learned))


@pytest.mark.parametrize("name", ["lssar", "lssar-without-offset", "softmax-reweighted"])
def test_power_tensor_as_parameter(name: str) -> None:
    q, k, v = inputs()
    power = torch.tensor([1.0, 3.0, 7.0, 15.0], dtype=q.dtype, requires_grad=True)
    out = attention(name)(q, k, v, is_causal=True, parameters={"power": power})
    for head, p in enumerate((1, 3, 7, 15)):
        assert_close(out[:, head], attention(name, power=p)(q, k, v, is_causal=True)[:, head])
    (grad,) = torch.autograd.grad(out.square().sum(), power)
    assert (grad != 0).all()


def test_normalising_commutes_with_rope() -> None:
    from softplus_attention.nn import RotaryEmbedding

    q, k, _ = inputs()
    rope = RotaryEmbedding(D)
    for name in ("softmax-qknorm-logn", "lssar"):
        after = attention(name).weights(rope(q), rope(k), is_causal=True)
        before = attention(name).weights(rope(unit(q)), rope(unit(k)), is_causal=True)
        assert_close(after, before)
        assert (after - attention(name).weights(q, k, is_causal=True)).abs().max() > 1e-3


def test_relu_row_without_a_positive_score_is_zero() -> None:
    q, _, v = inputs()
    for name in ("relu", "lssar-with-relu", "relu-l1-reweighted"):
        assert (attention(name)(q.abs(), -q.abs(), v, is_causal=True) == 0)[:, :, 1:].all()


def test_without_times_n() -> None:
    """With the offset, rows of more than three keys keep stage 1; without it, the factor N cancels."""
    q, k, _ = inputs()
    without = attention("lssar-without-times-n").weights(q, k, is_causal=True)
    assert_close(without[:, :, 3:], attention("lssa").weights(q, k, is_causal=True)[:, :, 3:])
    assert_close(without[:, :, :3], attention("lssar").weights(q, k, is_causal=True)[:, :, :3])
    neither = LSSAR.but(times_n=False, offset=False)
    assert_close(
        attention(neither).weights(q, k, is_causal=True),
        attention("lssar-without-offset").weights(q, k, is_causal=True),
    )


def test_second_stage_exp_is_softmax_of_n_a() -> None:
    q, k, _ = inputs()
    a = attention("lssa").weights(q, k)
    assert_close(attention("lssar-then-exp").weights(q, k), (T * a).softmax(-1))
    assert_close(
        attention(LSSAR.but(second_stage="exp", power=0.5, times_n=False)).weights(q, k), (0.5 * a).softmax(-1)
    )


def test_alibi_slopes() -> None:
    assert alibi_slopes(8) == [2.0**-h for h in range(1, 9)]
    assert alibi_slopes(6) == pytest.approx([2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3])
    assert [len(alibi_slopes(h)) for h in (1, 3, 12, 20)] == [1, 3, 12, 20]


@pytest.mark.parametrize("name", EVERYTHING)
def test_nan_affects_only_rows_that_see_it(name: str) -> None:
    q, k, v = inputs()
    clean = attention(name)(q, k, v, is_causal=True, impl="reference")
    k[:, :, 10, 3] = torch.nan
    out = attention(name)(q, k, v, is_causal=True, impl="reference")
    assert_close(out[:, :, :10], clean[:, :, :10])
    assert out[:, :, 10:].isnan().all()


@pytest.mark.parametrize("name", EVERYTHING)
def test_masked_keys_may_be_nan(name: str) -> None:
    q, k, v = inputs()
    attend = partial(attention(name), is_causal=True, key_end=torch.full((B, T), 15, dtype=torch.int32))
    results = []
    for junk in (0.0, torch.nan):
        k[:, :, 15:], v[:, :, 15:] = junk, junk
        results.append(output_and_gradients(attend, q, k, v))
    assert_close(*results)


@pytest.mark.parametrize("name", ["sigmoid", "softmax"])
def test_compiled_decode_with_nan_in_the_cache(name: str) -> None:
    q, k, v = inputs()
    lengths = torch.tensor([T - 6, T - 4], dtype=torch.int32)
    expected = attention(name).decode(q[:, :, -2:], k, v, lengths)
    k[:, :, T - 4 :], v[:, :, T - 4 :] = torch.nan, torch.nan
    decode = torch.compile(attention(name).decode, fullgraph=True, backend="eager")
    assert_close(decode(q[:, :, -2:], k, v, lengths), expected)


def test_window_of_the_spec_and_of_the_call() -> None:
    q, k, v = inputs()
    windowed = attention("softmax-window", window=4)
    expected = attention("softmax")(q, k, v, is_causal=True, window=4)
    assert_close(windowed(q, k, v, is_causal=True), expected)
    assert_close(windowed(q, k, v, is_causal=True, window=T), attention("softmax")(q, k, v, is_causal=True))
    lengths = torch.full((B,), T, dtype=torch.int32)
    assert_close(windowed.decode(q[:, :, -2:], k, v, lengths), expected[:, :, -2:])


def test_normalised_keys() -> None:
    q, k, v = inputs()
    lengths = torch.full((B,), T, dtype=torch.int32)
    for name in ("lssar", "softmax-qknorm-logn", "lssar-with-elu1"):
        plain = attention(name).decode(q[:, :, -1:], k, v, lengths)
        assert_close(attention(name).decode(q[:, :, -1:], unit(k), v, lengths, normalized_keys=True), plain)
    with pytest.raises(ValueError, match=r"normalized_keys.*softmax does not normalise"):
        attention("softmax").decode(q[:, :, -1:], unit(k), v, lengths, normalized_keys=True)


def test_descriptions_of_specs() -> None:
    assert str(AttentionSpec()) == (
        "softplus of log d log N cosines, l1-normalised; then relu(N a - 1)^15, l1-normalised"
    )
    assert str(attention("sigmoid").spec) == "sigmoid of dot products / sqrt d - log N, not normalised"
    assert str(attention("entmax", alpha=1.25).spec) == "1.25-entmax of dot products / sqrt d"
    descriptions = [str(spec) for spec in (ATTENTIONS | ABLATIONS).values()]
    assert len(set(descriptions)) == len(descriptions)


@pytest.mark.parametrize("rows", [0, 1])
def test_no_rows_under_a_mask(rows: int) -> None:
    q, k = torch.randn(2, 2, rows, 8), torch.randn(2, 2, 3, 8)
    mask = torch.ones(rows, 3, dtype=torch.bool)
    for name, parameters in (("softmax-qknorm-logn", None), ("lssar", {"power_per_log": torch.ones(2)})):
        assert attention(name)(q, k, k, attn_mask=mask, parameters=parameters).shape == (2, 2, rows, 8)


def test_names() -> None:
    assert attention("lssar").spec == AttentionSpec() == attention(AttentionSpec()).spec
    assert attention(SOFTMAX).name == "softmax"
    assert attention("lssar", power=7).name == "lssar(power=7)"
    assert attention(attention("lssa")) == attention("lssa")
    assert isinstance(attention("lssar-p31"), Attention)
    assert attention("ssmax").learned_parameters(3)["ssmax_scale"].tolist() == pytest.approx([0.43] * 3)
    assert attention("softmax").learned_parameters(3) == {}
    assert attention("lssar-p15") == attention("lssar"), "the default power is 15"
    with pytest.raises(ValueError, match=r"'sofmax'; did you mean 'softmax'\?.*ssmax.*lssar-without-log-n"):
        attention("sofmax")


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"positive": "tanh"}, ValueError, "`positive` must be one of .*softplus.*'tanh'"),
        ({"normaliser": "l2"}, ValueError, "`normaliser` must be one of"),
        ({"second_stage": "relu"}, ValueError, "`second_stage`"),
        ({"bias": "learned"}, ValueError, "`bias`"),
        ({"positions": "yarn"}, ValueError, "`positions`"),
        ({"log_n": 1}, TypeError, "`log_n` must be True or False, got 1"),
        ({"alpha": 1}, ValueError, "`alpha`"),
        ({"normaliser": "entmax"}, ValueError, "`positive` must be 'exp' where"),
        ({"power": 0.5}, ValueError, "`power`.*>= 1"),
        ({"power": "3"}, TypeError, "`power`"),
        ({"power": torch.ones(2)}, ValueError, "parameters="),
        ({"second_stage": "none", "power": 3}, ValueError, "`power` must be None where"),
        ({"second_stage": "exp", "power": 0}, ValueError, "inverse temperature"),
        ({"window": 0}, ValueError, "`window`"),
        ({"powr": 3}, ValueError, "no field `powr`; its fields are positive"),
    ],
)
def test_bad_specs(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        AttentionSpec().but(**changes)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("sigmoid", {"impl": "sdpa"}, "this attention is no softmax"),
        ("softmax", {"impl": "chunked"}, "`impl` must be one of"),
        ("softmax", {"parameters": {"ssmax_scale": torch.ones(H)}}, "`parameters` may hold nothing"),
        ("lssar", {"parameters": {"ssmax_scale": torch.ones(H)}}, r"may hold \['power', 'power_per_log'\]"),
        ("ssmax", {"parameters": {"ssmax_scale": torch.ones(3)}}, r"shape \(H,\) = \(4,\)"),
        ("softmax-window", {"is_causal": False}, "`window`"),
    ],
)
def test_bad_calls(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        attention(name)(*inputs(), **options)


def test_bad_heads_and_names() -> None:
    with pytest.raises(ValueError, match="enable_gqa"):
        attention("softmax")(*inputs(kv_heads=2))
    with pytest.raises(TypeError, match="name_or_spec"):
        attention(3)  # type: ignore[arg-type]


def test_entmax_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    original = builtins.__import__

    def without_entmax(name: str, *rest: Any) -> Any:
        if name == "entmax":
            raise ImportError(name)
        return original(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without_entmax)
    q, k, _ = inputs()
    with pytest.raises(ImportError, match=r"pip install 'softplus-attention\[baselines\]'"):
        composed_weights(attention("entmax").spec, q, k, Visibility(T, T, q.device))


DOCS = Path(__file__).parents[2] / "docs" / "attentions.md"


def test_documentation_names_them_all() -> None:
    assert re.findall(r"^\| `([a-z0-9-]+)` \|", DOCS.read_text(), re.MULTILINE) == names()


@pytest.mark.parametrize("name", ["lssar-without-log-n", "sigmoid", "relu", "entmax", "ssmax"])
def test_autocast_keeps_float32_inside(name: str) -> None:
    """Autocast casts the inputs but must not round the scores, or ablations would train worse than the op."""
    q, k, v = (torch.randn(1, 2, 9, 16, generator=torch.Generator().manual_seed(i)) for i in range(3))
    chosen = attention(name)
    expected = chosen(*(x.bfloat16() for x in (q, k, v)), is_causal=True, impl="reference")
    weights = chosen.weights(q.bfloat16(), k.bfloat16(), is_causal=True)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(chosen(q, k, v, is_causal=True, impl="reference"), expected)
        assert torch.equal(chosen.weights(q, k, is_causal=True), weights)


def test_no_power_requires_lssa() -> None:
    with pytest.raises(TypeError, match=r"`power` must be a number.*'lssa'"):
        attention("lssar", power=None)


class TestFirstScale:
    def test_initial_value(self) -> None:
        learned = "softmax-qknorm-logn-learned"
        for name, start in ((learned, 1.0), ("ssmax", 0.43), (f"{learned}-soft", 0.6)):
            assert attention(name).learned_parameters(3)["ssmax_scale"].tolist() == pytest.approx([start] * 3)

    def test_replaces_a_missing_scale(self) -> None:
        q, k, v = inputs()
        soft, plain = (attention(f"softmax-qknorm-logn-learned{x}") for x in ("-soft", ""))
        given = {"ssmax_scale": torch.full((H,), 0.6)}
        assert_close(soft(q, k, v, is_causal=True), plain(q, k, v, is_causal=True, parameters=given), 1e-6)

    @pytest.mark.parametrize("wrong", [0, -1.0, math.inf, math.nan, "1", True])
    def test_bad_values(self, wrong: Any) -> None:
        with pytest.raises(ValueError, match="`first_scale` must be None or a number above 0, got"):
            attention("ssmax", first_scale=wrong)

    def test_requires_a_learned_scale(self) -> None:
        with pytest.raises(ValueError, match=r"`first_scale` must be None where `learned_scale` is False, got 0\.6"):
            attention("softmax", first_scale=0.6)


@pytest.mark.parametrize("name", ["softmax", "softmax-qknorm-logn", "ssmax"])
def test_compiles_with_dynamic_lengths(name: str) -> None:
    chosen = attention(name)
    compiled = torch.compile(lambda q: chosen(q, q, q, is_causal=True), fullgraph=True, dynamic=True, backend="eager")
    for length in (20, 33):
        q = torch.randn(2, 4, length, 8)
        torch.testing.assert_close(compiled(q), chosen(q, q, q, is_causal=True))


@pytest.mark.parametrize("lengths", [[40, 40], [40, 30]], ids=["equal", "unequal"])
def test_decode_without_a_mask(lengths: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """If all sequences see the same keys of a cache, SDPA receives only these keys and no mask."""
    q, k, v = (randn(2, 2, n, 8, seed=n, dtype=torch.float64) for n in (1, 64, 64))
    k[:, :, 40:] = v[:, :, 40:] = torch.nan
    fused, found = F.scaled_dot_product_attention, list[tuple[int, bool]]()

    def recorded(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, **options: Any) -> Tensor:
        found.append((k.shape[2], attn_mask is None))
        return fused(q, k, v, attn_mask, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", recorded)
    seqlens = torch.tensor(lengths, dtype=torch.int32)
    out = attention("softmax").decode(q, k, v, seqlens)
    assert found == [(40, True) if lengths[0] == lengths[1] else (64, False)]
    assert_close(out, attention("softmax").decode(q, k, v, seqlens, impl="reference"))
