"""What reaches the driver in launches of the Hopper kernels, seen without a GPU: Triton compiles for compute capability
9.0, and what its launcher calls writes down what it gets. Run as a program, since Triton must not be set to interpret;
with --train for a training step, whose kernels take half a minute to compile, and with --time for Python's part of
calls whose launches do nothing.
"""

from __future__ import annotations

import sys
import timeit
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.driver import CudaLauncher, wrap_handle_tensordesc
from triton.compiler.compiler import LazyDict
from triton.knobs import HookChain
from triton.runtime import driver

from softplus_attention import dispatch, softplus_attention
from softplus_attention.kernels import launch_cache
from softplus_attention.kernels.hopper import launch as hopper_launch

asked: list[str] = []  # kernels whose launch Triton itself prepared
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
    """Of memory that is not an input's the address may be another one every time."""

    address: int
    described: tuple[Any, ...]

    def __eq__(self, other: Any) -> bool:
        given = any(x.data_ptr() in (self.address, other.address) for x in inputs(256))
        return self.described == other.described and (self.address == other.address or not given)

    __hash__ = None


class Launcher(CudaLauncher):
    """Of one binary: Triton's own, but for what it calls in the end, which is compiled with CUDA."""

    def __init__(self, source: Any, metadata: Any) -> None:
        self.name = metadata.name
        asked.append(self.name)
        self.num_ctas = 1
        note = self.nothing if "--time" in sys.argv else self.note
        self.launch = wrap_handle_tensordesc(note, source.signature, metadata.tensordesc_meta)
        self.global_scratch_size = metadata.global_scratch_size
        self.profile_scratch_size = metadata.profile_scratch_size
        self.global_scratch_align = self.profile_scratch_align = 1
        self.launch_cooperative_grid, self.launch_pdl = metadata.launch_cooperative_grid, metadata.launch_pdl
        self.arg_annotations, self.kernel_signature = "annotations", "signature"

    def nothing(self, *_: Any) -> None:
        pass

    def note(self, *arguments: Any) -> None:
        *others, last = arguments  # since 3.7 the kernel's are one argument
        arguments = (*others, *last) if isinstance(last, list | tuple) else arguments
        # Who wants to hear of launches, and what they would hear: nobody and nothing.
        launched.append((self.name, tuple(None if isinstance(x, HookChain | LazyDict) else x for x in arguments)))


class Driver:
    utils = Utils()
    launcher_cls = Launcher
    get_current_device = staticmethod(lambda: 0)
    get_current_stream = staticmethod(lambda device: None)
    get_current_target = staticmethod(lambda: GPUTarget("cuda", 90, 32))
    get_active_torch_device = staticmethod(lambda: torch.device("cpu"))


def forward_of_lssa(length: int) -> None:
    q, k, v = inputs(length)
    softplus_attention(q, k, v, is_causal=True, power=None, impl="triton")


def training_step(length: int) -> None:
    """With all that the kernels read: ranges and a power of each row, which has a gradient."""
    q, k, v = (x.requires_grad_() for x in inputs(length))
    power = torch.full((2, length), 3.0, requires_grad=True)
    end = torch.arange(1, length + 1, dtype=torch.int32)[None]
    options: dict[str, Any] = {"key_start": end - 1, "key_end": end, "power": power, "impl": "triton"}
    softplus_attention(q, k, v, **options).sum().backward()


def plain_step(length: int) -> None:
    """One that is launched as a whole the second time."""
    q, k, v = (x.requires_grad_() for x in inputs(length))
    torch.autograd.grad(softplus_attention(q, k, v, is_causal=True, impl="triton"), (q, k, v), v.detach())


def step_with_powers(length: int) -> None:
    q, k, v = (x.requires_grad_() for x in inputs(length))
    power = torch.full((2,), 3.0, requires_grad=True)
    out = softplus_attention(q, k, v, is_causal=True, power=power, impl="triton")
    torch.autograd.grad(out, (q, k, v, power), v.detach())


@cache
def inputs(length: int) -> tuple[torch.Tensor, ...]:
    return torch.zeros(3, 1, 2, length, 64, dtype=torch.bfloat16).unbind()


def host_microseconds(calls: int = 300) -> None:
    """Prints what a forward and a training step of p = 15 take until they return, the medians of five rounds."""
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
    """The op takes them as if they were on a Hopper GPU."""
    hopper_launch.available = lambda device: True
    dispatch.check_for_triton = lambda q: None


def main() -> None:
    driver.set_active(Driver())
    allow_cpu_tensors()
    if "--time" in sys.argv:
        host_microseconds()
        return
    if "--train" in sys.argv:
        compare(training_step, FORWARD + BACKWARD, remembered=0)
        compare(plain_step, FORWARD + BACKWARD, remembered=2, known=FORWARD[:1])
        compare(step_with_powers, FORWARD + BACKWARD, remembered=2, known=FORWARD[:1])
    else:
        compare(forward_of_lssa, FORWARD, remembered=1)
        one_tensor_twice()
        plain_kernels_every_time()
        launch_cache._relaunches.clear()
        launch_cache._calls.clear()
        launch_cache.KNOWN_LAUNCHERS = ()  # as with another version, by Triton's own launcher
        one_tensor_twice()
    print("as Triton launches them")


def one_tensor_twice() -> None:
    """Keys that are the queries are no others' keys the next time."""
    q, k, v = inputs(256)
    for keys in (q, q, k, k, q):
        launched.clear()
        softplus_attention(q, keys, v, is_causal=True, power=None, impl="triton")
        [arguments] = [x for name, x in launched if name == "gluon_forward_kernel"]
        found = [x.address for x in arguments if isinstance(x, Descriptor)]
        assert found == [x.data_ptr() for x in (q, keys, v)], "the tiles are another tensor's"


def plain_kernels_every_time() -> None:
    """They are launched by Triton itself: a call of theirs cannot be remembered."""
    q = torch.zeros(1, 2, 64, 32, dtype=torch.float16)
    for _ in range(3):
        launched.clear()
        softplus_attention(q, q.clone(), q.clone(), is_causal=True, power=None, impl="triton")
        assert [name for name, _ in launched] == ["key_norms_kernel", "forward_kernel"]


def compare(call: Callable[[int], None], kernels: list[str], remembered: int, known: Sequence[str] = ()) -> None:
    """What Triton launches for a call with what we do for its second. So many of its two directions are remembered as a
    whole; ``known`` are the kernels that an earlier one has made."""
    new = [x for x in kernels if x not in known]
    asked.clear()
    launch_cache._calls.clear()

    def launches(length: int) -> list[tuple[str, tuple[Any, ...]]]:
        launched.clear()
        call(length)
        return list(launched)

    theirs, ours = launches(256), launches(256)
    assert [name for name, _ in theirs] == [name for name, _ in ours] == kernels, ours
    assert asked == new, "one binary of each"
    assert len(launch_cache._calls) == remembered
    for (name, first), (_, again) in zip(theirs, ours, strict=True):
        assert len(first) == len(again), name
        for place, (x, y) in enumerate(zip(first, again, strict=True)):
            if name in known and isinstance(x, int) and x > 2**32:  # an address the first time too
                assert type(y) is int, f"{name}: argument {place} is {y!r}"
            elif isinstance(x, torch.Tensor):  # by Triton tensors, by us addresses
                assert type(y) is int, f"{name}: argument {place} is {y!r}"
                same = any(x.data_ptr() == given.data_ptr() for given in inputs(256))
                assert not same or x.data_ptr() == y, f"{name}: argument {place} is another tensor"
            else:
                assert x == y, f"{name}: argument {place} was {x!r} and is {y!r}"
    other = launches(320)
    assert asked == new, "a length of the same kind needs no binary of its own"
    assert dict(other)["gluon_forward_kernel"][:3] == (2, 5, 1)  # heads together, blocks of rows, the rest of the heads
    launches(321)
    assert len(asked) > len(new), "a length that is no multiple of 16 does"


if __name__ == "__main__":
    main()
