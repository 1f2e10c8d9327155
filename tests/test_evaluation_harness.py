"""Downstream tasks on small files in each task's own schema, against the harness's own `hf` model and by hand."""

from __future__ import annotations

import argparse
import dataclasses
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
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from softplus_attention.cli import main
from softplus_attention.commands import downstream
from softplus_attention.evaluation import harness, harness_ruler, memory
from softplus_attention.evaluation.harness_model import HarnessModel, generation_bytes, logits_bytes
from softplus_attention.evaluation.memory import TooLongError
from softplus_attention.evaluation.models import opened, request_of
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
        write(folder / f"{name}.jsonl", rows)
    return folder


def write(path: Path, rows: Sequence[dict]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Ours and stock ones, with random weights, as saved folders; the short ones have 128 positions."""
    folder, tokenizer = tmp_path_factory.mktemp("models"), byte_tokenizer()
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
        (
            {},
            ["--tasks", "babilong", "--lengths", "1000"],
            "must be one of 1024, 2048, 4096, 8192, 16384, 32768, 65536",
        ),
        ({}, ["--tasks", "babilong"], "must be a folder with babilong_qa1/test.jsonl"),
        ({"babilong_qa1/x": None}, ["--tasks", "babilong_qa1"], "must be a folder with babilong_qa1/test.jsonl"),
        ({"babilong_qa1/test": '{"input": "", "target": ""}'}, ["--tasks", "babilong"], "record 1 without question"),
        ({}, ["--tasks", "ruler"], "a folder with ruler/essays.jsonl, which niah_single_2, niah_single_3, niah_multi"),
        ({}, ["--tasks", "ruler_qa_hotpot"], "a folder with ruler/hotpotqa.json, which ruler_qa_hotpot"),
        ({"ruler/essays": "{}"}, ["--tasks", "niah_multivalue"], "record 1 without text"),
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
    assert {"babilong_qa1", *harness_ruler.PARTS} <= set(manager.all_tasks)
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


# ---- what does not fit, and what fails


def words_for(data: Path, output: Path) -> list[str]:
    return ["evaluate", "downstream", "--data", str(data), "--output", str(output), "--device", "cpu"]


def result_of(folder: Path, name: str) -> dict:
    return json.loads((folder / f"downstream--{name}.json").read_text())


def test_answers_longer_than_the_model(data, models, tmp_path, capsys):
    """256 tokens of a summary: rotary positions go on, a table of positions does not; and its result stays."""
    words = [*words_for(data, tmp_path), "--tasks", "piqa,summscreen", "--max-length"]
    assert main([*words[:-1], str(models["gpt2"]), str(models["short"])]) == 1
    table = capsys.readouterr().out
    assert "left out: gpt2: summscreen: answers of up to 256 tokens do not fit into 128" in table
    assert re.search(r"^summscreen +rougeL +\d", table, re.M)
    short = result_of(tmp_path, "gpt2")
    assert (short["results"]["finished"], short["complete"]) == (["piqa"], False)
    assert [skip["task"] for skip in short["results"]["skipped"]] == ["summscreen"]
    assert {"piqa", "summscreen"} == set(result_of(tmp_path, "short")["results"]["finished"])
    # Asked for 128 by the user, it is 128 for ours too.
    assert main([*words, "128", str(models["short"])]) == 1
    assert "do not fit into 128, the --max-length" in capsys.readouterr().out


def test_choices_longer_than_the_model(models, tmp_path):
    """The harness asserts that a choice fits; here the choice with the larger likelihood must win."""
    ends = ["so " * 60, "it was"]
    row = {"activity_label": "Work", "ctx_a": "A man", "ctx_b": "asks", "endings": ends, "label": "0", "ind": 0}
    write(tmp_path / "data/hellaswag/validation.jsonl", [row])
    assert main([*words_for(tmp_path / "data", tmp_path), str(models["short"]), "--tasks", "hellaswag"]) == 0
    model = opened(request_of(str(models["short"])), 128, device="cpu")
    context = byte_tokenizer()("Work: A man Asks")["input_ids"]
    sums = []
    for end in ends:
        ids = [*context, *byte_tokenizer()(f" {end.strip()}")["input_ids"]]
        with torch.no_grad():
            logits = model.model(torch.tensor([ids])).logits[0].log_softmax(-1)
        sums.append(sum(logits[i - 1, ids[i]].item() for i in range(len(context), len(ids))))
    assert values(result_of(tmp_path, "short"))["hellaswag", "acc"] == float(sums[0] > sums[1])


def test_a_task_that_fails_leaves_the_others(data, models, tmp_path, capsys):
    own = tmp_path / "own"
    own.mkdir()
    (own / "broken.py").write_text("def score(doc, results):\n    raise RuntimeError('no scores today')\n")
    files = json.dumps({"test": str(data / "lambada_openai/test.jsonl")})
    (own / "broken.yaml").write_text(
        f"task: broken\ndataset_path: json\ndataset_kwargs: {{data_files: {files}}}\noutput_type: loglikelihood\n"
        "test_split: test\ndoc_to_text: '{{text}}'\ndoc_to_target: ' end'\nprocess_results: !function broken.score\n"
        "metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]\n"
    )
    words = [*words_for(data, tmp_path), str(models["lssar"]), "--tasks", "broken,piqa", "--include-path", str(own)]
    assert main(words) == 1
    said = capsys.readouterr()
    assert "left out: lssar: broken: RuntimeError: no scores today" in said.out
    assert re.search(r"^piqa +acc +\d", said.out, re.M)
    for suffix in ("csv", "png", "svg"):
        assert (tmp_path / f"downstream.{suffix}").stat().st_size
    # The same command tries it again; a change of its files starts anew.
    assert main(words) == 1
    assert re.findall("lssar: (\\w+)$", capsys.readouterr().err, re.M) == ["broken"]
    (own / "broken.py").write_text("def score(doc, results):\n    return {'acc': 1}\n")
    assert main(words) == 0
    assert re.findall("lssar: (\\w+)$", capsys.readouterr().err, re.M) == ["broken", "piqa"]


def test_a_model_that_fails_leaves_the_others(data, models, tmp_path, capsys):
    broken = tmp_path / "broken"
    broken.mkdir()
    for path in models["lssar"].iterdir():
        (broken / path.name).write_bytes(path.read_bytes()[: 300 if path.suffix == ".safetensors" else None])
    words = [*words_for(data, tmp_path / "out"), "--tasks", "piqa"]
    assert main([*words, str(models["lssar"]), str(broken)]) == 1
    said = capsys.readouterr()
    assert "broken was not measured" in said.err
    assert re.search(r"^piqa +acc +\d", said.out, re.M)
    assert main([*words, str(broken)]) == 2


def test_a_maximum_length_beyond_a_table_of_positions(models, tmp_path, capsys):
    long = [{"goal": "word " * 60, "sol1": "yes", "sol2": "no", "label": 0}]
    write(tmp_path / "data/piqa/validation.jsonl", long)
    words = [*words_for(tmp_path / "data", tmp_path), "--tasks", "piqa", "--max-length", "1000"]
    assert main([*words, str(models["gpt2"]), str(models["short"])]) == 0
    said = capsys.readouterr().err
    assert "gpt2: --max-length 1000 is cut to 128, the positions that the model has" in said
    assert "gpt2: piqa: 2 texts were longer than the model's 128 tokens allow, and lost their beginning" in said
    assert "short: piqa: " not in said


def test_summscreen_needs_data(models, tmp_path, capsys, monkeypatch):
    """Without it `datasets` would take what JSON lies in the current folder."""
    write(tmp_path / "validation.jsonl", [{"input": "mine", "output": "mine"}])
    monkeypatch.chdir(tmp_path)
    words = ["evaluate", "downstream", str(models["lssar"]), "--tasks", "summscreen", "--output", str(tmp_path / "o")]
    assert main(words) == 2
    assert "without 'summscreen' where there is no --data" in capsys.readouterr().err
    assert not (tmp_path / "o").exists()
    assert tuple(name for name in harness.USUAL if name != "summscreen") == harness.FOUND_IN_HUB


@pytest.mark.parametrize(("given", "expected"), [(None, list(harness.FOUND_IN_HUB)), ("d", list(harness.USUAL))])
def test_the_usual_tasks_with_and_without_data(given, expected):
    options = argparse.Namespace(tasks=None, data=given)
    assert downstream.names_in(options) == expected


def test_changed_data_is_measured_again(models, tmp_path, capsys):
    rows = records()["piqa/validation"]
    path = tmp_path / "data/piqa/validation.jsonl"
    words = [*words_for(tmp_path / "data", tmp_path), str(models["lssar"]), "--tasks", "piqa"]
    measured = []
    for labels in (rows, rows, [row | {"label": 1 - row["label"]} for row in rows]):
        write(path, labels)
        assert main(words) == 0
        measured.append(("lssar: piqa" in capsys.readouterr().err, values(result_of(tmp_path, "lssar"))["piqa", "acc"]))
    assert [ran for ran, _ in measured] == [True, False, True]
    assert measured[0][1] == measured[1][1] == pytest.approx(1 - measured[2][1])


# ---- memory, and positions that follow the length


@pytest.fixture
def wide():
    """A model whose logits are what needs memory."""
    size = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 16}
    return SoftplusGPTForCausalLM(SoftplusGPTConfig(vocab_size=50257, max_position_embeddings=8192, **size))


def harness_model(model, source, **words) -> HarnessModel:
    found = opened(request_of(str(source)), 128, device="cpu")
    found = dataclasses.replace(found, model=model)
    return HarnessModel(found, byte_tokenizer(), **{"most_rows": None, "max_length": None, **words})


@pytest.mark.parametrize(
    ("free", "most_rows", "length", "rows"),
    [
        # 7000 x 50257 logits and as many log-probabilities in float32 are 2.8 GB: 0.6 of what is free holds so many.
        (24e9, 8, 7000, 5),
        (24e9, None, 7000, 2),  # 16384 tokens at a time
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


def test_what_does_not_fit_is_said_with_numbers(wide, models, monkeypatch):
    monkeypatch.setattr(memory, "free_bytes", lambda device: int(4e9))
    model = harness_model(wide, models["short"])
    with pytest.raises(TooLongError, match=r"7000 tokens needs about 2.8 GB with its logits, and 4.0 GB are free"):
        model.rows_at_once(7000, logits_bytes(wide, 7000))
    # A cache of 2 x 2 x 16 floats per token, and the logits of one token.
    assert generation_bytes(wide, 7000, 100) == 4 * 16 * 4 * 7100 + 50257 * 8


def requests_of_lengths(lengths: Sequence[int]) -> list[tuple[None, list[int], list[int]]]:
    draw = torch.Generator().manual_seed(0)
    return [(None, torch.randint(0, 255, (n,), generator=draw).tolist(), [1, 2]) for n in lengths]


def test_a_batch_that_does_not_fit_is_halved(models):
    source = models["short"]
    model = opened(request_of(str(source)), 128, device="cpu").model
    wanted = harness_model(model, source)._loglikelihood_tokens(requests_of_lengths(range(20, 32)))
    seen = []

    def refuse(module, given, words=None):
        seen.append(len(given[0]))
        if len(given[0]) > 2:
            raise torch.OutOfMemoryError("8 sequences are too many")

    model.register_forward_pre_hook(refuse)
    found = harness_model(model, source, most_rows=8)._loglikelihood_tokens(requests_of_lengths(range(20, 32)))
    assert seen == [8, 4, *[2] * 6]
    assert [value for value, _ in found] == pytest.approx([value for value, _ in wanted], rel=1e-5)
    assert [is_greedy for _, is_greedy in found] == [is_greedy for _, is_greedy in wanted]

    def refuse_all(module, given):
        raise torch.OutOfMemoryError("one is too many")

    model.register_forward_pre_hook(refuse_all)
    with pytest.raises(TooLongError, match="one sequence of 32 tokens does not fit into memory"):
        harness_model(model, source)._loglikelihood_tokens(requests_of_lengths([31]))


def test_positions_stretched_by_length(models):
    """A request is measured by its own length, whatever came before it or runs beside it."""
    lengths = [300, 150, 140, 60]
    model = opened(request_of(str(models["dynamic"])), 128, device="cpu").model
    together = harness_model(model, models["dynamic"], max_length=400)._loglikelihood_tokens(
        requests_of_lengths(lengths)
    )
    for (_, context, answer), (value, _) in zip(requests_of_lengths(lengths), together, strict=True):
        fresh = LlamaForCausalLM.from_pretrained(models["dynamic"]).eval()
        ids = torch.tensor([[*context, *answer]])
        with torch.no_grad():
            logits = fresh(ids[:, :-1]).logits[0].log_softmax(-1)
        assert value == pytest.approx(logits[-2:].gather(1, ids[0, -2:, None]).sum().item(), rel=1e-5)


# ---- long texts from local files


@pytest.fixture(scope="module")
def few_words():
    """Of the harness's 6 million pairs of words, which it sorts for ten seconds when it is imported."""
    import wonderwords

    class Few(wonderwords.RandomWord):
        def __init__(self) -> None:
            super().__init__()
            self._categories = {name: words[:200] for name, words in self._categories.items()}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wonderwords, "RandomWord", Few)
        harness_ruler.needle_module()
        yield


@pytest.fixture
def long_texts(tmp_path, few_words):
    folder = tmp_path / "long"
    facts = {"input": "Mary went to the kitchen.", "question": "Where is Mary?"}
    # An empty target is in every answer, and the other in none: half of them are right.
    write(folder / "babilong_qa1/test.jsonl", [facts | {"target": ""}, facts | {"target": "no model writes this"}])
    write(folder / "babilong_qa2/4k.jsonl", [facts | {"target": ""}])
    write(folder / "ruler/essays.jsonl", [{"text": "The mill stood by the river. " * 60}, {"text": "It rained. " * 60}])
    lamps = [
        {
            "context": f"Lamp {n} is green. " * 5,
            "qas": [{"question": f"What is lamp {n}?", "is_impossible": False, "answers": [{"text": "green"}]}],
        }
        for n in range(3)
    ]
    (folder / "ruler/squad.json").write_text(json.dumps({"data": [{"paragraphs": lamps}]}))
    singers = {"question": "Who sang?", "answer": "Ann", "context": [["Ann", ["She sang."]], ["Bob", ["He ran."]]]}
    (folder / "ruler/hotpotqa.json").write_text(json.dumps([singers]))
    return folder


def test_babilong_on_local_files(long_texts, models, tmp_path):
    words = [*words_for(long_texts, tmp_path), str(models["lssar"]), "--tasks"]
    assert main([*words, "babilong_qa1"]) == 0
    result = result_of(tmp_path, "lssar")
    assert values(result) == {("babilong_qa1", "acc"): 0.5}
    assert result["results"]["tasks"][0]["samples"] == 2
    assert main([*words, "babilong_qa2", "--lengths", "4096"]) == 0
    assert values(result_of(tmp_path, "lssar")) == {("babilong_qa2", "acc"): 1.0}
    write(long_texts / "babilong_qa1/4k.jsonl", [{"input": "", "question": "Who?", "target": "no model writes this"}])
    assert main([*words, "babilong_longctx", "--lengths", "4096"]) == 0
    assert values(result_of(tmp_path, "lssar"))["babilong_longctx", "acc"] == 0.5
    # The group takes the parts that are there; Parquet is read as well.
    import pyarrow
    import pyarrow.parquet

    rows = [json.loads(line) for line in (long_texts / "babilong_qa1/test.jsonl").read_text().splitlines()]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows[:1]), long_texts / "babilong_qa2/test.parquet")
    assert main([*words, "babilong"]) == 0
    found = values(result_of(tmp_path, "lssar"))
    assert found["babilong_qa2", "acc"] == 1.0
    assert found["babilong", "acc"] == pytest.approx(2 / 3)


def test_ruler_on_local_files(long_texts, models, tmp_path):
    """Every part of it, in a real run; a random model finds nothing."""
    words = [*words_for(long_texts, tmp_path), str(models["lssar"]), "--max-length", "4096"]
    assert main([*words, "--tasks", "ruler", "--lengths", "3584", "--limit", "1"]) == 0
    result = result_of(tmp_path, "lssar")
    assert result["results"]["finished"] == list(harness_ruler.PARTS)
    found = values(result)
    assert set(found) == {(part, "3584") for part in (*harness_ruler.PARTS, "ruler")}
    parts = [value for (task, _), value in found.items() if task != "ruler"]
    assert found["ruler", "3584"] == pytest.approx(sum(parts) / 13)
    assert set(result["settings"]["data"]["ruler"]) == {"essays", "squad", "hotpotqa"}


def test_a_limit_is_of_each_length(models, tmp_path, few_words):
    words = ["evaluate", "downstream", str(models["lssar"]), "--output", str(tmp_path), "--device", "cpu"]
    assert main([*words, "--tasks", "niah_single_1", "--lengths", "512,600", "--limit", "1"]) == 0
    assert set(values(result_of(tmp_path, "lssar"))) == {("niah_single_1", "512"), ("niah_single_1", "600")}


def test_the_texts_of_ruler_come_from_the_files(long_texts, models):
    sources = {name: str(long_texts / "ruler" / name) for name in ("essays.jsonl", "squad.json", "hotpotqa.json")}
    sources = {name.partition(".")[0]: path for name, path in sources.items()}
    words = {"max_seq_lengths": [3584], "pretrained": str(models["lssar"]), "samples": 2, **sources}
    essay = harness_ruler.texts_of(part="niah_single_2", **words)["test"]
    assert len(essay) == 2
    assert "The mill stood by the river." in essay[0]["input"]
    assert essay[0]["outputs"][0] in essay[0]["input"]
    squad = harness_ruler.texts_of(part="ruler_qa_squad", **words)["test"]
    assert all(f"Lamp {n} is green." in squad[0]["input"] for n in range(3))
    assert (squad[1]["input"].endswith("What is lamp 1?"), squad[1]["outputs"]) == (True, ["green"])
    hotpot = harness_ruler.texts_of(part="ruler_qa_hotpot", **words)["test"]
    assert (len(hotpot), hotpot[0]["outputs"]) == (1, ["Ann"])


@pytest.mark.parametrize("part", ["niah_multivalue", "ruler_vt", "ruler_cwe", "ruler_fwe"])
def test_a_length_that_a_part_of_ruler_has_no_texts_of(part, models, long_texts):
    """The harness would try for ever, ask for words out of none, or hide the needle in one word."""
    essays = str(long_texts / "ruler/essays.jsonl")
    words = {"samples": 1, "max_seq_lengths": [300], "pretrained": str(models["lssar"]), "essays": essays}
    with pytest.raises(ValueError, match=f"{part} has no texts of 300 tokens with this tokenizer"):
        harness_ruler.texts_of(part=part, **words)


# ---- the figure


def test_the_figure_has_a_bar_for_each_model_and_task():
    from softplus_attention.report.downstream_figure import downstream_figure

    def row(task: str, metric: str, value: float | None, asked: str | None = None) -> dict:
        error = None if value is None else value / 10
        return {"task": task, "metric": metric, "value": value, "standard_error": error, "asked": asked or task}

    first = [row("arc_easy", "acc", 0.5), row("arc_easy", "acc_norm", 0.6), row("summscreen", "rougeL", 12.0)]
    first += [row("mmlu", "acc", 0.3), row("mmlu_anatomy", "acc", 0.2, "mmlu"), row("ruler", "4096", 0.25)]
    second = [row("arc_easy", "acc", 0.4), row("lambada_openai", "perplexity", None)]
    results = [{"model": {"name": name}, "results": {"tasks": rows}} for name, rows in (("a", first), ("b", second))]
    axes = downstream_figure(results).axes[0]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["arc_easy\nacc", "mmlu\nacc", "ruler\n4096"]
    heights = [[bar.get_height() for bar in bars] for bars in axes.containers if hasattr(bars, "patches")]
    assert heights == [[0.5, 0.3, 0.25], [0.4]]
    errors = axes.containers[0].get_segments() if hasattr(axes.containers[0], "get_segments") else None
    errors = axes.collections[0].get_segments() if errors is None else errors
    assert [(high[1] - low[1]) / 2 for low, high in errors] == pytest.approx([0.05, 0.03, 0.025])
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["a", "b"]
    assert downstream_figure([{"model": {"name": "a"}, "results": {"tasks": []}}]) is None
