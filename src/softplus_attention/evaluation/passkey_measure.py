"""``evaluate passkey`` and ``evaluate passkey-data``."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from softplus_attention.evaluation.memory import TooLongError, sequences_at_once
from softplus_attention.evaluation.models import Opened
from softplus_attention.evaluation.passkey import (
    Filler,
    PasskeyPrompt,
    TooShortError,
    answers_of,
    is_right,
    smallest_length,
    trials_of,
)
from softplus_attention.evaluation.texts import Documents, check_ids, check_vocabulary, digest_of
from softplus_attention.utils.files import replacing
from softplus_attention.utils.progress import Progress
from softplus_attention.utils.results import ResultFile
from softplus_attention.validation import fail

MOST_WRONG = 3


def depths_in(text: str) -> list[float]:
    try:
        depths = [float(part) for part in text.split(",")]
    except ValueError:
        depths = [-1.0]
    if not all(0 <= depth <= 1 for depth in depths):
        fail("--depths", "numbers from 0 (the beginning) to 1 (the end)", repr(text))
    return sorted(set(depths))


def measure_passkey(
    opened: Opened,
    tokenizer: Any,
    prompt: PasskeyPrompt,
    lengths: Sequence[int],
    depths: Sequence[float],
    folder: Path,
    *,
    documents: Documents | None = None,
    trials: int = 10,
    seed: int = 0,
    progress: Progress | None = None,
) -> dict[str, Any]:
    progress = progress or Progress()

    def encode(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]

    if documents is not None:
        check_vocabulary(documents, opened.model)
    parts = (prompt.start, prompt.needle, prompt.question, prompt.answer, prompt.filler)
    check_ids(max((token for part in parts if part for token in encode(part)), default=0), opened.model, "--tokenizer")
    texts = [] if documents is None or prompt.filler else list(documents.at_least(1))
    filler = Filler(prompt, encode, texts)
    settings = {"prompt": dataclasses.asdict(prompt), "trials": trials, "seed": seed}
    settings["tokens"] = digest_of(*(encode(part) for part in (prompt.needle, prompt.question, prompt.filler)))
    settings["text"] = documents.source if documents is not None and not prompt.filler else None
    empty = {"prompt": dataclasses.asdict(prompt), "cells": [], "skipped": []}
    file = ResultFile(folder, "passkey", opened.description(), settings, opened.model.device, empty)
    least = smallest_length(prompt, encode)
    for length in lengths:
        reason = f"the prompt alone has {least} tokens" if length < least else None
        if opened.longest is not None and length > opened.longest:
            reason = f"the model has positions for {opened.longest} tokens"
        if reason is not None:
            file.results["skipped"].append({"length": length, "reason": reason})
            continue
        for depth in depths:
            title = f"{opened.request.name}, pass key in {length} tokens at depth {depth:g}"
            if file.has("cells", length=length, depth=depth):
                continue
            progress.update(title)
            try:
                tried = trials_of(prompt, encode, filler, length, depth, trials, seed)
                answers = answers_of(opened.model, tried, sequences_at_once(opened.model, length))
            except (TooShortError, TooLongError) as error:
                progress.say(f"{title}: {error}")
                file.results["skipped"].append({"length": length, "reason": str(error)})
                break
            wrong = [
                {"key": trial.key, "predicted": tokenizer.decode(answer)}
                for trial, answer in zip(tried, answers, strict=True)
                if not is_right(trial, answer)
            ]
            right = trials - len(wrong)
            place = {"length": length, "times": length / opened.training_length, "depth": depth}
            count = {"trials": trials, "correct": right, "accuracy": right / trials, "wrong": wrong[:MOST_WRONG]}
            file.add("cells", place | count, ["length", "depth"])
    progress.clear()
    return file.save(complete=True)


def table_of(results: Sequence[dict[str, Any]]) -> str:
    lines = []
    for result in results:
        cells = {(cell["length"], cell["depth"]): cell["accuracy"] for cell in result["results"]["cells"]}
        lengths, depths = (sorted({key[place] for key in cells}) for place in (0, 1))
        lines.append(f"{result['model']['name']}: exact match, %")
        lines.append(f"{'depth':>8}" + "".join(f"{length:>9}" for length in lengths) + "  tokens")
        for depth in depths:
            values = [cells.get((length, depth)) for length in lengths]
            shown = "".join(f"{'-' if value is None else f'{100 * value:.0f}':>9}" for value in values)
            lines.append(f"{100 * depth:>7.0f}%" + shown)
        means = [[cells[key] for key in cells if key[0] == length] for length in lengths]
        lines.append(f"{'mean':>8}" + "".join(f"{100 * sum(m) / len(m):>9.0f}" for m in means))
        lines += [f"left out: {skip['length']} tokens: {skip['reason']}" for skip in result["results"]["skipped"]]
        lines.append("")
    return "\n".join(lines).rstrip()


def csv_rows(results: Sequence[dict[str, Any]]) -> tuple[list[str], list[list[Any]]]:
    words = ["length", "times", "depth", "trials", "correct", "accuracy"]
    rows = [
        [result["model"]["name"], *(cell[word] for word in words)]
        for result in results
        for cell in result["results"]["cells"]
    ]
    return ["model", *words], rows


def write_documents(path: Path, documents: Iterable[str]) -> int:
    """A .jsonl file for `softplus-attention data prepare`; gives the number of characters written."""
    characters = 0
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as file:
        for text in documents:
            file.write((json.dumps({"text": text}) + "\n").encode())
            characters += len(text)
    return characters
