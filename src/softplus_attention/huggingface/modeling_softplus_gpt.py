"""SoftplusGPT: a transformers model, GPT-2 with rotary positions and any attention of the catalogue."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache, DynamicCache
from transformers.generation import GenerationConfig, GenerationMixin, MaxLengthCriteria, StoppingCriteriaList
from transformers.masking_utils import create_causal_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS, dynamic_rope_update
from transformers.modeling_utils import PreTrainedModel
from transformers.utils import can_return_tuple
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from softplus_attention import distributed
from softplus_attention import validation as check
from softplus_attention.dispatch import unit_keys
from softplus_attention.huggingface.attention import (
    attend,
    attentions_are_recorded,
    power_to_json,
    refuse_options,
    weights,
)
from softplus_attention.huggingface.configuration_softplus_gpt import SoftplusGPTConfig
from softplus_attention.huggingface.continuous import attend_paged, is_paged
from softplus_attention.huggingface.hosts import check_tensor_parallel
from softplus_attention.huggingface.masks import PACKING, with_documents
from softplus_attention.nn.learned_power import LearnedParameters
from softplus_attention.nn.rotary import rotate, rotation_tables
from softplus_attention.power import PowerByLength, is_learned
from softplus_attention.reference import compute_dtype


class SoftplusGPTRotaryEmbedding(nn.Module):
    """Rotary positions of every ``rope_type`` of transformers, without a length limit.

    The frequencies are transformers'. Angles are float64 where the device supports it: in float32 the angle of
    position 1e6 is off by several hundredths.
    """

    def __init__(self, config: SoftplusGPTConfig) -> None:
        super().__init__()
        self.config = config
        self.max_seq_len_cached = self.original_max_seq_len = config.max_position_embeddings
        self.rope_type = config.rope_parameters["rope_type"]
        frequencies: Callable[..., tuple[Tensor, float]] = self.compute_default_rope_parameters
        if self.rope_type != "default":
            frequencies = ROPE_INIT_FUNCTIONS[self.rope_type]
        inv_freq, self.attention_scaling = frequencies(config, None)
        self.register_buffer("inv_freq", inv_freq, persistent=False)
        self.register_buffer("original_inv_freq", inv_freq.clone(), persistent=False)

    @staticmethod
    def compute_default_rope_parameters(config: SoftplusGPTConfig, *_: Any, **__: Any) -> tuple[Tensor, float]:
        exponent = torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim
        return (config.rope_parameters["rope_theta"] ** -exponent).float(), 1.0

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        """Keeps the frequencies float32 in ``model.bfloat16()``: rounded, they would encode other positions."""
        buffers = dict(self.named_buffers(recurse=False))
        super()._apply(fn, recurse)
        for name, before in buffers.items():
            after = getattr(self, name)
            if after.dtype != before.dtype:
                setattr(self, name, before.to(after.device))
        return self

    @torch.no_grad()
    @dynamic_rope_update
    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """The tables of ``rotate``."""
        exact = torch.float32 if x.device.type == "mps" else torch.float64
        angle = position_ids[..., None].to(exact) * self.inv_freq.to(exact)
        dtype = compute_dtype(x.dtype)
        cos, sin = angle.cos() * self.attention_scaling, angle.sin() * self.attention_scaling
        return rotation_tables(cos.to(dtype), sin.to(dtype))


class SoftplusGPTAttention(LearnedParameters):
    is_causal = True

    def __init__(self, config: SoftplusGPTConfig, layer_idx: int) -> None:
        super().__init__()
        self.config, self.layer_idx, self.head_dim = config, layer_idx, config.head_dim
        self.attention = config.attention_of_layer(layer_idx)
        width, heads = config.head_dim * config.num_attention_heads, config.num_attention_heads
        kv_width = config.head_dim * config.num_key_value_heads
        self.q_proj = nn.Linear(config.hidden_size, width, bias=config.bias)
        self.k_proj = nn.Linear(config.hidden_size, kv_width, bias=config.bias)
        self.v_proj = nn.Linear(config.hidden_size, kv_width, bias=config.bias)
        self.o_proj = residual_projection(width, config)
        learns_power = is_learned(config.power) and self.attention.spec.second_stage != "none"
        self.register_learned(heads, str(config.power) if learns_power else "")

    def reset_learned(self) -> None:
        for name, first in self.first_values(self.config.num_attention_heads).items():
            init.copy_(getattr(self, name), first)

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor] | None,
        attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        output_attentions: bool = False,
        paged: dict[str, Any] | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        heads = (*hidden_states.shape[:-1], -1, self.head_dim)
        q = self.q_proj(hidden_states).view(heads).transpose(1, 2)
        k = self.k_proj(hidden_states).view(heads).transpose(1, 2)
        v = self.v_proj(hidden_states).view(heads).transpose(1, 2)
        if position_embeddings is not None:
            q, k = rotate(q, *position_embeddings), rotate(k, *position_embeddings)
        # Cache unit keys, so that a decode step normalises one key, not all. Without a cache the op normalises in
        # float32, which keeps more digits.
        normalized = (past_key_values is not None or paged is not None) and self.attention.spec.qk_norm
        if normalized:
            k = unit_keys(k)
        if past_key_values is not None:
            k, v = past_key_values.update(k, v, self.layer_idx)
        parameters = self.attention_parameters()
        if paged is not None:
            kwargs: dict[str, Any] = {"parameters": parameters, "normalized_keys": normalized}
            out = attend_paged(self.attention, self.layer_idx, q, k, v, paged, **kwargs)
            return self.o_proj(out.transpose(1, 2).flatten(2)), None
        masking = attention_mask, self.is_causal
        out = attend(self.attention, q, k, v, *masking, parameters=parameters, normalized_keys=normalized)
        if output_attentions and distributed.active() is not None:
            raise ValueError("no attention weights under context parallel: output_attentions must be False")
        dense = weights(self.attention, q, k, *masking, parameters) if output_attentions else None
        return self.o_proj(out.transpose(1, 2).flatten(2)), dense


def residual_projection(width: int, config: SoftplusGPTConfig) -> nn.Linear:
    """A projection to the residual stream; as in GPT-2 its initial weights shrink with the number of layers."""
    projection = nn.Linear(width, config.hidden_size, bias=config.bias)
    # Set on the leaf module: transformers calls _init_weights only for modules with direct parameters.
    projection.starts_smaller_by = math.sqrt(2 * config.num_hidden_layers)  # type: ignore[assignment]
    return projection


class SoftplusGPTMLP(nn.Module):
    def __init__(self, config: SoftplusGPTConfig) -> None:
        super().__init__()
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.bias)
        self.act_fn = ACT2FN[config.hidden_act]
        self.down_proj = residual_projection(config.intermediate_size, config)

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.up_proj(hidden_states)))


class SoftplusGPTBlock(GradientCheckpointingLayer):
    def __init__(self, config: SoftplusGPTConfig, layer_idx: int) -> None:
        super().__init__()
        self.input_layernorm = layer_norm(config)
        self.self_attn = SoftplusGPTAttention(config, layer_idx)
        self.post_attention_layernorm = layer_norm(config)
        self.mlp = SoftplusGPTMLP(config)

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor] | None,
        attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        output_attentions: bool = False,
        paged: dict[str, Any] | None = None,
    ) -> Tensor:
        normed = self.input_layernorm(hidden_states)
        options = attention_mask, past_key_values, output_attentions, paged
        attended, _ = self.self_attn(normed, position_embeddings, *options)
        hidden_states = hidden_states + attended
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


def layer_norm(config: SoftplusGPTConfig) -> nn.LayerNorm:
    return nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps, bias=config.bias)


class SoftplusGPTPreTrainedModel(PreTrainedModel):
    config_class = SoftplusGPTConfig
    config: SoftplusGPTConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["SoftplusGPTBlock"]  # noqa: RUF012  transformers' own form
    _skip_keys_device_placement = ["past_key_values"]  # noqa: RUF012
    _supports_attention_backend = True
    _supports_sdpa = True
    _can_compile_fullgraph = True
    _can_record_outputs = {"hidden_states": SoftplusGPTBlock, "attentions": SoftplusGPTAttention}  # noqa: RUF012

    def get_correct_attn_implementation(self, requested_attention: str | None, is_init_check: bool = False) -> str:
        """The attention is part of the config; only its own name is accepted."""
        own = self.config.attention
        if requested_attention not in (None, own):
            check.fail(
                "attn_implementation",
                f"None or {own!r}, the attention in this model's config; for another one use "
                f"SoftplusGPTConfig(attention=...), or from_pretrained(..., attention=...) for the same weights",
                repr(requested_attention),
            )
        return own

    def set_attn_implementation(self, attn_implementation: str | dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """As at loading, only the model's own attention is accepted."""
        requested = attn_implementation.get("") if isinstance(attn_implementation, dict) else attn_implementation
        self.get_correct_attn_implementation(requested)

    @classmethod
    def maybe_distribute_model(cls, model: Any, distributed_config: Any, *args: Any) -> Any:
        check_tensor_parallel(model, distributed_config)
        return super().maybe_distribute_model(model, distributed_config, *args)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            smaller = getattr(module, "starts_smaller_by", 1.0)
            init.normal_(module.weight, mean=0.0, std=self.config.initializer_range / smaller)
            if module.bias is not None:
                init.zeros_(module.bias)
        elif isinstance(module, SoftplusGPTAttention):
            module.reset_learned()
        else:
            super()._init_weights(module)

    def set_power(self, power: float | PowerByLength) -> None:
        """Set the sharpening power, in the config too: for a schedule, or a sharper attention at inference."""
        if is_learned(self.config.power):
            raise ValueError("`power` is learned in this model and cannot be set")
        before, self.config.power = self.config.power, power_to_json(power)
        try:
            self.config.chosen_attention()
        except ValueError:
            self.config.power = before
            raise
        for module in self.modules():
            if isinstance(module, SoftplusGPTAttention):
                module.attention = self.config.attention_of_layer(module.layer_idx)


def refuse_sequence_parallel() -> None:
    """DeepSpeed wraps transformers' attention functions, which this model does not call."""
    groups = sys.modules.get("deepspeed.runtime.sequence_parallel.parallel_state_sp")
    if getattr(groups, "_SEQUENCE_PARALLEL_GROUP", None) is not None and not distributed.active():
        raise RuntimeError(
            "under DeepSpeed's sequence parallel each rank of a SoftplusGPT would attend only to its own tokens; use "
            "softplus_attention.distributed, or `softplus-attention train --context-parallel`"
        )


class SoftplusGPTModel(SoftplusGPTPreTrainedModel):
    def __init__(self, config: SoftplusGPTConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.layers = nn.ModuleList([SoftplusGPTBlock(config, i) for i in range(config.num_hidden_layers)])
        self.norm = layer_norm(config)
        attentions = [config.attention_of_layer(layer) for layer in range(config.num_hidden_layers)]
        self.uses_rope = [chosen.spec.positions == "rope" for chosen in attentions]
        self.rotary_emb = SoftplusGPTRotaryEmbedding(config) if any(self.uses_rope) else None
        self.gradient_checkpointing = False
        self.post_init()

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_attentions: bool = False,
        **options: Any,
    ) -> BaseModelOutputWithPast:
        refuse_sequence_parallel()
        paged = options if is_paged(options) else None
        refuse_options(self.config.attention, options if paged is None else {})
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("exactly one of `input_ids` and `inputs_embeds` must be given")
        hidden_states = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache(config=self.config)
        # Only position_ids that were passed can be packed documents; default ones continue from the cache.
        mask = None
        if paged is None:
            mask = create_causal_mask(
                self.config, hidden_states, attention_mask, past_key_values=past_key_values, position_ids=position_ids
            )
        packed = paged is None and any(name in options for name in PACKING)
        if packed or position_ids is None:  # only if needed: some caches scan every key to get the length
            seen = 0 if past_key_values is None else past_key_values.get_seq_length()
        if packed:
            batch, length = hidden_states.shape[:2]
            mask = with_documents(mask, options, (batch, length, seen + length), True, hidden_states.device)
        if position_ids is None:
            position_ids = (torch.arange(hidden_states.shape[1], device=hidden_states.device) + seen)[None]
        positions = None if self.rotary_emb is None else self.rotary_emb(hidden_states, position_ids)
        # Not in the layers: the lookup would break their graphs.
        output_attentions = output_attentions or attentions_are_recorded()
        # Fewer than all layers if generation drafts with the first ones (assistant_early_exit).
        for layer, uses_rope in zip(self.layers[: self.config.num_hidden_layers], self.uses_rope, strict=False):
            hidden_states = layer(
                hidden_states,
                positions if uses_rope else None,
                mask,
                past_key_values=past_key_values,
                output_attentions=output_attentions,
                paged=paged,
            )
        return BaseModelOutputWithPast(last_hidden_state=self.norm(hidden_states), past_key_values=past_key_values)


class SoftplusGPTForCausalLM(SoftplusGPTPreTrainedModel, GenerationMixin):
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012  transformers' own form
    _tp_plan = {"lm_head": "colwise_gather_output"}  # noqa: RUF012
    # Set in training: computes the loss from (hidden states, head weight, labels) without logits.
    linear_loss: Callable[..., Tensor] | None = None

    def __init__(self, config: SoftplusGPTConfig) -> None:
        super().__init__(config)
        self.model = SoftplusGPTModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def save_pretrained(self, save_directory: str | os.PathLike[str], *args: Any, **kwargs: Any) -> None:
        generation = self.generation_config
        if generation.use_cache is not self.config.use_cache:
            generation._from_model_config = None  # set by the user: see adjust_generation_fn
        super().save_pretrained(save_directory, *args, **kwargs)

    def adjust_generation_fn(self, generation_config: GenerationConfig | None, *args: Any, **kwargs: Any) -> None:
        """Called by ``from_pretrained``. A generation config derived from the model's config takes ``use_cache`` from
        it: earlier versions saved trained models with the cache off in generation_config.json only."""
        super().adjust_generation_fn(generation_config, *args, **kwargs)
        if generation_config is None and self.generation_config._from_model_config:
            self.generation_config.use_cache = self.config.use_cache

    def _get_stopping_criteria(self, *args: Any, **kwargs: Any) -> StoppingCriteriaList:
        """Without the warning beyond ``max_position_embeddings``, which limits nothing here."""
        criteria = super()._get_stopping_criteria(*args, **kwargs)
        for criterion in criteria:
            if isinstance(criterion, MaxLengthCriteria):
                criterion.max_position_embeddings = None
        return criteria

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **options: Any,
    ) -> CausalLMOutputWithPast:
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **options,
        )
        logits = loss = None
        if labels is not None and self.linear_loss is not None:
            loss = self.linear_loss(outputs.last_hidden_state, self.lm_head.weight, labels, **options)
        else:
            kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
            logits = self.lm_head(outputs.last_hidden_state[:, kept])
        if labels is not None and loss is None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **options)
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )


__all__ = ["SoftplusGPTForCausalLM", "SoftplusGPTModel", "SoftplusGPTPreTrainedModel"]
