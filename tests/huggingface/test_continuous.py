"""``generate_batch`` runs our attention: the tokens of ``generate``, with flash-attn at hand and without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_models import IDS, SIZE, small_model
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

from softplus_attention.huggingface import SoftplusGPTConfig, SoftplusGPTForCausalLM, continuous, use_attention

HAS_PAGES = continuous.ATTN_TYPE_TO_ALLOCATOR is not None
pytestmark = pytest.mark.skipif(not HAS_PAGES, reason="transformers before 5.22: see test_refusals.py")
PROMPTS = [[(7 * i * i + 3 * i + s) % 120 + 3 for i in range(n)] for s, n in ((1, 37), (5, 3), (9, 21), (5, 40))]
GREEDY = {"max_new_tokens": 10, "do_sample": False, "eos_token_id": -1, "pad_token_id": 0}
LAYERS = {"window": 8, "global_every": 2, "power": "learned-log"}


def gpt(**kwargs: Any) -> SoftplusGPTForCausalLM:
    torch.manual_seed(0)
    config = SoftplusGPTConfig(**{**SIZE, **IDS, "num_key_value_heads": 2, "initializer_range": 0.2, **kwargs})
    model = SoftplusGPTForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "power" in name:
                parameter.add_(torch.rand_like(parameter))
    return model


def model_of(name: str) -> Any:
    if name.startswith("gpt-"):
        return gpt(**(LAYERS if name == "gpt-layers" else {}))
    return small_model(name)


def one_by_one(model: Any) -> list[list[int]]:
    rows = (model.generate(torch.tensor([prompt]), **GREEDY)[0, len(prompt) :] for prompt in PROMPTS)
    return [row.tolist() for row in rows]


def together(model: Any, *, eos_token_id: Any = -1, **kwargs: Any) -> list[list[int]]:
    settings = ContinuousBatchingConfig(num_blocks=64, page_size=16, **kwargs)
    greedy = GenerationConfig(**{**GREEDY, "eos_token_id": eos_token_id})
    options: dict[str, Any] = {"continuous_batching_config": settings, "progress_bar": False}
    out = model.generate_batch(PROMPTS, generation_config=greedy, **options)
    return [out[key].generated_tokens for key in sorted(out, key=lambda key: int(key.rpartition("_")[2]))]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which of the two ways each layer took in each step."""
    seen: list[str] = []
    pages, varlen = continuous.attend_pages, continuous.Attention.varlen
    monkeypatch.setattr(continuous, "attend_pages", lambda *a, **k: seen.append("pages") or pages(*a, **k))
    monkeypatch.setattr(continuous.Attention, "varlen", lambda *a, **k: seen.append("packed") or varlen(*a, **k))
    return seen


@pytest.mark.parametrize("tokens", [512, 16], ids=["whole prompts", "pieces"])
@pytest.mark.parametrize("name", ["llama", "mistral", "qwen3", "gpt-plain", "gpt-layers"])
def test_equal_to_generate(name: str, tokens: int, calls: list[str]) -> None:
    model = model_of(name)
    assert together(model, max_batch_tokens=tokens) == one_by_one(model)
    # Sliding windows have no table of pages in transformers.
    assert set(calls) == ({"packed"} if name == "mistral" else {"packed", "pages"})


def test_it_is_not_softmax() -> None:
    model = small_model("llama")
    assert together(model) != one_by_one(small_model("llama", "sdpa"))


def test_settings_of_the_config() -> None:
    model = use_attention(small_model("llama", "sdpa"), "lssar", power=2, window=9)
    plain = one_by_one(small_model("llama"))
    assert together(model) == one_by_one(model) != plain


@pytest.mark.parametrize("kind", ["in memory", "loaded"])
def test_with_flash_attention_at_hand(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers would change to it, with a line in the log."""
    from transformers.generation.continuous_batching import continuous_api

    monkeypatch.setattr(continuous_api, "is_flash_attn_2_available", lambda **_: True)
    model = small_model("llama")
    if kind == "loaded":
        model.save_pretrained(tmp_path)
        model = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert together(model) == one_by_one(model)
    assert model.config._attn_implementation == "lssar"
    with pytest.raises(Exception, match="FlashAttention2"):  # the switch is there: softmax takes it
        together(small_model("llama", "sdpa"))


def test_other_attentions_are_left_alone() -> None:
    model = small_model("llama", "sdpa")
    assert together(model) == one_by_one(model)


def test_requests_share_the_pages_of_their_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """One after another in one manager: the second finds two pages of the first, the third as many."""
    found: list[int] = []
    search = continuous.PagedAttentionCache.search_prefix_match
    note = lambda *given: found.append(search(*given)) or found[-1]  # noqa: E731
    monkeypatch.setattr(continuous.PagedAttentionCache, "search_prefix_match", note)
    model = small_model("llama")
    settings = ContinuousBatchingConfig(num_blocks=64, page_size=16, max_batch_tokens=48)
    options: dict[str, Any] = {"continuous_batching_config": settings, "progress_bar": False}
    prompts = [PROMPTS[3], [*PROMPTS[3], 9], [*PROMPTS[3][:35], 8]]
    out = model.generate_batch(prompts, generation_config=GenerationConfig(**GREEDY), **options)
    want = [model.generate(torch.tensor([ids]), **GREEDY)[0, len(ids) :].tolist() for ids in prompts]
    assert [one.generated_tokens for one in out.values()] == want
    assert max(found) == 32


@pytest.mark.parametrize("name", ["llama", "gpt-layers"])
def test_ends_at_the_end_of_text(name: str) -> None:
    """At a token that ``generate`` gives in the middle of each answer."""
    model = model_of(name)
    whole = one_by_one(model)
    ends = [answer[4] for answer in whole]
    found = together(model, eos_token_id=ends)
    assert found == [answer[: 1 + min(i for i, token in enumerate(answer) if token in ends)] for answer in whole]
    assert max(map(len, found)) < GREEDY["max_new_tokens"]
