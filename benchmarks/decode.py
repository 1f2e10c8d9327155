"""Time per generated token against context length: one model with LSSAR and the same model with softmax (SDPA).

    python benchmarks/decode.py --output results/decode-h200.json --commit $(git rev-parse --short HEAD)

The caches are filled with random keys and values, then single tokens are decoded through the whole model. "eager" is a
plain forward pass with the DynamicCache of transformers, as in generate(); "graph" replays a CUDA graph of the forward
pass with a StaticCache, as a server does, without the launch overhead of Python. Steps of the two models alternate over
the same cache, so that a drift in host speed affects both.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from figures import write
from torch import nn
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, StaticCache

from softplus_attention.huggingface import SoftplusGPTConfig, SoftplusGPTForCausalLM
from softplus_attention.utils import provenance

WARM_UP, BEFORE_CAPTURE = 3, 3
CONTEXTS = (1024, 4096, 16384, 65536, 131072)
GPT = {"vocab_size": 50304, "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12}
LLAMA = {"vocab_size": 32000, "hidden_size": 2048, "num_hidden_layers": 8, "num_attention_heads": 16}
LLAMA |= {"num_key_value_heads": 4, "intermediate_size": 5632, "max_position_embeddings": 131072 + 1024}
NARROW = {"vocab_size": 1000, "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}


def build(name: str, attention: str, small: bool):
    torch.manual_seed(0)
    if name == "gpt":
        return SoftplusGPTForCausalLM(SoftplusGPTConfig(**(NARROW if small else GPT), attention=attention))
    config = LlamaConfig(
        **{**LLAMA, **(NARROW | {"num_key_value_heads": 1, "intermediate_size": 256} if small else {})}
    )
    config._attn_implementation = "sdpa" if attention == "softmax" else attention
    return LlamaForCausalLM(config)


def filled(cache, model, batch: int, context: int):
    """Fills the cache with ``context`` random tokens. Their keys have unit norm, which any attention can read."""
    config = model.config
    shape = (batch, config.num_key_value_heads, context, config.head_dim)
    for layer in range(config.num_hidden_layers):
        k, v = (torch.randn(shape, device=model.device, dtype=model.dtype) for _ in range(2))
        cache.update(torch.nn.functional.normalize(k, dim=-1), v, layer)
    return cache


def medians_ms(steps: dict[str, Callable[[], None]], device: torch.device, repeats: int) -> dict[str, float]:
    times: dict[str, list[float]] = {name: [] for name in steps}
    for i in range(WARM_UP + repeats):
        for name, step in steps.items():
            if device.type == "cuda":
                torch.cuda.synchronize()
            start = time.perf_counter()
            step()
            if device.type == "cuda":
                torch.cuda.synchronize()
            if i >= WARM_UP:
                times[name].append(1e3 * (time.perf_counter() - start))
    return {name: statistics.median(taken) for name, taken in times.items()}


@torch.inference_mode()
def eager_ms(models: dict[str, nn.Module], batch: int, context: int, repeats: int) -> dict[str, float]:
    """All steps have the same context: the new token is removed from the cache after each."""
    some = next(iter(models.values()))
    cache = filled(DynamicCache(config=some.config), some, batch, context - 1)
    token = torch.ones(batch, 1, dtype=torch.long, device=some.device)
    kept = [(layer.keys, layer.values) for layer in cache.layers]

    def step(model: nn.Module) -> None:
        model(token, past_key_values=cache, use_cache=True)
        for layer, (keys, values) in zip(cache.layers, kept, strict=True):
            layer.keys, layer.values = keys, values

    return medians_ms({name: partial(step, model) for name, model in models.items()}, some.device, repeats)


@torch.inference_mode()
def graph_ms(models: dict[str, nn.Module], batch: int, context: int, repeats: int) -> dict[str, float]:
    """Each replay adds a token to the cache."""
    some = next(iter(models.values()))
    room = len(models) * (BEFORE_CAPTURE + 1 + WARM_UP + repeats)
    cache = filled(StaticCache(config=some.config, max_cache_len=context + room), some, batch, context - 1)
    token = torch.ones(batch, 1, dtype=torch.long, device=some.device)
    replays = {}
    for name, model in models.items():
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(BEFORE_CAPTURE):
                model(token, past_key_values=cache, use_cache=True)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            model(token, past_key_values=cache, use_cache=True)
        replays[name] = graph.replay
    return medians_ms(replays, some.device, repeats)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contexts", type=int, nargs="+", default=CONTEXTS, help="tokens in the cache")
    parser.add_argument("--batches", type=int, nargs="+", default=(1, 8), help="batch sizes (default: 1 8)")
    parser.add_argument("--models", nargs="+", choices=("gpt", "llama"), default=("gpt", "llama"), help="default: both")
    parser.add_argument("--repeats", type=int, default=20, help="timed steps (default: %(default)s)")
    parser.add_argument("--small", action="store_true", help="tiny models, to test the script on a CPU")
    parser.add_argument("--commit", help="commit to record (default: from git)")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    ways = {"eager": eager_ms, "graph": graph_ms} if device.type == "cuda" else {"eager": eager_ms}
    rows = []
    for name in options.models:
        models = {
            attention: build(name, attention, options.small)
            .to(device, torch.bfloat16 if device.type == "cuda" else None)
            .eval()
            for attention in ("softmax", "lssar")
        }
        for batch in options.batches:
            for context in options.contexts:
                for way, measure in ways.items():
                    row = {"model": name, "batch": batch, "context": context, "way": way}
                    taken = measure(models, batch, context, options.repeats)
                    row |= {attention: round(ms, 4) for attention, ms in taken.items()}
                    row["ratio"] = round(row["lssar"] / row["softmax"], 3)
                    rows.append(row)
                    print(
                        f"{name:6} batch {batch:<3} context {context:<7} {way:6} softmax {row['softmax']:9.3f} ms  "
                        f"lssar {row['lssar']:9.3f} ms  ratio {row['ratio']:.2f}",
                        flush=True,
                    )
    if options.output:
        about = {"command": provenance.command("benchmarks/decode.py"), "commit": options.commit or provenance.commit()}
        about |= {"machine": provenance.machine(device), "versions": provenance.versions()}
        threads = {} if device.type == "cuda" else {"threads": torch.get_num_threads()}
        write({**about, **threads, "rows": rows}, options.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
