"""The section of the runs that `runs/study.py` writes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from softplus_attention.report.charts import LineChart, Series
from softplus_attention.report.figures import COLOURS
from softplus_attention.report.reading import Found, Result, UnreadableError, count_of, mapping, rows_of, text_of
from softplus_attention.report.reading import number_of as number
from softplus_attention.report.sections import Block, Looks, checked

LENGTH = "length (tokens)"
ROTARY = "rotary positions in every layer"
MIX = "mix of layers"
KINDS = (ROTARY, MIX)


def kind_of(config: Mapping[str, Any]) -> str:
    """In a mix of layers some see everything and have no positions, the others look back a window."""
    return MIX if config.get("global_every") else ROTARY


@dataclass(frozen=True)
class StudyRun:
    size: str
    kind: str
    name: str
    training_length: int
    rows: list[dict[str, Any]]

    def series(self, looks: Looks) -> Series:
        lengths = [float(count_of(row, "length")) for row in self.rows]
        losses, errors = ([number(row, word) for row in self.rows] for word in ("loss", "standard_error"))
        return self.drawn(lengths, losses, errors, looks)

    def gains(self, looks: Looks) -> Series:
        rows = [row for row in self.rows if row.get("control") is not None]
        lengths = [float(count_of(row, "length")) for row in rows]
        controls = [mapping(row, "control") for row in rows]
        gains, errors = ([number(control, word) for control in controls] for word in ("gain", "standard_error"))
        return self.drawn(lengths, gains, errors, looks)

    def drawn(self, x: list[float], y: list[float | None], error: list[float | None], looks: Looks) -> Series:
        look = looks.of(self.name)
        # The second round of colours is dashed, with hollow marks: a chart of a kind can have more runs than colours.
        return Series(self.name, x, y, error, look, dashed=look // len(COLOURS) % 2 == 1)


def read_run(result: Result) -> StudyRun:
    data = result.data
    config = mapping(data, "config")
    length = count_of(config, "sequence_length")
    if not length:
        raise UnreadableError("`sequence_length` must be above 0")
    rows = rows_of(mapping(mapping(data, "evaluation"), "lengths"), "lengths")
    name = f"{text_of(data, 'arm')}, seed {count_of(data, 'seed')}"
    run = StudyRun(text_of(data, "size"), kind_of(config), name, length, rows)
    run.series(Looks())
    run.gains(Looks())
    return run


def study_blocks(found: Found, looks: Looks) -> list[Block]:
    """Charts of each size, apart for the kinds of layers."""
    runs = list(checked(found, "study", read_run))
    groups = [
        [run for run in runs if (run.size, run.kind) == (size, kind)]
        for size in dict.fromkeys(run.size for run in runs)
        for kind in KINDS
    ]
    return [chart for group in groups if group for chart in charts_of(group, looks)]


def charts_of(runs: Sequence[StudyRun], looks: Looks) -> list[LineChart]:
    size, kind = runs[0].size, runs[0].kind
    words: dict[str, Any] = {"x_scale": "log2", "times_of": runs[0].training_length}
    return [
        LineChart(
            f"Study, {size}: loss by length, {kind}",
            LENGTH,
            "mean loss (nats)",
            [run.series(looks) for run in runs],
            "The same documents cut to each length. Bars are standard errors over texts, which all arms share.",
            **words,
        ),
        LineChart(
            f"Study, {size}: what the far context is worth, {kind}",
            LENGTH,
            "gain (nats)",
            [run.gains(looks) for run in runs],
            "The loss of the same tokens with the last training length alone, minus that with everything before.",
            **words,
        ),
    ]
