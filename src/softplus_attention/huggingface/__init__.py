"""Hugging Face transformers: every attention by its name on any model, and a GPT of our own.

Importing this registers, under each name of the catalogue, the attention function and the mask function that belongs to
it, and SoftplusGPT with the Auto classes.
"""

from __future__ import annotations

import transformers  # noqa: F401  first, so that it is what a command names where all of it is missing

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
