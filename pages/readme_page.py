"""Writes the tables of README.md, and the sentences about what was measured, from the files of results/.

python pages/readme_page.py            rewrites what stands between <!-- begin: NAME --> and <!-- end: NAME -->
python pages/readme_page.py --check    writes nothing; exit status 1 where it would
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attention_rows import FILE, LONG, LONG_CACHE, OURS, STAGE_1, UNIT_KEYS, Row, read_benchmark, read_results, rows_of
from claims import MissingError, between, hundredths, written
from cpu_tables import FILE as CPU
from page_blocks import PageError, table_text, write_page
from readme_words import WORDS, Measured
from study_facts import Facts, Study
from study_findings_mix import millions
from study_runs import Size, loss_at, read_study
from training_tables import FILE as TRAINING

ROOT = Path(__file__).parents[1]
SIZE, OTHER_TEXT = "10m-again", "10m"  # the same models and steps
LARGE = {"124M": "85m-again", "354M": "300m-again"}
MULTIPLES = (1, 16, 64)
WIDE = {
    "softmax-qknorm-logn-learned-global3-wide": "that softmax, heads of 128 in place of 64",
    "lssar-learned-log-global3-wide": "that LSSAR, heads of 128 in place of 64",
}


@dataclass(frozen=True)
class Rows:
    """Of an arm that was trained at several of these sizes, those where it has more seeds."""

    sizes: tuple[str, ...]
    arms: dict[str, str]  # and what they are called


SHOWN = {
    "rotary positions in every layer": Rows(
        (SIZE, OTHER_TEXT),
        {
            "softmax": "softmax",
            "softmax-qknorm-logn": "softmax + QK-norm + log N",
            "lssar-p15": "LSSAR, p = 15, as in the paper",
            "lssar-rising": "LSSAR, p rising to 15 in training",
        },
    ),
    "two local layers for each global one without positions": Rows(
        (SIZE, OTHER_TEXT),
        {
            "softmax-qknorm-logn-learned-global3": "softmax + QK-norm + log N, a scale learned by each head",
            "lssar-learned-log-global3": "LSSAR, p = c log N, c learned by each head",
            **WIDE,
        },
    ),
    **{f"the last two with {model} parameters": Rows((size,), WIDE) for model, size in LARGE.items()},
}


def losses_table(sizes: Sequence[Size]) -> str:
    known = {size.name: size for size in sizes}
    if missing := [name for name in (SIZE, *LARGE.values()) if name not in known]:
        raise PageError(f"there are no runs of {', '.join(missing)}")
    length = known[SIZE].any_run.config["sequence_length"]
    for model, name in LARGE.items():
        if millions(Facts(known[name])) != model or known[name].any_run.config["sequence_length"] != length:
            raise PageError(f"{name} is not what the table of losses says")
    lines: list[list[str]] = []
    for kind, rows in SHOWN.items():
        lines.append([f"**{kind}**", *[""] * (1 + len(MULTIPLES))])
        for arm, words in rows.arms.items():
            trained = [known[name] for name in rows.sizes if name in known and arm in known[name].arms]
            if not trained:
                raise PageError(f"there is no run of {arm} at {rows.sizes[0]}")
            size = max(trained, key=lambda x: len(x.curves(arm)))
            cells = []
            for multiple in MULTIPLES:
                found = loss_at(size.curves(arm), multiple)
                if found is None:
                    raise PageError(f"{arm} at {size.name} was not measured at {multiple} times its length")
                cells.append(f"{found.mean:.3f}")
            lines.append([words, *cells, f"{len(size.curves(arm))}{' *' if size.name == OTHER_TEXT else ''}"])
    head = ["", *(f"{multiple * length:,}" for multiple in MULTIPLES), "seeds"]
    return table_text(head, [list(column) for column in zip(*lines, strict=True)])


def by_head_dim(rows: Sequence[Row], word: str) -> list[str]:
    values = [[row[word] for row in rows if row["head_dim"] == d] for d in (64, 128)]
    return [between(column, hundredths) if column else "" for column in values]


def speed_table(rows: Sequence[Row], training: Sequence[dict[str, Any]]) -> str:
    whole_model = next((x["time_to_softmax"] for x in training if x["attention"] == "lssar"), None)
    if whole_model is None:
        raise MissingError(f"lssar in {TRAINING}")
    long = rows_of(rows, OURS, least=LONG)
    lines = {
        f"LSSAR, training step of the op, {LONG:,} tokens and more": by_head_dim(long, "ratio"),
        "LSSAR, forward alone": by_head_dim(rows_of(rows, OURS), "forward_ratio"),
        "LSSA, forward alone": by_head_dim(rows_of(rows, STAGE_1), "forward_ratio"),
        "LSSAR, memory of a training step": by_head_dim(rows_of(rows, OURS), "step_ratio"),
        "LSSAR, decoding from 32K keys and more, cache of unit keys, to the fastest SDPA": by_head_dim(
            rows_of(rows, UNIT_KEYS, "decode", least=LONG_CACHE), "forward_ratio"
        ),
        "the same, cache of raw keys": by_head_dim(rows_of(rows, OURS, "decode", least=LONG_CACHE), "forward_ratio"),
        "LSSAR, training step of GPT-2 small at 1,024 tokens, to softmax's": [hundredths(whole_model), ""],
    }
    columns = [list(lines), *([cells[i] for cells in lines.values()] for i in (0, 1))]
    return table_text(["", "head dimension 64", "128"], columns)


def measured_in(results: Path, sizes: Sequence[Size]) -> Measured:
    return Measured(
        Study(sizes),
        read_benchmark(results / FILE)["rows"],
        read_results(results / CPU, "benchmarks/cpu.py"),
        read_results(results / "demo.json", "softplus-attention demo"),
        [read_results(results / "newton" / name, "softplus-attention newton") for name in ("cpu.json", "h200.json")],
        [json.loads(path.read_text()) for path in sorted((results / "stability").glob("*.json"))],
    )


def blocks_of(results: Path) -> dict[str, str]:
    training = read_results(results / TRAINING, "benchmarks/training.py")["rows"]
    sizes = read_study(results / "study")
    losses = losses_table(sizes)
    tables = {"losses": lambda _: losses, "speed": lambda measured: speed_table(measured.attention, training)}
    return written({**tables, **WORDS}, measured_in(results, sizes), "pages/readme_words.py")


def main(arguments: Sequence[str] | None = None) -> int:
    names = ["losses", "speed", *WORDS]
    return write_page("readme_page.py", arguments, ROOT / "results", ROOT / "README.md", names, blocks_of)


if __name__ == "__main__":
    sys.exit(main())
