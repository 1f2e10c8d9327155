"""What ``import softplus_attention.huggingface`` tells transformers."""

from __future__ import annotations

import functools
from typing import Any

from transformers import AttentionInterface, AutoConfig, AutoModel, AutoModelForCausalLM, PreTrainedConfig
from transformers.masking_utils import AttentionMaskInterface

from softplus_attention.catalog import ABLATIONS, ATTENTIONS
from softplus_attention.huggingface.attention import attention_function
from softplus_attention.huggingface.configuration_softplus_gpt import SoftplusGPTConfig
from softplus_attention.huggingface.masks import range_mask
from softplus_attention.huggingface.modeling_softplus_gpt import SoftplusGPTForCausalLM, SoftplusGPTModel

NAMES = tuple(ATTENTIONS | ABLATIONS)


def register() -> None:
    for name in NAMES:
        AttentionInterface.register(name, attention_function(name))
        # Without its mask function transformers passes no mask at all, and padding would be attended to in silence.
        AttentionMaskInterface.register(name, range_mask)
    AutoConfig.register(SoftplusGPTConfig.model_type, SoftplusGPTConfig, exist_ok=True)
    AutoModel.register(SoftplusGPTConfig, SoftplusGPTModel, exist_ok=True)
    AutoModelForCausalLM.register(SoftplusGPTConfig, SoftplusGPTForCausalLM, exist_ok=True)
    save_attention_names()


def save_attention_names() -> None:
    """transformers leaves ``attn_implementation`` out of config.json, so a model trained with LSSAR would come back as
    one with softmax and say nothing. Ours are written; where this package is missing, loading such a model then fails.
    """
    if hasattr(PreTrainedConfig.to_dict, "saves_attention_names"):
        return
    to_dict = PreTrainedConfig.to_dict

    @functools.wraps(to_dict)
    def to_dict_with_attention(self: PreTrainedConfig) -> dict[str, Any]:
        words = to_dict(self)
        if self._attn_implementation in NAMES and not isinstance(self, SoftplusGPTConfig):
            words["attn_implementation"] = self._attn_implementation
        return words

    to_dict_with_attention.saves_attention_names = True  # type: ignore[attr-defined]
    PreTrainedConfig.to_dict = to_dict_with_attention
