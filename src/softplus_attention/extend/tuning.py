"""``--minutes``: tunes the far heads, or all weights, for a given time after the untuned folder is written.

Two kinds of steps share the time. Short steps use sequences within the trained length and minimize the KL divergence
from the original's logits. Long steps minimize the cross entropy of the text beyond the trained length. The result is
kept only if it is better on held-out text.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from softplus_attention.utils.files import replacing
from softplus_attention.utils.progress import Progress, format_duration
from softplus_attention.utils.untrusted import open_regular

ROWS = 512  # rows of a sequence whose logits are computed
SAVE_SECONDS = 300.0
KINDS = ("short", "long")


@dataclass(frozen=True)
class TuneSettings:
    minutes: float
    short: int  # tokens per sequence, within the trained length
    long: int
    trained: int
    parts: str = "far"  # or "all"
    rate: float = 1e-4
    seed: int = 0


class Tuner:
    """``documents`` have at least ``settings.long`` tokens; ``extended`` is changed in place, ``original`` is not."""

    def __init__(self, extended: Any, original: Any, settings: TuneSettings) -> None:
        self.extended, self.original, self.settings = extended, original, settings
        self.weights = unshare_tuned_weights(extended, settings.parts)
        self.untuned = [x.detach().clone() for x in self.weights]
        self.masters = [x.detach().float().clone() for x in self.weights]  # small steps are lost in bfloat16
        self.optimizer = torch.optim.AdamW(self.masters, lr=settings.rate, betas=(0.9, 0.95), weight_decay=0.0)
        self.steps = dict.fromkeys(KINDS, 0)
        self.spent = dict.fromkeys(KINDS, 0.0)

    def loss(self, kind: str, ids: Tensor, rows: Tensor) -> Tensor:
        """The loss over the logits of ``rows``, in nats per token."""
        kwargs = {"use_cache": False, "logits_to_keep": rows}
        logits = self.extended(ids, **kwargs).logits[0].float()
        if kind == "long":
            return nn.functional.cross_entropy(logits, ids[0, rows + 1])
        with torch.no_grad():
            expected = self.original(ids, **kwargs).logits[0].float().log_softmax(-1)
        return nn.functional.kl_div(logits.log_softmax(-1), expected, reduction="batchmean", log_target=True)

    def sample(self, kind: str, documents: Sequence[Sequence[int]], key: str) -> tuple[Tensor, Tensor]:
        """Tokens (1, T) of a document, and the rows in the loss: in a long sequence those beyond the trained length."""
        settings = self.settings
        rng = random.Random(f"{settings.seed} {settings.short} {settings.long} {kind} {key}")
        length, first = (settings.short, 0) if kind == "short" else (settings.long, settings.trained)
        text = documents[rng.randrange(len(documents))]
        begin = rng.randrange(len(text) - length + 1)
        rows = sorted(rng.sample(range(first, length - 1), min(ROWS, length - 1 - first)))
        device = self.extended.device
        return torch.tensor([list(text[begin : begin + length])], device=device), torch.tensor(rows, device=device)

    @torch.no_grad()
    def held_out_losses(self, documents: Sequence[Sequence[int]]) -> dict[str, float]:
        return {kind: self.loss(kind, *self.sample(kind, documents, "held back")).item() for kind in KINDS}

    def step(self, kind: str, documents: Sequence[Sequence[int]]) -> None:
        begun = time.monotonic()
        with torch.enable_grad():
            self.loss(kind, *self.sample(kind, documents, str(self.steps[kind]))).backward()
        for group in self.optimizer.param_groups:
            group["lr"] = self.settings.rate * max(0.0, 1 - sum(self.spent.values()) / (60 * self.settings.minutes))
        for master, weight in zip(self.masters, self.weights, strict=True):
            assert weight.grad is not None
            master.grad, weight.grad = weight.grad.float(), None
        nn.utils.clip_grad_norm_(self.masters, 1.0)
        self.optimizer.step()
        self.set_weights(self.masters)
        self.steps[kind] += 1
        self.spent[kind] += time.monotonic() - begun

    @torch.no_grad()
    def set_weights(self, values: Sequence[Tensor]) -> None:
        for weight, value in zip(self.weights, values, strict=True):
            weight.copy_(value)

    def next_kind(self) -> str | None:
        """The kind that has used less time, of those whose next step still fits."""
        left = 60 * self.settings.minutes - sum(self.spent.values())
        each = {kind: self.spent[kind] / self.steps[kind] for kind in KINDS if self.steps[kind]}
        if "short" in each:
            each.setdefault("long", each["short"] * self.settings.long / self.settings.short)
        fitting = [kind for kind in KINDS if each.get(kind, 0.0) <= left and left > 0]
        return min(fitting, key=self.spent.__getitem__, default=None)

    def save(self, path: Path, before: dict[str, float]) -> None:
        found = {"masters": self.masters, "optimizer": self.optimizer.state_dict(), "before": before}
        with replacing(path) as file:
            torch.save(found | {"steps": self.steps, "spent": self.spent}, file)

    def load(self, path: Path) -> dict[str, float]:
        try:
            with open_regular(path) as file:
                found = torch.load(file, weights_only=True, map_location=self.extended.device)
            shapes = [x.shape for x in self.masters]
            states = [[x.shape for x in state.values() if x.dim()] for state in found["optimizer"]["state"].values()]
            if [x.shape for x in found["masters"]] != shapes or any({*own} - {*shapes} for own in states):
                raise ValueError("the weights have other shapes")
            before = {kind: float(found["before"][kind]) for kind in KINDS}
            self.steps = {kind: int(found["steps"][kind]) for kind in KINDS}
            self.spent = {kind: float(found["spent"][kind]) for kind in KINDS}
            self.optimizer.load_state_dict(found["optimizer"])
        except Exception as error:  # a malformed file can raise anything
            reason = " ".join(str(error).split())[:200]
            raise ValueError(f"{path} is not a saved tuning state ({reason}): delete it to restart tuning") from None
        with torch.no_grad():
            for master, value in zip(self.masters, found["masters"], strict=True):
                master.copy_(value)
        self.set_weights(self.masters)
        return before

    def run(self, documents: Sequence[Sequence[int]], held: Sequence[Sequence[int]], path: Path) -> dict[str, Any]:
        """Tunes until the time is used. An interrupted run saves its state at ``path`` and resumes from it."""
        before = self.load(path) if path.exists() else self.held_out_losses(held)
        flags = [x.requires_grad for x in self.extended.parameters()]
        self.extended.requires_grad_(False)
        for weight in self.weights:
            weight.requires_grad_(True)
        self.extended.train()
        self.extended.gradient_checkpointing_enable({"use_reentrant": False})
        saved, total = time.monotonic(), round(60 * self.settings.minutes)
        try:
            with Progress("tuning", max(1, total), initial=round(sum(self.spent.values())), unit="second") as bar:
                while (kind := self.next_kind()) is not None:
                    self.step(kind, documents)
                    steps = f"{self.steps['short']} short and {self.steps['long']} long steps"
                    bar.update(steps, min(total, round(sum(self.spent.values()))))
                    if time.monotonic() - saved > SAVE_SECONDS:
                        self.save(path, before)
                        saved = time.monotonic()
        except KeyboardInterrupt:
            self.save(path, before)
            raise
        finally:
            self.extended.gradient_checkpointing_disable()
            self.extended.eval()
            for x, flag in zip(self.extended.parameters(), flags, strict=True):
                x.requires_grad_(flag)
        after = self.held_out_losses(held)
        is_kept = sum(after.values()) < sum(before.values())
        if not is_kept:
            self.set_weights(self.untuned)
        return {"steps": self.steps, "seconds": self.spent, "before": before, "after": after, "kept": is_kept}


def unshare_tuned_weights(extended: Any, parts: str) -> list[nn.Parameter]:
    """Replaces the weights to tune by copies that the original does not share. The gradients of query and key
    projections are zero for rows of heads that are not far heads."""
    if parts == "all":
        for module in extended.modules():
            for name, weight in module.named_parameters(recurse=False):
                setattr(module, name, nn.Parameter(weight.detach().clone()))
        extended.tie_weights()
        return list(extended.parameters())
    found = []
    for layer in extended.model.layers:
        attention = layer.self_attn
        group = next((group for group in attention.groups if group.is_far), None)
        if group is None:
            continue
        for projection, heads in ((attention.q_proj, group.queries), (attention.k_proj, group.heads)):
            projection.weight = nn.Parameter(projection.weight.detach().clone())
            mask = torch.zeros(len(projection.weight) // attention.head_dim, 1, device=projection.weight.device)
            mask[heads] = 1
            mask = mask.repeat_interleave(attention.head_dim, 0)
            projection.weight.register_hook(lambda grad, mask=mask: grad * mask.to(grad.dtype))
            found.append(projection.weight)
        if hasattr(attention, "far_power"):
            found.append(attention.far_power)
    return found


def describe_tuning(done: dict[str, Any]) -> str:
    steps, before, after = done["steps"], done["before"], done["after"]
    text = (
        f"tuned with {steps['short']} short and {steps['long']} long steps: divergence from the original "
        f"{before['short']:.4f} -> {after['short']:.4f}, loss beyond the trained length "
        f"{before['long']:.4f} -> {after['long']:.4f} (held-out text)"
    )
    if not steps["long"]:
        text += f"; there was no time for a long step, the short ones took {format_duration(done['seconds']['short'])}"
    return text if done["kept"] else f"{text}; no improvement, so the untuned weights are kept"
