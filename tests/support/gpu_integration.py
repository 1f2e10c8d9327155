"""The Triton ops in PyTorch on a GPU: compile, autocast, checkpointing, CUDA graphs, synchronisation, recompilation."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch
import triton
from gpu_inputs import (
    DEVICE,
    HALF,
    D,
    assert_near,
    assert_raises,
    assert_same,
    calls,
    documents,
    gpu_randn,
    poisoned_memory,
    qkv,
    step,
)
from hostile_cases import by_packing
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

from softplus_attention import (
    PowerByLength,
    dispatch,
    softplus_attention,
    softplus_attention_decode,
    softplus_attention_varlen,
)
from softplus_attention.nn import SoftplusAttention

BACKEND = "inductor" if DEVICE == "cuda" else "aot_eager"
LENGTHS = (300, 77, 1000) if DEVICE == "cuda" else (20, 33, 7)


def compile_counted(function: Callable[..., Any], dynamic: bool | None = None) -> tuple[Any, Any]:
    """The function compiled without graph breaks, and a counter of its compilations."""
    torch.compiler.reset()
    counter = CompileCounterWithBackend(BACKEND)
    return torch.compile(function, backend=counter, fullgraph=True, dynamic=dynamic), counter


def check_compile(power: str) -> str:
    """Compiled equals eager bit for bit, forward and backward: the code around the op only scales by 2 and 0.5.

    The gradient of a power per head may differ, since the compiler changes the order of its float32 sum over all rows.
    """
    chosen = {"15": 15, "lssa": None, "by length": PowerByLength(3, 2, 16)}.get(power)
    per_head = [torch.linspace(2, 15, 4, device=DEVICE).requires_grad_()] if power == "per head" else []

    def attend(q: Tensor, k: Tensor, v: Tensor, *powers: Tensor) -> Tensor:
        given = powers[0] if powers else chosen
        return 0.5 * softplus_attention(
            q * 2, k * 2, v * 2, power=given, is_causal=True, enable_gqa=True, impl="triton"
        )

    frames = []
    for dynamic, max_frames in ((None, 2), (True, 1)):
        compiled, counter = compile_counted(attend, dynamic)
        for i, t in enumerate(LENGTHS):
            leaves = [*qkv(t, seed=i), *per_head]
            found, expected = step(compiled, leaves), step(attend, leaves)
            assert_same(found[:4], expected[:4], f"T={t}")
            for x, y in zip(found[4:], expected[4:], strict=True):
                assert_near(x, y, torch.float32, f"T={t}, the power's gradient")
        assert counter.frame_count <= max_frames, f"{counter.frame_count} compilations of {len(LENGTHS)} lengths"
        frames.append(counter.frame_count)
    return f"{frames[0]} compilations of 3 lengths ({frames[1]} with dynamic=True), equal to eager"


def check_compile_packed(given: bool) -> str:
    """The document boundaries are an argument of the compiled function if ``given``, else computed inside it."""

    def attend(cu: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if not given:
            return by_packing(cu, q, k, v, enable_gqa=True, impl="triton")
        q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))
        lengths = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": q.shape[0], "max_seqlen_k": q.shape[0]}
        return softplus_attention_varlen(q, k, v, **lengths, is_causal=True, enable_gqa=True, impl="triton")

    compiled, counter = compile_counted(attend)
    for i, t in enumerate(LENGTHS):
        leaves, cu = qkv(t, seed=i), documents(2 * t if given else t)
        assert_same(step(partial(compiled, cu), leaves), step(partial(attend, cu), leaves), f"T={t}")
    assert counter.frame_count <= 2, f"{counter.frame_count} compilations"
    return f"{counter.frame_count} compilations of 3 lengths"


def decode_inputs(t_max: int, seed: int = 0) -> list[Tensor]:
    q, k, v = (x.detach() for x in qkv(t_max, seed=seed))
    return [q[:, :, :1].contiguous(), k, v]


def check_compile_decode() -> str:
    def attend(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
        return softplus_attention_decode(q, k, v, lengths, enable_gqa=True, impl="triton")

    compiled, counter = compile_counted(attend)
    inputs = decode_inputs(LENGTHS[0])
    for lengths in ([3, 9], [4, 10], [LENGTHS[0] - 1, LENGTHS[0]]):
        given = torch.tensor(lengths, device=DEVICE)
        assert_same([compiled(*inputs, given)], [attend(*inputs, given)], str(lengths))
    assert counter.frame_count == 1, f"{counter.frame_count} compilations"
    return "one compilation while the cache fills"


def check_compile_module() -> str:
    """A layer compiled under autocast: its distance to float32 is at most twice that of eager."""
    torch.manual_seed(0)
    layer = SoftplusAttention(4 * D, 4, num_kv_heads=2, power="learned", device=DEVICE)
    compiled, counter = compile_counted(layer)
    worst = 0.0
    for i, t in enumerate(LENGTHS):
        x = gpu_randn(2, t, 4 * D, seed=i, dtype=torch.float32)
        results = []
        for f, impl, half in ((compiled, "triton", True), (layer, "triton", True), (layer, "reference", False)):
            with torch.autocast(DEVICE, HALF, enabled=half):
                out = f(x, impl=impl)
            results.append([out.detach(), *torch.autograd.grad(out.float().square().sum(), list(layer.parameters()))])
        for found, eager, truth in zip(*results, strict=True):
            ours, theirs = (float((y.float() - truth).norm() / truth.norm()) for y in (found, eager))
            assert ours <= 2 * theirs, f"T={t}: {ours:.1e} from float32, eager {theirs:.1e}"
            worst = max(worst, ours / theirs)
    assert counter.frame_count <= 2, f"{counter.frame_count} compilations"
    return f"{counter.frame_count} compilations; at most {worst:.2f} times eager's distance to float32"


def check_autocast() -> str:
    """Equal to a call in that dtype; gradients are float32."""
    for dtype in (torch.bfloat16, torch.float16) if DEVICE == "cuda" else (HALF,):
        attend = calls(300)["causal"]
        leaves = qkv(300, dtype=torch.float32)

        def cast(*x: Tensor, attend: Any = attend, dtype: torch.dtype = dtype) -> Tensor:
            return attend(*(y.to(dtype) for y in x))

        def automatic(*x: Tensor, attend: Any = attend, dtype: torch.dtype = dtype) -> Tensor:
            with torch.autocast(DEVICE, dtype):
                return attend(*x)

        found, expected = step(automatic, leaves), step(cast, leaves)
        assert found[0].dtype == dtype
        assert {x.dtype for x in found[1:]} == {torch.float32}
        assert_same(found, expected, str(dtype))
    return "equal to a call in that dtype"


def check_checkpointing() -> str:
    attend = calls(300)["causal"]
    expected = step(attend, qkv(300))
    for reentrant in (False, True):
        leaves = qkv(300)
        out = checkpoint(attend, *leaves, use_reentrant=reentrant)
        out.backward(gpu_randn(*out.shape, seed=99))
        assert_same([out.detach(), *(x.grad for x in leaves)], expected, f"use_reentrant={reentrant}")
    return "equal gradients, both kinds"


def op_arguments(name: str, t: int = 33) -> list[Any]:
    """Arguments of the registered op except ``for_backward``."""
    q, k, v = qkv(0 if name == "empty" else t)
    if name == "contiguous":
        q, k, v = (x.detach().contiguous().requires_grad_() for x in (q, k, v))
    row = torch.arange(t, device=DEVICE, dtype=torch.int32).expand(2, t).contiguous()
    start, end = (row // 2, row + 1) if name == "ranges" else (None, None)
    mask = torch.rand(2, 1, t, t, device=DEVICE) < 0.8 if name == "mask" else None
    rows = torch.full((1, 4, 1), 2.5, device=DEVICE, requires_grad=True) if name == "rows" else None
    growth = [3.0, 1.0, 4.0] if name == "by length" else None
    window = 7 if name == "window" else None
    power = (name != "lssa", 15.0, rows, growth, name != "without offset")
    return [q, k, v, start, end, mask, True, window, *power, math.log(D), False]


OPCHECKED = ("causal", "contiguous", "window", "lssa", "mask", "ranges", "rows", "by length", "without offset", "empty")


@contextmanager
def ignore_unwritten_memory() -> Iterator[None]:
    """Parts of the saved statistics are neither written nor read: uninitialised memory is NaN, and NaN equals NaN."""
    equal_nan = partial(torch.testing.assert_close, equal_nan=True)
    with poisoned_memory(), mock.patch("torch.testing.assert_close", equal_nan):
        yield


def check_opcheck(name: str) -> str:
    arguments = op_arguments(name)
    ops = torch.ops.softplus_attention
    with ignore_unwritten_memory():
        torch.library.opcheck(ops.triton_forward.default, (*arguments, True))
        arguments = [x.detach() if isinstance(x, Tensor) else x for x in arguments]
        torch.library.opcheck(ops.triton_forward.default, (*arguments, False))
        saved = ops.triton_forward(*arguments, True)
        assert saved[0].isfinite().all()
        torch.library.opcheck(ops.triton_backward.default, (gpu_randn(*saved[0].shape, seed=5), *saved, *arguments))
    return "forward and backward"


def check_opcheck_decode() -> str:
    op = torch.ops.softplus_attention.triton_decode.default
    inputs, lengths = decode_inputs(40), torch.tensor([40, 9], device=DEVICE)
    for starts, window, unit_keys in ((None, None, False), (lengths // 3, 7, True)):
        options = (starts, window, True, 15.0, None, None, not unit_keys, math.log(D), unit_keys)
        torch.library.opcheck(op, (*inputs, lengths, *options))
    return "two calls"


def capture(work: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            work()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = work()
    return graph, result


def check_graph(name: str) -> str:
    """Capture forward and backward once, then replay with other inputs and, if packed, other document boundaries."""
    t = 300
    leaves, grad_out, cu = qkv(t), gpu_randn(2, 4, t, D, seed=7), documents(t)
    attend = partial(by_packing, cu, enable_gqa=True, impl="triton") if name == "packed" else calls(t)[name]

    def work() -> list[Tensor]:
        out = attend(*leaves)
        return [out, *torch.autograd.grad(out, leaves, grad_out)]

    graph, found = capture(work)
    for seed in (1, 2, 3):
        with torch.no_grad():
            for x, y in zip((*leaves, grad_out), (*qkv(t, seed=seed), gpu_randn(2, 4, t, D, seed=seed)), strict=True):
                x.copy_(y)
            cu.copy_(documents(t, seed))
        before = [x.detach().clone() for x in found]
        graph.replay()
        torch.cuda.synchronize()
        assert_same([x.detach() for x in found], [x.detach() for x in work()], f"replay {seed}")
        assert not any(torch.equal(x, y) for x, y in zip(before, found, strict=True)), "the replay changed nothing"
    return "3 replays equal to eager"


def check_no_synchronisation() -> str:
    """Forward, backward and decode never wait for the device."""
    t = 300
    kinds, leaves = calls(t), qkv(t)
    inputs, lengths = decode_inputs(t), torch.tensor([t, 17], device=DEVICE)

    def everything() -> None:
        for attend in kinds.values():
            step(attend, leaves)
        softplus_attention_decode(*inputs, lengths, cache_starts=lengths // 4, enable_gqa=True, impl="triton")

    everything()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        everything()
        assert_raises(lambda: lengths.sum().item(), "a synchronisation went unnoticed")
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return f"{len(kinds)} kinds of calls and decode"


def count_variants() -> dict[str, int]:
    """The number of compiled variants of each Triton kernel of this package in this process."""
    from triton.runtime.jit import JITFunction

    found: dict[str, int] = {}
    for name, module in list(sys.modules.items()):
        if name.startswith("softplus_attention.kernels."):
            for kernel in vars(module).values():
                if isinstance(kernel, JITFunction) and kernel.device_caches:
                    count = sum(len(cache[0]) for cache in kernel.device_caches.values())
                    found |= {kernel.fn.__name__: count} if count else {}
    return found


# Various divisibilities, since Triton specialises on whether numbers and addresses are divisible by 16.
FIRST_LENGTHS = (128, 129, 130, 132, 136, 144)
OTHER_LENGTHS = (17, 64, 200, 300, 333, 777, 1000, 1024, 1025, 2000, 4096, 5001)


def check_variants() -> str:
    def run(t: int) -> None:
        for name in ("causal", "packed"):
            step(calls(t)[name], qkv(t))
        with torch.no_grad():
            calls(t)["causal"](*qkv(t))
        q, k, v = decode_inputs(t)
        softplus_attention_decode(q, k, v, torch.tensor([t, 9], device=DEVICE), enable_gqa=True, impl="triton")

    for t in FIRST_LENGTHS:
        run(t)
    before = count_variants()
    assert before, "no compiled kernel was found"
    for t in OTHER_LENGTHS:
        run(t)
    assert count_variants() == before, f"new lengths were compiled: {before} became {count_variants()}"
    return f"{len(OTHER_LENGTHS)} more lengths compile nothing; variants {before}"


def check_model_step() -> str:
    """Decode steps by the decode kernels against the prefill kernels, which other checks hold to the reference."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from softplus_attention.huggingface import SoftplusGPTConfig, SoftplusGPTForCausalLM

    size = {"vocab_size": 128, "hidden_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4}
    size |= {"num_key_value_heads": 2, "intermediate_size": 256}
    mix = {"power": "learned-log", "window": 40, "global_every": 3}
    llama = LlamaConfig(**size)
    llama._attn_implementation = "lssar"
    models = {
        "llama": LlamaForCausalLM(llama),
        "gpt": SoftplusGPTForCausalLM(SoftplusGPTConfig(**size, attention="lssar")),
        "mix": SoftplusGPTForCausalLM(SoftplusGPTConfig(**size, attention="lssar", **mix)),
    }
    from softplus_attention.kernels.triton import decode_launch

    steps: list[Tensor] = []
    decode = decode_launch.decode

    def counted_step(*arguments: Any) -> Tensor:
        steps.append(decode(*arguments))
        return steps[-1]

    ids = torch.randint(0, 128, (2, 100), device=DEVICE)
    found = []
    for name, model in models.items():
        model.to(DEVICE, HALF).eval()
        logits = []
        for most_rows in (dispatch.MAX_DECODE_ROWS, 0):  # the decode kernels, then the prefill kernels
            counted = mock.patch.object(decode_launch, "decode", counted_step)
            with counted, mock.patch.object(dispatch, "MAX_DECODE_ROWS", most_rows), torch.inference_mode():
                cache = model(ids[:, :-3], use_cache=True).past_key_values
                parts = [model(part, past_key_values=cache).logits for part in ids[:, -3:].split(1, 1)]
                logits.append(torch.cat(parts, 1).float())
        error, largest = (logits[0] - logits[1]).abs().max().item(), logits[1].abs().max().item()
        assert len(steps) == 3 * 3, f"{name}: {len(steps)} steps"
        assert error <= 0.02 * largest, f"{name}: {error:.3g} of {largest:.3g}"
        found.append(f"{name} {error / largest:.1e}")
        steps.clear()
    return "difference over the largest logit: " + ", ".join(found)


SANITIZED = """
import torch, triton
from softplus_attention import softplus_attention
triton.set_allocator(lambda size, alignment, stream: torch.empty(size, device="cuda", dtype=torch.int8))
torch.autograd.set_multithreading_enabled(False)  # another thread would lack the allocator
q, k, v = (torch.randn(1, 1, 200, {d}, device="cuda", dtype=torch.bfloat16).requires_grad_({step}) for _ in range(3))
out = softplus_attention(q, k, v, is_causal=True, power={power})
torch.cuda.synchronize()
if {step}:
    torch.autograd.grad(out, (q, k, v), torch.randn_like(out))
    torch.cuda.synchronize()
"""
SANITIZERS = {"debug": {"TRITON_DEBUG": "1"}}
if tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 7):
    # Earlier versions report copies that share a barrier as a deadlock (triton-lang/triton#9046).
    SANITIZERS["consan"] = {"TRITON_INSTRUMENTATION_MODE": "consan"}


FORWARDS = ((None, False, 64), (15, False, 64), (15, False, 128))  # power, with gradients, head dimension
# With consan, compiling a backward kernel takes more than 150 s.
SANITIZED_CALLS = {"debug": (*FORWARDS, (15, True, 64), (15, True, 128)), "consan": FORWARDS}


def check_sanitizer(mode: str, power: int | None, step: bool, d: int) -> str:
    """Triton's own assertions: integer overflow, and (consan) shared memory that is read or written too early."""
    code = SANITIZED.format(d=d, step=step, power=power)
    with tempfile.TemporaryDirectory() as cache:
        environment = {**os.environ, **SANITIZERS[mode], "TRITON_CACHE_DIR": cache}
        done = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=240
        )
    errors = [x for x in (done.stdout + done.stderr).splitlines() if "ssert" in x or "Error" in x]
    assert done.returncode == 0, " | ".join(dict.fromkeys(errors)) or f"status {done.returncode}: {done.stderr[-300:]}"
    return "nothing found"


CHECKS: dict[str, Callable[[], str]] = {
    **{
        f"sanitizer {mode} {'lssa' if power is None else 'p=15'} {'step' if step else 'forward'} D{d}": partial(
            check_sanitizer, mode, power, step, d
        )
        for mode in SANITIZERS
        for power, step, d in SANITIZED_CALLS[mode]
    },
    "decode of a model": check_model_step,
    **{f"compile {x}": partial(check_compile, x) for x in ("15", "lssa", "per head", "by length")},
    "compile packed": partial(check_compile_packed, True),
    "compile packed, boundaries computed": partial(check_compile_packed, False),
    "compile decode": check_compile_decode,
    "compile module": check_compile_module,
    "autocast": check_autocast,
    "checkpointing": check_checkpointing,
    **{f"opcheck {x}": partial(check_opcheck, x) for x in OPCHECKED},
    "opcheck decode": check_opcheck_decode,
    **{f"graph {x}": partial(check_graph, x) for x in ("causal", "packed", "mask")},
    "no waiting for the device": check_no_synchronisation,
    "no variant per length": check_variants,
}
