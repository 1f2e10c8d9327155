"""Decode steps over paged caches on a CPU, against the reference for each request alone."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from helpers import randn
from torch import Tensor

from softplus_attention import PowerByLength, softplus_attention_decode
from softplus_attention.kernels.cpu.pages import decode_pages
from softplus_attention.power import Power, power_record

HEADS, KV_HEADS, D, D_V, SCALE = 6, 2, 10, 12, 2.5
LENGTHS = [40, 17, 1, 23]
POWERS: dict[str, Power] = {
    "none": None,
    "15": 15,
    "per head": torch.tensor([1.0, 3, 7.5, 15, 2, 4], dtype=torch.float64),
    "by length": PowerByLength(3, slope=2, n0=8),
}


class Pages:
    """Requests of ``LENGTHS`` keys; unused slots hold a large number."""

    def __init__(self, page: int, together: bool, dtype: torch.dtype = torch.float64) -> None:
        self.q = randn(len(LENGTHS), HEADS, D, seed=0, dtype=dtype)
        self.k = [F.normalize(randn(KV_HEADS, n, D, seed=50 + n, dtype=dtype), dim=-1) for n in LENGTHS]
        self.v = [randn(KV_HEADS, n, D_V, seed=90 + n, dtype=dtype) for n in LENGTHS]
        blocks = [-(-n // page) for n in LENGTHS]
        order = list(range(sum(blocks))) if together else torch.randperm(sum(blocks)).tolist()
        pages = torch.full((len(order), KV_HEADS, page, D + D_V), 50.0, dtype=dtype)
        self.k_pages, self.v_pages = pages.split([D, D_V], -1)
        self.table = torch.full((len(LENGTHS), max(blocks)), 10**6, dtype=torch.int32)
        for b, n in enumerate(LENGTHS):
            for block in range(blocks[b]):
                self.table[b, block] = own = order.pop(0)
                piece = slice(block * page, min((block + 1) * page, n))
                pages[own, :, : piece.stop - piece.start] = torch.cat([self.k[b][:, piece], self.v[b][:, piece]], -1)

    def decode(self, window: int | None = None, power: Power = 15) -> Tensor | None:
        lengths, record = torch.tensor(LENGTHS), power_record(power)
        return decode_pages(self.q, self.k_pages, self.v_pages, self.table, lengths, window, lambda seen: record, SCALE)

    def alone(self, window: int | None = None, power: Power = 15) -> Tensor:
        out = []
        for q, k, v in zip(self.q, self.k, self.v, strict=True):
            cache = (q[None, :, None], k[None], v[None], torch.tensor([k.shape[1]], dtype=torch.int32))
            options = {"power": power, "score_scale": SCALE, "window": window, "normalized_keys": True}
            out.append(softplus_attention_decode(*cache, **options, enable_gqa=True, impl="reference"))  # type: ignore[arg-type]
        return torch.cat(out)[:, :, 0]


@pytest.mark.parametrize("window", [None, 1, 5, 64])
@pytest.mark.parametrize("power", POWERS)
@pytest.mark.parametrize("together", [True, False], ids=["together", "shuffled"])
@pytest.mark.parametrize("page", [1, 7, 64])
def test_matches_each_request_alone(page: int, together: bool, power: str, window: int | None) -> None:
    batch = Pages(page, together)
    found = batch.decode(window, POWERS[power])
    torch.testing.assert_close(found, batch.alone(window, POWERS[power]), rtol=1e-10, atol=1e-12)


def test_half_precision() -> None:
    """bfloat16 inputs are computed in float32 and rounded once."""
    batch, exact = Pages(16, False, torch.bfloat16), Pages(16, False)
    exact.q, exact.k, exact.v = batch.q.double(), [k.double() for k in batch.k], [v.double() for v in batch.v]
    error = (batch.decode().double() - exact.alone()).abs().max()  # type: ignore[union-attr]
    assert error <= exact.alone().abs().max() * 2**-8


@pytest.mark.parametrize("where", ["seen", "beyond"])
@pytest.mark.parametrize("part", ["k_pages", "v_pages"])
def test_nan_falls_back_to_the_general_path(part: str, where: str) -> None:
    """Even if no row sees it: only the general path distinguishes the two."""
    batch = Pages(7, True)
    getattr(batch, part)[batch.table[1, 2], :, 2 if where == "seen" else 5] = torch.nan
    out = batch.decode()
    if where == "beyond" and part == "k_pages":
        torch.testing.assert_close(out, batch.alone(), rtol=1e-10, atol=1e-12)
    else:
        assert out is None
