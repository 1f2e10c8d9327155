"""Launches compiled kernels without Triton's Python launcher. No other code uses Triton's private interfaces.

This works with the versions in ``KNOWN_VERSIONS``. With any other, or with ``SOFTPLUS_ATTENTION_PUBLIC_LAUNCH=1``,
Triton launches every kernel itself, which costs only host time. ``tests/kernels/test_private_launch.py`` checks each
interface that is used here; a version that passes can be added to the list.
"""

from __future__ import annotations

import functools
import inspect
import os
import warnings
from collections.abc import Callable
from typing import Any

import torch
import triton
from triton import knobs

KNOWN_VERSIONS = ("3.6.0", "3.7.1")
SWITCH = "SOFTPLUS_ATTENTION_PUBLIC_LAUNCH"
MAX_DESCRIPTORS = 4096
# grid, stream, ``Tiles.described`` of each tile, tensor addresses, numbers
Relaunch = Callable[[tuple[int, int, int], int | None, list[Any], list[int], tuple[Any, ...]], None]
_descriptors: dict[tuple[Any, ...], list[Any]] = {}


@functools.cache
def is_known() -> bool:
    """Whether binaries may be launched here. Warns once if only Triton's version prevents it."""
    if torch.version.hip is not None or os.environ.get(SWITCH, "0") != "0":
        return False
    if triton.__version__ in KNOWN_VERSIONS:
        return True
    warnings.warn(
        f"triton {triton.__version__} is none of {', '.join(KNOWN_VERSIONS)}: kernels are launched by Triton's public "
        f"interface, which takes more host time per call. Results do not change. {SWITCH}=1 silences this warning",
        RuntimeWarning,
        stacklevel=2,
    )
    return False


def has_hooks() -> bool:
    """Whether launch hooks are set, for example by a profiler."""
    enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


def relaunch(binary: Any) -> Relaunch | None:
    """The driver call behind Triton's launcher. The launcher also rebuilds every descriptor and searches all other
    arguments for descriptors, which takes as long as the launch. None for binaries that need scratch memory, such as
    those of the sanitizer, because Triton allocates it."""
    run, no_hooks, no_scratch = binary.run, (None, None, None), (None, None)
    if run.global_scratch_size or run.profile_scratch_size:
        return None
    call, kinds_of_tiles = run.launch, list[Any]()
    if inspect.isfunction(call):  # a wrapper that builds descriptors
        inside = inspect.getclosurevars(call).nonlocals
        call, kinds_of_tiles = inside["launcher"], inside["tensordesc_meta"]
    of_binary = (binary.function, run.launch_cooperative_grid, run.launch_pdl)
    arguments_apart = triton.__version__.startswith("3.6.")
    before: tuple[Any, ...]
    if arguments_apart:
        before = (*of_binary, *no_scratch, binary.packed_metadata, *no_hooks)
    else:
        types = (run.arg_annotations, run.kernel_signature)
        before = (*of_binary, binary.packed_metadata, *no_hooks, *no_scratch, *types)

    def launch(grid: Any, stream: Any, tiles: list[Any], addresses: list[int], numbers: tuple[Any, ...]) -> None:
        given: list[Any] = []
        for tile, kind in zip(tiles, kinds_of_tiles, strict=True):
            given += descriptor(tile, kind)
        if arguments_apart:
            call(*grid, stream, *before, *given, *addresses, *numbers)
        else:
            call(*grid, stream, *before, (*given, *addresses, *numbers))

    return launch


def descriptor(tile: tuple[Any, ...], kind: Any) -> list[Any]:
    """The driver arguments of a descriptor, cached per address, shape and strides, because training steps reuse
    memory. ``kind`` is the metadata that Triton stores with the binary."""
    made = _descriptors.get(tile)
    if made is None:
        from triton.backends.nvidia.driver import make_tensordesc_arg

        if len(_descriptors) >= MAX_DESCRIPTORS:
            _descriptors.clear()
        made = _descriptors[tile] = make_tensordesc_arg(Described(*tile), kind)
    return made


class Described:
    """The attributes of ``Tiles`` from which Triton makes a descriptor."""

    padding, round_f32_to_tf32 = "zero", False

    def __init__(self, address: int, dtype: torch.dtype, shape: Any, strides: Any, rows: int) -> None:
        self.address, self.shape, self.strides = address, shape, strides

    @property
    def base(self) -> Described:
        return self

    def data_ptr(self) -> int:
        return self.address
