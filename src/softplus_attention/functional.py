"""The public functions. The mathematics is in docs/method.md."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from softplus_attention import validation as check
from softplus_attention.dispatch import Impl, attend, autocast
from softplus_attention.power import Power, check_power
from softplus_attention.reference import attention_stages, without_autocast
from softplus_attention.visibility import Visibility, checked_cache, checked_documents

Stage = Literal["scores", "normalised", "sharpened"]


def softplus_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0,  # int, so that dynamo does not make it symbolic
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
    every mode. Softplus and l1-normalisation turn them into weights; relu(N_i * weight - 1)^power, normalised again,
    keeps the keys above the row's average. q and k are normalised inside; apply RoPE before.

    Args:
        q: (B, H, T_q, D), float16, bfloat16, float32 or float64, any strides. D up to 256.
        k: (B, H_kv, T_k, D). v: (B, H_kv, T_k, D_v), D_v up to 256.
        power: the sharpening power: None for LSSA; a number >= 1 (ints are fastest); a tensor, (H,) per head or
            broadcastable to (B, H, T_q), which receives its gradient; or ``PowerByLength``.
        score_scale: None means log(D). Not SDPA's ``scale``: it multiplies cosines.
        scale, dropout_p: accepted for compatibility with SDPA, as None and 0 only.
        offset: False does not subtract 1: the weights are softplus(score)^power, l1-normalised, and no key is cut off.
            One pass over the keys then suffices. It has no effect on LSSA.
        is_causal: row i sees the keys up to its own. The mask is aligned bottom-right: the last row sees the last key,
            also where T_q != T_k (SDPA aligns it top-left). T_q = 2, T_k = 4::

                1 1 1 0
                1 1 1 1

        attn_mask: bool, True = visible, broadcasts to (B, H, T_q, T_k); applies together with the other limits.
        window: with W a row sees its own key and the W - 1 before it; needs ``is_causal``.
        key_start, key_end: int32 (B, T_q), each row sees the keys [start, end): padding and packing without a mask.
        enable_gqa: allows H to be a multiple of H_kv; head h reads key head h // (H / H_kv).
        impl: "auto", "triton", "chunked" or "reference"; a named one never falls back to another.
        validate: also check the values of tensor arguments on an accelerator, which synchronizes.

    Returns:
        (B, H, T_q, D_v) in q's dtype. A row that sees no key is 0, with zero gradient.
    """
    check.check_sdpa_options(dropout_p, scale, "scores are cosines; use `score_scale`")
    q, k, v = autocast(q, k, v)
    check.check_qkv(q, k, v, layout="(B, H, T, D)", enable_gqa=enable_gqa, names=("q", "k", "v"))
    visibility = Visibility.from_call(q, k, is_causal, attn_mask, window, key_start, key_end)
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

    Document i has the tokens ``cu_seqlens[i]`` to ``cu_seqlens[i + 1]`` (int32, from 0 to the total); its rows see only
    its own keys, and N_i counts from its start. ``max_seqlen_*`` are the lengths of the longest documents. A power
    tensor is per head (H,) or broadcasts to (1, H, total_q). Returns (total_q, H, D_v).
    """
    q, k, v = autocast(q, k, v)
    visibility = checked_documents(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, is_causal, window, enable_gqa, validate
    )
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    out = attend(q, k, v, visibility, power, score_scale, impl, offset=offset, validate=validate)
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
    """``softplus_attention`` of new tokens over key/value caches filled to different lengths.

    q (B, H, T_q, D) holds the last T_q tokens of each sequence, causal among themselves; their keys and values are
    already in the caches (B, H_kv, T_max, D) and counted in ``cache_seqlens`` (B,). ``cache_starts`` (B,) is the first
    real key of a left-padded sequence. ``normalized_keys`` says that the cache holds unit vectors, which saves
    normalising them at every step. Cache entries outside a sequence never affect its result.
    Returns (B, H, T_q, D_v).
    """
    q, k_cache, v_cache = autocast(q, k_cache, v_cache)
    visibility = checked_cache(
        q, k_cache, v_cache, cache_seqlens, cache_starts, window, enable_gqa, validate, normalized_keys
    )
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
    any mask). float32 (float64 for float64 inputs), differentiable, quadratic in memory: for inspection, not training.
    """
    q, k = autocast(q, k)
    check.check_qkv(q, k, k, layout="(B, H, T, D)", enable_gqa=enable_gqa, names=("q", "k", "k"))
    if stage not in ("scores", "normalised", "sharpened"):
        check.fail("stage", "'scores', 'normalised' or 'sharpened'", repr(stage))
    visibility = Visibility.from_call(q, k, is_causal, attn_mask, window, key_start, key_end)
    score_scale = check.check_score_scale(score_scale, q.shape[-1], visibility.bounds())
    check_power(power, (q.shape[0], q.shape[1], q.shape[2]), q.device, False)
    check.check_offset(offset)
    with without_autocast(q.device):
        return getattr(attention_stages(q, k, visibility, power, score_scale, offset=offset), stage)
