"""``softplus-attention plan``: predicts time and memory of training on many GPUs from times measured on one."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from softplus_attention.cli.options import parse_integers
from softplus_attention.utils import DOCS
from softplus_attention.validation import fail

if TYPE_CHECKING:
    from softplus_attention.training.plan import Shape

CLUSTER = {
    "peak_tflops": "peak TFLOP/s of a GPU, dense bfloat16 (default: 989, H200)",
    "memory_gb": "memory of a GPU in GB (default: 141, H200)",
    "per_machine": "GPUs per machine, connected by NVLink (default: 8)",
    "nvlink_gb": "GB/s that a GPU receives within its machine (default: 300)",
    "network_gb": "GB/s that a GPU receives from other machines (default: 40)",
    "mfu": "fraction of the peak that matrix products reach (default: 0.38, measured with GPT-2 small)",
}


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "plan",
        help="predict time and memory of training long contexts on many GPUs",
        description="Predicts tokens per second, memory and the longest context of a Llama-like decoder trained with "
        "context parallelism (gather), FSDP2 and activation checkpointing. The prediction uses times of the op "
        f"measured on one H200, and the bytes sent. Assumptions: {DOCS}/scale",
    )
    add = parser.add_argument
    add("--shape", default="8b", help="1b, 8b, or layers,hidden,heads,kv heads,mlp,vocabulary (default: %(default)s)")
    add("--gpus", default="1,8,64,512", metavar="N,...", help="numbers of GPUs (default: %(default)s)")
    add("--lengths", default="32768,131072,524288,1048576", metavar="N,...", help="tokens (default: %(default)s)")
    add("--context-parallel", type=int, metavar="N", help="GPUs that share a sequence (default: the fastest)")
    add("--attention", default="lssar",
        help="lssar, lssar-learned, lssa, softmax-flash or softmax-cudnn (default: %(default)s)")  # fmt: skip
    for name, text in CLUSTER.items():
        add(f"--{name.replace('_', '-')}", type=int if name == "per_machine" else float, metavar="X", help=text)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    from softplus_attention.training.plan import Cluster, changed, longest, plans

    shape = parse_shape(options.shape)
    cluster = changed(Cluster(), **{name: getattr(options, name) for name in CLUSTER})
    lengths = parse_integers("--lengths", options.lengths)
    print(f"{shape.parameters / 1e9:.1f} billion parameters, {options.attention}, predicted from times on one H200")
    head = {"GPUs": 5, "tokens": 10, "sharing one": 12, "GB each": 9, "tokens/s": 12, "step s": 9}
    print("".join(f"{name:>{width}}" for name, width in {**head, "attention": 11, "exchange": 10}.items()))
    for gpus in parse_integers("--gpus", options.gpus):
        context = options.context_parallel
        if context is not None and (context < 1 or gpus % context):
            fail("--context-parallel", f"a divisor of the {gpus} GPUs", context)
        for length, found in plans(shape, gpus, lengths, options.attention, cluster, context):
            if found is None:
                print(f"{gpus:>5}{length:>10,}  does not fit")
                continue
            parts = found.attention_s / found.step_s, found.context_s / found.step_s
            print(
                f"{gpus:>5}{length:>10,}{found.context:>12}{found.memory_gb:>9.0f}"
                f"{found.tokens_per_second:>12,.0f}{found.step_s:>9.1f}{parts[0]:>11.0%}{parts[1]:>10.1%}"
            )
        most = longest(shape, gpus, cluster)
        fits = f"at most {most:,} tokens per sequence" if most else "the weights do not fit"
        print(f"{gpus:>5} {'GPU' if gpus == 1 else 'GPUs'}: {fits}")
    return 0


def parse_shape(text: str) -> Shape:
    from softplus_attention.training import plan

    if text in plan.SHAPES:
        return plan.SHAPES[text]
    expected = f"{', '.join(plan.SHAPES)} or six numbers, layers,hidden,heads,kv heads,mlp,vocabulary"
    shape = plan.Shape(*parse_integers("--shape", text, expected, count=6))
    if shape.hidden % shape.heads or shape.heads % shape.kv_heads:
        fail("--shape", "such that heads divides hidden, and kv heads divides heads", text)
    return shape
