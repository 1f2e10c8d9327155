"""Shared by the evaluation tests: a small saved model with a byte tokenizer, and models with known answers."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from softplus_attention.data import tokenizer as tokenizers
from softplus_attention.evaluation.models import LoadedModel, load_for_evaluation, parse_model_spec
from softplus_attention.huggingface import SoftplusGPTConfig, SoftplusGPTForCausalLM

SIZE: dict[str, Any] = {
    "vocab_size": 320, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48,
    "max_position_embeddings": 16, "bos_token_id": 256, "eos_token_id": 256,
}  # fmt: skip


def saved_model(folder: Path, **kwargs: Any) -> Path:
    """A random SoftplusGPT of two layers, "trained" at 16 bytes, with weights large enough that attention matters."""
    torch.manual_seed(0)
    model = SoftplusGPTForCausalLM(SoftplusGPTConfig(**{**SIZE, **kwargs}))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 2 and "embed" not in name:
                weight.mul_(4)
    model.save_pretrained(folder)
    tokenizers.save(tokenizers.bytes_tokenizer(), folder, tokenizers.END)
    return folder


def open_saved(text: str | Path, training_length: int = 16, dtype: str = "auto") -> LoadedModel:
    return load_for_evaluation(parse_model_spec(str(text)), training_length, dtype=dtype, device="cpu")


class Copier:
    """Copies the token after the longest earlier match of the last tokens, like an induction head."""

    device = torch.device("cpu")

    def __init__(self, vocabulary: int = 320, longest: int = 24) -> None:
        self.vocabulary, self.longest = vocabulary, longest

    def __call__(self, input_ids: torch.Tensor, logits_to_keep: int, use_cache: bool) -> Any:
        length = input_ids.shape[1]
        logits = torch.zeros(len(input_ids), logits_to_keep, self.vocabulary)
        for row, ids in enumerate(input_ids.tolist()):
            for position in range(logits_to_keep):
                logits[row, position, self.next_token(ids[: length - logits_to_keep + position + 1])] = 1
        return SimpleNamespace(logits=logits)

    def next_token(self, ids: list[int]) -> int:
        for size in range(min(self.longest, len(ids) - 1), 0, -1):
            for end in range(len(ids) - 1, size - 1, -1):
                if ids[end - size : end] == ids[-size:]:
                    return ids[end]
        return 0


class Forgetful(Copier):
    """Never looks back."""

    def next_token(self, ids: list[int]) -> int:
        return 0
