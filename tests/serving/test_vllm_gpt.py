"""SoftplusGPT in vLLM matches transformers, in every mode of the engine."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from serving_cases import (
    PROMPTS,
    Answer,
    ask,
    assert_matches_transformers,
    engine,
    log_probabilities,
    metric,
    prompt,
    save_gpt,
    save_host,
)
from transformers import AutoModelForCausalLM
from vllm import SamplingParams
from vllm.inputs import TokensPrompt

from softplus_attention.attentions.catalog import Attention

MODELS: dict[str, dict[str, Any]] = {
    "recipe": {"power": "learned-log", "window": 32, "global_every": 2},
    "learned": {"power": "learned", "num_key_value_heads": 4, "bias": True, "tie_word_embeddings": False},
    "odd head": {"power": "learned", "head_dim": 22, "num_key_value_heads": 1},
    "by length": {"power": {"base": 3, "slope": 2, "n0": 16}, "score_scale": 2.0, "window": 16},
    "lssa": {"attention": "lssa", "positions": "none"},
    "softmax between": {"window": 32, "global_every": 2, "local_attention": "softmax"},
    "learned softmax": {"attention": "softmax-qknorm-logn-learned"},
    "alibi": {"attention": "softmax-alibi"},
    "softmax": {"attention": "softmax"},
}


@pytest.mark.parametrize("model", MODELS)
def test_matches_transformers(model: str, tmp_path: Path) -> None:
    """Four requests of unequal lengths in a batch, beyond the training length of 64."""
    folder = save_gpt(tmp_path, **MODELS[model])
    with engine(folder) as llm:
        answers = ask(llm)
    assert_matches_transformers(answers, folder)


def test_decode_path_of_gpus(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the shortcut for CPUs a step uses ``Attention.decode``, which on a GPU runs the decode kernel."""
    monkeypatch.setattr(Attention, "one_row_over_pages", lambda *_: None)
    with engine(recipe) as llm:
        answers = ask(llm)
    assert_matches_transformers(answers, recipe)


def test_sixteen_times_the_training_length(recipe: Path) -> None:
    long = [prompt(1024), prompt(900, 5)]
    with engine(recipe, max_model_len=1100) as llm:
        answers = ask(llm, long)
    assert_matches_transformers(answers, recipe, long)


def test_default_length_is_the_training_length(recipe: Path) -> None:
    with engine(recipe, max_model_len=None) as llm:
        assert llm.llm_engine.model_config.max_model_len == 64


def test_prefix_caching(recipe: Path) -> None:
    with engine(recipe, block_size=16, enable_prefix_caching=True) as llm:
        first = ask(llm, PROMPTS[:1])
        assert metric(llm, "prefix_cache_hits") == 0
        second = ask(llm, PROMPTS[3:])
        assert metric(llm, "prefix_cache_hits") == 96  # six pages of the 100 shared tokens
    assert_matches_transformers(first + second, recipe, [PROMPTS[0], PROMPTS[3]])


def test_chunked_prefill(recipe: Path, batches: list[Any]) -> None:
    with engine(recipe, max_num_batched_tokens=32, enable_chunked_prefill=True) as llm:
        answers = ask(llm)
    assert max(batch.tokens for batch in batches) <= 32
    # Later chunks of a prompt in one batch with requests that decode.
    rows = [(batch.cu_seqlens_q.diff(), batch.seq_lens) for batch in batches]
    assert any(((new > 1) & (new < seen)).any() and (new == 1).any() for new, seen in rows)
    assert_matches_transformers(answers, recipe)


def speculate(folder: Path, prompts: list[list[int]]) -> tuple[list[Answer], int, int]:
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
    with engine(folder, speculative_config=drafts) as llm:
        answers = ask(llm, prompts, tokens=24)
        return answers, metric(llm, "spec_decode_num_accepted_tokens"), metric(llm, "spec_decode_num_draft_tokens")


def test_ngram_speculation(recipe: Path) -> None:
    """Drafts from repetitive prompts. In a separate process: after vLLM imports numba for this, it cannot start another
    engine."""
    prompts = [PROMPTS[0], prompt(12, 5) * 8, prompt(7, 9) * 5]
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        answers, accepted, drafted = process.submit(speculate, recipe, prompts).result(timeout=300)
    assert 0 < accepted < drafted
    assert_matches_transformers(answers, recipe, prompts)


def test_pages_before_a_window_are_freed(recipe: Path, batches: list[Any]) -> None:
    """Local layers have their own cache group, whose pages are reused once no row can see them."""
    with engine(recipe, block_size=16, max_num_batched_tokens=48) as llm:
        groups = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_config.kv_cache_groups
        answers = ask(llm)
    assert sorted(type(group.kv_cache_spec).__name__ for group in groups) == ["FullAttentionSpec", "SlidingWindowSpec"]
    assert any((batch.block_table[batch.seq_lens > 100, 0] == 0).any() for batch in batches)
    assert_matches_transformers(answers, recipe)


def test_preempted_requests(recipe: Path) -> None:
    """With too few pages for all, some requests lose theirs and are recomputed."""
    prompts = [prompt(40, seed) for seed in range(4)]
    with engine(recipe, block_size=16, max_model_len=96, num_gpu_blocks_override=22) as llm:
        answers = ask(llm, prompts, tokens=40)
        assert metric(llm, "num_preemptions") > 0
    assert_matches_transformers(answers, recipe, prompts)


@pytest.mark.parametrize("kind", ["recipe", "llama"])
def test_half_precision(kind: str, recipe: Path, tmp_path: Path) -> None:
    """The mean error against float32 is below twice that of transformers' bfloat16."""
    ids = PROMPTS[3]
    folder = recipe if kind == "recipe" else save_host(tmp_path, "llama", {}, "lssar", {"power": 7})
    exact, half = (
        log_probabilities(AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval(), ids)[:-1]
        for dtype in (torch.float32, torch.bfloat16)
    )
    own = exact.gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    with engine(folder, dtype="bfloat16") as llm:
        scored = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
        (output,) = llm.generate(TokensPrompt(prompt_token_ids=ids), scored, use_tqdm=False)
    steps = zip(output.prompt_logprobs[1:], ids[1:], strict=True)
    served = torch.tensor([step[token].logprob for step, token in steps])
    error = (half.gather(1, torch.tensor(ids[1:])[:, None])[:, 0] - own).abs()
    assert 0 < (served - own).abs().mean() < 2 * error.mean()


@pytest.mark.parametrize("kv_heads", [2, 1])
def test_tensor_parallel(kv_heads: int, tmp_path: Path) -> None:
    """Two processes with two of the four heads each; a single key head is replicated."""
    folder = save_gpt(tmp_path, **{**MODELS["recipe"], "num_key_value_heads": kv_heads})
    with engine(folder, tensor_parallel_size=2) as llm:
        answers = ask(llm)
    assert_matches_transformers(answers, folder)
