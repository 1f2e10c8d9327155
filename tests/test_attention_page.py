"""The GPU tables of docs/performance.md: they agree with their file, and say what is met by the worst of the rows."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from page_cases import assert_rewritten, words
from study_cases import imported

NAMES = ("attention-d64", "attention-d128", "attention-compiled", "attention-decode", "attention-goals")
PAGE = "By hand.\n" + "\n".join(f"<!-- begin: {name} -->\nold\n<!-- end: {name} -->" for name in NAMES) + "\n"
D64 = """\
|  | T = 1024 | ratio | T = 4096 | ratio | step MiB, T = 1024 |
| --- | ---: | ---: | ---: | ---: | ---: |
| SDPA, FlashAttention-2 | 1 / 2 | 1.00 | 2 / 4 | 1.00 | 291 |
| LSSAR, p = 15 | 1.5 / 3 | 1.50 | 3 / 6.9 | 1.65 | 255 |
| LSSA | 0.5 / 2 | 0.83 | 1 / 4 | 0.83 | 255 |"""
DECODE = """\
|  | 1,024 | 32,768 |
| --- | ---: | ---: |
| SDPA, cuDNN | 0.01 (1.00) | 0.2 (1.00) |
| SDPA, FlashAttention-2 | 0.01 (1.00) | 0.2 (1.00) |
| FlexAttention, softmax | 0.04 (4.00) | 0.8 (4.00) |
| LSSAR, p = 15, cache of unit keys | 0.02 (2.00) | 0.17 (0.85) |
| LSSAR, p = 15, cache of raw keys | 0.03 (3.00) | 0.4 (2.00) |"""
COMPILED = """\
|  | T = 1024 | ratio | step MiB, T = 1024 |
| --- | ---: | ---: | ---: |
| FlexAttention, LSSAR in two passes, forward only | 10 | 10.00 |  |
| reference, compiled | 12 / 18 | 10.00 | 10,116 |"""


@pytest.fixture(scope="module")
def page() -> Iterator[ModuleType]:
    with imported("attention_page") as module:
        yield module


def step(name: str, d: int, length: int, forward: float, backward: float, mib: float, base: float) -> dict[str, Any]:
    """A row as the benchmark derives it; the baseline takes base forward and twice that backward."""
    total = forward + backward
    return {
        "section": "train", "status": "ok", "contender": name, "head_dim": d, "length": length, "batch": 4,
        "step_mib": mib,
        "forward_ms": forward, "backward_ms": backward, "total_ms": total, "ratio": total / base / 3,
        "forward_ratio": forward / base, "step_ratio": mib / 291,
    }  # fmt: skip


def decoded(name: str, length: int, ms: float, base: float) -> dict[str, Any]:
    words = {"section": "decode", "status": "ok", "contender": name, "head_dim": 128, "length": length}
    return {**words, "forward_ms": ms, "forward_ratio": ms / base}


@pytest.fixture
def folder(tmp_path: Path, page: ModuleType) -> Path:
    rows = [{"section": "train", "status": "error", "contender": "adasplash-2", "head_dim": 64, "length": 1024}]
    for d in (64, 128):
        for length, base, backward in ((1024, 1.0, 3.0), (4096, 2.0, 6.9)):
            rows += [
                step("sdpa flash", d, length, base, 2 * base, 291, base),
                step("lssar p=15", d, length, 1.5 * base, backward, 255, base),
                step("lssa", d, length, 0.5 * base, 2 * base, 255, base),
            ]
    for length, base, times in ((1024, 0.01, (1, 1, 4, 2, 3)), (32768, 0.2, (1, 1, 4, 0.85, 2))):
        names = ("sdpa cudnn", "sdpa flash", "flex softmax", "lssar p=15 unit keys", "lssar p=15")
        rows += [decoded(name, length, base * x, base) for name, x in zip(names, times, strict=True)]
    rows.append(step("reference compiled", 64, 1024, 12.0, 18.0, 10116, 1.0) | {"section": "compile", "batch": 3})
    flex = {"section": "compile", "status": "ok", "contender": "flex lssar p=15", "head_dim": 64, "length": 1024}
    rows.append(flex | {"forward_ms": 10.0, "forward_ratio": 10.0})
    (tmp_path / page.FILE).write_text(json.dumps({"rows": rows}))
    (tmp_path / "page.md").write_text(PAGE)
    return tmp_path


def test_rewriting_and_checking(folder: Path, page: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    text = assert_rewritten(page, folder, capsys)
    for block in (D64, DECODE, COMPILED):
        assert f"\n{block}\n<!-- end" in text
    assert "adasplash" not in text


@pytest.mark.parametrize(
    "line",
    [
        "| LSSAR forward + backward, D = 128, T from 4096 | 1.65 | 1.3 | 0.95 | no |",
        "| the same at T = 1024, both D | 1.50 | 1.7 | 1.4 | yes |",
        "| LSSA forward, D = 64, all T | 0.50 | 0.85 | 0.7 | goal |",
        "| memory of a training step | 0.88 | 1.5 | 1.3 | goal |",
        "| decode from 32K keys, unit keys / the fastest SDPA | 0.85 | 1.2 | 0.9 | goal |",
        "| LSSAR forward + backward / compiled reference, T = 1024 | 0.11 | 0.2 | 0.1 | yes |",
    ],
)
def test_what_is_met(line: str, folder: Path, page: ModuleType) -> None:
    assert line in page.blocks_of(folder)["attention-goals"]


def test_a_file_that_is_missing(folder: Path, page: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / page.FILE).unlink()
    assert page.main(words(folder)) == 2
    assert "attention-h200.json is not there" in capsys.readouterr().err
    assert (folder / "page.md").read_text() == PAGE


def test_a_file_of_other_sections(folder: Path, page: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    path = folder / page.FILE
    rows = [row for row in json.loads(path.read_text())["rows"] if row["section"] != "decode"]
    path.write_text(json.dumps({"rows": rows}))
    assert page.main(words(folder)) == 2
    assert "has no rows for sdpa cudnn of decode, sdpa flash of decode" in capsys.readouterr().err
