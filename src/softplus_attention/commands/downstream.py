"""``softplus-attention evaluate downstream``: lm-evaluation-harness on our models and any other."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from softplus_attention.commands.evaluate import asked, measure_parser, open_model
from softplus_attention.validation import fail

if TYPE_CHECKING:
    from argparse import _SubParsersAction

# As in evaluation/harness.py, which needs transformers to be imported.
USUAL = "arc_easy,arc_challenge,hellaswag,piqa,sciq,mmlu,lambada_openai,summscreen"


def add_downstream(actions: _SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = measure_parser(
        actions,
        "downstream",
        "accuracy on ARC, HellaSwag, PIQA, SciQ, MMLU, LAMBADA, a summary task and others",
        "Runs lm-evaluation-harness (pip install 'softplus-attention[harness]') on the models. Data comes from the "
        "hub, or from --data: FOLDER/TASK/SPLIT.jsonl in the schema of each task (docs/evaluation.md).",
        run,
    )
    parser.add_argument(
        "--tasks",
        default=USUAL,
        help="names by comma: these, ruler, babilong or any of the harness (default: %(default)s)",
    )
    parser.add_argument("--data", type=Path, metavar="FOLDER", help="local files in place of the hub")
    parser.add_argument(
        "--include-path", type=Path, action="append", default=[], metavar="FOLDER", help="YAML files of more tasks"
    )
    parser.add_argument("--tokenizer", help="default: the one saved with each model")
    parser.add_argument("--limit", type=int, metavar="N", help="only the first N records of each task")
    parser.add_argument("--shots", type=int, metavar="N", help="examples in the prompt (default: the task's own)")
    parser.add_argument(
        "--batch-size", default="auto", help="a number, or auto: as memory allows (default: %(default)s)"
    )
    parser.add_argument(
        "--max-length", type=int, metavar="N", help="tokens of context before it is cut (default: from the config)"
    )
    parser.add_argument(
        "--lengths", default="", metavar="N,N", help="lengths of ruler's texts (default: 4096), or one of babilong's"
    )


def run(options: argparse.Namespace) -> int:
    names = list(dict.fromkeys(name.strip() for name in options.tasks.split(",") if name.strip()))
    if not names:
        fail("--tasks", "at least one name", repr(options.tasks))
    for name in ("limit", "max_length"):
        if getattr(options, name) is not None and getattr(options, name) < 1:
            fail(f"--{name.replace('_', '-')}", "at least 1", getattr(options, name))
    if options.shots is not None and options.shots < 0:
        fail("--shots", "0 or more", options.shots)
    lengths = whole_numbers("--lengths", options.lengths)
    batch_size = (
        options.batch_size if options.batch_size == "auto" else whole_numbers("--batch-size", options.batch_size)[0]
    )

    import lm_eval  # noqa: F401  missing, it is named before models are read

    from softplus_attention.evaluation import harness
    from softplus_attention.evaluation.results import file_name, write_csv
    from softplus_attention.huggingface.loading import load_tokenizer

    harness.quiet()
    data = [] if options.data is None else harness.local_data(options.data, names, options.shots or 0)
    requests, training_length = asked(options)
    results = []
    for request in requests:
        tokenizer = load_tokenizer(options.tokenizer or request.source)
        opened = open_model(options, request, training_length)
        on_cpu = opened.model.device.type == "cpu"
        words = {"shots": options.shots, "limit": options.limit, "max_length": options.max_length, "lengths": lengths}
        results.append(
            harness.measure_downstream(
                opened,
                tokenizer,
                names,
                options.output,
                data=data,
                include=options.include_path,
                batch_size=8 if on_cpu and batch_size == "auto" else batch_size,
                **words,
            )
        )
    print(harness.table_of(results))
    written = [options.output / file_name(harness.MEASURE, result["model"]["name"]) for result in results]
    for path in [*written, write_csv(options.output / "downstream.csv", *harness.csv_rows(results))]:
        print(f"written: {path}")
    return 0


def whole_numbers(name: str, text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not all(part.isdecimal() and int(part) > 0 for part in parts) or (not parts and name == "--batch-size"):
        fail(name, "whole numbers above 0", repr(text))
    return [int(part) for part in parts]
