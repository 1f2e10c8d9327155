"""Loss by length: the same documents cut to 1x, 2x, ... of the training length, and what the long context is worth."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from softplus_attention.evaluation.loss import TokenLoss
from softplus_attention.evaluation.memory import in_batches
from softplus_attention.validation import fail

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Texts:
    """Documents cut to whole multiples of ``longest`` tokens, so that every length covers the same tokens."""

    rows: Tensor  # (sequences of the longest length, longest)
    documents: int

    @property
    def longest(self) -> int:
        return self.rows.shape[1]

    def cut(self, length: int) -> Tensor:
        return self.rows.reshape(-1, length)


def texts_of(documents: Iterable[Any], longest: int, most_rows: int | None = None) -> Texts:
    """What there is of documents with at least ``longest`` tokens; no sequence crosses from one into the next.

    Where ``most_rows`` limits them, every document gives its share, the same at every call.
    """
    if longest < 2:
        fail("longest", "at least 2 tokens", longest)
    kept = []
    for document in documents:
        tokens = torch.as_tensor(document, dtype=torch.int64)
        count = len(tokens) // longest
        if count:
            kept.append(tokens[: count * longest].view(count, longest))
    if not kept:
        fail("lengths", "no longer than the longest document", f"{longest} tokens")
    rows = torch.cat(kept)
    if most_rows is not None and len(rows) > most_rows:
        rows = rows[torch.linspace(0, len(rows) - 1, most_rows).round().long()]
    return Texts(rows, len(kept))


@dataclass
class LengthCurve:
    """Mean losses in nats. ``positions[length]`` maps (first, end) to the mean of the targets at those positions."""

    lengths: list[int]
    loss: list[float] = field(default_factory=list)
    error: list[float] = field(default_factory=list)
    positions: dict[int, list[tuple[int, int, float]]] = field(default_factory=dict)
    targets: list[int] = field(default_factory=list)


def losses_of(
    model: Any, rows: Tensor, *, batch_tokens: int = 16384, progress: Progress | None = None, losses: Any = None
) -> Tensor:
    """(sequences, length - 1), float32, on the CPU. A batch that does not fit into memory is halved and tried again;
    where one sequence does not fit, ``memory.TooLongError`` is raised."""
    token_loss = TokenLoss(model) if losses is None else losses
    done = 0

    def run(batch: Tensor) -> Tensor:
        nonlocal done
        found = token_loss(batch.to(model.device)).float()
        done += len(batch)
        if progress is not None:
            progress(done * rows.shape[1], rows.numel())
        return found

    return in_batches(rows, max(1, batch_tokens // rows.shape[1]), run)


def loss_by_length(
    model: Any,
    texts: Texts,
    lengths: Sequence[int],
    *,
    batch_tokens: int = 16384,
    progress: Progress | None = None,
) -> LengthCurve:
    """The mean loss over all positions of sequences of each length; ``error`` is the standard error over sequences.

    Every length must divide the longest one, so that each is measured on the same tokens (but for the first token of
    a sequence, which has no context to be predicted from).
    """
    for length in lengths:
        if length < 2 or texts.longest % length:
            fail("lengths", f"divisors of the longest, {texts.longest}", length)
    curve = LengthCurve(list(lengths))
    token_loss = TokenLoss(model)
    for number, length in enumerate(lengths):
        rows = texts.cut(length)

        def step(done: int, of: int, number: int = number) -> None:
            if progress is not None:
                progress(number * of + done, len(lengths) * of)

        losses = losses_of(model, rows, batch_tokens=batch_tokens, progress=step, losses=token_loss)
        # Sequences of one row of text belong together: the spread is taken over the rows.
        by_row = losses.mean(1).view(len(texts.rows), -1).mean(1)
        curve.loss.append(losses.mean().item())
        curve.error.append((by_row.std() / len(by_row) ** 0.5).item() if len(by_row) > 1 else float("nan"))
        curve.positions[length] = by_position(losses, lengths[0])
        curve.targets.append(losses.numel())
    return curve


def by_position(losses: Tensor, first: int) -> list[tuple[int, int, float]]:
    """Means over [0, first), [first, 2 first), [2 first, 4 first), ...: positions of the predicted tokens."""
    means, begin, end = [], 1, min(first, losses.shape[1] + 1)
    while begin <= losses.shape[1]:
        means.append((begin, end, losses[:, begin - 1 : end - 1].mean().item()))
        begin, end = end, min(2 * end, losses.shape[1] + 1)
    return means
