"""The table of docs/stability.md: its numbers are right, and what it cannot show is said."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from page_cases import assert_rewritten, words
from study_cases import imported

PAGE = "By hand.\n<!-- begin: stability -->\nold\n<!-- end: stability -->\n"


@pytest.fixture(scope="module")
def page() -> Iterator[ModuleType]:
    with imported("stability_page") as module:
        yield module


def record(arm: str, rate: float, losses: list[Any], score: float | None, stopped: str | None = None) -> dict[str, Any]:
    return {
        "arm": arm, "size": "10m", "learning_rate": rate, "precision": "fp16", "seed": 0, "stopped": stopped,
        "losses": [[step, loss] for step, loss in enumerate(losses)], "largest_score": score,
        "config": {"layers": 6, "width": 384, "heads": 6, "steps": 400, "batch_size": 64, "sequence_length": 512},
        "machine": {"cpu": "a CPU", "gpu": "a GPU"}, "versions": {"torch": "2.0"}, "commit": "0123456789",
    }  # fmt: skip


def test_the_table(tmp_path: Path, page: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    records = [
        record("softmax", 0.001, [9, 9, 5, 4, 3, 2, 1], 123.4),
        record("softmax", 0.01, [9, "nan"], None, "the loss became NaN"),
        record("lssar-p3", 0.01, [6, 6], 24.7),
    ]
    for number, content in enumerate(records):
        (tmp_path / f"{number}.json").write_text(json.dumps(content))
    (tmp_path / "page.md").write_text(PAGE)
    assert assert_rewritten(page, tmp_path, capsys).splitlines()[2:-1] == [
        "| **10m, fp16** | 0.001 | 0.01 |",
        "| --- | ---: | ---: |",
        "| `softmax` | 3.000 (123) | stopped: not finite |",
        "| `lssar-p3` | - | 6.000 (25) |",
        "",
        "6 layers, width 384, 6 heads, 400 steps of 64 sequences of 512 tokens, seed 0; a GPU, torch 2.0, 0123456.",
    ]


def test_what_the_table_does_not_have(tmp_path: Path, page: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "page.md").write_text(PAGE)
    assert page.main(words(tmp_path)) == 2
    assert "has no runs: runs/stability.py writes them" in capsys.readouterr().err
    (tmp_path / "0.json").write_text(json.dumps(record("relu", 0.01, [6, 6], 24.7)))
    assert page.main(words(tmp_path)) == 2
    assert "has runs of relu, which the table does not have" in capsys.readouterr().err
    assert (tmp_path / "page.md").read_text() == PAGE
