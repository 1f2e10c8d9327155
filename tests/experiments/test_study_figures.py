"""How the figures of the study look: every arm is told from the others, and lines that run away are cut off."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from study_cases import LOSSES, LOSSES_OF_THE_MIX, RECORDS, curve, record

from experiments.study import figures, records
from experiments.study.arms import GROUPS
from experiments.study.records import SMALL, read_study

ROOT = Path(__file__).parents[2]


def size_of(arms: Mapping[str, Mapping[str, Any]]) -> Any:
    """A size of such arms, one run each."""
    found = {}
    for arm, settings in arms.items():
        mixed = {"global_every": settings["global_every"]} if "global_every" in settings else {}
        run = record(arm, 0, curve([4.0, 4.0, 4.0], 0.0, 0.1), [[1, 1], [1, 1]], step_seconds=1.0, **mixed)
        run["config"]["attention"] = settings["attention"]
        found[arm] = [records.run_of(run)]
    return records.Size("10m", found)


def looks_in(figure: str, size: Any) -> dict[str, dict[str, Any]]:
    lines = figures.FIGURES[figure].lines(size)
    return {line.name: line.look for line in lines}


@pytest.mark.parametrize("kind", ["", "-mix"])
def test_lines_are_told_apart(kind: str) -> None:
    """Every arm of the study has a look of its own in its figures; LSSAR is solid and softmax dashed."""
    arms = GROUPS["headline"] | GROUPS["recipes"] | GROUPS["ablations"]
    looks = looks_in(f"study-loss{kind}", size_of(arms))
    assert looks == looks_in(f"study-gain{kind}", size_of(arms))
    assert list(looks) == [arm for arm, words in arms.items() if ("global_every" in words) == bool(kind)]
    assert len({(look["color"], look["marker"]) for look in looks.values()}) == len(looks)
    assert {look["linestyle"] for arm, look in looks.items() if arm.startswith("lssar")} == {"-"}
    softmaxes = {look["linestyle"] for arm, look in looks.items() if "max" in arm and not arm.startswith("lssar")}
    assert softmaxes == {"--"}


@pytest.mark.parametrize(("kind", "count"), [("", 9), ("-mix", 21)])
def test_no_colour_is_there_twice(kind: str, count: int) -> None:
    mixed = {arm: words for arm, words in GROUPS["recipes"].items() if "global_every" in words}
    looks = looks_in(f"study-loss{kind}", size_of(GROUPS["headline"] | mixed))
    for word in ("color", "marker"):
        assert len({look[word] for look in looks.values()}) == len(looks) == count
    assert not {"#777777", "#999999"} & {look["color"] for look in looks.values()}, "grey is for windows"


@pytest.mark.parametrize(
    ("quantity", "values", "limits"),
    [
        ("loss", [[4.0, 10.0], [4.1, 4.2]], (3.95, 4.25)),
        ("loss", [[4.0, 4.3], [4.1, 4.2]], None),
        ("gain", [[-0.1, -8.0], [0.0, -0.3]], (-0.35, 0.03)),
        ("gain", [[0.0, -0.3], [0.1, 0.0]], None),
        ("gain", [[-1.0, -8.0], [-2.0, -0.1]], None),
    ],
)
def test_close_up(quantity: str, values: list[list[float]], limits: tuple[float, float] | None) -> None:
    """Lines that run away take no room from those that stay."""
    points = [{1: records.Spread(first, 0.0, 1), 64: records.Spread(last, 0.0, 1)} for first, last in values]
    lines = [figures.Line("", {}, found, {}) for found in points]
    assert figures.close_up(quantity, lines) == (limits and pytest.approx(limits))


def test_numbers_of_the_figures() -> None:
    runs: dict[str, list[records.Run]] = {}
    for content in sorted(RECORDS, key=lambda run: "global_every" in run["config"]):
        runs.setdefault(content["arm"], []).append(records.run_of(content))
    order = [arm for group in GROUPS.values() for arm in group if arm in runs]
    drawn = figures.figure_data([records.Size("10m", {arm: runs[arm] for arm in sorted(runs, key=order.index)})])
    assert sorted(drawn) == ["study-gain-10m", "study-gain-mix-10m", "study-loss-10m", "study-loss-mix-10m"]
    assert sorted(drawn["study-loss-10m"].csv.splitlines()) == sorted(LOSSES.splitlines())
    assert sorted(drawn["study-loss-mix-10m"].csv.splitlines()) == sorted(LOSSES_OF_THE_MIX.splitlines())
    gains = drawn["study-gain-10m"].csv.splitlines()
    assert "softmax,256,64,-1.10000,2,0.03000" in gains
    assert not any(line.split(",")[2] == "1" for line in gains), "there is no control at the training length"


def test_figures_are_written(tmp_path: Path) -> None:
    size = records.Size("10m", {"softmax": [records.run_of(RECORDS[0])]})
    figures.write_figures(tmp_path, figures.figure_data([size]))
    assert figures.stale_figures(tmp_path, figures.figure_data([size])) == []
    assert ">softmax, sliding window of 4</text>" in (tmp_path / "study-loss-10m.svg").read_text()
    (tmp_path / "study-gain-10m.svg").unlink()
    assert figures.stale_figures(tmp_path, figures.figure_data([size])) == ["study-gain-10m"]


def test_figures_are_up_to_date() -> None:
    sizes = [size for size in read_study(ROOT / "results" / "study") if size.name not in SMALL]
    assert figures.stale_figures(ROOT / "docs" / "figures", figures.figure_data(sizes)) == []
