"""runs/stability.py: it trains and measures, its page agrees with its files, and its numbers are right."""

from __future__ import annotations

import importlib
import json
import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from softplus_attention.data import prepare

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def stability() -> Iterator[ModuleType]:
    sys.path.insert(0, str(ROOT / "runs"))
    yield importlib.import_module("stability")
    sys.path.remove(str(ROOT / "runs"))


def test_the_page_agrees_with_its_files(stability: ModuleType) -> None:
    assert stability.main(["--page", "--check"]) == 0


def test_it_runs(tmp_path: Path, stability: ModuleType) -> None:
    text = " ".join(f"The {n}th line of a long story, told to {n * n} people." for n in range(300))
    (tmp_path / "train.txt").write_text(text)
    prepare([tmp_path / "train.txt"], tmp_path / "data", tokenizer="bytes", validation_fraction=0)
    command = [str(tmp_path / "data"), "--size", "smoke", "--output", str(tmp_path / "out")]
    command += ["--runs", str(tmp_path / "runs"), "--precisions", "fp32", "--rates", "1e-3", "1e4"]
    command += ["--arms", "softmax", "lssar-p15"]
    assert stability.main(command) == 0
    # In a process of its own, as it is called: what is finished is not done again.
    program = [sys.executable, str(ROOT / "runs" / "stability.py")]
    again = subprocess.run([*program, *command], capture_output=True, text=True, timeout=300)
    assert again.returncode == 0, again.stderr
    assert again.stdout.count("found") == 4
    found = {path.stem: json.loads(path.read_text()) for path in (tmp_path / "out").glob("*.json")}
    usual, high = (found[f"smoke-softmax-fp32-{rate}-seed0"] for rate in ("0.001", "10000"))
    assert 5 < usual["losses"][-1][1] < 6
    assert usual["stopped"] is None
    assert high["stopped"] or high["largest_score"] > 1000 * usual["largest_score"]
    # Cosines times log d times log N, whatever the weights are.
    bound = math.log(16) * math.log(64)
    assert 0.5 * bound < found["smoke-lssar-p15-fp32-0.001-seed0"]["largest_score"] <= bound * 1.001


def record(arm: str, rate: float, losses: list[Any], score: float | None, stopped: str | None = None) -> dict[str, Any]:
    return {
        "arm": arm, "size": "10m", "learning_rate": rate, "precision": "fp16", "seed": 0, "stopped": stopped,
        "losses": [[step, loss] for step, loss in enumerate(losses)], "largest_score": score,
        "config": {"layers": 6, "width": 384, "heads": 6, "steps": 400, "batch_size": 64, "sequence_length": 512},
        "machine": {"cpu": "a CPU", "gpu": "a GPU"}, "versions": {"torch": "2.0"}, "commit": "0123456789",
    }  # fmt: skip


def test_the_table(tmp_path: Path, stability: ModuleType) -> None:
    records = [
        record("softmax", 0.001, [9, 9, 5, 4, 3, 2, 1], 123.4),
        record("softmax", 0.01, [9, "nan"], None, "the loss became NaN"),
        record("lssar-p3", 0.01, [6, 6], 24.7),
    ]
    for number, content in enumerate(records):
        (tmp_path / f"{number}.json").write_text(json.dumps(content))
    assert stability.page_block(tmp_path).splitlines() == [
        "| **10m, fp16** | 0.001 | 0.01 |",
        "| --- | ---: | ---: |",
        "| `softmax` | 3.000 (123) | stopped: not finite |",
        "| `lssar-p3` | - | 6.000 (25) |",
        "",
        "6 layers, width 384, 6 heads, 400 steps of 64 sequences of 512 tokens, seed 0; a GPU, torch 2.0, 0123456.",
    ]
