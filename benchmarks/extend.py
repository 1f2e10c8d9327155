"""Compares an extended model with the original on torch's SDPA: cache size, prefill, peak memory and decode.

    python benchmarks/extend.py --model DIR --ranking results/extend/ranking.json --output results/extend/cpu.json

Decode steps alternate between the models and use caches of random keys and values, so that 64K needs no prefill. Each
prefill runs in its own process, to measure its peak memory. With one thread all times are processor time, which other
work on the machine changes little. Rows are saved as they are measured; run the same command to resume. ``--layers N``
prefills only N layers, with their share of the far heads, for cases where all layers would take too long.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache

from softplus_attention.extend.measuring import cache_bytes
from softplus_attention.extend.methods import apply_method, parse_method
from softplus_attention.extend.ranking import Ranking
from softplus_attention.huggingface.extension.cache import ExtendedCache
from softplus_attention.utils import provenance
from softplus_attention.utils.files import write_json


def main() -> None:
    options = parse()
    torch.set_num_threads(options.threads)
    if options.child:
        measure_prefill(options)
        return
    rows: list[dict[str, Any]] = json.loads(options.output.read_text())["rows"] if options.output.exists() else []
    done = {(row["section"], row["tokens"], row["model"]) for row in rows}
    found = {
        "command": provenance.command("benchmarks/extend.py"),
        "commit": provenance.commit(),
        "machine": provenance.machine(torch.device("cpu")),
        "versions": provenance.versions(),
        "threads": options.threads,
        "time": "processor" if options.threads == 1 else "wall",
        "dtype": options.dtype,
        "rows": rows,
    }

    def add(section: str, length: int, name: str, measured: dict[str, Any]) -> None:
        print(f"{section} {length:6d} {name:32s} {measured}", flush=True)
        rows.append({"section": section, "tokens": length, "model": name, **measured})
        write_json(options.output, found)

    for length in options.lengths:
        if not any(("decode", length, name) in done for name in options.methods):
            for name, measured in decode(options, length).items():
                add("decode", length, name, measured)
    for length in options.prefill:
        for name in options.methods:
            if ("prefill", length, name) not in done:
                arguments = [*sys.argv[1:], "--child", name, "--lengths", str(length)]
                child = subprocess.run(
                    [sys.executable, __file__, *arguments], capture_output=True, text=True, check=True
                )
                add("prefill", length, name, json.loads(child.stdout.splitlines()[-1]))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--ranking", required=True, type=Path)
    parser.add_argument("--output", required=True, type=Path)
    parser.add_argument("--methods", nargs="+", default=["original", "heads:far=group,near=2048"])
    parser.add_argument("--lengths", nargs="*", type=int, default=[4096, 16384, 65536], help="cache lengths for decode")
    parser.add_argument("--prefill", nargs="*", type=int, default=[4096, 16384, 32768, 65536])
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--layers", type=int, help="number of layers for prefill (default: all)")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    return parser.parse_args()


def now(options: argparse.Namespace) -> float:
    return time.process_time() if options.threads == 1 else time.perf_counter()


def load(options: argparse.Namespace, name: str) -> Any:
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=getattr(torch, options.dtype)).eval()
    ranking = Ranking(json.loads(options.ranking.read_text())["scores"])
    method = parse_method(name)
    if options.child and options.layers:
        whole, layers = len(model.model.layers), options.layers
        model.model.layers, model.config.num_hidden_layers = model.model.layers[:layers], layers
        ranking = Ranking({by: scores[:layers] for by, scores in ranking.scores.items()})
        method = replace(method, heads=round(method.heads * layers / whole) if method.heads > 0 else method.heads)
    return apply_method(model, method, ranking)


def memory(name: str) -> int:
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024


@torch.inference_mode()
def measure_prefill(options: argparse.Namespace) -> None:
    model, (length,) = load(options, options.child), options.lengths
    model(torch.arange(64)[None])
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak memory
    before = memory("VmRSS")
    ids = torch.randint(1000, (1, length), generator=torch.Generator().manual_seed(0))
    begun = now(options)
    model(ids, use_cache=True, logits_to_keep=1)
    seconds = now(options) - begun
    peak = memory("VmHWM")
    found = {"seconds": round(seconds, 3), "peak_bytes": peak, "peak_above_model_bytes": peak - before}
    print(json.dumps(found | ({"layers": options.layers} if options.layers else {})))


@torch.inference_mode()
def filled_cache(model: Any, length: int) -> Any:
    """A cache of random keys and values, as after a prefill of ``length`` tokens."""
    config, dtype = model.config, model.dtype
    torch.manual_seed(0)

    def keys(heads: int, tokens: int) -> torch.Tensor:
        return torch.randn(1, heads, tokens, config.head_dim, dtype=dtype)

    if getattr(config, "extension", None) is None:
        cache = DynamicCache(config=config)
        for layer in range(config.num_hidden_layers):
            cache.update(keys(config.num_key_value_heads, length), keys(config.num_key_value_heads, length), layer)
        return cache
    own = ExtendedCache(config)
    for layer, decoder in zip(own.layers, model.model.layers, strict=True):
        for group, *buffers in zip(decoder.self_attn.groups, layer.near, layer.far, strict=True):
            for buffer in buffers:
                if buffer is not None:  # an empty buffer is false
                    buffer.append(keys(len(group.heads), length), keys(len(group.heads), length))
    return own


@torch.inference_mode()
def decode(options: argparse.Namespace, length: int) -> dict[str, Any]:
    models = {name: load(options, name) for name in options.methods}
    caches = {name: filled_cache(model, length) for name, model in models.items()}
    token = torch.tensor([[7]])
    seconds: dict[str, list[float]] = {name: [] for name in models}
    for number in range(options.rounds + 1):
        for name, model in models.items():
            for _ in range(options.steps):
                begun = now(options)
                model(token, past_key_values=caches[name], use_cache=True)
                if number:
                    seconds[name].append(now(options) - begun)
    rows = {}
    for name, times in seconds.items():
        median = statistics.median(times)
        low, high = statistics.quantiles(times, n=10)[0], statistics.quantiles(times, n=10)[-1]
        rows[name] = {
            "tokens_per_second": round(1 / median, 2),
            "seconds": [round(x, 5) for x in (low, median, high)],
            "cache_bytes": cache_bytes(caches[name]),
        }
    return rows


if __name__ == "__main__":
    main()
