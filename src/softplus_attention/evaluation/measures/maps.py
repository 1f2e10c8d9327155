"""``evaluate maps``: the attention weights of one text, one figure per model."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from softplus_attention.charts.model import AttentionMaps, Block, SeriesStyles
from softplus_attention.evaluation.measures.base import (
    CsvTable,
    Measure,
    Outcome,
    Result,
    Results,
    add_integer,
    check_at_least,
    measure_each,
    resolve_models,
    tokenizer_for,
)
from softplus_attention.evaluation.measures.loaded import LoadedResult
from softplus_attention.utils.results import ResultFile
from softplus_attention.utils.untrusted import UnreadableError, count_of, number, read_option, rows_of, text_of, typed
from softplus_attention.validation import fail

if TYPE_CHECKING:
    from softplus_attention.evaluation.models import LoadedModel


def add_arguments(parser: argparse.ArgumentParser) -> None:
    text = parser.add_mutually_exclusive_group(required=True)
    text.add_argument("--text", help="the text to map")
    text.add_argument("--file", type=Path, help="a UTF-8 file with the text")
    parser.add_argument("--tokenizer", help="default: the one saved with each model")
    add_integer(parser, "--map-size", "maximum number of cells per side", 64)


def run(options: argparse.Namespace) -> Outcome:
    check_at_least(options, map_size=2)
    text = options.text if options.file is None else read_option("--file", options.file)
    specs, training_length = resolve_models(options)

    def measure(loaded: LoadedModel) -> Result:
        return measure_maps(loaded, tokenizer_for(options, loaded), text, options.output, size=options.map_size)

    return measure_each(options, specs, training_length, measure)


def measure_maps(loaded: LoadedModel, tokenizer: Any, text: str, folder: Path | None, *, size: int = 64) -> Result:
    import torch

    from softplus_attention.evaluation.inside import attention_maps
    from softplus_attention.evaluation.memory import sequences_at_once
    from softplus_attention.evaluation.texts import check_ids, digest_tokens

    ids = torch.as_tensor(tokenizer(text, verbose=False)["input_ids"])
    if len(ids) < 2:
        fail("--text", "a text of at least 2 tokens", repr(text))
    if loaded.longest is not None and len(ids) > loaded.longest:
        fail("--text", f"at most {loaded.longest} tokens, the positions of {loaded.spec.name}", len(ids))
    check_ids(int(ids.max()), loaded.model, "--tokenizer")
    sequences_at_once(loaded.model, len(ids))
    settings = {"text": text, "size": size, "tokens": digest_tokens(ids.tolist())}
    file = ResultFile(folder, "maps", loaded.description(), settings, loaded.model.device, {})
    if "maps" not in file.results:
        per_cell, maps = attention_maps(loaded.model, ids, size)
        cells = [tokenizer.decode(part.tolist()) for part in ids.split(per_cell)]
        file.results = {"text": text, "tokens": cells, "tokens_per_cell": per_cell, "size": len(cells), "maps": maps}
    return file.save(complete=True)


def table(results: Results) -> str:
    lines = []
    for result in results:
        maps = result["results"]
        layers = len({found["layer"] for found in maps["maps"]})
        cells = f"{maps['size']} cells of {maps['tokens_per_cell']} tokens"
        lines.append(f"{result['model']['name']}: {len(maps['maps'])} maps of {layers} layers, {cells}")
    return "\n".join(lines)


def csv_rows(results: Results) -> CsvTable:
    """Nonzero weights; the text of each cell is in the JSON file."""
    rows = [
        [result["model"]["name"], found["layer"], found["head"], query, key, weight]
        for result in results
        for found in result["results"]["maps"]
        for query, line in enumerate(found["weights"])
        for key, weight in enumerate(line)
        if weight
    ]
    return ["model", "layer", "head", "query", "key", "weight"], rows


TITLE = "Attention explorer"


def read(results: dict[str, Any]) -> tuple[str, list[str], int, dict[tuple[int, int], list[list[float]]]]:
    tokens = typed(results, "tokens", list, "a list")
    maps = {}
    for entry in rows_of(results, "maps"):
        rows = typed(entry, "weights", list, "a list")
        for query, row in enumerate(rows):
            if not isinstance(row, list) or len(row) != query + 1:
                raise UnreadableError(f"row {query} of `weights` must have {query + 1} numbers")
            if any(number(weight, "weights") is None or weight < 0 for weight in row):
                raise UnreadableError(f"row {query} of `weights` must have numbers >= 0")
        if len(rows) != len(tokens):
            raise UnreadableError(f"`weights` must have a row for each of the {len(tokens)} tokens, got {len(rows)}")
        maps[count_of(entry, "layer"), count_of(entry, "head")] = rows
    if not maps:
        raise UnreadableError("`maps` is empty")
    return text_of(results, "text"), [str(token) for token in tokens], count_of(results, "tokens_per_cell"), maps


def charts(members: Sequence[LoadedResult], styles: SeriesStyles, folder: str = "") -> list[Block]:
    found: list[Block] = []
    for m in members:
        text, tokens, cell, maps = m.content
        name = m.label + folder
        caption = f"Rows are queries, columns are keys; {len(maps)} heads."
        found.append(AttentionMaps(f"Attention maps: {name}", name, text, tokens, cell, maps, caption))
    return found


MEASURE = Measure(
    name="maps",
    place=5,
    help="the attention maps of a text, models side by side",
    description="Writes the final weights of every layer and head for one text, for the report's attention explorer.",
    add_arguments=add_arguments,
    run=run,
    table=table,
    csv={"maps": csv_rows},
    title=TITLE,
    read=read,
    charts=charts,
)
