"""Compares launches of the Hopper kernels by the launch cache with Triton's own, without a GPU.

Triton compiles for compute capability 9.0, and a stub records the arguments that reach the driver. Run it as a program,
since Triton's interpreter must be off. With --train it compares a training step, whose kernels take half a minute to
compile. With --time it measures the host time of calls whose launches do nothing.
"""

from __future__ import annotations

import sys
import timeit
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.driver import CudaLauncher, wrap_handle_tensordesc
from triton.compiler.compiler import LazyDict
from triton.knobs import HookChain
from triton.runtime import driver

from softplus_attention import dispatch, softplus_attention
from softplus_attention.kernels import launch_cache, private_launch
from softplus_attention.kernels.hopper import launch as hopper_launch

compiled: list[str] = []  # kernels whose launcher Triton created
launched: list[tuple[str, tuple[Any, ...]]] = []


class Utils:
    @staticmethod
    def load_binary(*_: Any) -> tuple[int, ...]:
        return (1, 2, 0, 0, 1024)  # a module, a function, registers, spills, threads

    @staticmethod
    def get_device_properties(device: int) -> dict[str, int]:
        return {"max_shared_mem": 232448}

    @staticmethod
    def fill_tma_descriptor(address: int, *described: Any) -> Descriptor:
        return Descriptor(address, described)

    fill_tma_descriptor_tiled = fill_tma_descriptor  # its name in 3.7


class Descriptor(NamedTuple):
    """A tensor descriptor. Addresses of memory other than inputs may differ between calls."""

    address: int
    described: tuple[Any, ...]

    def __eq__(self, other: Any) -> bool:
        given = any(x.data_ptr() in (self.address, other.address) for x in inputs(256))
        return self.described == other.described and (self.address == other.address or not given)

    __hash__ = None


class Launcher(CudaLauncher):
    """Triton's launcher of one binary, without the final C function, which would be compiled with CUDA."""

    def __init__(self, source: Any, metadata: Any) -> None:
        self.name = metadata.name
        compiled.append(self.name)
        self.num_ctas = 1
        record = self.nothing if "--time" in sys.argv else self.record
        self.launch = wrap_handle_tensordesc(record, source.signature, metadata.tensordesc_meta)
        self.global_scratch_size = metadata.global_scratch_size
        self.profile_scratch_size = metadata.profile_scratch_size
        self.global_scratch_align = self.profile_scratch_align = 1
        self.launch_cooperative_grid, self.launch_pdl = metadata.launch_cooperative_grid, metadata.launch_pdl
        self.arg_annotations, self.kernel_signature = "annotations", "signature"

    def nothing(self, *_: Any) -> None:
        pass

    def record(self, *arguments: Any) -> None:
        *others, last = arguments  # since 3.7 the kernel's arguments are one tuple
        arguments = (*others, *last) if isinstance(last, list | tuple) else arguments
        # There are no launch hooks: drop the hook chains and their metadata.
        launched.append((self.name, tuple(None if isinstance(x, HookChain | LazyDict) else x for x in arguments)))


class Driver:
    utils = Utils()
    launcher_cls = Launcher
    get_current_device = staticmethod(lambda: 0)
    get_current_stream = staticmethod(lambda device: None)
    get_current_target = staticmethod(lambda: GPUTarget("cuda", 90, 32))
    get_active_torch_device = staticmethod(lambda: torch.device("cpu"))


def lssa_forward(length: int) -> None:
    q, k, v = inputs(length)
    softplus_attention(q, k, v, is_causal=True, power=None, impl="triton")


def training_step(length: int) -> None:
    """With every optional kernel input: ranges and a power per row with a gradient."""
    q, k, v = (x.requires_grad_() for x in inputs(length))
    power = torch.full((2, length), 3.0, requires_grad=True)
    end = torch.arange(1, length + 1, dtype=torch.int32)[None]
    options: dict[str, Any] = {"key_start": end - 1, "key_end": end, "power": power, "impl": "triton"}
    softplus_attention(q, k, v, **options).sum().backward()


def replayed_step(length: int, learned: bool) -> None:
    """The second call is replayed as a whole."""
    q, k, v = (x.requires_grad_() for x in inputs(length))
    power = torch.full((2,), 3.0, requires_grad=True) if learned else 15
    out = softplus_attention(q, k, v, is_causal=True, power=power, impl="triton")
    torch.autograd.grad(out, (q, k, v, *[power] * learned), v.detach())


@cache
def inputs(length: int) -> tuple[torch.Tensor, ...]:
    return torch.zeros(3, 1, 2, length, 64, dtype=torch.bfloat16).unbind()


def host_microseconds(calls: int = 300) -> None:
    """Print the host time of a forward and of a training step with p = 15, as medians of five rounds."""
    q, k, v = inputs(256)
    wanted = [x.clone().requires_grad_() for x in (q, k, v)]

    def forward() -> None:
        softplus_attention(q, k, v, is_causal=True, impl="triton")

    def step() -> None:
        out = softplus_attention(*wanted, is_causal=True, impl="triton")
        torch.autograd.grad(out, wanted, q)

    for name, work in (("forward", forward), ("forward and backward", step)):
        work()
        rounds = sorted(timeit.repeat(work, repeat=5, number=calls))
        launched.clear()
        print(f"{name}: {1e6 * rounds[2] / calls:.0f} us, of five rounds {1e6 * rounds[0] / calls:.0f} to", end=" ")
        print(f"{1e6 * rounds[-1] / calls:.0f}")


FORWARD = ["key_norms_kernel", "gluon_forward_kernel", "gluon_forward_again_kernel"]
BACKWARD = ["gluon_dq_kernel", "gluon_dq_kernel", "gluon_dkv_kernel", "gluon_dkv_kernel"]


def allow_cpu_tensors() -> None:
    """Make the op treat CPU tensors as if they were on a Hopper GPU."""
    hopper_launch.available = lambda device: True
    dispatch.check_for_triton = lambda q: None


def main() -> None:
    driver.set_active(Driver())
    allow_cpu_tensors()
    if "--time" in sys.argv:
        host_microseconds()
        return
    if "--train" in sys.argv:
        compare(training_step, FORWARD + BACKWARD, cached=0)
        for learned in (False, True):
            step = partial(replayed_step, learned=learned)
            compare(step, FORWARD + BACKWARD, cached=2, known=FORWARD[:1])
    else:
        compare(lssa_forward, FORWARD, cached=1)
        check_repeated_tensor()
        check_plain_kernels_are_not_cached()
        launch_cache._relaunches.clear()
        launch_cache._calls.clear()
        private_launch.is_known = lambda: False  # as with an unknown version: use Triton's launcher
        check_repeated_tensor()
    print("launches equal Triton's")


def check_repeated_tensor() -> None:
    """A call with one tensor as queries and keys must not be replayed for a call with two tensors."""
    q, k, v = inputs(256)
    for keys in (q, q, k, k, q):
        launched.clear()
        softplus_attention(q, keys, v, is_causal=True, power=None, impl="triton")
        [arguments] = [x for name, x in launched if name == "gluon_forward_kernel"]
        found = [x.address for x in arguments if isinstance(x, Descriptor)]
        assert found == [x.data_ptr() for x in (q, keys, v)], "the tiles belong to another tensor"


def check_plain_kernels_are_not_cached() -> None:
    """Triton itself launches them, so their calls cannot be replayed."""
    q = torch.zeros(1, 2, 64, 32, dtype=torch.float16)
    for _ in range(3):
        launched.clear()
        softplus_attention(q, q.clone(), q.clone(), is_causal=True, power=None, impl="triton")
        assert [name for name, _ in launched] == ["key_norms_kernel", "forward_kernel"]


def compare(call: Callable[[int], None], kernels: list[str], cached: int, known: Sequence[str] = ()) -> None:
    """Compare Triton's launches of a first call with ours of the second. ``cached`` is the number of directions
    (forward and backward) that are cached as a whole, ``known`` names kernels that earlier calls compiled."""
    new = [x for x in kernels if x not in known]
    compiled.clear()
    launch_cache._calls.clear()

    def launches(length: int) -> list[tuple[str, tuple[Any, ...]]]:
        launched.clear()
        call(length)
        return list(launched)

    theirs, ours = launches(256), launches(256)
    assert [name for name, _ in theirs] == [name for name, _ in ours] == kernels, ours
    assert compiled == new, "expected one binary per kernel"
    assert len(launch_cache._calls) == cached
    for (name, first), (_, second) in zip(theirs, ours, strict=True):
        assert len(first) == len(second), name
        for i, (x, y) in enumerate(zip(first, second, strict=True)):
            if name in known and isinstance(x, int) and x > 2**32:  # already an address in the first call
                assert type(y) is int, f"{name}: argument {i} is {y!r}"
            elif isinstance(x, torch.Tensor):  # Triton passes tensors, the cache addresses
                assert type(y) is int, f"{name}: argument {i} is {y!r}"
                same = any(x.data_ptr() == given.data_ptr() for given in inputs(256))
                assert not same or x.data_ptr() == y, f"{name}: argument {i} is another tensor"
            else:
                assert x == y, f"{name}: argument {i} was {x!r} and is {y!r}"
    other = launches(320)
    assert compiled == new, "a length of the same kind must not compile another binary"
    assert dict(other)["gluon_forward_kernel"][:3] == (2, 5, 1)  # heads together, blocks of rows, the rest of the heads
    launches(321)
    assert len(compiled) > len(new), "a length that is not a multiple of 16 must compile another binary"


if __name__ == "__main__":
    main()
