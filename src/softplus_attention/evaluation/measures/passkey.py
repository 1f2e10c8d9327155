"""``evaluate passkey``: a number hidden in a long text, by length and depth."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from softplus_attention.charts.model import Block, HeatMap, HeatMaps, Number, Series, SeriesStyles
from softplus_attention.evaluation.layers import mean
from softplus_attention.evaluation.measures.base import (
    CsvTable,
    Measure,
    Outcome,
    Result,
    Results,
    add_integer,
    add_text_arguments,
    check_at_least,
    documents_for,
    measure_each,
    parse_lengths,
    resolve_models,
    skipped_lines,
    tokenizer_for,
)
from softplus_attention.evaluation.measures.loaded import (
    LENGTH,
    LoadedResult,
    by_length,
    common_training_length,
    length_names,
    notes,
)
from softplus_attention.utils.progress import Progress
from softplus_attention.utils.results import ResultFile
from softplus_attention.utils.untrusted import UnreadableError, count_of, number_of, rows_of
from softplus_attention.validation import fail

if TYPE_CHECKING:
    from softplus_attention.evaluation.models import LoadedModel
    from softplus_attention.evaluation.passkey import PasskeyPrompt
    from softplus_attention.evaluation.texts import Documents

MAX_WRONG = 3  # wrong answers saved per cell


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_text_arguments(parser, required=False)
    parser.add_argument("--lengths", default="1,2,4,8", help="as in `evaluate lengths` (default: %(default)s)")
    parser.add_argument(
        "--depths",
        default="0,0.25,0.5,0.75,1",
        help="positions of the key, from 0 (beginning) to 1 (end) (default: %(default)s)",
    )
    add_integer(parser, "--trials", "trials per length and depth", 10)
    add_prompt_arguments(parser, "sentences")


def add_prompt_arguments(parser: argparse.ArgumentParser, form: str) -> None:
    parser.add_argument(
        "--form",
        default=form,
        metavar="NAME",
        help="sentences (Mohtashami and Jaggi) or compact, which a small model can learn (default: %(default)s)",
    )
    parser.add_argument("--prompt", type=Path, metavar="FILE", help="JSON file that replaces parts of the prompt")
    parser.add_argument("--digits", type=int, metavar="N", help="digits of a passkey (default: 5)")
    parser.add_argument("--seed", type=int, default=0, help="seed of keys and positions (default: %(default)s)")


def run(options: argparse.Namespace) -> Outcome:
    from softplus_attention.evaluation.passkey import prompt_of

    check_at_least(options, trials=1)
    prompt, depths = prompt_of(options.form, options.prompt, options.digits), parse_depths(options.depths)
    specs, training_length = resolve_models(options)
    lengths = parse_lengths(options.lengths, training_length)

    def measure(loaded: LoadedModel) -> Result:
        has_text = options.data is not None or options.text is not None
        documents = documents_for(options, loaded) if has_text else None
        settings = {"documents": documents, "trials": options.trials, "seed": options.seed}
        tokenizer = tokenizer_for(options, loaded)
        return measure_passkey(loaded, tokenizer, prompt, lengths, depths, options.output, **settings)

    return measure_each(options, specs, training_length, measure)


def parse_depths(text: str) -> list[float]:
    try:
        depths = [float(part) for part in text.split(",")]
    except ValueError:
        depths = [-1.0]
    if not all(0 <= depth <= 1 for depth in depths):
        fail("--depths", "numbers from 0 (the beginning) to 1 (the end)", repr(text))
    return sorted(set(depths))


def measure_passkey(
    loaded: LoadedModel,
    tokenizer: Any,
    prompt: PasskeyPrompt,
    lengths: Sequence[int],
    depths: Sequence[float],
    folder: Path | None,
    *,
    documents: Documents | None = None,
    trials: int = 10,
    seed: int = 0,
    progress: Progress | None = None,
) -> Result:
    from softplus_attention.evaluation.memory import TooLongError, sequences_at_once
    from softplus_attention.evaluation.passkey import (
        Filler,
        TooShortError,
        is_right,
        make_trials,
        predict_keys,
        smallest_length,
    )
    from softplus_attention.evaluation.texts import check_ids, check_vocabulary, digest_tokens

    progress = progress or Progress()

    def encode(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]

    if documents is not None:
        check_vocabulary(documents, loaded.model)
    parts = (prompt.start, prompt.needle, prompt.question, prompt.answer, prompt.filler)
    check_ids(max((token for part in parts if part for token in encode(part)), default=0), loaded.model, "--tokenizer")
    texts = [] if documents is None or prompt.filler else list(documents.at_least(1))
    filler = Filler(prompt, encode, texts)
    settings = {"prompt": dataclasses.asdict(prompt), "trials": trials, "seed": seed}
    settings["tokens"] = digest_tokens(*(encode(part) for part in (prompt.needle, prompt.question, prompt.filler)))
    settings["text"] = documents.source if documents is not None and not prompt.filler else None
    empty = {"prompt": dataclasses.asdict(prompt), "cells": [], "skipped": []}
    file = ResultFile(folder, "passkey", loaded.description(), settings, loaded.model.device, empty)
    least = smallest_length(prompt, encode)
    for length in lengths:
        reason = f"the prompt alone has {least} tokens" if length < least else None
        if loaded.longest is not None and length > loaded.longest:
            reason = f"the model has positions for {loaded.longest} tokens"
        if reason is not None:
            file.results["skipped"].append({"length": length, "reason": reason})
            continue
        for depth in depths:
            title = f"{loaded.spec.name}, passkey in {length} tokens at depth {depth:g}"
            if file.has("cells", length=length, depth=depth):
                continue
            progress.update(title)
            try:
                tried = make_trials(prompt, encode, filler, length, depth, trials, seed)
                answers = predict_keys(loaded.model, tried, sequences_at_once(loaded.model, length))
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
            place = {"length": length, "times": length / loaded.training_length, "depth": depth}
            count = {"trials": trials, "correct": right, "accuracy": right / trials, "wrong": wrong[:MAX_WRONG]}
            file.add("cells", place | count, ["length", "depth"])
    progress.clear()
    return file.save(complete=True)


def table(results: Results) -> str:
    lines = []
    for result in results:
        cells = {(cell["length"], cell["depth"]): cell["accuracy"] for cell in result["results"]["cells"]}
        lengths, depths = sorted({length for length, _ in cells}), sorted({depth for _, depth in cells})
        lines.append(f"{result['model']['name']}: exact match, %")
        lines.append(f"{'depth':>8}" + "".join(f"{length:>9}" for length in lengths) + "  tokens")
        for depth in depths:
            values = [cells.get((length, depth)) for length in lengths]
            line = "".join(f"{'-' if value is None else f'{100 * value:.0f}':>9}" for value in values)
            lines.append(f"{100 * depth:>7.0f}%" + line)
        means = [[cells[key] for key in cells if key[0] == length] for length in lengths]
        lines.append(f"{'mean':>8}" + "".join(f"{100 * sum(m) / len(m):>9.0f}" for m in means))
        lines += [*skipped_lines([result]), ""]
    return "\n".join(lines).rstrip()


def csv_rows(results: Results) -> CsvTable:
    columns = ["length", "times", "depth", "trials", "correct", "accuracy"]
    rows = [
        [result["model"]["name"], *(cell[column] for column in columns)]
        for result in results
        for cell in result["results"]["cells"]
    ]
    return ["model", *columns], rows


TITLE = "Passkeys"
Cells = Mapping[tuple[int, float], Number]  # accuracy by length and depth


def read(results: dict[str, Any]) -> Cells:
    return accuracy_cells(rows_of(results, "cells"), lambda cell: number_of(cell, "accuracy"))


def accuracy_cells(rows: Sequence[dict[str, Any]], accuracy: Any) -> Cells:
    cells: dict[tuple[int, float], Number] = {}
    for cell in rows:
        depth = number_of(cell, "depth")
        if depth is None:
            raise UnreadableError("a cell without a `depth`")
        cells[count_of(cell, "length"), depth] = accuracy(cell)
    return cells


def charts(members: Sequence[LoadedResult], styles: SeriesStyles, folder: str = "") -> list[Block]:
    lengths = sorted({length for m in members for length, _ in m.content})
    if not lengths:
        return [*notes(members)]
    means = [mean_series(m.label, m.content, lengths, styles.of(m.name)) for m in members]
    blocks: list[Block] = [means_chart(f"Passkeys found, by length{folder}", means, common_training_length(members))]
    maps = [(m.label, depth_map(m.label, m.content, lengths, m.training_length)) for m in members]
    blocks.append(HeatMaps(f"Passkeys found, by depth{folder}", maps, DEPTH_CAPTION))
    return blocks + notes(members)


def mean_series(name: str, cells: Cells, lengths: Sequence[int], look: int) -> Series:
    depths = sorted({depth for _, depth in cells})
    return Series(name, lengths, [mean([cells.get((n, d)) for d in depths]) for n in lengths], None, look)


def means_chart(title: str, means: Sequence[Series], base: float | None) -> Block:
    return by_length(title, "accuracy, mean over depths", means, "Exact match of the whole key.", base, y_range=(0, 1))


DEPTH_CAPTION = "0% is the beginning of the text, 100% its end."


def depth_map(title: str, cells: Cells, lengths: Sequence[int], training_length: float | None) -> HeatMap:
    depths = sorted({depth for _, depth in cells})
    return HeatMap(
        title,
        LENGTH,
        "depth of the key",
        length_names(lengths, training_length),
        [f"{depth:.0%}" for depth in depths],
        [[cells.get((length, depth)) for length in lengths] for depth in depths],
        "accuracy",
        0,
        1,
        percent=True,
    )


MEASURE = Measure(
    name="passkey",
    place=2,
    help="find a number hidden in a long text: length by depth",
    description="Hides a random number in a text at each length and depth, asks for it, and reports the fraction of "
    "exact answers.",
    add_arguments=add_arguments,
    run=run,
    table=table,
    csv={"passkey": csv_rows},
    title=TITLE,
    read=read,
    charts=charts,
)
