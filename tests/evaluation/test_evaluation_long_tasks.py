"""The long-context tasks BABILong and RULER: prompts from local files or generated, and results."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install 'softplus-attention[harness]'")

import harness_cases
from harness_cases import command_for, read_result, values, write

from softplus_attention.cli import main
from softplus_attention.evaluation.harness import data as harness_data
from softplus_attention.evaluation.harness import ruler as harness_ruler
from softplus_attention.evaluation.harness import tasks as harness

# Shared fixtures.
models, quick = harness_cases.models, harness_cases.quick


@pytest.fixture(scope="module")
def few_words():
    """Fewer words: at import the harness sorts 6 million pairs of words, which takes ten seconds."""
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
    # Every answer contains the empty target and none contains the other, so the accuracy is 0.5.
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


def test_long_context_tasks_are_known():
    manager = harness.task_manager(["ruler", "babilong"], [], {})
    assert {"babilong_qa1", *harness_ruler.PARTS} <= set(manager.all_tasks)
    assert harness_data.length_settings("babilong", [4096]) == {"max_seq_lengths": "4k"}
    assert harness_data.length_settings("ruler", [4096, 8192]) == {"max_seq_lengths": [4096, 8192]}


@pytest.mark.slow
def test_ruler_without_files(models, tmp_path):
    """niah_single_1 generates its prompts without data."""
    args = ["evaluate", "downstream", str(models["lssar"]), "--output", str(tmp_path), "--device", "cpu"]
    args += ["--tasks", "niah_single_1", "--lengths", "512", "--limit", "2", "--max-length", "700"]
    subprocess.run([sys.executable, "-m", "softplus_attention.cli", *args], check=True)
    result = json.loads((tmp_path / "downstream--lssar.json").read_text())
    assert values(result) == {("niah_single_1", "512"): 0.0}


def test_babilong_on_local_files(long_texts, models, tmp_path):
    args = [*command_for(long_texts, tmp_path), str(models["lssar"]), "--tasks"]
    assert main([*args, "babilong_qa1"]) == 0
    result = read_result(tmp_path, "lssar")
    assert values(result) == {("babilong_qa1", "acc"): 0.5}
    assert result["results"]["tasks"][0]["samples"] == 2
    assert main([*args, "babilong_qa2", "--lengths", "4096"]) == 0
    assert values(read_result(tmp_path, "lssar")) == {("babilong_qa2", "acc"): 1.0}
    write(long_texts / "babilong_qa1/4k.jsonl", [{"input": "", "question": "Who?", "target": "no model writes this"}])
    assert main([*args, "babilong_longctx", "--lengths", "4096"]) == 0
    assert values(read_result(tmp_path, "lssar"))["babilong_longctx", "acc"] == 0.5
    # The group uses the parts whose files exist; Parquet works too.
    import pyarrow
    import pyarrow.parquet

    rows = [json.loads(line) for line in (long_texts / "babilong_qa1/test.jsonl").read_text().splitlines()]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows[:1]), long_texts / "babilong_qa2/test.parquet")
    assert main([*args, "babilong"]) == 0
    found = values(read_result(tmp_path, "lssar"))
    assert found["babilong_qa2", "acc"] == 1.0
    assert found["babilong", "acc"] == pytest.approx(2 / 3)


def test_ruler_on_local_files(long_texts, models, tmp_path):
    """A real run of every part."""
    args = [*command_for(long_texts, tmp_path), str(models["lssar"]), "--max-length", "4096"]
    assert main([*args, "--tasks", "ruler", "--lengths", "3584", "--limit", "1"]) == 0
    result = read_result(tmp_path, "lssar")
    assert result["results"]["finished"] == list(harness_ruler.PARTS)
    found = values(result)
    assert set(found) == {(part, "3584") for part in (*harness_ruler.PARTS, "ruler")}
    parts = [value for (task, _), value in found.items() if task != "ruler"]
    assert found["ruler", "3584"] == pytest.approx(sum(parts) / 13)
    assert set(result["settings"]["data"]["ruler"]) == {"essays", "squad", "hotpotqa"}


def test_limit_is_per_length(models, tmp_path, few_words):
    args = ["evaluate", "downstream", str(models["lssar"]), "--output", str(tmp_path), "--device", "cpu"]
    assert main([*args, "--tasks", "niah_single_1", "--lengths", "512,600", "--limit", "1"]) == 0
    assert set(values(read_result(tmp_path, "lssar"))) == {("niah_single_1", "512"), ("niah_single_1", "600")}


def test_ruler_prompts_use_the_files(long_texts, models):
    sources = {name: str(long_texts / "ruler" / name) for name in ("essays.jsonl", "squad.json", "hotpotqa.json")}
    sources = {name.partition(".")[0]: path for name, path in sources.items()}
    kwargs = {"max_seq_lengths": [3584], "pretrained": str(models["lssar"]), "samples": 2, **sources}
    essay = harness_ruler.build_dataset(part="niah_single_2", **kwargs)["test"]
    assert len(essay) == 2
    assert "The mill stood by the river." in essay[0]["input"]
    assert essay[0]["outputs"][0] in essay[0]["input"]
    squad = harness_ruler.build_dataset(part="ruler_qa_squad", **kwargs)["test"]
    assert all(f"Lamp {n} is green." in squad[0]["input"] for n in range(3))
    assert (squad[1]["input"].endswith("What is lamp 1?"), squad[1]["outputs"]) == (True, ["green"])
    hotpot = harness_ruler.build_dataset(part="ruler_qa_hotpot", **kwargs)["test"]
    assert (len(hotpot), hotpot[0]["outputs"]) == (1, ["Ann"])


@pytest.mark.parametrize("part", ["niah_multivalue", "ruler_vt", "ruler_cwe", "ruler_fwe"])
def test_length_too_short_for_a_part_of_ruler(part, models, long_texts):
    """The harness alone would loop forever, sample words from an empty list, or hide the needle in one word."""
    essays = str(long_texts / "ruler/essays.jsonl")
    kwargs = {"samples": 1, "max_seq_lengths": [300], "pretrained": str(models["lssar"]), "essays": essays}
    with pytest.raises(ValueError, match=f"300 tokens are too short for {part} with this tokenizer"):
        harness_ruler.build_dataset(part=part, **kwargs)
