"""The study's records and tables: numbers, and errors for bad files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from study_cases import ABLATIONS, EXPECTED, MIX, RECORDS, ROTARY, curve, record, small_records

from experiments.study.arms import GROUPS
from experiments.study.records import RecordError, read_study
from experiments.study.sizes import OURS_WIDE, THEIRS_WIDE
from tools.tables.study import ABLATED, study_tables

Place = tuple[str | int, ...]


def write(folder: Path, run: dict[str, Any]) -> None:
    (folder / f"{run['size']}-{run['arm']}-seed{run['seed']}.json").write_text(json.dumps(run))


@pytest.fixture
def study(tmp_path: Path) -> Path:
    for run in RECORDS:
        write(tmp_path, run)
    return tmp_path


def change(path: Path, place: Place, value: Any) -> None:
    content = json.loads(path.read_text())
    inner = content
    for key in place[:-1]:
        inner = inner[key]
    assert inner[place[-1]] != value
    inner[place[-1]] = value
    path.write_text(json.dumps(content))


def tables(folder: Path) -> dict[str, str]:
    return study_tables(read_study(folder))


@pytest.mark.parametrize("name", EXPECTED)
def test_table(name: str, study: Path) -> None:
    assert tables(study)[name] == EXPECTED[name]


def test_every_table_is_tested(study: Path) -> None:
    assert set(tables(study)) == set(EXPECTED)


def test_no_runs(tmp_path: Path) -> None:
    assert set(tables(tmp_path).values()) == {"No runs yet."}


def test_small_sizes_are_only_in_ablations(study: Path) -> None:
    for run in small_records():
        write(study, run)
    found = tables(study)
    assert found["ablations"] == ABLATIONS
    assert "| books |  |" in found["runs"]
    assert {name: found[name] for name in EXPECTED.keys() - {"runs", "ablations"}} == {
        name: EXPECTED[name] for name in EXPECTED.keys() - {"runs", "ablations"}
    }


def test_every_ablation_has_a_description() -> None:
    assert set(GROUPS["ablations"]) == set(ABLATED)


@pytest.mark.parametrize("kind", [ROTARY, MIX])
def test_size_of_one_kind(kind: str, study: Path) -> None:
    for path in study.iterdir():
        if ("global3" in path.name) != (kind == MIX):
            path.unlink()
    found = tables(study)
    assert kind in found["headline"]
    assert (ROTARY if kind == MIX else MIX) not in found["headline"]
    assert ("study-loss-mix-10m" in found["figures"]) == (kind == MIX)


def test_different_global_layers_are_not_marked(study: Path) -> None:
    change(study / "10m-lssar-learned-log-global3-seed1.json", ("config", "global_every"), 1)
    assert "| layer 1 | layer 2 |\n" in tables(study)["learned"].partition(MIX)[2]


def test_layers_with_different_parameters(study: Path) -> None:
    path = study / "10m-lssar-learned-log-global3-seed1.json"
    change(path, ("evaluation", "learned"), [{"ssmax_scale": [0.5, 2]}, {"power": [3, 4.5]}])
    found = tables(study)["learned"]
    assert "| `lssar-learned-log-global3`, seed 1 | scale | 0.50 to 2.00 | - |\n" in found
    assert "| `lssar-learned-log-global3`, seed 1 | power | - | 3.00 to 4.50 |" in found


def test_no_times_without_softmax(study: Path) -> None:
    (study / "10m-softmax-seed0.json").unlink()
    assert tables(study)["study-speed"] == "No runs yet."


def test_gain_within_two_errors(study: Path) -> None:
    place = ("evaluation", "lengths", "lengths", 2, "control", "standard_error")
    change(study / "10m-lssar-p15-seed0.json", place, 0.03)
    assert "| within two standard errors of 0: +0.0500 ± 0.0300 |" in tables(study)["targets"]


def test_nan_loss_is_never_best(study: Path) -> None:
    for multiple in range(3):
        place = ("evaluation", "lengths", "lengths", multiple, "loss")
        change(study / "10m-lssar-p3-seed0.json", place, float("nan"))
    found = tables(study)
    assert "| `lssar-p3` | 1 | nan | nan | nan | +nan | +0.990 | 0.008 | -0.010 | 0.004 |" in found["headline"]
    assert "| `lssar-p15` | 1 | 4.012 | **3.950** | **3.940** | **-0.072** |" in found["headline"]
    assert "| `lssar-p3` | not met: +nan | not met: +nan | not met: 16x +nan, 64x +nan |" in found["targets"]


def truncate(path: Path) -> None:
    path.write_text(path.read_text()[:-20])


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (truncate, "is damaged"),
        (
            lambda path: path.write_text('{"rows": []}'),
            "is not a run of experiments/study/run.py: it has no 'evaluation'",
        ),
        (lambda path: path.write_text("[1, 2]"), "is not a run of experiments/study/run.py"),
        (lambda path: change(path, ("seed",), 7), "holds a run that differs from its name: 10m, softmax, seed 7"),
        (
            lambda path: change(path, ("arm",), "lssar-p99"),
            "an arm or size that experiments/study/run.py does not know",
        ),
        (lambda path: change(path, ("config", "steps"), 2000), "they differ in steps"),
        # Only arms that define the heads may differ in them, such as lssar-learned-log-global3-wide.
        (lambda path: change(path, ("config", "heads"), 99), "they differ in heads"),
    ],
    ids=["damaged", "other-content", "list", "other-seed", "unknown-arm", "longer-training", "more-heads"],
)
def test_bad_file(spoil: Callable[[Path], None], message: str, study: Path) -> None:
    spoil(study / "10m-softmax-seed1.json")
    with pytest.raises(RecordError, match=message):
        read_study(study)


def test_best_of_each_size(study: Path) -> None:
    """Sorted by size, softmax first."""
    losses = {"10m-again": ([4.0, 3.9, 3.8], [4.002, 3.904, 3.795]), "25m-keys": ([3.8, 3.7, 3.6], [3.803, 3.7, 3.6])}
    for (size, pair), parameters in zip(losses.items(), (30_000_000, 51_000_000), strict=True):
        for arm, own in zip((THEIRS_WIDE, OURS_WIDE), pair, strict=True):
            run = record(arm, 0, curve(own, 0.0, 0.1), [[1, 1], [1, 1]], step_seconds=0.1, processes=2, global_every=2)
            run["size"], run["evaluation"]["parameters"] = size, parameters
            write(study, run)
    assert tables(study)["best"].splitlines() == [
        "| parameters |  | 1x | 16x | 64x | 64x - 1x | seeds |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
        "| 30M | softmax | 4.000 | 3.900 | 3.800 | -0.200 | 1 |",
        "| 30M | LSSAR | 4.002 | 3.904 | 3.795 | -0.207 | 1 |",
        "| 51M | softmax | 3.800 | 3.700 | 3.600 | -0.200 | 1 |",
        "| 51M | LSSAR | 3.803 | 3.700 | 3.600 | -0.203 | 1 |",
    ]
