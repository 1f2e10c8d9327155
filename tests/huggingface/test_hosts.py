"""Host models are saved under our own model types, which run no other attention, also in other processes."""

from __future__ import annotations

import copy
import json
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from huggingface_models import CONFIGS, GROUPED, IDS, SIZE, logits, run_python, small_model, token_rows
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Llama4Config,
    Llama4ForConditionalGeneration,
    LlamaForCausalLM,
    MixtralConfig,
    Trainer,
    TrainingArguments,
)

from softplus_attention.huggingface import SoftplusGPTForCausalLM, use_attention
from softplus_attention.huggingface.saving import model_card

ROW = token_rows(1, 30)
HOSTS = [family for family in CONFIGS if family != "softplus-gpt"]
FOREIGN = ["sdpa", "eager", "vllm", "sglang", "flash_attention_2", "paged|eager"]
LOAD = """
import json, sys, torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM

def attempt(kind, **options):
    try:
        return kind.from_pretrained(sys.argv[1], **options).eval()
    except Exception as error:
        return str(error)

sys.modules["softplus_attention"] = None
hidden = attempt(AutoModelForCausalLM, trust_remote_code=True)
del sys.modules["softplus_attention"]
untrusted = attempt(AutoModelForCausalLM, trust_remote_code=False, attn_implementation=None)
stock = attempt(LlamaForCausalLM)
model = attempt(AutoModelForCausalLM, trust_remote_code=True, attn_implementation=None)
torch.save(model(torch.load(sys.argv[1] + "/ids.pt")).logits.detach(), sys.argv[1] + "/logits.pt")
foreign = attempt(AutoModelForCausalLM, trust_remote_code=True, attn_implementation="vllm")
stock = stock if isinstance(stock, str) else ""
print(json.dumps([hidden, untrusted, foreign, stock, model.config.model_type]))
"""


def saved_config(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    use_attention(small_model("llama", "sdpa"), "lssar", power=3).save_pretrained(tmp_path / "llama")
    return tmp_path / "llama"


def to_old_format(folder: Path) -> Path:
    """As saved by earlier versions: the stock type with the attention's name."""
    config = saved_config(folder)
    config |= {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    del config["auto_map"]
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("family", HOSTS)
def test_saved_under_our_type(family: str, tmp_path: Path) -> None:
    model = small_model(family)
    model.save_pretrained(tmp_path)
    config = saved_config(tmp_path)
    assert config["model_type"] == f"softplus_{model.config.model_type}"
    assert config["architectures"] == [f"Softplus{type(model).__name__}"]
    for options in ({}, {"attn_implementation": None}):
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path, **options)
        assert type(loaded).__name__ == config["architectures"][0]
        assert isinstance(loaded, type(model))
        assert logits(loaded, ROW).equal(logits(model, ROW))
    again = tmp_path / "again"
    loaded.save_pretrained(again)
    assert saved_config(again) == config


@pytest.mark.parametrize("name", FOREIGN)
def test_no_other_attention(name: str, llama: Path) -> None:
    message = "`attn_implementation` must be None or a name of softplus_attention.catalog"
    with pytest.raises(ValueError, match=message):
        AutoModelForCausalLM.from_pretrained(llama, attn_implementation=name)
    model = AutoModelForCausalLM.from_pretrained(llama)
    with pytest.raises(ValueError, match=message):
        model.set_attn_implementation(name)
    with pytest.raises(ValueError, match=message):  # as inference engines do
        AutoConfig.from_pretrained(llama)._attn_implementation = name
    assert model.config._attn_implementation == "lssar"


def test_other_catalogue_attention(llama: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(llama, attn_implementation="lssar-p3")
    assert model.config._attn_implementation == "lssar-p3"
    same = AutoModelForCausalLM.from_pretrained(llama)
    assert logits(model, ROW).equal(logits(same, ROW))
    assert use_attention(model, "lssa").config._attn_implementation == "lssa"
    assert not logits(model, ROW).equal(logits(same, ROW))


@pytest.mark.parametrize("options", [{}, {"attn_implementation": None}])
def test_old_checkpoints(options: dict[str, Any], llama: Path) -> None:
    new = AutoModelForCausalLM.from_pretrained(llama)
    model = AutoModelForCausalLM.from_pretrained(to_old_format(llama), **options)
    assert type(model).__name__ == "LlamaForCausalLM"
    assert logits(model, ROW).equal(logits(new, ROW))
    model.save_pretrained(llama)
    assert saved_config(llama)["model_type"] == "softplus_llama"
    assert saved_config(llama)["softplus_attention"] == {"power": 3}


def test_loaded_with_the_host_class(llama: Path) -> None:
    model = LlamaForCausalLM.from_pretrained(llama)
    assert model.config.model_type == "llama"
    assert model.config.architectures == ["LlamaForCausalLM"]
    assert logits(model, ROW).equal(logits(AutoModelForCausalLM.from_pretrained(llama), ROW))


def test_settings_of_a_config(llama: Path) -> None:
    """A config that is copied, pickled, made from a dictionary, or made by its class."""
    config = AutoConfig.from_pretrained(llama)
    kind = type(config)
    same = copy.deepcopy(config), pickle.loads(pickle.dumps(config)), kind.from_dict(config.to_dict())
    assert [one.to_dict() for one in same] == [config.to_dict()] * 3
    assert {one._attn_implementation for one in (*same, kind())} == {"lssar"}
    assert kind(attn_implementation="lssa").to_dict()["attn_implementation"] == "lssa"


@pytest.mark.parametrize("family", ["llama", "softplus-gpt"])
def test_process_that_does_not_import_us(family: str, tmp_path: Path) -> None:
    """It gets our attention, or an error."""
    model = small_model(family)
    model.save_pretrained(tmp_path)
    torch.save(ROW, tmp_path / "ids.pt")
    done = run_python(LOAD, tmp_path)
    assert done.returncode == 0, done.stderr
    hidden, untrusted, foreign, stock, found = json.loads(done.stdout.splitlines()[-1])
    assert "pip install 'softplus-attention[huggingface]'" in hidden
    assert "`trust_remote_code=True`" in untrusted
    assert "`attn_implementation` must be None or" in foreign
    assert found == type(model.config).model_type.replace("llama", "softplus_llama")
    if family == "llama":
        assert '`attn_implementation="lssar"` is not supported' in stock.replace("Specified ", "")
    torch.testing.assert_close(torch.load(tmp_path / "logits.pt"), logits(model, ROW))


def test_importing_imports_no_host() -> None:
    code = """
import sys, softplus_attention.huggingface
print([name for name in sys.modules if "modeling_mixtral" in name or "modeling_bert" in name])
"""
    assert run_python(code).stdout == "[]\n"


def test_weights_renamed_by_the_host(tmp_path: Path) -> None:
    """Mixtral's experts are separate in the checkpoint and one tensor in the model."""
    size = {"vocab_size": 128, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    config = MixtralConfig(**size, num_attention_heads=4, num_key_value_heads=2, num_local_experts=2)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="lssar")
    model.save_pretrained(tmp_path)
    loaded, report = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert logits(loaded, ROW).equal(logits(model, ROW))


@pytest.mark.parametrize("family", ["llama", "gpt2", "softplus-gpt"])
def test_peft_knows_the_targets(family: str, tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    small_model(family).save_pretrained(tmp_path)
    adapted = get_peft_model(AutoModelForCausalLM.from_pretrained(tmp_path), LoraConfig(task_type="CAUSAL_LM"))
    if family != "softplus-gpt":
        stock = get_peft_model(small_model(family, "sdpa"), LoraConfig(task_type="CAUSAL_LM"))
        assert adapted.peft_config["default"].target_modules == stock.peft_config["default"].target_modules
    assert adapted.peft_config["default"].target_modules


@pytest.mark.parametrize("family", ["llama", "softplus-gpt"])
def test_trainer_shifts_smoothed_labels(family: str, tmp_path: Path) -> None:
    small_model(family).save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    arguments = TrainingArguments(output_dir=str(tmp_path), label_smoothing_factor=0.1, report_to="none", use_cpu=True)
    rows = token_rows(2, 12)
    loss = Trainer(model=model, args=arguments).compute_loss(model, {"input_ids": rows, "labels": rows.clone()})
    with torch.no_grad():
        log_p = model(rows).logits[:, :-1].log_softmax(-1)
    right = log_p.gather(-1, rows[:, 1:, None]).mean()
    assert loss.item() == pytest.approx(-(0.9 * right + 0.1 * log_p.mean()).item(), rel=1e-5)


def test_lm_eval_knows_the_type(llama: Path, caplog: pytest.LogCaptureFixture) -> None:
    huggingface = pytest.importorskip("lm_eval.models.huggingface")
    config = AutoConfig.from_pretrained(llama)
    holder = SimpleNamespace(backend=None, AUTO_MODEL_CLASS=None)
    huggingface.HFLM._get_backend(holder, config=config, backend="default", trust_remote_code=False)
    assert holder.AUTO_MODEL_CLASS is AutoModelForCausalLM
    assert "neither" not in caplog.text


class TestCard:
    def test_written_with_the_model(self, llama: Path) -> None:
        card = (llama / "README.md").read_text()
        assert "| Attention | lssar |" in card
        assert "| Power | 3 |" in card
        assert 'AutoModelForCausalLM.from_pretrained("llama")' in card

    def test_existing_card_is_kept(self, llama: Path) -> None:
        (llama / "README.md").write_text("mine")
        AutoModelForCausalLM.from_pretrained(llama).save_pretrained(llama)
        assert (llama / "README.md").read_text() == "mine"

    def test_contents(self) -> None:
        config = SoftplusGPTForCausalLM.config_class()
        card = model_card(config, "mine", about="About it.", base="some/model", facts={"Validation loss": "1.5000"})
        assert {"About it.", "| Made from | some/model |", "| Validation loss | 1.5000 |"} <= set(card.splitlines())
        assert "| Context length | 1024 |" in card

    def test_stock_models_are_saved_as_by_transformers(self, tmp_path: Path) -> None:
        small_model("llama", "sdpa").save_pretrained(tmp_path)
        assert not (tmp_path / "README.md").exists()
        assert saved_config(tmp_path)["model_type"] == "llama"
        assert "attn_implementation" not in saved_config(tmp_path)


def test_text_model_of_a_composite_model(tmp_path: Path) -> None:
    """AutoModelForCausalLM loads it from the part's config, which inherits the settings of the whole model."""
    text = {**SIZE, **IDS, **GROUPED, "intermediate_size_mlp": 96, "head_dim": 16, "num_local_experts": 2}
    vision = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 256}
    vision |= {"image_size": 28, "patch_size": 14, "vision_output_dim": 64}
    vision |= {"projector_input_dim": 64, "projector_output_dim": 64}
    torch.manual_seed(0)
    config = Llama4Config(text_config={**text, "initializer_range": 0.2}, vision_config=vision)
    whole = Llama4ForConditionalGeneration(config)
    softmax = logits(whole, ROW)
    use_attention(whole, "lssar", power=3).save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(model).__name__ == "SoftplusLlama4ForCausalLM"
    torch.testing.assert_close(logits(model, ROW), logits(whole, ROW))
    assert (logits(model, ROW) - softmax).abs().max() > 1e-2
