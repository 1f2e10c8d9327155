"""README.md: means over seeds, ranges over lengths, sentences whose claims hold, and a word where a run is missing."""

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
NAMES = ("demo", "power", "models", "losses", "claims", "recipe", "speed", "times", "host")
PAGE = "By hand.\n" + "".join(f"<!-- begin: {name} -->\nold\n<!-- end: {name} -->\n" for name in NAMES)
MIX = "lssar-learned-log-global3"


@pytest.fixture(scope="module")
def page() -> Iterator[ModuleType]:
    with imported("readme_page") as module:
        yield module


@pytest.fixture
def folder(tmp_path: Path, page: ModuleType) -> Path:
    for name in ("study", "stability"):
        shutil.copytree(ROOT / "results" / name, tmp_path / name)
    (tmp_path / "newton").mkdir()
    for name in (page.FILE, page.TRAINING, page.CPU, "demo.json", "newton/cpu.json", "newton/h200.json"):
        shutil.copy(ROOT / "results" / name, tmp_path / name)
    (tmp_path / "page.md").write_text(PAGE)
    return tmp_path


def losses(folder: Path, page: ModuleType) -> str:
    return page.losses_table(page.read_study(folder / "study"))


def speed(folder: Path, page: ModuleType) -> str:
    training = json.loads((folder / page.TRAINING).read_text())["rows"]
    return page.speed_table(page.read_benchmark(folder / page.FILE)["rows"], training)


def test_rewriting_and_checking(folder: Path, page: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    text, readme = assert_rewritten(page, folder, capsys), (ROOT / "README.md").read_text()
    blocks = re.findall(r"<!-- begin: \S+ -->\n.*?<!-- end: \S+ -->", text, re.DOTALL)
    assert len(blocks) == len(NAMES)
    assert all(block in readme for block in blocks)


def set_loss(folder: Path, run: str, loss: float) -> None:
    """At the training length."""
    path = folder / "study" / f"{run}.json"
    record = json.loads(path.read_text())
    record["evaluation"]["lengths"]["lengths"][0]["loss"] = loss
    path.write_text(json.dumps(record))


def test_a_mean_over_seeds(folder: Path, page: ModuleType) -> None:
    for seed, loss in ((0, 2.0), (1, 3.0)):
        set_loss(folder, f"{page.SIZE}-{MIX}-seed{seed}", loss)
    assert "| LSSAR, p = c log N, c learned by each head | 2.500 |" in losses(folder, page)


def test_the_text_with_more_seeds_counts(folder: Path, page: ModuleType) -> None:
    first, *others = sorted((folder / "study").glob(f"{page.SIZE}-softmax-qknorm-logn-seed*.json"))
    whole = losses(folder, page)
    assert re.search(rf"softmax \+ QK-norm \+ log N \|.* {1 + len(others)} \|", whole)
    for path in others:
        path.unlink()
    assert re.search(r"softmax \+ QK-norm \+ log N \|.* 1 \|", losses(folder, page))  # as many on either
    first.unlink()
    other = losses(folder, page)
    assert re.search(r"softmax \+ QK-norm \+ log N \|.* 1 \* \|", other)
    assert other.count("\n") == whole.count("\n")


@pytest.mark.parametrize("size", ["85m-again", "300m-again"])
def test_large_models_are_as_large_as_the_table_says(
    size: str, folder: Path, page: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in (folder / "study").glob(f"{size}-*.json"):
        record = json.loads(path.read_text())
        record["evaluation"]["parameters"] *= 2
        path.write_text(json.dumps(record))
    assert page.main(words(folder)) == 2
    assert f"{size} is not what the table of losses says" in capsys.readouterr().err


def test_a_range_over_lengths(folder: Path, page: ModuleType) -> None:
    path = folder / page.FILE
    results = json.loads(path.read_text())
    ratios = iter((0.5, 0.75, 0.625))
    for row in results["rows"]:
        if (row["section"], row["contender"], row["head_dim"]) == ("train", "lssa", 64):
            row["forward_ratio"] = next(ratios)
    path.write_text(json.dumps(results))
    assert "| LSSA, forward alone | 0.50 to 0.75 |" in speed(folder, page)


@pytest.mark.parametrize(
    ("section", "contender", "ratio", "short", "said"),
    [
        ("train", "lssar p=15", "ratio", 1024, "| LSSAR, training step of the op, 4,096 tokens and more | 2.50 |"),
        ("decode", "lssar p=15 unit keys", "forward_ratio", 8192, "to the fastest SDPA |  | 2.50 |"),
        ("decode", "lssar p=15", "forward_ratio", 8192, "| the same, cache of raw keys |  | 2.50 |"),
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
    assert said in speed(folder, page)


def test_a_length_that_was_not_measured_is_said(
    folder: Path, page: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in (folder / "study").glob(f"{page.SIZE}-{MIX}-seed?.json"):
        record = json.loads(path.read_text())
        del record["evaluation"]["lengths"]["lengths"][0]
        path.write_text(json.dumps(record))
    assert page.main(words(folder)) == 2
    assert f"{MIX} at {page.SIZE} was not measured at 1 times its length" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("missing", "said"),
    [
        (f"study/10m-*{MIX}-wide-seed?.json", f"there is no run of {MIX}-wide at 10m-again"),
        (f"study/85m-*{MIX}-wide-seed?.json", f"there is no run of {MIX}-wide at 85m-again"),
        ("study/*.json", "there are no runs of 10m-again, 85m-again, 300m-again"),
        ("training-h200.json", "training-h200.json is not there"),
        ("attention-h200.json", "attention-h200.json is not there"),
        ("cpu.json", "cpu.json is not there: benchmarks/cpu.py writes it"),
        ("newton/h200.json", "h200.json is not there: softplus-attention newton writes it"),
        ("study/books-lssar-p15-seed?.json", "pages/readme_words.py speaks of what is not there: lssar-p15 at books"),
        ("stability/*.json", "speaks of what is not there: runs of runs/stability.py"),
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


def test_the_command_stops_at_a_claim(folder: Path, page: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    set_loss(folder, f"85m-{MIX}-seed0", 3.0)
    assert page.main([*words(folder), "--check"]) == 2
    error = capsys.readouterr().err
    assert "the results do not bear what pages/readme_words.py says: " in error
    assert "which_power: LSSAR is behind softmax in the mix at 85m" in error
