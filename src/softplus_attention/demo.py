"""``softplus-attention demo``: what becomes of one relevant key as the context grows.

A query resembles one key (its cosine is set) among N - 1 random ones. Each attention's weight on that key is averaged
over many draws. No training: this is the mechanism alone, the dilution that longer contexts bring.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from softplus_attention.validation import fail

if TYPE_CHECKING:
    from argparse import _SubParsersAction

NAMES = ("softmax", "softmax-qknorm-logn", "lssa", "lssar-p3", "lssar")


def add_command(commands: _SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "demo",
        help="the weight of one relevant key as the context grows, per attention",
        description="Plants one key that resembles the query among N random keys and prints the weight that each "
        "attention gives it as N grows. No training, a few seconds.",
    )
    parser.add_argument("--head-dim", type=int, default=64, help="default: %(default)s")
    parser.add_argument("--cosine", type=float, default=0.6, help="of the query with its key (default: %(default)s)")
    parser.add_argument("--longest", type=int, default=65536, help="largest context (default: %(default)s)")
    parser.add_argument("--draws", type=int, default=64, help="averaged per cell (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    parser.set_defaults(run=run)


def planted_key(
    keys: int, head_dim: int, cosine: float, draws: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """q (draws, 1, 1, D) and k (draws, 1, keys, D), all of norm sqrt(D); the last key has the given cosine with q."""

    def direction(*shape: int) -> Tensor:
        return torch.nn.functional.normalize(torch.randn(*shape, head_dim, generator=generator), dim=-1)

    q, k = direction(draws, 1, 1), direction(draws, 1, keys)
    away = direction(draws, 1, 1)
    away = torch.nn.functional.normalize(away - q * (q * away).sum(-1, keepdim=True), dim=-1)
    k[:, :, -1:] = cosine * q + math.sqrt(1 - cosine**2) * away
    return q * math.sqrt(head_dim), k * math.sqrt(head_dim)


def run(options: argparse.Namespace) -> int:
    from softplus_attention.catalog import attention

    if not -1 <= options.cosine <= 1:
        fail("--cosine", "from -1 to 1", options.cosine)
    for name, least in (("head_dim", 2), ("longest", 64), ("draws", 1)):
        if getattr(options, name) < least:
            fail(f"--{name.replace('_', '-')}", f"at least {least}", getattr(options, name))
    lengths = [n for n in (64, 256, 1024, 4096, 16384, 65536, 262144, 1048576) if n <= options.longest]
    print(f"The weight of one relevant key (cosine {options.cosine:g}) among N keys of dimension {options.head_dim},")
    print(f"mean of {options.draws} draws:\n")
    print(f"{'N':>8}" + "".join(f"{name:>21}" for name in NAMES), flush=True)
    begun = time.perf_counter()
    for keys in lengths:
        generator = torch.Generator().manual_seed(options.seed)
        weights = dict.fromkeys(NAMES, 0.0)
        for done in range(options.draws):
            q, k = planted_key(keys, options.head_dim, options.cosine, 1, generator)
            for name in NAMES:
                weights[name] += attention(name).weights(q, k)[0, 0, 0, -1].item() / options.draws
            if sys.stderr.isatty():
                print(f"\r{keys:>8}  {done + 1}/{options.draws}", end="", file=sys.stderr, flush=True)
        if sys.stderr.isatty():
            print("\r", end="", file=sys.stderr)
        print(f"{keys:>8}" + "".join(f"{weights[name]:>21.4f}" for name in NAMES), flush=True)
    print("\nRead down a column: a weight that falls towards 0 is dilution. This is the mechanism alone;")
    print(f"what it does for a trained model is another measurement. ({time.perf_counter() - begun:.0f} s)")
    return 0
