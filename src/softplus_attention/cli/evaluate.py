"""``softplus-attention evaluate``: how long a model holds, and why."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from softplus_attention.cli.options import add_trust
from softplus_attention.evaluation.measures import measures
from softplus_attention.evaluation.measures.base import RESUME, add_integer, add_old_name, check_at_least
from softplus_attention.evaluation.measures.passkey import add_prompt_arguments
from softplus_attention.utils import DOCS

if TYPE_CHECKING:
    from argparse import _SubParsersAction


def add_command(commands: _SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "evaluate",
        help="loss by length, passkeys, synthetic tasks and the inside of the attention",
        description="Measures models side by side. Every measure prints a table and writes JSON, CSV and figures. "
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


def add_passkey_data(actions: _SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = actions.add_parser(
        "passkey-data",
        help="documents that teach the compact passkey, to be mixed into training text",
        description="Writes FOLDER/passkey.jsonl: short documents, each with a passkey in ordinary text and the "
        "question. `softplus-attention data prepare` takes it beside the training text.",
    )
    parser.add_argument("--output", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--text", nargs="+", required=True, metavar="FILE", help="to hide the keys in; not validation")
    add_integer(parser, "--documents", "how many", 5000)
    add_integer(
        parser, "--max-characters", "of a document: about three quarters of a training sequence; for 128 bytes", 96
    )
    add_integer(
        parser,
        "--min-characters",
        "of a document; short ones teach short distances; 0: as short as the prompt",
        0,
    )
    add_integer(parser, "--questions", "after each key", 2)
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
    print(f"{path}: {options.documents} documents, {written} characters, {100 * share:.1f}% of them and the text")
    return 0


def add_figures(actions: _SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = actions.add_parser(
        "figures",
        help="draw the results of a folder",
        description="Draws the figures and writes the tables of all results in a folder, such as one that came from a "
        "machine without matplotlib.",
    )
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="with the JSON files of other measures")
    parser.set_defaults(run=run_figures)


def run_figures(options: argparse.Namespace) -> int:
    from softplus_attention.evaluation.measures import draw_folder

    for path in draw_folder(options.folder):
        print(f"written: {path}")
    return 0
