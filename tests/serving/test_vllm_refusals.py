"""vLLM raises an error for what it cannot run correctly with our models."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from serving_cases import SIZE, ask, assert_matches_transformers, engine, save_gpt, save_host
from transformers import AutoModelForCausalLM, LlamaConfig
from vllm.config.lora import LoRAConfig
from vllm.lora.peft_helper import PEFTHelper
from vllm.model_executor.layers.attention import Attention

from softplus_attention.huggingface.adapters import mark
from softplus_attention.huggingface.extension.modeling import extended
from softplus_attention.huggingface.extension.settings import Extension
from softplus_attention.serving.vllm import plugin
from softplus_attention.serving.vllm.backend import PagedBatchBuilder, SoftplusBackend


def assert_refused(folder: Path, message: str, **options: Any) -> None:
    """vLLM wraps errors raised while it reads a config as ValueError, but not those of layers."""
    with pytest.raises((NotImplementedError, ValueError), match=message), engine(folder, **options):
        pass


def test_no_flag_replaces_the_backend(recipe: Path) -> None:
    with engine(recipe, attention_backend="TRITON_ATTN") as llm:
        model = llm.llm_engine.model_executor.driver_worker.get_model()
        layers = [module for module in model.modules() if isinstance(module, Attention)]
        assert [layer.attn_backend for layer in layers] == [SoftplusBackend] * 4
        answers = ask(llm)
    assert_matches_transformers(answers, recipe)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype='fp8' in a model of float32 is not supported"),
        ({"kv_cache_dtype": "bfloat16"}, "kv_cache_dtype='bfloat16' in a model of float32 is not supported"),
        ({"pipeline_parallel_size": 2}, "Pipeline parallelism is not supported for this model"),
    ],
)
def test_refused_at_the_start(options: dict[str, Any], message: str, recipe: Path) -> None:
    assert_refused(recipe, message, **options)


def test_rope_that_follows_the_longest_request(tmp_path: Path) -> None:
    folder = save_gpt(tmp_path, rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0})
    assert_refused(folder, "depend on a step's longest request")


def test_context_parallel(tmp_path: Path) -> None:
    """Raises before a process is started."""
    folder = save_gpt(tmp_path, num_key_value_heads=1)
    message = "decode_context_parallel_size=2: the attention of SoftplusGPTForCausalLM"
    assert_refused(folder, message, tensor_parallel_size=2, decode_context_parallel_size=2)


def test_cascade(recipe: Path) -> None:
    with engine(recipe) as llm:
        (group, *_) = llm.llm_engine.model_executor.driver_worker.model_runner.attn_groups[0]
        builder = group.get_metadata_builder()
        assert isinstance(builder, PagedBatchBuilder)
        with pytest.raises(NotImplementedError, match="cascade"):
            builder.build(16, None)


def llama(folder: Path, **changes: Any) -> Path:
    size = {**SIZE, "intermediate_size": 128, "max_position_embeddings": 256, "pad_token_id": 0}
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(LlamaConfig(**size)).save_pretrained(folder)
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | changes))
    return folder


def test_stock_type_with_our_attention(tmp_path: Path) -> None:
    """As saved by versions without our own model types: vLLM would load a Llama with softmax."""
    folder = llama(tmp_path, attn_implementation="lssar", softplus_attention={"power": 7})
    assert_refused(folder, "was trained with the attention 'lssar', but vLLM's LlamaForCausalLM would run softmax")


def test_extended_model(tmp_path: Path) -> None:
    """vLLM would run it with its Transformers backend."""
    model = AutoModelForCausalLM.from_pretrained(llama(tmp_path))
    settings = Extension(trained=128, length=512, far_heads=[[0]] * SIZE["num_hidden_layers"], window=16, near=32)
    extended(model, settings).save_pretrained(tmp_path / "extended")
    assert_refused(tmp_path / "extended", "vLLM has no cache for an extended model")


@pytest.fixture(scope="module")
def own_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_host(tmp_path_factory.mktemp("own"), "llama", {}, "lssar", {"power": 7})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hf_overrides": {"architectures": ["LlamaForCausalLM"]}}, "vLLM's LlamaForCausalLM would run softmax"),
        (
            {"hf_overrides": {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}},
            "vLLM's LlamaForCausalLM would run softmax",
        ),
        ({"hf_overrides": {"_attn_implementation": "sdpa"}}, "must be None or a name of softplus_attention.catalog"),
        ({"model_impl": "transformers"}, "vLLM's TransformersForCausalLM would run softmax"),
        ({"model_impl": "transformers", "trust_remote_code": True}, "vLLM's TransformersForCausalLM would run softmax"),
    ],
    ids=["architecture", "type", "attention", "transformers", "remote code"],
)
def test_no_other_class_runs_it(options: dict[str, Any], message: str, own_llama: Path) -> None:
    assert_refused(own_llama, message, **options)


def test_hosts_without_a_class_here(tmp_path: Path) -> None:
    folder = save_host(tmp_path, "olmo2", {}, "lssar")
    assert_refused(folder, "trained with the attention 'lssar'.*softplus_attention serves SoftplusGPTForCausalLM, ")


def test_host_rope_that_follows_the_longest_request(tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10_000.0}
    folder = save_host(tmp_path, "llama", {"rope_parameters": rope, "max_position_embeddings": 64}, "lssar")
    assert_refused(folder, "beyond 64 tokens; use --max-model-len 64")


def test_adapters_where_the_plugin_is_not() -> None:
    """vLLM without the plugin rejects an adapter that was trained with our attention."""
    saved = mark({"peft_type": SimpleNamespace(value="LORA"), "init_lora_weights": True}, {"attention": "lssar"})
    helper = PEFTHelper(8, 8, ["q_proj"], init_lora_weights=saved["init_lora_weights"])
    with pytest.raises(ValueError, match="adapter over lssar: import softplus_attention"):
        helper.validate_legal(LoRAConfig(max_lora_rank=8))


def test_stock_models_are_left_alone(tmp_path: Path) -> None:
    folder = llama(tmp_path)
    with engine(folder) as llm:
        answers = ask(llm)
    assert_matches_transformers(answers, folder)


@pytest.mark.parametrize("allowed", [None, "0", "1"])
def test_gpu_needs_the_switch(allowed: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(plugin.UNTESTED_ON_GPU, raising=False)
    if allowed is not None:
        monkeypatch.setenv(plugin.UNTESTED_ON_GPU, allowed)
    plugin.refuse_untested_device("cpu")
    if allowed == "1":
        plugin.refuse_untested_device("cuda")
    else:
        with pytest.raises(NotImplementedError, match=f"{plugin.UNTESTED_ON_GPU}=1"):
            plugin.refuse_untested_device("cuda")
