"""Softplus attention compared with fused softmax attentions: time, memory and decode steps, in one run.

Softplus contenders are first checked against the float64 reference, forward and gradients; one that fails is "wrong"
and is not timed. Contenders that cannot run become rows with their error. Sections:

    train    forward and backward of 32,768 tokens, causal bfloat16: ours, torch SDPA, the dense reference, AdaSplash-2
    trained  the same on q, k, v of a trained model (--trained, benchmarks/trained_inputs.py) instead of random ones
    lengths  the same by length, from 512 to 131,072, and a forward pass over a million tokens
    decode   one new token per sequence over key/value caches, with GQA
    memory   memory beyond the inputs: of a forward pass, kept for the backward pass, and of a training step
    compile  torch.compile of FlexAttention (softmax; LSSAR in two passes), of the reference and of our op

FLOPs are counted equally for all: 4 B H D T^2/2 forward and 2.5 times that backward. Inputs have (B, T, H, D) layout.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import math
import statistics
import sys
import time
import timeit
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch._functorch.config
import torch.nn.functional as F
from contenders import (
    QUICK,
    Attention,
    Contender,
    Settings,
    Shape,
    choose_contenders,
    compiled_contenders,
    contenders,
    decode_contenders,
)
from figures import derive, first_line, format_row, header, table, write
from torch import Tensor
from trained_inputs import load

from softplus_attention.reference import EQUAL_SCORES, attention_stages
from softplus_attention.visibility import Visibility

ROOT = Path(__file__).parents[1]
MIB = 2**20
SHAPE = ("batch", "heads", "length", "head_dim")
LONGEST_DENSE, DENSE_BYTES, DENSE_BUDGET = 4096, 52, 60e9  # bytes per score of a dense training step
Row = dict[str, Any]
Fill = Callable[..., None]
say = functools.partial(print, file=sys.stderr, flush=True)


@dataclass(eq=False)
class Inputs:
    """q, k, v and an output gradient of any shape: random, or cropped and repeated from a trained model's."""

    settings: Settings
    stored: dict[str, Tensor] = field(default_factory=dict)
    about: str = "random"

    @property
    def longest(self) -> int:
        return self.stored["q"].shape[2] if self.stored else sys.maxsize

    def fits(self, head_dim: int, length: int) -> bool:
        return length <= self.longest and (not self.stored or self.stored["q"].shape[-1] == head_dim)

    def raw(self, name: str, shape: tuple[int, int, int, int]) -> Tensor:
        """(B, T, H, D)"""
        batch, heads, length, head_dim = shape
        device, dtype = self.settings.device, self.settings.dtype
        if name not in self.stored:
            seed = torch.Generator(device).manual_seed("qkvg".index(name))
            return torch.randn(batch, length, heads, head_dim, device=device, dtype=dtype, generator=seed)
        x = self.stored[name]
        x = x.repeat_interleave(self.stored["q"].shape[1] // x.shape[1], dim=1)
        x = x[torch.arange(batch) % x.shape[0]][:, torch.arange(heads) % x.shape[1], :length]
        return x.transpose(1, 2).to(device, dtype).contiguous()

    def __call__(self, *shape: int, contiguous: bool = False) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        q, k, v, g = (self.raw(name, shape).transpose(1, 2) for name in "qkvg")
        if contiguous:
            q, k, v, g = (x.contiguous() for x in (q, k, v, g))
        return q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), g


def read_inputs(source: str, settings: Settings) -> Inputs:
    if not Path(source).is_file():
        raise SystemExit(f"--trained {source}: no such file")
    stored = load(source)
    tensors = [stored.get(x) for x in "qkv"] if isinstance(stored, dict) else []
    if not tensors or any(not isinstance(x, Tensor) or x.dim() != 4 for x in tensors):
        raise SystemExit(f"--trained {source}: expected a dict of q, k, v, each (B, H, T, D)")
    (_, heads, *place), (_, kv_heads, *of_keys), (_, of_values, *_) = (x.shape for x in tensors)
    if place != of_keys or heads % kv_heads or heads % of_values or tensors[1].shape[2] != tensors[2].shape[2]:
        shapes = ", ".join(str(tuple(x.shape)) for x in tensors)
        raise SystemExit(
            f"--trained {source}: expected q, k, v with equal T and D, and key heads that divide q's; got {shapes}"
        )
    inputs = Inputs(settings, {name: x.detach() for name, x in zip("qkv", tensors, strict=True)})
    inputs.about = str(stored.get("about", Path(source).name))
    return inputs


def disagreement(attend: Attention, truth: Attention, qkv: Any, grad: Tensor, backward: bool, clear: Tensor) -> str:
    """The first of out, dq, dk, dv whose error exceeds 2 x that of the low-precision reference + 1 ulp, or ''."""
    results = []
    for run, dtype in ((attend, grad.dtype), (truth, grad.dtype), (truth, torch.float64)):
        leaves = [x.detach().to(dtype).requires_grad_(backward) for x in qkv]
        out = run(*leaves)
        grads = torch.autograd.grad(out, leaves, (grad * clear).to(dtype)) if backward else ()
        results.append((out.detach() * clear, *grads))
    for name, x, low, exact in zip(("out", "dq", "dk", "dv"), *results, strict=False):
        error, theirs = (float((y.double() - exact).abs().max()) for y in (x, low))
        largest = float(exact.abs().max())
        ulp = torch.finfo(x.dtype).eps * 2.0 ** math.floor(math.log2(largest)) if largest > 0 else 0.0
        if not error <= 2 * theirs + ulp:
            return f"{name}: error {error:.2e}, allowed {2 * theirs + ulp:.2e}"
    return ""


@functools.cache
def wrong(contender: Contender, inputs: Inputs, head_dim: int) -> str:
    """Why the contender fails against the float64 reference, or ''."""
    if contender.truth is None:
        return ""
    for length in inputs.settings.check_lengths:
        length = min(length, inputs.longest)
        q, k, v, grad = inputs(2, 2, length, head_dim)
        causal = Visibility(length, length, q.device, is_causal=True)
        stages = attention_stages(q.detach().double(), k.detach().double(), causal, None)
        largest = (stages.counts[..., None] * stages.normalised).amax(-1) - (stages.counts > 3).double()
        clear = ~((largest > EQUAL_SCORES / 2) & (largest < EQUAL_SCORES * 2))[
            ..., None
        ]  # in other rows rounding decides
        if reason := disagreement(contender.attend, contender.truth, (q, k, v), grad, contender.backward, clear):
            return f"T={length} {reason}"
    return ""


def milliseconds(work: Callable[[], Any], settings: Settings, rounds: int | None = None) -> list[float]:
    rounds = rounds or settings.repetitions
    if settings.device == "cuda":
        from triton.testing import do_bench

        return [do_bench(work, return_mode="median") for _ in range(rounds)]
    work()
    return [1e3 * seconds for seconds in timeit.repeat(work, repeat=rounds, number=1)]


def held_mib(work: Callable[[], Any], settings: Settings) -> tuple[float | None, float | None]:
    """MiB allocated by ``work``: at the peak, and at the end while the result is kept."""
    if settings.device != "cuda":
        work()
        return None, None
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    _kept = work()
    torch.cuda.synchronize()
    kept, peak = (x - before for x in (torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()))
    return peak / MIB, kept / MIB


def attempt(row: Row, contender: Contender, fill: Fill, check: Callable[[], str], inputs: Inputs) -> Row:
    """The row that ``fill`` measures; after a failed check or an error it keeps what was measured so far."""
    row = {**row, "contender": contender.name, "status": "ok", "note": row.get("note", ""), "error": ""}
    torch.compiler.reset()  # compile each shape separately, to stay below the recompilation limit
    try:
        if reason := check():
            row |= {"status": "wrong", "error": reason}
        else:
            fill(row, contender, inputs)
    except Exception as error:
        row |= {"status": "error", "error": first_line(error)}
    torch.cuda.empty_cache()
    return row


def host_milliseconds(work: Callable[[], Any], settings: Settings) -> float | None:
    """Time until a call returns, on an idle GPU. If it exceeds the GPU time, it is what the timing measures."""
    calls = 10
    if settings.device != "cuda":
        return None
    torch.cuda.synchronize()
    seconds = timeit.timeit(work, number=calls)
    torch.cuda.synchronize()
    return 1e3 * seconds / calls


def record(row: Row, direction: str, samples: list[float], host: float | None = None) -> None:
    row |= {f"{direction}_ms": statistics.median(samples), f"{direction}_samples_ms": samples}
    if host is not None:
        row[f"{direction}_host_ms"] = host


def fill_times(row: Row, contender: Contender, inputs: Inputs) -> None:
    settings = inputs.settings
    q, k, v, grad = inputs(*(row[x] for x in SHAPE), contiguous=contender.contiguous)
    with torch.no_grad():
        forward = functools.partial(contender.attend, q, k, v)
        record(row, "forward", milliseconds(forward, settings), host_milliseconds(forward, settings))
    if not contender.backward:
        row["note"] += "forward only"
        return
    backward = functools.partial(torch.autograd.grad, contender.attend(q, k, v), (q, k, v), grad, retain_graph=True)
    record(row, "backward", milliseconds(backward, settings), host_milliseconds(backward, settings))
    del backward
    row["step_mib"], _ = held_mib(lambda: torch.autograd.grad(contender.attend(q, k, v), (q, k, v), grad), settings)


def fill_memory(row: Row, contender: Contender, inputs: Inputs) -> None:
    q, k, v, grad = inputs(*(row[x] for x in SHAPE), contiguous=contender.contiguous)

    def step() -> Any:
        return torch.autograd.grad(contender.attend(q, k, v), (q, k, v), grad)

    step()  # compiles, and allocates permanent workspaces
    with torch.no_grad():
        row["forward_mib"], _ = held_mib(lambda: contender.attend(q, k, v), inputs.settings)
    _, row["kept_mib"] = held_mib(lambda: contender.attend(q, k, v), inputs.settings)
    row["step_mib"], _ = held_mib(step, inputs.settings)


def measure_section(
    section: str, inputs: Inputs, chosen: list[Contender], fill: Fill, shapes: list[Shape]
) -> Iterator[Row]:
    """A row per (head dim, length) and contender."""
    settings = inputs.settings
    for head_dim, length in (x for x in shapes if inputs.fits(*x)):
        for contender in (x for x in chosen if length <= LONGEST_DENSE or not x.dense):
            heads = settings.heads(head_dim)
            batch = wanted = max(1, settings.tokens // length)
            while contender.dense and batch > 1 and batch * heads * length**2 * DENSE_BYTES > DENSE_BUDGET:
                batch //= 2
            row = {"section": section, "batch": batch, "heads": heads, "length": length, "head_dim": head_dim}
            row["note"] = "" if batch == wanted else f"B={batch} for memory"
            row |= {"inputs": inputs.about} if inputs.stored else {}
            yield attempt(row, contender, fill, functools.partial(wrong, contender, inputs, head_dim), inputs)


def of_shapes(section: str, fill: Fill, inputs: Inputs) -> Iterator[Row]:
    settings = inputs.settings
    yield from measure_section(section, inputs, choose_contenders(section, settings), fill, settings.shapes)


def run_lengths(inputs: Inputs) -> Iterator[Row]:
    settings = inputs.settings
    chosen = choose_contenders("lengths", settings)
    yield from measure_section(
        "lengths", inputs, chosen, fill_times, [(64, length) for length in settings.long_lengths]
    )

    def fill(row: Row, contender: Contender, inputs: Inputs) -> None:
        q, k, v, _ = inputs(*(row[x] for x in SHAPE))
        with torch.no_grad():
            row["finite"] = bool(contender.attend(q, k, v).isfinite().all())
            row["forward_mib"], _ = held_mib(lambda: contender.attend(q, k, v), settings)
            record(row, "forward", milliseconds(lambda: contender.attend(q, k, v), settings, 1))

    for contender in chosen:
        row = {"section": "million", "batch": 1, "heads": 1, "length": settings.million, "head_dim": 64}
        yield attempt(row, contender, fill, functools.partial(wrong, contender, inputs, 64), inputs)


def caches(settings: Settings, context: int, count: int, unit_keys: bool) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
    batch, heads, kv_heads, head_dim = settings.decode_shape
    seed = torch.Generator(settings.device).manual_seed(context)
    options = {"device": settings.device, "dtype": settings.dtype, "generator": seed}
    q = torch.randn(batch, heads, 1, head_dim, **options)
    pairs = []
    for _ in range(count):
        k, v = (torch.randn(batch, kv_heads, context, head_dim, **options) for _ in range(2))
        pairs.append((F.normalize(k.float(), dim=-1).to(k.dtype) if unit_keys else k, v))
    return q, pairs


def decode_wrong(contender: Contender, settings: Settings) -> str:
    if contender.truth is None:
        return ""
    q, ((k, v),) = caches(settings, 333, 1, "unit" in contender.name)
    clear = torch.ones((), dtype=torch.bool, device=q.device)
    return disagreement(contender.attend, contender.truth, (q, k, v), q, False, clear)


def replayed(calls: list[Callable[[], Any]], settings: Settings) -> tuple[list[float], str]:
    """Milliseconds per call of ``calls``, and the method: a CUDA graph if capture works."""

    def work() -> None:
        for call in calls:
            call()

    if settings.device != "cuda":
        return [x / len(calls) for x in milliseconds(work, settings)], "plain calls"
    work()
    torch.cuda.synchronize()
    try:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work()
        timed, how = graph.replay, "cuda graph"
    except Exception as error:
        torch.cuda.synchronize()
        timed, how = work, f"plain calls: {first_line(error)}"
    return [x / len(calls) for x in milliseconds(timed, settings)], how


def fill_decode(row: Row, contender: Contender, inputs: Inputs) -> None:
    q, pairs = caches(inputs.settings, row["length"], row["caches"], "unit" in contender.name)
    calls = [functools.partial(contender.attend, q, *pairs[i % len(pairs)]) for i in range(max(len(pairs), 8))]
    with torch.no_grad():
        samples, row["timing"] = replayed(calls, inputs.settings)
    record(row, "forward", samples)
    row["cache_gb_per_s"] = row["cache_bytes"] / row["forward_ms"] / 1e6


def run_decode(inputs: Inputs) -> Iterator[Row]:
    settings = inputs.settings
    batch, heads, kv_heads, head_dim = settings.decode_shape
    l2 = torch.cuda.get_device_properties(0).L2_cache_size if settings.device == "cuda" else 0
    for context in settings.contexts:
        size = 2 * batch * kv_heads * context * head_dim * settings.dtype.itemsize
        row = {"section": "decode", "batch": batch, "heads": heads, "kv_heads": kv_heads, "length": context}
        row |= {"head_dim": head_dim, "cache_bytes": size, "caches": max(1, math.ceil(4 * l2 / size))}
        for contender in decode_contenders(settings):
            yield attempt(row, contender, fill_decode, functools.partial(decode_wrong, contender, settings), inputs)


def compile_one(case: tuple[Settings, str, int]) -> str:
    """Compiles the kernels of one contender into Triton's disk cache, where the run finds them."""
    settings, name, head_dim = case
    contender, inputs = next(x for x in contenders(settings) if x.name == name), Inputs(settings)
    try:
        wrong(contender, inputs, head_dim)
        q, k, v, grad = inputs(2, settings.heads(head_dim), min(settings.lengths), head_dim)
        with torch.no_grad():
            contender.attend(q, k, v)
        torch.autograd.grad(contender.attend(q, k, v), (q, k, v), grad)
    except Exception as error:  # the run reports it in a row
        return f"{name} D={head_dim}: {first_line(error)}"
    return f"{name} D={head_dim}"


def compile_in_parallel(settings: Settings, sections: list[str], jobs: int) -> Iterator[str]:
    called = {x.name: x for section in sections for x in choose_contenders(section, settings)}
    ours = [name for name, x in called.items() if x.truth is not None and not x.dense]
    cases = [(settings, name, head_dim) for head_dim in reversed(settings.head_dims) for name in ours]
    with get_context("spawn").Pool(jobs) as pool:
        yield from pool.imap_unordered(compile_one, cases)


SECTIONS: dict[str, Callable[[Inputs], Iterator[Row]]] = {
    "train": functools.partial(of_shapes, "train", fill_times),
    "trained": functools.partial(of_shapes, "trained", fill_times),
    "lengths": run_lengths,
    "decode": run_decode,
    "memory": functools.partial(of_shapes, "memory", fill_memory),
    "compile": lambda x: measure_section("compile", x, compiled_contenders(), fill_times, x.settings.shapes),
}


def numbers(text: str) -> tuple[int, ...]:
    return tuple(int(x) for x in text.split(","))


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--commit", help="commit to record (default: from git)")
    add("--sections", default=",".join(SECTIONS), help="sections to run, in this order (default %(default)s)")
    add("--trained", nargs="+", default=[], metavar="FILE", help=".pt or .safetensors of q, k, v, each (B, H, T, D)")
    add("--head-dims", type=numbers, help="D of train, trained, memory and compile (default 64,128)")
    add("--lengths", type=numbers, help="T of train, trained, memory and compile (default 1024,4096,16384)")
    add("--repetitions", type=int, default=3, help="rounds of do_bench, whose median is used (default 3)")
    add("--jobs", type=int, default=0, help="processes that compile our kernels before timing starts (default 0)")
    add("--time-limit", type=float, default=math.inf, help="stop after this many seconds and keep the rows so far")
    add("--quick", action="store_true", help="tiny shapes, to test the script, also on a CPU; the numbers mean nothing")
    add("--output", type=Path, default=ROOT / "results" / "attention.json", help="the JSON file to write")
    chosen = parser.parse_args()
    if unknown := set(chosen.sections.split(",")) - set(SECTIONS):
        parser.error(f"--sections: no section {', '.join(sorted(unknown))}; choose from {', '.join(SECTIONS)}")
    if chosen.jobs < 0:
        parser.error(f"--jobs must be at least 0, got {chosen.jobs}")
    if min(chosen.repetitions, *(chosen.head_dims or ()), *(chosen.lengths or ()), 1) < 1:
        parser.error("--repetitions, --head-dims and --lengths must be at least 1")
    if "trained" in chosen.sections.split(",") and not chosen.trained:
        if chosen.sections == "trained":
            parser.error("--sections trained needs --trained FILE (benchmarks/trained_inputs.py writes such files)")
        say("no --trained: the section trained is skipped")
    if not chosen.quick and not torch.cuda.is_available():
        parser.error("no CUDA device; only --quick runs on a CPU")
    return chosen


def keep(data: dict[str, Any], path: Path, began: float, complete: bool) -> None:
    data |= {"complete": complete, "seconds": round(time.monotonic() - began, 1)}
    derive(data)
    write(data, path)


def main() -> None:
    began, chosen = time.monotonic(), options()
    torch._functorch.config.donated_buffer = False  # the backward of compiled contenders runs with retain_graph=True
    given = {"head_dims": chosen.head_dims, "lengths": chosen.lengths, "repetitions": chosen.repetitions}
    given = (QUICK if chosen.quick else {}) | {name: value for name, value in given.items() if value}
    cpu = {} if torch.cuda.is_available() else {"device": "cpu", "dtype": torch.float32, "baseline": "sdpa math"}
    settings = Settings(**given, **cpu)
    trained = [read_inputs(source, settings) for source in chosen.trained]
    for source, inputs in zip(chosen.trained, trained, strict=True):
        if not any(inputs.fits(*shape) for shape in settings.shapes):
            raise SystemExit(f"--trained {source}: its T and D fit none of the timed shapes")
    data, sections = header(settings, chosen.commit), chosen.sections.split(",")
    late = False
    for case in compile_in_parallel(settings, sections, chosen.jobs) if chosen.jobs else ():
        say(f"{time.monotonic() - began:6.0f} s  compiled {case}")
    for section in sections:
        given_to = trained if section == "trained" else [Inputs(settings)]
        for row in itertools.chain.from_iterable(map(SECTIONS[section], given_to)):
            data["rows"].append(row)
            say(f"{time.monotonic() - began:6.0f} s  {format_row(row)}")
            late = time.monotonic() - began > chosen.time_limit
            keep(data, chosen.output, began, complete=False)  # a killed run loses nothing
            if late:
                break
        keep(data, chosen.output, began, complete=section == sections[-1] and not late)
        if late:
            say(f"stopped by --time-limit in section {section}")
            break
    print(table(data))
    say(f"written to {chosen.output}")


if __name__ == "__main__":
    main()
