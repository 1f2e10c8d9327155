"""Descriptors of tensors, from which Hopper's copy engine brings tiles into shared memory."""

from __future__ import annotations

from functools import cache
from typing import Any

from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor


class Tiles(TensorDescriptor):  # type: ignore[misc]
    """Of a tensor (B, H, T, D) in half precision: tiles of so many rows of one head. Triton's own looks for itself
    whether rows are aligned, which takes longer than all else; ``hopper.launch.copyable`` has."""

    padding = "zero"
    round_f32_to_tf32 = False

    def __init__(self, x: Tensor, rows: int) -> None:
        self.base = x
        self.shape = x.shape
        self.strides = x.stride()
        self.block_shape, self.layout = of_tiles(rows, x.shape[3])

    def described(self) -> tuple[Any, ...]:
        """Address, dtype, shape, strides, rows: all that one differs in from another."""
        return self.base.data_ptr(), self.base.dtype, self.shape, self.strides, self.block_shape[2]


@cache
def of_tiles(rows: int, width: int) -> tuple[list[int], Any]:
    """The shape of a tile, and how it lies in shared memory. The element type matters by its size alone."""
    shape = [1, 1, rows, width]
    return shape, gl.NVMMASharedLayout.get_default_for(shape, gl.bfloat16)


def type_of_tiles(half: str, rows: int, width: int) -> str:
    """What Triton calls the type of such a descriptor, for who compiles without a tensor; ``half`` is fp16 or bf16."""
    shape, layout = of_tiles(rows, width)
    return f"tensordesc<{half}{shape},{layout!r}>"
