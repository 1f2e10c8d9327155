"""Decode steps on a CPU with PyTorch operations and with the C++ kernels, against the reference."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from helpers import allowed_error, largest_error

from softplus_attention import PowerByLength, softplus_attention_decode
from softplus_attention.kernels.cpu.decode import SMALL

THREADS = 2
POWERS = {
    "lssa": None,
    "15": 15,
    "2.5": 2.5,
    "per head": torch.tensor([1.0, 3.0, 7.5, 15.0]),
    "per row": torch.rand(2, 4, 1, generator=torch.Generator().manual_seed(0)) * 10 + 1,
    "by length": PowerByLength(3, 2, n0=64),
}
pytestmark = pytest.mark.usefixtures("cpu_kernels")


def decode_both(*cache, **options):
    """The outputs of the decode path and of the reference."""
    return [softplus_attention_decode(*cache, enable_gqa=True, impl=x, **options) for x in ("chunked", "reference")]


def caches(keys: int, dtype: torch.dtype = torch.float32, kv_heads: int = 2) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(keys)
    q = torch.randn(2, 4, 1, 32, dtype=dtype)
    return q, *(torch.randn(2, kv_heads, keys, 32, dtype=dtype) for _ in range(2))


@pytest.mark.parametrize("power", POWERS.values(), ids=POWERS)
@pytest.mark.parametrize("keys", [3, 40, SMALL, SMALL + 188])  # up to SMALL the keys are normalised first
@pytest.mark.parametrize("unit", [False, True], ids=["raw keys", "unit keys"])
@pytest.mark.parametrize("offset", [True, False], ids=["with offset", "without"])
def test_matches_reference(power, keys, unit, offset):
    q, k, v = caches(keys)
    k = F.normalize(k, dim=-1) if unit else k
    lengths = torch.tensor([keys, max(1, keys - 9)], dtype=torch.int32)
    options = {"power": power, "offset": offset, "enable_gqa": True, "normalized_keys": unit}
    short = softplus_attention_decode(q, k, v, lengths, **options)
    exact = softplus_attention_decode(*(x.double() for x in (q, k, v)), lengths, **options, impl="reference")
    torch.testing.assert_close(short.double(), exact, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("keys", [100, 2000])
def test_within_the_yardstick(dtype, keys):
    q, k, v = caches(keys, dtype)
    lengths = torch.tensor([keys, keys], dtype=torch.int32)

    def decode(q, k, v, impl):
        return softplus_attention_decode(q, k, v, lengths, enable_gqa=True, impl=impl)

    with torch.no_grad():
        exact = decode(*(x.double() for x in (q, k, v)), "reference")
        low = decode(*(x.float() for x in (q, k, v)), "reference").to(dtype)
        ours = decode(q, k, v, "chunked")
    assert largest_error(ours, exact) <= allowed_error(low, exact, dtype)


@pytest.mark.parametrize("window", [None, 5])
def test_windows_and_starts(window):
    q, k, v = caches(60)
    lengths, starts = torch.tensor([60, 41]), torch.tensor([7, 0])
    options = {"cache_starts": starts, "window": window}
    torch.testing.assert_close(*decode_both(q, k, v, lengths, **options), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("keys", [40, 700])
@pytest.mark.parametrize("where", ["k", "v"])
def test_nan_affects_only_rows_that_see_it(where, keys):
    q, k, v = caches(keys)
    bad = {"k": k, "v": v}[where]
    bad[0, 0, 5] = torch.nan
    bad[1, :, keys - 3 :] = torch.inf
    lengths = torch.tensor([keys, keys - 3], dtype=torch.int32)
    short, exact = decode_both(q, k, v, lengths)
    assert short.isnan().equal(exact.isnan())
    assert short[0, 2:].isfinite().all()
    assert short[1].isfinite().all()
    assert where == "v" or short[0, :2].isnan().all()
    torch.testing.assert_close(short, exact, atol=1e-5, rtol=1e-4, equal_nan=True)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("offset", [True, False])
def test_non_finite_unit_keys(bad, offset):
    q, k, v = caches(40)
    k = F.normalize(k, dim=-1)
    k[0, 1, 7, 2] = bad
    lengths = torch.tensor([40, 40], dtype=torch.int32)
    short, exact = decode_both(q, k, v, lengths, offset=offset, normalized_keys=True)
    assert short[0, 2:].isnan().all()
    torch.testing.assert_close(short, exact, atol=1e-5, rtol=1e-4, equal_nan=True)


@pytest.mark.parametrize("size", [1e-30, 1e25, 0.0])
def test_keys_of_any_size(size):
    q, k, v = caches(700)
    k[:, :, ::3] *= size
    lengths = torch.tensor([700, 700], dtype=torch.int32)
    short, exact = decode_both(q, k, v, lengths)
    assert short.isfinite().all()
    torch.testing.assert_close(short, exact, atol=2e-5, rtol=1e-4)


def test_equal_scores_and_empty_caches():
    q, _, v = caches(30)
    same = torch.ones(2, 2, 30, 32)
    lengths = torch.tensor([30, 0], dtype=torch.int32)
    starts = torch.tensor([0, 0])
    out = torch.ops.softplus_attention.chunked_decode(
        q, same, v, starts[:, None], lengths[:, None], True, 15.0, None, None, True, 3.0, False
    )
    torch.testing.assert_close(out[0, 0, 0], v[0, 0].mean(0), atol=1e-5, rtol=1e-4)
    assert out[1].abs().max() == 0


def test_no_sequences():
    q, k, v = (torch.zeros(0, 2, length, 16) for length in (1, 30, 30))
    lengths = torch.zeros(0, dtype=torch.int32)
    assert softplus_attention_decode(q, k, v, lengths, impl="chunked").shape == (0, 2, 1, 16)


def test_gradients_use_the_general_path():
    q, k, v = caches(40)
    lengths = torch.tensor([40, 40], dtype=torch.int32)
    run = lambda q, k, v: softplus_attention_decode(q, k, v, lengths, enable_gqa=True)  # noqa: E731
    q.requires_grad_()
    run(q, k, v).sum().backward()
    assert q.grad.isfinite().all()
    assert q.grad.abs().max() > 0


def test_exported_program_called_with_gradients():
    class Step(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.queries = torch.nn.Linear(8, 8)

        def forward(self, x, k, v, lengths):
            return softplus_attention_decode(self.queries(x), k, v, lengths)

    shapes = ((1, 2, 1, 8), (1, 2, 5, 8), (1, 2, 5, 8))
    given = (*(torch.randn(shape) for shape in shapes), torch.tensor([4]))
    with torch.no_grad():
        program = torch.export.export(Step(), given).module()
        expected = program(*given)
    torch.testing.assert_close(program(*given).detach(), expected, rtol=0, atol=0)


def test_opcheck():
    q, k, v = caches(40)
    bounds = torch.zeros(2, 1, dtype=torch.int32), torch.full((2, 1), 40, dtype=torch.int32)
    arguments = (q, k, v, *bounds, True, 15.0, None, None, True, 3.4, False)
    torch.library.opcheck(torch.ops.softplus_attention.chunked_decode.default, arguments)
