"""The tables of a generated token's time: they agree with their files, and a file that is missing is named."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from page_cases import assert_rewritten, words
from study_cases import imported

PAGE = """By hand.
<!-- begin: decode-gpu -->
old
<!-- end: decode-gpu -->
More.
<!-- begin: decode-words -->
said
<!-- end: decode-words -->
<!-- begin: decode-run -->
made
<!-- end: decode-run -->
<!-- begin: decode-cpu -->
older
<!-- end: decode-cpu -->
"""
GPU = """\
| model | batch | context | softmax, graph | LSSAR, graph | ratio | softmax, eager | LSSAR, eager | ratio |
| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |
| gpt | 1 | 1,024 | 2.00 | 1.00 | 0.50 | 4.00 | 5.00 | 1.25 |
| gpt | 8 | 400 | 2.00 | 1.00 | 0.50 | 4.00 | 4.60 | 1.15 |
| gpt | 8 | 600 | 3.00 | 1.50 | 0.50 | 4.50 | 4.05 | 0.90 |
| gpt | 8 | 1,024 | 3.00 | 1.50 | 0.50 | 4.50 | 5.40 | 1.20 |"""
RUN = (
    "`benchmarks/decode.py`, commit 0123456, a card, torch 2, CUDA 13, transformers 5; data in "
    "[results/decode-h200.json](../results/decode-h200.json)."
)
CPU = """\
| context | softmax ms | LSSAR ms | ratio |
| --- | ---: | ---: | ---: |
| 4,096 | 75 | 72 | 0.97 |"""


@pytest.fixture(scope="module")
def page() -> Iterator[ModuleType]:
    with imported("decode_page") as module:
        yield module


def row(batch: int, context: int, way: str, softmax: float, lssar: float, ratio: float) -> dict[str, Any]:
    words = {"model": "gpt", "batch": batch, "context": context, "way": way}
    return {**words, "softmax": softmax, "lssar": lssar, "ratio": ratio}


@pytest.fixture
def folder(tmp_path: Path, page: ModuleType) -> Path:
    files = {
        "gpu": [
            row(1, 1024, "eager", 4.0, 5.0, 1.25),
            row(1, 1024, "graph", 2.0, 1.0, 0.5),
            row(8, 400, "eager", 4.0, 4.6, 1.15),
            row(8, 400, "graph", 2.0, 1.0, 0.5),
            row(8, 600, "eager", 4.5, 4.05, 0.9),
            row(8, 600, "graph", 3.0, 1.5, 0.5),
            row(8, 1024, "eager", 4.5, 5.4, 1.2),
            row(8, 1024, "graph", 3.0, 1.5, 0.5),
        ],
        "cpu": [row(1, 4096, "eager", 75.2, 72.4, 0.967)],
    }
    run = {
        "command": "benchmarks/decode.py --commit 0123456789 --output x.json", "commit": "0123456789",
        "machine": {"gpu": "a card"}, "versions": {"torch": "2", "cuda": "13", "transformers": "5"},
    }  # fmt: skip
    for name, rows in files.items():
        (tmp_path / page.FILES[name]).write_text(json.dumps({**run, "rows": rows}))
    (tmp_path / "page.md").write_text(PAGE)
    return tmp_path


def test_rewriting_and_checking(folder: Path, page: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    text = assert_rewritten(page, folder, capsys)
    said = text.split("<!-- begin: decode-words -->\n")[1].split("\n<!-- end")[0]
    assert "takes 0.5 of its time" in said
    assert "three Triton launches per layer cost 0.05 to 0.08 ms more than one of SDPA's" in said
    assert (
        "but from 600 tokens at batch 8 on, where copies of the cache count and LSSAR takes 0.90 to 1.20 of softmax's "
        "time." in said
    )
    assert text == PAGE.replace("older", CPU).replace("old", GPU).replace("said", said).replace("made", RUN)


def test_a_claim_that_does_not_hold(folder: Path, page: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    path = folder / page.FILES["gpu"]
    results = json.loads(path.read_text())
    results["rows"][0]["lssar"] = 3.9
    path.write_text(json.dumps(results))
    assert page.main(words(folder)) == 2
    assert "in eager mode LSSAR takes longer than softmax" in capsys.readouterr().err
    assert (folder / "page.md").read_text() == PAGE


def test_a_file_that_is_missing(folder: Path, page: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / page.FILES["cpu"]).unlink()
    assert page.main(words(folder)) == 2
    assert "decode-cpu.json is not there" in capsys.readouterr().err
    assert (folder / "page.md").read_text() == PAGE
