"""Saved models generate with a key-value cache."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_models import IDS, small_model, tiny_gpt, token_rows
from transformers import AutoModelForCausalLM, GenerationConfig, Trainer, TrainingArguments

from softplus_attention.huggingface import use_attention
from softplus_attention.huggingface.saving import save_trained

SHIPPED = Path(__file__).parents[2] / "checkpoints" / "bytes-2.7m"


def rows_per_step(model: Any, **kwargs: Any) -> list[int]:
    """How many rows each forward pass computes, for a prompt of 5 tokens and 4 new ones."""
    rows: list[int] = []
    handle = model.get_decoder().norm.register_forward_hook(lambda module, args, out: rows.append(args[0].shape[1]))
    model.generate(token_rows(1, 5), max_new_tokens=4, min_new_tokens=4, do_sample=False, **kwargs)
    handle.remove()
    return rows


CACHED, WHOLE = [5, 1, 1, 1], [5, 6, 7, 8]


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


class TestUseCache:
    def test_the_shipped_model_uses_its_cache(self) -> None:
        model = AutoModelForCausalLM.from_pretrained(SHIPPED)
        assert rows_per_step(model) == CACHED
        assert json.loads((SHIPPED / "generation_config.json").read_text())["use_cache"]

    @pytest.mark.parametrize("host", ["softplus_gpt", "llama"])
    def test_model_trained_by_trainer(self, host: str, tmp_path: Path) -> None:
        model = tiny_gpt() if host == "softplus_gpt" else use_attention(small_model("llama"), "lssar")
        data = [{"input_ids": row, "labels": row} for row in token_rows(2, 8)]
        arguments = TrainingArguments(
            output_dir=str(tmp_path / "run"), max_steps=1, gradient_checkpointing=True, report_to="none", use_cpu=True
        )
        Trainer(model=model, args=arguments, train_dataset=data).train()
        assert not model.config.use_cache
        model.generation_config.use_cache = False  # as for a model made from the trainer's config
        save_trained(model, tmp_path / "model")
        saved = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
        assert saved.config.use_cache
        assert rows_per_step(saved) == CACHED

    def test_folder_of_an_earlier_version(self, tmp_path: Path) -> None:
        tiny_gpt().save_pretrained(tmp_path)
        edit(tmp_path / "generation_config.json", use_cache=False)
        assert json.loads((tmp_path / "generation_config.json").read_text())["_from_model_config"]
        assert rows_per_step(AutoModelForCausalLM.from_pretrained(tmp_path)) == CACHED

    def test_user_choices_are_kept(self, tmp_path: Path) -> None:
        """In the generation config, in the model's config, at loading, and in the call."""
        model = tiny_gpt()
        model.generation_config.use_cache = False
        model.save_pretrained(tmp_path / "generation")
        tiny_gpt(use_cache=False).save_pretrained(tmp_path / "config")
        tiny_gpt().save_pretrained(tmp_path / "plain")
        for folder in ("generation", "config"):
            assert rows_per_step(AutoModelForCausalLM.from_pretrained(tmp_path / folder)) == WHOLE
        plain = tmp_path / "plain"
        without = GenerationConfig(use_cache=False, eos_token_id=IDS["eos_token_id"])
        assert rows_per_step(AutoModelForCausalLM.from_pretrained(plain, generation_config=without)) == WHOLE
        assert rows_per_step(AutoModelForCausalLM.from_pretrained(plain), use_cache=False) == WHOLE

    def test_generation_config_is_kept(self, tmp_path: Path) -> None:
        model = tiny_gpt()
        model.generation_config.update(use_cache=False, do_sample=True, temperature=0.5)
        model.save_pretrained(tmp_path)
        found = AutoModelForCausalLM.from_pretrained(tmp_path).generation_config
        assert (found.use_cache, found.do_sample, found.temperature) == (False, True, 0.5)

    def test_weights_are_the_same(self, tmp_path: Path) -> None:
        model = tiny_gpt()
        save_trained(model, tmp_path)
        saved = AutoModelForCausalLM.from_pretrained(tmp_path)
        assert all(torch.equal(saved.state_dict()[name], value) for name, value in model.state_dict().items())
