"""Methods by name against transformers; losses and answers against plain calls."""

from __future__ import annotations

import pytest
import torch
from extend_cases import TEXT, encode, tiny_model
from transformers import LlamaForCausalLM

from softplus_attention.extend.measuring import ask, cache_bytes, context_losses
from softplus_attention.extend.methods import (
    METHODS,
    apply_method,
    extension_of,
    parse_method,
    smallest_group,
    with_far_positions,
)
from softplus_attention.extend.needles import make_haystack
from softplus_attention.extend.ranking import Ranking

RANKING = Ranking({name: [[0.1, 0.4], [0.3, 0.2]] for name in ("mass", "needles", "text")})
SMALL = "window=20,sink=2,near=24,length=512"


@pytest.mark.parametrize(("name", "rope"), [("yarn:factor=4,length=512", "yarn"), ("ntk:factor=3", "dynamic")])
def test_rope_types_match_transformers(name: str, rope: str) -> None:
    model = tiny_model(max_position_embeddings=128)
    found = apply_method(model, parse_method(name))
    factor = 4.0 if rope == "yarn" else 3.0
    by_hand = tiny_model(
        max_position_embeddings=128,
        rope_parameters={
            "rope_type": rope,
            "factor": factor,
            "original_max_position_embeddings": 128,
            "rope_theta": 1e4,
        },
    )
    by_hand.load_state_dict(model.state_dict())
    ids = torch.tensor([TEXT[:300]])
    with torch.no_grad():
        torch.testing.assert_close(found(ids).logits, by_hand(ids).logits)
        assert (found(ids).logits - model(ids).logits).abs().max() > 0.1
    ours, theirs = (x.model.layers[0].mlp.up_proj.weight.data_ptr() for x in (found, model))
    assert ours == theirs


def test_far_positions_of_the_command() -> None:
    clip = with_far_positions(METHODS["heads"], "clip")
    assert (clip.far, clip.level, clip.log_n) == ("clip", True, "far")
    assert with_far_positions(clip, "group") == parse_method("heads:far=group")


def test_method_strings() -> None:
    model = tiny_model(max_position_embeddings=64)
    ours = extension_of(parse_method(f"heads:heads=2,{SMALL}"), model.config, RANKING)
    assert ours.far_heads == [[1], [0]]
    assert (ours.far, ours.window, ours.near, ours.trained, ours.length) == ("clip", 20, 24, 64, 512)
    grouped = extension_of(parse_method(f"selfextend:{SMALL},near=8"), model.config, None)
    assert grouped.far_heads == [[0, 1], [0, 1]]
    assert grouped.group == smallest_group(64, 512, 8) == 16
    assert 8 + (512 - 8) / 16 <= 64 * 2 / 3 < 8 + (512 - 8) / 8
    assert extension_of(parse_method(f"window:{SMALL}"), model.config, None).far_heads == [[], []]
    assert isinstance(apply_method(model, METHODS["original"]), LlamaForCausalLM)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("rerop", "`method` must be one of original.*did you mean 'rerope'"),
        ("heads:widow=3", "`method` must be with settings of.*did you mean 'window'"),
        ("heads:window=x", "`method` must be with int as window"),
        ("heads:heads=9", "`heads` must be from 0 to 4"),
        ("heads:heads=2,far=alibi", "`far` must be one of clip"),
        ("heads:heads=2,ranking=luck", "`ranking` must be best or one of"),
        ("selfextend:near=50,length=4096", "`near` must be below two thirds"),
    ],
)
def test_invalid_methods(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        extension_of(parse_method(name), tiny_model(max_position_embeddings=64).config, RANKING)


def test_context_losses_match_plain_calls() -> None:
    model, rows = tiny_model(), [TEXT[:300], TEXT[60:360]]
    found = context_losses(model, rows, 120, targets=40)
    for row, loss in zip(rows, found, strict=True):
        ids = torch.tensor([row[-120:]])
        with torch.no_grad():
            expected = torch.nn.functional.cross_entropy(model(ids).logits[0, -41:-1].float(), ids[0, -40:])
        assert loss == pytest.approx(expected.item(), rel=1e-5)


@pytest.mark.parametrize("name", ["original", f"heads:heads=2,{SMALL}"])
@pytest.mark.parametrize("at_once", [1, 2])
def test_answers_match_generate(name: str, at_once: int) -> None:
    model = apply_method(tiny_model(), parse_method(name), RANKING)
    hay = make_haystack(encode, TEXT, 390, "number", [0.2, 0.5, 0.8], 0)
    for number, question in enumerate(hay.questions):  # make the first answer what the model generates
        prompt = hay.ids + question.ids[: -question.answer]
        ids = model.generate(torch.tensor([prompt]), max_new_tokens=question.answer, do_sample=False)[0]
        if number == 0:
            question.ids[-question.answer :] = ids[len(prompt) :].tolist()
    found, size = ask(model, hay, at_once)
    assert found == [True, False, False]
    tokens, width = len(hay.ids), 8
    if name == "original":
        assert size == 2 * 2 * tokens * width * 2 * 8  # layers, key heads, keys and values, float64
    else:
        assert size == (2 * (20 + 2) + 2 * (24 + tokens + 64)) * width * 2 * 8
    assert cache_bytes(model(torch.tensor([hay.ids[:10]])).past_key_values) < size
