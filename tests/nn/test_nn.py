"""The modules: cached steps match the full forward, packed documents match separate documents."""

from __future__ import annotations

import copy
import io
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from softplus_attention import PowerByLength, softplus_attention
from softplus_attention.catalog import LSSAR, attention
from softplus_attention.nn import KeyValueCache, RotaryEmbedding, SoftplusAttention

B, T, DIM, HEADS = 2, 13, 32, 4
SEVERAL = ["lssar", "lssa", "softmax", "softmax-qknorm-logn", "ssmax", "sigmoid", "entmax", "softmax-alibi"]


def module(name: Any = "lssar", seed: int = 0, **options: Any) -> SoftplusAttention:
    torch.manual_seed(seed)
    return SoftplusAttention(DIM, HEADS, attention=name, **options)


def tokens(batch: int = B, length: int = T, *, seed: int = 1, width: int = DIM) -> Tensor:
    return torch.randn(batch, length, width, generator=torch.Generator().manual_seed(seed))


def assert_close(x: Tensor, y: Tensor, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(x, y, rtol=tolerance, atol=tolerance)


def step_by_step(layer: SoftplusAttention, x: Tensor, cache: KeyValueCache, prefill: int) -> Tensor:
    parts = [x[:, :prefill], *x[:, prefill:].split(1, dim=1)]
    return torch.cat([layer(part, cache=cache) for part in parts], 1)


def test_forward_is_projections_and_the_op() -> None:
    layer, x = module(power=7, rope=None), tokens()
    q, k, v = (p(x).view(B, T, HEADS, -1).transpose(1, 2) for p in (layer.q_proj, layer.k_proj, layer.v_proj))
    out = softplus_attention(q, k, v, power=7, is_causal=True)
    assert_close(layer(x), layer.o_proj(out.transpose(1, 2).reshape(B, T, -1)), 1e-6)
    assert layer(x).shape == x.shape


@pytest.mark.parametrize("name", SEVERAL)
@pytest.mark.parametrize("kv_heads", [HEADS, 2])
@torch.no_grad()
def test_cached_steps_match_full_forward(name: str, kv_heads: int) -> None:
    layer, x = module(name, num_kv_heads=kv_heads), tokens()
    expected = layer(x)
    for prefill in (1, 6):
        assert_close(step_by_step(layer, x, KeyValueCache(), prefill), expected)
    chunks = KeyValueCache(max_length=T)
    assert_close(torch.cat([layer(part, cache=chunks) for part in x.split(5, 1)], 1), expected)


@torch.no_grad()
def test_cached_steps_with_window_and_power_by_length() -> None:
    layer, x = module(LSSAR.but(power=PowerByLength(3, 2, 4)), window=5), tokens()
    assert_close(step_by_step(layer, x, KeyValueCache(), 3), layer(x))
    assert (layer(x) - module(LSSAR.but(power=3))(x)).abs().max() > 1e-4


@pytest.mark.parametrize("name", SEVERAL)
@torch.no_grad()
def test_left_padding(name: str) -> None:
    layer, x = module(name), tokens()
    pads = torch.tensor([4, 0], dtype=torch.int32)
    short = layer(x[:1, 4:])
    padded = x.clone()
    padded[0, :4] = 1e3
    start = pads[:, None].expand(B, T).contiguous()
    out = layer(padded, key_start=start)
    assert_close(out[:1, 4:], short)
    assert_close(out[1:], layer(x[1:]))
    assert_close(step_by_step(layer, padded, KeyValueCache(starts=pads), 6)[:1, 4:], short)


@torch.no_grad()
def test_left_padded_positions_skip_the_padding() -> None:
    cache = KeyValueCache(starts=torch.tensor([2, 0], dtype=torch.int32))
    assert cache.positions(B, 4, torch.device("cpu")).tolist() == [[0, 0, 0, 1], [0, 1, 2, 3]]
    module()(tokens(length=4), cache=cache)
    assert cache.positions(B, 2, torch.device("cpu")).tolist() == [[2, 3], [4, 5]]


@pytest.mark.parametrize("name", ["lssar", "softmax", "softmax-alibi"])
@torch.no_grad()
def test_right_padded_prefill_then_steps(name: str) -> None:
    """Sequences of different lengths in one cache; each continues at its own end."""
    layer, x = module(name), tokens()
    counts = torch.tensor([5, 8], dtype=torch.int32)
    cache = KeyValueCache()
    layer(x[:, :8], cache=cache, token_counts=counts)
    assert cache.lengths.tolist() == [5, 8]
    for step in range(3):
        new = torch.stack([x[0, 5 + step], x[1, 8 + step]])[:, None]
        out = layer(new, cache=cache)
        assert_close(out[0, 0], layer(x[:1])[0, 5 + step])
        assert_close(out[1, 0], layer(x[1:])[0, 8 + step])


@pytest.mark.parametrize("name", SEVERAL)
def test_packed_documents_match_separate_ones(name: str) -> None:
    layer = module(name, num_kv_heads=2)
    documents = [tokens(1, n, seed=n) for n in (5, 1, 9)]
    cu = torch.tensor([0, 5, 6, 15], dtype=torch.int32)
    out = layer(torch.cat(documents, 1), cu_seqlens=cu, max_seqlen=9)
    assert_close(out, torch.cat([layer(document) for document in documents], 1))
    restarting = [*range(5), 0, *range(9)]
    assert layer.positions(torch.cat(documents, 1), cu, None).tolist() == restarting


@pytest.mark.parametrize("name", ["lssar", "softmax", "sigmoid"])
def test_cross_attention(name: str) -> None:
    layer = module(name, source_dim=20, num_kv_heads=2)
    x, source = tokens(), tokens(length=7, seed=3, width=20)
    out = layer(x, source)
    assert out.shape == x.shape
    order = torch.randperm(7, generator=torch.Generator().manual_seed(0))
    assert_close(layer(x, source[:, order]), out)  # neither causal nor rotated
    assert_close(layer(x[:, :4], source), out[:, :4])
    longer = torch.cat([source, tokens(length=3, seed=4, width=20)], 1)
    end = torch.full((B, T), 7, dtype=torch.int32)
    assert_close(layer(x, longer, key_end=end), out)
    assert (layer(x, longer) - out).abs().max() > 1e-4


def test_self_attention_is_causal_by_default() -> None:
    layer, x = module(), tokens()
    assert_close(layer(x[:, :6]), layer(x)[:, :6])
    assert (layer(x[:, :6], is_causal=False) - layer(x, is_causal=False)[:, :6]).abs().max() > 1e-4
    mask = torch.ones(T, T, dtype=torch.bool).tril()
    assert_close(layer(x, is_causal=False, attn_mask=mask), layer(x))


@settings(max_examples=30)
@given(
    offset=st.integers(0, 1_000_000),
    distance=st.integers(-1000, 1000),
    fraction=st.sampled_from((1.0, 0.5)),
    theta=st.sampled_from((10_000.0, 500_000.0)),
)
def test_rotary_scores_depend_only_on_distance(offset: int, distance: int, fraction: float, theta: float) -> None:
    rope = RotaryEmbedding(16, theta=theta, fraction=fraction)
    q, k = (tokens(1, 1, seed=seed, width=16)[None] for seed in (1, 2))
    base, other = 1000, 1000 + distance
    score = rope(q, offset=base) @ rope(k, offset=other).mT
    moved = rope(q, offset=base + offset) @ rope(k, offset=other + offset).mT
    assert_close(moved, score, 1e-5)
    assert_close(rope(q, offset=offset).norm(), q.norm())


def test_rotary_rotates_pairs() -> None:
    x = tokens(1, 3, width=8)[None].double()
    out = RotaryEmbedding(8, theta=100.0, fraction=0.5)(x, torch.tensor([0, 7, 1_000_000]))
    assert torch.equal(out[..., 4:], x[..., 4:])
    for row, position in enumerate((0, 7, 1_000_000)):
        for i, frequency in enumerate((1.0, 0.1)):
            pair = torch.complex(x[0, 0, row, i], x[0, 0, row, i + 2])
            turned = pair * torch.exp(torch.tensor(1j * position * frequency, dtype=torch.complex128))
            assert_close(torch.view_as_real(turned), out[0, 0, row, [i, i + 2]], 1e-9)


def test_positions_by_ids_offset_or_default() -> None:
    rope, x = RotaryEmbedding(16), tokens(B, 5, width=16)[:, None]
    assert_close(rope(x, torch.arange(3, 8)), rope(x, offset=3))
    each = rope(x, torch.tensor([[3, 4, 5, 6, 7], [0, 1, 2, 3, 4]]))
    assert_close(each[:1], rope(x[:1], offset=3))
    assert_close(each[1:], rope(x[1:]))
    layer, y = module(), tokens()
    assert_close(layer(y, position_ids=torch.arange(500, 500 + T)), layer(y))
    assert (layer(y, position_ids=torch.zeros(T)) - layer(y)).abs().max() > 1e-4
    low = rope(x.bfloat16(), offset=100_000)
    assert low.dtype == torch.bfloat16
    assert_close(low.float(), rope(x.bfloat16().float(), offset=100_000), 1e-2)


@torch.no_grad()
def test_full_cache_raises() -> None:
    layer, cache = module(), KeyValueCache(max_length=6)
    layer(tokens(length=5), cache=cache)
    layer(tokens(length=1), cache=cache)
    with pytest.raises(ValueError, match=r"full: 6 of 6 tokens .* 1 more do not fit"):
        layer(tokens(length=1), cache=cache)


@torch.no_grad()
def test_cache_grows_resets_and_reorders() -> None:
    layer, x, cache = module(num_kv_heads=2), tokens(length=70), KeyValueCache()
    assert_close(step_by_step(layer, x, cache, 60), layer(x))
    assert len(cache) == 70
    assert cache.keys.shape == (B, 2, 128, 8)
    memory = cache.keys
    assert_close(memory[:, :, :70].norm(dim=-1), torch.ones(B, 2, 70))  # stored normalised
    cache.reset()
    assert_close(step_by_step(layer, x[:, :9], cache, 4), layer(x[:, :9]))
    assert cache.keys is memory
    cache.reorder(torch.tensor([1, 1, 0]))
    again = x[[1, 1, 0]]
    assert_close(layer(again[:, 9:10], cache=cache), layer(again[:, :10])[:, 9:])


@torch.no_grad()
def test_reset_cache_accepts_another_batch_size() -> None:
    layer, x, cache = module(), tokens(length=9), KeyValueCache()
    step_by_step(layer, x, cache, 4)
    with pytest.raises(ValueError, match="`k` must be as the cache holds them"):
        layer(x[:1, :1], cache=cache)
    cache.reset()
    assert_close(step_by_step(layer, x[:1], cache, 4), layer(x[:1]))


def test_starts_must_be_a_tensor() -> None:
    with pytest.raises(TypeError, match=r"`starts` must be an int32 tensor \(B,\), got list"):
        KeyValueCache(starts=[0, 1])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"`starts` must be an int32 tensor \(B,\), got list"):
        KeyValueCache().reset([0, 1])  # type: ignore[arg-type]


@torch.no_grad()
def test_reorder_includes_lengths_and_starts() -> None:
    layer, x = module("softmax"), tokens()
    cache = KeyValueCache(starts=torch.tensor([3, 0], dtype=torch.int32))
    layer(x[:, :8], cache=cache, token_counts=torch.tensor([6, 8], dtype=torch.int32))
    cache.reorder(torch.tensor([1, 0]))
    out = layer(torch.stack([x[1, 8], x[0, 6]])[:, None], cache=cache)
    assert_close(out[1, 0], layer(x[:1, 3:7])[0, -1])
    assert_close(out[0, 0], layer(x[1:, :9])[0, -1])


def test_softmax_keys_are_cached_unchanged() -> None:
    layer, x, cache = module("softmax", rope=None), tokens(), KeyValueCache()
    with torch.no_grad():
        layer(x, cache=cache)
        assert_close(cache.keys[:, :, :T], layer.heads(layer.k_proj(x)))
    with pytest.raises(RuntimeError, match="keeps no gradients"):
        layer(x, cache=KeyValueCache())


@torch.no_grad()
def test_prefill_reads_the_rounded_keys_of_the_cache() -> None:
    """In bfloat16, prefill and decode steps agree up to one rounding of the output."""
    layer, x = module(power=15).bfloat16(), tokens().bfloat16()
    whole = layer(x, cache=KeyValueCache())
    assert whole.dtype == torch.bfloat16
    assert_close(step_by_step(layer, x, KeyValueCache(), 4).float(), whole.float(), 2e-2)


def test_learned_power() -> None:
    layer, x = module(power="learned"), tokens()
    assert_close(layer.learned_power, torch.full((HEADS,), 15.0))
    assert_close(layer(x), module()(x))
    optimizer = torch.optim.SGD([layer.raw_power], lr=1e4)  # type: ignore[list-item]
    for _ in range(3):
        optimizer.zero_grad()
        layer(x).square().sum().backward()
        assert layer.raw_power.grad.abs().max() > 0
        optimizer.step()
        assert (layer.learned_power >= 1).all()
        assert layer(x).isfinite().all()
    with torch.no_grad():
        layer.raw_power.fill_(-200)  # type: ignore[union-attr]
    assert_close(layer(x), module(power=1)(x))
    for start in (1.0, 1.5, 200.0):
        other = module(LSSAR.but(power=start), power="learned").learned_power
        assert_close(other, torch.full((HEADS,), max(start, 1.01)), 1e-4)


def test_learned_factor_of_log_n() -> None:
    """Starts at 0.6 log N in every row of a window, with and without a cache, and receives a gradient."""
    layer, x = module(power="learned-log", window=9), tokens()
    constant = module(power=PowerByLength.log_n(0.6), window=9)
    assert_close(layer(x), constant(x))
    with torch.no_grad():
        assert_close(step_by_step(layer, x, KeyValueCache(), 5), layer(x))
    layer(x).square().sum().backward()
    assert (layer.raw_parameter.grad != 0).all()
    factors = torch.tensor([0.1, 0.5, 1.0, 4.0])
    with torch.no_grad():
        layer.raw_parameter.copy_(torch.log(torch.expm1(factors)))
    assert_close(layer.learned_power, factors)
    keys = torch.arange(1, T + 1).clamp(max=9)
    powers = torch.tensor([[max(1.0, factor * math.log(n)) for n in keys.tolist()] for factor in factors.tolist()])
    q, k, v = (torch.randn(2, HEADS, T, 8) for _ in range(3))
    options: dict[str, Any] = {"is_causal": True, "window": 9}
    expected = attention("lssar")(q, k, v, parameters={"power": powers[None]}, **options)
    assert_close(attention("lssar")(q, k, v, parameters={"power_per_log": factors}, **options), expected)
    with pytest.raises(ValueError, match="got both"):
        attention("lssar")(q, k, v, parameters={"power_per_log": factors, "power": powers[None]})
    with pytest.raises(ValueError, match="is learned"):
        layer.set_power(3)
    with pytest.raises(RuntimeError, match="raw_power_per_log"):
        layer.load_state_dict(module(power="learned").state_dict())


def test_set_power() -> None:
    layer, x = module(power=3), tokens()
    assert_close(layer(x), module("lssar-p3")(x))
    layer.set_power(7)
    assert_close(layer(x), module(power=7)(x))
    assert (layer(x) - module(power=3)(x)).abs().max() > 1e-4
    with pytest.raises(ValueError, match="is learned"):
        module(power="learned").set_power(3)


def test_ssmax_scale_is_a_parameter() -> None:
    layer = module("ssmax")
    assert isinstance(layer.ssmax_scale, nn.Parameter)
    layer(tokens()).square().sum().backward()
    assert (layer.ssmax_scale.grad != 0).all()
    before = layer(tokens())
    with torch.no_grad():
        layer.ssmax_scale.mul_(2)
    assert (layer(tokens()) - before).abs().max() > 1e-4


@pytest.mark.parametrize(
    "options", [{"power": "learned"}, {"power": "learned-log"}, {"name": "ssmax", "bias": True}, {}]
)
def test_state_dict(options: dict[str, Any]) -> None:
    layer = module(seed=0, **options)
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    other = module(seed=5, **options)
    assert (other(tokens()) - layer(tokens())).abs().max() > 1e-4
    other.load_state_dict(torch.load(file))
    assert torch.equal(other(tokens()), layer(tokens()))
    assert torch.equal(copy.deepcopy(layer)(tokens()), layer(tokens()))


def test_autocast() -> None:
    layer, x = module(power="learned", num_kv_heads=2), tokens()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = layer(x)
        with torch.no_grad():
            cached = step_by_step(layer, x, KeyValueCache(), 5)
    assert out.dtype == cached.dtype == torch.bfloat16
    assert_close(out.float(), layer(x), 5e-2)
    assert_close(cached.float(), layer(x), 5e-2)
    out.float().sum().backward()
    assert layer.q_proj.weight.grad.dtype == torch.float32


@pytest.mark.parametrize(("name", "power"), [("lssar", "learned"), ("lssar", "learned-log"), ("softmax", None)])
def test_compiles_whole(name: str, power: Any) -> None:
    """One graph for forward and backward at any length; without inductor, whose code generation is slow."""
    torch._dynamo.reset()
    layer = module(name, power=power, num_kv_heads=2)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for length in (T, 2 * T):
        x = tokens(length=length)
        results = []
        for run in (layer, compiled):
            out = run(x)
            results.append([out, *torch.autograd.grad(out.square().sum(), list(layer.parameters()))])
        assert_close(*results, 1e-4)


@pytest.mark.parametrize("name", ["lssar", "softmax"])
def test_compiles_whole_with_a_cache(name: str) -> None:
    torch._dynamo.reset()
    layer, x = module(name), tokens()

    def decoded(run: Any) -> Tensor:
        cache = KeyValueCache(max_length=2 * T)
        with torch.no_grad():
            return torch.cat([run(part, cache=cache) for part in x.split([T - 3, 1, 1, 1], 1)], 1)

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert_close(decoded(compiled), decoded(layer), 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lssar", "softmax", "sigmoid"])
def test_compiles_with_inductor(name: str) -> None:
    torch._dynamo.reset()
    layer = module(name)
    compiled = torch.compile(layer, fullgraph=True)
    for length in (13, 29):
        x = tokens(length=length)
        assert_close(compiled(x), layer(x))
        compiled(x).square().sum().backward()


def test_repr() -> None:
    text = repr(module("ssmax", num_kv_heads=2))
    assert "32, heads=4x8, kv_heads=2, attention='ssmax'" in text
    assert "RotaryEmbedding(8, theta=10000)" in text
    assert "power='learned'" in repr(module(power="learned"))
    assert "RotaryEmbedding" not in repr(module("softmax-alibi"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dim": 30}, "`dim` must be a multiple of `num_heads`, 4.*30"),
        ({"num_heads": 0}, "`num_heads`"),
        ({"num_kv_heads": 3}, "`num_kv_heads` must be a divisor of `num_heads`, 4, got 3"),
        ({"head_dim": 7}, "`head_dim`.*7 of 7"),
        ({"attention": "sofmax"}, "did you mean 'softmax'"),
        ({"power": "leaned"}, "`power`.*'learned'.*'leaned'"),
        ({"power": 0.5}, "`power`.*>= 1"),
        ({"attention": "softmax", "power": "learned"}, "`power`.*softmax has no second stage"),
        ({"attention": "softmax", "power": 3}, "`power` must be None"),
        ({"window": 0}, "`window`"),
        ({"rope": RotaryEmbedding(16)}, "`rope`.*head dimension, 8, got 16"),
        ({"rope": RotaryEmbedding(8), "attention": "softmax-alibi"}, "positions are 'alibi'"),
    ],
)
def test_bad_configurations(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SoftplusAttention(**{"dim": DIM, "num_heads": HEADS, **options})


@torch.no_grad()
def test_bad_calls() -> None:
    layer, x = module(), tokens()
    cu, mask = torch.tensor([0, T], dtype=torch.int32), torch.ones(T, T, dtype=torch.bool)
    for kwargs, message in (
        ({"cache": KeyValueCache(), "attn_mask": mask}, "`attn_mask` must be None where `cache`"),
        ({"cache": KeyValueCache(), "source": x}, "`source` must be None where `cache`"),
        ({"cache": KeyValueCache(), "is_causal": False}, "`is_causal` must be True where `cache`"),
        ({"cu_seqlens": cu, "max_seqlen": T}, r"`x` must be \(1, total, dim\)"),
        ({"token_counts": cu}, "`token_counts` must be None"),
        ({"token_counts": [1, 2]}, "`token_counts` must be None without a `cache`, got list"),
        ({"max_seqlen": T}, f"`max_seqlen` must be None without `cu_seqlens`, got {T}"),
        ({"cache": KeyValueCache(), "max_seqlen": T}, "`max_seqlen` must be None without `cu_seqlens`"),
        ({"source": x, "position_ids": torch.arange(T)}, "`position_ids` must be None where `source` is given"),
        ({"position_ids": torch.arange(T + 1)}, "`position_ids` must be of shape"),
    ):
        with pytest.raises(ValueError, match=message):
            layer(x, **kwargs)


BAD_COUNTS: dict[str, tuple[Any, type[Exception], str]] = {
    "list": ([5, 7], TypeError, "an int32 or int64 tensor, got list"),
    "floats": (torch.tensor([5.0, 7.0]), TypeError, "an int32 or int64 tensor, got a torch.float32 tensor"),
    "bools": (torch.tensor([True, False]), TypeError, "an int32 or int64 tensor, got a torch.bool tensor"),
    "batch": (torch.tensor([5]), ValueError, r"of shape \(B,\) = \(2,\)"),
    "rank": (torch.tensor([[5], [7]]), ValueError, r"of shape \(B,\) = \(2,\)"),
    "device": (torch.zeros(2, dtype=torch.int32, device="meta"), ValueError, "on the device of the queries, cpu"),
    "too-many": (torch.tensor([9, 9]), ValueError, r"from 0 to 7, got \[9, 9\]"),
    "negative": (torch.tensor([-3, 2]), ValueError, r"from 0 to 7, got \[-3, 2\]"),
}


@pytest.mark.parametrize(("counts", "kind", "message"), BAD_COUNTS.values(), ids=BAD_COUNTS)
@torch.no_grad()
def test_bad_token_counts_leave_the_cache_unchanged(counts: Any, kind: type[Exception], message: str) -> None:
    layer, x, cache = module(), tokens(length=8), KeyValueCache()
    with pytest.raises(kind, match=f"`token_counts` must be {message}"):
        layer(x[:, :7], cache=cache, token_counts=counts)
    k = torch.randn(B, HEADS, 7, DIM // HEADS)
    with pytest.raises(kind, match=f"`counts` must be {message}"):
        cache.append(k, k, counts)
    assert len(cache) == 0
    assert cache.keys is None
    assert_close(step_by_step(layer, x, cache, 7), layer(x))


@torch.no_grad()
def test_token_counts_may_be_zero_or_full() -> None:
    layer, x, cache = module(), tokens(), KeyValueCache()
    layer(x[:, :4], cache=cache, token_counts=torch.tensor([0, 4]))
    out = layer(torch.stack([x[0, 0], x[1, 4]])[:, None], cache=cache)
    assert_close(out[0, 0], layer(x[:1])[0, 0])
    assert_close(out[1, 0], layer(x[1:])[0, 4])


@pytest.mark.parametrize(
    ("changed", "kind", "message"),
    [
        ({"cu_seqlens": [0, T]}, TypeError, "`cu_seqlens` must be an int32 tensor, got list"),
        ({"cu_seqlens": torch.tensor([0.0, T])}, TypeError, "`cu_seqlens` must be an int32 tensor, got a torch.float"),
        ({"cu_seqlens": torch.tensor([[0, T]])}, ValueError, "`cu_seqlens` must be 1-D"),
        ({"cu_seqlens": torch.tensor([0, T - 1])}, ValueError, f"`cu_seqlens` must be ending at .*{T}, got {T - 1}"),
        ({"max_seqlen": None}, TypeError, "`max_seqlen` must be an int >= 0 where `cu_seqlens` is given, got None"),
        ({"max_seqlen": float(T)}, TypeError, "`max_seqlen` must be an int >= 0"),
        ({"max_seqlen": -1}, ValueError, "`max_seqlen` must be an int >= 0, got -1"),
        ({"max_seqlen": T - 1}, ValueError, f"`max_seqlen` must be at least the longest document, {T}, got {T - 1}"),
    ],
)
def test_bad_packing(changed: dict[str, Any], kind: type[Exception], message: str) -> None:
    packed: dict[str, Any] = {"cu_seqlens": torch.tensor([0, T]), "max_seqlen": T}
    for layer in (module(), module(rope=None)):
        layer(tokens(1), **packed)
        with pytest.raises(kind, match=message):
            layer(tokens(1), **{**packed, **changed})


def test_position_ids_must_be_a_tensor() -> None:
    with pytest.raises(TypeError, match=r"`position_ids` must be a tensor \(T,\) or \(B, T\) = \(2, 13\), got list"):
        module()(tokens(), position_ids=list(range(T)))  # type: ignore[arg-type]


@pytest.mark.parametrize("new", [1, 100], ids=["room", "growing"])
def test_wrong_keys_and_values_keep_the_cache(new: int) -> None:
    def vectors(batch: int, t: int, dtype: torch.dtype = torch.float32, width: int = 8) -> Tensor:
        return torch.randn(batch, 2, t, width).to(dtype)

    first = vectors(1, 4)
    for strange in (vectors(4, new), vectors(1, new, torch.bfloat16), vectors(1, new, width=6)):
        for name, pair in (("k", (strange, vectors(1, new))), ("v", (vectors(1, new), strange))):
            cache = KeyValueCache()
            cache.append(first, first)
            with pytest.raises(ValueError, match=f"`{name}` must be as the cache holds them"):
                cache.append(*pair)
            assert len(cache) == 4
            keys, _, lengths = cache.append(vectors(1, 1), vectors(1, 1))
            assert torch.equal(keys[:, :, :4], first)
            assert lengths.tolist() == [5]


def test_left_padded_prefill_in_pieces() -> None:
    """A piece may end before the first token of a sequence."""
    module, x, starts = SoftplusAttention(32, 2).eval(), torch.randn(2, 12, 32), torch.tensor([0, 6])
    with torch.no_grad():
        whole = module(x, cache=KeyValueCache(starts=starts))
        cache = KeyValueCache(starts=starts)
        pieces = torch.cat([module(x[:, a : a + 4], cache=cache) for a in (0, 4, 8)], 1)
    torch.testing.assert_close(pieces, whole, rtol=1e-5, atol=1e-5)


def test_factors_of_log_n_are_exact_in_float64() -> None:
    q, k, v = (torch.randn(1, 2, 40, 16, dtype=torch.float64) for _ in range(3))
    factors = torch.tensor([0.9, 1.7], dtype=torch.float64)
    options: dict[str, Any] = {"is_causal": True, "parameters": {"power_per_log": factors}}
    logs = torch.arange(1, 41, dtype=torch.float64).log()
    expected = softplus_attention(q, k, v, is_causal=True, power=(factors[:, None] * logs).clamp(min=1)[None])
    for rows in (slice(None), slice(-1, None)):
        out = attention("lssar")(q[:, :, rows], k, v, **options)
        torch.testing.assert_close(out, expected[:, :, rows], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m, x: m([1]), "`x` must be a tensor"),
        (lambda m, x: m(x[0]), "`x` must be a tensor"),
        (lambda m, x: RotaryEmbedding(8)(x), "`x` must be a tensor"),
        (lambda m, x: RotaryEmbedding(8, fraction=0), "`fraction`"),
        (lambda m, x: KeyValueCache(max_length=0), "`max_length`"),
        (lambda m, x: m(x, torch.randn(2, 5, 16)), r"`source` must be a tensor \(2, T, 32\)"),
        (lambda m, x: m(x, torch.randn(3, 5, 32)), r"`source` must be a tensor \(2, T, 32\)"),
        (lambda m, x: m(x, cache=KeyValueCache(starts=torch.tensor([0, 0, 0]))), "`cache` must be one whose `starts`"),
        (lambda m, x: KeyValueCache(max_length=True), "`max_length` must be an int"),
        (lambda m, x: SoftplusAttention(32, 2, num_kv_heads=2.0), "`num_kv_heads` must be a divisor"),
    ],
)
def test_errors_name_the_argument(call: Any, message: str) -> None:
    with torch.no_grad(), pytest.raises((ValueError, TypeError), match=message):
        call(SoftplusAttention(32, 2), torch.randn(2, 5, 32))
