"""Small random models for the Hugging Face tests, and a byte tokenizer."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    CLIPVisionConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    MistralConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
)

from softplus_attention.huggingface import SoftplusGPTConfig, SoftplusGPTForCausalLM

SIZE = {"vocab_size": 128, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96}
IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
GROUPED = {"num_key_value_heads": 2}
GPT2_SIZE = {"vocab_size": 128, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 256}
CONFIGS = {
    "llama": lambda: LlamaConfig(**SIZE, **IDS, **GROUPED),
    "qwen3": lambda: Qwen3Config(**SIZE, **IDS, **GROUPED, head_dim=16),
    "mistral": lambda: MistralConfig(**SIZE, **IDS, **GROUPED, sliding_window=12),
    "gpt-neox": lambda: GPTNeoXConfig(**SIZE, **IDS),
    "gpt2": lambda: GPT2Config(**GPT2_SIZE, **IDS, attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0),
    "softplus-gpt": lambda: SoftplusGPTConfig(**SIZE, **IDS, **GROUPED),
}
FAMILIES = tuple(CONFIGS)


def small_model(family: str, attention: str = "lssar", layers: int = 2) -> PreTrainedModel:
    torch.manual_seed(0)
    config = CONFIGS[family]()
    config.num_hidden_layers = layers
    if isinstance(config, SoftplusGPTConfig):
        config.attention = attention
        model = AutoModelForCausalLM.from_config(config)
    else:
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    # Larger weights than usual initial ones, so that attention has a visible effect.
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 2 and "embed" not in name and "wpe" not in name:
                weight.mul_(4)
    return model.eval()


def tiny_gpt(**kwargs: Any) -> SoftplusGPTForCausalLM:
    torch.manual_seed(0)
    return SoftplusGPTForCausalLM(SoftplusGPTConfig(**{**SIZE, **IDS, **kwargs})).eval()


def tiny_llava() -> LlavaForConditionalGeneration:
    """A composite model, of text and images."""
    torch.manual_seed(0)
    vision = CLIPVisionConfig(**SIZE, image_size=8, patch_size=4, projection_dim=64)
    text = LlamaConfig(**SIZE, **IDS, initializer_range=0.2)
    config = LlavaConfig(text_config=text, vision_config=vision, image_token_index=1)
    return LlavaForConditionalGeneration(config).eval()


@torch.no_grad()
def logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    return model.eval()(ids).logits


def run_python(program: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run a program in a new process."""
    command = [sys.executable, "-c", program, *map(str, arguments)]
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.run(command, **pipes, text=True, env={**os.environ, "HF_HUB_OFFLINE": "1"}, timeout=240)


def token_rows(rows: int, length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, 128, (rows, length), generator=torch.Generator().manual_seed(seed))


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, and an end-of-text token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>", pad_token="<|endoftext|>")
