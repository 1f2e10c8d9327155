"""The gap over sizes and its slope (experiments/study/sizes.py), on runs with known numbers."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from study_cases import curve, record

from experiments.study import records, sizes
from tools.tables.study import sizes_tables

PARAMETERS = {"10m": 10_000_000, "25m": 100_000_000, "85m": 1_000_000_000}


def made(size: str, ours: list[float], theirs: list[float], **kwargs: Any) -> Any:
    """A size whose arms have these losses, one per seed, at every length."""
    arms = {}
    for arm, losses in ((sizes.OURS, ours), (sizes.THEIRS, theirs)):
        seconds = 0.3 if arm == sizes.OURS else 0.2
        made_up = [
            record(arm, seed, curve([loss] * 3, 0.0, 0.1), [[1, 1], [1, 1]], step_seconds=seconds, **kwargs)
            for seed, loss in enumerate(losses)
        ]
        for one in made_up:
            one["size"] = size
            one["evaluation"]["parameters"] = PARAMETERS[size]
        arms[arm] = [records.read_record(one) for one in made_up]
    return records.Size(size, arms)


def three_sizes(**middle: Any) -> list[Any]:
    """Gaps of 0.01, 0.03 and 0.05 over two factors of ten; seeds of softmax 0.002 apart."""
    return [
        made("10m", [4.01], [3.999, 4.001]),
        made("25m", [3.03], [3.0], **middle),
        made("85m", [2.05], [2.0]),
    ]


def test_slope_of_three_sizes() -> None:
    study = three_sizes()
    assert [sizes.gap_at(size, 16) for size in study] == pytest.approx([0.01, 0.03, 0.05])
    slope = sizes.slope_at(study, 16)
    assert slope.value == pytest.approx(0.02)
    # The same by matrices, with weights of 1 / variance of each gap; the variance of one run is 2 * 0.001^2.
    design = np.array([[1, math.log10(PARAMETERS[size.name])] for size in study])
    precision = np.diag(1 / (2e-6 * np.array([1.5, 2, 2])))
    covariance = np.linalg.inv(design.T @ precision @ design)
    assert slope.error == pytest.approx(math.sqrt(covariance[1, 1]))


def test_slope_weights_seeds() -> None:
    study = [
        made("10m", [4.02, 4.02, 4.02, 4.02], [4.0, 4.0, 4.0, 4.0]),
        made("25m", [3.0], [3.0]),
        made("85m", [2.05], [2.0]),
    ]
    gaps, places = [0.02, 0.0, 0.05], [7, 8, 9]
    expected = np.polyfit(places, gaps, 1, w=[math.sqrt(1 / 0.5), math.sqrt(1 / 2), math.sqrt(1 / 2)])[0]
    assert sizes.slope_at(study, 1).value == pytest.approx(expected)


def test_no_slope_or_error_without_enough_runs() -> None:
    two = [made("10m", [4.01], [4.0]), made("25m", [3.03], [3.0])]
    assert sizes.slope_at(two, 1) is None
    three = [*two, made("85m", [2.05], [2.0])]
    assert sizes.slope_at(three, 1).error is None
    assert sizes.slope_at(three, 2) is None, "2x was not measured"


def test_groups_have_one_text() -> None:
    small, middle, large = (made(name, [4.01], [4.0]) for name in PARAMETERS)

    def on(size: Any, **kwargs: Any) -> Any:
        return replace(size, arms={arm: [replace(run, **kwargs) for run in runs] for arm, runs in size.arms.items()})

    of_other_text = [on(large, data="other"), on(small, data="other")]
    alone = on(middle, data="a third")
    without = replace(middle, arms={sizes.OURS: middle.arms[sizes.OURS]})
    assert sizes.on_one_text([*of_other_text, without, alone]) == [of_other_text[::-1]]
    unlike = [small, on(middle, tokens=7)]
    assert sizes.on_one_text([*unlike, *of_other_text]) == [of_other_text[::-1], unlike], (
        "groups with all else equal come first"
    )
    assert (sizes.alike(of_other_text), sizes.alike(unlike)) == (True, False)


def test_step_times_need_the_same_code() -> None:
    assert sizes.step_ratio(made("10m", [4.0], [4.0])) == pytest.approx(1.5)
    assert sizes.step_ratio(made("10m", [4.0], [4.0], processes=2)) is None
    both = made("10m", [4.0], [4.0])
    for name in ("commit", "machine"):
        other = {**both.arms, sizes.OURS: [replace(both.arms[sizes.OURS][0], **{name: "another"})]}
        assert sizes.step_ratio(replace(both, arms=other)) is None


def test_table() -> None:
    rows = sizes_tables(three_sizes(processes=3))
    assert rows[:8] == [
        "**10m, 25m, 85m**: one text, all else equal",
        "",
        "| size | parameters | trained at | tokens of training | seeds | 1x | 16x | 64x | step, relative to softmax |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
        "| 10m | 10M | 4 | 0M | 1 and 2 | +0.0100 | +0.0100 | +0.0100 | 1.50 |",
        "| 25m | 100M | 4 | 0M | 1 and 1 | +0.0300 | +0.0300 | +0.0300 | - |",
        "| 85m | 1000M | 4 | 0M | 1 and 1 | +0.0500 | +0.0500 | +0.0500 | 1.50 |",
        "| slope | for each factor of ten; 1 degrees of freedom |  |  |  "
        "| +0.0200 ± 0.0013 | +0.0200 ± 0.0013 | +0.0200 ± 0.0013 |  |",
    ]
    assert sizes_tables([]) == []


def test_separate_table_for_heads_of_128() -> None:
    """It lists the sizes that have such runs; two sizes have no slope."""
    study = []
    for name, wide in (("10m", 4.02), ("25m", 3.98), ("85m", None)):
        narrow = made(name, [4.01], [4.0])
        other = {} if wide is None else made(name, [wide], [4.0]).arms
        renamed = {f"{arm}-wide": runs for arm, runs in other.items()}
        study.append(replace(narrow, arms=narrow.arms | renamed))
    assert [sizes.gap_at(size, 16) for size in sizes.with_wide_heads(study)] == pytest.approx([0.02, -0.02])
    rows = sizes_tables(study)
    start = rows.index("**10m, 25m, heads of 128**: one text, all else equal")
    assert rows[start + 4 :][:3] == [
        "| 10m | 10M | 4 | 0M | 1 and 1 | +0.0200 | +0.0200 | +0.0200 | 1.50 |",
        "| 25m | 100M | 4 | 0M | 1 and 1 | -0.0200 | -0.0200 | -0.0200 | 1.50 |",
        "",
    ]
    assert "slope" not in "".join(rows[start:])
