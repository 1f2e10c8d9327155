"""Writes the tables and the sentences of docs/performance.md from the results of the benchmarks.

python pages/attention_page.py            rewrites what stands between <!-- begin: NAME --> and <!-- end: NAME -->
python pages/attention_page.py --check    writes nothing; exit status 1 where it would
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from attention_rows import FILE, SHOWN_IN_DECODE, Goal, Row, goals, of_training, read_benchmark, read_results
from attention_words import decoding, on_its_inputs, the_host, the_model, the_run, what_is_met
from claims import between, hundredths, written
from cpu_tables import FILE as CPU
from cpu_tables import memory_table, the_cpu_run, time_table
from page_blocks import table_of, table_text, write_page
from training_tables import FILE as TRAINING
from training_tables import the_training_run, training_table

ROOT = Path(__file__).parents[1]
NAMES = {
    "sdpa flash": "SDPA, FlashAttention-2",
    "sdpa cudnn": "SDPA, cuDNN",
    "flex softmax": "FlexAttention, softmax",
    "flex lssar p=15": "FlexAttention, LSSAR in two passes, forward only",
    "lssar p=15": "LSSAR, p = 15",
    "lssar p=3": "LSSAR, p = 3",
    "lssar learned": "LSSAR, powers that heads learn",
    "lssar p=15 without offset": "LSSAR, p = 15, no 1 subtracted",
    "lssar learned without offset": "LSSAR, powers that heads learn, no 1 subtracted",
    "lssa": "LSSA",
    "lssar p=15 compiled": "LSSAR, p = 15, compiled",
    "reference p=15": "reference, eager",
    "reference compiled": "reference, compiled",
    "lssar p=15 unit keys": "LSSAR, p = 15, cache of unit keys",
}
OF_DECODE = NAMES | {"lssar p=15": "LSSAR, p = 15, cache of raw keys"}


def number(x: float | None) -> str:
    if x is None:
        return ""
    return f"{x:,.0f}" if x >= 100 else f"{x:.3g}"


def times(row: Row | None) -> str:
    if row is None:
        return ""
    return " / ".join(number(row[name]) for name in ("forward_ms", "backward_ms") if row.get(name) is not None)


def ratio(row: Row | None) -> str:
    return "" if row is None else f"{row.get('ratio', row['forward_ratio']):.2f}"


def by_length(rows: Sequence[Row], names: dict[str, str]) -> str:
    """Contenders down, lengths across: times, and the ratio to FlashAttention-2."""
    found = {(row["contender"], row["length"]): row for row in rows}
    shown = [name for name in names if any(row["contender"] == name for row in rows)]
    lengths = sorted({row["length"] for row in rows})
    columns, head = [[names[name] for name in shown]], [""]
    for length in lengths:
        head += [f"T = {length}", "ratio"]
        columns += [[cell(found.get((name, length))) for name in shown] for cell in (times, ratio)]
    head.append(f"step MiB, T = {lengths[0]}")
    columns.append([number(found.get((name, lengths[0]), {}).get("step_mib")) for name in shown])
    return table_text(head, columns)


def decode_table(rows: Sequence[Row]) -> str:
    found = {(row["contender"], row["length"]): row for row in rows}
    lengths = sorted({row["length"] for row in rows})
    columns = [[OF_DECODE[name] for name in SHOWN_IN_DECODE]]
    for length in lengths:
        cells = [found.get((name, length)) for name in SHOWN_IN_DECODE]
        columns.append([f"{number(x['forward_ms'])} ({x['forward_ratio']:.2f})" if x else "" for x in cells])
    return table_text(["", *(f"{length:,}" for length in lengths)], columns)


def goals_table(rows: Sequence[Row]) -> str:
    on_a_model = {goal.words: between(goal.values, hundredths) for goal in of_training(rows, "trained")}
    cells: dict[str, Callable[[Goal], str]] = {
        "": lambda goal: goal.words,
        "measured": lambda goal: between(goal.values, hundredths),
        "on a model's inputs": lambda goal: on_a_model.get(goal.words, ""),
        "at most": lambda goal: f"{goal.most:g}",
        "goal": lambda goal: f"{goal.goal:g}",
        "met": lambda goal: goal.met,
    }
    return table_of(goals(rows), cells)


def of_section(results: dict[str, Any], section: str, head_dim: int | None = None) -> list[Row]:
    return [row for row in results["rows"] if row["section"] == section and head_dim in (None, row["head_dim"])]


Block = Callable[[dict[str, Any]], str]
OF_ATTENTION: dict[str, Block] = {
    "attention-run": the_run,
    "attention-d64": lambda results: by_length(of_section(results, "train", 64), NAMES),
    "attention-d128": lambda results: by_length(of_section(results, "train", 128), NAMES),
    "attention-host": the_host,
    "attention-compiled": lambda results: by_length(of_section(results, "compile"), NAMES),
    "attention-goals": lambda results: goals_table(results["rows"]),
    "attention-met": what_is_met,
    "attention-trained-run": the_model,
    "attention-trained-d64": lambda results: by_length(of_section(results, "trained", 64), NAMES),
    "attention-trained-d128": lambda results: by_length(of_section(results, "trained", 128), NAMES),
    "attention-trained": on_its_inputs,
    "attention-decode": lambda results: decode_table(of_section(results, "decode")),
    "attention-decoding": decoding,
}
OF_CPU: dict[str, Block] = {"cpu-run": the_cpu_run, "cpu-time": time_table, "cpu-memory": memory_table}
OF_TRAINING: dict[str, Block] = {"training-run": the_training_run, "training-times": training_table}
BLOCKS = [*OF_CPU, *OF_ATTENTION, *OF_TRAINING]


def blocks_of(results: Path) -> dict[str, str]:
    return {
        **written(OF_CPU, read_results(results / CPU, "benchmarks/cpu.py"), "pages/cpu_tables.py"),
        **written(OF_ATTENTION, read_benchmark(results / FILE), "pages/attention_words.py"),
        **written(OF_TRAINING, read_results(results / TRAINING, "benchmarks/training.py"), "pages/training_tables.py"),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    page = ROOT / "docs" / "performance.md"
    return write_page("attention_page.py", arguments, ROOT / "results", page, BLOCKS, blocks_of)


if __name__ == "__main__":
    sys.exit(main())
