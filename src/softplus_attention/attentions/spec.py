"""An attention as data: ``AttentionSpec`` describes its scores, weights and second stage."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from softplus_attention import validation as check
from softplus_attention.power import Power, PowerByLength, check_power, power_by_log

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
# Scalable-Softmax's initial value of the learned scale; with log d the scale starts at 1.
SSMAX_START = 0.43
Parameters = Mapping[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """An attention by its parts; ``str()`` describes it. The defaults are LSSAR.

        scores   s_ij = d^-0.5 q.k, or cosines with ``qk_norm``; times log d (``log_d``) or the number ``scale`` in its
                 place, times log N_i (``log_n``), times a learned number per head (``learned_scale``,
                 Scalable-Softmax; it starts at ``first_scale``, by default 1, without log d 0.43); minus log N_i
                 (``bias``)
        stage 1  ``positive`` of the scores, then ``normaliser``: "l1", "mean" (divided by N_i), "none", or "entmax",
                 which maps the scores itself (``alpha``)
        stage 2  "none"; "relu_power": relu(N a - o)^power, l1-normalised; "exp": softmax of power * (N a - o)

    ``power`` is a number or a PowerByLength; None is the stage's default: 15, or 1 for "exp", where it is an inverse
    temperature. Power tensors are passed to the call. ``times_n`` False uses a instead of N a: with the offset,
    relu(a - 1) is zero in every row of more than three keys, which leaves stage 1; without it the factor N cancels.
    ``offset`` False is o = 0; in the "exp" stage the offset cancels. ``window`` is the default of a call without one.
    ``positions`` says which positions a module adds to this attention; "alibi" is added to the scores here, as
    -slope_h |i - j|. RoPE keeps norms, so ``qk_norm`` is the same before and after it.

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
        """A copy with some fields changed: ``spec.but(log_n=False)``."""
        known = [field.name for field in dataclasses.fields(self)]
        for name in changes:
            if name not in known:
                raise ValueError(f"AttentionSpec has no field `{name}`; its fields are {', '.join(known)}")
        return dataclasses.replace(self, **changes)

    @property
    def sharpening(self) -> int | float | PowerByLength | None:
        """The power, or the stage's default; None without a second stage."""
        return DEFAULT_POWERS[self.second_stage] if self.power is None else self.power

    @property
    def is_softmax(self) -> bool:
        """Whether SDPA can compute it; a bias that is constant in a row cancels in softmax."""
        return self.positive == "exp" and self.normaliser == "l1" and self.second_stage == "none"

    @property
    def is_softplus_attention(self) -> bool:
        """Whether ``softplus_attention`` can compute it: LSSA or LSSAR with any power, window, scale and offset."""
        stage_1 = self.positive == "softplus" and self.normaliser == "l1" and self.qk_norm and self.log_n
        as_published = not self.learned_scale and self.bias == "none" and self.positions != "alibi"
        # Without the offset the factor N cancels.
        power_of_n = self.second_stage == "relu_power" and (self.times_n or not self.offset)
        stage_2 = self.second_stage == "none" or power_of_n
        return stage_1 and as_published and stage_2

    def score_scale(self, head_dim: int) -> float:
        """The factor of q . k (or the cosine), without log N_i and the learned scale."""
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


def learned_parameters(spec: AttentionSpec, num_heads: int) -> dict[str, Tensor]:
    """The initial values of the attention's own parameters, by name."""
    return {"ssmax_scale": torch.full((num_heads,), first_scale(spec))} if spec.learned_scale else {}


def power_for_call(spec: AttentionSpec, parameters: Parameters | None, counts: Callable[[], Tensor | int]) -> Power:
    """The power of the rows, from ``parameters`` or else from the spec. ``counts`` are those of ``power_by_log``."""
    given = parameters or {}
    if "power_per_log" in given:
        return power_by_log(given["power_per_log"], counts())
    return given.get("power", spec.sharpening)


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
            check_power(value, (q.shape[0], q.shape[1], q.shape[2]), q.device, validate)
        elif value.shape != (q.shape[1],) or value.device != q.device:
            expected = f"of shape (H,) = ({q.shape[1]},) on {q.device}"
            check.fail(f"parameters[{name!r}]", expected, check.describe_tensor(value))
