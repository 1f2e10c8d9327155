"""Decode steps over paged caches on a CPU, against the reference for each request alone."""

from __future__ import annotations

import pytest
import torch
from helpers import largest_error
from paged_cases import DecodeBatch

from softplus_attention import PowerByLength
from softplus_attention.power import Power

POWERS: dict[str, Power] = {
    "none": None,
    "15": 15,
    "per head": torch.tensor([1.0, 3, 7.5, 15, 2, 4], dtype=torch.float64),
    "by length": PowerByLength(3, slope=2, n0=8),
}


def pages(page: int, shuffle: bool, dtype: torch.dtype = torch.float64) -> DecodeBatch:
    """Unused slots hold a large number."""
    return DecodeBatch([40, 17, 1, 23], page, (6, 2), dtype, normalized=True, shuffle=shuffle, unused=50.0)


@pytest.mark.parametrize("window", [None, 1, 5, 64])
@pytest.mark.parametrize("power", POWERS)
@pytest.mark.parametrize("shuffle", [False, True], ids=["contiguous", "shuffled"])
@pytest.mark.parametrize("page", [1, 7, 64])
def test_matches_each_request_alone(page: int, shuffle: bool, power: str, window: int | None) -> None:
    batch, options = pages(page, shuffle), {"window": window, "power": POWERS[power]}
    torch.testing.assert_close(batch.decode(**options), batch.alone(**options), rtol=1e-10, atol=1e-12)


def test_half_precision() -> None:
    """bfloat16 inputs are computed in float32 and rounded once."""
    batch = pages(16, True, torch.bfloat16)
    exact = batch.alone(torch.float64)
    assert largest_error(batch.decode(), exact) <= exact.abs().max() * 2**-8


@pytest.mark.parametrize("where", ["seen", "beyond"])
@pytest.mark.parametrize("part", ["k_pages", "v_pages"])
def test_nan_falls_back_to_the_general_path(part: str, where: str) -> None:
    """Even if no row sees it: only the general path distinguishes the two."""
    batch = pages(7, False)
    getattr(batch, part)[batch.table[1, 2], :, 2 if where == "seen" else 5] = torch.nan
    out = batch.decode()
    if where == "beyond" and part == "k_pages":
        torch.testing.assert_close(out, batch.alone(), rtol=1e-10, atol=1e-12)
    else:
        assert out is None
