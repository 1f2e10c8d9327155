"""Measures a model at a context length: loss of fixed tokens, needles found, cache size and speed."""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from softplus_attention.extend.needles import Haystack, Question

TARGETS = 1024


@torch.inference_mode()
def context_losses(model: Any, rows: Sequence[Sequence[int]], length: int, targets: int = TARGETS) -> list[float]:
    """The mean loss over the last ``targets`` tokens of each row, with ``length`` tokens in all."""
    ids = torch.tensor([row[-length:] for row in rows], device=model.device)
    logits = model(ids, use_cache=False, logits_to_keep=targets + 1).logits[:, :-1]
    losses = [
        torch.nn.functional.cross_entropy(one.float(), row[-targets:]) for one, row in zip(logits, ids, strict=True)
    ]
    return torch.stack(losses).tolist()


@torch.inference_mode()
def ask(model: Any, haystack: Haystack, at_once: int = 1) -> tuple[list[bool], int]:
    """Whether greedy decoding gives each answer, and the cache size in bytes. Questions use copies of one prefill."""
    ids = torch.tensor([haystack.ids], device=model.device)
    cache = model(ids, use_cache=True, logits_to_keep=1).past_key_values
    found: list[bool] = []
    for begin in range(0, len(haystack.questions), at_once):
        batch = haystack.questions[begin : begin + at_once]
        own = copy.deepcopy(cache)
        if len(batch) > 1:
            own.batch_repeat_interleave(len(batch))
        longest = max(len(question.ids) for question in batch)
        # Causal attention ignores the padding on the right.
        rows = [question.ids + [0] * (longest - len(question.ids)) for question in batch]
        logits = model(torch.tensor(rows, device=model.device), past_key_values=own, use_cache=True).logits
        found += [is_found(one, question) for one, question in zip(logits, batch, strict=True)]
    return found, cache_bytes(cache)


@torch.inference_mode()
def time_decode(model: Any, ids: Sequence[int], steps: int) -> tuple[float, float]:
    """Seconds of the prefill, and decode speed in tokens per second."""
    device, begun = model.device, time.perf_counter()
    found = model(torch.tensor([list(ids)], device=device), use_cache=True, logits_to_keep=1)
    synchronize(device)
    prefill = time.perf_counter() - begun
    cache, token = found.past_key_values, found.logits[:, -1:].argmax(-1)
    begun = time.perf_counter()
    for _ in range(steps):
        token = model(token, past_key_values=cache, use_cache=True).logits[:, -1:].argmax(-1)
    synchronize(device)
    return prefill, steps / (time.perf_counter() - begun)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def is_found(logits: Tensor, question: Question) -> bool:
    end = len(question.ids)
    greedy = logits[end - question.answer - 1 : end - 1].argmax(-1).tolist()
    return bool(greedy == question.ids[end - question.answer :])


def cache_bytes(cache: Any) -> int:
    """Memory allocated for keys and values."""
    if (found := getattr(cache, "nbytes", None)) is not None:
        return int(found)
    return sum(x.untyped_storage().nbytes() for layer in cache.layers for x in (layer.keys, layer.values))
