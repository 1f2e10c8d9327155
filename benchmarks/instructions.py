"""Instructions per score in the loops of a Triton kernel, compiled for sm_90 without a GPU.

The kernel is compiled as the op launches it (bfloat16, causal, p = 15 by default) and disassembled with the tools that
Triton ships. Loops with few instructions are ignored; the main loop is the one with the fewest per score. Both sides of
a branch count.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

from softplus_attention.kernels.arguments import KernelArguments
from softplus_attention.kernels.hopper import dkv as hopper_dkv
from softplus_attention.kernels.hopper import dq as hopper_dq
from softplus_attention.kernels.hopper import forward as hopper_forward
from softplus_attention.kernels.hopper import forward_fallback as hopper_fallback
from softplus_attention.kernels.hopper import launch as hopper_launch
from softplus_attention.kernels.hopper.tiles import type_of_tiles
from softplus_attention.kernels.triton import backward as triton_backward
from softplus_attention.kernels.triton import forward as triton_forward
from softplus_attention.kernels.triton import launch as triton_launch
from softplus_attention.power import PowerRecord

KERNELS = {
    "forward": triton_forward.forward_kernel,
    "dq": triton_backward.dq_kernel,
    "dkv": triton_backward.dkv_kernel,
    "hopper-forward": hopper_forward.gluon_forward_kernel,
    "hopper-forward-again": hopper_fallback.gluon_forward_again_kernel,
    "hopper-dq": hopper_dq.gluon_dq_kernel,
    "hopper-dq-again": hopper_dq.gluon_dq_kernel,
    "hopper-dkv": hopper_dkv.gluon_dkv_kernel,
    "hopper-dkv-again": hopper_dkv.gluon_dkv_kernel,
}
TILED = ("Q", "K", "V", "GradOut")  # descriptors in the Hopper kernels
FLOATS = ("score_scale",)
HALVES = {"bfloat16": "bf16", "float16": "fp16"}
NOT_ALIGNED = ("h", "h_kv", "inverse", "window", "range_stride", "seen_stride")
INT_POINTERS = ("Flat", "Fallback", "Start", "End", "Counts", "FirstRow", "LastRow")
HALF_POINTERS = ("Q", "K", "V", "Out", "Residual", "GradOut", "GradQ", "GradK", "GradV")


def kernel_blocks(name: str, d: int, sharpen: bool) -> triton_launch.Blocks:
    if name.startswith("hopper-dkv"):
        return triton_launch.Blocks(hopper_launch.DKV_ROWS[d], hopper_launch.ROWS, 4, 2)
    if name.startswith("hopper"):
        keys, registers = (hopper_launch.FORWARD_TILES if "forward" in name else hopper_launch.DQ_TILES)[d]
        return triton_launch.Blocks(hopper_launch.ROWS, keys, 4, 2, None if name.endswith("again") else registers)
    if name == "forward":
        return triton_launch.forward_blocks(d, False, sharpen)
    return (triton_launch.dq_blocks if name == "dq" else triton_launch.dkv_blocks)(d, False)


def signature(
    name: str,
    d: int,
    power: int,
    offset: bool,
    blocks: triton_launch.Blocks,
    half: str = "bf16",
    window: int | None = None,
    ranges: bool = False,
    power_gradient: bool = False,
) -> ASTSource:
    """The kernel with the types, constants and alignments of a call on (8, 12, 4096, d)."""
    kernel: Any = KERNELS[name]
    q = torch.empty(8, 4096, 12, d, dtype=torch.bfloat16, device="meta").transpose(1, 2)
    of_rows = torch.empty(1, 12, 4096, device="meta") if power < 0 else None
    bounds = torch.empty(1, 4096, dtype=torch.int32, device="meta") if ranges else None
    record = PowerRecord(power != 0, float(max(power, 1)), of_rows, None, offset)
    given = (
        KernelArguments(q, q, q, bounds, bounds, None, True, window, record, 4.0, False).shared_arguments()
        | blocks.options()
    )
    given |= {"HAS_REST": True, "BLOCK": hopper_launch.DKV_ROWS.get(d), "NORMALIZED_KEYS": False}
    given |= {"POWER_GRAD": power_gradient, "AGAIN": name.endswith("again")}
    types: dict[str, Any] = {}
    constants: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], Any] = {}
    aligned = [["tt.divisibility", 16]]
    for i, parameter in enumerate(kernel.params):
        n = parameter.name
        if parameter.is_constexpr:
            types[n], constants[(i,)] = "constexpr", given[n]
        elif n == "shared":  # 1, which is a constant to Triton
            types[n], constants[(i,)] = "constexpr", 1
        elif n in FLOATS or n == "growth":
            types[n] = "fp32" if n in FLOATS else ("fp32",) * 3
        elif n.endswith("_strides"):
            count = {"mask_strides": 4, "count_strides": 2}.get(n, 3)
            types[n] = ("i32",) * count
            if n not in ("mask_strides", "count_strides", "power_strides"):
                attributes |= {(i, j): aligned for j in range(count)}
        elif n in TILED and name.startswith("hopper") and not name.endswith("again"):
            types[n] = type_of_tiles(half, given["BN"] if n in ("K", "V") else given["BM"], d)
        elif n[0].isupper():
            of_floats = f"*{half}" if n in HALF_POINTERS else "*u8" if n == "Mask" else "*fp32"
            types[n], attributes[(i,)] = "*i32" if n in INT_POINTERS else of_floats, aligned
        else:
            types[n] = "i32"
            if n not in NOT_ALIGNED:
                attributes[(i,)] = aligned
    source = GluonASTSource if name.startswith("hopper") else ASTSource
    return source(kernel, types, constants, attributes)


def loops(sass: str, scores_per_thread: float) -> list[tuple[float, Counter[str]]]:
    """Instructions per score of every loop of more than 150, and their kinds."""
    found = re.findall(r"/\*([0-9a-f]{4,5})\*/\s+([^;]*);", sass)
    at = {int(address, 16): i for i, (address, _) in enumerate(found)}
    result = []
    for i, (address, text) in enumerate(found):
        jump = re.search(r"\bBRA\b.*?(0x[0-9a-f]+)", text)
        if not jump or int(jump[1], 16) > int(address, 16) or i - at.get(int(jump[1], 16), i) < 150:
            continue
        body = found[at[int(jump[1], 16)] : i + 1]
        kinds = Counter(re.sub(r"^@!?U?P\w+\s+", "", text).split()[0].split(".")[0] for _, text in body)
        if not kinds["EXIT"]:  # skips the retry branches of waits, which lie after the kernel's end
            result.append((len(body) / scores_per_thread, kinds))
    return result


def copied_too_early(ptx: str) -> int:
    """The number of copies into shared memory without a barrier of all warps since the last product.

    Such a copy would overwrite a tile that another warp still reads. Triton inserts the barriers, not the kernels.
    """
    found, product = 0, False
    for line in ptx.splitlines():
        product = (product or "wgmma.mma_async" in line) and "bar.sync" not in line
        found += product and "cp.async.bulk.tensor" in line
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kernel", choices=KERNELS)
    parser.add_argument("--head-dim", type=int, default=64, help="default: %(default)s")
    parser.add_argument("--power", type=int, default=15, help="0: LSSA; -1: one power per row (default: %(default)s)")
    parser.add_argument("--dtype", choices=HALVES, default="bfloat16", help="default: %(default)s")
    parser.add_argument("--without-offset", action="store_true", help="offset=False: do not subtract 1")
    parser.add_argument("--window", type=int, help="keys that a row sees (default: all up to itself)")
    parser.add_argument("--ranges", action="store_true", help="with first and last keys of each row")
    parser.add_argument("--power-gradient", action="store_true", help="also compute the gradient of each row's power")
    options = parser.parse_args(arguments)
    if options.power_gradient and options.power >= 0:
        parser.error(f"--power-gradient needs one power per row (--power -1), got --power {options.power}")
    if options.without_offset and options.kernel.startswith("hopper"):
        parser.error(f"--without-offset: {options.kernel} always subtracts")
    blocks = kernel_blocks(options.kernel, options.head_dim, options.power != 0)
    launch = {"num_warps": blocks.warps} | ({} if blocks.registers is None else {"maxnreg": blocks.registers})
    source = signature(
        options.kernel,
        options.head_dim,
        options.power,
        not options.without_offset,
        blocks,
        HALVES[options.dtype],
        options.window,
        options.ranges,
        options.power_gradient,
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=launch)
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(compiled.asm["cubin"])
        cubin.flush()
        command = [str(tools / "cuobjdump"), "-sass", cubin.name]
        sass = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    scores = blocks.rows * blocks.keys / (blocks.warps * 32)
    shape = f"D={options.head_dim}, p={options.power}, {options.dtype}"
    print(f"triton {triton.__version__}, {options.kernel}, {shape}, {blocks}")
    print(f"shared memory {compiled.metadata.shared} bytes")
    if early := copied_too_early(compiled.asm["ptx"]):
        print(f"{early} copies into tiles that a product may still read")
    for count, kinds in loops(sass, scores):
        most = ", ".join(f"{kind} {n / scores:.1f}" for kind, n in kinds.most_common(8))
        print(f"{count:6.1f} instructions per score: {most}")
        if kinds["WARPGROUP"] > kinds["HGMMA"] > 0:
            print("       each product is waited for: the compiler serialized them")
    return 0


if __name__ == "__main__":
    sys.exit(main())
