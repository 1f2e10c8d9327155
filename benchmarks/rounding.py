"""The cost of rounding unit vectors: output errors of three ways to compute scores, relative to the reference's error.

"raw" multiplies the bfloat16 vectors and applies their norms afterwards, as the kernels do; "float16" and "bfloat16"
round the unit vectors first. Ratios of error norms, and of largest errors, to those of the low-precision reference.
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path

import torch
from figures import write
from torch import Tensor

from softplus_attention import softplus_attention
from softplus_attention.reference import unit
from softplus_attention.utils import provenance

ROOT = Path(__file__).resolve().parents[1]


def output(q: Tensor, k: Tensor, v: Tensor, power: int, way: str) -> Tensor:
    """Causal LSSAR in float32 except for the scores; weights and output are rounded once."""
    counts = torch.arange(1, q.shape[-2] + 1, dtype=torch.float32)[:, None]
    scale = math.log(q.shape[-1]) * counts.log()
    if way == "raw":
        norms = q.float().norm(dim=-1)[..., None] * k.float().norm(dim=-1)[..., None, :]
        s = q.float() @ k.float().mT / norms * scale
    else:
        dtype = getattr(torch, way)
        s = (unit(q.float()) * scale).to(dtype).float() @ unit(k.float()).to(dtype).float().mT
    f = torch.nn.functional.softplus(s).tril()
    x = (counts * f / f.sum(-1, keepdim=True) - (counts > 3).float()).relu()
    w = (x / x.amax(-1, keepdim=True)) ** power
    return (w.to(q.dtype).float() @ v.float() / w.sum(-1, keepdim=True)).to(q.dtype)


def vectors(kind: str, length: int, d: int) -> tuple[Tensor, Tensor, Tensor]:
    """Random vectors; "peaked": queries similar to one key; "shared": queries and keys with a common direction."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 1, length, d, generator=generator) for _ in range(3))
    if kind == "peaked":
        q = q + 3 * k.roll(5, 2)
    if kind == "shared":
        q, k = q + 2, k + 2
    return q.bfloat16(), k.bfloat16(), v.bfloat16()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--output", type=Path, default=ROOT / "results" / "rounding.json", help="the JSON file to write"
    )
    parser.add_argument("--lengths", default="1024,4096", help="default: %(default)s")
    options = parser.parse_args()
    ways = ("raw", "float16", "bfloat16")
    rows = []
    print(f"{'D':>4}{'T':>6}  {'vectors':<8}{'p':>3}" + "".join(f"{way:>18}" for way in ways))
    for d in (64, 128):
        for length in (int(n) for n in options.lengths.split(",")):
            for kind in ("random", "peaked", "shared"):
                q, k, v = vectors(kind, length, d)
                for power in (3, 15, 31):
                    exact = [x.double() for x in (q, k, v)]
                    truth = softplus_attention(*exact, power=power, is_causal=True, impl="reference")
                    own = softplus_attention(q, k, v, power=power, is_causal=True, impl="reference").double() - truth
                    row = {"d": d, "length": length, "vectors": kind, "power": power}
                    for way in ways:
                        error = output(q, k, v, power, way).double() - truth
                        row[way] = [float(error.norm() / own.norm()), float(error.abs().max() / own.abs().max())]
                    rows.append(row)
                    cells = "".join(f"{row[way][0]:>11.2f} /{row[way][1]:>5.1f}" for way in ways)
                    print(f"{d:>4}{length:>6}  {kind:<8}{power:>3}{cells}", flush=True)
    data = {
        "command": provenance.command("benchmarks/rounding.py"),
        "commit": provenance.commit(),
        "versions": {"torch": torch.__version__},
        "ratios": "error norm and largest error, to those of the bfloat16 reference",
        "rows": rows,
    }
    write(data, options.output)
    print(f"written to {options.output.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
