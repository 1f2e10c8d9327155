"""What reaches the driver in launches of the Hopper kernels, seen without a GPU: Triton compiles for compute capability
9.0, and its launcher is one that writes down what it gets. Run as a program: here Triton must not be set to interpret.
"""

from __future__ import annotations

from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from softplus_attention import functional, softplus_attention
from softplus_attention.kernels import gluon_launch

asked: list[str] = []  # kernels whose launch Triton itself prepared
launched: list[tuple[str, tuple[Any, ...]]] = []


class Utils:
    @staticmethod
    def load_binary(*_: Any) -> tuple[int, ...]:
        return (1, 2, 0, 0, 1024)  # a module, a function, registers, spills, threads

    @staticmethod
    def get_device_properties(device: int) -> dict[str, int]:
        return {"max_shared_mem": 232448}


class Launcher:
    """Of one binary."""

    def __init__(self, source: Any, metadata: Any) -> None:
        self.name = metadata.name
        asked.append(self.name)

    def __call__(self, *arguments: Any) -> None:
        launched.append((self.name, arguments[:3] + arguments[9:]))  # the grid, and what the kernel takes


class Driver:
    utils = Utils()
    launcher_cls = Launcher
    get_current_device = staticmethod(lambda: 0)
    get_current_stream = staticmethod(lambda device: 0)
    get_current_target = staticmethod(lambda: GPUTarget("cuda", 90, 32))
    get_active_torch_device = staticmethod(lambda: torch.device("cpu"))


def as_addresses(arguments: tuple[Any, ...]) -> list[Any]:
    return [x.data_ptr() if isinstance(x, torch.Tensor) else x for x in arguments]


def main() -> None:
    driver.set_active(Driver())
    gluon_launch.available = lambda device: True
    functional.check_for_triton = lambda q: None

    def call(length: int) -> list[tuple[str, tuple[Any, ...]]]:
        launched.clear()
        q, k, v = torch.zeros(3, 1, 2, length, 64, dtype=torch.bfloat16).unbind()
        softplus_attention(q, k, v, is_causal=True, power=None, impl="triton")
        return list(launched)

    kernels = ["key_norms_kernel", "gluon_forward_kernel", "gluon_forward_again_kernel"]
    first, again = call(256), call(320)
    assert [name for name, _ in first] == [name for name, _ in again] == kernels, again
    assert asked == kernels, "one binary of each"
    for (name, theirs), (_, ours) in zip(first, again, strict=True):
        assert len(theirs) == len(ours), name
        for place, (x, y) in enumerate(zip(as_addresses(theirs), as_addresses(ours), strict=True)):
            assert type(x) is type(y), f"{name}: argument {place} was {x!r} and is {y!r}"
    # By Triton tensors, and from its second launch on addresses, each of what it stands for.
    of_kernel = dict(again)["gluon_forward_kernel"]
    assert of_kernel[:3] == (10, 1, 1)
    assert of_kernel[17:22] == (320, 320, 2, 2, 0), of_kernel
    assert of_kernel[-9:] == (True, False, False, 0, False, False, 64, 64, 4), of_kernel
    call(321)
    assert len(asked) > len(kernels), "a length that is no multiple of 16 has a binary of its own"
    print("as Triton launches them")


if __name__ == "__main__":
    main()
