"""Language-model losses computed from the hidden states, without float32 logits of the whole batch.

A model with one of these as ``linear_loss`` returns no logits: mixed precision would copy them to float32, 6.6 GB for
32 sequences of 1024 tokens and GPT-2's vocabulary.
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

CHUNK = 4096  # tokens per chunk of logits
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
        # The last position has no target; slicing it off would copy the hidden states and give odd sizes.
        targets = shifted(labels).reshape(-1) if shift_labels is None else shift_labels.reshape(-1)
        total = chosen(hidden.flatten(0, 1), weight, targets)
        return total / ((targets != IGNORED).sum() if num_items_in_batch is None else num_items_in_batch)

    return loss


def shifted(labels: Tensor) -> Tensor:
    """The target of each position."""
    return F.pad(labels[:, 1:], (0, 1), value=IGNORED)


def matmul_dtype(x: Tensor) -> torch.dtype:
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def plain_sum(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """The summed cross-entropy. When compiled, float32 logits are never written to memory."""
    return F.cross_entropy(F.linear(hidden, weight).float(), targets, ignore_index=IGNORED, reduction="sum")


def chunked_sum(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """``plain_sum`` with logits for ``CHUNK`` tokens at a time, in forward and backward."""
    dtype = matmul_dtype(hidden)
    hidden, weight = hidden.to(dtype), weight.to(dtype)
    if torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad):
        return ChunkedCrossEntropy.apply(hidden, weight, targets)
    parts = zip(hidden.split(CHUNK), targets.split(CHUNK), strict=True)
    with torch.autocast(hidden.device.type, enabled=False):
        return torch.stack([plain_sum(part, weight, target) for part, target in parts]).sum()


class ChunkedCrossEntropy(torch.autograd.Function):
    """Computes the gradients in the forward pass, chunk by chunk, so that logits are computed only once."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        hidden_gradients = []
        tokens = torch.arange(len(weight), device=weight.device)
        weight_gradient = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
        for part, target in zip(hidden.split(CHUNK), targets.split(CHUNK), strict=True):
            logits = (part @ weight.t()).float()
            is_target = target != IGNORED
            target = torch.where(is_target, target, 0)
            normaliser = logits.logsumexp(-1)
            chosen = logits.gather(-1, target[:, None])[:, 0]
            total = total + torch.where(is_target, normaliser - chosen, 0).sum()
            if torch.compiler.is_compiling():
                # A comparison instead of a scatter lets the compiler fuse this into one pass over the logits.
                logit_gradient = (logits - normaliser[:, None]).exp() - (tokens == target[:, None]).float()
                logit_gradient = torch.where(is_target[:, None], logit_gradient, 0)
            else:
                # The same in place, to avoid the memory traffic of more tensors of this size.
                logit_gradient = logits.sub_(normaliser[:, None]).exp_()
                logit_gradient.scatter_(-1, target[:, None], logit_gradient.gather(-1, target[:, None]) - 1)
                logit_gradient.masked_fill_(~is_target[:, None], 0)
            logit_gradient = logit_gradient.to(part.dtype)
            hidden_gradients.append(logit_gradient @ weight)
            weight_gradient += logit_gradient.t() @ part
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
