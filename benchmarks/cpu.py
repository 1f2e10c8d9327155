"""The CPU path beside scaled_dot_product_attention: time on one and two threads, and peak memory.

Both run alternately in one process, so that what else the machine does weighs on both; the table gives medians and
their ratio. Memory is what a call holds at its worst beyond its inputs and outputs, on one thread.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Read when torch loads: waiting threads must not spin, and the profiler need not report its start and stop.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("KINETO_LOG_LEVEL", "99")

import torch
import torch.nn.functional as F
from torch import Tensor

import softplus_attention as package
from softplus_attention import softplus_attention
from softplus_attention.utils import provenance
from softplus_attention.utils.timing import alternate, medians, peak_bytes

ROOT = Path(__file__).parents[1]
CPU = torch.device("cpu")
HEADS, HEAD_DIM, POWER = 8, 64, 15
DIRECTIONS = ("forward", "forward+backward")


def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def chunked(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return softplus_attention(q, k, v, power=POWER, is_causal=True, impl="chunked")


def reference(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return softplus_attention(q, k, v, power=POWER, is_causal=True, impl="reference")


IMPLEMENTATIONS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "chunked": chunked,
    "sdpa": sdpa,
    "reference": reference,
}


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def call(name: str, length: int, direction: str) -> Callable[[], tuple[Tensor, ...]]:
    """One call on fixed random inputs; it returns what the user would keep."""
    attend, training = IMPLEMENTATIONS[name], direction == "forward+backward"
    random = torch.Generator().manual_seed(length)
    q, k, v, grad_out = (torch.randn(1, HEADS, length, HEAD_DIM, generator=random) for _ in range(4))
    for x in (q, k, v):
        x.requires_grad_(training)

    def work() -> tuple[Tensor, ...]:
        out = attend(q, k, v)
        return (out, *torch.autograd.grad(out, (q, k, v), grad_out)) if training else (out,)

    return work


def measure_time(lengths: list[int], repetitions: int) -> list[dict[str, Any]]:
    rows = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        for length in lengths:
            for direction in DIRECTIONS:
                works = {name: call(name, length, direction) for name in ("chunked", "sdpa")}
                for work in works.values():
                    work()
                times = alternate(works, CPU, repetitions)
                middle = medians(times)
                row = {
                    "threads": threads,
                    "length": length,
                    "direction": direction,
                    "chunked_ms": middle["chunked"],
                    "sdpa_ms": middle["sdpa"],
                    "ratio": middle["chunked"] / middle["sdpa"],
                    "repetitions": repetitions,
                    "samples_ms": times,
                }
                rows.append(row)
                say(f"time: T={length} {direction} on {threads} thread(s): {row['ratio']:.2f} x SDPA")
    return rows


def peak_memory(work: Callable[[], tuple[Tensor, ...]]) -> int:
    """Bytes held at the worst moment beyond inputs and outputs."""
    return peak_bytes(work, CPU) - sum(x.numel() * x.element_size() for x in work())


def measure_memory(lengths: list[int]) -> list[dict[str, Any]]:
    torch.set_num_threads(1)
    rows = []
    for length in lengths:
        for name in IMPLEMENTATIONS:
            if name == "reference" and length > lengths[0]:
                continue
            for direction in DIRECTIONS:
                work = call(name, length, direction)
                work()
                size = peak_memory(work)
                rows.append({"implementation": name, "length": length, "direction": direction, "bytes": size})
                say(f"memory: T={length} {direction} {name}: {size / 2**20:.1f} MiB")
    return rows


def table(data: dict[str, Any]) -> str:
    lines = [
        f"B=1 H={HEADS} D={HEAD_DIM} float32 causal p={POWER}; {data['machine']['cpu']}; torch {torch.__version__}",
        "",
        "| threads | T | direction | chunked ms | SDPA ms | ratio |",
        "|---:|---:|---|---:|---:|---:|",
    ]
    for row in data["time"]:
        what = f"| {row['threads']} | {row['length']} | {row['direction']} "
        lines.append(what + f"| {row['chunked_ms']:.1f} | {row['sdpa_ms']:.1f} | {row['ratio']:.2f} |")
    columns = [(name, direction) for name in IMPLEMENTATIONS for direction in DIRECTIONS]
    sizes = {(row["implementation"], row["direction"], row["length"]): row["bytes"] for row in data["memory"]}
    lines += ["", "Peak memory beyond inputs and outputs, MiB:", ""]
    lines.append("| T | " + " | ".join(f"{name} {direction}" for name, direction in columns) + " |")
    lines.append("|---:|" + "---:|" * len(columns))
    for length in sorted({row["length"] for row in data["memory"]}):
        cells = (sizes.get((*column, length)) for column in columns)
        lines.append(f"| {length} | " + " | ".join("" if x is None else f"{x / 2**20:.1f}" for x in cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=ROOT / "results" / "cpu.json", help="the JSON file to write")
    parser.add_argument("--repetitions", type=int, default=7, help="timed calls of each implementation (default 7)")
    parser.add_argument("--quick", action="store_true", help="tiny lengths: does it run? The numbers mean nothing")
    options = parser.parse_args()
    if options.repetitions < 1:
        parser.error("--repetitions must be at least 1")

    times, sizes = ([64, 128], [64, 128]) if options.quick else ([2048, 8192], [2048, 4096, 8192, 16384])
    data = {
        "command": provenance.command("benchmarks/cpu.py"),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": provenance.commit(),
        "machine": {**provenance.machine(), "capability": torch.backends.cpu.get_cpu_capability()},
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "softplus_attention": package.__version__,
        },
        "shape": {"batch": 1, "heads": HEADS, "head_dim": HEAD_DIM, "dtype": "float32", "causal": True, "power": POWER},
        "time": measure_time(times, 2 if options.quick else options.repetitions),
        "memory": measure_memory(sizes),
    }
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(data, indent=1) + "\n")
    print(table(data))
    say(f"written to {options.output}")


if __name__ == "__main__":
    main()
