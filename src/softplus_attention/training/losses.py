"""The language-model loss straight from the hidden states, without logits of the whole batch in float32.

A model that is given one of these as ``linear_loss`` returns the loss alone: under mixed precision returned logits
would be copied to float32, 6.6 GB for 32 sequences of 1024 tokens and GPT-2's vocabulary.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from softplus_attention.data import IGNORED
from softplus_attention.validation import fail

CHUNK = 4096  # tokens whose logits exist at a time
LOSSES = ("plain", "chunked", "liger")
Loss = Callable[..., Tensor]


def linear_loss(name: str) -> Loss:
    """The loss called ``name``, with the signature ``loss(hidden, weight, labels, num_items_in_batch=None)``."""
    if name not in LOSSES:
        fail("loss", f"one of {', '.join(LOSSES)}", repr(name))
    chosen = {"plain": plain_sum, "chunked": chunked_sum, "liger": liger_sum}[name]
    if name == "liger":
        import_liger()

    def loss(
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        num_items_in_batch: Tensor | int | None = None,
        shift_labels: Tensor | None = None,
        **_: Any,
    ) -> Tensor:
        # The last position predicts nothing; cutting it off would copy the hidden states and leave odd sizes.
        targets = shifted(labels).reshape(-1) if shift_labels is None else shift_labels.reshape(-1)
        total = chosen(hidden.flatten(0, 1), weight, targets)
        return total / ((targets != IGNORED).sum() if num_items_in_batch is None else num_items_in_batch)

    return loss


def shifted(labels: Tensor) -> Tensor:
    """What each position predicts."""
    return F.pad(labels[:, 1:], (0, 1), value=IGNORED)


def matmul_dtype(x: Tensor) -> torch.dtype:
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def plain_sum(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """The sum of the tokens' losses. Compiled, the float32 logits are never written to memory."""
    return F.cross_entropy(F.linear(hidden, weight).float(), targets, ignore_index=IGNORED, reduction="sum")


def chunked_sum(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """``plain_sum`` with the logits of ``CHUNK`` tokens at a time, in the forward pass and in the backward."""
    dtype = matmul_dtype(hidden)
    hidden, weight = hidden.to(dtype), weight.to(dtype)
    if torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad):
        return ChunkedCrossEntropy.apply(hidden, weight, targets)
    parts = zip(hidden.split(CHUNK), targets.split(CHUNK), strict=True)
    with torch.autocast(hidden.device.type, enabled=False):
        return torch.stack([plain_sum(part, weight, goal) for part, goal in parts]).sum()


class ChunkedCrossEntropy(torch.autograd.Function):
    """Computes the gradients together with the loss, chunk by chunk, so that no logits are computed twice."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        hidden_gradients = []
        tokens = torch.arange(len(weight), device=weight.device)
        weight_gradient = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
        for part, goal in zip(hidden.split(CHUNK), targets.split(CHUNK), strict=True):
            logits = (part @ weight.t()).float()
            counted = goal != IGNORED
            goal = torch.where(counted, goal, 0)
            normaliser = logits.logsumexp(-1)
            chosen = logits.gather(-1, goal[:, None])[:, 0]
            total = total + torch.where(counted, normaliser - chosen, 0).sum()
            if torch.compiler.is_compiling():
                # A comparison, not a scatter: compiled, the slope is then made in one pass over the logits.
                slope = (logits - normaliser[:, None]).exp() - (tokens == goal[:, None]).float()
                slope = torch.where(counted[:, None], slope, 0)
            else:
                # The same numbers in place: each further tensor of this size is written and read.
                slope = logits.sub_(normaliser[:, None]).exp_()
                slope.scatter_(-1, goal[:, None], slope.gather(-1, goal[:, None]) - 1)
                slope.masked_fill_(~counted[:, None], 0)
            slope = slope.to(part.dtype)
            hidden_gradients.append(slope @ weight)
            weight_gradient += slope.t() @ part
        ctx.save_for_backward(torch.cat(hidden_gradients), weight_gradient)
        ctx.weight_dtype = weight.dtype
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        (outer,) = gradients
        hidden_gradient, weight_gradient = ctx.saved_tensors
        return (hidden_gradient * outer).to(hidden_gradient.dtype), (weight_gradient * outer).to(ctx.weight_dtype), None


def import_liger() -> Any:
    try:
        module = importlib.import_module("liger_kernel.ops.fused_linear_cross_entropy")
    except ImportError:
        raise ValueError(
            "liger-kernel is not installed. Run `pip install liger-kernel`, or pass `loss` chunked"
        ) from None
    return module.LigerFusedLinearCrossEntropyFunction


def liger_sum(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    dtype = matmul_dtype(hidden)
    options = (None, None, IGNORED, 0.0, 0.0, "sum")  # bias, class weights, ignored, z loss, smoothing, reduction
    result = import_liger().apply(hidden.to(dtype), weight.to(dtype), targets, *options)
    return result[0] if isinstance(result, tuple) else result
