"""Attention settings in the config of a host model: composite models, saving, and packing arguments."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from huggingface_models import logits, small_model, tiny_gpt, tiny_llava, token_rows
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DataCollatorWithFlattening,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
)

from softplus_attention import PowerByLength
from softplus_attention.huggingface import set_power, use_attention
from softplus_attention.huggingface.attention import attention_from_config

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
ROWS = token_rows(1, 12)


class TestComposite:
    """The attention and its settings apply to the parts of a composite model, and are saved."""

    @staticmethod
    def build(attention="lssar", settings=None):
        config = tiny_llava().config
        config.softplus_attention = settings
        torch.manual_seed(0)
        return LlavaForConditionalGeneration._from_config(config, attn_implementation=attention).eval()

    @pytest.fixture
    def changed(self):
        """A model whose power is changed at the top level after it was built, and its logits before and after."""
        model = self.build()
        before = logits(model, ROWS)
        model.config.softplus_attention = {"power": 2}
        return model, before, logits(model, ROWS)

    def test_attention_of_one_part_is_saved(self, tmp_path):
        model = self.build({"text_config": "lssar"})
        model.save_pretrained(tmp_path)
        loaded = LlavaForConditionalGeneration.from_pretrained(tmp_path)
        assert loaded.config.text_config._attn_implementation == "lssar"
        assert loaded.config.vision_config._attn_implementation == "sdpa"
        torch.testing.assert_close(logits(loaded, ROWS), logits(model, ROWS))

    def test_settings_at_the_top_apply_to_parts(self):
        usual, two = (logits(self.build(settings=settings), ROWS) for settings in (None, {"power": 2}))
        assert (usual - two).abs().max() > 1e-4

    def test_later_changes_apply_to_parts(self, changed, tmp_path):
        model, before, after = changed
        assert (before - after).abs().max() > 1e-4
        model.save_pretrained(tmp_path)
        loaded = LlavaForConditionalGeneration.from_pretrained(tmp_path)
        torch.testing.assert_close(logits(loaded, ROWS), after)
        loaded.config.softplus_attention = {}
        torch.testing.assert_close(logits(loaded, ROWS), before)
        assert "softplus_attention" not in loaded.config.text_config.to_dict()
        assert json.loads(model.config.text_config.to_json_string())["softplus_attention"] == {"power": 2}

    def test_part_keeps_its_own_settings(self, changed):
        model, before, _ = changed
        model.config.text_config.softplus_attention = {"power": 15}
        torch.testing.assert_close(logits(model, ROWS), before)
        model.set_attn_implementation("lssar")
        assert dict(model.config.text_config.softplus_attention) == {"power": 15}

    @pytest.mark.parametrize(
        "set_to_15",
        [
            lambda model: set_power(model, 15),
            lambda model: use_attention(model, "lssar", power=15),
            lambda model: set_power(model.model.language_model, 15),
        ],
        ids=["set_power", "use_attention", "set_power of a part"],
    )
    def test_set_power_and_swap_apply_to_all_parts(self, set_to_15, changed):
        model, before, after = changed
        set_power(model, 15)
        torch.testing.assert_close(logits(model, ROWS), before)
        model.config.softplus_attention = {"power": 2}
        torch.testing.assert_close(logits(model, ROWS), after)
        set_to_15(model)
        torch.testing.assert_close(logits(model, ROWS), before)

    def test_copied_config_is_independent(self, changed):
        model, *_ = changed
        config = copy.deepcopy(model.config)
        config.softplus_attention = {"power": 5}
        assert dict(config.text_config.softplus_attention) == {"power": 5}
        assert dict(model.config.text_config.softplus_attention) == {"power": 2}

    def test_copied_model_is_independent(self, changed):
        model, before, after = changed
        twin = copy.deepcopy(model)
        set_power(model, 15)
        torch.testing.assert_close(logits(twin, ROWS), after)
        twin.config.softplus_attention = {"power": 15}
        torch.testing.assert_close(logits(twin, ROWS), before)

    def test_other_settings_at_loading(self, changed, tmp_path):
        model, before, _ = changed
        model.save_pretrained(tmp_path)
        config = AutoConfig.from_pretrained(tmp_path)
        config.softplus_attention = {"power": 15}
        for kwargs in ({"config": config}, {"softplus_attention": {"power": 15}}):
            loaded = LlavaForConditionalGeneration.from_pretrained(tmp_path, **kwargs)
            torch.testing.assert_close(logits(loaded, ROWS), before)

    def test_part_config_is_reused(self, changed):
        model, *_ = changed
        parts = {"text_config": model.config.text_config, "vision_config": model.config.vision_config}
        second = LlavaConfig(**parts, image_token_index=63)
        second.softplus_attention = {"power": 7}
        other = LlavaForConditionalGeneration._from_config(second, attn_implementation="lssar")
        assert dict(other.config.text_config.softplus_attention) == {"power": 7}


@pytest.mark.parametrize("family", ["llama", "softplus-gpt"])
def test_scale_limit_in_padded_and_packed_rows(family: str) -> None:
    """Scores must stay below 80: 30 log 8 is below it, 30 log 40 is not."""
    if family == "llama":
        model = small_model(family)
        model.config.softplus_attention = {"window": 8, "score_scale": 30.0}
    else:
        model = tiny_gpt(window=8, score_scale=30.0)
    ids = token_rows(2, 40)
    mask = torch.ones_like(ids)
    mask[1, :15] = 0
    with torch.no_grad():
        alone = model(ids[1:, 15:]).logits
        padded = model(ids, attention_mask=mask, output_attentions=True).logits[1:, 15:]
    torch.testing.assert_close(padded, alone, rtol=1e-3, atol=1e-3)


def test_compiled_model_with_fractional_power_changes() -> None:
    model, ids = small_model("llama"), token_rows(1, 12)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    with torch.no_grad():
        for power in (3.5, 9.25, 4.75):
            set_power(model, power)
            torch.testing.assert_close(compiled(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-4)


def test_settings_with_a_power_by_length_are_saved(tmp_path) -> None:
    model = small_model("llama")
    model.config.softplus_attention = {"power": PowerByLength(3, 1, 8)}
    model.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())["softplus_attention"]
    assert saved == {"power": {"base": 3, "slope": 1, "n0": 8}}
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert attention_from_config(again.config, "lssar").spec.power == PowerByLength(3, 1, 8)


@pytest.mark.parametrize("family", ["llama", "mistral", "softplus-gpt"])
@pytest.mark.parametrize("use_cache", [False, True])
def test_packing_arguments_of_the_flattening_collator(family: str, use_cache: bool) -> None:
    """transformers' mask functions ignore these documents; with a cache it does not look at positions either."""
    model = small_model(family).eval()
    documents = [token_rows(1, 9)[0].tolist(), token_rows(1, 14, seed=1)[0].tolist()]
    collated = DataCollatorWithFlattening(return_flash_attn_kwargs=True)([{"input_ids": x} for x in documents])
    collated.pop("labels")
    with torch.no_grad():
        found = model(**collated, use_cache=use_cache).logits[0]
        apart = [model(torch.tensor([x])).logits[0] for x in documents]
    torch.testing.assert_close(found, torch.cat(apart), rtol=1e-4, atol=1e-4)


def test_invalid_packing_arguments() -> None:
    model, ids = small_model("llama").eval(), token_rows(2, 8)
    bounds = torch.tensor([0, 5, 8], dtype=torch.int32)
    with pytest.raises(ValueError, match=r"`cu_seq_lens_q` must be .*packed into a batch of 1, got a batch of 2"):
        model(ids, cu_seq_lens_q=bounds, cu_seq_lens_k=bounds)
    with pytest.raises(ValueError, match=r"`cu_seq_lens_q` must be ending at the number of packed tokens, 7"):
        model(ids[:1, :7], cu_seq_lens_q=bounds, cu_seq_lens_k=bounds)
    with pytest.raises(TypeError, match=r"`cu_seq_lens_k` must be an int32 tensor, got NoneType"):
        model(ids[:1], cu_seq_lens_q=bounds)


@pytest.mark.parametrize("score_scale", [-1, 0, float("nan"), "log"])
def test_errors_name_score_scale(score_scale: object) -> None:
    config = LlamaConfig()
    config.softplus_attention = {"score_scale": score_scale}
    with pytest.raises((ValueError, TypeError), match="`score_scale` must be"):
        attention_from_config(config, "lssar")


def test_changed_settings_are_noticed() -> None:
    """An attention is reused while settings stay equal; changes in place are noticed too."""
    config = LlamaConfig()
    assert attention_from_config(config, "lssar") is attention_from_config(LlamaConfig(), "lssar")
    config.softplus_attention = {"power": {"base": 3, "slope": 1, "n0": 8}}
    assert attention_from_config(config, "lssar").spec.power == PowerByLength(3, 1, 8)
    config.softplus_attention["power"]["base"] = 5
    assert attention_from_config(config, "lssar").spec.power == PowerByLength(5, 1, 8)
    assert attention_from_config(config, "lssar-p3").spec.power == PowerByLength(5, 1, 8)
    assert attention_from_config(LlamaConfig(), "lssar").spec.power is None
    config.softplus_attention = {"powre": 3}
    for _ in range(2):
        with pytest.raises(ValueError, match="powre"):
            attention_from_config(config, "lssar")
