"""The other attentions, and the ablations of ours, by composition: a sentence about scores, weights and a second stage.

``AttentionSpec`` is the sentence, ``composed_attention`` carries it out with the functions of the reference, and
``sdpa_attention`` runs those that are a softmax through torch's fused kernels. In every one of them N_i is the number
of keys that row i sees, so prefill, packed, padded and decode rows agree.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from softplus_attention import validation as check
from softplus_attention.power import Power, PowerByLength, power_by_log, power_of_rows
from softplus_attention.reference import (
    compute_dtype,
    expand_kv_heads,
    l1_normalised,
    offset_of,
    seen_by_some_row,
    sharpened,
    softplus,
    unit,
    weighted_sum,
    without_autocast,
)
from softplus_attention.visibility import Visibility

Positive = Literal["softplus", "exp", "sigmoid", "relu", "elu1"]
Normaliser = Literal["l1", "mean", "none", "entmax"]
SecondStage = Literal["none", "relu_power", "exp"]
Bias = Literal["none", "minus_log_n"]
Positions = Literal["rope", "alibi", "none"]
CHOICES = {
    "positive": get_args(Positive),
    "normaliser": get_args(Normaliser),
    "second_stage": get_args(SecondStage),
    "bias": get_args(Bias),
    "positions": get_args(Positions),
}
DEFAULT_POWERS = {"none": None, "relu_power": 15, "exp": 1}
# The value that Scalable-Softmax starts its learned scale from; where log d sets the size already, it starts at 1.
SSMAX_START = 0.43
IMPLS = ("auto", "sdpa", "reference")
# Weights (B, H, rows, T_k) made at once where no gradient needs them all; a handful of such tensors are alive together.
MOST_WEIGHTS = {"cpu": 1 << 23, "cuda": 1 << 28}
# Fewer rows than this would leave the tiles of torch's kernels part empty.
LEAST_WINDOW_BLOCK = 64
Parameters = Mapping[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """An attention as a sentence; ``str()`` says it. The defaults are LSSAR.

        scores   s_ij = d^-0.5 q.k, or cosines with ``qk_norm``; times log d (``log_d``) or the number ``scale`` in its
                 place, times log N_i (``log_n``), times a learned number per head (``learned_scale``,
                 Scalable-Softmax; it starts at ``first_scale``, or where None at 1, without log d at 0.43); minus
                 log N_i (``bias``)
        stage 1  ``positive`` of the scores, then ``normaliser``: "l1", "mean" (divided by N_i), "none", or "entmax",
                 which maps the scores itself (``alpha``)
        stage 2  "none"; "relu_power": relu(N a - o)^power, l1-normalised; "exp": softmax of power * (N a - o)

    ``power`` is a number or a PowerByLength; None is the stage's own: 15, or 1 for "exp", where it is an inverse
    temperature. Powers in a tensor are passed at the call. ``times_n`` False writes a for N a: with the offset on,
    relu(a - 1) is zero in every row of more than three keys and stage 1 stands; with it off, the factor N cancels and
    nothing changes. ``offset`` False is o = 0; in the "exp" stage the offset cancels. ``window`` is used where the call
    names none. ``positions`` is what a module adds to this attention; "alibi" is added here: -slope_h |i - j| on the
    scores. A rotation keeps norms, so ``qk_norm`` is the same before and after RoPE.

    A row whose weights are all zero (ReLU with no positive score) gives 0.
    """

    positive: Positive = "softplus"
    qk_norm: bool = True
    log_d: bool = True
    scale: float | None = None
    log_n: bool = True
    learned_scale: bool = False
    first_scale: float | None = None
    bias: Bias = "none"
    normaliser: Normaliser = "l1"
    alpha: float = 1.5
    second_stage: SecondStage = "relu_power"
    power: int | float | PowerByLength | None = None
    times_n: bool = True
    offset: bool = True
    window: int | None = None
    positions: Positions = "rope"

    def __post_init__(self) -> None:
        for name, choices in CHOICES.items():
            if getattr(self, name) not in choices:
                check.fail(name, f"one of {choices}", repr(getattr(self, name)))
        for name in ("qk_norm", "log_d", "log_n", "learned_scale", "times_n", "offset"):
            if not isinstance(getattr(self, name), bool):
                check.fail(name, "True or False", repr(getattr(self, name)), TypeError)
        for name in ("scale", "first_scale"):
            value = getattr(self, name)
            if value is not None and (not is_number(value) or not 0 < value < math.inf):
                check.fail(name, "None or a number above 0", repr(value))
        if self.first_scale is not None and not self.learned_scale:
            check.fail("first_scale", "None where `learned_scale` is False", self.first_scale)
        if not is_number(self.alpha) or not 1 < self.alpha < math.inf:
            check.fail("alpha", "a number above 1 (entmax with 1 is softmax)", repr(self.alpha))
        if self.normaliser == "entmax" and self.positive != "exp":
            check.fail("positive", "'exp' where `normaliser` is 'entmax', which maps the scores itself", self.positive)
        check.check_window(self.window, is_causal=True)
        self.check_power()

    def check_power(self) -> None:
        if self.power is None or isinstance(self.power, PowerByLength):
            pass
        elif isinstance(self.power, Tensor):
            check.fail("power", 'a number or a PowerByLength; pass a tensor as parameters={"power": ...}', "a tensor")
        elif not is_number(self.power):
            check.fail("power", "None, a number or a PowerByLength", repr(self.power), TypeError)
        elif self.second_stage == "exp" and not 0 < self.power < math.inf:
            check.fail("power", "a number above 0, the inverse temperature of the 'exp' stage", self.power)
        elif self.second_stage == "relu_power" and not 1 <= self.power < math.inf:
            check.fail("power", "a number >= 1: below, the gradient is unbounded", self.power)
        if self.second_stage == "none" and self.power is not None:
            check.fail("power", "None where `second_stage` is 'none'", repr(self.power))

    def but(self, **changes: Any) -> AttentionSpec:
        """The same sentence with some words changed: ``spec.but(log_n=False)``."""
        known = [field.name for field in dataclasses.fields(self)]
        for name in changes:
            if name not in known:
                raise ValueError(f"AttentionSpec has no field `{name}`; its fields are {', '.join(known)}")
        return dataclasses.replace(self, **changes)

    @property
    def sharpening(self) -> int | float | PowerByLength | None:
        """The power with the stage's default filled in; None without a second stage."""
        return DEFAULT_POWERS[self.second_stage] if self.power is None else self.power

    @property
    def is_softmax(self) -> bool:
        """Whether torch's fused softmax attention computes it; a bias that is constant in a row cancels there."""
        return self.positive == "exp" and self.normaliser == "l1" and self.second_stage == "none"

    @property
    def is_softplus_attention(self) -> bool:
        """Whether ``softplus_attention`` computes it: LSSA or LSSAR of any power and window, with or without log d and
        offset."""
        stage_1 = self.positive == "softplus" and self.normaliser == "l1" and self.qk_norm and self.log_n
        as_published = not self.learned_scale and self.bias == "none" and self.positions != "alibi"
        # Without the offset the factor N cancels.
        power_of_n = self.second_stage == "relu_power" and (self.times_n or not self.offset)
        stage_2 = self.second_stage == "none" or power_of_n
        return stage_1 and as_published and stage_2

    def score_scale(self, head_dim: int) -> float:
        """What multiplies q . k (or the cosine), but for log N_i and the learned scale."""
        log_d = math.log(head_dim) if self.log_d else 1.0
        return (1.0 if self.qk_norm else head_dim**-0.5) * (log_d if self.scale is None else self.scale)

    def __str__(self) -> str:
        scale = (self.log_d and "log d") if self.scale is None else f"{self.scale:.4g}"
        learned = "s" if self.first_scale is None else f"s (from {self.first_scale:g})"
        factors = [self.learned_scale and learned, scale, self.log_n and "log N"]
        scores = " ".join([x for x in factors if x] + ["cosines" if self.qk_norm else "dot products / sqrt d"])
        scores += " - log N" if self.bias == "minus_log_n" else ""
        scores += " - ALiBi" if self.positions == "alibi" else ""
        normalised = {"l1": "l1-normalised", "mean": "divided by N", "none": "not normalised"}
        positive = "ELU + 1" if self.positive == "elu1" else self.positive
        text = f"{positive} of {scores}, {normalised.get(self.normaliser)}"
        if self.normaliser == "entmax":
            text = f"{self.alpha:g}-entmax of {scores}"
        excess = ("N a" if self.times_n else "a") + (" - 1" if self.offset else "")
        if self.second_stage == "relu_power":
            text += f"; then relu({excess})^{self.sharpening}, l1-normalised"
        elif self.second_stage == "exp":
            text += f"; then softmax of {'' if self.sharpening == 1 else f'{self.sharpening} '}({excess})"
        text += "" if self.window is None else f"; over a window of {self.window}"
        return text + ("; without positions" if self.positions == "none" else "")


def is_number(x: object) -> bool:
    return isinstance(x, int | float) and not isinstance(x, bool)


def elu_plus_one(s: Tensor) -> Tensor:
    """s + 1 above zero, e^s below; torch's ELU plus 1 would round e^s away."""
    return torch.where(s > 0, s + 1, s.clamp(max=0).exp())


# Softplus of scores without a bound (no qk_norm) can underflow in a whole row, which then gives 0.
POSITIVE_MAPS: dict[str, Callable[[Tensor], Tensor]] = {
    "softplus": softplus,
    "exp": torch.exp,
    "sigmoid": torch.sigmoid,
    "relu": torch.relu,
    "elu1": elu_plus_one,
}


def learned_parameters(spec: AttentionSpec, num_heads: int) -> dict[str, Tensor]:
    """The initial values of what the attention itself learns, by name."""
    return {"ssmax_scale": torch.full((num_heads,), first_scale(spec))} if spec.learned_scale else {}


def first_scale(spec: AttentionSpec) -> float:
    if spec.first_scale is not None:
        return spec.first_scale
    return 1.0 if spec.log_d else SSMAX_START


def check_parameters(spec: AttentionSpec, parameters: Parameters | None, q: Tensor, validate: bool = False) -> None:
    if not parameters:
        return
    known = ["ssmax_scale"] if spec.learned_scale else []
    known += ["power", "power_per_log"] if spec.second_stage != "none" else []
    if {"power", "power_per_log"} <= set(parameters):
        raise ValueError("`parameters` may hold 'power' or 'power_per_log', got both")
    for name, value in parameters.items():
        if name not in known:
            raise ValueError(f"`parameters` may hold {known or 'nothing'} for this attention ({spec}), got {name!r}")
        if not isinstance(value, Tensor):
            check.fail(f"parameters[{name!r}]", "a tensor", type(value).__name__, TypeError)
        if name == "power":
            check.check_power(value, (q.shape[0], q.shape[1], q.shape[2]), q.device, validate)
        elif value.shape != (q.shape[1],) or value.device != q.device:
            expected = f"of shape (H,) = ({q.shape[1]},) on {q.device}"
            check.fail(f"parameters[{name!r}]", expected, check.described(value))


def alibi_slopes(heads: int) -> list[float]:
    """2^(-8/H), 2^(-16/H), ... for a power of two; else those of the next lower one, filled up from the next higher."""
    lower = 1 << (heads.bit_length() - 1)
    slopes = [2 ** (-8 * h / lower) for h in range(1, lower + 1)]
    return slopes + [2 ** (-4 * h / lower) for h in range(1, 2 * lower, 2)][: heads - lower]


def alibi_bias(heads: int, visibility: Visibility, dtype: torch.dtype) -> Tensor:
    """-slope_h |i - j| (B|1, H, T_q, T_k), i being the key that the row stands on."""
    slopes = torch.tensor(alibi_slopes(heads), dtype=dtype, device=visibility.device)[:, None, None]
    key = torch.arange(visibility.t_k, device=visibility.device)
    distance = (visibility.positions()[:, None, :, None] - key).abs()
    return -slopes * distance.to(dtype)


def scaled_queries(spec: AttentionSpec, q: Tensor, counts: Tensor, parameters: Parameters | None) -> Tensor:
    """The queries, such that their products with the keys are the scores before any bias."""
    scale = spec.score_scale(q.shape[-1]) * (counts.clamp(min=1).log() if spec.log_n else torch.ones_like(counts))
    if spec.learned_scale:
        learned = (parameters or {}).get("ssmax_scale")
        scale = scale * (first_scale(spec) if learned is None else learned.to(q.dtype)[:, None])
    return (unit(q) if spec.qk_norm else q) * scale[..., None]


def entmax(scores: Tensor, visible: Tensor, alpha: float) -> Tensor:
    try:
        from entmax import entmax15, entmax_bisect
    except ImportError as error:
        words = "normaliser='entmax' needs the entmax package: pip install -e '.[baselines]'"
        raise ModuleNotFoundError(words, name="entmax") from error
    if not scores.shape[-1]:
        return scores
    # The package finds no threshold in a row that holds NaN or Inf: such a row is computed without, then set to NaN.
    bad = (visible & ~scores.isfinite()).any(-1, keepdim=True)
    scores = torch.where(visible & ~bad, scores, 0)
    # Whatever lies 1 / (alpha - 1) below the maximum has no weight. A floor just under it keeps the running sums of the
    # package exact, where -inf would make them NaN and a huge number would drown the small ones.
    largest = torch.where(visible, scores.detach(), -torch.inf).amax(-1, keepdim=True)
    floor = torch.where(largest.isfinite(), largest, 0) - 2 / (alpha - 1)
    scores = torch.where(visible & (scores > floor), scores, floor)
    weights = entmax15(scores, -1) if alpha == 1.5 else entmax_bisect(scores, alpha, -1)
    return torch.where(visible, torch.where(bad, torch.nan, weights), 0)


def softmax(scores: Tensor, visible: Tensor) -> Tensor:
    hidden = torch.finfo(scores.dtype).min
    return torch.where(visible, torch.where(visible, scores, hidden).softmax(-1), 0)


def first_stage(spec: AttentionSpec, scores: Tensor, visible: Tensor, counts: Tensor) -> Tensor:
    if spec.normaliser == "entmax":
        return entmax(scores, visible, spec.alpha)
    if spec.normaliser == "l1" and spec.positive == "exp":
        return softmax(scores, visible)
    f = POSITIVE_MAPS[spec.positive](torch.where(visible, scores, 0))
    if spec.normaliser == "l1":
        return l1_normalised(f, visible)
    f = torch.where(visible, f, 0)
    return f / counts.clamp(min=1)[..., None] if spec.normaliser == "mean" else f


def second_stage(spec: AttentionSpec, a: Tensor, visible: Tensor, counts: Tensor, power: Power) -> Tensor:
    p = power_of_rows(power, counts)
    p = p.to(a.dtype)[..., None] if isinstance(p, Tensor) else p
    if spec.second_stage == "exp":
        return softmax(p * (counts[..., None] * a if spec.times_n else a), visible)
    offset = offset_of(counts, spec.offset)
    # relu(a - o) is relu(N a - N o) / N: the factor cancels, and the tolerance for equal scores keeps its meaning.
    return sharpened(a, visible, counts, p, offset if spec.times_n else offset * counts[..., None])


def composed_weights(
    spec: AttentionSpec,
    q: Tensor,
    k: Tensor,
    visibility: Visibility,
    parameters: Parameters | None = None,
) -> Tensor:
    """The final weights (B, H, T_q, T_k) of any spec, dense, in float32 or float64."""
    return weights_of_rows(spec, q, k, visibility, visibility.dense(), parameters, normalized_keys=False)


def weights_of_rows(
    spec: AttentionSpec,
    q: Tensor,
    k: Tensor,
    visibility: Visibility,
    visible: Tensor,
    parameters: Parameters | None,
    normalized_keys: bool,
) -> Tensor:
    dtype, heads = compute_dtype(q.dtype), q.shape[1]
    counts = visible.sum(-1).to(dtype)

    k = torch.where(seen_by_some_row(visible), k, 0).to(dtype)
    k = unit(k) if spec.qk_norm and not normalized_keys else k
    scores = scaled_queries(spec, q.to(dtype), counts, parameters) @ expand_kv_heads(k, heads).mT
    if spec.bias == "minus_log_n":
        # Sigmoid attention subtracts log n for a constant sequence length n; with N_i a prefill and a decode row agree.
        scores = scores - counts.clamp(min=1).log()[..., None]
    if spec.positions == "alibi":
        scores = scores + alibi_bias(heads, visibility, dtype)
    a = first_stage(spec, scores, visible, counts)
    if spec.second_stage == "none":
        return a
    given = parameters or {}
    power = power_by_log(given["power_per_log"], counts) if "power_per_log" in given else given.get("power")
    return second_stage(spec, a, visible, counts, spec.sharpening if power is None else power)


def composed_attention(
    spec: AttentionSpec,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visibility: Visibility,
    parameters: Parameters | None = None,
    normalized_keys: bool = False,
) -> Tensor:
    """Any spec by its equations; half precision is float32 inside, the weights and the output rounded once."""
    rows = rows_at_once(q, k, v, parameters)
    if rows < visibility.t_q:
        return by_pieces(composed_attention, rows, spec, q, k, v, visibility, parameters, normalized_keys)
    dtype, visible = compute_dtype(q.dtype), visibility.dense()
    weights = weights_of_rows(spec, q, k, visibility, visible, parameters, normalized_keys).to(q.dtype).to(dtype)
    v = torch.where(seen_by_some_row(visible), v, 0)
    return weighted_sum(weights, expand_kv_heads(v, q.shape[1]).to(dtype)).to(q.dtype)


def rows_at_once(q: Tensor, k: Tensor, v: Tensor, parameters: Parameters | None) -> int:
    """How many rows may have their weights made together: all, where they are differentiated or traced."""
    given = (q, k, v, *(parameters or {}).values())
    if torch.compiler.is_compiling() or (torch.is_grad_enabled() and any(x.requires_grad for x in given)):
        return q.shape[2]
    most = MOST_WEIGHTS.get(q.device.type, MOST_WEIGHTS["cuda"])
    return max(1, most // max(1, q.shape[0] * q.shape[1] * k.shape[2]))


def by_pieces(
    attention: Callable[..., Tensor],
    rows: int,
    spec: AttentionSpec,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visibility: Visibility,
    parameters: Parameters | None,
    normalized_keys: bool,
) -> Tensor:
    """``attention`` over ``rows`` rows at a time: a row needs no other row."""
    pieces = []
    for begin in range(0, visibility.t_q, rows):
        end = min(begin + rows, visibility.t_q)
        seen = visibility.rows(begin, end)
        keys, values = k[:, :, : seen.t_k], v[:, :, : seen.t_k]
        own = parameters_of_rows(parameters, begin, end)
        pieces.append(attention(spec, q[:, :, begin:end], keys, values, seen, own, normalized_keys))
    return torch.cat(pieces, 2)


def parameters_of_rows(parameters: Parameters | None, begin: int, end: int) -> Parameters | None:
    """A 1-D parameter belongs to the heads; of the others (B|1, H|1, T_q|1) the rows are cut out."""
    by_row = {name: x for name, x in (parameters or {}).items() if x.dim() > 1 and x.shape[-1] > 1}
    return {**(parameters or {}), **{name: x[..., begin:end] for name, x in by_row.items()}}


def sdpa_attention(
    spec: AttentionSpec,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visibility: Visibility,
    parameters: Parameters | None = None,
    normalized_keys: bool = False,
) -> Tensor:
    """A softmax spec through torch's ``scaled_dot_product_attention``."""
    dtype, work = q.dtype, compute_dtype(q.dtype)
    t_q, t_k, heads = visibility.t_q, visibility.t_k, q.shape[1]
    if t_k == 0:
        return composed_attention(spec, q, k, v, visibility, parameters, normalized_keys)
    bounds = (visibility.mask, visibility.key_start, visibility.key_end, visibility.own_key)
    unbiased = all(x is None for x in bounds) and spec.positions != "alibi"
    whole = unbiased and (visibility.window is None or visibility.window >= t_k)
    plain = whole and (not visibility.is_causal or t_q == 1 or t_q == t_k)
    window = visibility.window if unbiased and visibility.is_causal and t_q == t_k else None
    if window is not None and t_k <= 2 * max(window, LEAST_WINDOW_BLOCK):
        window = None  # two blocks see as much as a dense mask does
    masked = not plain and window is None
    if masked and (rows := rows_at_once(q, k, v, parameters)) < t_q:
        return by_pieces(sdpa_attention, rows, spec, q, k, v, visibility, parameters, normalized_keys)
    visible = visibility.dense() if masked else None
    if visible is not None:
        seen = seen_by_some_row(visible)
        k, v = torch.where(seen, k, 0), torch.where(seen, v, 0)

    # Rounded to bfloat16, a bias of -8 is 3% of a weight off, and neighbouring distances beyond 256 are the same.
    run_in = work if spec.positions == "alibi" else dtype
    # Softmax as torch has it takes the scale along; whatever differs by row is worked into the queries.
    scale = spec.score_scale(q.shape[-1])
    if spec.qk_norm or spec.log_n or spec.learned_scale:
        q, scale = scaled_queries(spec, q.to(work), visibility.counts().to(work), parameters), 1.0
    k = unit(k.to(work)) if spec.qk_norm and not normalized_keys else k
    q, k, v = q.to(run_in), k.to(run_in), v.to(run_in)
    if window is not None:
        return windowed_sdpa(q, expand_kv_heads(k, heads), expand_kv_heads(v, heads), window, scale)
    if visible is None:
        grouped = False
        if k.shape[1] != heads:  # of a comparison a compiler makes a SymBool, which SDPA does not take
            grouped = True
        if visibility.is_causal and t_q == t_k:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=grouped)
        return F.scaled_dot_product_attention(q, k, v, scale=scale, enable_gqa=grouped)

    # Of torch's kernels only the quadratic one takes a mask with grouped heads: the heads are expanded instead.
    k, v = expand_kv_heads(k, heads), expand_kv_heads(v, heads)
    # A row that sees nothing is NaN or uniform there, by kernel: it looks at everything and is then set to zero.
    sees = visible.any(-1, keepdim=True)
    mask = visible | ~sees
    if spec.positions == "alibi":
        mask = torch.where(mask, alibi_bias(heads, visibility, run_in), -torch.inf)
    return torch.where(sees, F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale), 0).to(dtype)


def windowed_sdpa(q: Tensor, k: Tensor, v: Tensor, window: int, scale: float) -> Tensor:
    """Causal softmax attention over ``window`` keys, in memory and time of T * 2 * window.

    The rows are cut into blocks of at least ``window``, which see keys of their own block and the one before. The
    sequence is filled up to whole blocks behind its end, where no row of it looks.
    """
    batch, heads, length, _ = q.shape
    block = max(window, LEAST_WINDOW_BLOCK)
    blocks = (length + block - 1) // block
    q, k, v = (
        F.pad(x, (0, 0, 0, blocks * block - length)).reshape(batch * heads, blocks, block, x.shape[-1])
        for x in (q, k, v)
    )
    key = torch.arange(2 * block, device=q.device)
    row = key[block:, None]
    visible = (key <= row) & (key > row - window)
    first = F.scaled_dot_product_attention(q[:, :1], k[:, :1], v[:, :1], attn_mask=visible[:, block:], scale=scale)
    k, v = (torch.cat([x[:, :-1], x[:, 1:]], 2) for x in (k, v))
    later = F.scaled_dot_product_attention(q[:, 1:], k, v, attn_mask=visible, scale=scale)
    out = torch.cat([first, later], 1).reshape(batch, heads, blocks * block, v.shape[-1])
    return out[:, :, :length]


def attend(
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
    """The dispatch behind every composed attention; shapes are already checked. "auto" is SDPA wherever it applies."""
    if impl not in IMPLS:
        check.fail("impl", f"one of {IMPLS} for this attention ({spec})", repr(impl))
    if impl == "sdpa" and not spec.is_softmax:
        check.fail("impl", f"'auto' or 'reference': this attention is no softmax ({spec})", "'sdpa'")
    check_parameters(spec, parameters, q, validate)
    run = composed_attention if impl == "reference" or not spec.is_softmax else sdpa_attention
    with without_autocast(q.device):
        return run(spec, q, k, v, visibility, parameters, normalized_keys)
