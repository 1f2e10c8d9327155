"""The cost of windows, packed documents and learned powers with the Hopper kernels and with the plain Triton kernels.

32,768 tokens in bfloat16, all causal: a window of 512 keys, documents of 16 to 4,096 tokens packed into one sequence,
the power 15, and learned factors of log N with their gradient. Compared with softmax: torch's FlashAttention-2 for full
causal attention, else FlexAttention. Softplus contenders are first checked against the float64 reference; one that
fails is "wrong" and is not timed. Needs a GPU of compute capability 9.0.
"""

from __future__ import annotations

import argparse
import functools
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch._functorch.config
from attention import Inputs, Row, disagreement, say
from contenders import Contender, Settings, compiled, full, sdpa
from figures import first_line, made_by, write
from torch import Tensor
from torch.nn.attention import SDPBackend
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from triton.testing import do_bench

from softplus_attention import softplus_attention, softplus_attention_varlen
from softplus_attention.kernels.hopper import launch as hopper_launch
from softplus_attention.power import power_by_log

ROOT = Path(__file__).parents[1]
KINDS = ("hopper", "plain", "softmax")
CHECK_LENGTH, CHECK_WINDOW = 512, 192
HEADS = {64: 12, 128: 16}
TOKENS = 32768


@dataclass(frozen=True)
class Option:
    """Settings of a layer: length, power ("15", "1" or "learned"), and what a row sees."""

    length: int
    power: str
    window: int | None = None
    packed: bool = False

    def __str__(self) -> str:
        sees = "documents" if self.packed else "all before" if self.window is None else f"window {self.window}"
        return f"T={self.length} p={self.power} {sees}"


OPTIONS = (
    Option(1024, "15"),
    Option(4096, "15"),
    Option(1024, "learned"),
    Option(4096, "learned"),
    Option(4096, "1"),
    Option(4096, "15", window=512),
    Option(1024, "learned", window=512),
    Option(4096, "learned", window=512),
    Option(TOKENS, "15", packed=True),
    Option(TOKENS, "learned", packed=True),
)


@functools.cache
def documents(tokens: int, device: torch.device) -> tuple[Tensor, Tensor, int]:
    """Fixed random documents of 16 to 4,096 tokens: their bounds, the start of each token's document, the longest."""
    seed = torch.Generator().manual_seed(0)
    ends = (2 ** (4 + 8 * torch.rand(tokens, generator=seed))).int().cumsum(0)
    bounds = torch.cat([torch.tensor([0]), ends[ends < tokens], torch.tensor([tokens])]).to(torch.int32)
    starts = bounds[torch.searchsorted(bounds, torch.arange(tokens), right=True) - 1]
    return bounds.to(device), starts.to(device), int(bounds.diff().max())


def build_power(option: Option, heads: int, counts: Tensor, dtype: torch.dtype) -> Any:
    if option.power != "learned":
        return int(option.power)
    factors = torch.linspace(0.4, 1.0, heads, device=counts.device).requires_grad_()
    return power_by_log(factors.to(torch.float64 if dtype == torch.float64 else torch.float32), counts)


def softplus(option: Option, impl: Any) -> Callable[..., Tensor]:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        places = torch.arange(q.shape[2], device=q.device)
        if not option.packed:
            counts = places + 1 if option.window is None else (places + 1).clamp(max=option.window)
            power = build_power(option, q.shape[1], counts[None, None], q.dtype)
            return softplus_attention(q, k, v, power=power, is_causal=True, window=option.window, impl=impl)
        bounds, starts, longest = documents(q.shape[2], q.device)
        power = build_power(option, q.shape[1], (places - starts + 1)[None, None], q.dtype)
        packed = (x[0].transpose(0, 1) for x in (q, k, v))
        lengths = {"cu_seqlens_q": bounds, "cu_seqlens_k": bounds, "max_seqlen_q": longest, "max_seqlen_k": longest}
        out = softplus_attention_varlen(*packed, power=power, is_causal=True, impl=impl, **lengths)
        return out.transpose(0, 1)[None]

    return attend


@functools.cache
def build_block_mask(option: Option, device: torch.device) -> Any:
    _, starts, _ = documents(option.length, device)

    def inside(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        near = starts[i] == starts[j] if option.packed else i - j < (option.window or 0)
        return (i >= j) & near

    return torch.compile(create_block_mask)(inside, None, None, option.length, option.length, device=str(device))


def softmax(option: Option) -> Callable[..., Tensor]:
    if not option.packed and option.window is None:
        return sdpa(SDPBackend.FLASH_ATTENTION, is_causal=True)
    return lambda q, k, v: compiled(flex_attention)(q, k, v, block_mask=build_block_mask(option, q.device))


def contender(option: Option, kind: str) -> Contender:
    if kind == "softmax":
        return Contender(kind, softmax(option))
    return Contender(kind, softplus(option, "triton"), truth=softplus(option, "reference"))


def choose_kernels(kind: str) -> None:
    hopper_launch.available = lambda device: kind == "hopper"


def wrong(option: Option, kind: str, inputs: Inputs, head_dim: int) -> str:
    """Why the kernels fail against float64, or ''; at a shape that needs no other compilation."""
    small = Option(CHECK_LENGTH, option.power, option.window and CHECK_WINDOW, option.packed)
    checked = contender(small, kind)
    if checked.truth is None:
        return ""
    q, k, v, grad = inputs(1, HEADS[head_dim], CHECK_LENGTH, head_dim)
    clear = full((1, 1, CHECK_LENGTH, 1), True, device=q.device)
    return disagreement(checked.attend, checked.truth, (q, k, v), grad, True, clear)


def measured(option: Option, kind: str, head_dim: int, times: bool = True) -> Row:
    choose_kernels(kind)
    inputs = Inputs(Settings())
    row: Row = {
        "option": str(option),
        **asdict(option),
        "head_dim": head_dim,
        "heads": HEADS[head_dim],
        "kernels": kind,
    }
    row |= {"status": "ok", "error": ""}
    try:
        if reason := wrong(option, kind, inputs, head_dim):
            return row | {"status": "wrong", "error": reason}
        attend = contender(option, kind).attend
        q, k, v, grad = inputs(TOKENS // option.length, HEADS[head_dim], option.length, head_dim)
        with torch.no_grad():
            attend(q, k, v)
            row |= {"forward_ms": do_bench(lambda: attend(q, k, v), return_mode="median")} if times else {}
        backward = functools.partial(torch.autograd.grad, attend(q, k, v), (q, k, v), grad, retain_graph=True)
        backward()
        row |= {"backward_ms": do_bench(backward, return_mode="median")} if times else {}
    except Exception as error:
        row |= {"status": "error", "error": first_line(error)}
    return row


Case = tuple[Option, str, int]  # option, kernels, head dimension


def compile_alone(case: Case) -> str:
    """Runs in its own process, so that many cases compile in parallel; the binaries are cached on disk."""
    row = measured(*case, times=False)
    return f"{row['status']} {row['error']}".strip()


def cases(words: list[str], head_dims: list[int]) -> Iterator[Case]:
    for head_dim in head_dims:
        for option in OPTIONS:
            for kind in KINDS:
                if all(word in f"{option} {kind}" for word in words):
                    yield option, kind, head_dim


def format_row(row: Row) -> str:
    times = [f"{row[name]:.3f}" for name in ("forward_ms", "backward_ms") if name in row]
    return f"D{row['head_dim']:<4} {row['option']:34} {row['kernels']:8} {' / '.join(times) or row['error']}"


def record(found: Iterable[Case], measure: Callable[..., Row], output: Path, about: dict[str, Any]) -> None:
    """Writes the file after every row, so that an error loses nothing."""
    began, rows = time.monotonic(), []
    for case in found:
        rows.append(measure(*case))
        print(format_row(rows[-1]), flush=True)
        write(about | {"seconds": round(time.monotonic() - began, 1), "tokens": TOKENS, "rows": rows}, output)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="only cases whose names contain all of these: learned, window, plain")
    parser.add_argument("--head-dims", type=int, nargs="+", choices=list(HEADS), default=list(HEADS))
    parser.add_argument("--jobs", type=int, default=12, help="processes that compile before timing starts")
    parser.add_argument("--commit", help="commit to record (default: from git)")
    parser.add_argument("--output", type=Path, default=ROOT / "results" / "options.json", help="the JSON file to write")
    chosen = parser.parse_args()
    if not (torch.cuda.is_available() and hopper_launch.available(torch.device("cuda", 0))):
        sys.exit("needs a GPU of compute capability 9.0 and a Triton version that the Hopper kernels support")
    began, found = time.monotonic(), list(cases(chosen.words, chosen.head_dims))
    torch._functorch.config.donated_buffer = False  # the backward runs with retain_graph=True
    with get_context("spawn").Pool(chosen.jobs) as pool:
        for case, outcome in zip(found, pool.imap(compile_alone, found), strict=True):
            say(f"{time.monotonic() - began:6.0f} s  compiled {case[0]} {case[1]} D{case[2]}: {outcome}")
    record(found, measured, chosen.output, made_by("benchmarks/options.py", "cuda", chosen.commit))
    say(f"{time.monotonic() - began:6.0f} s  written to {chosen.output}")


if __name__ == "__main__":
    main()
