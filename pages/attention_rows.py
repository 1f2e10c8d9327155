"""The rows of benchmarks/attention.py, and what was to be reached by them."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from claims import MissingError
from page_blocks import PageError

FILE = "attention-h200.json"
OURS, BASELINE, FASTEST = "lssar p=15", "sdpa flash", "sdpa cudnn"
LEARNED, STAGE_1, UNIT_KEYS = "lssar learned", "lssa", "lssar p=15 unit keys"
SHOWN_IN_DECODE = (FASTEST, BASELINE, "flex softmax", UNIT_KEYS, OURS)
NEEDED = [
    *((section, name) for section in ("train", "trained") for name in (BASELINE, OURS, STAGE_1)),
    *(("decode", name) for name in SHOWN_IN_DECODE),
    ("compile", "reference compiled"),
]
SHORT, LONG = 1024, 4096
LONG_CACHE = 32768
Row = dict[str, Any]


def read_results(path: Path, script: str) -> dict[str, Any]:
    if not path.exists():
        raise PageError(f"{path} is not there: {script} writes it")
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def read_benchmark(path: Path) -> dict[str, Any]:
    """Without the rows that failed."""
    found = read_results(path, "benchmarks/attention.py")
    rows = [row for row in found["rows"] if row["status"] == "ok"]
    there = {(row["section"], row["contender"]) for row in rows}
    if missing := [f"{name} of {section}" for section, name in NEEDED if (section, name) not in there]:
        raise PageError(f"{path} has no rows for {', '.join(missing)}")
    return found | {"rows": rows}


def command_of(results: dict[str, Any]) -> str:
    """Without what says where results go and of which commit they are."""
    return re.sub(r" --(commit|output) \S+", "", results["command"])


def rows_of(
    rows: Sequence[Row],
    contender: str,
    section: str = "train",
    *,
    head_dim: int | None = None,
    length: int | None = None,
    least: int = 0,
) -> list[Row]:
    """By head dimension and length, at least one."""
    found = [
        row
        for row in rows
        if (row["section"], row["contender"]) == (section, contender)
        and head_dim in (None, row["head_dim"])
        and length in (None, row["length"])
        and row["length"] >= least
    ]
    if not found:
        places = {"D": head_dim, "T": length, "T from": least or None}
        where = "".join(f", {word} {value}" for word, value in places.items() if value)
        raise MissingError(f"{contender} in the section {section}{where}")
    return sorted(found, key=lambda row: (row["head_dim"], row["length"]))


def column(rows: Sequence[Row], word: str) -> list[float]:
    for row in rows:
        if row.get(word) is None:
            raise MissingError(f"{word} of {row['contender']} at D {row['head_dim']}, T {row['length']}")
    return [row[word] for row in rows]


def over(rows: Sequence[Row], ours: str, theirs: str, *, least: int = 0) -> list[float]:
    """Times of forward and backward, of one contender over another's at the same place."""
    found = []
    for row in rows_of(rows, ours, least=least):
        beside = rows_of(rows, theirs, head_dim=row["head_dim"], length=row["length"])
        found.append(row["total_ms"] / beside[0]["total_ms"])
    return found


@dataclass(frozen=True)
class Goal:
    """A limit and a goal for ratios, which are named by where they were measured."""

    words: str
    name: str
    ratios: list[tuple[str, float]]
    most: float
    goal: float

    @property
    def values(self) -> list[float]:
        return [ratio for _, ratio in self.ratios]

    @property
    def met(self) -> str:
        highest = max(self.values)
        return "goal" if highest <= self.goal else "yes" if highest <= self.most else "no"


def at(rows: Sequence[Row], word: str) -> list[tuple[str, float]]:
    return [(f"T = {row['length']}", row[word]) for row in rows]


def at_both(rows: Sequence[Row], word: str) -> list[tuple[str, float]]:
    return [(f"D = {row['head_dim']}, T = {row['length']}", row[word]) for row in rows]


def goals(rows: Sequence[Row]) -> list[Goal]:
    """Ratios to FlashAttention-2 but for the last two."""
    return [*of_training(rows), of_decoding(rows), of_compiled(rows)]


def of_training(rows: Sequence[Row], section: str = "train") -> list[Goal]:
    found = []
    for d, most, goal in ((128, 1.3, 0.95), (64, 1.6, 1.15)):
        ratios = at(rows_of(rows, OURS, section, head_dim=d, least=LONG), "ratio")
        words = f"LSSAR forward + backward, D = {d}, T from {LONG}"
        found.append(Goal(words, f"the training step at D = {d}", ratios, most, goal))
    short = at_both(rows_of(rows, OURS, section, length=SHORT), "ratio")
    found.append(Goal(f"the same at T = {SHORT}, both D", f"the training step at T = {SHORT}", short, 1.7, 1.4))
    for d, most, goal in ((128, 1.3, 0.9), (64, 1.6, 1.2)):
        ratios = at(rows_of(rows, OURS, section, head_dim=d), "forward_ratio")
        name = f"LSSAR's forward at D = {d}"
        found.append(Goal(f"LSSAR forward alone, D = {d}, all T", name, ratios, most, goal))
    for d in (128, 64):
        ratios = at(rows_of(rows, STAGE_1, section, head_dim=d), "forward_ratio")
        found.append(Goal(f"LSSA forward, D = {d}, all T", f"LSSA's forward at D = {d}", ratios, 0.85, 0.7))
    memory = at_both(rows_of(rows, OURS, section), "step_ratio")
    return [*found, Goal("memory of a training step", "memory", memory, 1.5, 1.3)]


def of_decoding(rows: Sequence[Row]) -> Goal:
    cached = rows_of(rows, UNIT_KEYS, "decode", least=LONG_CACHE)
    ratios = [(f"{row['length']:,} keys", row["forward_ratio"]) for row in cached]
    return Goal("decode from 32K keys, unit keys / the fastest SDPA", "decoding", ratios, 1.2, 0.9)


def of_compiled(rows: Sequence[Row]) -> Goal:
    plain = rows_of(rows, "reference compiled", "compile")
    ratios = []
    for row in plain:
        ours = rows_of(rows, OURS, head_dim=row["head_dim"], length=row["length"])[0]
        # Of one sequence: memory may not hold as many of the reference.
        share = (ours["total_ms"] / ours["batch"]) / (row["total_ms"] / row["batch"])
        ratios.append((f"T = {row['length']}", share))
    lengths = ", ".join(str(row["length"]) for row in plain)
    words = f"LSSAR forward + backward / compiled reference, T = {lengths}"
    return Goal(words, "the compiled reference", ratios, 0.2, 0.1)
