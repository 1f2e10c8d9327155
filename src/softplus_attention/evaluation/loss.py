"""The negative log-likelihood of every token, in bounded memory: logits exist for a few hundred tokens at a time."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from softplus_attention.huggingface.loading import refuse_foresight

# Elements of the float32 logits that exist at a time: 256 MB.
LOGITS = 1 << 26


class TokenLoss:
    """``losses(ids)`` (B, T - 1) of a causal language model: entry t is the loss of token t + 1.

    The decoder runs over whole sequences, the output layer over pieces of them, with the cap or the scale that the
    config names. Models that do something else to their logits are noticed and asked for whole ones; a model that sees
    what comes after a token is refused.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self.head = model.get_output_embeddings()
        self.in_pieces: bool | None = None

    @torch.inference_mode()
    def __call__(self, ids: Tensor) -> Tensor:
        if self.in_pieces is None:
            refuse_foresight("MODEL", self.model, ids[:1, :8])
            self.in_pieces = self.head is not None and self.pieces_are_right(ids[:1, :8])
        if not self.in_pieces:
            logits = self.model(input_ids=ids, use_cache=False).logits
            return torch.stack([piece_loss(row[:-1], target[1:]) for row, target in zip(logits, ids, strict=True)])
        hidden = self.hidden_states(ids)[:, :-1]
        vocabulary = self.head.weight.shape[0]
        tokens = max(1, LOGITS // vocabulary)
        losses = [
            piece_loss(self.finished(self.head(states)), targets)
            for states, targets in zip(
                hidden.flatten(0, 1).split(tokens), ids[:, 1:].flatten().split(tokens), strict=True
            )
        ]
        return torch.cat(losses).view(hidden.shape[:2])

    def hidden_states(self, ids: Tensor) -> Tensor:
        return self.model.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state

    def finished(self, logits: Tensor) -> Tensor:
        """What models do after the output layer, by the words that their configs have for it."""
        config = self.model.config
        if (scale := getattr(config, "logit_scale", None)) is not None:
            logits = logits * scale
        if (divisor := getattr(config, "logits_scaling", None)) is not None:
            logits = logits / divisor
        if (cap := getattr(config, "final_logit_softcapping", None)) is not None:
            logits = cap * torch.tanh(logits / cap)
        return logits

    def pieces_are_right(self, ids: Tensor) -> bool:
        whole = self.model(input_ids=ids, use_cache=False).logits
        try:
            parts = self.finished(self.head(self.hidden_states(ids)))
        except (AttributeError, TypeError):
            return False
        # The same sums twice: no more than the last digit may differ, or a gentle cap would pass for rounding.
        last_digits = 2 * torch.finfo(whole.dtype).eps
        return whole.shape == parts.shape and torch.allclose(whole, parts, rtol=last_digits, atol=last_digits)


def piece_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.float(), targets, reduction="none")
