"""Writes the table of docs/evaluation.md from the results of `softplus-attention evaluate synthetic`.

python runs/synthetic_page.py            rewrites what stands between <!-- begin: synthetic --> and its end
python runs/synthetic_page.py --check    writes nothing; exit status 1 where it would
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from page_blocks import PageError, parts_of, rewritten, table

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


def synthetic_block(results: Path) -> str:
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
    return "\n".join(table(head, columns)).strip()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit status 1 where it would")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "evaluation.md")
    options = parser.parse_args(arguments)
    try:
        text, places = parts_of(options.page, ["synthetic"])
        text, changed = rewritten(text, places, {"synthetic": synthetic_block(options.results)})
    except PageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if options.check:
        if changed:
            print(f"{options.page} is out of date; run python runs/synthetic_page.py", file=sys.stderr)
        return 1 if changed else 0
    options.page.write_text(text)
    print(f"{options.page}: {', '.join(changed) or 'nothing'} changed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
