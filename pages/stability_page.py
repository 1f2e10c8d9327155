"""Writes the table of docs/stability.md from the files of runs/stability.py.

python pages/stability_page.py            rewrites what stands between <!-- begin: stability --> and its end
python pages/stability_page.py --check    writes nothing; exit status 1 where it would
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from page_blocks import PageError, table, write_page

from softplus_attention.report.stability import final_loss

ROOT = Path(__file__).parents[1]
ARMS = ("softmax", "softmax-qknorm-logn", "lssar-p3", "lssar-p15")  # in this order


def loss_of(record: dict[str, Any]) -> float | None:
    """At the end; None where training stopped or became something that is not finite."""
    return None if record["stopped"] else final_loss([loss for _, loss in record["losses"]])


def cell(record: dict[str, Any] | None) -> str:
    if record is None:
        return "-"
    loss = loss_of(record)
    return "stopped: not finite" if loss is None else f"{loss:.3f} ({record['largest_score']:.0f})"


def about(records: list[dict[str, Any]]) -> str:
    first, words = records[0], records[0]["config"]
    machine = first["machine"].get("gpu", first["machine"]["cpu"])
    commits = ", ".join(dict.fromkeys(record["commit"][:7] for record in records))
    model = f"{words['layers']} layers, width {words['width']}, {words['heads']} heads"
    steps = f"{words['steps']} steps of {words['batch_size']} sequences of {words['sequence_length']} tokens"
    return f"{model}, {steps}, seed {first['seed']}; {machine}, torch {first['versions']['torch']}, {commits}."


def blocks_of(results: Path) -> dict[str, str]:
    records = [json.loads(path.read_text()) for path in sorted(results.glob("*.json"))]
    if not records:
        raise PageError(f"{results} has no runs: runs/stability.py writes them")
    if unknown := {record["arm"] for record in records} - set(ARMS):
        raise PageError(f"{results} has runs of {', '.join(sorted(unknown))}, which the table does not have")
    lines = []
    for size, precision in dict.fromkeys((record["size"], record["precision"]) for record in records):
        chosen = [record for record in records if (record["size"], record["precision"]) == (size, precision)]
        mine = {(record["arm"], record["learning_rate"]): record for record in chosen}
        arms, rates = [arm for arm in ARMS if any(key[0] == arm for key in mine)], sorted({key[1] for key in mine})
        columns = [[f"`{arm}`" for arm in arms]]
        columns += [[cell(mine.get((arm, rate))) for arm in arms] for rate in rates]
        lines += table([f"**{size}, {precision}**", *(f"{rate:g}" for rate in rates)], columns)
        lines += [about(chosen), ""]
    return {"stability": "\n".join(lines).strip()}


def main(arguments: Sequence[str] | None = None) -> int:
    page, results = ROOT / "docs" / "stability.md", ROOT / "results" / "stability"
    return write_page("stability_page.py", arguments, results, page, ["stability"], blocks_of)


if __name__ == "__main__":
    sys.exit(main())
