"""Writes the tables of docs/huggingface.md from the results of benchmarks/decode.py.

python pages/decode_page.py            rewrites what stands between <!-- begin: decode-* --> and its end
python pages/decode_page.py --check    writes nothing; exit status 1 where it would
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from page_blocks import PageError, table_text, write_page

ROOT = Path(__file__).parents[1]
FILES = {"gpu": "decode-h200.json", "cpu": "decode-cpu.json"}
Place = tuple[str, int, int]


def rows_of(path: Path) -> dict[str, dict[Place, dict[str, Any]]]:
    """The rows of a file by way ("eager", "graph") and by model, batch and context."""
    if not path.exists():
        raise PageError(f"{path} is not there: benchmarks/decode.py writes it")
    found: dict[str, dict[Place, dict[str, Any]]] = {}
    for row in json.loads(path.read_text())["rows"]:
        found.setdefault(row["way"], {})[row["model"], row["batch"], row["context"]] = row
    return found


def blocks_of(results: Path) -> dict[str, str]:
    gpu, cpu = (rows_of(results / name) for name in FILES.values())
    head = ["model", "batch", "context"]
    columns = [list(column) for column in zip(*((m, str(b), f"{c:,}") for m, b, c in gpu["graph"]), strict=True)]
    for way in ("graph", "eager"):
        rows = [gpu[way][place] for place in gpu["graph"]]
        head += [f"softmax, {way}", f"LSSAR, {way}", "ratio"]
        columns += [[f"{row[word]:.2f}" for row in rows] for word in ("softmax", "lssar", "ratio")]
    on_cpu = list(cpu["eager"].values())
    cpu_columns = [[f"{row['context']:,}" for row in on_cpu]]
    cpu_columns += [[f"{row[word]:.0f}" for row in on_cpu] for word in ("softmax", "lssar")]
    cpu_columns.append([f"{row['ratio']:.2f}" for row in on_cpu])
    return {
        "decode-gpu": table_text(head, columns),
        "decode-cpu": table_text(["context", "softmax ms", "LSSAR ms", "ratio"], cpu_columns),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    page = ROOT / "docs" / "huggingface.md"
    return write_page("decode_page.py", arguments, ROOT / "results", page, ["decode-gpu", "decode-cpu"], blocks_of)


if __name__ == "__main__":
    sys.exit(main())
