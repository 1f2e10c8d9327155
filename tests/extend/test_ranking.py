"""Head scores against finite differences and eager attention; positions of needles."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from extend_cases import TEXT, encode, tiny_model

from softplus_attention.extend import ranking
from softplus_attention.extend.needles import FORMS, make_haystack
from softplus_attention.extend.ranking import Probe, Ranking, RankingSettings, probing, rank_heads
from softplus_attention.huggingface.extension.attention import Reach

SETTINGS = RankingSettings(prompts=1, length=260, window=20, sink=2, targets=30)


@pytest.mark.parametrize("form", FORMS)
def test_positions_of_needles(form: str) -> None:
    depths = [0.9, 0.1, 0.5]
    hay = make_haystack(encode, TEXT, 390, form, depths, seed=3)
    decoded = "".join(map(chr, hay.ids))
    assert [question.depth for question in hay.questions] == sorted(depths)
    assert max(len(hay.ids) + len(question.ids) for question in hay.questions) == 390
    for question in hay.questions:
        key = "".join(map(chr, question.ids[-question.answer :])).strip()
        assert key in decoded[slice(*question.span)]
        assert decoded.count(key) == decoded[slice(*question.span)].count(key)
    assert make_haystack(encode, TEXT, 390, form, depths, seed=4).ids != hay.ids


def test_haystacks_without_room() -> None:
    with pytest.raises(ValueError, match=r"`length` must be at least .* tokens, for 2 needles, got 90"):
        make_haystack(encode, TEXT, 90, "passkey", [0.1, 0.5], 0)
    with pytest.raises(ValueError, match=r"`filler` must be at least .* tokens of text, got 5"):
        make_haystack(encode, TEXT[:5], 300, "passkey", [0.5], 0)


def test_scores_match_their_definitions(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model()
    begin = random.Random("0 0").randrange(len(TEXT) - 260 + 1)
    depth = 0.5 * (1 - 1.5 * 20 / 260)
    hay = make_haystack(encode, TEXT[begin : begin + 260], 260, "passkey", [depth], 0)
    monkeypatch.setattr(ranking, "GATES", (0.3,))
    scores = rank_heads(model, encode, [TEXT], SETTINGS).scores

    question = hay.questions[0]
    ids = torch.tensor([hay.ids + question.ids])
    with torch.no_grad():
        weights = torch.stack(tiny_model(attn_implementation="eager")(ids, output_attentions=True).attentions)[:, 0]
    answer = slice(ids.shape[1] - 1 - question.answer, ids.shape[1] - 1)
    mass = weights[:, :, answer, slice(*question.span)].sum(-1).mean(-1).view(2, 2, 2).amax(2)
    torch.testing.assert_close(torch.tensor(scores["mass"]), mass.float(), rtol=1e-4, atol=1e-6)
    rows = range(len(hay.ids) - 30, len(hay.ids) - 1)
    dropped = [sum(weights[:, :, row, key] for key in range(2, row - 19)) for row in rows]
    beyond = torch.stack([torch.as_tensor(x) for x in dropped]).mean(0).view(2, 2, 2).amax(2)
    torch.testing.assert_close(torch.tensor(scores["beyond"]), beyond.float(), rtol=1e-4, atol=1e-6)

    def losses(gates: torch.Tensor) -> tuple[float, float]:
        with torch.no_grad(), probing(model, Probe(Reach(20, 2), gates)):
            each = torch.nn.functional.cross_entropy(model(ids).logits[0, :-1], ids[0, 1:], reduction="none")
        return each[list(rows)].mean().item(), each[answer].mean().item()

    step = 1e-3
    for layer, head in ((0, 1), (1, 0)):
        ends = []
        for sign in (1, -1):
            gates = torch.full((2, 2), 0.3, dtype=torch.float64)
            gates[layer, head] += sign * step
            ends.append(losses(gates))
        for name, up, down in zip(("text", "needles"), *ends, strict=True):
            assert scores[name][layer][head] == pytest.approx((down - up) / (2 * step), rel=2e-3, abs=1e-6)
    assert model.config._attn_implementation == "sdpa"
    assert all(x.requires_grad for x in model.parameters())


def test_best_is_the_best_rank_of_three() -> None:
    found = Ranking(
        {
            "mass": [[9, 1], [5, 0]],
            "needles": [[1, 2], [9, 0]],
            "text": [[0, 1], [2, 9]],
            "beyond": [[0, 9], [0, 0]],
        }
    )
    assert found.order("mass") == [(0, 0), (1, 0), (0, 1), (1, 1)]
    assert found.order() == [(1, 0), (0, 0), (1, 1), (0, 1)]
    assert found.far_heads(3) == [[0], [0, 1]]
    with pytest.raises(ValueError, match="`ranking` must be best or one of mass"):
        found.order("other")


def test_unsuitable_texts() -> None:
    with pytest.raises(ValueError, match="`text` must be a document of at least 260 tokens"):
        rank_heads(tiny_model(), encode, [TEXT[:100]], SETTINGS)
    with pytest.raises(ValueError, match="`ranking length` must be at most the trained length, 128"):
        rank_heads(tiny_model(max_position_embeddings=128), encode, [TEXT], SETTINGS)


def test_resumes_from_saved_scores() -> None:
    model, settings = tiny_model(), replace(SETTINGS, prompts=3)
    steps: list[list[Any]] = []
    whole = rank_heads(model, encode, [TEXT], settings, progress=lambda done: steps.append(list(done)))
    assert [len(done) for done in steps] == [1, 2, 3]
    assert rank_heads(model, encode, [TEXT], settings, done=steps[1]) == whole
