"""The tables of README.md: losses of the study, and speed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from experiments.study.records import Size, loss_at, read_study
from tools.tables import benchmarks
from tools.tables.benchmarks import LONG, LONG_CACHE, OURS, TRAINING, UNIT_KEYS, Row, column, select
from tools.tables.markdown import TableError, hundredths, read_results, table, value_range

MULTIPLES = (1, 16, 64)
LOGN = "softmax-qknorm-logn"
OURS_WIDE, THEIRS_WIDE = "lssar-learned-log-global3-wide", f"{LOGN}-learned-global3-wide"
# Title of a group of rows -> (size of its runs, {row title: (arm, option at inference)}).
ROWS: dict[str, tuple[str, dict[str, tuple[str, str | None]]]] = {
    "rotary positions in every layer, 30M parameters": (
        "10m-again",
        {
            "LSSAR, p = 15, as in the paper": ("lssar-p15", None),
            "LSSAR, p rising to 15 in training": ("lssar-rising", None),
            "softmax + QK-norm + log N": (LOGN, None),
            "the same with a sliding window of 512 tokens": (LOGN, "window=512"),
        },
    ),
    **{
        f"two local layers to one global layer without positions, {parameters}": (
            size,
            {
                "softmax + QK-norm + log N, learned scale": (THEIRS_WIDE, None),
                "LSSAR, learned power": (OURS_WIDE, None),
            },
        )
        for parameters, size in (("30M", "10m-again"), ("354M", "300m-again"))
    },
}


def losses_table(sizes: Sequence[Size]) -> str:
    known = {size.name: size for size in sizes}
    rows: list[list[str]] = []
    for group, (name, arms) in ROWS.items():
        if name not in known:
            raise TableError(f"there are no runs of {name}")
        size = known[name]
        rows.append([f"**{group}**", *[""] * len(MULTIPLES)])
        for title, (arm, option) in arms.items():
            curves = size.curves(arm, option) if arm in size.arms else []
            found = [loss_at(curves, multiple) for multiple in MULTIPLES]
            if None in found:
                raise TableError(f"{arm} at {name} was not measured at {MULTIPLES} times its length")
            rows.append([title, *(f"{loss.mean:.3f}" for loss in found if loss)])
    lengths = {known[name].any_run.config["sequence_length"] for name, _ in ROWS.values()}
    if len(lengths) != 1:
        raise TableError(f"the runs of the table differ in training length: {sorted(lengths)}")
    length = lengths.pop()
    head = ["validation loss at (tokens)", *(f"{multiple * length:,}" for multiple in MULTIPLES)]
    return table(head, list(zip(*rows, strict=True)))


def speed_table(rows: Sequence[Row], training: Sequence[Row]) -> str:
    whole_model = next((x["time_to_softmax"] for x in training if x["attention"] == "lssar"), None)
    if whole_model is None:
        raise TableError(f"{TRAINING} has no row of lssar")

    def by_head_dim(chosen: Sequence[Row], name: str) -> list[str]:
        found = [column([row for row in chosen if row["head_dim"] == d], name) for d in (64, 128)]
        return [value_range(values, hundredths) if values else "" for values in found]

    lines = {
        f"LSSAR, training step of the op, from {LONG:,} tokens": by_head_dim(select(rows, OURS, least=LONG), "ratio"),
        "LSSAR, forward": by_head_dim(select(rows, OURS), "forward_ratio"),
        "LSSAR, memory of a training step": by_head_dim(select(rows, OURS), "step_ratio"),
        "LSSAR, decode from 32K keys, relative to the fastest SDPA": by_head_dim(
            select(rows, UNIT_KEYS, "decode", least=LONG_CACHE), "forward_ratio"
        ),
        "LSSAR, training step of GPT-2 small, 1,024 tokens": [hundredths(whole_model), ""],
    }
    return table(["", "head dim 64", "head dim 128"], [list(lines), *zip(*lines.values(), strict=True)])


def make_tables(results: Path) -> dict[str, str]:
    training = read_results(results / TRAINING, "benchmarks/training.py")["rows"]
    return {
        "losses": losses_table(read_study(results / "study")),
        "speed": speed_table(benchmarks.read_attention(results), training),
    }
