"""``softplus-attention evaluate downstream``: lm-evaluation-harness on our models and any other."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from softplus_attention.cli.measuring import asked, finish, measure_each, measure_parser
from softplus_attention.validation import fail

if TYPE_CHECKING:
    from argparse import _SubParsersAction

    from softplus_attention.evaluation.models import Opened

# As in evaluation/harness_data.py, which needs transformers to be imported.
USUAL = "arc_easy,arc_challenge,hellaswag,piqa,sciq,mmlu,lambada_openai,summscreen"


def add_downstream(actions: _SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = measure_parser(
        actions,
        "downstream",
        "accuracy on ARC, HellaSwag, PIQA, SciQ, MMLU, LAMBADA, a summary task and others",
        "Runs lm-evaluation-harness (pip install -e '.[harness]') on the models. Data comes from the "
        "hub, or from --data: FOLDER/TASK/SPLIT.jsonl in the schema of each task (docs/evaluation.md). A task that "
        "fails is left out with its reason, and the exit status is then 1.",
        run,
    )
    parser.add_argument(
        "--tasks",
        help="names by comma: ruler, ruler's and babilong's parts, babilong, or any of the harness (default: "
        f"{USUAL}, the last only with --data)",
    )
    parser.add_argument(
        "--data", type=Path, metavar="FOLDER", help="local files in place of the hub, for every task that is named"
    )
    parser.add_argument(
        "--include-path", type=Path, action="append", default=[], metavar="FOLDER", help="YAML files of more tasks"
    )
    parser.add_argument("--tokenizer", help="default: the one saved with each model")
    parser.add_argument("--limit", type=int, metavar="N", help="only the first N records of each task")
    parser.add_argument("--shots", type=int, metavar="N", help="examples in the prompt (default: the task's own)")
    parser.add_argument(
        "--batch-size", default="auto", help="at most, or auto; memory can make it smaller (default: %(default)s)"
    )
    parser.add_argument(
        "--max-length", type=int, metavar="N", help="tokens of context before it is cut (default: from the config)"
    )
    parser.add_argument(
        "--lengths", default="", metavar="N,N", help="lengths of ruler's texts (default: 4096), or one of babilong's"
    )


def run(options: argparse.Namespace) -> int:
    for name in ("limit", "max_length"):
        if getattr(options, name) is not None and getattr(options, name) < 1:
            fail(f"--{name.replace('_', '-')}", "at least 1", getattr(options, name))
    if options.shots is not None and options.shots < 0:
        fail("--shots", "0 or more", options.shots)
    names = names_in(options)
    words: dict[str, Any] = {"shots": options.shots, "limit": options.limit, "max_length": options.max_length}
    words["lengths"] = whole_numbers("--lengths", options.lengths)
    words["batch_size"] = None if options.batch_size == "auto" else whole_numbers("--batch-size", options.batch_size)[0]

    import lm_eval  # noqa: F401  missing, it is named before models are read

    from softplus_attention.evaluation import harness
    from softplus_attention.huggingface.loading import load_tokenizer

    harness.quiet()
    harness.check_lengths(names, words["lengths"], options.data is not None)
    words |= {"data": [], "include": options.include_path}
    if options.data is not None:
        words["data"] = harness.local_data(options.data, names, options.shots, words["lengths"])
        words["texts"] = harness.ruler_texts(options.data, list(harness.parts_of(names)))
    harness.check_names(names, options.include_path, words["data"])
    requests, training_length = asked(options)

    def measure(opened: Opened) -> dict[str, Any]:
        tokenizer = load_tokenizer(options.tokenizer or opened.request.source, options.trust_remote_code)
        return harness.measure_downstream(opened, tokenizer, names, options.output, **words)

    measured = measure_each(options, requests, training_length, measure)
    print(harness.table_of(measured.results))
    finish(options.output, harness.MEASURE, measured.results)
    return 1 if any(result["results"]["skipped"] for result in measured.results) else measured.status


def names_in(options: argparse.Namespace) -> list[str]:
    if options.tasks is None:
        usual = USUAL.split(",")
        if options.data is None:
            print(f"{usual[-1]} is left out: it has no public set, and is read from --data", file=sys.stderr)
        return usual if options.data is not None else usual[:-1]
    names = list(dict.fromkeys(name.strip() for name in options.tasks.split(",") if name.strip()))
    if not names:
        fail("--tasks", "at least one name", repr(options.tasks))
    return names


def whole_numbers(name: str, text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not all(part.isdecimal() and int(part) > 0 for part in parts) or (not parts and name == "--batch-size"):
        fail(name, "whole numbers above 0", repr(text))
    return [int(part) for part in parts]
