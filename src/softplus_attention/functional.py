"""The public functions: what they accept, and which implementation runs. The mathematics is in docs/method.md."""

from __future__ import annotations

import functools
import os
from importlib.util import find_spec
from types import ModuleType
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from softplus_attention import reference
from softplus_attention import validation as check
from softplus_attention.kernels.onlookers import traced
from softplus_attention.power import Power, PowerByLength, by_head_or_row
from softplus_attention.reference import attention_stages, reference_attention, without_autocast
from softplus_attention.visibility import Visibility, cached, packed

Impl = Literal["auto", "triton", "chunked", "reference"]
Stage = Literal["scores", "normalised", "sharpened"]
# The decode kernel takes a call without gradients of at most so many new rows; more go to the prefill kernel.
MOST_DECODE_ROWS = 16
NO_TRITON = "triton is not installed (pip install -e '.[triton]')"
# Looked for once: torch.compile cannot follow the search.
HAS_TRITON = find_spec("triton") is not None
IMPLS = ("auto", "triton", "chunked", "reference")


def softplus_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0,  # an int: of a float a compiler would make a variable
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    power: Power = 15,
    score_scale: float | None = None,
    offset: bool = True,
    window: int | None = None,
    key_start: Tensor | None = None,
    key_end: Tensor | None = None,
    impl: Impl = "auto",
    validate: bool = False,
) -> Tensor:
    """Softplus attention with re-weighting (LSSAR), or without (LSSA, ``power=None``): a drop-in for
    ``torch.nn.functional.scaled_dot_product_attention``, with its arguments in its order.

    The scores are cosines scaled by ``score_scale * log(N_i)``, where N_i is the number of keys that row i sees, in
    every mode. Softplus and l1-normalisation make weights of them; relu(N_i * weight - 1)^power, normalised again,
    keeps the keys above the row's average. q and k are normalised here: apply RoPE before.

    Args:
        q: (B, H, T_q, D), float16, bfloat16, float32 or float64, any strides. D up to 256.
        k: (B, H_kv, T_k, D). v: (B, H_kv, T_k, D_v), D_v up to 256.
        power: the sharpening power: None for LSSA; a number >= 1 (ints are fastest); a tensor, (H,) per head or
            broadcastable to (B, H, T_q), which receives its gradient; or ``PowerByLength``.
        score_scale: None means log(D). Not SDPA's ``scale``: it multiplies cosines.
        scale, dropout_p: as calls of SDPA have them, and nothing but None and 0: the length of q and k does not count,
            and no weights are dropped.
        offset: False subtracts no 1: the weights are softplus(score)^power, l1-normalised, and no key is cut off. One
            pass over the keys then suffices. It has no meaning for LSSA.
        is_causal: row i sees the keys up to its own. The last row stands on the last key, also where T_q != T_k
            (bottom-right; torch's SDPA aligns top-left). T_q = 2, T_k = 4::

                1 1 1 0
                1 1 1 1

        attn_mask: bool, True = visible, broadcasts to (B, H, T_q, T_k); applies together with the rest.
        window: W leaves a row its own key and the W - 1 before it; needs ``is_causal``.
        key_start, key_end: int32 (B, T_q), the range [start, end) each row may see: padding and packing without a mask.
        enable_gqa: allows H to be a multiple of H_kv; head h reads key head h // (H / H_kv).
        impl: "auto", "triton", "chunked" or "reference"; a named one never falls back to another.
        validate: look at the values of tensor arguments on an accelerator too (it waits for the device).

    Returns:
        (B, H, T_q, D_v) in q's dtype. A row that sees no key is 0, with zero gradient.
    """
    check.check_sdpa_options(dropout_p, scale, "scores are cosines, which `score_scale` multiplies")
    q, k, v = autocast(q, k, v)
    check.check_qkv(q, k, v, layout="(B, H, T, D)", enable_gqa=enable_gqa, names=("q", "k", "v"))
    visibility = batch_visibility(q, k, is_causal, attn_mask, window, key_start, key_end)
    return attend(q, k, v, visibility, power, score_scale, impl, offset=offset, validate=validate)


def softplus_attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    power: Power = 15,
    score_scale: float | None = None,
    offset: bool = True,
    is_causal: bool = False,
    window: int | None = None,
    enable_gqa: bool = False,
    impl: Impl = "auto",
    validate: bool = False,
) -> Tensor:
    """``softplus_attention`` over packed documents: q (total_q, H, D), k and v (total_k, H_kv, D).

    Document i owns the tokens ``cu_seqlens[i]`` to ``cu_seqlens[i + 1]`` (int32, from 0 to the total); its rows see
    its own keys only, and N_i counts from its start. ``max_seqlen_*`` are the longest documents. A power tensor is per
    head (H,) or broadcasts to (1, H, total_q). Returns (total_q, H, D_v).
    """
    q, k, v = autocast(q, k, v)
    visibility = packed_visibility(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, is_causal, window, enable_gqa, validate
    )
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    out = attend(
        q,
        k,
        v,
        visibility,
        power,
        score_scale,
        impl,
        offset=offset,
        validate=validate,
    )
    return out[0].transpose(0, 1)


def softplus_attention_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cache_seqlens: Tensor,
    *,
    cache_starts: Tensor | None = None,
    normalized_keys: bool = False,
    power: Power = 15,
    score_scale: float | None = None,
    offset: bool = True,
    window: int | None = None,
    enable_gqa: bool = False,
    impl: Impl = "auto",
    validate: bool = False,
) -> Tensor:
    """``softplus_attention`` of new tokens over key/value caches of different fill.

    q (B, H, T_q, D) are the last T_q tokens of each sequence; their keys and values are already in the caches
    (B, H_kv, T_max, D) and counted in ``cache_seqlens`` (B,). They are causal among themselves. ``cache_starts`` (B,)
    is the first real key of a left-padded sequence. ``normalized_keys`` says that the cache holds unit vectors, which
    saves normalising all of it at every step. What lies outside a sequence's part of the cache never reaches a result.
    Returns (B, H, T_q, D_v).
    """
    q, k_cache, v_cache = autocast(q, k_cache, v_cache)
    visibility = cache_visibility(
        q, k_cache, v_cache, cache_seqlens, cache_starts, window, enable_gqa, validate, normalized_keys
    )
    cache = CacheLengths(cache_seqlens, cache_starts, window)
    return attend(
        q,
        k_cache,
        v_cache,
        visibility,
        power,
        score_scale,
        impl,
        offset=offset,
        validate=validate,
        normalized_keys=normalized_keys,
        cache=cache,
    )


def attention_weights(
    q: Tensor,
    k: Tensor,
    *,
    stage: Stage = "sharpened",
    power: Power = 15,
    score_scale: float | None = None,
    offset: bool = True,
    is_causal: bool = False,
    attn_mask: Tensor | None = None,
    window: int | None = None,
    key_start: Tensor | None = None,
    key_end: Tensor | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The dense weights (B, H, T_q, T_k) that ``softplus_attention`` gives the values, or those of an earlier stage.

    ``stage`` is "sharpened" (the final weights; for LSSA those of stage 1), "normalised" (stage 1) or "scores" (before
    any mask: also of keys that a row does not see). float32
    (float64 for float64 inputs), differentiable, quadratic in memory: for looking, not for training.
    """
    q, k = autocast(q, k)
    check.check_qkv(q, k, k, layout="(B, H, T, D)", enable_gqa=enable_gqa, names=("q", "k", "k"))
    if stage not in ("scores", "normalised", "sharpened"):
        check.fail("stage", "'scores', 'normalised' or 'sharpened'", repr(stage))
    visibility = batch_visibility(q, k, is_causal, attn_mask, window, key_start, key_end)
    score_scale = check.check_score_scale(score_scale, q.shape[-1], visibility.bounds())
    check.check_power(power, (q.shape[0], q.shape[1], q.shape[2]), q.device, False)
    check.check_offset(offset)
    with without_autocast(q.device):
        return getattr(attention_stages(q, k, visibility, power, score_scale, offset=offset), stage)


class CacheLengths(NamedTuple):
    """What a decode step knows of its cache beyond which keys each row sees. All keys without ``seqlens``."""

    seqlens: Tensor | None
    starts: Tensor | None
    window: int | None


# As an op's schema takes them: sharpen, power, power_rows, power_by_length, offset.
PowerArguments = tuple[bool, float, Tensor | None, list[float] | None, bool]


class Step(NamedTuple):
    """What an attention asks of a decode step beside its tensors: ``power_arguments``, score_scale, window."""

    power: PowerArguments
    score_scale: float | None
    window: int | None


class Choice(NamedTuple):
    impl: str
    reason: str


def choose(device: torch.device | str, dtype: torch.dtype = torch.float32) -> Choice:
    """What impl="auto" runs, and why."""
    device = torch.device(device)
    if device.type == "cpu":
        return Choice("chunked", "CPU tensors: row blocks in linear memory")
    if device.type == "cuda" and dtype != torch.float64:
        if not HAS_TRITON:
            return Choice("reference", f"{NO_TRITON}: quadratic memory")
        return Choice("triton", "CUDA tensors: fused kernels in linear memory")
    return Choice("reference", f"no fused kernel for {dtype} on {device.type}: quadratic memory")


def decode_step(q: Tensor, k: Tensor, v: Tensor, step: Step, normalized_keys: bool) -> Tensor | None:
    """One new row (B, H, 1, D) over all of a cache, on a GPU without gradients: what ``attend`` would do in fewer steps
    of Python, since a model asks in every layer for every token. None where ``attend`` has to look closer."""
    if not fused_on(q) or torch.is_grad_enabled() or torch.is_autocast_enabled("cuda") or transformed(q, k, v):
        return None
    check.check_qkv(q, k, v, layout="(B, H, T, D)", enable_gqa=True, names=("query", "key", "value"))
    score_scale = check.check_score_scale(step.score_scale, q.shape[-1], (k.shape[2], step.window))
    return decode_launches().decode(q, k, v, None, None, step.window, *step.power, score_scale, normalized_keys)


def fused_on(x: Tensor) -> bool:
    return x.is_cuda and HAS_TRITON and x.dtype != torch.float64


def refuse_transforms(impl: str, *tensors: object) -> None:
    """torch.func and forward-mode differentiation would pass a fused op by in silence."""
    compiling = torch.compiler.is_compiling()
    # A compiler does not show which tensors have tangents. It does know what vmap and grad are to do with an op.
    forward_mode = forward_ad._current_level >= 0 and (
        compiling or any(isinstance(x, Tensor) and forward_ad.unpack_dual(x).tangent is not None for x in tensors)
    )
    functional = not compiling and torch._C._are_functorch_transforms_active()
    if forward_mode or functional:
        what = "torch.func transforms" if functional else "forward-mode gradients"
        raise RuntimeError(f"softplus_attention: {what} do not reach inside impl={impl!r}; use impl='reference'")


def autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Casts as autocast casts for scaled_dot_product_attention: everything but float64, to the autocast dtype."""
    first = tensors[0]
    if not isinstance(first, Tensor):
        return tensors
    kind = first.device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(
        x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() and x.dtype != torch.float64 else x
        for x in tensors
    )


def batch_visibility(
    q: Tensor,
    k: Tensor,
    is_causal: bool,
    attn_mask: Tensor | None,
    window: int | None,
    key_start: Tensor | None,
    key_end: Tensor | None,
) -> Visibility:
    batch, heads, t_q, _ = q.shape
    t_k = k.shape[2]
    check.check_causal(is_causal)
    check.check_window(window, is_causal)
    mask = check.check_mask(attn_mask, (batch, heads, t_q, t_k), q.device)
    key_start = check.check_bounds("key_start", key_start, batch, t_q, q.device)
    key_end = check.check_bounds("key_end", key_end, batch, t_q, q.device)
    return Visibility(t_q, t_k, q.device, is_causal, window, key_start, key_end, mask)


def packed_visibility(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    is_causal: bool,
    window: int | None,
    enable_gqa: bool,
    validate: bool,
) -> Visibility:
    check.check_qkv(q, k, v, layout="(total, H, D)", enable_gqa=enable_gqa, names=("q", "k", "v"))
    check.check_causal(is_causal)
    check.check_window(window, is_causal)
    for name, value in (("max_seqlen_q", max_seqlen_q), ("max_seqlen_k", max_seqlen_k)):
        if isinstance(value, bool) or not isinstance(value, int | torch.SymInt):
            check.fail(name, "an int >= 0", repr(value), TypeError)
        if value < 0:
            check.fail(name, "an int >= 0", repr(value))
    check.check_cu_seqlens("cu_seqlens_q", cu_seqlens_q, q.shape[0], max_seqlen_q, q.device, validate)
    check.check_cu_seqlens("cu_seqlens_k", cu_seqlens_k, k.shape[0], max_seqlen_k, q.device, validate)
    if cu_seqlens_q.shape != cu_seqlens_k.shape:
        expected = f"of as many documents as `cu_seqlens_q`, {cu_seqlens_q.numel() - 1}"
        check.fail("cu_seqlens_k", expected, cu_seqlens_k.numel() - 1)
    totals = (q.shape[0], k.shape[0])
    return packed(cu_seqlens_q, cu_seqlens_k, *totals, is_causal=is_causal, window=window, longest=max_seqlen_k)


def cache_visibility(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cache_seqlens: Tensor,
    cache_starts: Tensor | None,
    window: int | None,
    enable_gqa: bool,
    validate: bool,
    normalized_keys: bool,
) -> Visibility:
    check.check_qkv(
        q, k_cache, v_cache, layout="(B, H, T, D)", enable_gqa=enable_gqa, names=("q", "k_cache", "v_cache")
    )
    check.check_window(window, is_causal=True)
    batch, t_q, t_max = q.shape[0], q.shape[2], k_cache.shape[2]
    check.check_cache_lengths("cache_seqlens", cache_seqlens, batch, t_q, t_max, q.device, validate)
    if cache_starts is not None:
        check.check_cache_lengths("cache_starts", cache_starts, batch, 0, t_max, q.device, validate)
    if validate and normalized_keys:
        key = torch.arange(t_max, device=q.device)
        starts = 0 if cache_starts is None else cache_starts[:, None]
        check.check_unit_keys(k_cache, (key >= starts) & (key < cache_seqlens[:, None]))
    return cached(cache_seqlens, cache_starts, t_q, t_max, window=window)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visibility: Visibility,
    power: Power,
    score_scale: float | None,
    impl: Impl,
    *,
    offset: bool = True,
    validate: bool = False,
    normalized_keys: bool = False,
    cache: CacheLengths | None = None,
) -> Tensor:
    """The one dispatch behind the public functions; shapes are already checked."""
    if impl not in IMPLS:
        check.fail("impl", f"one of {IMPLS}", repr(impl))
    score_scale = check.check_score_scale(score_scale, q.shape[-1], visibility.bounds())
    check.check_power(power, (q.shape[0], q.shape[1], q.shape[2]), q.device, validate)
    check.check_offset(offset)
    chosen = choose(q.device, q.dtype).impl if impl == "auto" else impl
    if chosen == "reference":
        with without_autocast(q.device):
            return reference_attention(q, k, v, visibility, power, score_scale, normalized_keys, offset)
    refuse_transforms(chosen, q, k, v, power)
    options = (power_arguments(power, offset), score_scale, normalized_keys)
    if chosen == "triton":
        if cache is not None and q.shape[2] <= MOST_DECODE_ROWS and not wants_gradient(q, k, v, power):
            return triton_decode(q, k, v, cache, *options)
        return triton_attention(q, k, v, visibility, *options, wants_gradient(q, k, v, power))
    if q.device.type != "cpu":
        check.fail("impl", f"'auto', 'triton' or 'reference' for tensors on {q.device}", repr(impl))
    if cache is not None and q.shape[2] == 1 and not wants_gradient(q, k, v, power):
        return chunked_decode(q, k, v, visibility, *options)
    return chunked_attention(q, k, v, visibility, *options)


def chunked_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visibility: Visibility,
    power: PowerArguments,
    score_scale: float,
    normalized_keys: bool,
) -> Tensor:
    from softplus_attention.kernels.cpu import decode as chunked_decode  # noqa: F401  registers the op

    return torch.ops.softplus_attention.chunked_decode(
        q, k, v, *visibility.ranges(), *power, score_scale, normalized_keys
    )


def chunked_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visibility: Visibility,
    power: PowerArguments,
    score_scale: float,
    normalized_keys: bool,
) -> Tensor:
    from softplus_attention.kernels import ops  # noqa: F401  registers the op

    start, end = visibility.ranges()
    out, _ = torch.ops.softplus_attention.chunked_forward(
        q, k, v, start, end, visibility.mask, *power, score_scale, normalized_keys
    )
    return out


def triton_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visibility: Visibility,
    power: PowerArguments,
    score_scale: float,
    normalized_keys: bool,
    for_backward: bool,
) -> Tensor:
    check_for_triton(q)
    from softplus_attention.kernels import triton_ops

    given = (q, k, v, *visibility.given_ranges(), visibility.mask)
    options = (visibility.is_causal, visibility.window, *power, score_scale, normalized_keys, for_backward)
    if not traced(*[x for x in (*given, *power) if isinstance(x, Tensor)]):
        return triton_ops.eager(*given, *options)
    return torch.ops.softplus_attention.triton_forward(*given, *options)[0]


def triton_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cache: CacheLengths,
    power: PowerArguments,
    score_scale: float,
    normalized_keys: bool,
) -> Tensor:
    check_for_triton(q)
    options = (cache.seqlens, cache.starts, cache.window, *power, score_scale, normalized_keys)
    # The way through torch's dispatcher takes as long as launching a kernel.
    if not traced(q, k, v):
        return decode_launches().decode(q, k, v, *options)
    from softplus_attention.kernels import triton_decode_ops  # noqa: F401  registers the op

    return torch.ops.softplus_attention.triton_decode(q, k, v, *options)


@functools.cache
def decode_launches() -> ModuleType:
    """Imported where it is first needed, and an import takes a microsecond also when it is there."""
    from softplus_attention.kernels.triton import decode_launch

    return decode_launch


def unit_keys(k: Tensor) -> Tensor:
    """Keys (B, H, T, D) as a cache holds them for ``normalized_keys=True``: of length 1, in their own dtype."""
    fused = fused_on(k) and not wants_gradient(k) and not transformed(k)
    return decode_launches().unit_vectors(k) if fused else reference.unit_keys(k)


def transformed(*tensors: Tensor) -> bool:
    """Whether a call means more than its numbers: torch.func, forward-mode gradients, or what ``traced`` says."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0 or traced(*tensors)


def check_for_triton(q: Tensor) -> None:
    if q.dtype == torch.float64:
        check.fail("q", "float16, bfloat16 or float32 for impl='triton'", check.described(q), TypeError)
    if not HAS_TRITON:
        raise ImportError(f"impl='triton': {NO_TRITON}")
    if q.is_cuda:
        return
    if not triton_interprets():
        check.fail("impl", f"'auto', 'chunked' or 'reference' for tensors on {q.device}", "'triton'")
    if q.dtype == torch.bfloat16:
        expected = "float16 or float32 in Triton's interpreter, whose products misread bfloat16"
        check.fail("q", expected, "bfloat16", TypeError)


def wants_gradient(*tensors: object) -> bool:
    return torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in tensors)


def triton_interprets() -> bool:
    """Whether Triton runs its kernels in its interpreter, which takes CPU tensors: for tests."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def power_arguments(power: Power, offset: bool = True) -> PowerArguments:
    if power is None:
        return False, 1.0, None, None, True
    if isinstance(power, PowerByLength):
        return True, 1.0, None, [float(power.base), float(power.slope), float(power.n0)], offset
    if isinstance(power, Tensor):
        return True, 1.0, by_head_or_row(power), None, offset
    return True, float(power), None, None, offset
