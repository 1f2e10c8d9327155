"""The part of docs/performance.md that speaks of results/cpu.json, which benchmarks/cpu.py writes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from attention_rows import command_of
from page_blocks import table_of, table_text

FILE = "cpu.json"
IMPLEMENTATIONS = ("chunked", "sdpa", "reference")
NAMES = {"chunked": "chunked", "sdpa": "SDPA", "reference": "reference"}
DIRECTIONS = {"forward": "forward", "forward+backward": "forward + backward"}


def the_cpu_run(results: dict[str, Any]) -> str:
    machine, versions, shape = results["machine"], results["versions"], results["shape"]
    calls = " or ".join(str(count) for count in sorted({row["repetitions"] for row in results["time"]}))
    return (
        f"`{command_of(results)}`, data in [results/{FILE}](../results/{FILE}): {machine['cpu']}, {machine['cores']} "
        f"cores, {machine['capability']}, torch {versions['torch']}, Python {versions['python']}, commit "
        f"{results['commit'][:7]}. B = {shape['batch']}, H = {shape['heads']}, D = {shape['head_dim']}, "
        f"{shape['dtype']}, {'causal' if shape['causal'] else 'not causal'}, p = {shape['power']}; medians of {calls} "
        "calls, alternating with `F.scaled_dot_product_attention`."
    )


def time_table(results: dict[str, Any]) -> str:
    cells: dict[str, Callable[[dict[str, Any]], str]] = {
        "threads": lambda row: str(row["threads"]),
        "T": lambda row: str(row["length"]),
        "": lambda row: DIRECTIONS[row["direction"]],
        "chunked ms": lambda row: f"{row['chunked_ms']:.0f}",
        "SDPA ms": lambda row: f"{row['sdpa_ms']:.0f}",
        "ratio": lambda row: f"{row['ratio']:.2f}",
    }
    return table_of(results["time"], cells)


def memory_table(results: dict[str, Any]) -> str:
    """MiB; the reference is not measured at every length."""
    found = {(row["implementation"], row["direction"], row["length"]): row["bytes"] for row in results["memory"]}
    lengths = sorted({length for _, _, length in found})
    head, columns = ["T"], [[str(length) for length in lengths]]
    for implementation in IMPLEMENTATIONS:
        for direction, words in DIRECTIONS.items():
            head.append(f"{NAMES[implementation]} {words}")
            sizes = [found.get((implementation, direction, length)) for length in lengths]
            columns.append(["" if size is None else f"{size / 2**20:.0f}" for size in sizes])
    return table_text(head, columns)
