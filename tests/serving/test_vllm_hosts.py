"""Host models with our attention, saved by transformers and served by vLLM."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from serving_cases import ask, assert_matches_transformers, engine, save_host
from transformers import AutoModelForCausalLM
from vllm.lora.request import LoRARequest
from vllm.model_executor.layers.attention import Attention

from softplus_attention.huggingface.adapters import mark
from softplus_attention.serving.vllm.backend import SoftplusBackend
from softplus_attention.serving.vllm.plugin import HOSTS

USUAL = {"power": 7, "score_scale": 3.0}
BY_LENGTH = {"power": {"base": 3, "slope": 2, "n0": 16}, "window": 24}
# Architecture -> model type, config overrides, attention, its settings.
CASES: dict[str, tuple[str, dict[str, Any], str, dict[str, Any]]] = {
    "LlamaForCausalLM": ("llama", {}, "lssar", USUAL),
    "MistralForCausalLM": ("mistral", {"sliding_window": 32}, "lssar", USUAL),
    "Qwen2ForCausalLM": ("qwen2", {}, "lssa", {}),
    "Qwen3ForCausalLM": ("qwen3", {"head_dim": 40}, "lssar", BY_LENGTH),
    "Gemma3ForCausalLM": ("gemma3_text", {"sliding_window": 32, "head_dim": 32}, "lssar", USUAL),
    "GPT2LMHeadModel": ("gpt2", {"attn_pdrop": 0}, "lssar", USUAL),
    "Phi3ForCausalLM": ("phi3", {}, "lssar", USUAL),
}
SCALED = {"rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 64}
ROPE = {
    "linear": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10_000.0},
    "yarn": {"rope_type": "yarn", **SCALED},
    "llama3": {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0, **SCALED},
}
POWER_7 = {"attention": "lssar", "power": 7, "score_scale": 3.0}


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
    assert_matches_transformers(answers, folder)


@pytest.mark.parametrize("rope", ROPE)
def test_scaled_rotary_positions(rope: str, tmp_path: Path) -> None:
    """Beyond the training length of 64; "linear" also with tied embeddings."""
    config = {"rope_parameters": ROPE[rope], "tie_word_embeddings": rope == "linear"}
    folder = save_host(tmp_path, "llama", config, "lssar", USUAL)
    with engine(folder) as llm:
        answers = ask(llm)
    assert_matches_transformers(answers, folder)


def save_adapter(folder: Path, base: Path, record: dict[str, Any]) -> Path:
    """Write an adapter as PEFT does (not installed here), and the merged model to ``merged``."""
    model = AutoModelForCausalLM.from_pretrained(base)
    torch.manual_seed(1)
    weights: dict[str, torch.Tensor] = {}
    for name, module in model.named_modules():
        if name.endswith(("q_proj", "v_proj")):
            down, up = torch.randn(4, module.in_features) / 10, torch.randn(module.out_features, 4) / 10
            weights |= {f"base_model.model.{name}.lora_{x}.weight": w for x, w in (("A", down), ("B", up))}
            module.weight.data += 2 * up @ down
    folder.mkdir()
    save_file(weights, folder / "adapter_model.safetensors")
    kind = SimpleNamespace(value="LORA")
    saved = {"peft_type": kind, "r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(mark({**saved, "init_lora_weights": True}, record)))
    model.save_pretrained(folder / "merged")
    return folder


def test_adapters(tmp_path: Path) -> None:
    """An adapter trained with the model's attention is served, one trained with another power is not."""
    folder = save_host(tmp_path / "base", "llama", {}, "lssar", USUAL)
    own = save_adapter(tmp_path / "own", folder, POWER_7)
    other = save_adapter(tmp_path / "other", folder, {**POWER_7, "power": 3})
    with engine(folder, enable_lora=True, max_lora_rank=8) as llm:
        answers = ask(llm, lora_request=LoRARequest("own", 1, str(own)))
        with pytest.raises(ValueError, match=r"this adapter was trained with the attention .*'power': 3"):
            ask(llm, lora_request=LoRARequest("other", 2, str(other)))
    assert_matches_transformers(answers, own / "merged")
    with pytest.raises(AssertionError):
        assert_matches_transformers(answers, folder)
