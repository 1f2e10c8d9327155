"""Attention in two parts against dense weights, in float64, and its memory."""

from __future__ import annotations

import resource
from typing import Any

import pytest
import torch
from torch import Tensor

from softplus_attention.huggingface.extension import attention as extension
from softplus_attention.huggingface.extension.attention import EVERYTHING, Reach, dense_two_parts, two_part_attention

Parts = tuple[tuple[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]


def parts(rows: int, length: int, dtype: torch.dtype = torch.float64, group: int = 3, grad: bool = False) -> Parts:
    torch.manual_seed(rows + length)

    def make(heads: int, tokens: int) -> Tensor:
        return torch.randn(2, heads, tokens, 10, dtype=dtype, requires_grad=grad)

    near = make(2 * group, rows), make(2, length), make(2, length)
    return near, (make(2 * group, rows), make(2, length), make(2, length))


REACHES = {
    "window": Reach(7, 0),
    "window and sink": Reach(7, 3),
    "wide sink": Reach(5, 20),
    "far": Reach(7),
    "far, level": Reach(7, level=9),
    "one": Reach(1),
    "everything": Reach(),
    "wider than the text": Reach(99, 4),
}
# (rows, positions): prefill, chunks of odd length, decode steps
SHAPES = [(40, 40), (1, 1), (6, 6), (7, 7), (8, 8), (23, 40), (3, 9), (9, 11), (1, 7), (1, 8), (1, 40)]


@pytest.mark.parametrize("reach", REACHES.values(), ids=REACHES.keys())
@pytest.mark.parametrize(("rows", "length"), SHAPES)
def test_matches_dense(rows: int, length: int, reach: Reach, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extension, "MAX_ROWS", 16)
    near, far = parts(rows, length)
    expected = dense_two_parts(near, far, length - rows, reach, 0.3)
    found = two_part_attention(near, far, length - rows, reach, 0.3)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("reach", REACHES.values(), ids=REACHES.keys())
@pytest.mark.parametrize(("rows", "length"), [(40, 40), (23, 40), (1, 40)])
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "any device"])
def test_gradients(fused: bool, rows: int, length: int, reach: Reach, monkeypatch: pytest.MonkeyPatch) -> None:
    if not fused:
        monkeypatch.setattr(extension, "has_fused", lambda q: False)
        monkeypatch.setattr(extension, "DENSE_ROWS", 4)
    found: list[list[Tensor]] = []
    for attend in (two_part_attention, dense_two_parts):
        near, far = parts(rows, length, grad=True)
        out = attend(near, far, length - rows, reach, 0.3)
        weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
        inputs = [*near, *far]
        grads = torch.autograd.grad((out * weights).sum(), inputs, allow_unused=True)
        # Far keys that no row sees have no gradient.
        found.append([out, *(torch.zeros_like(x) if g is None else g for x, g in zip(inputs, grads, strict=True))])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-11)


def test_half_precision_stays_near_float64() -> None:
    """torch's attention also rounds weights and output to the dtype; merging the parts may add one more rounding."""
    near, far = parts(300, 300, torch.bfloat16)
    reach = Reach(64, 4)
    wide = [tuple(x.double() for x in part) for part in (near, far)]
    expected = dense_two_parts(*wide, 0, reach, 0.3)  # type: ignore[arg-type]
    rounded = dense_two_parts(*(tuple(x.float() for x in part) for part in (near, far)), 0, reach, 0.3)  # type: ignore[arg-type]
    unit = torch.finfo(torch.bfloat16).eps * expected.abs().max()
    own = (rounded.bfloat16().double() - expected).abs().max()
    assert (two_part_attention(near, far, 0, reach, 0.3).double() - expected).abs().max() <= 2 * own + unit


def test_too_few_keys() -> None:
    near, far = parts(4, 12)
    short = near[0], near[1][:, :, -5:], near[2][:, :, -5:]
    with pytest.raises(ValueError, match="near keys: expected the last 8 positions, got 5"):
        two_part_attention(short, far, 8, Reach(5), 0.3)
    short = far[0], far[1][:, :, :5], far[2][:, :, :5]
    with pytest.raises(ValueError, match="far keys: expected the first 7 positions, got 5"):
        two_part_attention(near, short, 8, Reach(5), 0.3)


@pytest.mark.parametrize("training", [False, True], ids=["forward", "backward"])
def test_memory_is_linear(training: bool) -> None:
    """Dense weights of one head would take 1 GB."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 1, 16384, 16, requires_grad=training) for _ in range(3))
    small = two_part_attention((q[:, :, :64], k[:, :, :64], v[:, :, :64]), None, 0, Reach(16), 0.25)
    assert small.isfinite().all()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    out: Any = two_part_attention((q, k, v), (q, k, v), 0, Reach(1024), 0.25)
    if training:
        out.sum().backward()
    assert out.isfinite().all()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 * 1024


def test_everything_is_beyond_any_length() -> None:
    assert Reach().near == Reach().most_far == EVERYTHING > 1 << 40
