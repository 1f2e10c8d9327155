"""The tables of README.md: means over seeds, ranges over lengths, and a word where a run is missing."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from page_cases import assert_rewritten, words
from study_cases import imported

ROOT = Path(__file__).parents[1]
PAGE = "By hand.\n" + "".join(f"<!-- begin: {name} -->\nold\n<!-- end: {name} -->\n" for name in ("losses", "speed"))
MIX = "lssar-learned-log-global3"


@pytest.fixture(scope="module")
def page() -> Iterator[ModuleType]:
    with imported("readme_page") as module:
        yield module


@pytest.fixture
def folder(tmp_path: Path, page: ModuleType) -> Path:
    (tmp_path / "study").mkdir()
    arms = [arm for shown in page.SHOWN.values() for arm in shown]
    for size in (page.SIZE, page.OTHER_TEXT):
        for path in (ROOT / "results" / "study").glob(f"{size}-*.json"):
            if path.stem.removeprefix(f"{size}-").rpartition("-seed")[0] in arms:
                shutil.copy(path, tmp_path / "study")
    for name in (page.FILE, page.TRAINING):
        shutil.copy(ROOT / "results" / name, tmp_path)
    (tmp_path / "page.md").write_text(PAGE)
    return tmp_path


def test_a_mean_over_seeds(folder: Path, page: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    for seed, loss in ((0, 2.0), (1, 3.0)):
        path = folder / "study" / f"10m-{MIX}-seed{seed}.json"
        record = json.loads(path.read_text())
        record["evaluation"]["lengths"]["lengths"][0]["loss"] = loss
        path.write_text(json.dumps(record))
    assert "| LSSAR, p = c log N, c learned by each head | 2.500 |" in assert_rewritten(page, folder, capsys)


def test_the_text_with_more_seeds_counts(folder: Path, page: ModuleType) -> None:
    first, *others = sorted((folder / "study").glob(f"{page.OTHER_TEXT}-softmax-qknorm-logn-seed*.json"))
    losses = page.blocks_of(folder)["losses"]
    assert re.search(rf"softmax \+ QK-norm \+ log N \|.* {1 + len(others)} \* \|", losses)
    for path in others:
        path.unlink()
    assert re.search(r"softmax \+ QK-norm \+ log N \|.* 1 \|", page.blocks_of(folder)["losses"])  # as many on either
    first.unlink()
    assert page.blocks_of(folder)["losses"].count("\n") == losses.count("\n")


def test_a_range_over_lengths(folder: Path, page: ModuleType) -> None:
    path = folder / page.FILE
    results = json.loads(path.read_text())
    ratios = iter((0.5, 0.75, 0.625))
    for row in results["rows"]:
        if (row["section"], row["contender"], row["head_dim"]) == ("train", "lssa", 64):
            row["forward_ratio"] = next(ratios)
    path.write_text(json.dumps(results))
    assert "| LSSA, forward alone | 0.50 to 0.75 |" in page.blocks_of(folder)["speed"]


@pytest.mark.parametrize(
    ("section", "contender", "ratio", "short", "said"),
    [
        ("train", "lssar p=15", "ratio", 1024, "| LSSAR, training step of the op, 4,096 tokens and more | 2.50 |"),
        ("decode", "lssar p=15 unit keys", "forward_ratio", 8192, "to the fastest SDPA |  | 2.50 |"),
    ],
)
def test_short_lengths_do_not_count(
    section: str, contender: str, ratio: str, short: int, said: str, folder: Path, page: ModuleType
) -> None:
    path = folder / page.FILE
    results = json.loads(path.read_text())
    for row in results["rows"]:
        if (row["section"], row["contender"]) == (section, contender):
            row[ratio] = 9.0 if row["length"] <= short else 2.5
    path.write_text(json.dumps(results))
    assert said in page.blocks_of(folder)["speed"]


def test_a_length_that_was_not_measured_is_said(
    folder: Path, page: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in (folder / "study").glob(f"10m-{MIX}-seed?.json"):
        record = json.loads(path.read_text())
        del record["evaluation"]["lengths"]["lengths"][0]
        path.write_text(json.dumps(record))
    assert page.main(words(folder)) == 2
    assert f"{MIX} at 10m was not measured at 1 times its length" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("missing", "said"),
    [
        (f"study/10m-{MIX}-seed?.json", f"there is no run of {MIX} at 10m"),
        ("study/*.json", "there are no runs of 10m"),
        ("training-h200.json", "training-h200.json is not there"),
        ("attention-h200.json", "attention-h200.json is not there"),
    ],
)
def test_what_is_missing_is_said(
    missing: str, said: str, folder: Path, page: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in folder.glob(missing):
        path.unlink()
    assert page.main(words(folder)) == 2
    assert said in capsys.readouterr().err
    assert (folder / "page.md").read_text() == PAGE
