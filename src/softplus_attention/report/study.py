"""The section of the runs that `runs/study.py` writes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from softplus_attention.report.charts import LineChart, Series
from softplus_attention.report.reading import Found, Result, UnreadableError, count_of, mapping, rows_of, text_of
from softplus_attention.report.reading import number_of as number
from softplus_attention.report.sections import Block, Looks, checked

LENGTH = "length (tokens)"


@dataclass(frozen=True)
class StudyRun:
    size: str
    name: str
    training_length: int
    rows: list[dict[str, Any]]

    def series(self, looks: Looks) -> Series:
        lengths = [float(count_of(row, "length")) for row in self.rows]
        losses, errors = ([number(row, word) for row in self.rows] for word in ("loss", "standard_error"))
        return Series(self.name, lengths, losses, errors, looks.of(self.name))

    def gains(self, looks: Looks) -> Series:
        rows = [row for row in self.rows if row.get("control") is not None]
        lengths = [float(count_of(row, "length")) for row in rows]
        controls = [mapping(row, "control") for row in rows]
        gains, errors = ([number(control, word) for control in controls] for word in ("gain", "standard_error"))
        return Series(self.name, lengths, gains, errors, looks.of(self.name))


def read_run(result: Result) -> StudyRun:
    data = result.data
    length = count_of(mapping(data, "config"), "sequence_length")
    if not length:
        raise UnreadableError("`sequence_length` must be above 0")
    rows = rows_of(mapping(mapping(data, "evaluation"), "lengths"), "lengths")
    run = StudyRun(text_of(data, "size"), f"{text_of(data, 'arm')}, seed {count_of(data, 'seed')}", length, rows)
    run.series(Looks())
    run.gains(Looks())
    return run


def study_blocks(found: Found, looks: Looks) -> list[Block]:
    runs = list(checked(found, "study", read_run))
    blocks: list[Block] = []
    for size in dict.fromkeys(run.size for run in runs):
        of_size = [run for run in runs if run.size == size]
        words: dict[str, Any] = {"x_scale": "log2", "times_of": of_size[0].training_length}
        blocks.append(
            LineChart(
                f"Study, {size}: loss by length",
                LENGTH,
                "mean loss (nats)",
                [run.series(looks) for run in of_size],
                "The same documents cut to each length. Bars are standard errors over texts, which all arms share.",
                **words,
            )
        )
        blocks.append(
            LineChart(
                f"Study, {size}: what the far context is worth",
                LENGTH,
                "gain (nats)",
                [run.gains(looks) for run in of_size],
                "The loss of the same tokens with the last training length alone, minus that with everything before.",
                **words,
            )
        )
    return blocks
