"""AdamW, and Muon for the hidden matrices with AdamW for the rest, as one optimizer that Trainer takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from softplus_attention.validation import fail

OPTIMIZERS = ("adamw", "muon")
# Which of the two steps a group of parameters; part of the group, so that it is saved and loaded with it.
STEPPED_BY = "stepped_by"


def optimizer_of(
    name: str,
    model: nn.Module,
    *,
    learning_rate: float,
    muon_learning_rate: float,
    weight_decay: float,
    betas: tuple[float, float],
) -> torch.optim.Optimizer:
    """Matrices decay, vectors (norms, biases, powers) do not. With Muon, the matrices between embedding and head are
    its own."""
    if name not in OPTIMIZERS:
        fail("optimizer", f"one of {', '.join(OPTIMIZERS)}", repr(name))
    named = [(path, p) for path, p in model.named_parameters() if p.requires_grad]
    fused = bool(named) and named[0][1].device.type == "cuda"
    matrices = [p for path, p in named if p.dim() >= 2 and (name == "adamw" or not is_hidden_matrix(path, p))]
    vectors = [p for _, p in named if p.dim() < 2]
    groups: list[dict[str, Any]] = [
        {"params": matrices, "weight_decay": weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    words: dict[str, Any] = {"lr": learning_rate, "betas": betas, "fused": fused}
    if name == "adamw":
        return torch.optim.AdamW(groups, **words)
    hidden = [p for path, p in named if is_hidden_matrix(path, p)]
    return MuonWithAdamW(
        [{"params": hidden, "lr": muon_learning_rate, "weight_decay": weight_decay}],
        [{**group, **words} for group in groups],
    )


def is_hidden_matrix(path: str, parameter: Tensor) -> bool:
    return parameter.dim() == 2 and ".layers." in f".{path}"


class MuonWithAdamW(torch.optim.Optimizer):
    """torch's Muon and torch's AdamW side by side: one list of groups, one state, one ``state_dict``.

    Muon's updates are scaled to the size of AdamW's (``match_rms_adamw``), so that both take learning rates alike.
    """

    def __init__(self, muon_groups: list[dict[str, Any]], adamw_groups: list[dict[str, Any]]) -> None:
        if not hasattr(torch.optim, "Muon"):
            fail("optimizer", f"adamw: torch {torch.__version__} has no Muon", "'muon'")
        self.parts: dict[str, torch.optim.Optimizer] = {
            "muon": torch.optim.Muon(muon_groups, adjust_lr_fn="match_rms_adamw"),
            "adamw": torch.optim.AdamW(adamw_groups),
        }
        groups = [
            {**group, STEPPED_BY: name} for name, optimizer in self.parts.items() for group in optimizer.param_groups
        ]
        super().__init__(groups, {})
        self.share()

    def share(self) -> None:
        """The two step the very groups and states that are seen from outside."""
        for name, optimizer in self.parts.items():
            optimizer.param_groups = [group for group in self.param_groups if group[STEPPED_BY] == name]
            optimizer.state = self.state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        # Loading a state puts new groups in place of the old.
        if hasattr(self, "parts"):
            self.share()

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = closure() if closure is not None else None
        for optimizer in self.parts.values():
            optimizer.step()
        return loss
