"""``softplus-attention info``: versions, devices, and the implementation that impl="auto" chooses."""

from __future__ import annotations

import argparse
import os
import platform
from importlib.metadata import PackageNotFoundError, version

import torch

from softplus_attention import __version__
from softplus_attention.cli.options import parse_integers
from softplus_attention.dispatch import MAX_DECODE_ROWS, choose
from softplus_attention.utils.device import parse_device
from softplus_attention.validation import LARGEST_HEAD_DIM, check_score_scale, fail

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}
PACKAGES = ("triton", "transformers", "entmax", "numpy")


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "info",
        help="show versions, devices and the implementation that impl='auto' chooses",
        description="Prints versions, devices, and the implementation that impl='auto' chooses, with the reason. The "
        "choice depends on device and dtype; an unsupported shape is an error, as in a call of the op.",
    )
    parser.add_argument(
        "--shape", default="1,8,4096,64", metavar="B,H,T,D",
        help="batch, heads, tokens, head dimension (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="default: %(default)s")
    parser.add_argument("--device", help="for example cpu, cuda or cuda:1 (default: cuda if available, else cpu)")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    shape = parse_shape(options.shape)
    device = parse_device(options.device)
    print(f"softplus-attention {__version__}")
    print(f"python             {platform.python_version()} on {platform.system()} {platform.machine()}")
    print(f"torch              {torch.__version__}, {torch.get_num_threads()} of {os.cpu_count()} CPU threads")
    for package in PACKAGES:
        print(f"{package:<19}{installed(package)}")
    print(f"CPU kernels        {cpu_kernels()}")
    for line in devices():
        print(line)
    choice = choose(device, DTYPES[options.dtype])
    batch, heads, tokens, width = shape
    scale = check_score_scale(None, width, (tokens,))
    print()
    print(f"impl='auto' for ({batch}, {heads}, {tokens}, {width}) {options.dtype} on {device}: {choice.impl}")
    print(f"  because: {choice.reason}")
    if choice.impl == "triton":
        print(f"  kernels: {describe_kernels(device, tokens, width, DTYPES[options.dtype])}")
        print(f"  softplus_attention_decode without gradients, up to {MAX_DECODE_ROWS} new tokens: its own kernel")
    print(f"  score_scale=None means log({width}) = {scale:.4f}")
    return 0


def describe_kernels(device: torch.device, tokens: int, width: int, dtype: torch.dtype) -> str:
    """The GPU kernels that run a call of this shape without a mask, and why."""
    from softplus_attention.kernels.hopper.launch import unsupported_device_reason, unsupported_shape_reason

    here = torch.cuda.is_available()
    reason = unsupported_shape_reason(width, tokens, dtype)
    if reason is None and here:
        reason = unsupported_device_reason(torch.cuda.get_device_capability(device))
    if reason is not None:
        return f"plain Triton, since {reason}"
    plain = "plain Triton for a mask tensor, offset=False or strides that are not multiples of 16"
    return f"Hopper; {plain}" if here else f"Hopper on a Hopper GPU (no CUDA device here); {plain}"


def cpu_kernels() -> str:
    from softplus_attention.kernels.cpu.native import status

    ops, reason = status()
    return f"{'PyTorch operations' if ops is None else 'C++'} ({reason})"


def installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def devices() -> list[str]:
    if not torch.cuda.is_available():
        return ["cuda               none"]
    lines = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        memory = properties.total_memory / 2**30
        capability = f"{properties.major}.{properties.minor}"
        lines.append(f"cuda:{index:<14}{properties.name}, {memory:.0f} GiB, compute capability {capability}")
    return lines


def parse_shape(text: str) -> tuple[int, int, int, int]:
    batch, heads, tokens, width = parse_integers("--shape", text, "four positive integers B,H,T,D", count=4)
    if width > LARGEST_HEAD_DIM:
        fail("--shape", f"of head dimension at most {LARGEST_HEAD_DIM}", repr(text))
    return batch, heads, tokens, width
