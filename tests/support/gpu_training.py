"""Twenty training steps of a small language model with the Triton kernels and the reference. Does not need pytest."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from gpu_inputs import DEVICE
from torch import Tensor, nn

from softplus_attention.nn import SoftplusAttention

TEXT = Path(__file__).parents[2] / "LICENSE"
STEPS, BATCH, LENGTH = 20, 4, 512
DIM, HEADS, LAYERS = 256, 4, 4


class Block(nn.Module):
    def __init__(self, dim: int, heads: int, power: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(2))
        self.attention = SoftplusAttention(dim, heads, power=power)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x: Tensor, impl: str) -> Tensor:
        x = x + self.attention(self.norms[0](x), impl=impl)
        return x + self.mlp(self.norms[1](x))


class Model(nn.Module):
    """A byte-level language model."""

    def __init__(self, power: int = 15) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, DIM)
        self.blocks = nn.ModuleList(Block(DIM, HEADS, power) for _ in range(LAYERS))
        self.norm = nn.LayerNorm(DIM)
        self.head = nn.Linear(DIM, 256, bias=False)

    def forward(self, tokens: Tensor, impl: str) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, impl)
        return self.head(self.norm(x))


def batches() -> Tensor:
    """(steps, batch, length + 1) bytes of one text, the same in every call."""
    text = torch.frombuffer(bytearray(TEXT.read_bytes()), dtype=torch.uint8).long()
    places = torch.randint(
        len(text) - LENGTH, (STEPS * BATCH, 1), generator=torch.Generator().manual_seed(1)
    ) + torch.arange(LENGTH + 1)
    return text[places.clamp(max=len(text) - 1)].view(STEPS, BATCH, -1).to(DEVICE)


def compute_loss(model: Model, tokens: Tensor, impl: str, half: bool) -> Tensor:
    with torch.autocast(DEVICE, torch.bfloat16, enabled=half):
        logits = model(tokens[:, :-1], impl)
    return F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())


def first_gradients(impl: str, *, half: bool) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = Model().to(DEVICE)
    compute_loss(model, batches()[0], impl, half).backward()
    return {name: x.grad.double() for name, x in model.named_parameters()}


def check_gradients(half: bool, impl: str = "triton") -> str:
    """Compare every parameter's gradient of the first step with the float32 reference, relative to its norm.

    Under autocast the distance is at most twice that of the reference under autocast. In float32 it is at most 1e-4,
    ten times the effect of the order of summation on a CPU (the chunked path: 1e-5).
    """
    exact, reference, ours = (
        first_gradients(x, half=y) for x, y in (("reference", False), ("reference", half), (impl, half))
    )
    worst = 0.0
    for name, x in exact.items():
        found, allowed = (float((y[name] - x).norm() / x.norm()) for y in (ours, reference))
        allowed = 2 * allowed if half else 1e-4
        assert found <= allowed, f"{name}: {found:.1e} from float32, allowed {allowed:.1e}"
        worst = max(worst, found / allowed)
    return f"{len(exact)} parameters, at most {worst:.2f} of the allowed distance"


def scale_inputs(attend: Callable[..., Tensor], factor: float) -> Callable[..., Tensor]:
    """The same attention with scaled q and k: only their directions matter, so that scaling changes only rounding."""
    return lambda q, k, v, **options: attend(q * factor, k * factor, v, **options)


def losses(impl: str, *, half: bool = True, power: int = 15, factor: float = 1) -> Tensor:
    """(steps,) losses before each step, always from the same initial weights and data."""
    torch.manual_seed(0)
    model = Model(power).to(DEVICE)
    for block in model.blocks:
        block.attention.attention = scale_inputs(block.attention.attention, factor)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    found = []
    for tokens in batches():
        loss = compute_loss(model, tokens, impl, half)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.detach())
    return torch.stack(found).double()


def check_training(impl: str = "triton") -> str:
    """Twenty steps under bfloat16 autocast: the losses differ from float32 as much as those of the reference do.

    Rounding makes training runs diverge, so each side has six runs: one with q and k unchanged and five with q and k
    scaled, which changes only their rounding. The kernels' median distance to the float32 reference, averaged over the
    steps, is at most twice that of the reference. A control with another power must exceed that bound.
    """
    exact = losses("reference", half=False)

    def distances(name: str, power: int = 15) -> list[float]:
        runs = [losses(name, power=power, factor=factor) for factor in (0.7, 0.9, 1, 1.1, 1.2, 1.3)]
        assert all(x.isfinite().all() for x in runs), f"{name}: a loss is not finite"
        assert all(x[-1] < 0.7 * x[0] for x in runs), f"{name}: the loss did not fall"
        return [float((x - exact).abs().mean()) for x in runs]

    found, allowed, other = distances(impl), distances("reference"), distances("reference", power=7)
    summary = f"{statistics.median(found):.1e} from float32, the reference {statistics.median(allowed):.1e}"
    summary += f", power 7 {statistics.median(other):.1e}"
    assert statistics.median(other) > 2 * statistics.median(allowed), summary
    assert statistics.median(found) <= 2 * statistics.median(allowed), f"{summary}: {found} and {allowed}"
    return summary


CHECKS: dict[str, Callable[[], str]] = {
    "training": check_training,
    "gradients of a model, bfloat16": partial(check_gradients, True),
    "gradients of a model, float32": partial(check_gradients, False),
}
