"""SoftplusGPT in vLLM, with the names and numbers of ``huggingface.modeling_softplus_gpt``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.linear import ColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.models.utils import maybe_prefix

from softplus_attention.huggingface.configuration_softplus_gpt import SoftplusGPTConfig
from softplus_attention.huggingface.modeling_softplus_gpt import SoftplusGPTRotaryEmbedding, layer_norm
from softplus_attention.nn.learned_power import LearnedParameters
from softplus_attention.nn.rotary import rotate
from softplus_attention.power import is_learned
from softplus_attention.serving.vllm.backend import SoftplusBackend, is_plain_softmax
from softplus_attention.serving.vllm.config import ROPE_BY_LENGTH


class SoftplusGPTAttention(LearnedParameters):
    def __init__(self, config: SoftplusGPTConfig, layer_idx: int, vllm_config: Any, prefix: str) -> None:
        super().__init__()
        ranks, heads = get_tensor_model_parallel_world_size(), config.num_attention_heads
        if heads % ranks:
            raise ValueError(f"tensor_parallel_size must be a divisor of this model's {heads} heads, got {ranks}")
        self.num_heads, self.num_kv_heads = heads // ranks, max(1, config.num_key_value_heads // ranks)
        self.head_dim = config.head_dim
        self.attention = config.attention_of_layer(layer_idx)
        spec = self.attention.spec
        if spec.positions == "alibi" and ranks > 1:
            raise NotImplementedError(
                f"{self.attention.name!r}: tensor_parallel_size must be 1 with ALiBi, got {ranks}"
            )
        options = {"bias": config.bias, "quant_config": vllm_config.quant_config}
        sizes = (config.hidden_size, self.head_dim, heads, config.num_key_value_heads)
        self.qkv_proj = QKVParallelLinear(*sizes, prefix=f"{prefix}.qkv_proj", **options)
        self.o_proj = RowParallelLinear(heads * self.head_dim, config.hidden_size, prefix=f"{prefix}.o_proj", **options)
        learns_power = is_learned(config.power) and spec.second_stage != "none"
        self.register_learned(self.num_heads, str(config.power) if learns_power else "")
        for parameter in self.parameters(recurse=False):
            parameter.weight_loader = load_heads  # type: ignore[attr-defined]
        # Plain softmax uses vLLM's own backend; any other attention uses ours, whatever the platform or a flag says.
        ours = {"attn_backend": SoftplusBackend, "attention": self.attention, "parameters": self.attention_parameters}
        self.attn = Attention(
            self.num_heads,
            self.head_dim,
            self.head_dim**-0.5,
            self.num_kv_heads,
            cache_config=vllm_config.cache_config,
            quant_config=vllm_config.quant_config,
            per_layer_sliding_window=spec.window,
            prefix=f"{prefix}.attn",
            **({} if is_plain_softmax(spec) else ours),
        )

    def forward(self, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor] | None) -> Tensor:
        qkv, _ = self.qkv_proj(hidden_states)
        q, k, v = qkv.unflatten(-1, (-1, self.head_dim)).split([self.num_heads, *[self.num_kv_heads] * 2], 1)
        if position_embeddings is not None:
            q, k = (rotate(x.transpose(0, 1), *position_embeddings).transpose(0, 1) for x in (q, k))
        out, _ = self.o_proj(self.attn(q.flatten(1), k.flatten(1), v.flatten(1)))
        return out


def load_heads(parameter: Tensor, loaded: Tensor) -> None:
    """Copy this rank's heads of a parameter with one value per head."""
    own = parameter.shape[0]
    parameter.data.copy_(loaded[get_tensor_model_parallel_rank() * own :][:own])


class SoftplusGPTMLP(nn.Module):
    def __init__(self, config: SoftplusGPTConfig, vllm_config: Any, prefix: str) -> None:
        super().__init__()
        options = {"bias": config.bias, "quant_config": vllm_config.quant_config}
        width, inner = config.hidden_size, config.intermediate_size
        self.up_proj = ColumnParallelLinear(width, inner, prefix=f"{prefix}.up_proj", **options)
        self.act_fn = ACT2FN[config.hidden_act]
        self.down_proj = RowParallelLinear(inner, width, prefix=f"{prefix}.down_proj", **options)

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.up_proj(hidden_states)[0]))[0]


class SoftplusGPTBlock(nn.Module):
    def __init__(self, config: SoftplusGPTConfig, layer_idx: int, vllm_config: Any, prefix: str) -> None:
        super().__init__()
        self.input_layernorm = layer_norm(config)
        self.self_attn = SoftplusGPTAttention(config, layer_idx, vllm_config, f"{prefix}.self_attn")
        self.post_attention_layernorm = layer_norm(config)
        self.mlp = SoftplusGPTMLP(config, vllm_config, f"{prefix}.mlp")

    def forward(self, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor] | None) -> Tensor:
        hidden_states = hidden_states + self.self_attn(self.input_layernorm(hidden_states), position_embeddings)
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


class SoftplusGPTModel(nn.Module):
    def __init__(self, config: SoftplusGPTConfig, vllm_config: Any, prefix: str) -> None:
        super().__init__()
        self.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.hidden_size)
        layers = range(config.num_hidden_layers)
        self.layers = nn.ModuleList([SoftplusGPTBlock(config, i, vllm_config, f"{prefix}.layers.{i}") for i in layers])
        self.norm = layer_norm(config)
        self.uses_rope = [config.attention_of_layer(i).spec.positions == "rope" for i in layers]
        self.rotary_emb = SoftplusGPTRotaryEmbedding(config) if any(self.uses_rope) else None
        if self.rotary_emb is not None and self.rotary_emb.rope_type in ROPE_BY_LENGTH:
            raise NotImplementedError(
                f"rope_type={self.rotary_emb.rope_type!r} in vLLM: its frequencies depend on a step's longest request"
            )

    def forward(self, hidden_states: Tensor, positions: Tensor) -> Tensor:
        tables = None if self.rotary_emb is None else self.rotary_emb(hidden_states, positions)
        for layer, uses_rope in zip(self.layers, self.uses_rope, strict=True):
            hidden_states = layer(hidden_states, tables if uses_rope else None)
        return self.norm(hidden_states)


class SoftplusGPTForCausalLM(nn.Module):
    packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}  # noqa: RUF012  vLLM's own form

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__()
        self.config = config = vllm_config.model_config.hf_config
        self.model = SoftplusGPTModel(config, vllm_config, maybe_prefix(prefix, "model"))
        head = maybe_prefix(prefix, "lm_head")
        self.lm_head = ParallelLMHead(config.vocab_size, config.hidden_size, prefix=head)
        if config.tie_word_embeddings:
            self.lm_head = self.lm_head.tie_weights(self.model.embed_tokens)
        self.logits_processor = LogitsProcessor(config.vocab_size)

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        return self.model.embed_tokens(input_ids)

    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: Tensor | None = None,
    ) -> Tensor:
        return self.model(self.embed_input_ids(input_ids) if inputs_embeds is None else inputs_embeds, positions)

    def compute_logits(self, hidden_states: Tensor) -> Tensor | None:
        return self.logits_processor(self.lm_head, hidden_states)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Returns the names of loaded parameters, for vLLM's check that none is missing."""
        parameters, loaded = dict(self.named_parameters()), set()
        for name, weight in weights:
            if name == "lm_head.weight" and self.config.tie_word_embeddings:
                continue
            part = next((part for part in "qkv" if f".{part}_proj." in name), None)
            target = name if part is None else name.replace(f".{part}_proj.", ".qkv_proj.")
            if target not in parameters:
                raise ValueError(f"unexpected weight {name!r} in the checkpoint")
            parameter = parameters[target]
            load = getattr(parameter, "weight_loader", load_whole)
            load(parameter, weight, *[part] if part else [])
            loaded.add(target)
        return loaded


def load_whole(parameter: Tensor, loaded: Tensor) -> None:
    with torch.no_grad():
        parameter.copy_(loaded)
