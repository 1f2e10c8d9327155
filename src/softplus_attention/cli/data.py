"""``softplus-attention data prepare | info | verify``."""

from __future__ import annotations

import argparse
import dataclasses
from typing import TYPE_CHECKING

from softplus_attention.data.options import PrepareOptions, flag
from softplus_attention.utils.files import clean_text
from softplus_attention.utils.progress import Progress

if TYPE_CHECKING:
    from argparse import _SubParsersAction


def add_command(commands: _SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("data", help="text into token shards", description="Token shards for training.")
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    add_prepare(actions)
    for name, run, text in (
        ("info", run_info, "what a prepared folder holds and how it was made"),
        ("verify", run_verify, "compare every file of a prepared folder with its checksum"),
    ):
        action = actions.add_parser(name, help=text, description=f"{text.capitalize()}.")
        action.add_argument("directory", metavar="DIR", help="a folder written by `data prepare`")
        action.set_defaults(run=run)


def add_prepare(actions: _SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = actions.add_parser(
        "prepare",
        help="tokenise documents into memory-mapped shards",
        description="Tokenises documents into memory-mapped shards with an index, checksums and the tokenizer, split "
        "by document into train and validation. If it is stopped, the same command continues it.",
    )
    parser.add_argument(
        "sources",
        nargs="+",
        metavar="SOURCE",
        help="files or folders of text, .jsonl (both also .xz, .gz, .zst), .parquet, or token files .npy and .bin; "
        "fineweb[:SAMPLE] or hub:DATASET[:CONFIGURATION] to stream from the Hugging Face Hub; builtin, the training "
        "text of the package",
    )
    parser.add_argument("--output", required=True, metavar="DIR", help="a new folder")
    for field in dataclasses.fields(PrepareOptions):
        kwargs = dict(field.metadata)
        if field.default is not None:
            kwargs["help"] += " (default: %(default)s)"
        parser.add_argument(flag(field.name), default=field.default, **kwargs)
    parser.add_argument("--workers", type=int, metavar="N", help="processes (default: one per core)")
    parser.set_defaults(run=run_prepare)


def run_prepare(options: argparse.Namespace) -> int:
    from softplus_attention.data import DataError, prepare

    progress = Progress()

    def report(line: str) -> None:
        (progress.update if line.startswith("source") else progress.say)(line)

    given = {name: value for name, value in vars(options).items() if name not in ("command", "action", "run")}
    try:
        index = prepare(**given, report=report)
    except KeyboardInterrupt:
        progress.say("stopped; the same command continues it")
        return 130
    except OSError as error:
        raise DataError(str(error)) from error
    finally:
        progress.clear()
    show(*index.summary())
    return 0


def run_info(options: argparse.Namespace) -> int:
    from softplus_attention.data import Index

    show(*Index.load(options.directory).summary())
    return 0


def run_verify(options: argparse.Namespace) -> int:
    from softplus_attention.data import verify

    index = verify(options.directory, report=show)
    show(f"{index.folder}: {len(index.files())} files, all as written")
    return 0


def show(*lines: str) -> None:
    """Text from a folder that others may have made, without what a terminal would obey."""
    print(clean_text("\n".join(lines)), flush=True)
