"""Every attention by name: LSSA and LSSAR, baselines and ablations, each callable like ``softplus_attention``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from softplus_attention import dispatch
from softplus_attention import validation as check
from softplus_attention.attentions.composed import composed_attention, composed_weights
from softplus_attention.attentions.sdpa import sdpa_attention
from softplus_attention.attentions.spec import (
    AttentionSpec,
    Parameters,
    check_parameters,
    learned_parameters,
    power_for_call,
)
from softplus_attention.kernels import ops
from softplus_attention.power import Power, PowerByLength, PowerRecord, power_record
from softplus_attention.reference import attention_stages, without_autocast
from softplus_attention.visibility import Visibility, checked_cache, checked_documents

LSSAR = AttentionSpec()
LSSA = LSSAR.but(second_stage="none")
SOFTMAX = AttentionSpec(positive="exp", qk_norm=False, log_d=False, log_n=False, second_stage="none")
LEARNED_SOFTMAX = SOFTMAX.but(qk_norm=True, log_d=True, log_n=True, learned_scale=True)
SIGMOID = SOFTMAX.but(positive="sigmoid", bias="minus_log_n", normaliser="none")

ATTENTIONS: dict[str, AttentionSpec] = {
    "lssar": LSSAR,
    "lssar-p3": LSSAR.but(power=3),
    "lssa": LSSA,
    "softmax": SOFTMAX,
    "softmax-qknorm-logn": SOFTMAX.but(qk_norm=True, log_d=True, log_n=True),
    "ssmax": SOFTMAX.but(log_n=True, learned_scale=True),
    "sigmoid": SIGMOID,
    "relu": SOFTMAX.but(positive="relu", normaliser="mean"),
    "entmax": SOFTMAX.but(normaliser="entmax", alpha=1.5),
    "softmax-window": SOFTMAX.but(window=512),
    "softmax-alibi": SOFTMAX.but(positions="alibi"),
    "softmax-nope": SOFTMAX.but(positions="none"),
}

# Questions of the paper's reviewers: what each part contributes, and what it does in other attentions.
ABLATIONS: dict[str, AttentionSpec] = {
    "lssar-without-log-d": LSSAR.but(log_d=False),
    "lssar-without-log-n": LSSAR.but(log_n=False),
    "lssar-without-qk-norm": LSSAR.but(qk_norm=False),
    "lssar-with-exp": LSSAR.but(positive="exp"),
    "lssar-with-sigmoid": LSSAR.but(positive="sigmoid"),
    "lssar-with-relu": LSSAR.but(positive="relu"),
    "lssar-with-elu1": LSSAR.but(positive="elu1"),
    "lssar-without-l1": LSSAR.but(normaliser="none"),
    "lssar-without-times-n": LSSAR.but(times_n=False),
    "lssar-without-offset": LSSAR.but(offset=False),
    "lssar-then-exp": LSSAR.but(second_stage="exp"),
    "lssar-power-by-length": LSSAR.but(power=PowerByLength(15, slope=4, n0=1024)),
    **{f"lssar-p{p}": LSSAR.but(power=p) for p in (1, 2, 4, 7, 11, 23, 31)},
    "lssa-without-log-d": LSSA.but(log_d=False),
    "lssa-without-log-n": LSSA.but(log_n=False),
    "lssa-without-qk-norm": LSSA.but(qk_norm=False),
    "softmax-reweighted": SOFTMAX.but(second_stage="relu_power"),
    "softmax-qknorm": SOFTMAX.but(qk_norm=True, log_d=True),
    "softmax-logn": SOFTMAX.but(log_n=True),
    "softmax-qknorm-logn-learned": LEARNED_SOFTMAX,
    "softmax-qknorm-logn-learned-soft": LEARNED_SOFTMAX.but(first_scale=0.6),
    "sigmoid-l1": SIGMOID.but(normaliser="l1"),
    "sigmoid-l1-reweighted": SIGMOID.but(normaliser="l1", second_stage="relu_power"),
    "relu-l1-reweighted": SOFTMAX.but(positive="relu", second_stage="relu_power"),
    "entmax-reweighted": SOFTMAX.but(normaliser="entmax", second_stage="relu_power"),
}


KNOWN = ATTENTIONS | ABLATIONS
# Other powers have names of this form; 15 is the power of "lssar".
ALIASES = {"lssar-p15": "lssar"}

IMPLS = ("auto", "sdpa", "reference")  # of attentions other than LSSA and LSSAR


def names() -> list[str]:
    """The names of ``ATTENTIONS``. Those of ``ABLATIONS`` are accepted wherever these are."""
    return list(ATTENTIONS)


def attention(name_or_spec: str | AttentionSpec | Attention, **changes: Any) -> Attention:
    """An attention by its name or its ``AttentionSpec``, with some fields changed:
    ``attention("lssar", power=7)``, ``attention("softmax-window", window=256)``."""
    if changes.get("power", 0) is None:
        # Ambiguous: None means LSSA in the op, and the default power in a spec.
        check.fail("power", "a number or a PowerByLength (stage 1 alone is the attention 'lssa')", None, TypeError)
    if isinstance(name_or_spec, Attention):
        return name_or_spec.but(**changes) if changes else name_or_spec
    if isinstance(name_or_spec, AttentionSpec):
        spec = name_or_spec.but(**changes)
        same = [name for name, other in KNOWN.items() if other == spec]
        return Attention(same[0] if same else str(spec), spec)
    if not isinstance(name_or_spec, str):
        check.fail("name_or_spec", "a name or an AttentionSpec", type(name_or_spec).__name__, TypeError)
    name_or_spec = ALIASES.get(name_or_spec, name_or_spec)
    if name_or_spec not in KNOWN:
        hint = check.did_you_mean(name_or_spec, KNOWN) or "."
        raise ValueError(
            f"no attention is named {name_or_spec!r}{hint} The names are {', '.join(names())}, and for ablations "
            f"{', '.join(ABLATIONS)}"
        )
    named = Attention(name_or_spec, KNOWN[name_or_spec])
    return named.but(**changes) if changes else named


@dataclass(frozen=True)
class Attention:
    """An attention with a name. Call it like ``softplus_attention``; LSSA and LSSAR run exactly as that function does.

    ``parameters`` holds tensors the attention learns (``learned_parameters`` has their initial values, which are also
    the defaults) and, for attentions with a second stage, optionally "power", (H,) or (B, H, T_q), or "power_per_log",
    (H,), which is multiplied by the log of the number of keys that a row sees. ``impl`` is that of
    ``softplus_attention`` for LSSA and LSSAR, and "auto", "sdpa" (softmax only) or "reference" for the others.
    """

    name: str
    spec: AttentionSpec

    def but(self, **changes: Any) -> Attention:
        if torch.compiler.is_compiling():  # dynamo cannot format symbolic numbers
            return Attention(self.name, self.spec.but(**changes))
        changed = ", ".join(f"{field}={value!r}" for field, value in changes.items())
        return Attention(f"{self.name}({changed})", self.spec.but(**changes))

    def __str__(self) -> str:
        return f"{self.name}: {self.spec}"

    def learned_parameters(self, num_heads: int) -> dict[str, Tensor]:
        """The initial values of the attention's own parameters, {} for most."""
        return learned_parameters(self.spec, num_heads)

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0,  # int, so that dynamo does not make it symbolic
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
        window: int | None = None,
        key_start: Tensor | None = None,
        key_end: Tensor | None = None,
        impl: str = "auto",
        validate: bool = False,
        parameters: Parameters | None = None,
    ) -> Tensor:
        """q (B, H, T_q, D), k and v (B, H_kv, T_k, D) -> (B, H, T_q, D_v)."""
        check.check_sdpa_options(dropout_p, scale, f"{self.name} has its own scale")
        q, k, v = dispatch.autocast(q, k, v)
        check.check_qkv(q, k, v, layout="(B, H, T, D)", enable_gqa=enable_gqa, names=("q", "k", "v"))
        visibility = Visibility.from_call(q, k, is_causal, attn_mask, self.window(window), key_start, key_end)
        return self.attend(q, k, v, visibility, impl, parameters, validate)

    def varlen(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        *,
        is_causal: bool = False,
        window: int | None = None,
        enable_gqa: bool = False,
        impl: str = "auto",
        validate: bool = False,
        parameters: Parameters | None = None,
    ) -> Tensor:
        """Packed documents, as ``softplus_attention_varlen``: (total, H, D) -> (total_q, H, D_v)."""
        q, k, v = dispatch.autocast(q, k, v)
        documents = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        visibility = checked_documents(q, k, v, *documents, is_causal, self.window(window), enable_gqa, validate)
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        out = self.attend(q, k, v, visibility, impl, parameters, validate)
        return out[0].transpose(0, 1)

    def decode(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        cache_seqlens: Tensor,
        *,
        cache_starts: Tensor | None = None,
        normalized_keys: bool = False,
        window: int | None = None,
        enable_gqa: bool = False,
        impl: str = "auto",
        validate: bool = False,
        parameters: Parameters | None = None,
    ) -> Tensor:
        """New tokens over caches, as ``softplus_attention_decode``: (B, H, T_q, D) -> (B, H, T_q, D_v)."""
        if normalized_keys and not self.spec.qk_norm:
            check.fail("normalized_keys", f"False: {self.name} does not normalise its keys", True)
        q, k, v = dispatch.autocast(q, k_cache, v_cache)
        window = self.window(window)
        visibility = checked_cache(q, k, v, cache_seqlens, cache_starts, window, enable_gqa, validate, normalized_keys)
        return self.attend(q, k, v, visibility, impl, parameters, validate, normalized_keys=normalized_keys)

    def one_row_over_pages(
        self, q: Tensor, parameters: Parameters | None, bounds: tuple[int | None, ...], normalized_keys: bool
    ) -> Callable[..., Tensor | None] | None:
        """``one_row`` of ``attend_pages`` for LSSA and LSSAR on a CPU; ``bounds`` as for ``check_score_scale``."""
        if not self.spec.is_softplus_attention or q.device.type != "cpu":
            return None

        def power(seen: Tensor) -> PowerRecord:
            return power_record(power_for_call(self.spec, parameters, lambda: seen[:, None, None]), self.spec.offset)

        scale = check.check_score_scale(self.score_scale, q.shape[-1], bounds)
        decode = ops.implementation("cpu.pages").decode_pages
        return partial(decode, power=power, score_scale=scale, normalized_keys=normalized_keys)

    def weights(
        self,
        q: Tensor,
        k: Tensor,
        *,
        is_causal: bool = False,
        attn_mask: Tensor | None = None,
        window: int | None = None,
        key_start: Tensor | None = None,
        key_end: Tensor | None = None,
        enable_gqa: bool = False,
        parameters: Parameters | None = None,
    ) -> Tensor:
        """The dense final weights (B, H, T_q, T_k), float32 or float64: for inspection, not training."""
        q, k = dispatch.autocast(q, k)
        check.check_qkv(q, k, k, layout="(B, H, T, D)", enable_gqa=enable_gqa, names=("q", "k", "k"))
        visibility = Visibility.from_call(q, k, is_causal, attn_mask, self.window(window), key_start, key_end)
        return self.visible_weights(q, k, visibility, parameters)

    def visible_weights(
        self, q: Tensor, k: Tensor, visibility: Visibility, parameters: Parameters | None = None
    ) -> Tensor:
        """``weights`` of tensors whose shapes are already checked."""
        check_parameters(self.spec, parameters, q)
        with without_autocast(q.device):
            if self.spec.is_softplus_attention:
                score_scale = check.check_score_scale(self.score_scale, q.shape[-1], visibility.bounds())
                power = self.power(parameters, visibility)
                return attention_stages(q, k, visibility, power, score_scale, offset=self.spec.offset).sharpened
            return composed_weights(self.spec, q, k, visibility, parameters)

    def window(self, window: int | None) -> int | None:
        return self.spec.window if window is None else window

    def power(self, parameters: Parameters | None, visibility: Visibility) -> Power:
        """The power of the rows: from ``parameters`` if given there, else the attention's own."""

        def counts() -> Tensor | int:
            known = visibility.known_count()
            return visibility.counts() if known is None else known

        return power_for_call(self.spec, parameters, counts)

    @property
    def score_scale(self) -> float | None:
        """``score_scale`` of ``softplus_attention``."""
        if self.spec.scale is not None:
            return self.spec.scale
        return None if self.spec.log_d else 1.0

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        visibility: Visibility,
        impl: str,
        parameters: Parameters | None,
        validate: bool,
        *,
        normalized_keys: bool = False,
    ) -> Tensor:
        """The dispatch behind all modes; shapes are already checked."""
        if not self.spec.is_softplus_attention:
            return attend_composed(
                self.spec, q, k, v, visibility, impl, parameters, normalized_keys=normalized_keys, validate=validate
            )
        check_parameters(self.spec, parameters, q)
        return dispatch.attend(
            q,
            k,
            v,
            visibility,
            self.power(parameters, visibility),
            self.score_scale,
            cast(dispatch.Impl, impl),
            offset=self.spec.offset,
            validate=validate,
            normalized_keys=normalized_keys,
        )


def attend_composed(
    spec: AttentionSpec,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visibility: Visibility,
    impl: str = "auto",
    parameters: Parameters | None = None,
    *,
    normalized_keys: bool = False,
    validate: bool = False,
) -> Tensor:
    """Any attention but LSSA and LSSAR; shapes are already checked. "auto" is SDPA for every softmax."""
    if impl not in IMPLS:
        check.fail("impl", f"one of {IMPLS} for this attention ({spec})", repr(impl))
    if impl == "sdpa" and not spec.is_softmax:
        check.fail("impl", f"'auto' or 'reference', since this attention is no softmax ({spec})", "'sdpa'")
    check_parameters(spec, parameters, q, validate)
    dispatch.refuse_context_parallel()
    run = composed_attention if impl == "reference" or not spec.is_softmax else sdpa_attention
    with without_autocast(q.device):
        return run(spec, q, k, v, visibility, parameters, normalized_keys)
