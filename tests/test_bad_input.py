"""Bad input raises an error of the right type that names the argument; empty input is valid."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from helpers import randn
from torch import Tensor

from softplus_attention import (
    PowerByLength,
    attention_weights,
    softplus_attention,
    softplus_attention_decode,
    softplus_attention_varlen,
)
from softplus_attention.catalog import attention

B, H, T, D = 2, 4, 6, 8


def tensors(heads: int = H, t_k: int = T) -> dict[str, Tensor]:
    return {"q": randn(B, H, T, D, seed=1), "k": randn(B, heads, t_k, D, seed=2), "v": randn(B, heads, t_k, D, seed=3)}


def zeros(*shape: int, **options: Any) -> Tensor:
    return torch.zeros(*shape, **options)


# Changed arguments, error type, pattern of the message.
WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "q-no-tensor": ({"q": [[1.0]]}, TypeError, r"`q` must be a tensor.*list"),
    "k-no-tensor": ({"k": None}, TypeError, r"`k` must be a tensor.*NoneType"),
    "v-no-tensor": ({"v": 3.0}, TypeError, r"`v` must be a tensor.*float"),
    "q-nested": (
        {"q": torch.nested.nested_tensor([zeros(H, T, D), zeros(H, 2, D)], layout=torch.jagged)},
        TypeError,
        r"`q` must be a dense tensor \(B, H, T, D\), or packed documents for softplus_attention_varlen.*nested",
    ),
    "q-rank-3": ({"q": zeros(H, T, D)}, ValueError, r"`q` must be a tensor \(B, H, T, D\)"),
    "k-rank-5": ({"k": zeros(1, B, H, T, D)}, ValueError, r"`k` must be a tensor \(B, H, T, D\)"),
    "v-rank-2": ({"v": zeros(T, D)}, ValueError, r"`v` must be a tensor \(B, H, T, D\)"),
    "q-integers": ({"q": zeros(B, H, T, D, dtype=torch.int32)}, TypeError, r"`q` must be float16.*int32"),
    "k-bool": ({"k": zeros(B, H, T, D, dtype=torch.bool)}, TypeError, r"`k` must be float16.*bool"),
    "v-complex": ({"v": zeros(B, H, T, D, dtype=torch.complex64)}, TypeError, r"`v` must be float16.*complex"),
    "k-dtype": ({"k": zeros(B, H, T, D, dtype=torch.float64)}, TypeError, r"`k` must be of `q`'s dtype.*float64"),
    "v-dtype": ({"v": zeros(B, H, T, D, dtype=torch.bfloat16)}, TypeError, r"`v` must be of `q`'s dtype.*bfloat16"),
    "k-device": ({"k": zeros(B, H, T, D, device="meta")}, ValueError, r"`k` must be on `q`'s device.*meta"),
    "v-device": ({"v": zeros(B, H, T, D, device="meta")}, ValueError, r"`v` must be on `q`'s device.*meta"),
    "k-batch": ({"k": zeros(1, H, T, D)}, ValueError, r"`k` must be of `q`'s batch size, 2"),
    "v-batch": ({"v": zeros(3, H, T, D)}, ValueError, r"`v` must be of `q`'s batch size, 2"),
    "k-width": ({"k": zeros(B, H, T, D + 1)}, ValueError, r"`k` must be of `q`'s head dimension, 8"),
    "v-length": ({"v": zeros(B, H, T + 1, D)}, ValueError, r"`v` must be as long as `k`, 6"),
    "v-heads": ({"v": zeros(B, 2, T, D)}, ValueError, r"`v` must be of as many heads as `k`, 4"),
    "q-too-wide": (
        {"q": zeros(B, H, T, 257), "k": zeros(B, H, T, 257)},
        ValueError,
        r"`q` must be of head dimension 1 to 256",
    ),
    "q-of-width-0": ({"q": zeros(B, H, T, 0), "k": zeros(B, H, T, 0)}, ValueError, r"`q` must be of head dimension 1"),
    "v-too-wide": ({"v": zeros(B, H, T, 257)}, ValueError, r"`v` must be of head dimension 1 to 256"),
    "gqa-not-enabled": (tensors(heads=2), ValueError, r"`k` must be of `q`'s 4 heads.*enable_gqa"),
    "gqa-does-not-divide": ({**tensors(heads=3), "enable_gqa": True}, ValueError, r"`k` must be .*divides `q`'s 4"),
    "gqa-more-key-heads": ({**tensors(heads=8), "enable_gqa": True}, ValueError, r"`k` must be .*divides `q`'s 4"),
    "gqa-no-key-heads": ({**tensors(heads=0), "enable_gqa": True}, ValueError, r"`k` must be .*divides `q`'s 4"),
    "window-zero": ({"window": 0, "is_causal": True}, ValueError, r"`window` must be an int >= 1"),
    "window-negative": ({"window": -1, "is_causal": True}, ValueError, r"`window` must be an int >= 1.*-1"),
    "window-bool": ({"window": True, "is_causal": True}, TypeError, r"`window` must be an int.*True"),
    "window-float": ({"window": 4.0, "is_causal": True}, TypeError, r"`window` must be an int.*4\.0"),
    "window-pair": ({"window": (3, 0), "is_causal": True}, TypeError, r"`window` must be an int"),
    "window-not-causal": ({"window": 4}, ValueError, r"`window` must be None where `is_causal` is False"),
    "power-zero": ({"power": 0}, ValueError, r"`power` must be .*>= 1"),
    "power-below-one": ({"power": 0.99}, ValueError, r"`power` must be .*0\.99"),
    "power-negative": ({"power": -3}, ValueError, r"`power` must be .*-3"),
    "power-nan": ({"power": math.nan}, ValueError, r"`power` must be .*nan"),
    "power-infinite": ({"power": math.inf}, ValueError, r"`power` must be .*inf"),
    "power-bool": ({"power": True}, TypeError, r"`power` must be .*True"),
    "power-string": ({"power": "15"}, TypeError, r"`power` must be .*'15'"),
    "power-list": ({"power": [3, 3, 3, 3]}, TypeError, r"`power` must be "),
    "power-tensor-shape": ({"power": torch.full((H + 1,), 3.0)}, ValueError, r"`power` must be of shape \(H,\)"),
    "power-tensor-rows": ({"power": torch.full((B, H, T + 1), 3.0)}, ValueError, r"`power` must be of shape \(H,\)"),
    "power-tensor-rank": ({"power": torch.full((1, B, H, T), 3.0)}, ValueError, r"`power` must be of shape \(H,\)"),
    "power-tensor-integers": ({"power": torch.full((H,), 3)}, TypeError, r"`power` must be a floating-point tensor"),
    "power-tensor-below-one": ({"power": torch.tensor([3, 0.5, 3, 3])}, ValueError, r"`power` must be >= 1.*0\.5"),
    "power-tensor-nan": ({"power": torch.full((H,), math.nan)}, ValueError, r"`power` must be >= 1.*nan"),
    "power-tensor-infinite": ({"power": torch.full((H,), math.inf)}, ValueError, r"`power` must be .*inf"),
    "power-tensor-device": ({"power": zeros(H, device="meta")}, ValueError, r"`power` must be on the device.*meta"),
    "mask-no-tensor": ({"attn_mask": True}, TypeError, r"`attn_mask` must be a bool tensor"),
    "mask-float": ({"attn_mask": zeros(T, T)}, TypeError, r"`attn_mask` must be a bool tensor.*additive"),
    "mask-integers": ({"attn_mask": torch.ones(T, T, dtype=torch.uint8)}, TypeError, r"`attn_mask` must be a bool"),
    "mask-shape": ({"attn_mask": torch.ones(T, T + 1, dtype=torch.bool)}, ValueError, r"`attn_mask` must be broadcast"),
    "mask-heads": ({"attn_mask": torch.ones(3, T, T, dtype=torch.bool)}, ValueError, r"`attn_mask` must be broadcast"),
    "mask-rank": ({"attn_mask": torch.ones(1, 1, 1, T, T, dtype=torch.bool)}, ValueError, r"`attn_mask` must be broad"),
    "mask-device": ({"attn_mask": zeros(T, T, dtype=torch.bool, device="meta")}, ValueError, r"`attn_mask`.*device"),
    "causal-string": ({"is_causal": "no"}, TypeError, r"`is_causal` must be True or False, got 'no'"),
    "causal-number": ({"is_causal": 1}, TypeError, r"`is_causal` must be True or False, got 1"),
    "offset-number": ({"offset": 1.0}, TypeError, r"`offset` must be True or False, got 1\.0"),
    "dropout": ({"dropout_p": 0.1}, ValueError, r"`dropout_p` must be 0: dropout is not supported, got 0.1"),
    "sdpa-scale": ({"scale": 0.125}, ValueError, r"`scale` must be None: .*`score_scale`.*, got 0.125"),
    "scale-negative": ({"score_scale": -1.0}, ValueError, r"`score_scale` must be a finite number >= 0.*-1"),
    "scale-nan": ({"score_scale": math.nan}, ValueError, r"`score_scale` must be a finite number.*nan"),
    "scale-infinite": ({"score_scale": math.inf}, ValueError, r"`score_scale` must be a finite number.*inf"),
    "scale-bool": ({"score_scale": True}, TypeError, r"`score_scale` must be a number.*True"),
    "scale-string": ({"score_scale": "log"}, TypeError, r"`score_scale` must be a number.*'log'"),
    "scale-tensor": ({"score_scale": torch.tensor(2.0)}, TypeError, r"`score_scale` must be a number"),
    "scale-too-large": ({"score_scale": 80 / math.log(T) + 0.1}, ValueError, r"`score_scale` must be at most 80"),
    "impl-unknown": ({"impl": "flash"}, ValueError, r"`impl` must be one of.*'flash'"),
    "impl-none": ({"impl": None}, ValueError, r"`impl` must be one of.*None"),
}
for bound in ("key_start", "key_end"):
    WRONG |= {
        f"{bound}-no-tensor": ({bound: 0}, TypeError, rf"`{bound}` must be an int32 tensor.*int"),
        f"{bound}-float": ({bound: zeros(B, T)}, TypeError, rf"`{bound}` must be int32.*float32"),
        f"{bound}-bool": ({bound: zeros(B, T, dtype=torch.bool)}, TypeError, rf"`{bound}` must be int32.*bool"),
        f"{bound}-per-sequence": ({bound: zeros(B, dtype=torch.int32)}, ValueError, rf"`{bound}` must be of shape"),
        f"{bound}-rows": ({bound: zeros(B, T + 1, dtype=torch.int32)}, ValueError, rf"`{bound}` must be of shape"),
        f"{bound}-batch": ({bound: zeros(3, T, dtype=torch.int32)}, ValueError, rf"`{bound}` must be of shape"),
        f"{bound}-device": (
            {bound: zeros(B, T, dtype=torch.int32, device="meta")}, ValueError, rf"`{bound}` must be on the device"
        ),
    }  # fmt: skip


@pytest.mark.parametrize("impl", ["auto", "reference", "chunked"])
@pytest.mark.parametrize(("changed", "kind", "message"), WRONG.values(), ids=WRONG)
def test_softplus_attention(changed: dict[str, Any], kind: type[Exception], message: str, impl: str) -> None:
    with pytest.raises(kind, match=message) as caught:
        softplus_attention(**{"impl": impl, **tensors(), **changed})
    assert type(caught.value) is kind


NOT_FOR_WEIGHTS = ("impl", "v-", "dropout", "sdpa-scale")
FOR_WEIGHTS = {
    name: case for name, case in WRONG.items() if not name.startswith(NOT_FOR_WEIGHTS) and "v" not in case[0]
}


@pytest.mark.parametrize(("changed", "kind", "message"), FOR_WEIGHTS.values(), ids=FOR_WEIGHTS)
def test_attention_weights(changed: dict[str, Any], kind: type[Exception], message: str) -> None:
    arguments = tensors()
    del arguments["v"]
    with pytest.raises(kind, match=message):
        attention_weights(**{**arguments, **changed})


def test_attention_weights_of_an_unknown_stage() -> None:
    q, k, _ = tensors().values()
    with pytest.raises(ValueError, match=r"`stage` must be .*'softmax'"):
        attention_weights(q, k, stage="softmax")


@pytest.mark.parametrize(
    ("factor", "kind"), [(0, ValueError), (101, ValueError), (math.nan, ValueError), (True, TypeError)]
)
def test_bad_factor_of_log_n(factor: float, kind: type[Exception]) -> None:
    with pytest.raises(kind, match=r"`factor` must be a number from 0.02 to 100, got"):
        PowerByLength.log_n(factor)


@pytest.mark.parametrize("n0", [0.5, 1e300, 10**400, math.inf])
def test_n0_beyond_float32(n0: float) -> None:
    with pytest.raises(ValueError, match=r"PowerByLength: `n0` must be a number from 1 to 1e\+30, got"):
        PowerByLength(15, 1, n0)


@pytest.mark.parametrize("impl", ["reference", "chunked", "native"], indirect=True)
def test_smallest_factor_of_log_n(impl: Any) -> None:
    out = softplus_attention(**tensors(), power=PowerByLength.log_n(0.02), impl=impl)
    assert out.isfinite().all()


@pytest.mark.parametrize("name", ["softmax", "lssar", "sigmoid"])
def test_catalogue_attentions_take_sdpa_arguments(name: str) -> None:
    q, k, v = (torch.randn(B, H, T, D) for _ in range(3))
    chosen = attention(name)
    mask = torch.ones(T, T, dtype=torch.bool).tril()
    assert torch.equal(chosen(q, k, v, None, 0.0, True, scale=None), chosen(q, k, v, is_causal=True))
    assert torch.equal(chosen(q, k, v, mask), chosen(q, k, v, attn_mask=mask))
    for kwargs, message in (({"dropout_p": 0.1}, "`dropout_p` must be 0"), ({"scale": 0.1}, "`scale` must be None")):
        with pytest.raises(ValueError, match=message):
            chosen(q, k, v, **kwargs)


def test_scale_limit_depends_on_visible_keys() -> None:
    """A window of 64 keys keeps 10 log N below 80 at any length."""
    q, k, v = (torch.randn(1, 1, 4096, 8) for _ in range(3))
    options: dict[str, Any] = {"score_scale": 10, "is_causal": True, "power": 3}
    assert softplus_attention(q, k, v, window=64, **options).isfinite().all()
    ends = torch.tensor([4096])
    assert softplus_attention_decode(q[:, :, -1:], k, v, ends, window=64, score_scale=10, power=3).isfinite().all()
    with pytest.raises(ValueError, match=r"`score_scale` must be at most 80 / log\(4096 keys\)"):
        softplus_attention(q, k, v, **options)
    with pytest.raises(ValueError, match=r"`score_scale` must be at most 80 / log\(3000 keys\)"):
        softplus_attention(q, k, v, window=3000, **options)


def test_other_options_are_keyword_only() -> None:
    with pytest.raises(TypeError, match="positional"):
        softplus_attention(*tensors().values(), None, 0.0, True, 15)  # type: ignore[misc]


def test_chunked_requires_cpu_tensors() -> None:
    q, k, v = (x.to("meta") for x in tensors().values())
    with pytest.raises(ValueError, match=r"`impl` must be .*meta.*'chunked'"):
        softplus_attention(q, k, v, impl="chunked")


@pytest.mark.parametrize(
    ("name", "value", "kind"),
    [
        ("base", 0.5, ValueError),
        ("base", math.nan, ValueError),
        ("base", True, TypeError),
        ("base", "15", TypeError),
        ("slope", -1.0, ValueError),
        ("slope", math.inf, ValueError),
        ("n0", 0, ValueError),
        ("n0", None, TypeError),
    ],
)
def test_power_by_length(name: str, value: Any, kind: type[Exception]) -> None:
    with pytest.raises(kind, match=f"`{name}` must be a number from"):
        PowerByLength(**{name: value})


def packed(**changed: Any) -> dict[str, Any]:
    cu = torch.tensor([0, 3, 3, 10], dtype=torch.int32)
    lengths = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": 7, "max_seqlen_k": 7}
    return {name: randn(10, H, D, seed=seed) for seed, name in enumerate("qkv", 1)} | lengths | changed


def integers(*values: int, dtype: torch.dtype = torch.int32, device: str = "cpu") -> Tensor:
    return torch.tensor(values, dtype=dtype, device=device)


WRONG_PACKED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "q-rank-4": ({"q": zeros(1, 10, H, D)}, ValueError, r"`q` must be a tensor \(total, H, D\)"),
    "v-length": ({"v": zeros(9, H, D)}, ValueError, r"`v` must be as long as `k`, 10"),
    "k-heads": ({"k": zeros(10, 2, D), "v": zeros(10, 2, D)}, ValueError, r"`k` must be of `q`'s 4 heads"),
    "window-not-causal": ({"window": 4}, ValueError, r"`window` must be None"),
    "power-rows": ({"power": torch.full((2, H, 10), 3.0)}, ValueError, r"`power` must be of shape"),
    "scale-too-large": ({"score_scale": 80 / math.log(7) + 0.1}, ValueError, r"`score_scale` must be at most"),
    "documents": ({"cu_seqlens_k": integers(0, 10), "max_seqlen_k": 10}, ValueError, r"`cu_seqlens_k` must be of as"),
    "impl": ({"impl": "flash"}, ValueError, r"`impl` must be one of"),
}
for side in ("q", "k"):
    cu, longest = f"cu_seqlens_{side}", f"max_seqlen_{side}"
    WRONG_PACKED |= {
        f"{cu}-no-tensor": ({cu: [0, 10]}, TypeError, rf"`{cu}` must be an int32 tensor.*list"),
        f"{cu}-float": ({cu: torch.tensor([0.0, 10.0])}, TypeError, rf"`{cu}` must be an int32 tensor"),
        f"{cu}-rank": ({cu: integers(0, 3, 3, 10)[None]}, ValueError, rf"`{cu}` must be 1-D"),
        f"{cu}-too-short": ({cu: integers(0)}, ValueError, rf"`{cu}` must be 1-D with at least two"),
        f"{cu}-device": ({cu: integers(0, 3, 3, 10, device="meta")}, ValueError, rf"`{cu}` must be on the device"),
        f"{cu}-start": ({cu: integers(1, 3, 3, 10)}, ValueError, rf"`{cu}` must be starting at 0"),
        f"{cu}-decreasing": ({cu: integers(0, 5, 3, 10)}, ValueError, rf"`{cu}` must be non-decreasing"),
        f"{cu}-end-before": ({cu: integers(0, 3, 3, 9)}, ValueError, rf"`{cu}` must be ending at .*10"),
        f"{cu}-end-after": ({cu: integers(0, 3, 4, 11)}, ValueError, rf"`{cu}` must be ending at .*10"),
        f"{longest}-too-small": ({longest: 6}, ValueError, rf"`{longest}` must be at least .*7.*6"),
        f"{longest}-negative": ({longest: -1}, ValueError, rf"`{longest}` must be an int >= 0"),
        f"{longest}-bool": ({longest: True}, TypeError, rf"`{longest}` must be an int"),
        f"{longest}-float": ({longest: 7.0}, TypeError, rf"`{longest}` must be an int"),
        f"{longest}-tensor": ({longest: torch.tensor(7)}, TypeError, rf"`{longest}` must be an int"),
    }


@pytest.mark.parametrize(("changed", "kind", "message"), WRONG_PACKED.values(), ids=WRONG_PACKED)
def test_softplus_attention_varlen(changed: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        softplus_attention_varlen(**packed(**changed))


def cached(**changed: Any) -> dict[str, Any]:
    k, v = randn(B, H, 12, D, seed=2), randn(B, H, 12, D, seed=3)
    return {"q": randn(B, H, 3, D, seed=1), "k_cache": k, "v_cache": v, "cache_seqlens": integers(3, 12), **changed}


WRONG_CACHED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "k-width": ({"k_cache": zeros(B, H, 12, D + 1)}, ValueError, r"`k_cache` must be of `q`'s head dimension"),
    "v-length": ({"v_cache": zeros(B, H, 11, D)}, ValueError, r"`v_cache` must be as long as `k_cache`, 12"),
    "k-dtype": ({"k_cache": zeros(B, H, 12, D).half()}, TypeError, r"`k_cache` must be of `q`'s dtype"),
    "heads": (dict.fromkeys(("k_cache", "v_cache"), zeros(B, 3, 12, D)), ValueError, r"`k_cache` must be of `q`'s 4"),
    "window-zero": ({"window": 0}, ValueError, r"`window` must be an int >= 1"),
    "power-rows": ({"power": torch.full((B, H, 12), 3.0)}, ValueError, r"`power` must be of shape"),
}
for name, low, high in (("cache_seqlens", 2, 13), ("cache_starts", -1, 13)):
    WRONG_CACHED |= {
        f"{name}-no-tensor": ({name: 12}, TypeError, rf"`{name}` must be an int32 or int64 tensor.*int"),
        f"{name}-float": ({name: zeros(2)}, TypeError, rf"`{name}` must be an int32 or int64 tensor.*float"),
        f"{name}-bool": ({name: zeros(2).bool()}, TypeError, rf"`{name}` must be an int32 or int64 tensor.*bool"),
        f"{name}-batch": ({name: integers(3, 12, 12)}, ValueError, rf"`{name}` must be of shape \(B,\) = \(2,\)"),
        f"{name}-rank": ({name: integers(3, 12)[:, None]}, ValueError, rf"`{name}` must be of shape"),
        f"{name}-device": ({name: integers(3, 12, device="meta")}, ValueError, rf"`{name}` must be on the device"),
        f"{name}-too-low": ({name: integers(5, low)}, ValueError, rf"`{name}` must be from {low + 1} to 12.*{low}"),
        f"{name}-too-high": ({name: integers(5, high)}, ValueError, rf"`{name}` must be from {low + 1} to 12.*{high}"),
    }


@pytest.mark.parametrize(("changed", "kind", "message"), WRONG_CACHED.values(), ids=WRONG_CACHED)
def test_softplus_attention_decode(changed: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        softplus_attention_decode(**cached(**changed))


def test_raw_keys_passed_as_normalised() -> None:
    """Checked with ``validate``, and only for keys that some row may see."""
    kwargs = cached(cache_starts=None, cache_seqlens=integers(5, 12), validate=True, normalized_keys=True)
    raw, unit = kwargs["k_cache"], torch.nn.functional.normalize(kwargs["k_cache"], dim=-1)
    with pytest.raises(ValueError, match=r"`normalized_keys` must be False, or a cache of unit keys, got True with"):
        softplus_attention_decode(**kwargs)
    assert softplus_attention_decode(**kwargs | {"validate": False}).isfinite().all()
    unit[0, :, 5:] = 7 * raw[0, :, 5:]  # beyond the cached keys
    unit[1, :, 3] = 0
    assert softplus_attention_decode(**kwargs | {"k_cache": unit}).isfinite().all()
    assert softplus_attention_decode(**kwargs | {"k_cache": unit.bfloat16().to(raw.dtype)}).isfinite().all()


@pytest.mark.parametrize("impl", ["reference", "chunked", "native"], indirect=True)
def test_largest_score_scale_and_widest_head(impl: str) -> None:
    q, k, v = (randn(1, 1, T, 256, seed=seed).requires_grad_() for seed in (1, 2, 3))
    out = softplus_attention(q, k, v, score_scale=80 / math.log(T) - 1e-6, impl=impl)
    grads = torch.autograd.grad(out.sum(), (q, k, v))
    assert all(x.isfinite().all() for x in (out, *grads))


EMPTY = {
    "no-queries": ((B, H, 0, D), (B, H, T, D)),
    "no-keys": ((B, H, T, D), (B, H, 0, D)),
    "nothing": ((B, H, 0, D), (B, H, 0, D)),
    "no-batch": ((0, H, T, D), (0, H, T, D)),
    "no-heads": ((B, 0, T, D), (B, 0, T, D)),
}


@pytest.mark.parametrize("masked", [False, True], ids=["bare", "masked"])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(
    "power", [None, 15, 2.5, "rows", PowerByLength()], ids=["lssa", "p15", "p2.5", "rows", "length"]
)
@pytest.mark.parametrize(("q_shape", "k_shape"), EMPTY.values(), ids=EMPTY)
@pytest.mark.parametrize("impl", ["reference", "chunked", "native"], indirect=True)
def test_empty_tensors(
    impl: str, q_shape: tuple[int, ...], k_shape: tuple[int, ...], power: Any, causal: bool, masked: bool
) -> None:
    q, k = randn(*q_shape, seed=1).requires_grad_(), randn(*k_shape, seed=2).requires_grad_()
    v = randn(*k_shape[:3], 5, seed=3).requires_grad_()
    leaves = [q, k, v]
    if power == "rows":
        power = torch.full(q_shape[:3], 3.0, requires_grad=True)
        leaves.append(power)
    mask = torch.ones(q_shape[2], k_shape[2], dtype=torch.bool) if masked else None
    out = softplus_attention(q, k, v, power=power, is_causal=causal, attn_mask=mask, impl=impl)
    assert out.shape == (*q_shape[:3], 5)
    assert (out == 0).all()
    grads = torch.autograd.grad(out.sum(), leaves)
    for leaf, grad in zip(leaves, grads, strict=True):
        assert grad.shape == leaf.shape
        assert (grad == 0).all()


@pytest.mark.parametrize("impl", ["reference", "chunked", "native"], indirect=True)
def test_empty_packing_and_empty_documents(impl: str) -> None:
    nothing = integers(0, 0)
    x = zeros(0, H, D)
    options = {"max_seqlen_q": 0, "max_seqlen_k": 0, "is_causal": True, "impl": impl}
    assert softplus_attention_varlen(x, x, x, cu_seqlens_q=nothing, cu_seqlens_k=nothing, **options).shape == (0, H, D)
    # Rows of a document without keys are zero; keys of a document without rows are unused.
    q, k, v = (randn(5, H, D, seed=seed) for seed in (1, 2, 3))
    options = {"max_seqlen_q": 3, "max_seqlen_k": 3, "impl": impl}
    out = softplus_attention_varlen(
        q, k, v, cu_seqlens_q=integers(0, 2, 2, 5), cu_seqlens_k=integers(0, 0, 2, 5), **options
    )
    assert (out[:2] == 0).all()
    alone = softplus_attention(*(x[2:].transpose(0, 1)[None] for x in (q, k, v)), impl=impl)
    torch.testing.assert_close(out[2:], alone[0].transpose(0, 1), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("impl", ["reference", "chunked", "native"], indirect=True)
def test_cache_that_starts_after_its_end_gives_zero(impl: str) -> None:
    out = softplus_attention_decode(**cached(cache_starts=integers(3, 0)), impl=impl)
    assert (out[0] == 0).all()
    assert (out[1] != 0).any()


@pytest.mark.parametrize("name", ["power", "score_scale"])
def test_integers_beyond_float64(name: str) -> None:
    q = torch.randn(1, 1, 4, 8)
    with pytest.raises(ValueError, match=f"`{name}` must be"):
        softplus_attention(q, q, q, **{name: 10**400})


def test_layout_of_flash_attention() -> None:
    """Tensors (B, T, H, D) of a decode step: the number of heads does not match, and the error states the layout."""
    q, k = torch.randn(2, 1, 8, 16), torch.randn(2, 50, 8, 16)
    with pytest.raises(ValueError, match=r"`q`'s 1 heads .* Tensors are \(B, H, T, D\): transpose\(1, 2\)"):
        softplus_attention(q, k, k, is_causal=True)
