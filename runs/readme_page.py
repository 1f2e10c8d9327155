"""Writes the tables of README.md from results/study and the results of benchmarks/attention.py and training.py.

python runs/readme_page.py            rewrites what stands between <!-- begin: NAME --> and <!-- end: NAME -->
python runs/readme_page.py --check    writes nothing; exit status 1 where it would
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from attention_page import FILE, Row, between, read_rows
from page_blocks import PageError, table, write_page
from study_runs import Size, loss_at, read_study

ROOT = Path(__file__).parents[1]
TRAINING = "training-h200.json"
SIZE, OTHER_TEXT = "10m", "10m-again"  # the same models and steps
MULTIPLES = (1, 16, 64)
LONG = 4096
LONG_CACHE = 32768
SHOWN = {
    "rotary positions in every layer": {
        "softmax": "softmax",
        "softmax-qknorm-logn": "softmax + QK-norm + log N",
        "lssar-p15": "LSSAR, p = 15, as in the paper",
        "lssar-rising": "LSSAR, p rising to 15 in training",
    },
    "two local layers for each global one without positions": {
        "softmax-qknorm-logn-learned-global3": "softmax + QK-norm + log N, a scale learned by each head",
        "lssar-learned-log-global3": "LSSAR, p = c log N, c learned by each head",
    },
}


def losses_table(sizes: Sequence[Size]) -> str:
    """Of an arm that was trained on both texts, where it has more seeds."""
    known = {size.name: size for size in sizes}
    if SIZE not in known:
        raise PageError(f"there are no runs of {SIZE}")
    length = known[SIZE].any_run.config["sequence_length"]
    lines: list[list[str]] = []
    for kind, arms in SHOWN.items():
        lines.append([f"**{kind}**", *[""] * (1 + len(MULTIPLES))])
        for arm, words in arms.items():
            trained = [known[name] for name in (SIZE, OTHER_TEXT) if name in known and arm in known[name].arms]
            if not trained:
                raise PageError(f"there is no run of {arm} at {SIZE}")
            size = max(trained, key=lambda x: len(x.curves(arm)))
            cells = []
            for multiple in MULTIPLES:
                found = loss_at(size.curves(arm), multiple)
                if found is None:
                    raise PageError(f"{arm} at {size.name} was not measured at {multiple} times its length")
                cells.append(f"{found.mean:.3f}")
            lines.append([words, *cells, f"{len(size.curves(arm))}{' *' if size.name == OTHER_TEXT else ''}"])
    head = ["", *(f"{multiple * length:,}" for multiple in MULTIPLES), "seeds"]
    return "\n".join(table(head, [list(column) for column in zip(*lines, strict=True)])).strip()


def speed_table(rows: Sequence[Row], training: Sequence[dict[str, Any]]) -> str:
    def of(section: str, name: str, what: str, which: Callable[[Row], bool]) -> list[str]:
        """By head dimension."""
        chosen = [x for x in rows if (x["section"], x["contender"]) == (section, name) and which(x)]
        values = [[x[what] for x in chosen if x["head_dim"] == d] for d in (64, 128)]
        if not chosen:
            raise PageError(f"{FILE} has no {what} of {name} in {section} at these lengths")
        return [between(column) if column else "" for column in values]

    whole_model = next((x["time_to_softmax"] for x in training if x["attention"] == "lssar"), None)
    if whole_model is None:
        raise PageError(f"{TRAINING} has no row for lssar")
    lines = {
        f"LSSAR, training step of the op, {LONG:,} tokens and more": of(
            "train", "lssar p=15", "ratio", lambda x: x["length"] >= LONG
        ),
        "LSSAR, forward alone": of("train", "lssar p=15", "forward_ratio", lambda x: True),
        "LSSA, forward alone": of("train", "lssa", "forward_ratio", lambda x: True),
        "LSSAR, memory of a training step": of("train", "lssar p=15", "step_ratio", lambda x: True),
        "LSSAR, decoding from 32K keys and more, cache of unit keys, to the fastest SDPA": of(
            "decode", "lssar p=15 unit keys", "forward_ratio", lambda x: x["length"] >= LONG_CACHE
        ),
        "LSSAR, training step of GPT-2 small at 1,024 tokens, to softmax's": [f"{whole_model:.2f}", ""],
    }
    columns = [list(lines), *([cells[i] for cells in lines.values()] for i in (0, 1))]
    return "\n".join(table(["", "head dimension 64", "128"], columns)).strip()


def blocks_of(results: Path) -> dict[str, str]:
    training = results / TRAINING
    if not training.exists():
        raise PageError(f"{training} is not there: benchmarks/training.py writes it")
    return {
        "losses": losses_table(read_study(results / "study")),
        "speed": speed_table(read_rows(results / FILE), json.loads(training.read_text())["rows"]),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    page = ROOT / "README.md"
    return write_page("readme_page.py", arguments, ROOT / "results", page, ["losses", "speed"], blocks_of)


if __name__ == "__main__":
    sys.exit(main())
