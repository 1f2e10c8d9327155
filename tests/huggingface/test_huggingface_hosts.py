"""Host models that need special handling, and those that raise an error."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from huggingface_models import run_python, tiny_llava
from transformers import PreTrainedConfig

import softplus_attention.huggingface as ours

TEXT = {"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
PICTURE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
PICTURE |= {"image_size": 16, "patch_size": 4}
ENCODER_DECODER = {
    "vocab_size": 99, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "attention_dropout": 0.0,
}  # fmt: skip
# Their decoders declare themselves non-causal, or have some attentions outside the interface.
HALF_CONVERTED: dict[str, dict[str, Any]] = {
    "NllbMoeForConditionalGeneration": {**ENCODER_DECODER, "num_experts": 2},
    "BigBirdPegasusForConditionalGeneration": ENCODER_DECODER,
    "PegasusXForConditionalGeneration": ENCODER_DECODER,
    "GitForCausalLM": TEXT,
}


def build(name: str, kwargs: dict[str, Any], **options: Any) -> Any:
    model = getattr(transformers, name)
    torch.manual_seed(0)
    return model._from_config(model.config_class(**kwargs), **options).eval()


@torch.no_grad()
def assert_causal(model: Callable[[torch.Tensor], Any]) -> None:
    tokens = torch.arange(2, 14)[None]
    others = tokens.clone()
    others[:, 8:] += 20
    before, after = (model(x).logits[:, :8] for x in (tokens, others))
    torch.testing.assert_close(before, after)


@pytest.mark.parametrize("name", HALF_CONVERTED)
def test_a_partly_convertible_model_is_an_error(name: str) -> None:
    build(name, HALF_CONVERTED[name])
    with pytest.raises(ValueError, match=f"attn_implementation='lssar': {name} does not support custom attention"):
        build(name, HALF_CONVERTED[name], attn_implementation="lssar")


@pytest.mark.parametrize(
    ("name", "kwargs"),
    [
        ("JetMoeForCausalLM", {"kv_channels": 8, "num_key_value_heads": 2, "num_local_experts": 4}),
        ("Gemma2ForCausalLM", {"head_dim": 8, "attn_logit_softcapping": None, "query_pre_attn_scalar": 8}),
        ("StableLmForCausalLM", {"num_key_value_heads": 4}),
    ],
)
def test_no_row_sees_later_tokens(name: str, kwargs: dict[str, Any]) -> None:
    assert_causal(build(name, {**TEXT, **kwargs}, attn_implementation="lssar"))


def test_concatenated_masks_are_dense() -> None:
    """T5Gemma2 concatenates the masks of the decoder and the encoder."""
    part = {**TEXT, "num_key_value_heads": 2, "head_dim": 8, "sliding_window": 6, "attn_logit_softcapping": None}
    picture = {**PICTURE, "model_type": "siglip_vision_model"}
    config = transformers.T5Gemma2Config(encoder={"text_config": part, "vision_config": picture}, decoder=part)
    torch.manual_seed(0)
    model = transformers.T5Gemma2ForConditionalGeneration._from_config(config, attn_implementation="lssar").eval()
    assert_causal(lambda tokens: model(input_ids=torch.arange(2, 7)[None], decoder_input_ids=tokens))


def test_a_class_whose_source_cannot_be_read() -> None:
    code = """
import softplus_attention.huggingface
from transformers import LlamaConfig, LlamaForCausalLM
class MyLlama(LlamaForCausalLM): pass
size = dict(vocab_size=99, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2)
print(MyLlama._from_config(LlamaConfig(**size), attn_implementation="lssar").config._attn_implementation)
"""
    done = run_python(code)
    assert done.stdout == "lssar\n", done.stderr


def test_to_dict_before_super_init() -> None:
    class Bare(PreTrainedConfig):
        model_type = "bare"

        def __init__(self, n: int = 1, **kwargs: Any) -> None:
            self.n = n
            self.early = str(self.to_dict())
            super().__init__(**kwargs)

    assert "'n': 3" in Bare(3).early


def names(config: PreTrainedConfig) -> dict[str, Any]:
    return {key: getattr(config, key)._attn_implementation for key in config.sub_configs}


def test_a_part_set_back_to_stock_attention_is_saved(tmp_path: Path) -> None:
    model = tiny_llava()
    ours.use_attention(model, "lssar", power=3)
    model.set_attn_implementation({"vision_config": "sdpa"})
    model.save_pretrained(tmp_path)
    loaded = transformers.LlavaForConditionalGeneration.from_pretrained(tmp_path).eval()
    assert names(loaded.config) == {"text_config": "lssar", "vision_config": "sdpa"}
    picture = torch.randn(1, 3, 8, 8)
    with torch.no_grad():
        before, after = (x.model.vision_tower(picture).last_hidden_state for x in (model, loaded))
    torch.testing.assert_close(after, before)


def test_one_attention_throughout_is_saved_as_one_name(tmp_path: Path) -> None:
    model = tiny_llava()
    ours.use_attention(model, "lssar", power=3)
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["attn_implementation"] == "lssar"
    loaded = transformers.LlavaForConditionalGeneration.from_pretrained(tmp_path)
    assert set(names(loaded.config).values()) == {"lssar"}


def test_a_part_of_a_part_comes_back(tmp_path: Path) -> None:
    text = {**TEXT, "num_key_value_heads": 2, "head_dim": 8, "model_type": "gemma"}
    picture = {**PICTURE, "model_type": "siglip_vision_model"}
    kwargs = {"image_token_index": 98, "projection_dim": 32}
    whole = transformers.PaliGemmaConfig(text_config=text, vision_config=picture, **kwargs)
    config = transformers.ColPaliConfig(vlm_config=whole, embedding_dim=16)
    requested = {"vlm_config": {"text_config": "lssar"}}
    torch.manual_seed(0)
    model = transformers.ColPaliForRetrieval._from_config(config, attn_implementation=requested).eval()
    model.save_pretrained(tmp_path)
    loaded = transformers.ColPaliForRetrieval.from_pretrained(tmp_path).eval()
    assert names(loaded.config.vlm_config) == names(model.config.vlm_config)
    assert loaded.config.vlm_config.text_config._attn_implementation == "lssar"
    tokens = torch.arange(2, 12)[None]
    with torch.no_grad():
        torch.testing.assert_close(loaded(input_ids=tokens).embeddings, model(input_ids=tokens).embeddings)
