"""Loss by length: the same documents cut to 1x, 2x, ... the training length, and the gain from long context."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from softplus_attention.evaluation.loss import TokenLoss
from softplus_attention.evaluation.memory import in_batches, sequences_at_once
from softplus_attention.validation import fail

Report = Callable[[int, int], None]


@dataclass(frozen=True)
class EvaluationTexts:
    """Documents cut to whole multiples of ``longest`` tokens, so that every length covers the same tokens."""

    rows: Tensor  # (sequences of the longest length, longest)
    documents: int

    @property
    def longest(self) -> int:
        return self.rows.shape[1]

    def cut(self, length: int) -> Tensor:
        return self.rows.reshape(-1, length)


def cut_documents(documents: Iterable[Any], longest: int, max_rows: int | None = None) -> EvaluationTexts:
    """Cut documents of at least ``longest`` tokens into rows; no row crosses documents.

    ``max_rows`` takes rows evenly spread over all documents, the same ones in every call.
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
    if max_rows is not None and len(rows) > max_rows:
        rows = rows[torch.linspace(0, len(rows) - 1, max_rows).round().long()]
    return EvaluationTexts(rows, len(kept))


def token_losses(
    model: Any, rows: Tensor, *, batch_tokens: int = 16384, progress: Report | None = None, losses: Any = None
) -> Tensor:
    """Losses (sequences, length - 1) in float32 on the CPU. A batch that runs out of memory is halved and retried;
    ``memory.TooLongError`` if a single sequence does not fit."""
    token_loss = TokenLoss(model) if losses is None else losses
    done = 0

    def run(batch: Tensor) -> Tensor:
        nonlocal done
        found = token_loss(batch.to(model.device)).float()
        done += len(batch)
        if progress is not None:
            progress(done * rows.shape[1], rows.numel())
        return found

    at_once = max(1, batch_tokens // rows.shape[1])
    if getattr(token_loss, "group", None) is not None:  # one process alone must not change the batch size
        return torch.cat([run(batch).cpu() for batch in rows.split(at_once)])
    return in_batches(rows, at_once, run)


@dataclass(frozen=True)
class LengthEvaluator:
    """Measures one model on one set of texts, one length at a time."""

    model: Any
    token_loss: TokenLoss
    texts: EvaluationTexts
    first: int  # shortest length = size of the first bucket of positions
    training_length: int
    control: bool = True
    control_share: float = 0.25  # last fraction of a sequence, which the control scores again
    batch_tokens: int | None = None  # None: from free memory

    def at(self, length: int, progress: Report | None = None) -> dict[str, Any]:
        started = time.perf_counter()
        rows = self.texts.cut(length)
        losses = self.losses(rows, progress)
        by_text = self.by_text(losses)
        buckets = by_position(losses, min(self.first, length))
        return {
            "length": length,
            "times": length / self.training_length,
            "loss": losses.double().mean().item(),
            "standard_error": standard_error(by_text),
            "by_text": rounded(by_text),
            "targets": losses.numel(),
            "sequences": len(rows),
            "positions": [{"first": begin, "end": end, "loss": mean} for begin, end, mean in buckets],
            "control": self.measure_control(rows, losses, progress) if self.control else None,
            "seconds": round(time.perf_counter() - started, 2),
        }

    def measure_control(self, rows: Tensor, losses: Tensor, progress: Report | None = None) -> dict[str, Any] | None:
        """Score the end of each sequence again in windows of one training length, and compare the second half of each
        window with the full context."""
        window, length = self.training_length, rows.shape[1]
        if length <= window:
            return None
        half = max(1, window // 2)
        count = control_windows(length, window, half, self.control_share)
        ends = [length - half * number for number in reversed(range(count))]
        windows = torch.stack([rows[:, end - window : end] for end in ends], 1).flatten(0, 1)
        full = losses[:, -count * half :]
        short = self.losses(windows, progress)[:, -half:].reshape(len(rows), -1)
        # The last window also by itself: only its tokens have the whole length before them.
        last = self.compare(full[:, -half:], short[:, -half:])
        return {"window": window, "first": length - count * half, **self.compare(full, short), "last": last}

    def compare(self, full: Tensor, short: Tensor) -> dict[str, Any]:
        gains = self.by_text(short - full)
        return {
            "targets": full.numel(),
            "full": full.double().mean().item(),
            "short": short.double().mean().item(),
            "gain": (short - full).double().mean().item(),
            "standard_error": standard_error(gains),
            "by_text": rounded(gains),
        }

    def by_text(self, losses: Tensor) -> Tensor:
        """Mean loss of each text of the longest length, over all sequences cut from it."""
        return losses.double().mean(1).view(len(self.texts.rows), -1).mean(1)

    def losses(self, rows: Tensor, progress: Report | None) -> Tensor:
        length = rows.shape[1]
        tokens = self.batch_tokens or sequences_at_once(self.model, length, group=self.token_loss.group) * length
        return token_losses(self.model, rows, batch_tokens=tokens, progress=progress, losses=self.token_loss)


@dataclass
class LengthCurve:
    """Mean losses in nats. ``positions[length]`` maps (first, end) to the mean of the targets at those positions."""

    lengths: list[int]
    loss: list[float] = field(default_factory=list)
    error: list[float] = field(default_factory=list)
    positions: dict[int, list[tuple[int, int, float]]] = field(default_factory=dict)
    targets: list[int] = field(default_factory=list)


def loss_by_length(
    model: Any,
    texts: EvaluationTexts,
    lengths: Sequence[int],
    *,
    batch_tokens: int = 16384,
    progress: Report | None = None,
    group: Any = None,
) -> LengthCurve:
    """Mean loss over all positions of sequences of each length; ``error`` is the standard error over texts.

    Every length must divide the longest, so that all are measured on the same tokens (except the first of each
    sequence, which is never predicted). ``group``: processes that share each sequence, for lengths that do not fit on
    one device.
    """
    for length in lengths:
        if length < 2 or texts.longest % length:
            fail("lengths", f"divisors of the longest, {texts.longest}", length)
    curve = LengthCurve(list(lengths))
    evaluator = LengthEvaluator(
        model, TokenLoss(model, group), texts, lengths[0], lengths[0], control=False, batch_tokens=batch_tokens
    )
    for number, length in enumerate(lengths):

        def step(done: int, of: int, number: int = number) -> None:
            if progress is not None:
                progress(number * of + done, len(lengths) * of)

        entry = evaluator.at(length, step)
        curve.loss.append(entry["loss"])
        curve.error.append(float("nan") if entry["standard_error"] is None else entry["standard_error"])
        curve.positions[length] = [(part["first"], part["end"], part["loss"]) for part in entry["positions"]]
        curve.targets.append(entry["targets"])
    return curve


def by_position(losses: Tensor, first: int) -> list[tuple[int, int, float]]:
    """Means over [0, first), [first, 2 first), [2 first, 4 first), ...: positions of the predicted tokens."""
    means, begin, end = [], 1, min(first, losses.shape[1] + 1)
    while begin <= losses.shape[1]:
        means.append((begin, end, losses[:, begin - 1 : end - 1].mean().item()))
        begin, end = end, min(2 * end, losses.shape[1] + 1)
    return means


def control_windows(length: int, window: int, half: int, fraction: float) -> int:
    """Number of windows that cover ``fraction`` of the sequence: at least 1, at most as many as fit."""
    return min(max(1, int(length * fraction) // half), 1 + (length - window) // half)


def standard_error(by_text: Tensor) -> float | None:
    return (by_text.std() / len(by_text) ** 0.5).item() if len(by_text) > 1 else None


def rounded(by_text: Tensor) -> list[float]:
    """Saved so that models can be compared text by text, with smaller errors than from the means alone."""
    return [round(value, 5) for value in by_text.tolist()]


# Deprecated names.
Texts = EvaluationTexts
texts_of = cut_documents
