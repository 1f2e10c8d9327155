"""``evaluate synthetic``: train a small model on a task at a short length, test it at up to 1000 times that length."""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from softplus_attention.charts.model import Block, Series, SeriesStyles
from softplus_attention.evaluation.measures.base import (
    CsvTable,
    Measure,
    Outcome,
    Result,
    Results,
    add_integer,
    add_output,
    by_length_table,
    check_at_least,
    check_output,
    measure_lengths_in_turn,
    parse_lengths,
    skipped_lines,
)
from softplus_attention.evaluation.measures.loaded import (
    LoadedResult,
    by_length,
    columns_by_length,
    common_training_length,
    notes,
)
from softplus_attention.utils.progress import Progress
from softplus_attention.utils.results import ResultFile
from softplus_attention.utils.untrusted import count_of, number_of, rows_of, text_of
from softplus_attention.validation import fail, fail_choice

if TYPE_CHECKING:
    from softplus_attention.evaluation.synthetic import Task
    from softplus_attention.training import TrainConfig

SIZES = ("layers", "width", "heads", "steps", "batch_size")
TASK_OPTIONS = {
    "symbols": "recall: symbols for keys and for values; copy: symbols of the string",
    "key_tokens": "recall: tokens per key (default: 1)",
    "value_tokens": "recall: tokens per value (default: 1)",
    "pairs": "recall: key-value pairs, the rest is noise (default: 8; 0: as many as fit)",
    "queries": "recall: queries per sequence (default: 16)",
    "writes": "flip-flop: expected writes per sequence (default: 4)",
}
PRESETS: dict[str, dict[str, Any]] = {
    # One local layer, one global layer without positions, powers learned as factors of log N: 2 minutes on one core.
    "mixed": {
        "layers": 2, "width": 64, "heads": 2, "steps": 1800, "batch_size": 32,
        "optimizer": "muon", "learning_rate": 1e-2, "window": 8, "global_every": 2, "power": "learned-log",
    },
    # Rotary positions in every layer, as in the paper: 1 minute on one core. Learns copy and flip-flop, not recall.
    "rotary": {"layers": 2, "width": 64, "heads": 2, "steps": 600, "batch_size": 64, "learning_rate": 2e-3},
}  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "attentions", nargs="+", metavar="ATTENTION", help="names from the catalogue: lssar, softmax, ..."
    )
    parser.add_argument(
        "--task", nargs="+", default=["recall"], metavar="TASK", help="recall, copy, flip-flop (default: recall)"
    )
    add_output(parser)
    add_integer(parser, "--train-length", "training length in tokens", 64)
    parser.add_argument("--lengths", help="as in `evaluate lengths` (default: 1 to 64x)")
    add_integer(parser, "--sequences", "maximum number of test sequences per length", 64)
    add_integer(parser, "--test-tokens", "approximate number of test tokens per length", 1 << 18)
    parser.add_argument(
        "--preset",
        default="mixed",
        help="mixed (local and global layers) or rotary (positions in every layer) (default: %(default)s)",
    )
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda (default: %(default)s)")
    replaced = parser.add_argument_group("overrides of the preset")
    for name in SIZES:
        add_integer(replaced, f"--{name.replace('_', '-')}", f"{name.replace('_', ' ')}, as in train")
    replaced.add_argument("--learning-rate", type=float, metavar="X", help="peak learning rate, as in train")
    replaced.add_argument("--optimizer", help="adamw or muon")
    add_integer(replaced, "--window", "with --global-every: window of the local layers")
    add_integer(replaced, "--global-every", "every N-th layer is global, without positions (see train)")
    replaced.add_argument("--power", help="for attentions with a second stage, as in train (learned-log, log:0.6, 15)")
    task = parser.add_argument_group("the task")
    for name, help_text in TASK_OPTIONS.items():
        add_integer(task, f"--{name.replace('_', '-')}", help_text)


def run(options: argparse.Namespace) -> Outcome:
    from softplus_attention.evaluation.synthetic import TASKS, make_task, training_config
    from softplus_attention.huggingface.loading import silence_transformers

    silence_transformers()
    check_output(options.output)
    if options.preset not in PRESETS:
        fail_choice("--preset", PRESETS, options.preset)
    check_at_least(options, sequences=1, test_tokens=1)
    given = {name: getattr(options, name) for name in (*SIZES, "learning_rate", "power", "optimizer")}
    given |= {name: getattr(options, name) for name in ("window", "global_every")}
    settings = PRESETS[options.preset] | {name: value for name, value in given.items() if value is not None}
    if unknown := set(options.task) - set(TASKS):
        fail("--task", f"one or more of {', '.join(TASKS)}", ", ".join(sorted(unknown)))
    lengths = parse_lengths(options.lengths or "1,2,4,8,16,32,64", options.train_length)
    folder, common = options.output, {"seed": options.seed, "device": options.device}
    configs = [
        (task, training_config(task, name, options.train_length, folder, settings, **common))
        for task in [make_task(name, **task_options(options, name, TASKS)) for name in options.task]
        for name in options.attentions
    ]
    tests = {"sequences": options.sequences, "test_tokens": options.test_tokens}
    return Outcome([measure_synthetic(task, config, lengths, folder, **tests) for task, config in configs])


def task_options(options: argparse.Namespace, name: str, tasks: Any) -> dict[str, Any]:
    """Options of the task ``name``; raises for an option that none of the chosen tasks has."""
    given = {option: getattr(options, option) for option in TASK_OPTIONS if getattr(options, option) is not None}
    has = {task: {field.name for field in dataclasses.fields(tasks[task])} for task in options.task}
    for option in given:
        if not any(option in known for known in has.values()):
            fail(f"--{option.replace('_', '-')}", f"left out for {', '.join(options.task)}", given[option])
    return {option: value for option, value in given.items() if option in has[name]}


def measure_synthetic(
    task: Task,
    config: TrainConfig,
    lengths: Sequence[int],
    folder: Path,
    *,
    sequences: int = 64,
    test_tokens: int = 1 << 18,
    progress: Progress | None = None,
) -> Result:
    """Test each length on at most ``sequences`` sequences and about ``test_tokens`` tokens, but on at least 4."""
    import torch

    from softplus_attention.evaluation.models import LoadedModel, ModelSpec
    from softplus_attention.evaluation.synthetic import accuracy_at, task_settings, train_model
    from softplus_attention.huggingface.loading import load_weights

    source, training = train_model(task, config)
    name = f"{task.name} {config.attention}" + (f" seed={config.seed}" if config.seed else "")
    model: Any = load_weights("MODEL", str(source), "auto")
    device = "cuda" if config.device != "cpu" and torch.cuda.is_available() else "cpu"
    loaded = LoadedModel(model.to(device).eval(), ModelSpec(str(source), name, {}), config.sequence_length)
    settings = {**task_settings(task), "sequences": sequences, "test_tokens": test_tokens, "seed": config.seed}
    settings["training"] = {
        name: value for name, value in config.as_dict().items() if name not in ("output", "data", "device")
    }
    place = str(source.relative_to(folder)) if source.is_relative_to(folder) else str(source)
    empty = {"task": task.name, "training": {**training, "model": place}, "lengths": [], "skipped": []}
    # The hash at the end of the run folder's name distinguishes trainings, also in file names.
    variant = Path(config.output).name.rpartition("--")[2]
    file = ResultFile(folder, "synthetic", loaded.description(), settings, loaded.model.device, empty, variant)

    def measure(length: int, title: str) -> Result:
        started = time.perf_counter()
        task.check(length)
        count = min(sequences, max(4, test_tokens // length))
        found = accuracy_at(loaded.model, task, length, count, config.seed)
        seconds = round(time.perf_counter() - started, 2)
        return {"length": length, "times": length / config.sequence_length, **found, "seconds": seconds}

    return measure_lengths_in_turn(file, lengths, name, progress or Progress(), measure, (ValueError,))


def table(results: Results) -> str:
    rows = {
        result["model"]["name"]: {e["length"]: f"{100 * e['accuracy']:.1f}" for e in result["results"]["lengths"]}
        for result in results
    }
    lines = by_length_table("answer tokens right, %", rows, results[0]["model"]["training_length"], width=8)
    return "\n".join([*lines, *skipped_lines(results)])


def csv_rows(results: Results) -> CsvTable:
    columns = ["length", "times", "sequences", "answers", "accuracy", "exact"]
    rows = [
        [task_label(result["results"]["task"], result["settings"]), result["model"]["attention"], result["variant"]]
        + [entry[column] for column in columns]
        for result in results
        for entry in result["results"]["lengths"]
    ]
    # "training" is the hash in the file name, which distinguishes training settings.
    return ["task", "attention", "training", *columns], rows


def task_label(task: str, settings: Mapping[str, Any]) -> str:
    """Title of the task, with the number of pairs for recall."""
    pairs = settings.get("pairs")
    if task != "recall" or pairs is None:
        return task
    return f"recall, {pairs} pairs" if pairs else "recall, as many pairs as fit"


TITLE = "Synthetic tasks"
QUANTITIES = (("accuracy", "answer tokens right"), ("exact", "sequences entirely right"))


def read(results: dict[str, Any]) -> tuple[str, list[dict[str, Any]]]:
    rows = rows_of(results, "lengths")
    for row in rows:
        count_of(row, "length"), number_of(row, "accuracy"), number_of(row, "exact")
    return text_of(results, "task"), sorted(rows, key=lambda row: row["length"])


def charts(members: Sequence[LoadedResult], styles: SeriesStyles, folder: str = "") -> list[Block]:
    blocks: list[Block] = []
    labels = [task_label(m.content[0], m.settings) for m in members]
    for label in dict.fromkeys(labels):
        those = [m for m, own in zip(members, labels, strict=True) if own == label]
        base = common_training_length(those) or trained_at(those)
        for name, title in QUANTITIES:
            columns = [columns_by_length(m.content[1], name) for m in those]
            series = [
                Series(m.label, lengths, values, None, styles.of(m.name))
                for m, (lengths, (values,)) in zip(those, columns, strict=True)
            ]
            caption = "Trained at 1x, tested beyond."
            blocks.append(by_length(f"{label}: {title}{folder}", title, series, caption, base, y_range=(0, 1)))
        blocks += notes(those)
    return blocks


def trained_at(members: Sequence[LoadedResult]) -> float | None:
    training = [m.results.get("training") for m in members]
    lengths = {number_of(record, "length") for record in training if isinstance(record, dict)}
    return lengths.pop() if len(lengths) == 1 else None


MEASURE = Measure(
    name="synthetic",
    place=3,
    help="train short and test long on associative recall, copy and flip-flop",
    description="Trains a small GPT with each attention on a task at a short length and tests it at multiples of that "
    "length. Reports the fraction of correct answer tokens. Stopped training resumes from its last checkpoint.",
    add_arguments=add_arguments,
    run=run,
    table=table,
    csv={"synthetic": csv_rows},
    title=TITLE,
    read=read,
    charts=charts,
    needs_model=False,
)
