"""``softplus-attention evaluate``: how well models work on long sequences, and why."""

from __future__ import annotations

import argparse
from pathlib import Path

from softplus_attention.cli.options import add_trust
from softplus_attention.evaluation.measures import measures
from softplus_attention.evaluation.measures.base import RESUME, add_integer, add_old_name, check_at_least
from softplus_attention.evaluation.measures.passkey import add_prompt_arguments
from softplus_attention.utils import DOCS


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "evaluate",
        help="measure loss by length, passkey retrieval, synthetic tasks and attention weights",
        description="Compares models. Every measure prints a table and writes JSON, CSV and figures. "
        f"{RESUME} {DOCS}/evaluation",
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="MEASURE")
    for measure in measures().values():
        measure_parser = measure.add_parser(actions)
        if measure.needs_model:
            add_trust(measure_parser)
        if measure.name == "passkey":
            add_passkey_data(actions)
    add_figures(actions)


def add_passkey_data(actions: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = actions.add_parser(
        "passkey-data",
        help="write training documents that teach passkey retrieval",
        description="Writes FOLDER/passkey.jsonl: short documents that hide a passkey in ordinary text and ask for it. "
        "Pass the file to `softplus-attention data prepare` together with the training text.",
    )
    parser.add_argument("--output", type=Path, required=True, metavar="FOLDER", help="folder for passkey.jsonl")
    parser.add_argument(
        "--text", nargs="+", required=True, metavar="FILE", help="training (not validation) text to hide the keys in"
    )
    add_integer(parser, "--documents", "number of documents", 5000)
    add_integer(
        parser,
        "--max-characters",
        "maximum length of a document, about three quarters of a training sequence; the default is for 128 bytes",
        96,
    )
    add_integer(
        parser,
        "--min-characters",
        "minimum length of a document; short ones teach short distances; 0: the length of the prompt",
        0,
    )
    add_integer(parser, "--questions", "questions after each key", 2)
    add_prompt_arguments(parser, "compact")
    add_old_name(parser, "--most-characters", "max_characters", type=int)
    add_old_name(parser, "--least-characters", "min_characters", type=int)
    parser.set_defaults(run=run_passkey_data)


def run_passkey_data(options: argparse.Namespace) -> int:
    from softplus_attention.evaluation.passkey import passkey_documents, prompt_of, write_documents
    from softplus_attention.evaluation.texts import raw_texts

    check_at_least(options, documents=1)
    prompt = prompt_of(options.form, options.prompt, options.digits)
    texts = raw_texts(options.text, to_train=True)
    path = options.output / "passkey.jsonl"
    limits = (options.max_characters, options.seed, options.questions, options.min_characters)
    written = write_documents(path, passkey_documents(texts, prompt, options.documents, *limits))
    share = written / (written + sum(map(len, texts)))
    print(f"{path}: {options.documents} documents, {written} characters, {100 * share:.1f}% of documents and text")
    return 0


def add_figures(actions: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = actions.add_parser(
        "figures",
        help="draw the figures of existing results",
        description="Draws the figures and writes the tables of all results in a folder, for example of results from a "
        "machine without matplotlib.",
    )
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="folder with JSON files of the measures")
    parser.set_defaults(run=run_figures)


def run_figures(options: argparse.Namespace) -> int:
    from softplus_attention.evaluation.measures import draw_folder

    for path in draw_folder(options.folder):
        print(f"written: {path}")
    return 0
