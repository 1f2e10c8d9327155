"""The table of docs/evaluation.md, from the results of `softplus-attention evaluate synthetic`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from softplus_attention.evaluation.measures.synthetic import task_label
from tools.tables.markdown import TableError, table

ATTENTIONS = ("lssar", "softmax-qknorm-logn", "softmax")


def rank(found: dict[str, Any]) -> tuple[str, int, int]:
    """Sort key: recall last, with more pairs first; attentions in the order of ``ATTENTIONS``."""
    settings = found["settings"]
    attention = found["model"]["attention"]
    if attention not in ATTENTIONS:
        raise TableError(f"the table does not list the attention {attention!r}")
    return settings["task"], -settings.get("pairs", 0), ATTENTIONS.index(attention)


def make_tables(results: Path) -> dict[str, str]:
    folder = results / "synthetic"
    found = [json.loads(path.read_text()) for path in sorted(folder.glob("synthetic--*.json"))]
    if not found:
        raise TableError(f"{folder} has no results of `softplus-attention evaluate synthetic`")
    if unfinished := [each["model"]["name"] for each in found if not each["complete"]]:
        raise TableError(f"{folder} has incomplete results: {', '.join(unfinished)}")
    found.sort(key=rank)
    lengths = [{round(entry["times"]): entry for entry in each["results"]["lengths"]} for each in found]
    multiples = sorted({multiple for own in lengths for multiple in own})
    columns = [
        [task_label(each["settings"]["task"], each["settings"]) for each in found],
        [f"`{each['model']['attention']}`" for each in found],
    ]
    for multiple in multiples:
        columns.append([f"{100 * own[multiple]['accuracy']:.1f}" if multiple in own else "-" for own in lengths])
    columns.append([f"{own[max(own)]['answers']:,}" for own in lengths])
    head = ["answers right, %", "attention", *(f"{multiple}x" for multiple in multiples), "answers at the longest"]
    return {"synthetic": table(head, columns)}
