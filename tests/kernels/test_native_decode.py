"""Decode steps of the C++ kernels: paged caches, values that are not read, threads."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from helpers import largest_error, randn
from paged_cases import DecodeBatch
from torch import Tensor

from softplus_attention import PowerByLength, softplus_attention_decode, softplus_attention_paged
from softplus_attention.kernels.cpu import native
from softplus_attention.power import Power

THREADS = 2
LENGTHS = [40, 17, 1, 530, 16]
HALF_OF_ULP = {torch.float32: 2**-24, torch.bfloat16: 2**-9, torch.float16: 2**-12}


@pytest.fixture(autouse=True)
def cpp(native_library):
    with native.using("native") as found:
        yield found.ops


def make_pages(page: int, heads: tuple[int, int], dtype: torch.dtype, d: int = 36) -> DecodeBatch:
    """Requests with raw keys. The first two share their first page; unused slots are NaN."""
    return DecodeBatch(LENGTHS, page, heads, dtype, d, shared=True)


def assert_within_yardstick(pages: DecodeBatch, window: int | None, power: Power, offset: bool = True) -> None:
    options = {"window": window, "power": power, "offset": offset}
    found, exact, dtype = pages.decode(**options), pages.alone(torch.float64, **options), pages.q.dtype
    with native.using("torch"):
        low = torch.stack([pages.alone(torch.float32, impl=impl, **options) for impl in ("reference", "chunked")])
    allowed = 2 * largest_error(low.to(dtype), exact) + 2 * HALF_OF_ULP[dtype] * exact.abs().max()
    assert largest_error(found, exact) <= allowed


@pytest.mark.parametrize("heads", [(6, 6), (6, 2), (8, 1), (20, 2)], ids=lambda x: f"{x[0]} over {x[1]}")
@pytest.mark.parametrize("page", [1, 7, 16, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_pages_match_each_request_alone(dtype, page, heads):
    pages = make_pages(page, heads, dtype)
    assert_within_yardstick(pages, None, 15)
    assert_within_yardstick(pages, 5, torch.linspace(1, 15, heads[0]))


@pytest.mark.parametrize("power", [None, 1, 2.5, PowerByLength(3, slope=2, n0=8), 1e6], ids=str)
@pytest.mark.parametrize("window", [None, 1, 64])
@pytest.mark.parametrize("offset", [True, False], ids=["with offset", "without"])
def test_powers_over_pages(power, window, offset):
    if power is None and not offset:
        pytest.skip("LSSA has no offset")
    assert_within_yardstick(make_pages(16, (6, 2), torch.float32), window, power, offset)


@pytest.mark.parametrize("width", [2, 15, 16, 64, 100, 128, 256])
def test_head_dimensions(width):
    assert_within_yardstick(make_pages(16, (3, 3), torch.float32, width), None, 15)


def test_paged_op():
    """One request of the batch has two new rows. Bad arguments raise errors."""
    pages = make_pages(16, (6, 2), torch.float32)
    q, cu = torch.cat([pages.q[:1], pages.q]), torch.tensor([0, 2, 3, 4, 5, 6], dtype=torch.int32)
    rest = (pages.k_pages, pages.v_pages, pages.table, torch.tensor(LENGTHS, dtype=torch.int32), cu, 2, max(LENGTHS))
    short = softplus_attention_paged(q, *rest, score_scale=pages.scale, enable_gqa=True)
    general = softplus_attention_paged(q, *rest, score_scale=pages.scale, enable_gqa=True, impl="reference")
    torch.testing.assert_close(short, general, atol=1e-5, rtol=1e-4)
    assert torch.equal(short[2:], pages.decode()[1:])
    with pytest.raises(ValueError, match="enable_gqa"):
        softplus_attention_paged(q, *rest)
    with pytest.raises(ValueError, match="`power`"):
        softplus_attention_paged(q, *rest, power=0.5, enable_gqa=True)


def decode(q: Tensor, k: Tensor, v: Tensor, power: float = 15) -> Tensor:
    return softplus_attention_decode(q, k, v, torch.tensor([k.shape[2]] * len(q)), power=power, enable_gqa=True)


def weighted_keys(ratios: Tensor, power: float, width: int = 16) -> tuple[Tensor, Tensor]:
    """q and unit keys whose weights relative to the largest are ``ratios``, followed by as many keys without weight."""
    n, scale = 2 * len(ratios), math.log(2 * len(ratios)) * math.log(width)
    low = torch.nn.functional.softplus(torch.tensor(-scale, dtype=torch.float64))
    u = ratios.double() ** (1 / power)
    # f = average + u (top - average), where the average is over all f.
    top, half = F.softplus(torch.tensor(scale, dtype=torch.float64)), u.mean() / 2
    average = (half * top + low / 2) / (0.5 + half)
    f = torch.cat([average + u * (top - average), low.expand(len(ratios))])
    cosine = (f.expm1().log() / scale).clamp(-1, 1)
    keys = torch.zeros(n, width, dtype=torch.float64)
    keys[:, 0], keys[:, 1] = cosine, (1 - cosine.square()).sqrt()
    q = torch.zeros(width, dtype=torch.float64)
    q[0] = 1
    return q[None, None, None], keys[None, None]


@pytest.mark.parametrize("exponent", [-12, -16, -26, -36])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_many_small_weights_together(dtype, exponent):
    """Many keys with 2^exponent of the largest weight, on both sides of the limit below which values are not read.
    Their values are opposite to that of the largest."""
    power = 3.0
    ratios = torch.full((4000,), 2.0**exponent)
    ratios[0] = 1
    q, k = weighted_keys(ratios, power)
    v = torch.full((1, 1, k.shape[2], 16), -1.0, dtype=torch.float64)
    v[:, :, 0] = 1
    inputs = [x.to(dtype) for x in (q, k, v)]
    exact = decode(*(x.double() for x in inputs), power=power)
    with native.using("torch"):
        low = decode(*(x.float() for x in inputs), power=power)
    allowed = 2 * (low.double() - exact).abs().max() + 2 * HALF_OF_ULP[dtype]
    assert (decode(*inputs, power=power).double() - exact).abs().max() <= allowed


def test_values_without_weight_are_not_read(cpp):
    """NaN in a value that is read would reach the output, or trigger the general path."""
    q, k, v = randn(1, 1, 1, 64, seed=0), randn(1, 1, 5000, 64, seed=1), randn(1, 1, 5000, 64, seed=2)
    k[:, :, 77] = q[:, :, 0]
    scores = F.normalize(k, dim=-1) @ F.normalize(q, dim=-1)[0, 0, 0] * math.log(5000) * math.log(64)
    f = F.softplus(scores[0, 0])
    expected = decode(q, k, v)
    v[0, 0, f <= f.mean() * 1.01] = torch.nan
    assert v.isnan().all(-1).float().mean() > 0.4
    seen = (torch.tensor([0]), torch.tensor([5000]))
    assert torch.equal(cpp.decode(q, k, v, None, *seen, True, 15.0, None, None, True, math.log(64), False), expected)


def test_same_numbers_with_any_thread_count():
    q, k, v = randn(2, 8, 1, 64, seed=0), randn(2, 4, 3001, 64, seed=1), randn(2, 4, 3001, 64, seed=2)
    two = decode(q, k, v)
    torch.set_num_threads(1)
    one = decode(q, k, v)
    torch.set_num_threads(2)
    assert torch.equal(one, two)


@pytest.mark.parametrize("page", [-1, 3])
def test_page_out_of_range(page, cpp):
    q, k, v = randn(1, 2, 8, seed=0), randn(3, 2, 4, 8, seed=1), randn(3, 2, 4, 8, seed=2)
    table, start, end = (torch.tensor(x, dtype=torch.int32) for x in ([[0, page]], [0], [7]))
    with pytest.raises(IndexError, match=f"page {page} of 3"):
        cpp.decode(q, k, v, table, start, end, True, 15.0, None, None, True, 2.0, False)
    with pytest.raises(IndexError, match="keys 0 to 9 of 2 pages of 4"):
        cpp.decode(q, k, v, table, start, end + 2, True, 15.0, None, None, True, 2.0, False)
