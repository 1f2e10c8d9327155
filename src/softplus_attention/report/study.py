"""The section of the runs that `experiments/study/run.py` writes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from softplus_attention.charts.draw import COLOURS
from softplus_attention.charts.model import (
    HeatMap,
    LineChart,
    Number,
    Series,
    SeriesStyles,
    Table,
    percent_words,
    shown,
)
from softplus_attention.evaluation.layers import mean
from softplus_attention.report.inside import STEADY, STEADY_CAPTION, STEADY_HEAD, both, grown
from softplus_attention.report.reading import Result, ResultSet, UnreadableError, count_of, mapping, rows_of, text_of
from softplus_attention.report.reading import number_of as number
from softplus_attention.report.sections import Block, checked

LENGTH = "length (tokens)"
ROTARY = "rotary positions in every layer"
MIX = "mix of layers"
KINDS = (ROTARY, MIX)


def kind_of(config: Mapping[str, Any]) -> str:
    """In a mix of layers some see everything and have no positions, the others look back a window."""
    return MIX if config.get("global_every") else ROTARY


GAIN = ("gain", "standard_error")
Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class StudyRun:
    size: str
    kind: str
    name: str
    training_length: int
    rows: Rows
    passkey: dict[tuple[int, float], Number]
    inside: Rows
    variants: dict[str, Rows]  # what was changed at inference -> its rows

    def series(self, styles: SeriesStyles) -> Series:
        return loss_series(self.name, self.rows, styles.of(self.name))

    def gains(self, styles: SeriesStyles) -> Series:
        rows = [row for row in self.rows if row.get("control") is not None]
        lengths = [float(count_of(row, "length")) for row in rows]
        controls = [mapping(row, "control") for row in rows]
        gains, errors = ([number(control, word) for control in controls] for word in GAIN)
        return drawn(self.name, lengths, gains, errors, styles.of(self.name))


def drawn(name: str, x: Sequence[float], y: Sequence[Number], error: Sequence[Number] | None, look: int) -> Series:
    # The second round of colours is dashed, with hollow marks: a chart of a kind can have more runs than colours.
    return Series(name, x, y, error, look, dashed=look // len(COLOURS) % 2 == 1)


def loss_series(name: str, rows: Rows, look: int) -> Series:
    losses, errors = ([number(row, word) for row in rows] for word in ("loss", "standard_error"))
    return drawn(name, [float(count_of(row, "length")) for row in rows], losses, errors, look)


def read_run(result: Result) -> StudyRun:
    data = result.data
    config = mapping(data, "config")
    length = count_of(config, "sequence_length")
    if not length:
        raise UnreadableError("`sequence_length` must be above 0")
    evaluation = mapping(data, "evaluation")
    rows = rows_of(mapping(evaluation, "lengths"), "lengths")
    name = f"{text_of(data, 'arm')}, seed {count_of(data, 'seed')}"
    changed = mapping(evaluation, "variants") if "variants" in evaluation else {}
    variants = {option: rows_of(mapping(changed, option), "lengths") for option in changed}
    run = StudyRun(
        text_of(data, "size"),
        kind_of(config),
        name,
        length,
        rows,
        read_passkey(evaluation),
        read_inside(evaluation),
        variants,
    )
    charts_of([run], SeriesStyles())  # reads every number: what is wrong is found while the file's name is known
    return run


def read_passkey(evaluation: dict[str, Any]) -> dict[tuple[int, float], Number]:
    cells: dict[tuple[int, float], Number] = {}
    for cell in rows_of(evaluation, "passkey") if "passkey" in evaluation else []:
        depth, right, of = number(cell, "depth"), number(cell, "correct"), number(cell, "trials")
        if depth is None:
            raise UnreadableError("a cell without a `depth`")
        cells[count_of(cell, "length"), depth] = right / of if right is not None and of else None
    return cells


INSIDE = (
    ("log_keys", "log N"), ("stage1_entropy", "stage 1"), ("stage1_entropy_frozen", "stage 1, log N held"),
    ("entropy", "final"), ("sink", "first token, %"), ("effective_keys", "effective keys"), ("zeros", "zeros, %"),
    ("empty_tiles", "empty tiles, %"),
)  # fmt: skip
SHARES = {"sink", "zeros", "empty_tiles"}


def read_inside(evaluation: dict[str, Any]) -> Rows:
    rows = rows_of(evaluation, "inside") if "inside" in evaluation else []
    for row in rows:
        count_of(row, "length")
        for name, _ in INSIDE:
            number(row, name)
    return sorted(rows, key=lambda row: row["length"])


def study_blocks(found: ResultSet, styles: SeriesStyles) -> list[Block]:
    """Charts of each size, apart for the kinds of layers."""
    runs = list(checked(found, "study", read_run))
    groups = [
        [run for run in runs if (run.size, run.kind) == (size, kind)]
        for size in dict.fromkeys(run.size for run in runs)
        for kind in KINDS
    ]
    return [block for group in groups if group for block in charts_of(group, styles)]


def charts_of(runs: Sequence[StudyRun], styles: SeriesStyles) -> list[Block]:
    size, kind = runs[0].size, runs[0].kind
    words: dict[str, Any] = {"x_scale": "log2", "times_of": runs[0].training_length}
    return [
        LineChart(
            f"Study, {size}: loss by length, {kind}",
            LENGTH,
            "mean loss (nats)",
            [run.series(styles) for run in runs],
            "The same documents cut to each length. Bars are standard errors over texts, which all arms share.",
            **words,
        ),
        LineChart(
            f"Study, {size}: what the far context is worth, {kind}",
            LENGTH,
            "gain (nats)",
            [run.gains(styles) for run in runs],
            "The loss of the same tokens with the last training length alone, minus that with everything before.",
            **words,
        ),
        *variant_blocks([run for run in runs if run.variants], words),
        *passkey_blocks([run for run in runs if run.passkey], styles, words),
        *inside_blocks([run for run in runs if run.inside]),
    ]


def variant_blocks(runs: Sequence[StudyRun], words: dict[str, Any]) -> list[Block]:
    """Each run that was also evaluated with something changed at inference."""
    curves = [(run, {"as trained": run.rows, **run.variants}) for run in runs]
    blocks: list[Block] = [
        LineChart(
            f"Study, {run.size}: {run.name}, changed at inference",
            LENGTH,
            "mean loss (nats)",
            [loss_series(name, rows, look) for look, (name, rows) in enumerate(those.items())],
            "The same weights on the same documents.",
            **words,
        )
        for run, those in curves
    ]
    if not blocks:
        return []
    lengths = sorted({count_of(row, "length") for _, those in curves for rows in those.values() for row in rows})
    body = [[run.name, name, *variant_cells(rows, lengths)] for run, those in curves for name, rows in those.items()]
    head = [
        "run",
        "at inference",
        *(f"loss at {length}" for length in lengths),
        *(f"gain at {n}" for n in lengths[-1:]),
    ]
    caption = "In nats; the gain is what the far context is worth, with its standard error."
    return [*blocks, Table(f"Study, {runs[0].size}: changed at inference, {runs[0].kind}", head, body, caption)]


def variant_cells(rows: Rows, lengths: Sequence[int]) -> list[str]:
    found = {count_of(row, "length"): row for row in rows}
    losses = [shown(number(found[length], "loss")) if length in found else "" for length in lengths]
    gains = []
    for length in lengths[-1:]:
        control = found.get(length, {}).get("control")
        gain, error = ([number(mapping(found[length], "control"), n) for n in GAIN]) if control else (None, None)
        gains.append(shown(gain) + (f" ± {shown(error)}" if error is not None else ""))
    return losses + gains


def passkey_blocks(runs: Sequence[StudyRun], styles: SeriesStyles, words: dict[str, Any]) -> list[Block]:
    if not runs:
        return []
    lengths = sorted({length for run in runs for length, _ in run.passkey})
    depths = sorted({depth for run in runs for _, depth in run.passkey})
    means = [[mean([run.passkey.get((length, depth)) for depth in depths]) for length in lengths] for run in runs]
    blocks: list[Block] = [
        LineChart(
            f"Study, {runs[0].size}: pass keys found, by length, {runs[0].kind}",
            LENGTH,
            "accuracy, mean over depths",
            [
                drawn(run.name, lengths, values, None, styles.of(run.name))
                for run, values in zip(runs, means, strict=True)
            ],
            "Exact match of the whole key.",
            y_range=(0, 1),
            **words,
        )
    ]
    for run in runs:
        blocks.append(
            HeatMap(
                f"Study, {run.size}: pass keys, {run.name}",
                LENGTH,
                "depth of the key",
                [f"{length}\n{length / run.training_length:g}x" for length in lengths],
                [f"{depth:.0%}" for depth in depths],
                [[run.passkey.get((length, depth)) for length in lengths] for depth in depths],
                "accuracy",
                0,
                1,
                "0% is the beginning of the text, 100% its end.",
                percent=True,
            )
        )
    return blocks


def inside_blocks(runs: Sequence[StudyRun]) -> list[Block]:
    if not runs:
        return []
    means = "Means over rows, layers and heads"
    if runs[0].kind == MIX:
        means += ", local layers and global ones together: a run of `evaluate inside` tells them apart"
    body = [
        [run.name, shown(row["length"]), *(inside_cell(row, name) for name, _ in INSIDE)]
        for run in runs
        for row in run.inside
    ]
    where = f"Study, {runs[0].size}: "
    head = ["run", "length", *(words for _, words in INSIDE)]
    table = Table(f"{where}inside the attention, {runs[0].kind}", head, body, f"Entropies in nats. {means}.")
    steady = []
    for run in runs:
        first, last = run.inside[0], run.inside[-1]
        names = ("log_keys", "stage1_entropy", "stage1_entropy_frozen")
        if first is not last:
            ends = [[number(row, name) for row in (first, last)] for name in names]
            shares = [[share_of(value, most) for value, most in zip(pair, ends[0], strict=True)] for pair in ends[1:]]
            changes = [*(grown(*pair) for pair in ends), *(both(*pair) for pair in shares)]
            steady.append([run.name, shown(first["length"]), shown(last["length"]), *changes])
    if not steady:
        return [table]
    title = f"{where}{STEADY[0].lower()}{STEADY[1:]}, {runs[0].kind}"
    return [table, Table(title, STEADY_HEAD, steady, f"{STEADY_CAPTION} {means}.")]


def share_of(value: Number, most: Number) -> Number:
    return None if value is None or most is None or most <= 0 else value / most


def inside_cell(row: dict[str, Any], name: str) -> str:
    value = number(row, name)
    return percent_words(value) if name in SHARES else shown(value)
