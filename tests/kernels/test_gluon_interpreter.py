"""The Gluon interpreter computes kernels correctly and detects missing waits, fences and barriers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gluon_interpreter import InterpretedKernel
from helpers import randn
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from softplus_attention.kernels.hopper.tiles import Tiles

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="interpreted where there is no GPU")


@gluon.jit
def doubled_kernel(
    X, Y, n, WAIT: gl.constexpr, FENCE: gl.constexpr, REFILL: gl.constexpr, FINISH: gl.constexpr,
    num_warps: gl.constexpr,
):  # fmt: skip
    """Y = X X^T of 64 x 64 numbers. Correct only with WAIT, FENCE and FINISH, and without REFILL."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [num_warps, 1], [1, 0])
    o_rows = gl.arange(0, 64, layout=gl.SliceLayout(1, layout))
    o_tile = o_rows[:, None] * 64 + gl.arange(0, 64, layout=gl.SliceLayout(0, layout))[None, :]
    tile = gl.allocate_shared_memory(X.dtype.element_ty, [64, 64], gl.NVMMASharedLayout.get_default_for([64, 64]))
    async_copy.async_copy_global_to_shared(tile, X + o_tile, mask=(o_rows < n)[:, None])
    async_copy.commit_group()
    if WAIT:
        async_copy.wait_group(0)
    if FENCE:
        fence_async_shared()
    zero = gl.zeros([64, 64], gl.float32, layout)
    running = warpgroup_mma(tile, tile.permute([1, 0]), zero, use_acc=False, is_async=True)
    if REFILL:
        async_copy.async_copy_global_to_shared(tile, X + o_tile)
        async_copy.commit_group()
    y = warpgroup_mma_wait(0, deps=[running])
    if REFILL == 1:
        async_copy.wait_group(0)
    gl.store(Y + o_tile, y if FINISH else running)


def product(
    late: bool, wait: bool = True, fence: bool = True, refill: int = 0, finish: bool = True, n: int = 64
) -> tuple[Tensor, Tensor]:
    """The result of the kernel above, and the expected result."""
    x, y = randn(64, 64, seed=0, dtype=torch.float16), torch.empty(64, 64)
    kernel = InterpretedKernel(doubled_kernel, late_products=late)
    kernel[1, 1, 1](x, y, n, wait, fence, refill, finish, 4)
    return y, x.float() @ x.float().T


@pytest.mark.parametrize("late", [False, True])
def test_computes_product(late: bool) -> None:
    torch.testing.assert_close(*product(late))
    found, expected = product(late, n=40)
    torch.testing.assert_close(found[:40, :40], expected[:40, :40])
    assert (found[40:] == 0).all()


@pytest.mark.parametrize(
    ("late", "mistake"),
    [
        (True, {"refill": 1}),  # the tile is overwritten while it is read
        (True, {"finish": False}),  # the product is not done
        (False, {"finish": False}),
    ],
)
def test_early_reads_and_writes_change_the_result(late: bool, mistake: dict[str, Any]) -> None:
    found, expected = product(late, **mistake)
    assert (found - expected).abs().min() > 100


def test_detects_missing_waits() -> None:
    for mistake in ({"wait": False}, {"refill": 2}):
        with pytest.raises(AssertionError, match="copies without a wait"):
            product(late=False, **mistake)
    with pytest.raises(AssertionError, match="a second copy into a tile before the first is complete"):
        product(late=False, wait=False, refill=1)


def test_detects_missing_fences() -> None:
    with pytest.raises(AssertionError, match="without a fence"):
        product(late=False, fence=False)


def test_detects_out_of_bounds_access() -> None:
    kernel = InterpretedKernel(doubled_kernel, late_products=False)
    x = randn(63, 64, seed=0, dtype=torch.float16)
    with pytest.raises(IndexError, match=r"offset 4032 of 4032 elements"):
        kernel[1, 1, 1](x, torch.empty(64, 64), 64, True, True, 0, True, 4)


@gluon.jit
def squared_kernel(
    X, Y, EXPECTED_BYTES: gl.constexpr, WAITED: gl.constexpr, PHASE: gl.constexpr, REFILL: gl.constexpr,
    ENDED: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """Y = X X^T of 64 x 64 numbers with the copy engine. Correct with 8,192 expected bytes, WAITED, PHASE 0 and no
    REFILL."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [num_warps, 1], [1, 0])
    o_rows = gl.arange(0, 64, layout=gl.SliceLayout(1, layout))
    o_tile = o_rows[:, None] * 64 + gl.arange(0, 64, layout=gl.SliceLayout(0, layout))[None, :]
    ring = gl.allocate_shared_memory(X.dtype, [1, 1, 1, 64, 64], X.layout)
    copied = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    mbarrier.init(copied.index(0), count=1)
    mbarrier.expect(copied.index(0), EXPECTED_BYTES, pred=EXPECTED_BYTES > 0)
    tma.async_copy_global_to_shared(X, [0, 0, 0, 0], copied.index(0), ring.index(0), pred=EXPECTED_BYTES > 0)
    if WAITED:
        mbarrier.wait(copied.index(0), PHASE)
    tile = ring.index(0).reshape([64, 64])
    zero = gl.zeros([64, 64], gl.float32, layout)
    running = warpgroup_mma(tile, tile.permute([1, 0]), zero, use_acc=False, is_async=True)
    if REFILL:
        mbarrier.expect(copied.index(0), 8192)
        tma.async_copy_global_to_shared(X, [0, 0, 0, 0], copied.index(0), ring.index(0))
    y = warpgroup_mma_wait(0, deps=[running])
    if ENDED == "early":
        mbarrier.invalidate(copied.index(0))
    if REFILL:
        mbarrier.wait(copied.index(0), 1)
    if ENDED == "yes":
        mbarrier.invalidate(copied.index(0))
    gl.store(Y + o_tile, y)


def squared(
    rows: int = 64,
    expected_bytes: int = 8192,
    waited: bool = True,
    phase: int = 0,
    refill: bool = False,
    ended: str = "yes",
) -> Any:
    x, y = randn(1, 1, rows, 64, seed=0, dtype=torch.float16), torch.empty(64, 64)
    kernel = InterpretedKernel(squared_kernel, late_products=True)
    kernel[1, 1, 1](Tiles(x, 64), y, expected_bytes, waited, phase, refill, ended, 4)
    x = torch.nn.functional.pad(x[0, 0].float(), (0, 0, 0, 64 - rows))
    return y, x @ x.T


def test_copy_engine_loads_tiles() -> None:
    for rows in (64, 40):  # rows beyond the last are zeros
        torch.testing.assert_close(*squared(rows))
    found, expected = squared(refill=True)  # overwrites the tile while it is read
    assert (found - expected).abs().min() > 100


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        ({"waited": False}, "a barrier is invalidated before its copies are complete"),
        ({"waited": False, "ended": "no"}, "copies without a wait"),
        ({"phase": 1, "ended": "no"}, "copies without a wait"),  # treated as complete
        ({"ended": "no"}, "barriers that are not invalidated"),
        ({"refill": True, "ended": "early"}, "a barrier is invalidated before its copies are complete"),
        ({"expected_bytes": 4096}, "expected 4096 bytes, received 8192"),
        ({"expected_bytes": 0}, "wait for a barrier that expects no copy"),
        ({"waited": False, "refill": True}, "a barrier expects copies before the wait for its last phase"),
    ],
)
def test_detects_wrong_barriers(mistake: dict[str, Any], message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        squared(**mistake)
