"""Paged caches, as servers use them, against each request alone in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_cases import POWERS, Batch
from torch import Tensor

from softplus_attention import softplus_attention_decode


@pytest.mark.parametrize("window", [None, 1, 5, 64])
@pytest.mark.parametrize("power", POWERS)
def test_matches_each_request_alone(power: str, window: int | None) -> None:
    """Prefill, chunked prefill, decode and speculative rows in one batch."""
    batch = Batch([40, 17, 23, 1, 31], [40, 1, 7, 1, 3], page=7)
    options = {"power": POWERS[power], "window": window}
    torch.testing.assert_close(batch.paged(**options), batch.alone(**options), rtol=1e-10, atol=1e-12)


@settings(max_examples=40)
@given(data=st.data())
def test_any_batch(data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=5))
    decode = data.draw(st.booleans())
    new = [1 if decode else data.draw(st.integers(1, n)) for n in lengths]
    batch = Batch(lengths, new, page=data.draw(st.integers(1, 9)))
    window = data.draw(st.none() | st.integers(1, 20))
    torch.testing.assert_close(batch.paged(window=window), batch.alone(window=window), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pages_match_contiguous_caches(dtype: torch.dtype) -> None:
    """Equal to ``softplus_attention_decode``."""
    batch = Batch([70, 70], [1, 1], page=16, dtype=dtype)
    q, k, v = (torch.cat(part) for part in (batch.q, batch.k, batch.v))
    expected = softplus_attention_decode(q, k, v, batch.seq_lens, enable_gqa=True)
    torch.testing.assert_close(batch.paged(), expected[:, :, 0])


def test_shared_pages() -> None:
    batch = Batch([20, 25], [3, 1], page=5)
    batch.k[1][:, :, :15], batch.v[1][:, :, :15] = batch.k[0][:, :, :15], batch.v[0][:, :, :15]
    batch.table[1, :3] = batch.table[0, :3]
    torch.testing.assert_close(batch.paged(), batch.alone(), rtol=1e-10, atol=1e-12)


def test_pages_before_a_window_are_not_read() -> None:
    batch = Batch([40, 33], [1, 2], page=4)
    expected = batch.paged(window=6)
    batch.table[0, :8] = batch.table[1, :6] = -7
    assert torch.equal(batch.paged(window=6), expected)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seq_lens": torch.tensor([40, 99], dtype=torch.int32)}, "`seq_lens` must be from 1 to 40"),
        ({"table": torch.zeros(3, 9, dtype=torch.int32)}, "`block_table` must be a row for each of the 2 requests"),
        ({"cu": torch.tensor([0, 1], dtype=torch.int32)}, "`cu_seqlens_q` must be ending at the number of packed"),
        ({"v_pages": torch.zeros(2, 2, 3, 4)}, "`v_pages` must be a tensor"),
        ({"table": torch.zeros(2, 3, dtype=torch.int32)}, "`max_seqlen_k` must be at most the 3 pages of 4 keys"),
    ],
)
def test_bad_input(changes: dict[str, Tensor], message: str) -> None:
    batch = Batch([40, 33], [1, 2], page=4)
    for name, value in changes.items():
        setattr(batch, name, value)
    with pytest.raises(ValueError, match=message):
        batch.paged()
