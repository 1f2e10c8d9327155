"""The harness's model: prompts and answers longer than its positions, batches by memory, length-dependent RoPE."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

import pytest
import torch

pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install 'softplus-attention[harness]'")

import harness_cases
from harness_cases import command_for, read_result, values, write
from huggingface_models import byte_tokenizer
from transformers import LlamaForCausalLM

from softplus_attention.cli import main
from softplus_attention.evaluation import memory
from softplus_attention.evaluation.harness.model import HarnessModel, generation_bytes, logits_bytes
from softplus_attention.evaluation.memory import TooLongError
from softplus_attention.evaluation.models import load_for_evaluation, parse_model_spec
from softplus_attention.huggingface import SoftplusGPTConfig, SoftplusGPTForCausalLM

# Shared fixtures.
data, models, quick = harness_cases.data, harness_cases.models, harness_cases.quick


def test_answers_longer_than_the_positions(data, models, tmp_path, capsys):
    """A summary has 256 tokens: rotary positions extend to it, a table of positions does not."""
    args = [*command_for(data, tmp_path), "--tasks", "piqa,summscreen", "--max-length"]
    assert main([*args[:-1], str(models["gpt2"]), str(models["short"])]) == 1
    table = capsys.readouterr().out
    assert "skipped: gpt2: summscreen: answers of up to 256 tokens do not fit into 128" in table
    assert re.search(r"^summscreen +rougeL +\d", table, re.M)
    short = read_result(tmp_path, "gpt2")
    assert (short["results"]["finished"], short["complete"]) == (["piqa"], False)
    assert [skip["task"] for skip in short["results"]["skipped"]] == ["summscreen"]
    assert {"piqa", "summscreen"} == set(read_result(tmp_path, "short")["results"]["finished"])
    # An explicit --max-length limits rotary positions too.
    assert main([*args, "128", str(models["short"])]) == 1
    assert "do not fit into 128, the --max-length" in capsys.readouterr().out


def test_choices_longer_than_the_positions(models, tmp_path):
    """The harness alone would fail an assertion; here the choice with the larger likelihood must win."""
    ends = ["so " * 60, "it was"]
    row = {"activity_label": "Work", "ctx_a": "A man", "ctx_b": "asks", "endings": ends, "label": "0", "ind": 0}
    write(tmp_path / "data/hellaswag/validation.jsonl", [row])
    assert main([*command_for(tmp_path / "data", tmp_path), str(models["short"]), "--tasks", "hellaswag"]) == 0
    model = open_saved(models["short"]).model
    context = byte_tokenizer()("Work: A man Asks")["input_ids"]
    sums = []
    for end in ends:
        ids = [*context, *byte_tokenizer()(f" {end.strip()}")["input_ids"]]
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        sums.append(sum(logits[i - 1, ids[i]].item() for i in range(len(context), len(ids))))
    assert values(read_result(tmp_path, "short"))["hellaswag", "acc"] == float(sums[0] > sums[1])


def test_max_length_beyond_the_positions(models, tmp_path, capsys):
    long = [{"goal": "word " * 60, "sol1": "yes", "sol2": "no", "label": 0}]
    write(tmp_path / "data/piqa/validation.jsonl", long)
    args = [*command_for(tmp_path / "data", tmp_path), "--tasks", "piqa", "--max-length", "1000"]
    assert main([*args, str(models["gpt2"]), str(models["short"])]) == 0
    error = capsys.readouterr().err
    assert "gpt2: --max-length 1000 is reduced to 128, the model's last position" in error
    assert "gpt2: piqa: 2 prompts longer than 128 tokens were truncated on the left" in error
    assert "short: piqa: " not in error


# ---- memory and length-dependent RoPE


@pytest.fixture
def wide():
    """A model whose logits dominate the memory."""
    size = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 16}
    return SoftplusGPTForCausalLM(SoftplusGPTConfig(vocab_size=50257, max_position_embeddings=8192, **size))


def open_saved(source):
    return load_for_evaluation(parse_model_spec(str(source)), 128, device="cpu")


def harness_model(model, source, **kwargs) -> HarnessModel:
    loaded = dataclasses.replace(open_saved(source), model=model)
    return HarnessModel(loaded, byte_tokenizer(), **{"most_rows": None, "max_length": None, **kwargs})


@pytest.mark.parametrize(
    ("free", "most_rows", "length", "rows"),
    [
        # 7000 x 50257 float32 logits and log-probabilities are 2.8 GB, and 0.6 of the free memory is used.
        (24e9, 8, 7000, 5),
        (24e9, None, 7000, 2),  # 16384 tokens per batch
        (12e9, 8, 7000, 2),
        (6e9, 8, 7000, 1),
        (24e9, 8, 70, 8),
        (24e9, None, 70, 8),
    ],
)
def test_batches_by_memory(free, most_rows, length, rows, wide, models, monkeypatch):
    monkeypatch.setattr(memory, "free_bytes", lambda device: int(free))
    model = harness_model(wide, models["short"], most_rows=most_rows)
    assert logits_bytes(wide, 7000) == 7000 * 50257 * 8
    assert model.rows_at_once(length, logits_bytes(wide, length)) == rows


def test_error_if_one_row_does_not_fit(wide, models, monkeypatch):
    monkeypatch.setattr(memory, "free_bytes", lambda device: int(4e9))
    model = harness_model(wide, models["short"])
    with pytest.raises(TooLongError, match=r"7000 tokens needs about 2.8 GB with its logits, and 4.0 GB are free"):
        model.rows_at_once(7000, logits_bytes(wide, 7000))
    # A cache of 2 x 2 x 16 floats per token, plus the logits of one token.
    assert generation_bytes(wide, 7000, 100) == 4 * 16 * 4 * 7100 + 50257 * 8


def requests_of_lengths(lengths: Sequence[int]) -> list[tuple[None, list[int], list[int]]]:
    draw = torch.Generator().manual_seed(0)
    return [(None, torch.randint(0, 255, (n,), generator=draw).tolist(), [1, 2]) for n in lengths]


def test_batch_is_halved_when_out_of_memory(models):
    source = models["short"]
    model = open_saved(source).model
    wanted = harness_model(model, source)._loglikelihood_tokens(requests_of_lengths(range(20, 32)))
    seen = []

    def fail_above_2(module, args):
        seen.append(len(args[0]))
        if len(args[0]) > 2:
            raise torch.OutOfMemoryError

    model.register_forward_pre_hook(fail_above_2)
    found = harness_model(model, source, most_rows=8)._loglikelihood_tokens(requests_of_lengths(range(20, 32)))
    assert seen == [8, 4, *[2] * 6]
    assert [value for value, _ in found] == pytest.approx([value for value, _ in wanted], rel=1e-5)
    assert [is_greedy for _, is_greedy in found] == [is_greedy for _, is_greedy in wanted]

    def fail(module, args):
        raise torch.OutOfMemoryError

    model.register_forward_pre_hook(fail)
    with pytest.raises(TooLongError, match="one sequence of 32 tokens does not fit into memory"):
        harness_model(model, source)._loglikelihood_tokens(requests_of_lengths([31]))


def test_dynamic_rope_by_own_length(models):
    """The RoPE scaling of a request depends on its own length only, not on earlier requests or its batch."""
    requests, source = requests_of_lengths([300, 150, 140, 60]), models["dynamic"]
    together = harness_model(open_saved(source).model, source, max_length=400)._loglikelihood_tokens(requests)
    for (_, context, answer), (value, _) in zip(requests, together, strict=True):
        fresh = LlamaForCausalLM.from_pretrained(source).eval()
        ids = torch.tensor([[*context, *answer]])
        with torch.no_grad():
            logits = fresh(ids[:, :-1]).logits[0].log_softmax(-1)
        assert value == pytest.approx(logits[-2:].gather(1, ids[0, -2:, None]).sum().item(), rel=1e-5)
