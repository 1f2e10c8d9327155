"""Negative log-likelihood of every token in bounded memory: logits exist for a few hundred tokens at a time."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from softplus_attention.distributed import check_attended, shard_batch, sharded
from softplus_attention.huggingface.loading import check_is_causal

# Elements of float32 logits in memory at a time: 256 MB.
LOGITS = 1 << 26


class TokenLoss:
    """``losses(ids)`` (B, T - 1) of a causal language model: entry t is the loss of token t + 1.

    The decoder runs over whole sequences and the output layer over chunks, with the soft cap or scale of the config. If
    chunked logits differ from the model's own, whole logits are used. A model that is not causal raises an error.

    ``group``: processes with the same model and the same ids, which share each sequence; each returns the losses of all
    tokens.
    """

    def __init__(self, model: Any, group: Any = None) -> None:
        self.model, self.group = model, group
        self.head = model.get_output_embeddings()
        self.in_pieces: bool | None = None

    @torch.inference_mode()
    def __call__(self, ids: Tensor) -> Tensor:
        if self.in_pieces is None:
            check_is_causal("MODEL", self.model, ids[:1, :8])
            self.in_pieces = self.head is not None and self.chunks_match(ids[:1, :8])
        if self.group is not None:
            return self.sharded_losses(ids)
        if not self.in_pieces:
            logits = self.model(input_ids=ids, use_cache=False).logits
            return torch.stack([chunk_loss(row[:-1], target[1:]) for row, target in zip(logits, ids, strict=True)])
        return self.chunked_losses(self.hidden_states(ids)[:, :-1], ids[:, 1:])

    def sharded_losses(self, ids: Tensor) -> Tensor:
        if not self.in_pieces:
            reason = "changes its logits after the output layer, which several processes do not support"
            raise ValueError(f"{type(self.model).__name__} {reason}: use one process")
        layers = self.model.config.get_text_config().num_hidden_layers
        record, mine = shard_batch({"input_ids": ids, "labels": ids}, self.group)
        with sharded(record):
            hidden = self.hidden_states(mine["input_ids"], position_ids=mine["position_ids"])
            check_attended(layers)
        targets = mine["shift_labels"]  # ignored targets have loss 0
        return record.unshard(self.chunked_losses(hidden, targets), 1)[:, :-1]

    def chunked_losses(self, hidden: Tensor, targets: Tensor) -> Tensor:
        tokens = max(1, LOGITS // self.head.weight.shape[0])
        chunks = zip(hidden.flatten(0, 1).split(tokens), targets.flatten().split(tokens), strict=True)
        losses = [chunk_loss(self.cap_and_scale(self.head(states)), labels) for states, labels in chunks]
        return torch.cat(losses).view(hidden.shape[:2])

    def hidden_states(self, ids: Tensor, **kwargs: Tensor) -> Tensor:
        return self.model.get_decoder()(input_ids=ids, use_cache=False, **kwargs).last_hidden_state

    def cap_and_scale(self, logits: Tensor) -> Tensor:
        """Scaling and soft-capping after the output layer, under the config keys of transformers' models."""
        config = self.model.config
        if (scale := getattr(config, "logit_scale", None)) is not None:
            logits = logits * scale
        if (divisor := getattr(config, "logits_scaling", None)) is not None:
            logits = logits / divisor
        if (cap := getattr(config, "final_logit_softcapping", None)) is not None:
            logits = cap * torch.tanh(logits / cap)
        return logits

    def chunks_match(self, ids: Tensor) -> bool:
        """Whether the output layer on hidden states gives the model's own logits."""
        whole = self.model(input_ids=ids, use_cache=False).logits
        try:
            own = self.cap_and_scale(self.head(self.hidden_states(ids)))
        except (AttributeError, TypeError):
            return False
        # Both are the same sums, so only the last digit may differ; a looser bound would miss a weak soft cap.
        tolerance = 2 * torch.finfo(whole.dtype).eps
        return whole.shape == own.shape and torch.allclose(whole, own, rtol=tolerance, atol=tolerance)


def chunk_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.float(), targets, reduction="none")
