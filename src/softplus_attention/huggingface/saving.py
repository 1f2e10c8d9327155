"""Trained models as they are saved: ready to generate."""

from __future__ import annotations

from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from softplus_attention.huggingface.remote_code import save_with_code


def save_trained(
    model: PreTrainedModel, directory: str | Path, tokenizer: PreTrainedTokenizerBase | None = None
) -> None:
    """``save_with_code(model, directory)`` with the key-value cache on, and the tokenizer beside it.

    Trainer and gradient checkpointing switch ``use_cache`` off; saved like that, every generated token would run the
    whole sequence again.
    """
    model.config.use_cache = True
    if model.can_generate():
        model.generation_config.use_cache = True
    save_with_code(model, directory)
    if tokenizer is not None:
        tokenizer.save_pretrained(directory)
