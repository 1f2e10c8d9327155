"""AdamW, and an optimizer that combines Muon for hidden matrices with AdamW for the rest."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from softplus_attention.validation import fail

OPTIMIZERS = ("adamw", "muon")
# Which optimizer updates a parameter group; a key of the group, so that it is saved and loaded with it.
STEPPED_BY = "stepped_by"
# Elements in a stack of matrices: under 1 GB including intermediates. Larger matrices gain little from stacking.
MAX_STACKED = 2**26


def build_optimizer(
    name: str,
    model: nn.Module,
    *,
    learning_rate: float,
    muon_learning_rate: float,
    weight_decay: float,
    betas: tuple[float, float],
) -> torch.optim.Optimizer:
    """Weight decay is for matrices, not vectors (norms, biases, powers). Muon updates the matrices of the layers."""
    if name not in OPTIMIZERS:
        fail("optimizer", f"one of {', '.join(OPTIMIZERS)}", repr(name))
    named = [(path, p) for path, p in model.named_parameters() if p.requires_grad]
    meshes = {getattr(p, "device_mesh", None) for _, p in named}
    fused = bool(named) and named[0][1].device.type == "cuda" and len(meshes) == 1
    foreach = None if len(meshes) == 1 else False  # parameters on different meshes are updated one by one
    matrices = [p for path, p in named if p.dim() >= 2 and (name == "adamw" or not is_hidden_matrix(path, p))]
    vectors = [p for _, p in named if p.dim() < 2]
    groups: list[dict[str, Any]] = [
        {"params": matrices, "weight_decay": weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    options: dict[str, Any] = {"lr": learning_rate, "betas": betas, "fused": fused, "foreach": foreach}
    if name == "adamw":
        return torch.optim.AdamW(groups, **options)
    hidden = [p for path, p in named if is_hidden_matrix(path, p)]
    return MuonWithAdamW(
        [{"params": hidden, "lr": muon_learning_rate, "weight_decay": weight_decay}],
        [{**group, **options} for group in groups],
    )


def is_hidden_matrix(path: str, parameter: Tensor) -> bool:
    return parameter.dim() == 2 and ".layers." in f".{path}"


class StackedMuon(torch.optim.Muon):
    """torch's Muon with the same groups, state and results, but matrices of one shape are updated together.

    torch updates one matrix at a time; for a small model on a GPU the launches take longer than the rest of a step.
    """

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        super().__init__(groups, adjust_lr_fn="match_rms_adamw")

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameters in stacks([p for p in group["params"] if p.grad is not None]):
                self.step_stack(group, parameters)

    def step_stack(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        gradients = [p.grad for p in parameters if p.grad is not None]
        for parameter, gradient in zip(parameters, gradients, strict=True):
            if "momentum_buffer" not in self.state[parameter]:
                self.state[parameter]["momentum_buffer"] = torch.zeros_like(gradient)
        updates = [self.state[p]["momentum_buffer"] for p in parameters]
        torch._foreach_lerp_(updates, gradients, 1 - group["momentum"])
        if group["nesterov"]:
            updates = list(torch._foreach_lerp(gradients, updates, group["momentum"]))
        updates = orthogonalized(updates, group["ns_coefficients"], group["ns_steps"], group["eps"])
        scale = 0.2 * math.sqrt(max(parameters[0].shape))
        torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])
        torch._foreach_add_(parameters, updates, alpha=-(group["lr"] * scale))


def stacks(matrices: list[Tensor]) -> Iterator[list[Tensor]]:
    """Groups of parameters of one shape, each of at most ``MAX_STACKED`` elements."""
    kinds: dict[Any, list[Tensor]] = {}
    for number, matrix in enumerate(matrices):
        # DTensors cannot be stacked, so each gets a key of its own.
        single = number if hasattr(matrix, "full_tensor") else None
        kinds.setdefault((matrix.shape, matrix.dtype, matrix.device, single), []).append(matrix)
    for kind in kinds.values():
        most = max(1, MAX_STACKED // kind[0].numel())
        for start in range(0, len(kind), most):
            yield kind[start : start + most]


def iteration_dtype(device: torch.device) -> torch.dtype:
    """float32 on CPUs: torch's bfloat16 is many times slower on those without bfloat16 instructions."""
    return torch.float32 if device.type == "cpu" else torch.bfloat16


def orthogonalized(
    matrices: list[Tensor], coefficients: tuple[float, float, float], steps: int, smallest_norm: float
) -> list[Tensor]:
    """The Newton-Schulz iteration of torch's Muon, for a stack of matrices of one shape."""
    a, b, c = coefficients
    first = matrices[0]
    single, tall = len(matrices) == 1, first.shape[0] > first.shape[1]
    multiply_add = torch.addmm if single else torch.baddbmm
    x = (first if single else torch.stack(matrices)).to(iteration_dtype(first.device))
    x = x.mT if tall else x
    x = x / torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True).clamp(min=smallest_norm)
    for _ in range(steps):
        gram = x @ x.mT
        x = multiply_add(x, multiply_add(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    x = x.mT if tall else x
    # With the dtype and layout of the parameters, the updates are added in one launch.
    x = x.to(first.dtype, memory_format=torch.contiguous_format)
    return [x] if single else list(x.unbind())


class MuonWithAdamW(torch.optim.Optimizer):
    """Muon and AdamW as one optimizer, with one list of groups, one state and one ``state_dict``.

    Muon's updates are scaled to the RMS of AdamW's (``match_rms_adamw``), so both use similar learning rates.
    """

    def __init__(self, muon_groups: list[dict[str, Any]], adamw_groups: list[dict[str, Any]]) -> None:
        self.parts: dict[str, torch.optim.Optimizer] = {
            "muon": StackedMuon(muon_groups),
            "adamw": torch.optim.AdamW(adamw_groups),
        }
        groups = [
            {**group, STEPPED_BY: name} for name, optimizer in self.parts.items() for group in optimizer.param_groups
        ]
        super().__init__(groups, {})
        self.share()

    def share(self) -> None:
        """Makes both optimizers use the groups and state of this one."""
        for name, optimizer in self.parts.items():
            optimizer.param_groups = [group for group in self.param_groups if group[STEPPED_BY] == name]
            optimizer.state = self.state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        # Loading a state replaces the groups.
        if hasattr(self, "parts"):
            self.share()

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = closure() if closure is not None else None
        for optimizer in self.parts.values():
            optimizer.step()
        return loss
