"""Tensor descriptors, from which TMA copies tiles into shared memory."""

from __future__ import annotations

from functools import cache
from typing import Any

from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor


class Tiles(TensorDescriptor):  # type: ignore[misc]
    """Tiles of ``rows`` rows of one head of a tensor (B, H, T, D) in half precision. Skips the alignment checks of
    Triton's class, which take longer than all else; ``hopper.launch.copyable`` has done them."""

    padding = "zero"
    round_f32_to_tf32 = False

    def __init__(self, x: Tensor, rows: int) -> None:
        self.base = x
        self.shape = x.shape
        self.strides = x.stride()
        self.block_shape, self.layout = of_tiles(rows, x.shape[3])

    def described(self) -> tuple[Any, ...]:
        """Address, dtype, shape, strides, rows: all that distinguishes two descriptors."""
        return self.base.data_ptr(), self.base.dtype, self.shape, self.strides, self.block_shape[2]


@cache
def of_tiles(rows: int, width: int) -> tuple[list[int], Any]:
    """A tile's shape and shared-memory layout. Of the element type only the size matters."""
    shape = [1, 1, rows, width]
    return shape, gl.NVMMASharedLayout.get_default_for(shape, gl.bfloat16)


def type_of_tiles(half: str, rows: int, width: int) -> str:
    """Triton's name for the type of such a descriptor, to compile without a tensor; ``half`` is fp16 or bf16."""
    shape, layout = of_tiles(rows, width)
    return f"tensordesc<{half}{shape},{layout!r}>"
