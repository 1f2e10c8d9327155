"""Writes the tables of docs/huggingface.md, and what is said of them, from the results of benchmarks/decode.py.

python pages/decode_page.py            rewrites what stands between <!-- begin: decode-* --> and its end
python pages/decode_page.py --check    writes nothing; exit status 1 where it would
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from attention_rows import command_of
from claims import between, holds, hundredths, tenths
from page_blocks import PageError, table_text, write_page

ROOT = Path(__file__).parents[1]
FILES = {"gpu": "decode-h200.json", "cpu": "decode-cpu.json"}
LAYERS = {"gpt": 12, "llama": 8}  # of the models of benchmarks/decode.py
Place = tuple[str, int, int]
Ways = dict[str, dict[Place, dict[str, Any]]]


def read(path: Path) -> dict[str, Any]:
    if not path.exists():
        raise PageError(f"{path} is not there: benchmarks/decode.py writes it")
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def rows_of(results: dict[str, Any]) -> Ways:
    """The rows of a file by way ("eager", "graph") and by model, batch and context."""
    found: Ways = {}
    for row in results["rows"]:
        found.setdefault(row["way"], {})[row["model"], row["batch"], row["context"]] = row
    return found


def beside_softmax(ways: Ways) -> str:
    """How LSSAR's times compare, and where they come from."""
    shares = [
        row["lssar"] / min(way[place]["softmax"] for way in ways.values()) for place, row in ways["graph"].items()
    ]
    batch, longest = max(place[1:] for place in ways["eager"])
    # Half of the longest is bound by the same.
    context = min(length for _, rows, length in ways["eager"] if rows == batch and 2 * length >= longest)
    more, long_ratios = [], []
    for (model, rows, length), row in ways["eager"].items():
        if rows == batch and length >= context:
            long_ratios.append(row["lssar"] / row["softmax"])
        else:
            more.append((row["lssar"] - row["softmax"]) / LAYERS[model])
    holds(min(more) > 0, "in eager mode LSSAR takes longer than softmax, but for the longest caches")
    return (
        "Read with care: over a static cache SDPA gets a boolean mask, for which torch has no fast decode kernel, so "
        "its column grows steeply; the decode kernel here takes lengths. Against the faster of softmax's two ways "
        f"LSSAR with a graph takes {between(shares, tenths)} of its time. In eager mode both columns are bound by "
        f"Python and kernel launches, but from {context:,} tokens at batch {batch} on, where copies of the cache count "
        f"and LSSAR takes {between(long_ratios, hundredths)} of softmax's time. Elsewhere three Triton launches per "
        f"layer cost {between(more, hundredths)} ms more than one of SDPA's on that machine."
    )


def the_run(results: dict[str, Any]) -> str:
    versions, path = results["versions"], f"results/{FILES['gpu']}"
    return (
        f"`{command_of(results)}`, commit {results['commit'][:7]}, {results['machine']['gpu']}, torch "
        f"{versions['torch']}, CUDA {versions['cuda']}, transformers {versions['transformers']}; data in "
        f"[{path}](../{path})."
    )


def blocks_of(results: Path) -> dict[str, str]:
    of_gpu, of_cpu = (read(results / name) for name in FILES.values())
    gpu, cpu = rows_of(of_gpu), rows_of(of_cpu)
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
        "decode-words": beside_softmax(gpu),
        "decode-run": the_run(of_gpu),
        "decode-cpu": table_text(["context", "softmax ms", "LSSAR ms", "ratio"], cpu_columns),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    page = ROOT / "docs" / "huggingface.md"
    names = ["decode-gpu", "decode-words", "decode-run", "decode-cpu"]
    return write_page("decode_page.py", arguments, ROOT / "results", page, names, blocks_of)


if __name__ == "__main__":
    sys.exit(main())
