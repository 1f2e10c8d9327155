"""Models of other types with an attention of ours, saved by transformers and served by vLLM."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from serving_cases import SIZE, ask, assert_as_in_transformers, engine
from transformers import AutoConfig, AutoModelForCausalLM
from vllm.model_executor.layers.attention import Attention

from softplus_attention.serving.vllm.backend import SoftplusBackend
from softplus_attention.serving.vllm.plugin import HOSTS

USUAL = {"power": 7, "score_scale": 3.0}
BY_LENGTH = {"power": {"base": 3, "slope": 2, "n0": 16}, "window": 24}
# By architecture: the type, what its config has, the attention and its settings.
CASES: dict[str, tuple[str, dict[str, Any], str, dict[str, Any]]] = {
    "LlamaForCausalLM": ("llama", {}, "lssar", USUAL),
    "MistralForCausalLM": ("mistral", {"sliding_window": 32}, "lssar", USUAL),
    "Qwen2ForCausalLM": ("qwen2", {}, "lssa", {}),
    "Qwen3ForCausalLM": ("qwen3", {"head_dim": 40}, "lssar", BY_LENGTH),
    "Gemma3ForCausalLM": ("gemma3_text", {"sliding_window": 32, "head_dim": 32}, "lssar", USUAL),
    "GPT2LMHeadModel": ("gpt2", {"attn_pdrop": 0}, "lssar", USUAL),
    "Phi3ForCausalLM": ("phi3", {}, "lssar", USUAL),
}


def save_host(folder: Path, model_type: str, changes: dict[str, Any], name: str, settings: dict[str, Any]) -> Path:
    size = {**SIZE, "intermediate_size": 128, "max_position_embeddings": 256, "pad_token_id": 0, **changes}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **size))
    model.config.softplus_attention = settings
    model.set_attn_implementation(name)
    model.save_pretrained(folder)
    return folder


def test_every_host_has_a_case() -> None:
    assert set(CASES) == set(HOSTS)


@pytest.mark.parametrize("architecture", CASES)
def test_matches_transformers(architecture: str, tmp_path: Path) -> None:
    folder = save_host(tmp_path, *CASES[architecture])
    with engine(folder) as llm:
        assert llm.llm_engine.model_config.architecture == f"Softplus{architecture}"
        model = llm.llm_engine.model_executor.driver_worker.get_model()
        layers = [module for module in model.modules() if isinstance(module, Attention)]
        assert {layer.attn_backend for layer in layers} == {SoftplusBackend}
        answers = ask(llm)
    assert_as_in_transformers(answers, folder)
