"""Capture the queries and keys of every attention layer during a forward pass; compute weights for blocks of rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from softplus_attention.attentions.catalog import KNOWN, Attention, attention
from softplus_attention.attentions.composed import composed_weights
from softplus_attention.huggingface.attention import attention_from_config, build_visibility
from softplus_attention.huggingface.modeling_softplus_gpt import SoftplusGPTAttention
from softplus_attention.nn.rotary import rotate
from softplus_attention.reference import attention_stages
from softplus_attention.validation import check_score_scale, fail
from softplus_attention.visibility import Visibility


@dataclass(frozen=True)
class RowWeights:
    """Weights of some rows of some heads, each (B, H, rows, keys); ``visible`` broadcasts to that shape."""

    stage1: Tensor
    frozen: Tensor | None
    final: Tensor
    visible: Tensor


@dataclass(frozen=True)
class Call:
    """One call of one attention layer: q (B, H, T, D) and k (B, H_kv, T, D), with positions applied."""

    layer: int
    attention: Attention
    q: Tensor
    k: Tensor
    visibility: Visibility
    parameters: dict[str, Tensor]

    @property
    def heads(self) -> int:
        return self.q.shape[1]

    def head_groups(self) -> list[slice]:
        """One head at a time; all heads together for ALiBi, whose slopes depend on the number of heads."""
        if self.attention.spec.positions == "alibi":
            return [slice(0, self.heads)]
        return [slice(head, head + 1) for head in range(self.heads)]

    @torch.inference_mode()
    def rows(self, first: int, end: int, heads: slice, frozen_length: int | None = None) -> RowWeights:
        """Weights of rows ``first`` to ``end`` - 1 over their visible keys, in O(rows x keys) memory.

        With ``frozen_length``, also stage 1 with log N fixed at that length, if the scores have log N.
        """
        visibility = self.visibility.rows(first, end)
        q = self.q[:, heads, first:end]
        group_size = self.heads // self.k.shape[1]
        key_heads = [head // group_size for head in range(*heads.indices(self.heads))]
        k = self.k[:, key_heads, : visibility.t_k]
        parameters = {name: value[heads] for name, value in self.parameters.items()}
        stage1, final = self.stages(q, k, visibility, parameters)
        frozen = None if frozen_length is None else self.frozen_stage(q, k, visibility, parameters, frozen_length)
        return RowWeights(stage1, frozen, final, visibility.dense())

    def stages(
        self, q: Tensor, k: Tensor, visibility: Visibility, parameters: dict[str, Tensor]
    ) -> tuple[Tensor, Tensor]:
        spec = self.attention.spec
        if spec.is_softplus_attention:
            scale = check_score_scale(self.attention.score_scale, q.shape[-1], visibility.bounds())
            power = self.attention.power(parameters, visibility)
            stages = attention_stages(q, k, visibility, power, scale, offset=spec.offset)
            return stages.normalised, stages.sharpened
        final = composed_weights(spec, q, k, visibility, parameters)
        if spec.second_stage == "none":
            return final, final
        return self.first_stage(spec, q, k, visibility, parameters), final

    def first_stage(
        self, spec: Any, q: Tensor, k: Tensor, visibility: Visibility, parameters: dict[str, Tensor]
    ) -> Tensor:
        learned = {name: value for name, value in parameters.items() if name not in ("power", "power_per_log")}
        return composed_weights(spec.but(second_stage="none", power=None), q, k, visibility, learned)

    def frozen_stage(
        self, q: Tensor, k: Tensor, visibility: Visibility, parameters: dict[str, Tensor], length: int
    ) -> Tensor | None:
        spec = self.attention.spec
        if not spec.log_n:
            return None
        scale = spec.scale if spec.scale is not None else (math.log(q.shape[-1]) if spec.log_d else 1.0)
        frozen = spec.but(log_n=False, scale=scale * math.log(length))
        return self.first_stage(frozen, q, k, visibility, parameters)


OnCall = Callable[[Call], None]


@contextmanager
def capture_attention(model: Any, on_call: OnCall) -> Iterator[None]:
    """Call ``on_call`` for every attention call of the model inside the context; calls are not stored."""
    calls = 0

    def counted(call: Call) -> None:
        nonlocal calls
        calls += 1
        on_call(call)

    own = [module for module in model.modules() if isinstance(module, SoftplusGPTAttention)]
    with capture_own(own, counted) if own else capture_transformers(model, counted):
        yield
    if not calls:
        fail("MODEL", "one whose attention goes through transformers' attention interface", type(model).__name__)


@contextmanager
def capture_own(modules: list[SoftplusGPTAttention], on_call: OnCall) -> Iterator[None]:
    def before(module: Any, arguments: tuple[Any, ...]) -> None:
        hidden, positions, mask = arguments[:3]
        shape = (*hidden.shape[:-1], -1, module.head_dim)
        q, k = (project(hidden).view(shape).transpose(1, 2) for project in (module.q_proj, module.k_proj))
        if positions is not None:
            q, k = rotate(q, *positions), rotate(k, *positions)
        visibility = build_visibility(q, k, mask, True, module.attention.window(None))
        on_call(Call(module.layer_idx, module.attention, q, k, visibility, module.attention_parameters()))

    hooks = [module.register_forward_pre_hook(before) for module in modules]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def capture_transformers(model: Any, on_call: OnCall) -> Iterator[None]:
    """Wrap the attention function of a transformers model, which is looked up by name in every call."""
    name = model.config._attn_implementation
    if name not in ALL_ATTENTION_FUNCTIONS:
        fail("MODEL", "one with attn_implementation='sdpa' or a name of the catalogue", repr(name))
    original = ALL_ATTENTION_FUNCTIONS[name]
    was_local = name in ALL_ATTENTION_FUNCTIONS._local_mapping

    def attend(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any) -> Any:
        default_scaling = query.shape[-1] ** -0.5
        if name in KNOWN:
            chosen = attention_from_config(module.config, name)
        else:
            scaling = kwargs.get("scaling")
            ratio = 1.0 if scaling is None else scaling / default_scaling
            chosen = attention("softmax") if abs(ratio - 1) < 1e-6 else attention("softmax", scale=ratio)
        visibility = build_visibility(query, key, mask, bool(getattr(module, "is_causal", True)), chosen.window(None))
        on_call(Call(int(module.layer_idx), chosen, query, key, visibility, {}))
        return original(module, query, key, value, mask, **kwargs)

    ALL_ATTENTION_FUNCTIONS[name] = attend
    try:
        yield
    finally:
        if was_local:
            ALL_ATTENTION_FUNCTIONS[name] = original
        else:
            del ALL_ATTENTION_FUNCTIONS[name]


@torch.inference_mode()
def run_decoder(model: Any, ids: Tensor) -> None:
    """Run the layers without the output layer."""
    model.get_decoder()(input_ids=ids.to(model.device), use_cache=False)
