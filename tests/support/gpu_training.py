"""Twenty steps of a small language model with the Triton kernels and with the reference. Needs no pytest."""

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
    """Bytes in, bytes out."""

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
    """(steps, batch, length + 1) of one text, the same at every call."""
    text = torch.frombuffer(bytearray(TEXT.read_bytes()), dtype=torch.uint8).long()
    places = torch.randint(
        len(text) - LENGTH, (STEPS * BATCH, 1), generator=torch.Generator().manual_seed(1)
    ) + torch.arange(LENGTH + 1)
    return text[places.clamp(max=len(text) - 1)].view(STEPS, BATCH, -1).to(DEVICE)


def loss_of(model: Model, tokens: Tensor, impl: str, half: bool) -> Tensor:
    with torch.autocast(DEVICE, torch.bfloat16, enabled=half):
        logits = model(tokens[:, :-1], impl)
    return F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())


def first_gradients(impl: str, *, half: bool) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = Model().to(DEVICE)
    loss_of(model, batches()[0], impl, half).backward()
    return {name: x.grad.double() for name, x in model.named_parameters()}


def check_gradients(half: bool, impl: str = "triton") -> str:
    """Every parameter's gradient of the first step, against the reference's in float32, by the norm.

    Under autocast at most twice as far as the reference is under autocast; in float32 at most 1e-4 of the norm away,
    ten times what the order of sums makes of it on a CPU (the chunked path: 1e-5).
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
    return f"{len(exact)} parameters, at most {worst:.2f} of what is allowed"


def stretched(attend: Callable[..., Tensor], factor: float) -> Callable[..., Tensor]:
    """The same attention, of longer or shorter q and k: it takes their directions only, and rounds them once more."""
    return lambda q, k, v, **options: attend(q * factor, k * factor, v, **options)


def losses(impl: str, *, half: bool = True, power: int = 15, factor: float = 1) -> Tensor:
    """(steps,): of the same weights and data, before each step."""
    torch.manual_seed(0)
    model = Model(power).to(DEVICE)
    for block in model.blocks:
        block.attention.attention = stretched(block.attention.attention, factor)
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3)
    found = []
    for tokens in batches():
        loss = loss_of(model, tokens, impl, half)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        found.append(loss.detach())
    return torch.stack(found).double()


def check_training(impl: str = "triton") -> str:
    """Twenty steps under bfloat16 autocast: the kernels part from float32 as the reference does.

    Rounding makes runs of one problem part, some of them far, so each side has six: q and k as they are and stretched,
    which changes their rounding alone. The kernels' median distance to the reference in float32, over the steps, is at
    most twice that of the reference; that of another power is not, or this would show nothing.
    """
    exact = losses("reference", half=False)

    def distances(name: str, power: int = 15) -> list[float]:
        runs = [losses(name, power=power, factor=factor) for factor in (0.7, 0.9, 1, 1.1, 1.2, 1.3)]
        assert all(x.isfinite().all() for x in runs), f"{name}: a loss is not finite"
        assert all(x[-1] < 0.7 * x[0] for x in runs), f"{name}: nothing was learnt"
        return [float((x - exact).abs().mean()) for x in runs]

    found, allowed, other = distances(impl), distances("reference"), distances("reference", power=7)
    words = f"{statistics.median(found):.1e} from float32, the reference {statistics.median(allowed):.1e}"
    words += f", power 7 {statistics.median(other):.1e}"
    assert statistics.median(other) > 2 * statistics.median(allowed), words
    assert statistics.median(found) <= 2 * statistics.median(allowed), f"{words}: {found} and {allowed}"
    return words


CHECKS: dict[str, Callable[[], str]] = {
    "training": check_training,
    "gradients of a model, bfloat16": partial(check_gradients, True),
    "gradients of a model, float32": partial(check_gradients, False),
}
