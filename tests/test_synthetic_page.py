"""The table of synthetic tasks: it agrees with its files, its numbers are right, and what is wrong is said."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from page_cases import assert_rewritten, words
from study_cases import imported

PAGE = "By hand.\n<!-- begin: synthetic -->\nold\n<!-- end: synthetic -->\nMore.\n"
TABLE = """\
| answers right, % | attention | 1x | 8x | 64x | answers at the longest |
| --- | ---: | ---: | ---: | ---: | ---: |
| copy | `lssar` | 100.0 | - | 12.5 | 2,048 |
| recall, 8 pairs | `softmax` | 99.5 | 50.0 | - | 400 |
| recall, as many pairs as fit | `lssar` | 100.0 | - | - | 64 |"""


@pytest.fixture(scope="module")
def page() -> Iterator[ModuleType]:
    with imported("synthetic_page") as module:
        yield module


def result(attention: str, settings: dict[str, Any], *lengths: tuple[float, float, int]) -> dict[str, Any]:
    return {
        "complete": True,
        "model": {"name": attention, "attention": attention},
        "settings": settings,
        "results": {"lengths": [{"times": times, "accuracy": share, "answers": n} for times, share, n in lengths]},
    }


FOUND = {
    "recall+softmax--1": result("softmax", {"task": "recall", "pairs": 8}, (1.0, 0.995, 400), (8.0, 0.5, 400)),
    "recall+lssar--2": result("lssar", {"task": "recall", "pairs": 0}, (1.0, 1.0, 64)),
    "copy+lssar--3": result("lssar", {"task": "copy"}, (1.0, 1.0, 32), (64.0, 0.125, 2048)),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, found in FOUND.items():
        (tmp_path / f"synthetic--{name}.json").write_text(json.dumps(found))
    (tmp_path / "page.md").write_text(PAGE)
    return tmp_path


def test_rewriting_and_checking(folder: Path, page: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    text = assert_rewritten(page, folder, capsys)
    assert text == PAGE.replace("old", TABLE)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"complete": False}, "not complete: lssar"),
        ({"model": {"name": "x", "attention": "relu"}}, "the page has no place for the attention 'relu'"),
    ],
)
def test_results_that_cannot_be_shown(
    change: dict[str, Any], message: str, folder: Path, page: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "synthetic--copy+lssar--3.json").write_text(json.dumps(FOUND["copy+lssar--3"] | change))
    assert page.main(words(folder)) == 2
    assert message in capsys.readouterr().err
    assert (folder / "page.md").read_text() == PAGE


def test_an_empty_folder(tmp_path: Path, page: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "page.md").write_text(PAGE)
    assert page.main(words(tmp_path)) == 2
    assert "has no results of `softplus-attention evaluate synthetic`" in capsys.readouterr().err
