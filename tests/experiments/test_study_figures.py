"""The figures of the study: distinct line styles, close-ups, numbers, and whether they are up to date."""

from __future__ import annotations

from pathlib import Path

import pytest
from study_cases import LOSSES, LOSSES_OF_THE_MIX, RECORDS

from experiments.study import figures, records
from experiments.study.arms import GROUPS
from experiments.study.records import SMALL, read_study
from softplus_attention.charts.model import LineChart, Series

ROOT = Path(__file__).parents[2]


def series_named(*values: list[float]) -> list[Series]:
    return [Series(str(number), [1, 64], own) for number, own in enumerate(values)]


@pytest.fixture(scope="module")
def measured() -> dict[str, list[LineChart]]:
    sizes = [size for size in read_study(ROOT / "results" / "study") if size.name not in SMALL]
    return figures.make_figures(sizes)


def test_lines_have_distinct_styles(measured: dict[str, list[LineChart]]) -> None:
    for name, (chart, *_) in measured.items():
        looks = [(series.look, series.dashed, series.reference) for series in chart.series]
        assert len(set(looks)) == len(looks), name


@pytest.mark.parametrize("name", ["10m", "mix-10m", "mix-85m-again"])
def test_arms_have_one_style_in_both_figures(name: str, measured: dict[str, list[LineChart]]) -> None:
    charts = (measured[f"study-{quantity}-{name}"][0] for quantity in ("loss", "gain"))
    loss, gain = ({series.name: series.look for series in x.series if not series.reference} for x in charts)
    assert loss == gain


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
    """Diverging lines do not squeeze the others."""
    assert figures.close_up(quantity, series_named(*values)) == (limits and pytest.approx(limits))


def test_numbers_of_the_figures() -> None:
    runs: dict[str, list[records.Run]] = {}
    for content in sorted(RECORDS, key=lambda run: "global_every" in run["config"]):
        runs.setdefault(content["arm"], []).append(records.read_record(content))
    order = [arm for group in GROUPS.values() for arm in group if arm in runs]
    drawn = figures.make_figures([records.Size("10m", {arm: runs[arm] for arm in sorted(runs, key=order.index)})])
    assert sorted(drawn) == ["study-gain-10m", "study-gain-mix-10m", "study-loss-10m", "study-loss-mix-10m"]
    assert sorted(figures.figure_csv(drawn["study-loss-10m"]).splitlines()) == sorted(LOSSES.splitlines())
    assert sorted(figures.figure_csv(drawn["study-loss-mix-10m"]).splitlines()) == sorted(
        LOSSES_OF_THE_MIX.splitlines()
    )
    gains = figures.figure_csv(drawn["study-gain-10m"]).splitlines()
    assert "softmax,256,-1.10000,0.03000" in gains
    assert not any(line.split(",")[1] == "4" for line in gains), "no control exists at the training length"


def test_figures_are_written(tmp_path: Path) -> None:
    size = records.Size("10m", {"softmax": [records.read_record(RECORDS[0])]})
    figures.write_figures(tmp_path, figures.make_figures([size]))
    assert figures.stale_figures(tmp_path, figures.make_figures([size])) == []
    assert ">softmax, sliding window of 4</text>" in (tmp_path / "study-loss-10m.svg").read_text()
    (tmp_path / "study-gain-10m.svg").unlink()
    assert figures.stale_figures(tmp_path, figures.make_figures([size])) == ["study-gain-10m"]


def test_figures_are_up_to_date(measured: dict[str, list[LineChart]]) -> None:
    assert figures.stale_figures(ROOT / "docs" / "figures", measured) == []
