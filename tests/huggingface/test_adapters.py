"""PEFT adapters of models with our attention: loading restores the attention they were trained with, or raises."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_models import logits, run_python, small_model, tiny_llava, token_rows
from peft import AutoPeftModelForCausalLM, LoraConfig, PeftConfig, PeftModel, PromptTuningConfig, get_peft_model
from transformers import AutoModelForCausalLM, LlavaForConditionalGeneration, PreTrainedModel

from softplus_attention import PowerByLength
from softplus_attention.huggingface import set_power, use_attention
from softplus_attention.huggingface.adapters import mark

LOAD = """
import sys, torch
{before}
from peft import AutoPeftModelForCausalLM, PeftModel
from transformers import AutoModelForCausalLM
{after}
base, adapter, way, ids, out = sys.argv[1:]
if way == "auto":
    model = AutoPeftModelForCausalLM.from_pretrained(adapter)
else:
    model = AutoModelForCausalLM.from_pretrained(base)
    if way == "native":
        model.load_adapter(adapter)
    else:
        model = PeftModel.from_pretrained(model, adapter)
torch.save(model.eval()(torch.load(ids)).logits.detach(), out)
"""
IMPORT = "import softplus_attention.huggingface"
ROW = token_rows(1, 40)


def lora(**kwargs: Any) -> LoraConfig:
    return LoraConfig(target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", init_lora_weights=False, **kwargs)


def saved_base(folder: Path, family: str = "llama", attention: str = "sdpa") -> PreTrainedModel:
    small_model(family, attention).save_pretrained(folder)
    return AutoModelForCausalLM.from_pretrained(folder)


def save_adapter(folder: Path, attention: str = "lssar", adapter: Any = None, **settings: Any) -> PeftModel:
    """Save a softmax model to ``base``, and an adapter of it with another attention to ``adapter``."""
    model = get_peft_model(use_attention(saved_base(folder / "base"), attention, **settings), adapter or lora())
    model.save_pretrained(folder / "adapter")
    return model


def load_adapter(folder: Path, **kwargs: Any) -> PeftModel:
    base = AutoModelForCausalLM.from_pretrained(folder / "base")
    return PeftModel.from_pretrained(base, folder / "adapter", **kwargs)


def assert_restored(restored: Any, model: Any) -> None:
    assert logits(restored, ROW).equal(logits(model, ROW))


def load_in_new_process(tmp_path: Path, way: str, before: str, after: str) -> Any:
    torch.save(ROW, tmp_path / "ids.pt")
    places = [tmp_path / "base", tmp_path / "adapter", way, tmp_path / "ids.pt", tmp_path / "logits.pt"]
    return run_python(LOAD.format(before=before, after=after), *places)


@pytest.mark.parametrize(
    ("way", "order"),
    [("peft", (IMPORT, "")), ("auto", ("", IMPORT)), ("native", (IMPORT, ""))],
    ids=["peft, ours imported first", "auto, peft imported first", "transformers' own"],
)
def test_fresh_process_restores_attention(way: str, order: tuple[str, str], tmp_path: Path) -> None:
    model = save_adapter(tmp_path, power=7, score_scale=2.0)
    done = load_in_new_process(tmp_path, way, *order)
    assert done.returncode == 0, done.stderr
    assert torch.load(tmp_path / "logits.pt").equal(logits(model, ROW))


@pytest.mark.parametrize("way", ["peft", "native"])
def test_without_the_package_loading_raises(way: str, tmp_path: Path) -> None:
    save_adapter(tmp_path)
    done = load_in_new_process(tmp_path, way, "", "")
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert "LORA adapter over lssar: import softplus_attention.huggingface before loading it" in last


@pytest.mark.parametrize("family", ["llama", "softplus-gpt"])
def test_power_set_after_training_is_restored(family: str, tmp_path: Path) -> None:
    base = saved_base(tmp_path / "base", family, "lssar")
    model = get_peft_model(base, lora())
    before = logits(model, ROW)
    set_power(model, PowerByLength(3, 2, n0=8))
    model.save_pretrained(tmp_path / "adapter")
    assert (logits(model, ROW) - before).abs().max() > 1e-3
    assert_restored(load_adapter(tmp_path), model)


def test_parts_of_a_composite_model(tmp_path: Path) -> None:
    """Only the text model has our attention, with its own settings."""
    tiny_llava().save_pretrained(tmp_path / "base")
    base = LlavaForConditionalGeneration.from_pretrained(tmp_path / "base")
    base.set_attn_implementation({"text_config": "lssar"})
    base.config.text_config.softplus_attention = {"power": 3}
    model = get_peft_model(base, lora())
    model.save_pretrained(tmp_path / "adapter")
    fresh = LlavaForConditionalGeneration.from_pretrained(tmp_path / "base")
    restored = PeftModel.from_pretrained(fresh, tmp_path / "adapter")
    assert restored.config.vision_config._attn_implementation == "sdpa"
    assert_restored(restored, model)


def test_adapters_of_transformers_itself(tmp_path: Path) -> None:
    model = use_attention(saved_base(tmp_path / "base"), "lssa")
    model.add_adapter(lora())
    model.save_pretrained(tmp_path / "adapter")
    restored = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    restored.load_adapter(str(tmp_path / "adapter"))
    assert_restored(restored, model)


def test_prompt_tuning(tmp_path: Path) -> None:
    prompts = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    model = save_adapter(tmp_path, adapter=prompts, power=3)
    assert_restored(load_adapter(tmp_path), model)


def test_config_given_by_the_caller(tmp_path: Path) -> None:
    model = save_adapter(tmp_path, power=3)
    assert_restored(load_adapter(tmp_path, config=lora()), model)


def test_resumed_run(tmp_path: Path) -> None:
    """Trainer loads a checkpoint's adapter into an existing adapter."""
    model = save_adapter(tmp_path)
    restored = get_peft_model(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), lora())
    restored.load_adapter(str(tmp_path / "adapter"), "default", is_trainable=True)
    assert_restored(restored, model)


def test_two_attentions_in_one_model_raise(tmp_path: Path) -> None:
    for name in ("lssar", "lssa"):
        save_adapter(tmp_path / name, name)
    model = load_adapter(tmp_path / "lssar")
    with pytest.raises(ValueError, match=r"all adapters of a model share its attention, got \{'attention': 'lssa'\}"):
        model.load_adapter(str(tmp_path / "lssa" / "adapter"), "second")
    model.load_adapter(str(tmp_path / "lssar" / "adapter"), "third")


def test_base_with_other_attention_raises(tmp_path: Path) -> None:
    base = saved_base(tmp_path / "base", "softplus-gpt", "lssar")
    get_peft_model(base, lora()).save_pretrained(tmp_path / "adapter")
    other = small_model("softplus-gpt", "softmax")
    with pytest.raises(ValueError, match="trained with this model's attention"):
        PeftModel.from_pretrained(other, tmp_path / "adapter")
    file = tmp_path / "adapter" / "adapter_config.json"
    saved = json.loads(file.read_text())
    for invalid in ({"attention": "no-such"}, "no-such", {"attention": "no-such", "parts": {"__class__": {}}}):
        file.write_text(json.dumps(saved | {"softplus_attention": invalid}))
        with pytest.raises(ValueError, match="'no-such'"):
            PeftModel.from_pretrained(small_model("llama", "sdpa"), tmp_path / "adapter")


def test_adapters_over_softmax_are_unmarked(tmp_path: Path) -> None:
    model = get_peft_model(saved_base(tmp_path / "base"), lora())
    model.save_pretrained(tmp_path / "adapter")
    saved = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert saved["peft_type"] == "LORA"
    assert "softplus_attention" not in saved
    assert_restored(AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter"), model)


def test_merged_models_save_the_attention(tmp_path: Path) -> None:
    merged = save_adapter(tmp_path, power=3).merge_and_unload()
    merged.save_pretrained(tmp_path / "merged")
    assert_restored(AutoModelForCausalLM.from_pretrained(tmp_path / "merged"), merged)


@pytest.mark.parametrize("init", [True, False, "gaussian", None])
def test_marks_are_removed(init: Any, tmp_path: Path) -> None:
    """The adapter's initialisation is restored, although other programs read a marked value."""
    config = LoraConfig(init_lora_weights=True)
    config.init_lora_weights = init
    marked = mark(config.to_dict(), {"attention": "lssar"})
    assert "over lssar: import softplus_attention" in marked["init_lora_weights"]
    (tmp_path / "adapter_config.json").write_text(json.dumps(marked, default=sorted))
    found = PeftConfig.from_pretrained(tmp_path)
    assert isinstance(found, LoraConfig)
    assert found.init_lora_weights == init


def test_adapters_of_earlier_versions(tmp_path: Path) -> None:
    """They marked only the type."""
    model = save_adapter(tmp_path, power=3)
    file = tmp_path / "adapter" / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "init_lora_weights": False}))
    assert_restored(load_adapter(tmp_path), model)
