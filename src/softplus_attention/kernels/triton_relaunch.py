"""Launching a kernel again without asking Triton again which binary it needs.

Triton looks at every argument of every launch: its type, its alignment, whether it is 1. For a decode step that takes
longer than the kernels run. Here the caller says by a key which launches are alike.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

from torch import Tensor

# What Triton specialises pointers and strides on.
ALIGNMENT = 16
_binaries: dict[Hashable, Any] = {}


def launch(
    kernel: Any, grid: tuple[int, int, int], arguments: tuple[Any, ...], options: Mapping[str, Any], key: Hashable
) -> None:
    """``kernel[grid](*arguments, **options)``. Arguments come in the kernel's order, constants too.

    Two launches of one ``key`` must agree in whatever Triton specialises on: kernel, device, options, constants,
    dtypes, and for every number and pointer that is not exempt whether it is 1, a multiple of 16 or beyond 32 bits.
    None says nothing, and Triton looks for itself.
    """
    binary = None if key is None else _binaries.get(key)
    if binary is not None:
        binary[grid](*arguments)
        return
    binary = kernel[grid](*arguments, **options)
    if key is not None and binary is not None:  # the interpreter has none
        _binaries[key] = binary


def all_aligned(pointers: tuple[Tensor, ...], numbers: tuple[int, ...]) -> bool:
    """Whether Triton would specialise each of them alike: on a multiple of 16 within 32 bits."""
    bits = 0
    for number in numbers:
        bits |= number
    if not 0 <= bits < 2**31:
        return False
    for pointer in pointers:
        bits |= pointer.data_ptr()
    return bits % ALIGNMENT == 0
