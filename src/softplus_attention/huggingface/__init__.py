"""Hugging Face transformers: the attentions of the catalogue by name in any model, and SoftplusGPT.

Importing this package registers an attention function and a mask function under each name of the catalogue, and
SoftplusGPT with the Auto classes.
"""

from __future__ import annotations

import transformers  # noqa: F401  first, so that a missing extra is reported as missing transformers

from softplus_attention.huggingface.configuration_softplus_gpt import SoftplusGPTConfig
from softplus_attention.huggingface.modeling_softplus_gpt import SoftplusGPTForCausalLM, SoftplusGPTModel
from softplus_attention.huggingface.registration import register
from softplus_attention.huggingface.retrofit import set_power, use_attention
from softplus_attention.huggingface.saving import save_with_code

register()

__all__ = [
    "SoftplusGPTConfig",
    "SoftplusGPTForCausalLM",
    "SoftplusGPTModel",
    "save_with_code",
    "set_power",
    "use_attention",
]


def __dir__() -> list[str]:
    return [*__all__]
