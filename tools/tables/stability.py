"""The table of docs/stability.md, from the results of experiments/stability.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from softplus_attention.report.stability import final_loss
from tools.tables.markdown import TableError, table_lines

ARMS = ("softmax", "softmax-qknorm-logn", "lssar-p3", "lssar-p15")  # in this order


def final_loss_of_record(record: dict[str, Any]) -> float | None:
    """The final loss; None if training stopped or the loss is not finite."""
    return None if record["stopped"] else final_loss([loss for _, loss in record["losses"]])


def cell(record: dict[str, Any] | None) -> str:
    if record is None:
        return "-"
    loss = final_loss_of_record(record)
    return "stopped: not finite" if loss is None else f"{loss:.3f} ({record['largest_score']:.0f})"


def about(records: list[dict[str, Any]]) -> str:
    first, config = records[0], records[0]["config"]
    machine = first["machine"].get("gpu", first["machine"]["cpu"])
    commits = ", ".join(dict.fromkeys(record["commit"][:7] for record in records))
    model = f"{config['layers']} layers, width {config['width']}, {config['heads']} heads"
    steps = f"{config['steps']} steps of {config['batch_size']} sequences of {config['sequence_length']} tokens"
    return f"{model}, {steps}, seed {first['seed']}; {machine}, torch {first['versions']['torch']}, {commits}."


def make_tables(results: Path) -> dict[str, str]:
    folder = results / "stability"
    records = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    if not records:
        raise TableError(f"{folder} has no runs; experiments/stability.py writes them")
    if unknown := {record["arm"] for record in records} - set(ARMS):
        raise TableError(f"{folder} has runs of {', '.join(sorted(unknown))}, which the table does not list")
    lines = []
    for size, precision in dict.fromkeys((record["size"], record["precision"]) for record in records):
        chosen = [record for record in records if (record["size"], record["precision"]) == (size, precision)]
        mine = {(record["arm"], record["learning_rate"]): record for record in chosen}
        arms, rates = [arm for arm in ARMS if any(key[0] == arm for key in mine)], sorted({key[1] for key in mine})
        columns = [[f"`{arm}`" for arm in arms]]
        columns += [[cell(mine.get((arm, rate))) for arm in arms] for rate in rates]
        lines += table_lines([f"**{size}, {precision}**", *(f"{rate:g}" for rate in rates)], columns)
        lines += [about(chosen), ""]
    return {"stability": "\n".join(lines).strip()}
