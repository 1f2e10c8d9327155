"""``generate_batch`` runs our attention and gives the tokens of ``generate``, with and without flash-attn."""

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


def make_model(name: str) -> Any:
    if name.startswith("gpt-"):
        return gpt(**(LAYERS if name == "gpt-layers" else {}))
    return small_model(name)


def generate_each(model: Any) -> list[list[int]]:
    rows = (model.generate(torch.tensor([prompt]), **GREEDY)[0, len(prompt) :] for prompt in PROMPTS)
    return [row.tolist() for row in rows]


def generate_batch(model: Any, *, eos_token_id: Any = -1, **kwargs: Any) -> list[list[int]]:
    settings = ContinuousBatchingConfig(num_blocks=64, page_size=16, **kwargs)
    greedy = GenerationConfig(**{**GREEDY, "eos_token_id": eos_token_id})
    options: dict[str, Any] = {"continuous_batching_config": settings, "progress_bar": False}
    out = model.generate_batch(PROMPTS, generation_config=greedy, **options)
    return [out[key].generated_tokens for key in sorted(out, key=lambda key: int(key.rpartition("_")[2]))]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which of the two code paths each layer took in each step."""
    seen: list[str] = []
    pages, varlen = continuous.attend_pages, continuous.Attention.varlen
    monkeypatch.setattr(continuous, "attend_pages", lambda *a, **k: seen.append("pages") or pages(*a, **k))
    monkeypatch.setattr(continuous.Attention, "varlen", lambda *a, **k: seen.append("packed") or varlen(*a, **k))
    return seen


@pytest.mark.parametrize("tokens", [512, 16], ids=["whole prompts", "pieces"])
@pytest.mark.parametrize("name", ["llama", "mistral", "qwen3", "gpt-plain", "gpt-layers"])
def test_equal_to_generate(name: str, tokens: int, calls: list[str]) -> None:
    model = make_model(name)
    assert generate_batch(model, max_batch_tokens=tokens) == generate_each(model)
    # transformers has no block table for sliding windows.
    assert set(calls) == ({"packed"} if name == "mistral" else {"packed", "pages"})


def test_it_is_not_softmax() -> None:
    model = small_model("llama")
    assert generate_batch(model) != generate_each(small_model("llama", "sdpa"))


def test_settings_of_the_config() -> None:
    model = use_attention(small_model("llama", "sdpa"), "lssar", power=2, window=9)
    plain = generate_each(small_model("llama"))
    assert generate_batch(model) == generate_each(model) != plain


@pytest.mark.parametrize("kind", ["in memory", "loaded"])
def test_with_flash_attn_installed(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unpatched transformers would switch to it, and only log that."""
    from transformers.generation.continuous_batching import continuous_api

    monkeypatch.setattr(continuous_api, "is_flash_attn_2_available", lambda **_: True)
    model = small_model("llama")
    if kind == "loaded":
        model.save_pretrained(tmp_path)
        model = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert generate_batch(model) == generate_each(model)
    assert model.config._attn_implementation == "lssar"
    with pytest.raises(Exception, match="FlashAttention2"):  # a softmax model does switch
        generate_batch(small_model("llama", "sdpa"))


def test_other_attentions_are_unchanged() -> None:
    model = small_model("llama", "sdpa")
    assert generate_batch(model) == generate_each(model)


def test_requests_share_the_pages_of_their_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each later request reuses two pages of the first."""
    found: list[int] = []
    search = continuous.PagedAttentionCache.search_prefix_match
    record = lambda *given: found.append(search(*given)) or found[-1]  # noqa: E731
    monkeypatch.setattr(continuous.PagedAttentionCache, "search_prefix_match", record)
    model = small_model("llama")
    settings = ContinuousBatchingConfig(num_blocks=64, page_size=16, max_batch_tokens=48)
    options: dict[str, Any] = {"continuous_batching_config": settings, "progress_bar": False}
    prompts = [PROMPTS[3], [*PROMPTS[3], 9], [*PROMPTS[3][:35], 8]]
    out = model.generate_batch(prompts, generation_config=GenerationConfig(**GREEDY), **options)
    want = [model.generate(torch.tensor([ids]), **GREEDY)[0, len(ids) :].tolist() for ids in prompts]
    assert [one.generated_tokens for one in out.values()] == want
    assert max(found) == 32


@pytest.mark.parametrize("name", ["llama", "gpt-layers"])
def test_stops_at_eos(name: str) -> None:
    """The EOS tokens are from the middle of each answer of ``generate``."""
    model = make_model(name)
    whole = generate_each(model)
    ends = [answer[4] for answer in whole]
    found = generate_batch(model, eos_token_id=ends)
    assert found == [answer[: 1 + min(i for i, token in enumerate(answer) if token in ends)] for answer in whole]
    assert max(map(len, found)) < GREEDY["max_new_tokens"]
