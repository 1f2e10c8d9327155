"""``evaluate inside`` and ``evaluate maps``: what the attention does, by length, layer and head."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from softplus_attention.evaluation import layers
from softplus_attention.evaluation.inside import TILE, WORDS, attention_maps, look_inside
from softplus_attention.evaluation.layers import layer_groups
from softplus_attention.evaluation.length_measure import possible_lengths
from softplus_attention.evaluation.lengths import texts_of
from softplus_attention.evaluation.memory import TooLongError, is_out_of_memory, sequences_at_once
from softplus_attention.evaluation.models import Opened
from softplus_attention.evaluation.texts import Documents, check_ids, check_vocabulary, digest_of
from softplus_attention.utils.progress import Progress
from softplus_attention.utils.results import ResultFile
from softplus_attention.validation import fail

# Rows of one head that exist at a time: blocks of a batch share the memory of the weights.
TOKENS_AT_ONCE = 4096
# Columns of the table: log N, then those of WORDS.
HEADS = ("log N", "stage 1", "frozen", "final", "first key", "eff. keys", "zeros", "empty tiles")


def measure_inside(
    opened: Opened,
    documents: Documents,
    lengths: Sequence[int],
    folder: Path,
    *,
    sequences: int = 4,
    blocks: int = 8,
    progress: Progress | None = None,
) -> dict[str, Any]:
    progress = progress or Progress()
    model, trained = opened.model, opened.training_length
    check_vocabulary(documents, model)
    found, skipped, longest = possible_lengths(lengths, documents.longest, opened.longest)
    texts = texts_of(documents.at_least(longest), longest, sequences)
    settings = {"data": documents.source, "longest": longest, "sequences": len(texts.rows), "blocks": blocks}
    empty = {"rows": f"of the last half of each sequence, {blocks} blocks of {TILE} at most", "lengths": []}
    file = ResultFile(folder, "inside", opened.description(), settings, model.device, empty)
    file.results["skipped"] = skipped
    for length in found:
        title = f"{opened.request.name}, inside at {length} tokens"
        if file.has("lengths", length=length):
            progress.say(f"{title}: found in {file.path}")
            continue
        progress.update(title)
        # The beginnings of the same texts, as many at every length.
        rows = texts.rows[:, :length]
        started = time.perf_counter()
        try:
            at_once = min(sequences_at_once(model, length, TOKENS_AT_ONCE), len(rows))
            inside = look_inside(model, rows, blocks=blocks, frozen_length=trained, at_once=at_once)
        except (RuntimeError, MemoryError, TooLongError) as error:
            if not isinstance(error, TooLongError) and not is_out_of_memory(error):
                raise
            progress.say(f"{title}: {str(error).splitlines()[0]}")
            file.results["skipped"].append({"length": length, "reason": str(error).splitlines()[0]})
            continue
        looked_at = sum(end - first for first, end in inside.blocks)
        entry = {
            "length": length,
            "times": length / trained,
            "sequences": len(rows),
            "rows": looked_at * len(rows),
            "log_keys": inside.log_keys,
            "heads": inside.heads(),
            "seconds": round(time.perf_counter() - started, 2),
        }
        file.add("lengths", entry, ["length"])
    progress.clear()
    return file.save(complete=True)


def measure_maps(opened: Opened, tokenizer: Any, text: str, folder: Path, *, size: int = 64) -> dict[str, Any]:
    ids = torch.as_tensor(tokenizer(text, verbose=False)["input_ids"])
    if len(ids) < 2:
        fail("--text", "a text of at least 2 tokens", repr(text))
    if opened.longest is not None and len(ids) > opened.longest:
        fail("--text", f"at most {opened.longest} tokens, for which {opened.request.name} has positions", len(ids))
    check_ids(int(ids.max()), opened.model, "--tokenizer")
    sequences_at_once(opened.model, len(ids))
    settings = {"text": text, "size": size, "tokens": digest_of(ids.tolist())}
    file = ResultFile(folder, "maps", opened.description(), settings, opened.model.device, {})
    if "maps" not in file.results:
        per_cell, maps = attention_maps(opened.model, ids, size)
        cells = [tokenizer.decode(part.tolist()) for part in ids.split(per_cell)]
        words = {"text": text, "tokens": cells, "tokens_per_cell": per_cell, "size": len(cells), "maps": maps}
        file.results = words
    return file.save(complete=True)


def table_of(results: Sequence[dict[str, Any]]) -> str:
    """Means over the layers that see as many keys, and their heads; each layer and head is in the files."""
    groups = [layer_groups(result["results"]["lengths"]) for result in results]
    names = [
        [", ".join(filter(None, (result["model"]["name"], group.words))) for group in own]
        for result, own in zip(results, groups, strict=True)
    ]
    width = max(20, *(len(name) + 2 for own in names for name in own))
    head = "".join(f"{word:>12}" for word in HEADS)
    lines = ["means over rows, layers and heads; entropies in nats", f"{'':<{width}}length{head}"]
    for result, own, titles in zip(results, groups, names, strict=True):
        for group, title in zip(own, titles, strict=True):
            for number, entry in enumerate(result["results"]["lengths"]):
                values = [layers.log_keys(entry, group)]
                values += [layers.mean_of(entry, group, word) for word in WORDS if word != "mass"]
                cells = "".join(f"{'-' if value is None else f'{value:.4g}':>12}" for value in values)
                lines.append(f"{title if number == 0 else '':<{width}}{entry['length']:>6}{cells}")
    for result in results:
        lines += [
            f"left out: {result['model']['name']} at {skip['length']}: {skip['reason']}"
            for skip in result["results"]["skipped"]
        ]
    return "\n".join(lines)


def csv_rows(results: Sequence[dict[str, Any]]) -> tuple[list[str], list[list[Any]]]:
    rows = []
    for result in results:
        for entry in result["results"]["lengths"]:
            for head in entry["heads"]:
                log_keys = layers.log_keys_of(entry, head)
                place = [result["model"]["name"], entry["length"], log_keys, head["layer"], head["head"]]
                rows.append([*place, *(head[word] for word in WORDS)])
    return ["model", "length", "log_keys", "layer", "head", *WORDS], rows
