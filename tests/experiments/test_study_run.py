"""experiments/study/run.py: arms are trained and measured, from text to results file."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from experiments.study import run as study
from softplus_attention.data import prepare

ROOT = Path(__file__).parents[2]


def run_command(tmp_path: Path, *options: str) -> list[str]:
    """The command of the smallest study, on generated text."""
    text = " ".join(f"The {n}th line of a long story, told to {n * n} people." for n in range(400))
    prepare([written(tmp_path / "train.txt", text)], tmp_path / "data", tokenizer="bytes", validation_fraction=0)
    documents = written(tmp_path / "long.jsonl", "".join(json.dumps({"text": text[n:]}) + "\n" for n in (0, 50)))
    command = [str(tmp_path / "data"), str(documents), "--output", str(tmp_path / "out"), "--size", "smoke"]
    return [*command, "--texts", "1", "--trials", "1", *options]


def test_the_study_runs(tmp_path: Path) -> None:
    """An arm of each kind from text to results file; a second process skips the finished arms."""
    arms = ["lssar-learned-log-global3", "softmax"]
    command = run_command(tmp_path, "--arms", *arms)
    assert study.main(command) == 0
    program = [sys.executable, "-m", "experiments.study.run"]
    again = subprocess.run([*program, *command], capture_output=True, text=True, timeout=300, cwd=ROOT)
    assert again.returncode == 0, again.stderr
    assert again.stdout.splitlines() == [f"smoke-{arm}-seed0: already finished" for arm in arms]
    mixed, rotary = (json.loads((tmp_path / "out" / f"smoke-{arm}-seed0.json").read_text()) for arm in arms)
    for run in (mixed, rotary):
        lengths = run["evaluation"]["lengths"]["lengths"]
        assert [entry["length"] for entry in lengths] == [32 * multiple for multiple in (1, 2, 4, 8, 16, 32, 64)]
        assert all(5 < entry["loss"] < 6 for entry in lengths), "four steps learn nothing: the loss is about log 257"
        assert all(entry["control"]["targets"] == 16 * entry["sequences"] for entry in lengths[1:])
        far = run["evaluation"]["far_control"]
        assert [(entry["length"], entry["first"]) for entry in far] == [
            (length, length * 3 // 4) for length in (64, 128, 256, 512, 1024, 2048)
        ]
        assert far[0]["gain"] == lengths[1]["control"]["gain"], "the last quarter of 2x is half a training length"
    assert list(rotary["evaluation"]["variants"]) == ["window=32", "rope=dynamic:16", "rope=yarn:16"]
    assert [list(layer) for layer in mixed["evaluation"]["learned"]] == [["power_per_log"]] * 3
    assert mixed["config"]["window"] == 16


def test_indivisible_heads(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="a third of the 2 heads of --size smoke is not a whole number"):
        study.main(run_command(tmp_path, "--arms", "lssar-learned-log-global3-wide192"))


def test_only_some_lengths(tmp_path: Path) -> None:
    command = run_command(tmp_path, "--arms", "softmax", "--only-lengths", "--multiples", "1", "4", "--steps", "2")
    assert study.main(command) == 0
    run = json.loads((tmp_path / "out" / "smoke-softmax-seed0.json").read_text())
    found = run["evaluation"]
    assert [entry["length"] for entry in found["lengths"]["lengths"]] == [32, 128]
    assert (found["passkey"], found["inside"], found["variants"]) == ([], [], {})
    assert run["config"]["steps"] == 2
    assert run["command"].endswith("--arms softmax --seed 0 --steps 2 --only-lengths --multiples 1 4")


def written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path
