"""Attention with projections, positions and a cache, as a module."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn

from softplus_attention import distributed
from softplus_attention import validation as check
from softplus_attention.attentions.catalog import Attention, attention
from softplus_attention.attentions.spec import AttentionSpec
from softplus_attention.dispatch import unit_keys
from softplus_attention.nn.cache import KeyValueCache, check_counts
from softplus_attention.nn.learned_power import LearnedParameters
from softplus_attention.nn.rotary import RotaryEmbedding, check_positions, rotate
from softplus_attention.power import PowerByLength, is_learned, learned_parameter
from softplus_attention.reference import compute_dtype
from softplus_attention.visibility import document_indices


def check_sequence(name: str, x: Tensor, batch: int | str, width: int) -> None:
    if not isinstance(x, Tensor):
        check.fail(name, f"a tensor ({batch}, T, {width})", type(x).__name__, TypeError)
    if x.dim() != 3 or x.shape[-1] != width or batch not in ("B", x.shape[0]):
        check.fail(name, f"a tensor ({batch}, T, {width})", check.describe_tensor(x))


class SoftplusAttention(LearnedParameters):
    """Multi-head attention for a transformer block: projections, positions, any attention of the catalogue, a cache.

    Args:
        dim: the width of the input and output.
        num_heads, num_kv_heads: query heads, and key heads if there are fewer (GQA).
        head_dim: dim / num_heads by default.
        source_dim: the width of ``source`` in cross attention; ``dim`` by default.
        attention: a name ("lssar", "softmax", ...), an ``AttentionSpec`` or an ``Attention``.
        power: replaces the attention's power: a number, a ``PowerByLength``, "learned" (one per head, which starts at
            the attention's own and stays >= 1) or "learned-log" (one factor of log N per head).
        rope: True rotates queries and keys if the attention's ``positions`` are "rope"; a ``RotaryEmbedding`` replaces
            the default one; None or False never rotates. Cross attention is not rotated.
        window: replaces the attention's window.
        bias: whether the projections have a bias.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        source_dim: int | None = None,
        attention: str | AttentionSpec | Attention = "lssar",
        power: float | PowerByLength | Literal["learned", "learned-log"] | None = None,
        rope: bool | RotaryEmbedding | None = True,
        window: int | None = None,
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        for name, value in (("dim", dim), ("num_heads", num_heads)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                check.fail(name, "an int >= 1", repr(value))
        if head_dim is None and dim % num_heads:
            check.fail("dim", f"a multiple of `num_heads`, {num_heads}, where `head_dim` is not given", dim)
        self.dim, self.num_heads = dim, num_heads
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.head_dim = dim // num_heads if head_dim is None else head_dim
        self.source_dim = dim if source_dim is None else source_dim
        if type(self.num_kv_heads) is not int or self.num_kv_heads < 1 or num_heads % self.num_kv_heads:
            check.fail("num_kv_heads", f"a divisor of `num_heads`, {num_heads}", self.num_kv_heads)
        self.attention = chosen_attention(attention, power, window)
        self.rope = chosen_rope(rope, self.attention.spec, self.head_dim)

        options: dict[str, Any] = {"bias": bias, "device": device, "dtype": dtype}
        self.q_proj = nn.Linear(dim, num_heads * self.head_dim, **options)
        self.k_proj = nn.Linear(self.source_dim, self.num_kv_heads * self.head_dim, **options)
        self.v_proj = nn.Linear(self.source_dim, self.num_kv_heads * self.head_dim, **options)
        self.o_proj = nn.Linear(num_heads * self.head_dim, dim, **options)
        self.register_learned(num_heads, power if isinstance(power, str) else "", device)

    @property
    def learned_power(self) -> Tensor | None:
        """(H,) if ``power`` is learned: the powers, or the factors of log N; else None."""
        if not self.learned_kind:
            return None
        (power,) = learned_parameter(self.learned_kind, self.raw_parameter).values()
        return power

    def set_power(self, power: float | PowerByLength) -> None:
        """Sets the power: for a schedule during training, or a higher power at inference."""
        if power is None:
            check.fail("power", "a number or a PowerByLength (stage 1 alone is the attention 'lssa')", None, TypeError)
        if self.learned_kind:
            raise ValueError("SoftplusAttention: `power` is learned and cannot be set")
        self.attention = attention(self.attention.spec.but(power=power))

    def forward(
        self,
        x: Tensor,
        source: Tensor | None = None,
        *,
        is_causal: bool | None = None,
        attn_mask: Tensor | None = None,
        key_start: Tensor | None = None,
        key_end: Tensor | None = None,
        position_ids: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        cache: KeyValueCache | None = None,
        token_counts: Tensor | None = None,
        impl: str = "auto",
    ) -> Tensor:
        """x (B, T, dim) -> (B, T, dim); ``source`` (B, S, source_dim) makes it cross attention.

        ``is_causal`` is True by default, False in cross attention. ``attn_mask``, ``key_start`` and ``key_end`` are
        those of ``softplus_attention``, for padding on either side. Positions count from 0; ``position_ids``, (T,) or
        (B, T), replaces them (cross attention has none). With ``cu_seqlens`` and ``max_seqlen`` x (1, total, dim) holds
        packed documents; positions restart in each. With a ``cache`` x continues the cached tokens, causally; left
        padding is the cache's ``starts``, and ``token_counts`` (B,), from 0 to T, is the number of real tokens in a
        right-padded x.
        """
        check_sequence("x", x, "B", self.dim)
        if distributed.active() is not None:
            raise RuntimeError(
                "SoftplusAttention: inside `sharded` this module would attend only to the tokens of one process; call "
                "context_parallel_attention with q, k, v and the record"
            )
        if source is not None:
            check_sequence("source", source, x.shape[0], self.source_dim)
        if cache is not None and cache.starts is not None and cache.starts.shape[0] != x.shape[0]:
            expected = f"one whose `starts` have one entry for each of {x.shape[0]} sequences"
            check.fail("cache", expected, check.describe_tensor(cache.starts))
        is_causal = source is None if is_causal is None else is_causal
        given: dict[str, Any] = {"source": source, "attn_mask": attn_mask, "key_start": key_start, "key_end": key_end}
        if cu_seqlens is not None:
            require_none("cu_seqlens", {**given, "cache": cache})
            if x.shape[0] != 1:
                check.fail("x", "(1, total, dim) where `cu_seqlens` is given", check.describe_tensor(x))
            check_packing(cu_seqlens, max_seqlen, x)
        elif max_seqlen is not None:
            check.fail("max_seqlen", "None without `cu_seqlens`", repr(max_seqlen))
        if source is not None:
            require_none("source", {"position_ids": position_ids})
        if cache is not None:
            require_none("cache", given)
            if not is_causal:
                check.fail("is_causal", "True where `cache` is given", is_causal)
        if token_counts is not None:
            if cache is None:
                check.fail("token_counts", "None without a `cache`", type(token_counts).__name__)
            check_counts("token_counts", token_counts, x.shape[0], x.shape[1], x.device)

        memory = x if source is None else source
        q = self.heads(self.q_proj(x))
        k, v = self.heads(self.k_proj(memory)), self.heads(self.v_proj(memory))
        if self.rope is not None and source is None:
            positions = self.positions(x, cu_seqlens, cache) if position_ids is None else position_ids
            check_positions("position_ids", positions, x.shape[0], x.shape[1])
            cos, sin = self.rope.cos_sin(positions, compute_dtype(q.dtype))
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)

        options: dict[str, Any] = {
            "enable_gqa": self.num_kv_heads != self.num_heads,
            "impl": impl,
            "parameters": self.attention_parameters(),
        }
        if cache is not None:
            out = self.attend_cached(q, k, v, cache, token_counts, options)
        elif cu_seqlens is not None:
            options |= {"cu_seqlens_q": cu_seqlens, "cu_seqlens_k": cu_seqlens, "is_causal": is_causal}
            options |= {"max_seqlen_q": max_seqlen, "max_seqlen_k": max_seqlen}
            q, k, v = (y[0].transpose(0, 1) for y in (q, k, v))
            out = self.attention.varlen(q, k, v, **options).transpose(0, 1)[None]
        else:
            options |= {"attn_mask": attn_mask, "key_start": key_start, "key_end": key_end, "is_causal": is_causal}
            out = self.attention(q, k, v, **options)
        return self.o_proj(out.transpose(1, 2).flatten(2))

    def attend_cached(
        self, q: Tensor, k: Tensor, v: Tensor, cache: KeyValueCache, counts: Tensor | None, options: dict[str, Any]
    ) -> Tensor:
        """Prefill also reads the keys as rounded by the cache, so that it agrees with the decode steps."""
        normalized = self.attention.spec.qk_norm
        if normalized:
            k = unit_keys(k)
        keys, values, lengths = cache.append(k, v, counts)
        # A chunked prefill may not have reached the first real token yet.
        starts = None if cache.starts is None else cache.starts.to(k.device).clamp(max=keys.shape[2])
        return self.attention.decode(
            q, keys, values, lengths, cache_starts=starts, normalized_keys=normalized, **options
        )

    def heads(self, x: Tensor) -> Tensor:
        """(B, T, H * D) -> (B, H, T, D)"""
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def positions(self, x: Tensor, cu_seqlens: Tensor | None, cache: KeyValueCache | None) -> Tensor:
        if cache is not None:
            return cache.positions(x.shape[0], x.shape[1], x.device)
        row = torch.arange(x.shape[1], device=x.device)
        if cu_seqlens is None:
            return row
        return row - cu_seqlens[document_indices(row, cu_seqlens)]

    def extra_repr(self) -> str:
        fields = [f"{self.dim}, heads={self.num_heads}x{self.head_dim}"]
        fields += [f"kv_heads={self.num_kv_heads}"] if self.num_kv_heads != self.num_heads else []
        fields += [f"source_dim={self.source_dim}"] if self.source_dim != self.dim else []
        fields += [f"attention={self.attention.name!r}"]
        fields += [f"power={self.learned_kind!r}"] if self.learned_kind else []
        return ", ".join(fields)


def chosen_attention(
    choice: str | AttentionSpec | Attention, power: float | PowerByLength | str | None, window: int | None
) -> Attention:
    changes: dict[str, Any] = {} if window is None else {"window": window}
    if isinstance(power, str) and not is_learned(power):
        check.fail("power", "None, a number, a PowerByLength, 'learned' or 'learned-log'", repr(power))
    if power is not None and not is_learned(power):
        changes["power"] = power
    chosen = attention(choice, **changes)
    if is_learned(power) and chosen.spec.second_stage == "none":
        check.fail("power", f"None, since {chosen.name} has no second stage", repr(power))
    return chosen


def chosen_rope(rope: bool | RotaryEmbedding | None, spec: AttentionSpec, head_dim: int) -> RotaryEmbedding | None:
    if rope is None or isinstance(rope, bool):
        return RotaryEmbedding(head_dim) if rope and spec.positions == "rope" else None
    if not isinstance(rope, RotaryEmbedding):
        check.fail("rope", "True, False, None or a RotaryEmbedding", type(rope).__name__, TypeError)
    if spec.positions != "rope":
        check.fail("rope", f"True or None, since the attention's positions are {spec.positions!r}", "a RotaryEmbedding")
    if rope.head_dim != head_dim:
        check.fail("rope", f"of the module's head dimension, {head_dim}", rope.head_dim)
    return rope


def check_packing(cu_seqlens: Tensor, max_seqlen: int | None, x: Tensor) -> None:
    if isinstance(max_seqlen, bool) or not isinstance(max_seqlen, int | torch.SymInt):
        check.fail("max_seqlen", "an int >= 0 where `cu_seqlens` is given", repr(max_seqlen), TypeError)
    if max_seqlen < 0:
        check.fail("max_seqlen", "an int >= 0", max_seqlen)
    check.check_cu_seqlens("cu_seqlens", cu_seqlens, x.shape[1], max_seqlen, x.device, validate=False)


def require_none(reason: str, given: dict[str, Any]) -> None:
    for name, value in given.items():
        if value is not None:
            check.fail(name, f"None where `{reason}` is given", type(value).__name__)
