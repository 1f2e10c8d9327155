"""Time and memory of the CPU path (C++ kernels and PyTorch operations), compared with scaled_dot_product_attention.

Calls alternate in one process, so that other load affects all of them; the table shows medians and ratios. All
implementations are first checked against the float64 reference; if one is wrong, no number is printed. Memory is the
peak of a call beyond its inputs and outputs, on one thread. A row replaces the same row in the output file, so that
sections can be run separately.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# Read when torch loads: waiting threads must not spin, and the profiler does not log its start and stop.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("KINETO_LOG_LEVEL", "99")

import torch
import torch.nn.functional as F
from torch import Tensor

import softplus_attention as package
from softplus_attention import softplus_attention, softplus_attention_varlen
from softplus_attention.charts.draw import draw
from softplus_attention.charts.model import LineChart, Series, SeriesStyles
from softplus_attention.kernels.cpu import native
from softplus_attention.power import power_by_log
from softplus_attention.utils import provenance
from softplus_attention.utils.timing import alternate, medians, peak_bytes

ROOT = Path(__file__).parents[1]
CPU = torch.device("cpu")
HEADS, HEAD_DIM, WINDOW = 8, 64, 512
PACKED, DOCUMENT = 4096, 500  # tokens per packed sequence, and the median length of its documents
DIRECTIONS = ("forward", "forward+backward")
SETTINGS = ("p15", "learned", "lssa", "window")
ARMS = ("native", "torch", "sdpa")
Call = Callable[[], tuple[Tensor, ...]]


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def documents(length: int) -> Tensor:
    """Cumulative lengths of random documents packed into ``length`` tokens."""
    random = torch.Generator().manual_seed(0)
    sizes = (DOCUMENT * torch.randn(length, generator=random).exp()).long().clamp(min=1).cumsum(0)
    return torch.cat([torch.tensor([0]), sizes[sizes < length], torch.tensor([length])]).int()


def visible_pairs(setting: str, length: int) -> int:
    """Visible pairs of a row and a key, in one head."""
    if setting == "packed":
        return sum(n * (n + 1) // 2 for n in documents(length).diff().tolist())
    rows = torch.arange(1, length + 1)
    return int((rows.clamp(max=WINDOW) if setting == "window" else rows).sum())


def attend(setting: str, q: Tensor, k: Tensor, v: Tensor, power: Tensor, impl: str) -> Tensor:
    if setting == "packed":
        bounds, packed = documents(q.shape[2]), (x[0].transpose(0, 1) for x in (q, k, v))
        longest = int(bounds.diff().max())
        found = softplus_attention_varlen(
            *packed, bounds, bounds, longest, longest, is_causal=True, power=15, impl=impl
        )
        return found.transpose(0, 1)[None]
    given = {"p15": 15, "learned": power, "lssa": None, "window": 15}[setting]
    window = min(WINDOW, q.shape[2]) if setting == "window" else None
    return softplus_attention(q, k, v, power=given, is_causal=True, window=window, impl=impl)


def call(
    arm: str, setting: str, length: int, direction: str, dtype: torch.dtype = torch.float32, heads: int = HEADS
) -> Call:
    """A function that calls the attention on fixed random inputs and returns its output (and gradients)."""
    training = direction == "forward+backward"
    random = torch.Generator().manual_seed(length)
    q, k, v, grad_out = (torch.randn(1, heads, length, HEAD_DIM, generator=random).to(dtype) for _ in range(4))
    # A learned factor of log N per head.
    power = power_by_log(0.4 + torch.rand(heads, generator=random), torch.arange(1, length + 1)[None, None])
    learned = [power] if setting == "learned" and arm != "sdpa" else []
    for x in (q, k, v, *learned):
        x.requires_grad_(training)

    def work() -> tuple[Tensor, ...]:
        with native.using(arm if arm in native.MODES else "torch"):
            if arm == "sdpa":
                out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            else:
                out = attend(setting, q, k, v, power, "reference" if arm == "reference" else "chunked")
            return (out, *torch.autograd.grad(out, (q, k, v, *learned), grad_out)) if training else (out,)

    return work


def check() -> None:
    """Checks output and gradients of all implementations against the reference in float64."""
    for setting in (*SETTINGS, "packed"):
        exact = call("reference", setting, 300, "forward+backward", torch.float64)()
        for arm in ("native", "torch"):
            for dtype, allowed in ((torch.float32, 1e-4), (torch.bfloat16, 0.1)):
                for found, truth in zip(call(arm, setting, 300, "forward+backward", dtype)(), exact, strict=True):
                    error = float((found.detach().double() - truth.detach()).norm() / truth.detach().norm())
                    if not error < allowed:
                        raise SystemExit(f"{arm}, {setting}, {dtype}: wrong result (error {error:.1e}), nothing timed")


def measured(works: dict[str, Call], repetitions: int, **what: Any) -> dict[str, Any]:
    if repetitions > 1:  # a single call takes seconds and needs no warm-up
        for work in works.values():
            work()
    samples = alternate(works, CPU, repetitions)
    found = {f"{name}_ms": value for name, value in medians(samples).items()}
    return {**what, **found, "repetitions": repetitions, "samples_ms": samples}


def measure_time(lengths: list[int], settings: list[str], repetitions: int) -> Iterator[dict[str, Any]]:
    """Ratios to SDPA; for a window, to SDPA's causal time scaled to the same number of pairs."""
    for threads in (1, 2):
        torch.set_num_threads(threads)
        for length in lengths:
            if threads == 1 and length > 2048:
                continue
            for setting in settings:
                if setting == "window" and length < 2 * WINDOW:
                    continue
                for direction in DIRECTIONS:
                    works = {arm: call(arm, setting, length, direction) for arm in ARMS}
                    count = repetitions if length < 8192 else max(1, repetitions // 2)
                    row = measured(works, count, setting=setting, threads=threads, length=length, direction=direction)
                    share = visible_pairs(setting, length) / visible_pairs("p15", length)
                    row |= {"pairs": share}
                    row |= {f"{arm}_ratio": row[f"{arm}_ms"] / (share * row["sdpa_ms"]) for arm in ("native", "torch")}
                    yield row
                    say(f"time: {setting} T={length} {direction} on {threads}: {row['native_ratio']:.2f} x SDPA, "
                        f"PyTorch's operations {row['torch_ratio']:.2f}")  # fmt: skip


def measure_half(lengths: list[int], repetitions: int) -> Iterator[dict[str, Any]]:
    """bfloat16 compared with the same call in float32, and SDPA in bfloat16."""
    torch.set_num_threads(2)
    for length in lengths:
        for setting in SETTINGS[:3]:
            for direction in DIRECTIONS:
                half = torch.bfloat16
                works = {"float32": call("native", setting, length, direction)}
                works |= {arm: call(arm, setting, length, direction, half) for arm in ARMS}
                row = measured(works, repetitions, setting=setting, threads=2, length=length, direction=direction)
                row |= {"ratio": row["native_ms"] / row["float32_ms"]}
                yield row
                say(f"bfloat16: {setting} T={length} {direction}: {row['ratio']:.2f} x float32")


def measure_packed(length: int, repetitions: int) -> Iterator[dict[str, Any]]:
    """Packed documents compared with one document of the same total length; the ratio is of times per visible pair."""
    share = visible_pairs("packed", length) / visible_pairs("p15", length)
    for threads in (1, 2):
        torch.set_num_threads(threads)
        for direction in DIRECTIONS:
            works = {"whole": call("native", "p15", length, direction)}
            works |= {arm: call(arm, "packed", length, direction) for arm in ("native", "torch")}
            row = measured(works, repetitions, threads=threads, length=length, direction=direction)
            row |= {"pairs": share, "ratio": row["native_ms"] / (share * row["whole_ms"])}
            yield row
            say(f"packed: {direction} on {threads}: {row['ratio']:.2f} x the cost of the visible pairs")


def measure_growth(lengths: list[int], repetitions: int) -> Iterator[dict[str, Any]]:
    """A training step of two heads by length: time on two threads, and peak memory."""
    for length in lengths:
        torch.set_num_threads(2)
        works = {arm: call(arm, "p15", length, "forward+backward", heads=2) for arm in ("native", "sdpa")}
        if length <= 8192:
            works["torch"] = call("torch", "p15", length, "forward+backward", heads=2)
        row = measured(works, repetitions if length <= 8192 else 1, length=length)
        if length <= 16384:
            row["bytes"] = {arm: peak_memory(work) for arm, work in works.items()}
        yield row
        say(f"growth: T={length}: {row['native_ms']:.0f} ms, SDPA {row['sdpa_ms']:.0f} ms")


def peak_memory(work: Call) -> int:
    """Peak bytes beyond inputs and outputs."""
    return peak_bytes(work, CPU) - sum(x.numel() * x.element_size() for x in work())


def measure_memory(lengths: list[int]) -> Iterator[dict[str, Any]]:
    torch.set_num_threads(1)
    for length in lengths:
        for arm in (*ARMS, "reference"):
            if arm == "reference" and length > lengths[0]:
                continue
            for direction in DIRECTIONS:
                work = call(arm, "p15", length, direction)
                work()
                size = peak_memory(work)
                yield {"implementation": arm, "length": length, "direction": direction, "bytes": size}
                say(f"memory: T={length} {direction} {arm}: {size / 2**20:.1f} MiB")


def picture(rows: list[dict[str, Any]], path: Path) -> None:
    names = {"native": "LSSAR, C++ kernels", "torch": "LSSAR, PyTorch's operations", "sdpa": "SDPA"}
    styles = SeriesStyles()

    def series(of: Callable[[dict[str, Any], str], float | None]) -> list[Series]:
        lengths = [row["length"] for row in rows]
        return [
            Series(name, lengths, [of(row, arm) for row in rows], look=styles.of(name)) for arm, name in names.items()
        ]

    charts = [
        LineChart("Time of a training step, two heads", "length (tokens)", "ms",
                  series(lambda row, arm: row.get(f"{arm}_ms")), x_scale="log2", y_scale="log"),
        LineChart("Memory beyond inputs and outputs", "length (tokens)", "MiB",
                  series(lambda row, arm: row["bytes"][arm] / 2**20 if arm in row.get("bytes", {}) else None),
                  x_scale="log2", y_scale="log"),
    ]  # fmt: skip
    draw(charts, path, columns=2)


def table(data: dict[str, Any]) -> str:
    lines = [f"B=1 H={HEADS} D={HEAD_DIM} float32 causal; {data['machine']['cpu']}; torch {torch.__version__}", ""]
    lines += ["| | threads | T | | C++ ms | PyTorch ms | SDPA ms | C++ / SDPA | PyTorch / SDPA |"]
    lines += ["|---|---:|---:|---|---:|---:|---:|---:|---:|"]
    for row in data.get("time", []):
        times = " | ".join(f"{row[f'{arm}_ms']:.1f}" for arm in ARMS)
        ratios = f"{row['native_ratio']:.2f} | {row['torch_ratio']:.2f}"
        lines.append(
            f"| {row['setting']} | {row['threads']} | {row['length']} | {row['direction']} | {times} | {ratios} |"
        )
    lines += ["", "bfloat16 relative to float32:"]
    lines += [f"{r['setting']} T={r['length']} {r['direction']}: {r['ratio']:.2f}" for r in data.get("half", [])]
    lines += ["", "packed documents, relative to the cost of their pairs:"]
    lines += [f"{r['direction']} on {r['threads']} threads: {r['ratio']:.2f}" for r in data.get("packed", [])]
    lines += ["", "Peak memory beyond inputs and outputs, MiB:"]
    for row in data.get("memory", []):
        lines.append(f"{row['implementation']} T={row['length']} {row['direction']}: {row['bytes'] / 2**20:.1f}")
    return "\n".join(lines)


def place(row: dict[str, Any]) -> tuple[Any, ...]:
    """Identity of a row in its section: a later row with the same identity replaces it."""
    names = (*SETTINGS, *ARMS, "reference")
    what = row.get("setting", row.get("implementation"))
    which = names.index(what) if what else 0
    return row.get("threads", 0), row["length"], which, row.get("direction", "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=ROOT / "results" / "cpu.json", help="the JSON file to write")
    parser.add_argument("--sections", default="time,half,packed,growth,memory", help="default: %(default)s")
    lengths = {"type": lambda text: [int(x) for x in text.split(",")]}
    parser.add_argument("--lengths", **lengths, help="lengths of the sections time and growth, such as 512,2048")
    parser.add_argument(
        "--settings", default=",".join(SETTINGS), help="settings of the section time (default: %(default)s)"
    )
    parser.add_argument(
        "--repetitions", type=int, default=7, help="timed calls of each (default: 7; fewer for long lengths)"
    )
    parser.add_argument("--figure", type=Path, help="path of a figure of the section growth (.png and .svg)")
    parser.add_argument(
        "--quick", action="store_true", help="tiny lengths, to test the script; the numbers mean nothing"
    )
    options = parser.parse_args()
    if options.repetitions < 1:
        parser.error("--repetitions must be at least 1")
    quick, count = options.quick, 2 if options.quick else options.repetitions
    growth = [64, 128] if quick else options.lengths or [2**n for n in range(9, 17)]
    sections: dict[str, Callable[[], Iterator[dict[str, Any]]]] = {
        "time": lambda: measure_time(
            [64, 128] if quick else options.lengths or [512, 2048, 8192], options.settings.split(","), count
        ),
        "half": lambda: measure_half([64] if quick else [512, 2048], count),
        "packed": lambda: measure_packed(128 if quick else PACKED, count),
        "growth": lambda: measure_growth(growth, count),
        "memory": lambda: measure_memory([64, 128] if quick else [2048, 4096, 8192, 16384]),
    }
    chosen = options.sections.split(",")
    if not set(chosen) <= set(sections):
        parser.error(f"--sections must be of {', '.join(sections)}")

    check()
    data = json.loads(options.output.read_text()) if options.output.exists() else {}
    data |= {
        "command": provenance.command("benchmarks/cpu.py"),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": provenance.commit(),
        "machine": {**provenance.machine(), "capability": torch.backends.cpu.get_cpu_capability()},
        "kernels": native.find("native").reason.partition(",")[0],
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "softplus_attention": package.__version__,
        },
        "shape": {"batch": 1, "heads": HEADS, "head_dim": HEAD_DIM, "dtype": "float32", "causal": True},
    }
    options.output.parent.mkdir(parents=True, exist_ok=True)
    for name in chosen:
        for row in sections[name]():
            before = [other for other in data.get(name, []) if place(other) != place(row)]
            data[name] = sorted([*before, row], key=place)
            options.output.write_text(json.dumps(data, indent=1) + "\n")
    if options.figure and "growth" in data:
        picture(data["growth"], options.figure)
    print(table(data))
    say(f"written to {options.output}")


if __name__ == "__main__":
    main()
