"""The Hopper kernels: compilation and supported calls. The gpu tests of test_triton.py check their results."""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Any

import pytest
import torch
from helpers import ROOT, run_compiled
from hypothesis import given
from hypothesis import strategies as st
from triton._C.libtriton import native_specialize_impl
from triton.backends.nvidia.compiler import CUDABackend
from triton.experimental.gluon import language as gl

from softplus_attention.cli import info
from softplus_attention.kernels import launch_cache
from softplus_attention.kernels.arguments import KernelArguments, needs_long_polynomial
from softplus_attention.kernels.hopper import common as hopper_common
from softplus_attention.kernels.hopper import launch as hopper_launch
from softplus_attention.kernels.launch_cache import kinds
from softplus_attention.kernels.triton import common as triton_common
from softplus_attention.power import PowerByLength, power_record


def kernel_arguments(
    width: int = 64, dtype: torch.dtype = torch.bfloat16, length: int = 70, power: Any = 15, offset: bool = True,
    **changes: Any,
) -> KernelArguments:  # fmt: skip
    q = torch.zeros(2, 4, length, width, dtype=dtype)
    options: dict[str, Any] = {"start": None, "end": None, "mask": None, "is_causal": True, "window": None}
    options |= {"power": power_record(power, offset), "score_scale": 4.0, "normalized_keys": False}
    return KernelArguments(q, q, q, **(options | changes))


@pytest.mark.parametrize(
    ("shape", "dtype", "capability", "message"),
    [
        ((4096, 64), torch.bfloat16, (9, 0), "Hopper; plain Triton for a mask tensor"),
        ((4096, 100), torch.bfloat16, (9, 0), "plain Triton, since heads are 100 wide, not 64 or 128"),
        ((4096, 128), torch.float32, (9, 0), "plain Triton, since float32 is not half precision"),
        ((1, 128), torch.float16, (9, 0), "plain Triton, since there is one row or key"),
        ((4096, 64), torch.float16, (8, 0), "plain Triton, since compute capability is 8.0, not 9.0"),
        ((4096, 64), torch.float16, None, "Hopper on a Hopper GPU (no CUDA device here)"),
    ],
)
def test_info_names_kernels(
    shape: tuple[int, int],
    dtype: torch.dtype,
    capability: tuple[int, int] | None,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert info.describe_kernels(torch.device("cuda"), *shape, dtype).startswith(message)


def test_an_untested_triton_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hopper_launch.triton, "__version__", "3.9.0")
    assert hopper_launch.unsupported_device_reason((9, 0)) == "triton is 3.9.0, not 3.6 or 3.7"


def test_supported_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not hopper_launch.fits(kernel_arguments())  # on a CPU
    monkeypatch.setattr(hopper_launch, "available", lambda device: True)
    assert hopper_launch.fits(kernel_arguments())
    assert hopper_launch.fits(kernel_arguments(128, torch.float16, is_causal=False, power=None))
    assert not hopper_launch.fits(kernel_arguments(32))
    assert not hopper_launch.fits(kernel_arguments(dtype=torch.float32))
    assert not hopper_launch.fits(kernel_arguments(offset=False))
    assert not hopper_launch.fits(kernel_arguments(length=1))
    assert not hopper_launch.fits(kernel_arguments(mask=torch.ones(1, 1, 1, 70, dtype=torch.bool)))
    odd = torch.zeros(2, 4, 70 * 65, dtype=torch.bfloat16).as_strided((2, 4, 70, 64), (4 * 70 * 65, 70 * 65, 65, 1))
    assert not hopper_launch.fits(kernel_arguments(), odd)


def test_windows_ranges_and_powers_are_supported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hopper_launch, "available", lambda device: True)
    bounds = torch.zeros(1, 70, dtype=torch.int32)
    ranges = kernel_arguments(start=bounds, end=bounds + 70)
    found = [kernel_arguments(window=8), kernel_arguments(power=1.0), kernel_arguments(power=2.5), ranges]
    found += [kernel_arguments(power=PowerByLength(3, 2, 16)), kernel_arguments(power=torch.full((2, 4, 70), 3.0))]
    assert all(hopper_launch.fits(one) for one in found)
    assert kernel_arguments(window=2**40).window == 70  # fits int32
    monkeypatch.setattr(hopper_launch, "MAX_KEYS_WITH_RANGES", 69)
    assert not hopper_launch.fits(ranges)
    assert hopper_launch.fits(kernel_arguments())


def test_too_large_grids_use_the_plain_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hopper_launch, "available", lambda device: True)
    many = torch.zeros(1, 1, 70, 64, dtype=torch.bfloat16).expand(2, 24_000, 70, 64)
    assert not hopper_launch.fits(dataclasses.replace(kernel_arguments(), q=many, k=many, v=many))
    few = many[:, :20_000]
    assert hopper_launch.fits(dataclasses.replace(kernel_arguments(), q=few, k=few, v=few))
    short = kernel_arguments().q[:, :, :64]
    monkeypatch.setattr(hopper_launch, "MAX_GRID", 1)  # 70 rows or keys are two blocks
    assert hopper_launch.fits(kernel_arguments(length=64))
    assert not hopper_launch.fits(kernel_arguments())
    assert not hopper_launch.fits(dataclasses.replace(kernel_arguments(), q=short))


@given(st.integers(1, 5000), st.integers(1, 4096), st.integers(1, 1 << 34))
def test_heads_of_a_grid_fit_the_cache(heads: int, length: int, size: int) -> None:
    together, blocks, rest = hopper_launch.grid_of(length, heads, size)
    assert together * rest == heads
    assert (blocks - 1) * 64 < length <= blocks * 64
    distance = abs(math.log(together * size / hopper_launch.NEARBY))
    divisors = [n for n in range(1, heads + 1) if heads % n == 0]
    assert all(distance <= abs(math.log(n * size / hopper_launch.NEARBY)) for n in divisors)


def test_bytes_of_shared_keys() -> None:
    q, k = (torch.zeros(1, heads, 2, 64, dtype=torch.bfloat16) for heads in (2048, 1))
    shared = dataclasses.replace(kernel_arguments(), q=q, k=k, v=k)
    assert hopper_launch.bytes_of_keys(shared) == 0.25
    assert hopper_launch.grid_of(2, 2048, hopper_launch.bytes_of_keys(shared)) == (2048, 1, 1)


def test_many_heads_share_a_grid_axis() -> None:
    assert hopper_launch.grid_of(64, 12 * 65535, 1 << 40) == (12, 1, 65535)


@given(st.integers(1, 1 << 15).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, ((1 << 30) - 1) // n))))
def test_division_by_multiplication(numbers: tuple[int, int]) -> None:
    heads, n = numbers
    assert n * hopper_launch.inverse_of(heads) >> triton_common.INVERSE_BITS.value == n // heads
    assert hopper_launch.inverse_of(heads) < 1 << 31


@pytest.mark.parametrize("power", [-1, 0, 1, 2, 15])
def test_when_the_short_polynomial_is_used(power: int) -> None:
    assert needs_long_polynomial(power, torch.float16)
    short = not needs_long_polynomial(power, torch.bfloat16)
    assert hopper_common.fineness(gl.bfloat16, power) == (triton_common.SHORT if short else triton_common.LONG)
    assert hopper_common.fineness(gl.float16, power) == triton_common.LONG


def specialised(x: Any) -> Any:
    """Type and alignment of an argument, as Triton specialises kernels on it."""
    return native_specialize_impl(CUDABackend, x, False, True, True)


EDGES = (16, 2**31, 2**31 - 16, -(2**31))
NUMBERS = st.integers(-5, 40) | st.integers(-(2**33), 2**33) | st.sampled_from(EDGES) | st.floats(allow_nan=False)


@given(st.lists(NUMBERS | st.tuples(NUMBERS, NUMBERS), min_size=2, max_size=2))
def test_equal_kinds_have_equal_specialisations(numbers: list[Any]) -> None:
    x, y = numbers
    if kinds((), [], (x,)) == kinds((), [], (y,)):
        assert specialised(x) == specialised(y)


def test_kinds_of_tensors() -> None:
    x = torch.zeros(64, dtype=torch.bfloat16)
    others = (x[8:], x[1:], x[4:], x.float(), x.int())
    for one in (x, *others):
        for two in (x, *others):
            alike = kinds_of_one(one) == kinds_of_one(two)
            assert alike == (specialised(one) == specialised(two))


def kinds_of_one(x: torch.Tensor) -> Any:
    return kinds((x,), [x.data_ptr()], ())


def test_number_of_cached_kinds_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_cache, "MAX_KINDS", 3)
    found = [kinds((), [], (length, (16, 1))) for length in range(1, 40)]
    assert len(launch_cache._kinds) <= 3
    assert found == [kinds((), [], (length, (16, 1))) for length in range(1, 40)]
    assert len(set(found)) == 3  # 1, multiples of 16, others


@pytest.mark.parametrize("flags", [[], pytest.param(["--train"], marks=pytest.mark.slow)], ids=["forward", "training"])
def test_launches_match_triton(flags: list[str]) -> None:
    """In a process without Triton's interpreter."""
    run_compiled(str(ROOT / "tests" / "launches_without_gpu.py"), *flags)


COMPILED = (
    ("hopper-forward", 64, 15, "bfloat16", ""),
    ("hopper-forward", 128, 15, "float16", ""),
    ("hopper-dq", 128, -1, "bfloat16", "--window 512 --power-gradient"),
    ("hopper-dkv", 64, 15, "bfloat16", ""),
)
OTHERS = (
    ("hopper-forward", 128, 0, "bfloat16", ""),
    ("hopper-forward-again", 128, -1, "bfloat16", ""),
    ("hopper-dq", 64, 15, "bfloat16", ""),
    ("hopper-dq", 64, 0, "bfloat16", ""),
    ("hopper-dq", 128, 15, "bfloat16", ""),
    ("hopper-dkv", 128, 15, "bfloat16", ""),
    ("hopper-dkv", 128, 0, "float16", ""),
    ("hopper-forward", 64, -1, "bfloat16", "--window 512"),
    ("hopper-forward", 128, 15, "bfloat16", "--window 512"),
    ("hopper-dq", 64, -1, "float16", "--power-gradient"),
    ("hopper-dkv", 64, 1, "bfloat16", ""),
    ("hopper-dkv", 128, -1, "bfloat16", "--window 512"),
    ("hopper-forward", 64, 15, "bfloat16", "--ranges"),
    ("hopper-dq", 128, 15, "bfloat16", "--ranges"),
    ("hopper-dkv", 64, -1, "bfloat16", "--ranges"),
    ("hopper-dq-again", 64, -1, "bfloat16", "--window 512 --power-gradient"),
    ("hopper-dq-again", 128, 15, "float16", ""),
    ("hopper-dkv-again", 64, 15, "bfloat16", "--ranges"),
    ("hopper-dkv-again", 128, 0, "float16", ""),
)


OUTPUT = """
import re, sys, triton, instructions
from triton.backends.compiler import GPUTarget
for name in sys.argv[1:]:
    blocks = instructions.kernel_blocks(name, 64, True)
    source = instructions.signature(name, 64, 15, True, blocks)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": blocks.warps})
    found = compiled.asm["ttgir"]
    widened = re.findall(r"arith.extsi %\\w*_strides\\w* : i32 to i64", found)
    products = re.findall(r"arith.muli .*_stride.* : i32", found)
    assert widened, name
    assert ("arith.extsi %inverse : i32 to i64" in found) != name.endswith("again"), name
    assert not products, (name, products)
    begun, ended = (compiled.asm["ptx"].count(f"mbarrier.{word}") for word in ("init", "inval"))
    assert begun == ended, (name, begun, ended)
    assert (begun > 0) != name.endswith("again"), (name, begun)
"""


@pytest.mark.parametrize(
    "names",
    [
        ["hopper-forward", "hopper-forward-again"],
        pytest.param(["hopper-dq", "hopper-dq-again", "hopper-dkv", "hopper-dkv-again"], marks=pytest.mark.slow),
    ],
    ids=["forward", "backward"],
)
def test_strides_and_barriers(names: list[str]) -> None:
    """Triton passes strides below 2^31 as 32-bit integers; their products, and the reciprocal that replaces a division,
    must be 64-bit. Barriers are invalidated at the end, before their memory is reused."""
    run_compiled("-c", OUTPUT, *names, python_path=("src", "benchmarks"))


@pytest.mark.parametrize("kernels", [COMPILED, pytest.param(OTHERS, marks=pytest.mark.slow)], ids=["", "others"])
def test_compile_for_hopper(kernels: tuple[tuple[str, int, int, str, str], ...]) -> None:
    """In one process without Triton's interpreter."""
    commands = [
        f"{name} --head-dim {width} --power {power} --dtype {dtype} {others}"
        for name, width, power, dtype, others in kernels
    ]
    code = "import sys, instructions\nfor command in sys.argv[1:]:\n    assert instructions.main(command.split()) == 0"
    output = run_compiled("-c", code, *commands, python_path=("src", "benchmarks"))
    again = r"hopper-\w+-again.*\n(?:(?!triton).*\n)*"  # not optimised
    assert "each product is waited for" not in re.sub(again, "", output)
    assert "that a product may still read" not in output
    found = re.findall(
        r"(hopper-[\w-]+), D=(\d+), p=(-?\d+), (\w+), .*\nshared memory (\d+) bytes\n.* instructions per score",
        output,
    )
    kinds = [(name, int(width), int(power), dtype) for name, width, power, dtype, _ in found]
    assert kinds == [(name, width, power, dtype) for name, width, power, dtype, _ in kernels]
    assert all(int(shared) <= 113 * 1024 for *_, shared in found)  # two programs on a multiprocessor
