"""Registers our models and their attention backend in each vLLM process, and refuses checkpoints it would run wrong."""

from __future__ import annotations

import functools
import os
from typing import Any

BACKEND = "SOFTPLUS"
PREFIX = "Softplus"
# The hosts that are tested against transformers.
HOSTS = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "Gemma3ForCausalLM",
    "GPT2LMHeadModel",
    "Phi3ForCausalLM",
)
MODELS = {"SoftplusGPTForCausalLM": "softplus_gpt"} | {PREFIX + host: "hosts" for host in HOSTS}
UNTESTED_ON_GPU = "SOFTPLUS_ATTENTION_VLLM_NEVER_RUN_ON_A_GPU"


def register() -> None:
    from vllm.config import ModelConfig
    from vllm.model_executor.models import ModelRegistry
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP
    from vllm.transformers_utils.model_arch_config_convertor import MODEL_ARCH_CONFIG_CONVERTORS
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    import softplus_attention.huggingface  # noqa: F401  registers our types with AutoConfig
    from softplus_attention.serving.vllm.adapters import check_adapters
    from softplus_attention.serving.vllm.config import UnlimitedLength, WithoutContextParallel

    refuse_stock_architectures(ModelConfig)
    check_adapters()
    if BACKEND not in AttentionBackendEnum.__members__:
        # Our layers pass the class itself; vLLM looks it up by name.
        AttentionBackendEnum.register(BACKEND, "softplus_attention.serving.vllm.backend.SoftplusBackend")
    MODEL_ARCH_CONFIG_CONVERTORS["softplus_gpt"] = UnlimitedLength
    for architecture, module in MODELS.items():
        MODELS_CONFIG_MAP[architecture] = WithoutContextParallel
        ModelRegistry.register_model(architecture, f"softplus_attention.serving.vllm.{module}:{architecture}")


def refuse_stock_architectures(config_class: Any) -> None:
    """Raise for checkpoints of a stock type (``llama``) with an attention of the catalogue, which vLLM would run with
    softmax, and for extended models, which vLLM cannot cache."""
    verify = config_class._try_verify_and_update_model_config
    if hasattr(verify, "knows_softplus_attention"):
        return

    @functools.wraps(verify)
    def verify_attention(self: Any) -> None:
        if self.hf_config.model_type.startswith("softplus_extended_"):  # vLLM would try its Transformers backend
            raise ValueError(
                f"{self.model}: vLLM has no cache for an extended model, whose heads keep different parts of the "
                "context; use transformers' generate()"
            )
        if self.architecture not in MODELS and (name := own_attention(self.hf_config)):
            raise ValueError(
                f"{self.model}: this model was trained with the attention {name!r}, but vLLM's {self.architecture} "
                f"would run softmax; {advise(self.hf_config)}"
            )
        verify(self)

    verify_attention.knows_softplus_attention = True  # type: ignore[attr-defined]
    config_class._try_verify_and_update_model_config = verify_attention


def own_attention(config: Any) -> str | None:
    """The attention of the catalogue that a config names, under a stock type or one of ours."""
    from softplus_attention.attentions.catalog import KNOWN
    from softplus_attention.huggingface.hosts import attention_names, names_in

    named = sorted(names_in(attention_names(config)) & set(KNOWN))
    if not named and (getattr(config, "softplus_attention", None) or config.model_type.startswith("softplus_")):
        named = ["lssar"]
    return named[0] if named else None


def advise(config: Any) -> str:
    if config.model_type.startswith("softplus_"):
        return f"softplus_attention serves {', '.join(MODELS)}"
    return (
        "load it with transformers and softplus_attention and save it again: its new type is served if it is one of "
        f"{', '.join(MODELS)}"
    )


def refuse_untested_device(device_type: str) -> None:
    if device_type != "cpu" and os.environ.get(UNTESTED_ON_GPU) != "1":
        raise NotImplementedError(
            f"softplus_attention: the vLLM backend has run only on CPUs, this is {device_type!r}; set "
            f"{UNTESTED_ON_GPU}=1 to run it anyway"
        )
