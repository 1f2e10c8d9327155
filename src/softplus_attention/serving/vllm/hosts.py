"""vLLM's models of other types with our attention in every layer: ``SoftplusLlamaForCausalLM`` and so on.

A class is made from the host's class in vLLM's registry when vLLM looks it up by name.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.models.registry import ModelRegistry

from softplus_attention.attentions import catalog
from softplus_attention.huggingface.attention import attention_from_config, check_host_arguments
from softplus_attention.serving.vllm.backend import SoftplusBackend, is_plain_softmax
from softplus_attention.serving.vllm.config import ROPE_BY_LENGTH
from softplus_attention.serving.vllm.plugin import HOSTS, PREFIX


class HostModel:
    """Mixin for a host's model."""

    def __init__(self, *, vllm_config: Any, prefix: str = "", **kwargs: Any) -> None:
        config = vllm_config.model_config.hf_config
        refuse_rope_by_length(config, vllm_config.model_config.max_model_len)
        chosen = attention_from_config(config, config._attn_implementation)
        with attention_in_layers(chosen):
            super().__init__(vllm_config=vllm_config, prefix=prefix, **kwargs)  # type: ignore[call-arg]
        for module in self.modules():  # type: ignore[attr-defined]
            if isinstance(module, AttentionLayerBase) and getattr(module, "softplus_attention", None) is not chosen:
                raise NotImplementedError(
                    f"{type(self).__name__} in vLLM: {type(module).__name__} cannot run the attention {chosen.name!r}"
                )


@contextmanager
def attention_in_layers(chosen: catalog.Attention) -> Iterator[None]:
    """Layers built in this context run ``chosen``, whatever the platform or a flag says."""
    build = Attention.__init__
    ours = {} if is_plain_softmax(chosen.spec) else {"attn_backend": SoftplusBackend, "attention": chosen}

    def build_ours(self: Attention, *args: Any, **kwargs: Any) -> None:
        build(self, *args, **{**kwargs, **ours})
        check_host_arguments(chosen, torch.empty(0, self.head_size), None, self.impl.scale, {})
        self.softplus_attention = chosen

    Attention.__init__ = build_ours
    try:
        yield
    finally:
        Attention.__init__ = build


def refuse_rope_by_length(config: Any, longest: int) -> None:
    """vLLM fixes these frequencies by the longest allowed sequence, transformers by the current one."""
    found = getattr(config, "rope_parameters", None) or {}
    for rope in [found] if "rope_type" in found else found.values():
        trained = rope.get("original_max_position_embeddings") or config.max_position_embeddings
        if rope.get("rope_type") in ROPE_BY_LENGTH and longest > trained:
            raise NotImplementedError(
                f"rope_type={rope['rope_type']!r} in vLLM: its frequencies depend on the longest request beyond "
                f"{trained} tokens; use --max-model-len {trained}"
            )


def __getattr__(name: str) -> Any:
    host = name.removeprefix(PREFIX)
    if host not in HOSTS or name == host:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    base = ModelRegistry._try_load_model_cls(host)
    return globals().setdefault(name, type(name, (HostModel, base), {"__module__": __name__}))
