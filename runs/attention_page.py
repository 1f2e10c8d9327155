"""Writes the GPU tables of docs/performance.md from the results of benchmarks/attention.py.

python runs/attention_page.py            rewrites what stands between <!-- begin: attention-* --> and its end
python runs/attention_page.py --check    writes nothing; exit status 1 where it would
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from page_blocks import PageError, table, write_page

ROOT = Path(__file__).parents[1]
FILE = "attention-h200.json"
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
SHOWN_IN_DECODE = ("sdpa cudnn", "sdpa flash", "flex softmax", "lssar p=15 unit keys", "lssar p=15")
NEEDED = [
    *(("train", name) for name in ("sdpa flash", "lssar p=15", "lssa")),
    *(("decode", name) for name in SHOWN_IN_DECODE),
    ("compile", "reference compiled"),
]
Row = dict[str, Any]


def number(x: float | None) -> str:
    if x is None:
        return ""
    return f"{x:,.0f}" if x >= 100 else f"{x:.3g}"


def read_rows(path: Path) -> list[Row]:
    if not path.exists():
        raise PageError(f"{path} is not there: benchmarks/attention.py writes it")
    rows = [row for row in json.loads(path.read_text())["rows"] if row["status"] == "ok"]
    there = {(row["section"], row["contender"]) for row in rows}
    if missing := [f"{name} of {section}" for section, name in NEEDED if (section, name) not in there]:
        raise PageError(f"{path} has no rows for {', '.join(missing)}")
    return rows


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
    return "\n".join(table(head, columns)).strip()


def decode_table(rows: Sequence[Row]) -> str:
    found = {(row["contender"], row["length"]): row for row in rows}
    lengths = sorted({row["length"] for row in rows})
    columns = [[OF_DECODE[name] for name in SHOWN_IN_DECODE]]
    for length in lengths:
        cells = [found.get((name, length)) for name in SHOWN_IN_DECODE]
        columns.append([f"{number(x['forward_ms'])} ({x['forward_ratio']:.2f})" if x else "" for x in cells])
    return "\n".join(table(["", *(f"{length:,}" for length in lengths)], columns)).strip()


def between(values: Sequence[float]) -> str:
    low, high = (f"{x:.2f}" for x in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"


def times_of_a_sequence(rows: Sequence[Row], section: str, name: str) -> dict[tuple[int, int], float]:
    """By head dimension and length. Memory does not hold as many sequences of one contender as of another."""
    chosen = [x for x in rows if (x["section"], x["contender"]) == (section, name)]
    return {(x["head_dim"], x["length"]): x["total_ms"] / x["batch"] for x in chosen}


def goals_table(rows: Sequence[Row]) -> str:
    """What was to be reached, and what is: ratios to FlashAttention-2 but for the last two."""

    def of(section: str, name: str, what: str, which: Callable[[Row], bool]) -> list[float]:
        return [x[what] for x in rows if x["section"] == section and x["contender"] == name and which(x)]

    lines: list[tuple[str, list[float], float, float]] = []
    for d, most, goal in ((128, 1.3, 0.95), (64, 1.6, 1.15)):
        values = of("train", "lssar p=15", "ratio", lambda x, d=d: x["head_dim"] == d and x["length"] >= 4096)
        lines.append((f"LSSAR forward + backward, D = {d}, T from 4096", values, most, goal))
    short = of("train", "lssar p=15", "ratio", lambda x: x["length"] == 1024)
    lines.append(("the same at T = 1024, both D", short, 1.7, 1.4))
    for d, most, goal in ((128, 1.3, 0.9), (64, 1.6, 1.2)):
        values = of("train", "lssar p=15", "forward_ratio", lambda x, d=d: x["head_dim"] == d)
        lines.append((f"LSSAR forward alone, D = {d}, all T", values, most, goal))
    for d in (128, 64):
        values = of("train", "lssa", "forward_ratio", lambda x, d=d: x["head_dim"] == d)
        lines.append((f"LSSA forward, D = {d}, all T", values, 0.85, 0.7))
    lines.append(("memory of a training step", of("train", "lssar p=15", "step_ratio", lambda x: True), 1.5, 1.3))
    cached = of("decode", "lssar p=15 unit keys", "forward_ratio", lambda x: x["length"] >= 32768)
    lines.append(("decode from 32K keys, unit keys / the fastest SDPA", cached, 1.2, 0.9))
    plain, ours = (
        times_of_a_sequence(rows, *kind) for kind in (("compile", "reference compiled"), ("train", "lssar p=15"))
    )
    shares = [ours[place] / total for place, total in plain.items()]
    lengths = ", ".join(f"{length}" for _, length in sorted(plain))
    lines.append((f"LSSAR forward + backward / compiled reference, T = {lengths}", shares, 0.2, 0.1))
    columns = [
        [line[0] for line in lines],
        [between(line[1]) for line in lines],
        [f"{line[2]:g}" for line in lines],
        [f"{line[3]:g}" for line in lines],
        ["goal" if max(x) <= goal else "yes" if max(x) <= most else "no" for _, x, most, goal in lines],
    ]
    return "\n".join(table(["", "measured", "at most", "goal", "met"], columns)).strip()


def blocks_of(results: Path) -> dict[str, str]:
    rows = read_rows(results / FILE)
    train = [row for row in rows if row["section"] == "train"]
    made = [row for row in rows if row["section"] == "compile"]
    return {
        "attention-d64": by_length([row for row in train if row["head_dim"] == 64], NAMES),
        "attention-d128": by_length([row for row in train if row["head_dim"] == 128], NAMES),
        "attention-compiled": by_length(made, NAMES),
        "attention-decode": decode_table([row for row in rows if row["section"] == "decode"]),
        "attention-goals": goals_table(rows),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    page = ROOT / "docs" / "performance.md"
    names = ["attention-d64", "attention-d128", "attention-compiled", "attention-decode", "attention-goals"]
    return write_page("attention_page.py", arguments, ROOT / "results", page, names, blocks_of)


if __name__ == "__main__":
    sys.exit(main())
