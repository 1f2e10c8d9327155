"""Writes the table of docs/evaluation.md from the results of `softplus-attention evaluate synthetic`.

python pages/synthetic_page.py            rewrites what stands between <!-- begin: synthetic --> and its end
python pages/synthetic_page.py --check    writes nothing; exit status 1 where it would
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from page_blocks import PageError, table_text, write_page

from softplus_attention.evaluation.forms import form_of

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results" / "synthetic"
ATTENTIONS = ("lssar", "softmax-qknorm-logn", "softmax")


def rank(found: dict[str, Any]) -> tuple[str, int, int]:
    """Recall last, by its form; attentions in the order of the page."""
    settings = found["settings"]
    attention = found["model"]["attention"]
    if attention not in ATTENTIONS:
        raise PageError(f"the page has no place for the attention {attention!r}")
    return settings["task"], -settings.get("pairs", 0), ATTENTIONS.index(attention)


def blocks_of(results: Path) -> dict[str, str]:
    found = [json.loads(path.read_text()) for path in sorted(results.glob("synthetic--*.json"))]
    if not found:
        raise PageError(f"{results} has no results of `softplus-attention evaluate synthetic`")
    if unfinished := [each["model"]["name"] for each in found if not each["complete"]]:
        raise PageError(f"{results} has results that are not complete: {', '.join(unfinished)}")
    found.sort(key=rank)
    lengths = [{round(entry["times"]): entry for entry in each["results"]["lengths"]} for each in found]
    multiples = sorted({multiple for own in lengths for multiple in own})
    columns = [
        [form_of(each["settings"]["task"], each["settings"]) for each in found],
        [f"`{each['model']['attention']}`" for each in found],
    ]
    for multiple in multiples:
        columns.append([f"{100 * own[multiple]['accuracy']:.1f}" if multiple in own else "-" for own in lengths])
    columns.append([f"{own[max(own)]['answers']:,}" for own in lengths])
    head = ["answers right, %", "attention", *(f"{multiple}x" for multiple in multiples), "answers at the longest"]
    return {"synthetic": table_text(head, columns)}


def main(arguments: Sequence[str] | None = None) -> int:
    return write_page(
        "synthetic_page.py", arguments, RESULTS, ROOT / "docs" / "evaluation.md", ["synthetic"], blocks_of
    )


if __name__ == "__main__":
    sys.exit(main())
