"""The CPU path against the reference: shapes, masks, powers, layouts and dtypes, forward and every gradient."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from helpers import (
    as_given,
    assert_equal_in_float64,
    assert_within_yardstick,
    output_and_gradients,
    peak_memory,
    randn,
    run,
    transposed,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from softplus_attention import PowerByLength, softplus_attention, softplus_attention_decode, softplus_attention_varlen
from softplus_attention.kernels.cpu import chunked
from softplus_attention.kernels.cpu.threads import for_each
from softplus_attention.nn import SoftplusAttention

pytestmark = pytest.mark.usefixtures("poisoned_memory")

THREADS = 2
LENGTHS = [1, 2, 3, 4, 5, 8, 17, 33, 63, 111]
LOW_PRECISION = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True)
def threads_for_small_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """These tests use small inputs, and cover threads."""
    monkeypatch.setattr(chunked, "WORTH_THREADS", 0)


@contextmanager
def tiles(elements: int, least_rows: int, most_rows: int) -> Iterator[None]:
    before = chunked.TILE_ELEMENTS, chunked.MIN_ROWS, chunked.MAX_ROWS
    chunked.TILE_ELEMENTS, chunked.MIN_ROWS, chunked.MAX_ROWS = elements, least_rows, most_rows
    try:
        yield
    finally:
        chunked.TILE_ELEMENTS, chunked.MIN_ROWS, chunked.MAX_ROWS = before


@st.composite
def tile_sizes(draw: st.DrawFn) -> tuple[int, int, int]:
    least = draw(st.sampled_from([1, 3, 8, 64]))
    return draw(st.sampled_from([1, 50, 300, 4000, 1 << 18])), least, least * draw(st.sampled_from([1, 2, 5]))


def bools(*shape: int, seed: int, share: float) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < share


def expanded(x: Tensor) -> Tensor:
    """The first sequence repeated with a stride of 0."""
    return x[:1].expand_as(x)


def sliced(x: Tensor) -> Tensor:
    """Every second element of a wider tensor: no stride is 1."""
    return torch.stack((x, torch.full_like(x, torch.nan)), dim=-1).flatten(-2)[..., ::2]


LAYOUTS = {"contiguous": as_given, "transposed": transposed, "expanded": expanded, "sliced": sliced}


@st.composite
def powers(draw: st.DrawFn, batch: int, heads: int, t_q: int) -> Any:
    kind = draw(st.sampled_from(["lssa", "int", "float", "heads", "rows", "by-length"]))
    if kind == "int":
        return draw(st.sampled_from([1, 2, 3, 4, 7, 15, 31]))
    if kind == "float":
        return draw(st.sampled_from([1.0, 1.5, 2.5, 15.0, 20.25]))
    if kind == "by-length":
        return PowerByLength(draw(st.sampled_from([1, 3.0, 15])), draw(st.sampled_from([0, 2.5])), 8)
    if kind == "lssa":
        return None
    shape: tuple[int, ...] = (heads,)
    if kind == "rows":
        full = (batch, heads, t_q)[3 - draw(st.sampled_from([0, 2, 3])) :]
        shape = tuple(draw(st.sampled_from([1, n])) for n in full)
    return 1 + 15 * uniform(shape, draw(st.integers(0, 99)))


def uniform(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).float()


@st.composite
def calls(draw: st.DrawFn) -> dict[str, Any]:
    """Keyword arguments of one call of ``softplus_attention``, q, k and v among them, in float64."""
    seed = draw(st.integers(0, 1 << 16))
    batch, kv_heads, share = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 3))
    heads = kv_heads * share
    t_q, t_k = draw(st.sampled_from(LENGTHS)), draw(st.sampled_from(LENGTHS))
    if draw(st.booleans()):
        t_q = t_k
    d, d_v = draw(st.sampled_from([2, 5, 16, 17, 60, 100])), draw(st.sampled_from([1, 7, 16, 33]))
    call: dict[str, Any] = {
        "q": randn(batch, heads, t_q, d, seed=seed, dtype=torch.float64),
        "k": randn(batch, kv_heads, t_k, d, seed=seed + 1, dtype=torch.float64),
        "v": randn(batch, kv_heads, t_k, d_v, seed=seed + 2, dtype=torch.float64),
        "power": draw(powers(batch, heads, t_q)),
        "enable_gqa": share > 1 or draw(st.booleans()),
        "is_causal": draw(st.booleans()),
        "offset": draw(st.booleans()),
    }
    if draw(st.integers(0, 3)) == 0:
        call["k"] = call["k"][:, :, :1] + 0.2 * call["k"]  # keys close to each other: small x
    if call["is_causal"] and draw(st.booleans()):
        call["window"] = draw(st.sampled_from([1, 2, 3, 4, 7, 40, 200]))
    if draw(st.booleans()):
        full = (batch, heads, t_q, t_k)[draw(st.integers(0, 4)) :]
        shape = [draw(st.sampled_from([1, n])) for n in full]
        call["attn_mask"] = bools(*shape, seed=seed, share=draw(st.sampled_from([0.3, 0.8, 1.0])))
    integers = torch.Generator().manual_seed(seed)
    for name, low, high in (("key_start", -3, t_k + 2), ("key_end", -1, t_k + 4)):
        if draw(st.integers(0, 2)) == 0:
            rows = draw(st.sampled_from([1, batch]))
            dtype = draw(st.sampled_from([torch.int32, torch.int64]))
            call[name] = torch.randint(low, high, (rows, t_q), generator=integers, dtype=dtype)
    if draw(st.integers(0, 3)) == 0:
        call["score_scale"] = draw(st.sampled_from([0.0, 0.5, 6.0]))
    return call


def assert_matches_reference(call: dict[str, Any], sizes: tuple[int, int, int], layout: str) -> None:
    with tiles(*sizes):
        assert_equal_in_float64(softplus_attention, impl="chunked", layout=LAYOUTS[layout], **call)


@settings(max_examples=120)
@given(calls(), tile_sizes(), st.sampled_from(list(LAYOUTS)))
def test_matches_reference_in_float64(call: dict[str, Any], sizes: tuple[int, int, int], layout: str) -> None:
    assert_matches_reference(call, sizes, layout)


@pytest.mark.slow
@settings(max_examples=2000, derandomize=False)
@given(calls(), tile_sizes(), st.sampled_from(list(LAYOUTS)))
def test_matches_reference_with_many_examples(call: dict[str, Any], sizes: tuple[int, int, int], layout: str) -> None:
    assert_matches_reference(call, sizes, layout)


@settings(max_examples=60)
@given(calls(), tile_sizes(), st.sampled_from([torch.bfloat16, torch.float16]))
@pytest.mark.usefixtures("cpu_kernels")
def test_half_precision_yardstick(call: dict[str, Any], sizes: tuple[int, int, int], dtype: torch.dtype) -> None:
    q, k, v = (call.pop(name).to(dtype) for name in "qkv")
    with tiles(*sizes):
        assert_within_yardstick(softplus_attention, q, k, v, impl="chunked", **call)


# Large enough that the largest rounding error is not a matter of chance in float32.
SHAPES = {
    "T63-D60": (2, 4, 2, 63, 63, 60, 60),
    "T111-D17-Dv33": (1, 3, 3, 111, 111, 17, 33),
    "T257-D100-mqa": (1, 4, 1, 257, 257, 100, 64),
    "Tq50-Tk300-D64": (2, 2, 2, 50, 300, 64, 64),
    "T500-D64": (1, 1, 1, 500, 500, 64, 64),
}


@pytest.mark.parametrize("dtype", LOW_PRECISION, ids=lambda d: str(d).removeprefix("torch."))
@pytest.mark.parametrize("power", [None, 1, 3, 15, 2.5, "rows"], ids=lambda p: f"p{p}")
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.usefixtures("cpu_kernels")
def test_low_precision_yardstick(shape: tuple[int, ...], power: Any, dtype: torch.dtype) -> None:
    batch, heads, kv_heads, t_q, t_k, d, d_v = shape
    q = randn(batch, heads, t_q, d, seed=1, dtype=dtype)
    k = randn(batch, kv_heads, t_k, d, seed=2, dtype=dtype)
    v = randn(batch, kv_heads, t_k, d_v, seed=3, dtype=dtype)
    power = 1 + 14 * uniform((batch, heads, t_q), seed=4) if power == "rows" else power
    options = {"is_causal": True, "enable_gqa": True, "layout": transposed}
    assert_within_yardstick(softplus_attention, q, k, v, impl="chunked", power=power, **options)


@pytest.mark.parametrize(
    ("integers", "causal", "window"),
    [(torch.int32, False, None), (torch.int32, True, None), (torch.int32, True, 5), (torch.int64, True, None)],
    ids=["full", "causal", "window", "int64"],
)
def test_packed_documents(integers: torch.dtype, causal: bool, window: int | None) -> None:
    cu_q = torch.tensor([0, 1, 1, 20, 63], dtype=integers)
    cu_k = torch.tensor([0, 3, 3, 22, 90], dtype=integers)
    q, k, v = randn(63, 4, 17, seed=1), randn(90, 2, 17, seed=2), randn(90, 2, 9, seed=3)
    options = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, "max_seqlen_q": 43, "max_seqlen_k": 68}
    options |= {"is_causal": causal, "window": window, "enable_gqa": True}
    for power in (None, 15, PowerByLength(3, 1, 4), torch.tensor([1.0, 2.5, 7.0, 15.0])):
        for sizes in ((1 << 18, 64, 256), (300, 1, 7)):
            with tiles(*sizes):
                assert_equal_in_float64(softplus_attention_varlen, q, k, v, impl="chunked", power=power, **options)


@pytest.mark.parametrize("normalized", [False, True], ids=["raw", "normalised"])
@pytest.mark.parametrize("window", [None, 6], ids=["all", "window"])
def test_decode_steps(window: int | None, normalized: bool) -> None:
    q, k, v = randn(3, 4, 3, 17, seed=1), randn(3, 2, 40, 17, seed=2), randn(3, 2, 40, 9, seed=3)
    if normalized:
        k = torch.nn.functional.normalize(k.double(), dim=-1)
    options = {
        "cache_seqlens": torch.tensor([3, 40, 25], dtype=torch.int32),
        "cache_starts": torch.tensor([0, 7, 24], dtype=torch.int32),
        "window": window,
        "normalized_keys": normalized,
        "enable_gqa": True,
    }
    for power in (None, 15, PowerByLength(3, 1, 4), torch.tensor([1.0, 2.5, 7.0, 15.0])):
        assert_equal_in_float64(softplus_attention_decode, q, k, v, impl="chunked", power=power, **options)


def test_equal_keys_and_zero_vectors_match_reference() -> None:
    q, k, v = (randn(2, 2, 40, 16, seed=s) for s in (1, 2, 3))
    k[0] = k[0, :, :1]
    q[1, 0, 20] = 0
    k[1, 0, 11] = 0
    for power in (None, 1, 3, 15, torch.tensor([2.5, 15.0])):
        assert_equal_in_float64(softplus_attention, q, k, v, impl="chunked", power=power, is_causal=True)


def run_chunked(seed: int, t: int = 300, **options: Any) -> dict[str, Tensor]:
    q, k, v = (randn(2, heads, t, 24, seed=seed + i) for i, heads in enumerate((4, 2, 2)))
    grad_out = randn(2, 4, t, 24, seed=seed + 3)
    power = torch.linspace(2, 15, 4)
    return run(
        softplus_attention, q, k, v, impl="chunked", grad_out=grad_out, power=power, enable_gqa=True, **options
    )  # fmt: skip


@pytest.mark.parametrize("masked", [False, True], ids=["causal", "masked"])
@pytest.mark.usefixtures("cpu_kernels")
def test_same_numbers_with_any_thread_count(masked: bool) -> None:
    options = {"is_causal": True, "attn_mask": bools(2, 1, 300, 300, seed=1, share=0.7) if masked else None}
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        with tiles(1 << 12, 8, 32):
            results.append(run_chunked(5, **options))
    torch.set_num_threads(2)
    for other in results[1:]:
        torch.testing.assert_close(other, results[0], rtol=0, atol=0)


@pytest.mark.usefixtures("cpu_kernels")
def test_deterministic() -> None:
    torch.testing.assert_close(run_chunked(6, is_causal=True), run_chunked(6, is_causal=True), rtol=0, atol=0)


@pytest.mark.parametrize("power", [None, 15], ids=lambda p: f"p{p}")
@pytest.mark.parametrize("training", [False, True], ids=["forward", "forward-backward"])
@pytest.mark.usefixtures("cpu_kernels")
def test_memory_grows_linearly(training: bool, power: Any) -> None:
    torch.set_num_threads(1)

    def extra(t: int) -> int:
        q, k, v = (randn(1, 1, t, 16, seed=s).requires_grad_(training) for s in (1, 2, 3))

        def work() -> Any:
            out = softplus_attention(q, k, v, is_causal=True, power=power, impl="chunked")
            return (out, *torch.autograd.grad(out.sum(), (q, k, v))) if training else out

        outputs = (4 if training else 1) * q.numel() * q.element_size()
        return peak_memory(work) - outputs

    short, long = extra(2048), extra(8192)
    torch.set_num_threads(2)
    assert short < 2048 * 2048 * 4, f"{short} bytes at 2048, as much as the full score matrix"
    assert long <= 4.4 * short, f"{short} bytes at 2048, {long} at 8192"


class TestThreads:
    def test_exception_in_worker_is_raised(self) -> None:
        class WorkerError(Exception):
            pass

        def work(piece: int) -> None:
            if piece == 7:
                raise WorkerError(piece)

        with pytest.raises(WorkerError, match="7"):
            for_each(work, range(20))
        assert torch.get_num_threads() == 2

    @pytest.mark.parametrize("step", ["forward", "backward"])
    def test_exception_inside_op_is_raised(self, step: str, monkeypatch: pytest.MonkeyPatch) -> None:
        q, k, v = (randn(1, 2, 300, 16, seed=s).requires_grad_() for s in (1, 2, 3))
        out = softplus_attention(q, k, v, impl="chunked") if step == "backward" else None

        def fail(*_: Any) -> None:
            raise MemoryError("no room")

        monkeypatch.setattr(chunked, "softplus_", fail)
        with pytest.raises(MemoryError, match="no room"):
            softplus_attention(q, k, v, impl="chunked") if out is None else out.sum().backward()
        assert torch.get_num_threads() == 2

    def test_every_item_runs_once_on_several_threads(self) -> None:
        seen: list[tuple[int, int]] = []
        meeting = threading.Barrier(2, timeout=10)

        def work(piece: int) -> None:
            if piece < 2:
                meeting.wait()
            seen.append((piece, threading.get_ident()))

        for_each(work, range(30))
        assert sorted(piece for piece, _ in seen) == list(range(30))
        assert len({thread for _, thread in seen}) == 2

    @pytest.mark.parametrize("threads", [1, 2])
    @pytest.mark.usefixtures("cpu_kernels")
    def test_number_of_threads_is_unchanged(self, threads: int) -> None:
        torch.set_num_threads(threads)
        run_chunked(1)
        assert torch.get_num_threads() == threads
        found: list[int] = []
        later = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
        later.start()
        later.join()
        torch.set_num_threads(2)
        assert found == [threads]

    @pytest.mark.usefixtures("cpu_kernels")
    def test_concurrent_calls_are_independent(self) -> None:
        expected = run_chunked(3, t=100, is_causal=True)
        results: list[dict[str, Tensor]] = []
        callers = [
            threading.Thread(target=lambda: results.append(run_chunked(3, t=100, is_causal=True))) for _ in range(4)
        ]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join()
        assert len(results) == 4
        for result in results:
            torch.testing.assert_close(result, expected, rtol=0, atol=0)


@pytest.mark.parametrize("context", [torch.inference_mode, torch.no_grad, torch.enable_grad])
@pytest.mark.usefixtures("cpu_kernels")
def test_works_in_every_gradient_mode(context: Callable[[], Any]) -> None:
    q, k, v = (randn(2, 2, 300, 16, seed=s).requires_grad_() for s in (1, 2, 3))
    with context():
        out = softplus_attention(q, k, v, is_causal=True, impl="chunked")
    assert out.requires_grad == (context is torch.enable_grad)
    assert out.is_inference() == (context is torch.inference_mode)
    expected = softplus_attention(q, k, v, is_causal=True, impl="reference").detach()
    torch.testing.assert_close(out.detach().clone(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("wanted", ["q", "k", "v", "power"])
def test_gradient_of_one_input_only(wanted: str) -> None:
    tensors = {x: randn(1, 2, 30, 16, seed=i, dtype=torch.float64) for i, x in enumerate("qkv")}
    tensors["power"] = torch.tensor([3.0, 2.5], dtype=torch.float64)

    def attend(x: Tensor, impl: str) -> Tensor:
        return softplus_attention(**tensors | {wanted: x}, is_causal=True, impl=impl)

    results = (output_and_gradients(partial(attend, impl=x), tensors[wanted]) for x in ("chunked", "reference"))
    torch.testing.assert_close(*results, rtol=1e-10, atol=1e-10)


@pytest.mark.usefixtures("cpu_kernels")
def test_inputs_are_not_modified() -> None:
    q, k, v = (randn(2, 2, 100, 16, seed=s).requires_grad_() for s in (1, 2, 3))
    copies = [x.detach().clone() for x in (q, k, v)]
    softplus_attention(q, k, v, is_causal=True, impl="chunked").sum().backward()
    torch.testing.assert_close([x.detach() for x in (q, k, v)], copies, rtol=0, atol=0)


@pytest.mark.usefixtures("cpu_kernels")
def test_bounds_beyond_int32_mean_no_bound() -> None:
    q, k, v = (randn(1, 1, 8, 16, seed=i) for i in range(3))
    end = torch.full((1, 8), torch.iinfo(torch.int64).max)
    assert torch.equal(softplus_attention(q, k, v, key_end=end), softplus_attention(q, k, v))


def test_power_by_length_with_fractional_n0() -> None:
    q, k, v = (randn(1, 1, 30, 16, seed=i, dtype=torch.float64) for i in range(3))
    ours, theirs = (
        softplus_attention(q, k, v, is_causal=True, power=PowerByLength(3, 5, n0=2.9), impl=impl)
        for impl in ("chunked", "reference")
    )
    torch.testing.assert_close(ours, theirs, atol=1e-12, rtol=1e-12)


def work_in_forked_process(queue: Any) -> None:
    done: list[int] = []
    for_each(done.append, range(8))
    queue.put(sorted(done))


@pytest.mark.filterwarnings("ignore:.*fork.*")
def test_threads_after_fork() -> None:
    """A forked process inherits the thread pool object without its threads: submitted work would wait forever."""
    for_each(lambda piece: None, range(8))
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    process = context.Process(target=work_in_forked_process, args=(queue,))
    process.start()
    try:
        assert queue.get(timeout=30) == list(range(8))
    finally:
        process.kill()


@pytest.mark.parametrize("power", [1e9, 10**30, PowerByLength(1e10), torch.full((2,), 1e10)], ids=str)
@pytest.mark.usefixtures("cpu_kernels")
def test_huge_power_is_argmax(power: Any) -> None:
    q, k, v = (randn(1, 2, 40, 16, seed=seed) for seed in range(3))
    given = [x.requires_grad_() for x in (q, k, v)]
    out, expected = (softplus_attention(*given, power=power, is_causal=True, impl=x) for x in ("chunked", "reference"))
    torch.testing.assert_close(out, expected)
    assert all(x.isfinite().all() for x in torch.autograd.grad(out.sum(), given))
    step = softplus_attention_decode(q[:, :, -1:].detach(), k.detach(), v.detach(), torch.tensor([40]), power=power)
    torch.testing.assert_close(step, expected[:, :, -1:].detach())


def test_learned_powers_with_padding_use_linear_memory() -> None:
    peaks = []
    for t in (1024, 4096):
        module = SoftplusAttention(16, 1, power="learned-log")
        x, mask = randn(1, t, 16, seed=0), torch.ones(1, 1, 1, t, dtype=torch.bool)
        with torch.no_grad():
            peaks.append(peak_memory(lambda m=module, x=x, mask=mask: m(x, attn_mask=mask)))
    assert peaks[1] < 6 * peaks[0], "quadratic memory would grow 16-fold"
