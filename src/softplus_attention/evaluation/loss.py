"""The negative log-likelihood of every token, in bounded memory: logits exist for a few hundred tokens at a time."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from softplus_attention.distributed import check_attended, shard_batch, sharded
from softplus_attention.huggingface.loading import check_is_causal

# Elements of the float32 logits that exist at a time: 256 MB.
LOGITS = 1 << 26


class TokenLoss:
    """``losses(ids)`` (B, T - 1) of a causal language model: entry t is the loss of token t + 1.

    The decoder runs over whole sequences, the output layer over pieces of them, with the cap or the scale that the
    config names. Models that do something else to their logits are noticed and asked for whole ones; a model that sees
    what comes after a token is refused.

    With ``group``, processes that hold the same model and ask for the same ids, a sequence lies on all of them: each
    has the losses of all tokens.
    """

    def __init__(self, model: Any, group: Any = None) -> None:
        self.model, self.group = model, group
        self.head = model.get_output_embeddings()
        self.in_pieces: bool | None = None

    @torch.inference_mode()
    def __call__(self, ids: Tensor) -> Tensor:
        if self.in_pieces is None:
            check_is_causal("MODEL", self.model, ids[:1, :8])
            self.in_pieces = self.head is not None and self.pieces_are_right(ids[:1, :8])
        if self.group is not None:
            return self.of_sharded(ids)
        if not self.in_pieces:
            logits = self.model(input_ids=ids, use_cache=False).logits
            return torch.stack([piece_loss(row[:-1], target[1:]) for row, target in zip(logits, ids, strict=True)])
        return self.of_hidden(self.hidden_states(ids)[:, :-1], ids[:, 1:])

    def of_sharded(self, ids: Tensor) -> Tensor:
        if not self.in_pieces:
            raise ValueError(f"the logits of {type(self.model).__name__} are not its output layer's: use one process")
        layers = self.model.config.get_text_config().num_hidden_layers
        record, mine = shard_batch({"input_ids": ids, "labels": ids}, self.group)
        with sharded(record):
            hidden = self.hidden_states(mine["input_ids"], position_ids=mine["position_ids"])
            check_attended(layers)
        targets = mine["shift_labels"]  # where one is ignored, the loss is 0
        return record.unshard(self.of_hidden(hidden, targets), 1)[:, :-1]

    def of_hidden(self, hidden: Tensor, targets: Tensor) -> Tensor:
        tokens = max(1, LOGITS // self.head.weight.shape[0])
        parts = zip(hidden.flatten(0, 1).split(tokens), targets.flatten().split(tokens), strict=True)
        losses = [piece_loss(self.finished(self.head(states)), wanted) for states, wanted in parts]
        return torch.cat(losses).view(hidden.shape[:2])

    def hidden_states(self, ids: Tensor, **kwargs: Tensor) -> Tensor:
        return self.model.get_decoder()(input_ids=ids, use_cache=False, **kwargs).last_hidden_state

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
