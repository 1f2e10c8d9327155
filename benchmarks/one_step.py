"""One forward and one backward pass of LSSAR, for a profiler:

ncu --set full -k 'regex:gluon_(forward|dq|dkv)' -o profile python benchmarks/one_step.py --head-dim 128
"""

from __future__ import annotations

import argparse

import torch

from softplus_attention import softplus_attention


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--head-dim", type=int, default=64, help="default: %(default)s")
    parser.add_argument("--heads", type=int, default=16, help="default: %(default)s")
    parser.add_argument("--batch", type=int, default=2, help="default: %(default)s")
    parser.add_argument("--tokens", type=int, default=8192, help="default: %(default)s")
    parser.add_argument("--power", type=int, default=15, help="0 is LSSA (default: %(default)s)")
    parser.add_argument("--device", default="cuda", help="default: %(default)s")
    options = parser.parse_args()
    shape = (options.batch, options.tokens, options.heads, options.head_dim)
    dtype = torch.bfloat16 if options.device == "cuda" else torch.float32
    q, k, v, gradient = (torch.randn(shape, device=options.device, dtype=dtype).transpose(1, 2) for _ in range(4))
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    out = softplus_attention(q, k, v, power=options.power or None, is_causal=True)
    gradients = torch.autograd.grad(out, (q, k, v), gradient)
    for name, x in zip(("dq", "dk", "dv"), gradients, strict=True):
        print(name, f"{float(x.float().norm()):.4g}")


if __name__ == "__main__":
    main()
