"""Queries and keys of every attention layer while a model runs, and their weights for a few rows at a time."""

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
    """A few rows of a few heads, each (B, H, rows, keys) but ``visible``, which broadcasts to it."""

    stage1: Tensor
    frozen: Tensor | None
    final: Tensor
    visible: Tensor


@dataclass(frozen=True)
class Call:
    """One layer's attention as it was called: q (B, H, T, D), k (B, H_kv, T, D), positions applied."""

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
        """One head at a time; ALiBi's slopes depend on the number of heads, so there all of them."""
        if self.attention.spec.positions == "alibi":
            return [slice(0, self.heads)]
        return [slice(head, head + 1) for head in range(self.heads)]

    @torch.inference_mode()
    def rows(self, first: int, end: int, heads: slice, frozen_length: int | None = None) -> RowWeights:
        """The weights of rows ``first`` to ``end`` over the keys they see; memory grows with their number times keys.

        ``frozen_length`` asks also for stage 1 with log N held at that length, where the scores have a log N.
        """
        visibility = self.visibility.rows(first, end)
        q = self.q[:, heads, first:end]
        per_key_head = self.heads // self.k.shape[1]
        chosen = [head // per_key_head for head in range(*heads.indices(self.heads))]
        k = self.k[:, chosen, : visibility.t_k]
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
            found = attention_stages(q, k, visibility, power, scale, offset=spec.offset)
            return found.normalised, found.sharpened
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


See = Callable[[Call], None]


@contextmanager
def watching(model: Any, see: See) -> Iterator[None]:
    """``see`` is called with every layer's attention while the model runs inside; nothing of it is kept here."""
    seen = 0

    def counted(call: Call) -> None:
        nonlocal seen
        seen += 1
        see(call)

    own = [module for module in model.modules() if isinstance(module, SoftplusGPTAttention)]
    with watching_own(own, counted) if own else watching_host(model, counted):
        yield
    if not seen:
        fail("MODEL", "one whose attention goes through transformers' attention interface", type(model).__name__)


@contextmanager
def watching_own(modules: list[SoftplusGPTAttention], see: See) -> Iterator[None]:
    def before(module: Any, arguments: tuple[Any, ...]) -> None:
        hidden, positions, mask = arguments[:3]
        shape = (*hidden.shape[:-1], -1, module.head_dim)
        q, k = (project(hidden).view(shape).transpose(1, 2) for project in (module.q_proj, module.k_proj))
        if positions is not None:
            q, k = rotate(q, *positions), rotate(k, *positions)
        visibility = build_visibility(q, k, mask, True, module.attention.window(None))
        see(Call(module.layer_idx, module.attention, q, k, visibility, module.attention_parameters()))

    hooks = [module.register_forward_pre_hook(before) for module in modules]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def watching_host(model: Any, see: See) -> Iterator[None]:
    """A model of transformers: its attention function is looked up by name at every call, so the name is borrowed."""
    name = model.config._attn_implementation
    if name not in ALL_ATTENTION_FUNCTIONS:
        fail("MODEL", "one with attn_implementation='sdpa' or a name of the catalogue", repr(name))
    before = ALL_ATTENTION_FUNCTIONS[name]
    was_local = name in ALL_ATTENTION_FUNCTIONS._local_mapping

    def attend(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any) -> Any:
        usual = query.shape[-1] ** -0.5
        if name in KNOWN:
            chosen = attention_from_config(module.config, name)
        else:
            scaling = kwargs.get("scaling")
            ratio = 1.0 if scaling is None else scaling / usual
            chosen = attention("softmax") if abs(ratio - 1) < 1e-6 else attention("softmax", scale=ratio)
        visibility = build_visibility(query, key, mask, bool(getattr(module, "is_causal", True)), chosen.window(None))
        see(Call(int(module.layer_idx), chosen, query, key, visibility, {}))
        return before(module, query, key, value, mask, **kwargs)

    ALL_ATTENTION_FUNCTIONS[name] = attend
    try:
        yield
    finally:
        if was_local:
            ALL_ATTENTION_FUNCTIONS[name] = before
        else:
            del ALL_ATTENTION_FUNCTIONS[name]


@torch.inference_mode()
def run_decoder(model: Any, ids: Tensor) -> None:
    """The layers alone: no logits are wanted."""
    model.get_decoder()(input_ids=ids.to(model.device), use_cache=False)
