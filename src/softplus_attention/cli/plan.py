"""``softplus-attention plan``: time and memory of training on many GPUs, from times measured on one."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from softplus_attention.utils import DOCS
from softplus_attention.validation import fail

if TYPE_CHECKING:
    from argparse import _SubParsersAction

    from softplus_attention.training.plan import Shape

CLUSTER = {
    "peak_tflops": "of a GPU, dense bfloat16 (default: 989, H200)",
    "memory_gb": "of a GPU (default: 141, H200)",
    "per_machine": "GPUs joined by NVLink (default: 8)",
    "nvlink_gb": "GB a GPU receives in a second inside its machine (default: 300)",
    "network_gb": "GB a GPU receives in a second between machines (default: 40)",
    "mfu": "part of the peak that matrix products reach (default: 0.38, measured with GPT-2 small)",
}


def add_command(commands: _SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "plan",
        help="time and memory of training long contexts on many GPUs",
        description="Predicts tokens per second, memory and the longest context of a Llama-like decoder trained with "
        "context parallel (gather) and FSDP2, blocks recomputed, from times of the op measured on one H200 and the "
        f"bytes that are sent. Its assumptions: {DOCS}/scale",
    )
    parser.add_argument("--shape", default="8b", help="1b, 8b, or layers,hidden,heads,kv heads,mlp,vocabulary")
    parser.add_argument("--gpus", default="1,8,64,512", help="default: %(default)s")
    parser.add_argument("--lengths", default="32768,131072,524288,1048576", help="default: %(default)s")
    parser.add_argument("--context-parallel", type=int, help="GPUs that share a sequence (default: the fastest)")
    parser.add_argument("--attention", default="lssar", help="lssar, lssar-learned, lssa, softmax-flash, softmax-cudnn")
    for name, words in CLUSTER.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int if name == "per_machine" else float, help=words)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    from softplus_attention.training.plan import Cluster, changed, longest, plans

    shape = parsed_shape(options.shape)
    cluster = changed(Cluster(), **{name: getattr(options, name) for name in CLUSTER})
    lengths = positive("--lengths", options.lengths)
    print(f"{shape.parameters / 1e9:.1f} billion parameters, {options.attention}, predicted from one H200's times")
    head = {"GPUs": 5, "tokens": 10, "sharing one": 12, "GB each": 9, "tokens/s": 12, "step s": 9}
    print("".join(f"{name:>{width}}" for name, width in {**head, "attention": 11, "exchange": 10}.items()))
    for gpus in positive("--gpus", options.gpus):
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
        hold = f"a sequence of at most {most:,} tokens" if most else "not even the weights"
        print(f"{gpus:>5} {'GPU holds' if gpus == 1 else 'GPUs hold'} {hold}")
    return 0


def parsed_shape(text: str) -> Shape:
    from softplus_attention.training import plan

    if text in plan.SHAPES:
        return plan.SHAPES[text]
    numbers = positive("--shape", text)
    if len(numbers) != 6:
        fail("--shape", f"{', '.join(plan.SHAPES)} or six numbers, layers,hidden,heads,kv heads,mlp,vocabulary", text)
    shape = plan.Shape(*numbers)
    if shape.hidden % shape.heads or shape.heads % shape.kv_heads:
        fail("--shape", "of a width divisible by the heads, and heads by key heads", text)
    return shape


def positive(name: str, text: str) -> list[int]:
    words = text.split(",")
    if not all(word.strip().isdecimal() and int(word) > 0 for word in words):
        fail(name, "whole numbers above 0, separated by commas", repr(text))
    return [int(word) for word in words]
