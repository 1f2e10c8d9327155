"""Attention settings in the config of a host model: composite models, saving, and packing arguments."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from huggingface_models import IDS, SIZE, small_model, token_rows
from transformers import AutoModelForCausalLM, DataCollatorWithFlattening, LlamaConfig

from softplus_attention import PowerByLength
from softplus_attention.huggingface import SoftplusGPTConfig, set_power, use_attention
from softplus_attention.huggingface.attention import attention_from_config

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


class TestComposite:
    """The attention and its settings apply to the parts of a composite model, and are saved."""

    @staticmethod
    def llava(**kwargs):
        from transformers import CLIPVisionConfig, LlavaConfig

        text = LlamaConfig(
            vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
        )
        vision = CLIPVisionConfig(
            hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, image_size=8, patch_size=4
        )
        return LlavaConfig(text_config=text, vision_config=vision, image_token_index=63, **kwargs)

    def test_attention_of_one_part_is_saved(self, tmp_path):
        from transformers import LlavaForConditionalGeneration

        torch.manual_seed(0)
        model = LlavaForConditionalGeneration._from_config(self.llava(), attn_implementation={"text_config": "lssar"})
        model.save_pretrained(tmp_path)
        again = LlavaForConditionalGeneration.from_pretrained(tmp_path)
        assert again.config.text_config._attn_implementation == "lssar"
        assert again.config.vision_config._attn_implementation == "sdpa"
        ids = token_rows(1, 12) % 60
        with torch.no_grad():
            torch.testing.assert_close(again.eval()(ids).logits, model.eval()(ids).logits)

    def test_settings_at_the_top_apply_to_parts(self):
        from transformers import LlavaForConditionalGeneration

        ids, logits = token_rows(1, 12) % 60, []
        for settings in (None, {"power": 2}):
            torch.manual_seed(0)
            config = self.llava()
            config.softplus_attention = settings
            model = LlavaForConditionalGeneration._from_config(config, attn_implementation="lssar").eval()
            with torch.no_grad():
                for layer in model.model.language_model.layers:
                    layer.self_attn.v_proj.weight.mul_(20)
                logits.append(model(ids).logits)
        assert (logits[0] - logits[1]).abs().max() > 1e-4

    def changed_at_the_top(self):
        """A model whose power is changed at the top level after it was built, and its logits before and after."""
        from transformers import LlavaForConditionalGeneration

        torch.manual_seed(0)
        model = LlavaForConditionalGeneration._from_config(self.llava(), attn_implementation="lssar").eval()
        ids = token_rows(1, 12) % 60
        with torch.no_grad():
            for layer in model.model.language_model.layers:
                layer.self_attn.v_proj.weight.mul_(20)
            before = model(ids).logits
            model.config.softplus_attention = {"power": 2}
            return model, ids, before, model(ids).logits

    def test_later_changes_apply_to_parts(self, tmp_path):
        from transformers import LlavaForConditionalGeneration

        model, ids, before, after = self.changed_at_the_top()
        assert (before - after).abs().max() > 1e-4
        model.save_pretrained(tmp_path)
        again = LlavaForConditionalGeneration.from_pretrained(tmp_path).eval()
        with torch.no_grad():
            torch.testing.assert_close(again(ids).logits, after)
            again.config.softplus_attention = {}
            torch.testing.assert_close(again(ids).logits, before)
        part = again.config.text_config.to_dict()
        assert "softplus_attention" not in part
        assert json.loads(model.config.text_config.to_json_string())["softplus_attention"] == {"power": 2}

    def test_part_keeps_its_own_settings(self):
        model, ids, before, _ = self.changed_at_the_top()
        model.config.text_config.softplus_attention = {"power": 15}
        with torch.no_grad():
            torch.testing.assert_close(model(ids).logits, before)
        model.set_attn_implementation("lssar")
        assert dict(model.config.text_config.softplus_attention) == {"power": 15}

    def test_set_power_and_swap_apply_to_all_parts(self):
        model, ids, before, after = self.changed_at_the_top()
        set_power(model, 15)
        with torch.no_grad():
            torch.testing.assert_close(model(ids).logits, before)
            model.config.softplus_attention = {"power": 2}
            torch.testing.assert_close(model(ids).logits, after)
            use_attention(model, "lssar", power=15)
            torch.testing.assert_close(model(ids).logits, before)
            model.config.softplus_attention = {"power": 2}
            torch.testing.assert_close(model(ids).logits, after)
            set_power(model.model.language_model, 15)
            torch.testing.assert_close(model(ids).logits, before)

    def test_copied_config_is_independent(self):
        model, *_ = self.changed_at_the_top()
        config = copy.deepcopy(model.config)
        config.softplus_attention = {"power": 5}
        assert dict(config.text_config.softplus_attention) == {"power": 5}
        assert dict(model.config.text_config.softplus_attention) == {"power": 2}

    def test_copied_model_is_independent(self):
        model, ids, before, after = self.changed_at_the_top()
        twin = copy.deepcopy(model)
        set_power(model, 15)
        with torch.no_grad():
            torch.testing.assert_close(twin(ids).logits, after)
            twin.config.softplus_attention = {"power": 15}
            torch.testing.assert_close(twin(ids).logits, before)

    def test_other_settings_at_loading(self, tmp_path):
        from transformers import AutoConfig, LlavaForConditionalGeneration

        model, ids, before, _ = self.changed_at_the_top()
        model.save_pretrained(tmp_path)
        config = AutoConfig.from_pretrained(tmp_path)
        config.softplus_attention = {"power": 15}
        for kwargs in ({"config": config}, {"softplus_attention": {"power": 15}}):
            again = LlavaForConditionalGeneration.from_pretrained(tmp_path, **kwargs).eval()
            with torch.no_grad():
                torch.testing.assert_close(again(ids).logits, before)

    def test_part_config_is_reused(self):
        from transformers import LlavaConfig, LlavaForConditionalGeneration

        model, *_ = self.changed_at_the_top()
        parts = {"text_config": model.config.text_config, "vision_config": model.config.vision_config}
        second = LlavaConfig(**parts, image_token_index=63)
        second.softplus_attention = {"power": 7}
        made = LlavaForConditionalGeneration._from_config(second, attn_implementation="lssar")
        assert dict(made.config.text_config.softplus_attention) == {"power": 7}


@pytest.mark.parametrize("family", ["llama", "softplus-gpt"])
def test_scale_limit_in_padded_and_packed_rows(family: str) -> None:
    """Scores must stay below 80: 30 log 8 is below it, 30 log 40 is not."""
    if family == "llama":
        model = small_model(family)
        model.config.softplus_attention = {"window": 8, "score_scale": 30.0}
    else:
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(SoftplusGPTConfig(**SIZE, **IDS, window=8, score_scale=30.0)).eval()
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
