"""Shared by the tests of downstream tasks: small files in each task's schema, and saved models."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from huggingface_models import byte_tokenizer
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from softplus_attention.evaluation.harness import tasks
from softplus_attention.huggingface import SoftplusGPTConfig, SoftplusGPTForCausalLM

# Invented for the tests: no record is from a public dataset.
QUESTIONS = [
    ("What falls from clouds?", ["rain", "stones", "paper", "iron"], 0),
    ("Which one is a bird?", ["trout", "sparrow", "oak", "granite"], 1),
    ("What do bees make?", ["milk", "silk", "honey", "wool"], 2),
    ("How many legs has a dog?", ["two", "six", "eight", "four"], 3),
    ("What is frozen water called?", ["ice", "steam", "sand", "oil"], 0),
    ("Where do fish live?", ["in fire", "in water", "in trees", "in books"], 1),
]
TALES = ["the cat sat on the mat and the dog lay by the door", "she opened the old red book and began to read"]


def arc(question: str, choices: list[str], right: int) -> dict:
    labelled = {"text": choices, "label": list("ABCD")}
    return {"id": question, "question": question, "choices": labelled, "answerKey": "ABCD"[right]}


def records() -> dict[str, list[dict]]:
    """Records by TASK/SPLIT."""
    hellaswag = [
        {"activity_label": "Work", "ctx_a": "A man", "ctx_b": "he asks " + q, "endings": c, "label": str(r), "ind": i}
        for i, (q, c, r) in enumerate(QUESTIONS)
    ]
    sciq = [
        {"question": q, "support": " It is known.", "correct_answer": c[r]}
        | {f"distractor{n}": w for n, w in enumerate([x for x in c if x != c[r]], 1)}
        for q, c, r in QUESTIONS
    ]
    mmlu = [{"question": q, "subject": "anatomy", "choices": c, "answer": r} for q, c, r in QUESTIONS]
    return {
        "arc_easy/test": [arc(*row) for row in QUESTIONS],
        "arc_easy/train": [arc(*row) for row in QUESTIONS[:2]],
        "arc_challenge/test": [arc(*row) for row in QUESTIONS[2:]],
        "hellaswag/validation": hellaswag,
        "piqa/validation": [{"goal": q, "sol1": c[0], "sol2": c[1], "label": min(r, 1)} for q, c, r in QUESTIONS],
        "sciq/test": sciq,
        "mmlu/anatomy/test": mmlu,
        "mmlu/anatomy/dev": mmlu[:1],
        "mmlu/virology/test": mmlu[:4],
        "lambada_openai/test": [{"text": text} for text in TALES],
        "summscreen/validation": [
            {"id": str(i), "pid": str(i), "input": t, "output": t[:20]} for i, t in enumerate(TALES)
        ],
    }


def write(path: Path, rows: Sequence[dict]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_records(folder: Path) -> Path:
    for name, rows in records().items():
        write(folder / f"{name}.jsonl", rows)
    return folder


@functools.cache
def saved_models(folder: Path) -> dict[str, Path]:
    """Saved models with random weights, ours and transformers'; all but "lssar" and "llama" have 128 positions.

    Cached for all test files that pass the same folder.
    """
    tokenizer = byte_tokenizer()
    size = {"vocab_size": 264, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    size |= {"intermediate_size": 64, "max_position_embeddings": 1024, "eos_token_id": tokenizer.eos_token_id}
    torch.manual_seed(0)
    built = {"lssar": SoftplusGPTForCausalLM(SoftplusGPTConfig(**size)), "llama": LlamaForCausalLM(LlamaConfig(**size))}
    size["max_position_embeddings"] = 128
    built["short"] = SoftplusGPTForCausalLM(SoftplusGPTConfig(**size))
    built["gpt2"] = GPT2LMHeadModel(
        GPT2Config(vocab_size=264, n_embd=32, n_layer=1, n_head=2, n_positions=128, bos_token_id=0, eos_token_id=0)
    )
    stretched = {"rope_theta": 10000.0, "rope_type": "dynamic", "factor": 4.0}
    built["dynamic"] = LlamaForCausalLM(LlamaConfig(**size, rope_parameters=stretched))
    for name, model in built.items():
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    return {name: folder / name for name in built}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_records(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return saved_models(tmp_path_factory.getbasetemp() / "harness-models")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip slow parts of the harness that are not tested: bootstrap processes and the list of packages."""
    monkeypatch.setenv("DISABLE_MULTIPROC", "1")
    monkeypatch.setattr(tasks, "BOOTSTRAP_SAMPLES", 20)
    monkeypatch.setattr("lm_eval.evaluator.add_env_info", lambda results: None)


def command_for(data: Path, output: Path) -> list[str]:
    return ["evaluate", "downstream", "--data", str(data), "--output", str(output), "--device", "cpu"]


def read_result(folder: Path, name: str) -> dict:
    """The latest result of the model; other data and settings have separate files."""
    files = folder.glob(f"downstream--{name}*.json")
    return json.loads(max(files, key=lambda path: path.stat().st_mtime_ns).read_text())


def values(result: dict) -> dict[tuple[str, str], float]:
    return {(row["task"], row["metric"]): row["value"] for row in result["results"]["tasks"]}
