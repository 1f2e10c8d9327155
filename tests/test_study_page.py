"""The page of the study: it agrees with its files, its numbers are right, and what is wrong is said."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from study_cases import (
    ABLATIONS,
    EXPECTED,
    LOSSES,
    LOSSES_OF_THE_MIX,
    MIX,
    PAGES,
    RECORDS,
    ROTARY,
    curve,
    imported,
    page_with,
    record,
    small_records,
)

Place = tuple[str | int, ...]
OURS_WIDE, THEIRS_WIDE = "lssar-learned-log-global3-wide", "softmax-qknorm-logn-learned-global3-wide"


@pytest.fixture(scope="module")
def study_page() -> Iterator[ModuleType]:
    with imported("study_page") as module:
        yield module


@pytest.fixture(scope="module")
def made(study_page: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with run files, their page and their figures."""
    folder = tmp_path_factory.mktemp("study")
    (folder / "runs").mkdir()
    for run in RECORDS:
        (folder / "runs" / f"10m-{run['arm']}-seed{run['seed']}.json").write_text(json.dumps(run))
    (folder / "page.md").write_text(page_with(dict.fromkeys(EXPECTED, "old")))
    assert study_page.main(words(folder)) == 0
    return folder


@pytest.fixture
def study(made: Path, tmp_path: Path) -> Path:
    return shutil.copytree(made, tmp_path / "copy")


def words(folder: Path) -> list[str]:
    return [
        "--results", str(folder / "runs"), "--page", str(folder / "page.md"), "--figures", str(folder / "figures")
    ]  # fmt: skip


def change(path: Path, place: Place, value: Any) -> None:
    record = json.loads(path.read_text())
    inner = record
    for word in place[:-1]:
        inner = inner[word]
    assert inner[place[-1]] != value
    inner[place[-1]] = value
    path.write_text(json.dumps(record))


def test_the_page_agrees_with_its_files() -> None:
    command = [sys.executable, str(PAGES / "study_page.py"), "--check"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("name", EXPECTED)
def test_block(name: str, made: Path) -> None:
    text = (made / "page.md").read_text()
    found = text.partition(f"<!-- begin: {name} -->\n")[2].partition(f"\n<!-- end: {name} -->")[0]
    assert found == EXPECTED[name]


def test_what_people_wrote_stays(made: Path, study_page: ModuleType) -> None:
    assert list(EXPECTED) == [*study_page.BLOCKS, *study_page.BLOCKS_OF_ALL, *study_page.PROSE]
    assert (made / "page.md").read_text() == page_with(EXPECTED)


def test_figures_and_their_data(made: Path) -> None:
    figures = ("study-gain-10m", "study-gain-mix-10m", "study-loss-10m", "study-loss-mix-10m")
    names = [f"{figure}.{suffix}" for figure in figures for suffix in ("csv", "png", "svg")]
    assert sorted(path.name for path in (made / "figures").iterdir()) == names
    assert (made / "figures" / "study-loss-10m.csv").read_text() == LOSSES
    assert (made / "figures" / "study-loss-mix-10m.csv").read_text() == LOSSES_OF_THE_MIX
    mixed = (made / "figures" / "study-gain-mix-10m.csv").read_text().splitlines()[1:]
    assert {line.split(",")[0] for line in mixed} == {"softmax-qknorm-logn-global3", "lssar-learned-log-global3"}
    gains = (made / "figures" / "study-gain-10m.csv").read_text().splitlines()
    assert "softmax,256,64,-1.10000,2,0.03000" in gains
    assert not any(line.split(",")[2] == "1" for line in gains), "there is no control at the training length"
    drawing = (made / "figures" / "study-loss-10m.svg").read_text()
    for name in ("lssar-p15", "softmax", "lssar-p3", "softmax, sliding window of 4"):
        assert f">{name}</text>" in drawing


def test_small_sizes_are_for_the_ablations_alone(study: Path, study_page: ModuleType) -> None:
    for run in small_records():
        (study / "runs" / f"books-{run['arm']}-seed{run['seed']}.json").write_text(json.dumps(run))
    assert study_page.main(words(study)) == 0
    text = (study / "page.md").read_text()
    assert f"<!-- begin: ablations -->\n{ABLATIONS}\n<!-- end" in text
    assert "| books |  |" in text
    for name in EXPECTED.keys() - {"runs", "ablations"}:
        assert f"<!-- begin: {name} -->\n{EXPECTED[name]}\n<!-- end" in text
    assert not any("books" in path.name for path in (study / "figures").iterdir())


def test_as_many_seeds_of_every_arm(study: Path, study_page: ModuleType) -> None:
    """One word for all of them, where a list would be longer than the table is wide."""
    for run in small_records():
        if run["arm"] == "lssar-p15":
            for arm in ("lssar-p15", "lssar-p3"):
                path = study / "runs" / f"books-{arm}-seed{run['seed']}.json"
                path.write_text(json.dumps(run | {"arm": arm}))
    assert study_page.main(words(study)) == 0
    block = (study / "page.md").read_text().partition("<!-- begin: ablations -->")[2]
    assert "around the mean; seeds: 2 of every arm.\n<!-- end" in block


def test_every_ablation_has_its_words(study_page: ModuleType) -> None:
    with imported("study") as study:
        assert set(study.GROUPS["ablations"]) == set(study_page.ABLATED)


KINDS = {"": ROTARY, "-mix": MIX}


@pytest.mark.parametrize("kind", KINDS)
def test_a_size_of_one_kind(kind: str, study: Path, study_page: ModuleType) -> None:
    for path in (study / "runs").iterdir():
        if ("global3" in path.name) != bool(kind):
            path.unlink()
    shutil.rmtree(study / "figures")
    assert study_page.main(words(study)) == 0
    text, (other,) = (study / "page.md").read_text(), KINDS.keys() - {kind}
    assert text.count(KINDS[kind]) == 2
    assert KINDS[other] not in text
    drawn = {path.stem for path in (study / "figures").iterdir()}
    assert drawn == {f"study-loss{kind}-10m", f"study-gain{kind}-10m"}
    assert all(f"(figures/{stem}.svg)" in text for stem in drawn)
    assert f"study-loss{other}-10m" not in text


def learned_block_of(study: Path, study_page: ModuleType) -> str:
    assert study_page.main(words(study)) == 0
    return (study / "page.md").read_text().partition("<!-- begin: learned -->")[2].partition("<!-- end:")[0]


def test_layers_that_see_everything_differ(study: Path, study_page: ModuleType) -> None:
    change(study / "runs" / "10m-lssar-learned-log-global3-seed1.json", ("config", "global_every"), 1)
    assert "| layer 1 | layer 2 |\n" in learned_block_of(study, study_page).partition(MIX)[2]


def test_layers_that_learn_different_things(study: Path, study_page: ModuleType) -> None:
    path = study / "runs" / "10m-lssar-learned-log-global3-seed1.json"
    change(path, ("evaluation", "learned"), [{"ssmax_scale": [0.5, 2]}, {"power": [3, 4.5]}])
    block = learned_block_of(study, study_page)
    assert "| `lssar-learned-log-global3`, seed 1 | scale | 0.50 to 2.00 | - |\n" in block
    assert "| `lssar-learned-log-global3`, seed 1 | power | - | 3.00 to 4.50 |\n" in block


def test_no_time_without_a_softmax_of_its_own(study: Path, study_page: ModuleType) -> None:
    (study / "runs" / "10m-softmax-seed0.json").unlink()
    assert study_page.main(words(study)) == 0
    assert "<!-- begin: speed -->\nNo runs yet.\n" in (study / "page.md").read_text()


CHANGES: dict[str, tuple[str, Place, Any, list[str]]] = {
    "loss": ("lssar-p3-seed0", ("evaluation", "lengths", "lengths", 1, "loss"), 4.01,
             ["block headline", "block targets", "figure study-loss-10m"]),
    "loss of the mix": ("softmax-qknorm-logn-global3-seed0", ("evaluation", "lengths", "lengths", 2, "loss"), 4.02,
                        ["block headline", "figure study-loss-mix-10m"]),
    "window": ("softmax-seed1", ("evaluation", "variants", "window=4", "lengths", 2, "loss"), 3.98,
               ["block inference", "block targets", "figure study-loss-10m", "figure study-loss-mix-10m"]),
    "pass key": ("softmax-seed0", ("evaluation", "passkey", 0, "correct"), 9, ["block passkey"]),
    "inside": ("softmax-seed0", ("evaluation", "inside", 0, "sink"), 0.5, ["block inside"]),
    "learned": ("ssmax-seed0", ("evaluation", "learned", 0, "ssmax_scale", 0), 0.5, ["block learned"]),
    "speed": ("lssar-p15-seed0", ("training", "step_seconds"), 0.127, ["block speed"]),
    "processes": ("softmax-qknorm-logn-global3-seed0", ("training", "processes"), 2, ["block speed"]),
    "commit": ("lssar-p15-seed0", ("commit",), "fedcba9876543210-dirty", ["block runs", "block speed"]),
}  # fmt: skip


@pytest.mark.parametrize("what", CHANGES)
def test_check_names_what_is_out_of_date(
    what: str, study: Path, study_page: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    assert study_page.main([*words(study), "--check"]) == 0
    before = (study / "page.md").read_text()
    run, place, value, stale = CHANGES[what]
    change(study / "runs" / f"10m-{run}.json", place, value)
    capsys.readouterr()
    assert study_page.main([*words(study), "--check"]) == 1
    assert f"out of date: {', '.join(stale)};" in capsys.readouterr().err
    assert (study / "page.md").read_text() == before


def test_a_lost_figure_is_out_of_date(study: Path, study_page: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    (study / "figures" / "study-gain-10m.svg").unlink()
    assert study_page.main([*words(study), "--check"]) == 1
    assert "out of date: figure study-gain-10m;" in capsys.readouterr().err


def test_without_matplotlib_the_figures_are_left_alone(
    study: Path, study_page: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(study_page, "find_spec", lambda name: None)
    change(study / "runs" / "10m-lssar-p3-seed0.json", ("evaluation", "lengths", "lengths", 1, "loss"), 4.01)
    assert study_page.main(words(study)) == 0
    assert "matplotlib is not installed" in capsys.readouterr().out
    assert "| 4.010 |" in (study / "page.md").read_text()
    assert (study / "figures" / "study-loss-10m.csv").read_text() == LOSSES


def test_no_runs(study: Path, study_page: ModuleType) -> None:
    shutil.rmtree(study / "runs")
    (study / "runs").mkdir()
    assert study_page.main(words(study)) == 0
    assert (study / "page.md").read_text() == page_with(dict.fromkeys(EXPECTED, "No runs yet."))
    assert study_page.main([*words(study), "--check"]) == 0


def test_a_gain_within_its_error_is_not_told_from_none(study: Path, study_page: ModuleType) -> None:
    place = ("evaluation", "lengths", "lengths", 2, "control", "standard_error")
    change(study / "runs" / "10m-lssar-p15-seed0.json", place, 0.03)
    assert study_page.main(words(study)) == 0
    text = (study / "page.md").read_text()
    assert "| not told from 0: +0.0500, standard error 0.0300 |" in text
    assert "met: +0.0500" not in text


def test_a_loss_that_is_no_number_wins_nothing(study: Path, study_page: ModuleType) -> None:
    for multiple in range(3):
        place = ("evaluation", "lengths", "lengths", multiple, "loss")
        change(study / "runs" / "10m-lssar-p3-seed0.json", place, float("nan"))
    assert study_page.main(words(study)) == 0
    text = (study / "page.md").read_text()
    assert "| `lssar-p3` | nan | nan | nan | +nan | +0.990 | 0.008 | -0.010 | 0.004 |" in text
    assert "| `lssar-p15` | 4.012 | **3.950** | **3.940** | **-0.072** |" in text
    assert "| `lssar-p3` | not met: +nan | not met: +nan | not met: 16x +nan, 64x +nan |" in text


def cut_off(path: Path) -> None:
    path.write_text(path.read_text()[:-20])


def with_other_content(path: Path) -> None:
    path.write_text('{"rows": []}')


def with_a_list(path: Path) -> None:
    path.write_text("[1, 2]")


def of_another_seed(path: Path) -> None:
    change(path, ("seed",), 7)


def of_an_unknown_arm(path: Path) -> None:
    change(path, ("arm",), "lssar-p99")


def of_longer_training(path: Path) -> None:
    change(path, ("config", "steps"), 2000)


def of_more_heads(path: Path) -> None:
    """An arm's own are allowed: those of `lssar-learned-log-global3-wide` in the repository."""
    change(path, ("config", "heads"), 99)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (cut_off, "is damaged"),
        (with_other_content, "is not a run of runs/study.py: it has no 'evaluation'"),
        (with_a_list, "is not a run of runs/study.py"),
        (of_another_seed, "holds another run than its name says: 10m, softmax, seed 7"),
        (of_an_unknown_arm, "is of an arm or size that runs/study.py does not have: 10m, lssar-p99"),
        (of_longer_training, "they differ in steps"),
        (of_more_heads, "they differ in heads"),
    ],
)
def test_a_file_that_cannot_be_used(
    spoil: Callable[[Path], None],
    message: str,
    study: Path,
    study_page: ModuleType,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path, before = study / "runs" / "10m-softmax-seed1.json", (study / "page.md").read_text()
    spoil(path)
    capsys.readouterr()
    for arguments in (words(study), [*words(study), "--check"]):
        assert study_page.main(arguments) == 2
        error = capsys.readouterr().err
        assert error.startswith(f"error: {path} ")
        assert message in error
    assert (study / "page.md").read_text() == before


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("<!-- begin: speed -->", "", "<!-- end: speed --> is not one of a pair"),
        ("<!-- end: speed -->", "", "<!-- begin: speed --> is not one of a pair"),
        ("<!-- end: noise -->", "", "<!-- begin: noise --> is not one of a pair"),
        (": speed -->", ": sped -->", "block 'sped' is unknown"),
        (": speed -->", ": noise -->", "block 'noise' is there twice"),
        ("speed -->\n", "speed -->x\n", "has no <!-- begin: speed -->"),
    ],
)
def test_a_page_without_its_markers(
    old: str, new: str, message: str, study: Path, study_page: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    page = study / "page.md"
    spoilt = page.read_text().replace(old, new)
    page.write_text(spoilt)
    assert study_page.main(words(study)) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {page}")
    assert message in error
    assert page.read_text() == spoilt


def test_blocks_on_two_pages(study: Path, study_page: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    """Each of the blocks is on one of them, and each page gets its own."""
    page, other = study / "page.md", study / "other.md"
    before, marker, after = page.read_text().partition("<!-- begin: speed -->")
    page.write_text(before)
    other.write_text((marker + after).replace("1.26", "old"))
    both = [*words(study), "--page", str(page), str(other)]
    assert study_page.main([*both, "--check"]) == 1
    assert capsys.readouterr().err.startswith("out of date: block speed;")
    assert study_page.main(both) == 0
    assert page.read_text() + other.read_text() == page_with(EXPECTED)
    other.write_text(page_with({"runs": "once more"}) + other.read_text())
    assert study_page.main(both) == 2
    assert f"{other}: block 'runs' is there twice" in capsys.readouterr().err
    assert study_page.main(words(study)) == 2
    assert f"{page} has no <!-- begin: speed -->" in capsys.readouterr().err


def test_the_best_of_each_size(study: Path, study_page: ModuleType) -> None:
    """From the smallest to the largest, softmax first; and their figure."""
    losses = {"10m-again": ([4.0, 3.9, 3.8], [4.002, 3.904, 3.795]), "25m-keys": ([3.8, 3.7, 3.6], [3.803, 3.7, 3.6])}
    millions = {"10m-again": 30_000_000, "25m-keys": 51_000_000}
    for size, pair in losses.items():
        for arm, own in zip((THEIRS_WIDE, OURS_WIDE), pair, strict=True):
            run = record(arm, 0, curve(own, 0.0, 0.1), [[1, 1], [1, 1]], step_seconds=0.1, processes=2, global_every=2)
            run["size"], run["evaluation"]["parameters"] = size, millions[size]
            (study / "runs" / f"{size}-{arm}-seed0.json").write_text(json.dumps(run))
    assert study_page.main(words(study)) == 0
    block = (study / "page.md").read_text().partition("<!-- begin: best -->\n")[2].partition("\n<!-- end: best -->")[0]
    assert block.splitlines() == [
        "| parameters |  | 1x | 16x | 64x | 64x - 1x | seeds |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
        "| 30M | softmax | 4.000 | 3.900 | 3.800 | -0.200 | 1 |",
        "| 30M | LSSAR | 4.002 | 3.904 | 3.795 | -0.207 | 1 |",
        "| 51M | softmax | 3.800 | 3.700 | 3.600 | -0.200 | 1 |",
        "| 51M | LSSAR | 3.803 | 3.700 | 3.600 | -0.203 | 1 |",
    ]
    numbers = (study / "figures" / "study-best.csv").read_text().splitlines()
    assert '"LSSAR, 30M",64,16,3.90400,1,' in numbers
    assert '"LSSAR less softmax, 30M",256,64,-0.00500,1,' in numbers
    assert '"LSSAR less softmax, 51M",4,1,0.00300,1,' in numbers
    assert ">LSSAR less softmax, 51M</text>" in (study / "figures" / "study-best.svg").read_text()


def test_folders_and_pages_that_are_not_there(
    study: Path, study_page: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    assert study_page.main([*words(study), "--results", str(study / "other")]) == 2
    assert f"{study / 'other'} is not a folder" in capsys.readouterr().err
    assert study_page.main([*words(study), "--page", str(study / "other.md")]) == 2
    assert f"{study / 'other.md'} does not exist" in capsys.readouterr().err
