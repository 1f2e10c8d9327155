"""How the figures of the study look: every arm is told from the others, and lines that run away are cut off."""

from __future__ import annotations

import importlib
import runpy
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any

import pytest
from study_cases import RUNS, curve, imported, record


@pytest.fixture(scope="module")
def study_page() -> Iterator[ModuleType]:
    with imported("study_page") as module:
        yield module


@pytest.fixture(scope="module")
def groups() -> dict[str, Any]:
    return runpy.run_path(str(RUNS / "study.py"))["GROUPS"]


def size_of(arms: Mapping[str, Mapping[str, Any]]) -> Any:
    """A size of such arms of runs/study.py, one run each."""
    runs = importlib.import_module("study_runs")
    found = {}
    for arm, settings in arms.items():
        mixed = {"global_every": settings["global_every"]} if "global_every" in settings else {}
        run = record(arm, 0, curve([4.0, 4.0, 4.0], 0.0, 0.1), [[1, 1], [1, 1]], step_seconds=1.0, **mixed)
        run["config"]["attention"] = settings["attention"]
        found[arm] = [runs.run_of(run)]
    return runs.Size("10m", found)


def looks_in(figure: str, size: Any) -> dict[str, dict[str, Any]]:
    lines = importlib.import_module("study_figures").FIGURES[figure].lines(size)
    return {line.name: line.look for line in lines}


@pytest.mark.parametrize("kind", ["", "-mix"])
def test_lines_are_told_apart(kind: str, study_page: ModuleType, groups: dict[str, Any]) -> None:
    """Every arm of the study has a look of its own in its figures; LSSAR is solid and softmax dashed."""
    arms = groups["headline"] | groups["recipes"] | groups["ablations"]
    looks = looks_in(f"study-loss{kind}", size_of(arms))
    assert looks == looks_in(f"study-gain{kind}", size_of(arms))
    assert list(looks) == [arm for arm, words in arms.items() if ("global_every" in words) == bool(kind)]
    assert len({(look["color"], look["marker"]) for look in looks.values()}) == len(looks)
    assert {look["linestyle"] for arm, look in looks.items() if arm.startswith("lssar")} == {"-"}
    softmaxes = {look["linestyle"] for arm, look in looks.items() if "max" in arm and not arm.startswith("lssar")}
    assert softmaxes == {"--"}


@pytest.mark.parametrize(("kind", "count"), [("", 9), ("-mix", 21)])
def test_no_colour_is_there_twice(kind: str, count: int, study_page: ModuleType, groups: dict[str, Any]) -> None:
    mixed = {arm: words for arm, words in groups["recipes"].items() if "global_every" in words}
    looks = looks_in(f"study-loss{kind}", size_of(groups["headline"] | mixed))
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
def test_close_up(
    quantity: str, values: list[list[float]], limits: tuple[float, float] | None, study_page: ModuleType
) -> None:
    """Lines that run away take no room from those that stay."""
    figures, runs = importlib.import_module("study_figures"), importlib.import_module("study_runs")
    points = [{1: runs.Spread(first, 0.0, 1), 64: runs.Spread(last, 0.0, 1)} for first, last in values]
    lines = [figures.Line("", {}, found, {}) for found in points]
    assert figures.close_up(quantity, lines) == (limits and pytest.approx(limits))
