"""A model and a text small enough to extend in a test."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from huggingface_models import byte_tokenizer
from transformers import LlamaConfig, LlamaForCausalLM


def encode(text: str) -> list[int]:
    return [ord(letter) % 128 for letter in text]


TEXT = encode("It was the best of times, it was the worst of times; we had nothing before us. " * 5)


def tiny_model(**changes: Any) -> Any:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": 128,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "initializer_range": 0.3,
        "pad_token_id": 0,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    return LlamaForCausalLM(LlamaConfig(**{**sizes, **changes})).double().eval()


def write_llama(place: Path) -> Path:
    """Writes a model trained at 256 tokens and a byte tokenizer."""
    ends = {"pad_token_id": 256, "bos_token_id": 256, "eos_token_id": 256}
    sizes = {"vocab_size": 257, "max_position_embeddings": 256, "initializer_range": 0.02}
    tiny_model(**sizes, **ends).float().save_pretrained(place)
    byte_tokenizer().save_pretrained(place)
    return place
