"""``evaluate lengths``: loss by length and the control of one model, length by length, kept as it is found."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from softplus_attention.evaluation.lengths import Texts, by_position, losses_of, texts_of
from softplus_attention.evaluation.loss import TokenLoss
from softplus_attention.evaluation.memory import TooLongError, sequences_at_once
from softplus_attention.evaluation.models import Opened
from softplus_attention.evaluation.texts import Documents, check_vocabulary
from softplus_attention.utils.progress import Progress
from softplus_attention.utils.results import ResultFile
from softplus_attention.validation import fail

MULTIPLES = (1, 2, 4, 8, 16, 32, 64)
CONTROL_SHARE = 0.25  # of a sequence, at its end: what the control predicts twice


def lengths_in(text: str, training_length: int) -> list[int]:
    """Tokens from "1,2,4" or "2x,4x" (times the training length) or "512,1024" (tokens), in rising order.

    A sequence of one token has no loss, so a list that begins with 1 cannot mean tokens. Another could mean either
    where all of it is small and below the training length: it is refused.
    """
    expected = "whole numbers such as 1,2,4 or 1x,8x,64x (times the training length) or 512,1024 (tokens)"
    lengths = []
    parts = [part.strip() for part in text.split(",")]
    multiples = parts[0] == "1"
    for part in parts:
        number = part.removesuffix("x")
        if not number.isdecimal() or int(number) < 1:
            fail("--lengths", expected, repr(text))
        lengths.append(int(number) * (training_length if multiples or part.endswith("x") else 1))
    if max(lengths) < training_length and max(lengths) <= max(MULTIPLES):
        times = ",".join(f"{part}x" for part in parts)
        longest = f"{training_length} tokens, the training length, or more"
        fail("--lengths", f"{times} for multiples of the training length, or up to {longest}", repr(text))
    if min(lengths) < 2:
        fail("--lengths", "of at least 2 tokens each", repr(text))
    return sorted(set(lengths))


def possible_lengths(
    lengths: Sequence[int], longest: int, most_positions: int | None = None
) -> tuple[list[int], list[dict[str, Any]], int]:
    """The lengths that some document has and the model has positions for, the others, each with the reason, and the
    longest that some document has: what every model is measured on, however many positions it has."""
    in_documents = [length for length in lengths if length <= longest]
    bounds = {longest: f"the longest document has {longest} tokens"}
    if most_positions is not None:
        bounds[most_positions] = f"the model has positions for {most_positions} tokens"
    most = min(bounds)
    skipped = [{"length": length, "reason": bounds[most]} for length in lengths if length > most]
    found = [length for length in lengths if length <= most]
    if not found:
        fail("--lengths", f"at most {most} ({bounds[most]})", min(lengths))
    for length in found:
        if in_documents[-1] % length:
            fail("--lengths", f"divisors of the longest that the documents allow, {in_documents[-1]}", length)
    return found, skipped, in_documents[-1]


def measure_lengths(
    opened: Opened,
    documents: Documents,
    lengths: Sequence[int],
    folder: Path,
    *,
    sequences: int | None = 32,
    control: bool = True,
    control_share: float = CONTROL_SHARE,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """The result file's content; lengths that an earlier run finished with the same settings are not run again."""
    if not 0 <= control_share <= 1:
        fail("control_share", "a share of the sequence, from 0 to 1", control_share)
    progress = progress or Progress()
    model, training_length = opened.model, opened.training_length
    check_vocabulary(documents, model)
    found, skipped, longest = possible_lengths(lengths, documents.longest, opened.longest)
    texts = texts_of(documents.at_least(longest), longest, sequences)
    settings = {"data": documents.source, "longest": longest, "sequences": len(texts.rows), "control": control}
    settings |= {"first_length": found[0], "control_share": control_share}
    file = ResultFile(folder, "lengths", opened.description(), settings, model.device, {"lengths": [], "skipped": []})
    file.results |= {
        "documents": [{"length": length, "long_enough": documents.long_enough(length)} for length in lengths],
        "used": {"documents": texts.documents, "sequences": len(texts.rows), "longest": texts.longest},
        "skipped": skipped,
    }
    measuring = Measuring(model, TokenLoss(model), texts, found[0], training_length, control, control_share, progress)
    for length in found:
        title = f"{opened.request.name}, {length} tokens"
        if file.has("lengths", length=length):
            progress.say(f"{title}: found in {file.path}")
            continue
        progress.update(f"{title}: begun")
        try:
            entry = measuring.at(length, title)
        except TooLongError as reason:
            progress.say(f"{title}: {reason}")
            file.results["skipped"].append({"length": length, "reason": str(reason)})
            continue
        file.add("lengths", entry, ["length"])
    progress.clear()
    return file.save(complete=True)


@dataclass(frozen=True)
class Measuring:
    """One model on one set of texts."""

    model: Any
    token_loss: Any
    texts: Texts
    first: int
    training_length: int
    control: bool
    control_share: float
    progress: Progress

    def at(self, length: int, title: str) -> dict[str, Any]:
        started = time.perf_counter()
        rows = self.texts.cut(length)
        losses = self.losses(rows, title)
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
            "control": self.control_of(rows, losses, f"{title}, control") if self.control else None,
            "seconds": round(time.perf_counter() - started, 2),
        }

    def control_of(self, rows: Tensor, losses: Tensor, title: str) -> dict[str, Any] | None:
        """The end of each sequence, which the full context has just been measured on, in windows of a training length;
        what is compared is the second half of each."""
        window, length = self.training_length, rows.shape[1]
        if length <= window:
            return None
        half = max(1, window // 2)
        count = control_windows(length, window, half, self.control_share)
        ends = [length - half * place for place in reversed(range(count))]
        windows = torch.stack([rows[:, end - window : end] for end in ends], 1).flatten(0, 1)
        full = losses[:, -count * half :]
        short = self.losses(windows, title)[:, -half:].reshape(len(rows), -1)
        # By themselves also the last of them, which alone have the whole length behind them.
        last = self.compared(full[:, -half:], short[:, -half:])
        return {"window": window, "first": length - count * half, **self.compared(full, short), "last": last}

    def compared(self, full: Tensor, short: Tensor) -> dict[str, Any]:
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
        """Means: sequences of one text belong together."""
        return losses.double().mean(1).view(len(self.texts.rows), -1).mean(1)

    def losses(self, rows: Tensor, title: str) -> Tensor:
        def step(done: int, of: int) -> None:
            self.progress.update(f"{title}: {100 * done // of}%")

        tokens = sequences_at_once(self.model, rows.shape[1]) * rows.shape[1]
        return losses_of(self.model, rows, batch_tokens=tokens, progress=step, losses=self.token_loss)


def control_windows(length: int, window: int, half: int, share: float) -> int:
    """As many as cover that share, and one at least; the first of them begins within the sequence."""
    return min(max(1, int(length * share) // half), 1 + (length - window) // half)


def standard_error(by_text: Tensor) -> float | None:
    return (by_text.std() / len(by_text) ** 0.5).item() if len(by_text) > 1 else None


def rounded(by_text: Tensor) -> list[float]:
    """For comparisons of models text by text, whose errors are smaller than those of each."""
    return [round(value, 5) for value in by_text.tolist()]


def number(value: float | None, sign: str = "") -> str:
    return "no number" if value is None else f"{value:{sign}.4f}"


def table_of(results: Sequence[dict[str, Any]]) -> str:
    """Loss of each model by length, and under it what the context beyond the training length is worth."""
    lengths = sorted({entry["length"] for result in results for entry in result["results"]["lengths"]})
    width = max(24, *(len(result["model"]["name"]) + 2 for result in results))
    lines = [f"{'loss (nats per token)':<{width}}" + "".join(f"{length:>10}" for length in lengths) + "  tokens"]
    trained = results[0]["model"]["training_length"]
    lines.append(" " * width + "".join(f"{length / trained:>9.4g}x" for length in lengths))
    for result in results:
        losses = {entry["length"]: number(entry["loss"]) for entry in result["results"]["lengths"]}
        lines.append(f"{result['model']['name']:<{width}}" + "".join(f"{losses.get(n, '-'):>10}" for n in lengths))
    controls = [result for result in results if any(entry["control"] for entry in result["results"]["lengths"])]
    if controls:
        lines.append(f"\ngain by the context beyond {trained} tokens, on the same target tokens (negative: it hurts)")
    for result in controls:
        gains = {e["length"]: number(e["control"]["gain"], "+") for e in result["results"]["lengths"] if e["control"]}
        lines.append(f"{result['model']['name']:<{width}}" + "".join(f"{gains.get(n, '-'):>10}" for n in lengths))
    used = results[0]["results"]["used"]
    lines.append(
        f"\n{used['sequences']} texts of {used['longest']} tokens, from the {used['documents']} documents that are "
        "long enough"
    )
    reasons: dict[str, list[str]] = {}
    for result in results:
        for skip in result["results"]["skipped"]:
            reasons.setdefault(skip["reason"], []).append(f"{result['model']['name']} at {skip['length']}")
    lines += [f"left out: {', '.join(which)}: {reason}" for reason, which in reasons.items()]
    return "\n".join(lines)


def csv_rows(results: Sequence[dict[str, Any]]) -> tuple[list[str], list[list[Any]]]:
    head = ["model", "attention", "length", "times", "loss", "standard_error", "full_context", "short_context", "gain"]
    rows = []
    for result in results:
        for entry in result["results"]["lengths"]:
            control = entry["control"] or {}
            values = [entry[word] for word in ("length", "times", "loss", "standard_error")]
            values += [control.get(word) for word in ("full", "short", "gain")]
            rows.append([result["model"]["name"], result["model"]["attention"], *values])
    return head, rows


def position_rows(results: Sequence[dict[str, Any]]) -> tuple[list[str], list[list[Any]]]:
    rows = [
        [result["model"]["name"], entry["length"], part["first"], part["end"], part["loss"]]
        for result in results
        for entry in result["results"]["lengths"]
        for part in entry["positions"]
    ]
    return ["model", "length", "first_position", "end_position", "loss"], rows
