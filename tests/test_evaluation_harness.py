"""Downstream tasks on small files in each task's own schema, against the harness's own `hf` model and by hand."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install 'softplus-attention[harness]'")

from huggingface_models import byte_tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

from softplus_attention.cli import main
from softplus_attention.commands import downstream
from softplus_attention.evaluation import harness
from softplus_attention.huggingface import SoftplusGPTConfig, SoftplusGPTForCausalLM

# Made up for the tests: no record is from a public set.
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
    return {
        "id": question,
        "question": question,
        "choices": {"text": choices, "label": list("ABCD")},
        "answerKey": "ABCD"[right],
    }


def records() -> dict[str, list[dict]]:
    """By FOLDER/TASK/SPLIT.jsonl."""
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


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    for name, rows in records().items():
        path = folder / f"{name}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Ours and a stock Llama, with random weights, as saved folders."""
    folder, tokenizer = tmp_path_factory.mktemp("models"), byte_tokenizer()
    size = {"vocab_size": 264, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    size |= {"intermediate_size": 64, "max_position_embeddings": 1024, "eos_token_id": tokenizer.eos_token_id}
    torch.manual_seed(0)
    built = {"lssar": SoftplusGPTForCausalLM(SoftplusGPTConfig(**size)), "llama": LlamaForCausalLM(LlamaConfig(**size))}
    for name, model in built.items():
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    return {name: folder / name for name in built}


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Not what is tested, and longer than all the rest: a pool of processes for a bootstrap, the list of packages."""
    monkeypatch.setenv("DISABLE_MULTIPROC", "1")
    monkeypatch.setattr(harness, "BOOTSTRAP_SAMPLES", 20)
    monkeypatch.setattr("lm_eval.evaluator.add_env_info", lambda results: None)


def values(result: dict) -> dict[tuple[str, str], float]:
    return {(row["task"], row["metric"]): row["value"] for row in result["results"]["tasks"]}


# What the stock Llama is compared on; ours on every task.
FEW = ("arc_easy", "lambada_openai")


def test_end_to_end(data, models, tmp_path, capsys):
    """One command for each model; the numbers of the harness itself; and what a second run does."""
    words = ["evaluate", "downstream", "--data", str(data), "--output", str(tmp_path), "--device", "cpu"]
    assert main([*words, str(models["lssar"])]) == 0
    assert main([*words, str(models["llama"]), "--tasks", ",".join(FEW)]) == 0
    result = json.loads((tmp_path / "downstream--lssar.json").read_text())
    assert result["complete"]
    assert result["results"]["finished"] == list(harness.USUAL)
    assert (
        (tmp_path / "downstream.csv").read_text().startswith("model,task,metric,value,standard_error,samples,shots\n")
    )
    check_every_task(result)
    check_by_hand(values(result), models["lssar"])
    for name, tasks in (("lssar", harness.USUAL), ("llama", FEW)):
        ours = values(json.loads((tmp_path / f"downstream--{name}.json").read_text()))
        theirs = of_the_harness(models[name], data, tasks)
        assert ours.keys() == theirs.keys()
        for key, value in ours.items():
            assert value == pytest.approx(theirs[key], rel=1e-4), key

    # Cut short before PIQA: only that is run.
    result["complete"] = False
    result["results"]["finished"].remove("piqa")
    result["results"]["tasks"] = [row for row in result["results"]["tasks"] if row["task"] != "piqa"]
    (tmp_path / "downstream--lssar.json").write_text(json.dumps(result))
    capsys.readouterr()
    assert main([*words, str(models["lssar"])]) == 0
    assert re.findall("lssar: (.*)", capsys.readouterr().err) == ["piqa"]
    again = json.loads((tmp_path / "downstream--lssar.json").read_text())
    assert again["complete"]
    assert ("piqa", "acc") in values(again)


def check_every_task(result: dict) -> None:
    found = values(result)
    for name in ("arc_easy", "arc_challenge", "hellaswag", "piqa", "sciq"):
        assert 0 <= found[name, "acc_norm"] <= 1
    assert found["lambada_openai", "perplexity"] > 1
    assert 0 <= found["summscreen", "rougeL"] <= 100
    parts = [found[f"mmlu_{subject}", "acc"] for subject in ("anatomy", "virology")]
    assert found["mmlu", "acc"] == pytest.approx((6 * parts[0] + 4 * parts[1]) / 10)
    samples = {row["task"]: row["samples"] for row in result["results"]["tasks"]}
    assert samples["arc_easy"] == 6


def of_the_harness(model: Path, data: Path, tasks: Sequence[str]) -> dict[tuple[str, str], float]:
    """Its own `hf` model, loaded by the harness from the folder, on the same files."""
    from lm_eval import simple_evaluate

    with harness.overrides(harness.local_data(data, tasks, 0)) as folder:
        manager = harness.task_manager(tasks, folder, {})
        found = simple_evaluate(
            model="hf", model_args={"pretrained": str(model)}, device="cpu", batch_size=3, tasks=list(tasks),
            task_manager=manager, bootstrap_iters=20, log_samples=False,
        )  # fmt: skip
    return {(row["task"], row["metric"]): row["value"] for row in harness.rows_of(found)}


def check_by_hand(found: dict[tuple[str, str], float], folder: Path) -> None:
    """ARC: the answer with the largest summed log-likelihood, and with the largest per byte."""
    model = SoftplusGPTForCausalLM.from_pretrained(folder).eval()
    tokenizer = byte_tokenizer()
    right = {"acc": 0, "acc_norm": 0}
    for question, choices, answer in QUESTIONS:
        sums = []
        for choice in choices:
            prompt, end = (tokenizer(text)["input_ids"] for text in (f"Question: {question}\nAnswer:", f" {choice}"))
            with torch.inference_mode():
                logits = model(torch.tensor([prompt + end])).logits[0].log_softmax(-1)
            sums.append(sum(logits[len(prompt) + i - 1, token].item() for i, token in enumerate(end)))
        norms = [total / len(choice) for total, choice in zip(sums, choices, strict=True)]
        right["acc"] += sums.index(max(sums)) == answer
        right["acc_norm"] += norms.index(max(norms)) == answer
    for metric, count in right.items():
        assert found["arc_easy", metric] == pytest.approx(count / len(QUESTIONS))


def test_rouge_of_known_texts():
    import importlib.util

    path = harness.OUR_TASKS / "summscreen.py"
    spec = importlib.util.spec_from_file_location("summscreen", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    scores = module.process_results({"output": "the cat sat here"}, ["the cat lay here"])
    # 3 of 4 words; 1 of 3 pairs; the longest common subsequence has 3 words.
    assert scores == pytest.approx({"rouge1": 75.0, "rouge2": 100 / 3, "rougeL": 75.0})


def test_examples_in_the_prompt_and_a_limit(data, models, tmp_path):
    words = ["evaluate", "downstream", str(models["lssar"]), "--data", str(data), "--output", str(tmp_path)]
    assert main([*words, "--tasks", "arc_easy,mmlu", "--shots", "1", "--limit", "3", "--device", "cpu"]) == 2
    (data / "mmlu" / "virology" / "dev.jsonl").write_text((data / "mmlu" / "anatomy" / "dev.jsonl").read_text())
    assert main([*words, "--tasks", "arc_easy,mmlu", "--shots", "1", "--limit", "3", "--device", "cpu"]) == 0
    rows = json.loads((tmp_path / "downstream--lssar.json").read_text())["results"]["tasks"]
    assert {(row["task"], row["samples"], row["shots"]) for row in rows if row["task"] != "mmlu"} == {
        ("arc_easy", 3, 1), ("mmlu_anatomy", 3, 1), ("mmlu_virology", 3, 1),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("files", "words", "error"),
    [
        ({}, ["--tasks", ","], "`--tasks` must be at least one name"),
        ({}, ["--tasks", "arc_easy"], "must be a folder with arc_easy/test.jsonl"),
        ({"arc_easy/test": '{"question": "q"}'}, ["--tasks", "arc_easy"], "record 1 without choices, answerKey"),
        ({"piqa/validation": "{"}, ["--tasks", "piqa"], "record 1, which is no JSON"),
        ({"piqa/validation": ""}, ["--tasks", "piqa"], "an empty file"),
        ({"mmlu/x": None}, ["--tasks", "mmlu"], "mmlu/SUBJECT/test.jsonl"),
        ({}, ["--tasks", "ruler", "--lengths", "4k"], "`--lengths` must be whole numbers above 0"),
        ({}, ["--tasks", "babilong", "--lengths", "4096,8192"], "`--lengths` must be one length for babilong"),
        ({}, ["--limit", "0"], "`--limit` must be at least 1"),
    ],
)
def test_bad_input(files, words, error, models, tmp_path, capsys):
    for name, text in files.items():
        if text is not None:
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / f"{name}.jsonl").write_text(text)
    given = ["evaluate", "downstream", str(models["lssar"]), "--data", str(tmp_path), "--output", str(tmp_path / "o")]
    assert main([*given, *words]) == 2
    assert error in capsys.readouterr().err
    assert not (tmp_path / "o").exists()


def test_the_long_context_tasks_are_listed():
    manager = harness.task_manager(["ruler", "babilong"], [], {})
    assert {"niah_single_1", "ruler_vt", "babilong_qa1"} <= set(manager.all_tasks)
    assert harness.length_words("babilong", [4096]) == {"max_seq_lengths": "4k"}
    assert harness.length_words("ruler", [4096, 8192]) == {"max_seq_lengths": [4096, 8192]}


@pytest.mark.slow
def test_ruler_on_texts_that_it_makes(models, tmp_path):
    """Its first task makes its own texts for a tokenizer and needs no data."""
    words = ["evaluate", "downstream", str(models["lssar"]), "--output", str(tmp_path), "--device", "cpu"]
    words += ["--tasks", "niah_single_1", "--lengths", "512", "--limit", "2", "--max-length", "700"]
    subprocess.run([sys.executable, "-m", "softplus_attention.cli", *words], check=True)
    result = json.loads((tmp_path / "downstream--lssar.json").read_text())
    assert values(result) == {("niah_single_1", "512"): 0.0}


@pytest.mark.slow
def test_an_unknown_task_is_named():
    """All tasks of the harness are read before one is called unknown: half a minute."""
    with pytest.raises(ValueError, match="near it: arc_easy"):
        harness.task_manager(["arc_esay"], [], {})


def test_the_default_is_what_the_harness_module_says():
    assert downstream.USUAL.split(",") == list(harness.USUAL)
    assert set(harness.USUAL) <= set(harness.TASKS)
