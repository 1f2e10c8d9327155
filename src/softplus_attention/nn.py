"""Modules: attention with its projections, rotary positions, and a cache of keys and values."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor, nn

from softplus_attention import validation as check
from softplus_attention.baselines import AttentionSpec
from softplus_attention.catalog import Attention, attention
from softplus_attention.functional import unit_keys
from softplus_attention.power import (
    RAW_NAMES,
    PowerByLength,
    first_raw_power,
    is_learned,
    learned_parameter,
)
from softplus_attention.reference import compute_dtype
from softplus_attention.visibility import document_of


class RotaryEmbedding(nn.Module):
    """Rotary positions without a length limit: the angles follow from the positions at every call.

    The first ``fraction`` of a head's dimensions is rotated, dimension i with dimension i + half of them. Angles are
    float64 where the device has it: in float32 the angle of position 1e6 is wrong by several hundredths. Nothing is
    stored, so there is nothing to save, to cast or to outgrow.
    """

    def __init__(self, head_dim: int, *, theta: float = 10_000.0, fraction: float = 1.0) -> None:
        super().__init__()
        if not 0 < fraction <= 1:
            check.fail("fraction", "above 0 and at most 1", fraction)
        if not theta > 0:
            check.fail("theta", "above 0", theta)
        rotated = round(head_dim * fraction)
        if rotated < 2 or rotated % 2:
            check.fail("head_dim", "such that an even number of its dimensions is rotated", f"{rotated} of {head_dim}")
        self.head_dim, self.theta, self.fraction, self.rotated = head_dim, theta, fraction, rotated

    def cos_sin(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """The tables of ``rotate`` for positions (..., T)."""
        exact = torch.float32 if positions.device.type == "mps" else torch.float64
        exponent = torch.arange(0, self.rotated, 2, device=positions.device, dtype=exact) / self.rotated
        angle = positions.to(exact)[..., None] * torch.exp(-math.log(self.theta) * exponent)
        return rotation_tables(angle.cos().to(dtype), angle.sin().to(dtype))

    def forward(self, x: Tensor, positions: Tensor | None = None, *, offset: int = 0) -> Tensor:
        """x (B, H, T, D) rotated to ``positions``, (T,) or (B, T), or to offset, offset + 1, ..."""
        if x.dim() != 4 or x.shape[-1] != self.head_dim:
            check.fail("x", f"a tensor (B, H, T, {self.head_dim})", check.described(x))
        if positions is None:
            positions = torch.arange(offset, offset + x.shape[2], device=x.device)
        check_positions("positions", positions, x.shape[0], x.shape[2])
        cos, sin = self.cos_sin(positions, compute_dtype(x.dtype))
        return rotate(x, cos, sin)

    def extra_repr(self) -> str:
        return f"{self.head_dim}, theta={self.theta:g}" + ("" if self.fraction == 1 else f", fraction={self.fraction}")


def rotation_tables(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin of the angles, (..., T, half), as ``rotate`` takes them: (..., 1, T, 2 * half)."""
    return torch.cat([cos, cos], -1).unsqueeze(-3), torch.cat([-sin, sin], -1).unsqueeze(-3)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x (B, H, T, D) by the angles of ``rotation_tables``, in their dtype; columns beyond those of the tables stay.

    Few operations, since a decode step waits for the launch of each: the signs are in the table.
    """
    rotated = cos.shape[-1]
    turning = x[..., :rotated] if rotated < x.shape[-1] else x
    exact = turning.to(cos.dtype)
    turned = torch.addcmul(exact * cos, exact.roll(rotated // 2, -1), sin).to(x.dtype)
    return torch.cat([turned, x[..., rotated:]], -1) if rotated < x.shape[-1] else turned


def checked_starts(starts: Tensor | None) -> Tensor | None:
    if starts is not None and not isinstance(starts, Tensor):
        check.fail("starts", "an int32 tensor (B,)", type(starts).__name__, TypeError)
    if starts is not None and (starts.dim() != 1 or starts.dtype not in (torch.int32, torch.int64)):
        check.fail("starts", "an int32 tensor (B,)", check.described(starts))
    return starts


def check_sequence(name: str, x: Tensor, batch: int | str, width: int) -> None:
    if not isinstance(x, Tensor):
        check.fail(name, f"a tensor ({batch}, T, {width})", type(x).__name__, TypeError)
    if x.dim() != 3 or x.shape[-1] != width or batch not in ("B", x.shape[0]):
        check.fail(name, f"a tensor ({batch}, T, {width})", check.described(x))


def alike(kept: Tensor, x: Tensor) -> bool:
    """Whether the memory ``kept`` is for keys or values such as ``x``, but for their number."""
    same = kept.dtype == x.dtype and kept.device == x.device
    return same and kept.shape[:2] == x.shape[:2] and kept.shape[3] == x.shape[3]


class KeyValueCache:
    """The keys and values of one layer, for inference.

    It grows by doubling, or holds ``max_length`` tokens and refuses more. Sequences may have different ``lengths``;
    ``starts`` (B,) is the first real token of each where they are left-padded. Memory is taken at the first ``append``.
    An attention that normalises its keys stores them normalised, so a decode step normalises one key.
    """

    def __init__(self, *, max_length: int | None = None, starts: Tensor | None = None) -> None:
        if max_length is not None and (type(max_length) is not int or max_length < 1):
            check.fail("max_length", "an int >= 1, or None for a cache that grows", repr(max_length))
        self.max_length, self.starts = max_length, checked_starts(starts)
        self.keys: Tensor | None = None
        self.values: Tensor | None = None
        self.lengths: Tensor | None = None
        # Known without asking the device: the longest sequence at most, and whether all are that long.
        self.longest, self.even = 0, True

    def __len__(self) -> int:
        """An upper bound of the tokens in any sequence, exact where all are equally long."""
        return self.longest

    def positions(self, batch: int, new: int, device: torch.device) -> Tensor:
        """(B or 1, new): the positions of the next tokens, counted from each sequence's first real one."""
        step = torch.arange(new, device=device)
        if self.even and self.starts is None:
            return (step + self.longest)[None]
        lengths = torch.zeros(batch, device=device, dtype=torch.int64) if self.lengths is None else self.lengths
        first = lengths if self.starts is None else lengths - self.starts.to(device)
        return (first[:, None] + step).clamp(min=0)

    def append(self, k: Tensor, v: Tensor, counts: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Stores k and v (B, H_kv, T, D); of each sequence's T tokens the first ``counts`` (B,) are real, else all.

        Returns the keys and values so far, and the lengths with all T tokens counted, as this step's rows see them.
        ``max_length`` counts the padding of the longest sequence too.
        """
        batch, _, new, _ = k.shape
        if torch.is_grad_enabled() and (k.requires_grad or v.requires_grad):
            raise RuntimeError("KeyValueCache keeps no gradients: call under torch.no_grad() or torch.inference_mode()")
        if counts is not None:
            check_counts("counts", counts, batch, new, k.device)
        if self.max_length is not None and self.longest + new > self.max_length:
            raise ValueError(
                f"KeyValueCache is full: {self.longest} of {self.max_length} tokens (`max_length`) are taken, "
                f"{new} more do not fit; pass a larger `max_length`, or None for a cache that grows"
            )
        keys, values = self.reserve(k, v, self.longest + new)
        lengths = self.lengths
        if lengths is None:
            lengths = torch.zeros(batch, device=k.device, dtype=torch.int32)
        if self.even:
            keys[:, :, self.longest : self.longest + new] = k
            values[:, :, self.longest : self.longest + new] = v
        else:
            place = (lengths[:, None] + torch.arange(new, device=k.device))[:, None, :, None].to(torch.int64)
            keys.scatter_(2, place.expand_as(k), k)
            values.scatter_(2, place.expand_as(v), v)
        seen = lengths + new
        self.lengths = seen if counts is None else lengths + counts.to(torch.int32)
        self.even = self.even and counts is None
        self.longest += new
        return keys[:, :, : self.longest], values[:, :, : self.longest], seen

    def reserve(self, k: Tensor, v: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Room for ``length`` tokens. New memory is zero: a product with weight 0 must not meet a stray NaN."""
        for name, kept, x in (("k", self.keys, k), ("v", self.values, v)):
            if kept is not None and not alike(kept, x):
                if self.longest:
                    expected = f"as the cache holds them, {kept.dtype} (B, H_kv) = {tuple(kept.shape[:2])}"
                    check.fail(name, f"{expected} and {kept.shape[3]} wide on {kept.device}", check.described(x))
                self.keys = self.values = None
        room = 0 if self.keys is None else self.keys.shape[2]
        if self.keys is None or self.values is None or room < length:
            size = self.max_length or max(length, 2 * room, 64)
            grown = []
            for old, like in ((self.keys, k), (self.values, v)):
                fresh = like.new_zeros(like.shape[0], like.shape[1], size, like.shape[3])
                if old is not None:
                    fresh[:, :, :room] = old
                grown.append(fresh)
            self.keys, self.values = grown
        return self.keys, self.values

    def reset(self, starts: Tensor | None = None) -> None:
        """Empty again, the memory kept for as long as it fits what comes."""
        self.starts = checked_starts(starts)
        self.lengths, self.longest, self.even = None, 0, True

    def reorder(self, order: Tensor) -> None:
        """Row b becomes the former row ``order[b]``: beam search. ``order`` may also change the number of rows."""
        if self.keys is not None and self.values is not None:
            self.keys, self.values = self.keys.index_select(0, order), self.values.index_select(0, order)
        self.lengths = None if self.lengths is None else self.lengths.index_select(0, order)
        self.starts = None if self.starts is None else self.starts.index_select(0, order.to(self.starts.device))


class SoftplusAttention(nn.Module):
    """Multi-head attention for a transformer block: projections, positions, any attention of the catalogue, a cache.

    Args:
        dim: the width of the input and output.
        num_heads, num_kv_heads: query heads, and key heads where those are fewer (GQA).
        head_dim: dim / num_heads by default.
        source_dim: the width of ``source`` in cross attention; ``dim`` by default.
        attention: a name ("lssar", "softmax", ...), an ``AttentionSpec`` or an ``Attention``.
        power: replaces the attention's power: a number, a ``PowerByLength``, "learned", one per head that starts at the
            attention's own and stays >= 1, or "learned-log", one factor per head of log N.
        rope: True rotates queries and keys where the attention asks for it (its ``positions``); a ``RotaryEmbedding``
            does so in its own way; None or False never. Cross attention is not rotated.
        window: replaces the attention's window.
        bias: whether the projections have one.
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
        learned = self.attention.learned_parameters(num_heads)
        self.learned_names = tuple(learned)
        for name, start in learned.items():
            self.register_parameter(name, nn.Parameter(start.to(device)))
        self.learned_kind = power if isinstance(power, str) else ""
        if self.learned_kind:
            raw = first_raw_power(self.learned_kind, self.attention.spec.sharpening)
            parameter = nn.Parameter(torch.full((num_heads,), raw, device=device))
            self.register_parameter(RAW_NAMES[self.learned_kind], parameter)

    def attention_parameters(self) -> dict[str, Tensor]:
        """What the attention learns, as it takes it: "power" (H,) where that is "learned", and so on."""
        parameters = {name: getattr(self, name) for name in self.learned_names}
        if self.learned_kind:
            parameters |= learned_parameter(self.learned_kind, self.raw_parameter)
        return parameters

    @property
    def raw_parameter(self) -> nn.Parameter:
        """What is trained where ``power`` is learned: any number, from which the power follows."""
        return getattr(self, RAW_NAMES[self.learned_kind])

    @property
    def learned_power(self) -> Tensor | None:
        """(H,), where ``power`` is learned: the powers themselves, or the factors of log N."""
        if not self.learned_kind:
            return None
        (power,) = learned_parameter(self.learned_kind, self.raw_parameter).values()
        return power

    def set_power(self, power: float | PowerByLength) -> None:
        """Another power from here on: a schedule during training, or a sharper one at inference."""
        if power is None:
            check.fail("power", "a number or a PowerByLength (stage 1 alone is the attention 'lssa')", None, TypeError)
        if self.learned_kind:
            raise ValueError("SoftplusAttention: `power` is learned in this module and cannot be set")
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
        those of ``softplus_attention``: padding on either side. Positions count from 0; ``position_ids``, (T,) or
        (B, T), replaces them (cross attention has none). ``cu_seqlens`` and ``max_seqlen`` say that x (1, total, dim)
        holds packed documents; positions restart in each. With a ``cache`` x continues what it holds, causally; left
        padding is the cache's ``starts``, and ``token_counts`` (B,), from 0 to T, is the number of real tokens in a
        right-padded x.
        """
        check_sequence("x", x, "B", self.dim)
        if source is not None:
            check_sequence("source", source, x.shape[0], self.source_dim)
        if cache is not None and cache.starts is not None and cache.starts.shape[0] != x.shape[0]:
            check.fail("cache", f"one whose `starts` are of {x.shape[0]} sequences", check.described(cache.starts))
        is_causal = source is None if is_causal is None else is_causal
        given: dict[str, Any] = {"source": source, "attn_mask": attn_mask, "key_start": key_start, "key_end": key_end}
        if cu_seqlens is not None:
            refuse("cu_seqlens", {**given, "cache": cache})
            if x.shape[0] != 1:
                check.fail("x", "(1, total, dim) where `cu_seqlens` is given", check.described(x))
            check_packing(cu_seqlens, max_seqlen, x)
        elif max_seqlen is not None:
            check.fail("max_seqlen", "None without `cu_seqlens`", repr(max_seqlen))
        if source is not None:
            refuse("source", {"position_ids": position_ids})
        if cache is not None:
            refuse("cache", given)
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
        """Prefill too reads the keys as the cache rounds them, so that it agrees with the decode steps."""
        normalized = self.attention.spec.qk_norm
        if normalized:
            k = unit_keys(k)
        keys, values, lengths = cache.append(k, v, counts)
        # A prefill in pieces may not have come to the first real token yet.
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
        return row - cu_seqlens[document_of(row, cu_seqlens)]

    def extra_repr(self) -> str:
        words = [f"{self.dim}, heads={self.num_heads}x{self.head_dim}"]
        words += [f"kv_heads={self.num_kv_heads}"] if self.num_kv_heads != self.num_heads else []
        words += [f"source_dim={self.source_dim}"] if self.source_dim != self.dim else []
        words += [f"attention={self.attention.name!r}"]
        words += [f"power={self.learned_kind!r}"] if self.learned_kind else []
        return ", ".join(words)


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
        check.fail("power", f"None: {chosen.name} has no second stage whose power could be learned", repr(power))
    return chosen


def chosen_rope(rope: bool | RotaryEmbedding | None, spec: AttentionSpec, head_dim: int) -> RotaryEmbedding | None:
    if rope is None or isinstance(rope, bool):
        return RotaryEmbedding(head_dim) if rope and spec.positions == "rope" else None
    if not isinstance(rope, RotaryEmbedding):
        check.fail("rope", "True, False, None or a RotaryEmbedding", type(rope).__name__, TypeError)
    if spec.positions != "rope":
        check.fail("rope", f"True or None: this attention's positions are {spec.positions!r}", "a RotaryEmbedding")
    if rope.head_dim != head_dim:
        check.fail("rope", f"of the module's head dimension, {head_dim}", rope.head_dim)
    return rope


def check_packing(cu_seqlens: Tensor, max_seqlen: int | None, x: Tensor) -> None:
    if isinstance(max_seqlen, bool) or not isinstance(max_seqlen, int | torch.SymInt):
        check.fail("max_seqlen", "an int >= 0 where `cu_seqlens` is given", repr(max_seqlen), TypeError)
    if max_seqlen < 0:
        check.fail("max_seqlen", "an int >= 0", max_seqlen)
    check.check_cu_seqlens("cu_seqlens", cu_seqlens, x.shape[1], max_seqlen, x.device, validate=False)


def check_counts(name: str, counts: Tensor, batch: int, new: int, device: torch.device) -> None:
    """Real tokens among the ``new`` of each sequence. A wrong number would show a step later, as another's error."""
    check.check_cache_lengths(name, counts, batch, 0, new, device, validate=False)


def check_positions(name: str, positions: Tensor, batch: int, length: int) -> None:
    if not isinstance(positions, Tensor):
        check.fail(name, f"a tensor (T,) or (B, T) = ({batch}, {length})", type(positions).__name__, TypeError)
    if tuple(positions.shape) not in ((length,), (1, length), (batch, length)):
        check.fail(name, f"of shape (T,) or (B, T) = ({batch}, {length})", check.described(positions))


def refuse(reason: str, given: dict[str, Any]) -> None:
    for name, value in given.items():
        if value is not None:
            check.fail(name, f"None where `{reason}` is given", type(value).__name__)
