"""vLLM engines in this process, and transformers' answers to compare with."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Read when vLLM is imported.
os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.inputs import TokensPrompt

import softplus_attention.huggingface as huggingface

SIZE = {
    "vocab_size": 64,
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": None,
}


def prompt(length: int, seed: int = 1) -> list[int]:
    """Prompts of one seed share their prefix."""
    return [(7 * i * i + 3 * i + seed) % 60 + 3 for i in range(length)]


PROMPTS = [prompt(100), prompt(3, 5), prompt(41, 9), prompt(130)]


def save_gpt(folder: Path, **config: Any) -> Path:
    """A SoftplusGPT with random weights and different learned parameters in every head."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(huggingface.SoftplusGPTConfig(**{**SIZE, **config}))
    for name, parameter in model.named_parameters():
        if "raw_power" in name or "ssmax_scale" in name:
            parameter.data += torch.arange(parameter.numel()) / 2 - 1
    model.save_pretrained(folder)
    return folder


def save_host(
    folder: Path, model_type: str, changes: dict[str, Any], name: str = "lssar", settings: dict[str, Any] | None = None
) -> Path:
    """A host model with random weights and our attention."""
    size = {**SIZE, "intermediate_size": 128, "max_position_embeddings": 256, "pad_token_id": 0, **changes}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **size))
    model.config.softplus_attention = settings or {}
    model.set_attn_implementation(name)
    model.save_pretrained(folder)
    return folder


@dataclass
class Answer:
    tokens: list[int]
    logprobs: list[dict[int, float]]  # of the most likely tokens, for each step


@contextmanager
def engine(folder: Path, **options: Any) -> Iterator[LLM]:
    usual = {"max_model_len": 256, "max_num_seqs": 4, "enforce_eager": True, "dtype": "float32"}
    llm = LLM(model=str(folder), skip_tokenizer_init=True, disable_log_stats=False, **{**usual, **options})
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        cleanup_dist_env_and_memory()


def ask(llm: LLM, prompts: Sequence[Sequence[int]] = PROMPTS, tokens: int = 8, **options: Any) -> list[Answer]:
    greedy = SamplingParams(max_tokens=tokens, temperature=0, logprobs=5, detokenize=False, ignore_eos=True)
    requests = [TokensPrompt(prompt_token_ids=list(ids)) for ids in prompts]
    found = [output.outputs[0] for output in llm.generate(requests, greedy, use_tqdm=False, **options)]
    return [
        Answer(list(one.token_ids), [{token: seen.logprob for token, seen in step.items()} for step in one.logprobs])
        for one in found
    ]


def metric(llm: LLM, name: str) -> int:
    return sum(found.value for found in llm.get_metrics() if found.name == f"vllm:{name}")


@torch.no_grad()
def log_probabilities(model: Any, ids: Sequence[int]) -> Tensor:
    return model(torch.tensor([list(ids)]), use_cache=False).logits[0].float().log_softmax(-1)


def assert_matches_transformers(
    answers: Sequence[Answer], folder: Path, prompts: Sequence[Sequence[int]] = PROMPTS
) -> None:
    """Every token is the most likely one, and log-probabilities agree to 0.001, with transformers without a cache."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    assert len(answers) == len(prompts)
    for ids, answer in zip(prompts, answers, strict=True):
        expected = log_probabilities(model, [*ids, *answer.tokens])[len(ids) - 1 : -1]
        assert answer.tokens == expected.argmax(-1).tolist()
        for step, row in zip(answer.logprobs, expected, strict=True):
            torch.testing.assert_close(torch.tensor([*step.values()]), row[[*step]], rtol=0, atol=1e-3)
