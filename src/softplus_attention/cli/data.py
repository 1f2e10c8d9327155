"""``softplus-attention data prepare | info | verify``."""

from __future__ import annotations

import argparse
import dataclasses

from softplus_attention.data.options import PrepareOptions, flag
from softplus_attention.utils.files import clean_text
from softplus_attention.utils.progress import Progress


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "data",
        help="prepare text as token shards for training",
        description="Prepares text as token shards for training, and inspects them.",
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    add_prepare(actions)
    for name, run, text in (
        ("info", run_info, "show the contents of a prepared folder and how it was made"),
        ("verify", run_verify, "compare every file of a prepared folder with its checksum"),
    ):
        action = actions.add_parser(name, help=text, description=f"{text.capitalize()}.")
        action.add_argument("directory", metavar="DIR", help="a folder written by `data prepare`")
        action.set_defaults(run=run)


def add_prepare(actions: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = actions.add_parser(
        "prepare",
        help="tokenise documents into memory-mapped shards",
        description="Tokenises documents into memory-mapped shards, with an index, checksums and the tokenizer. "
        "Documents are split into train and validation. If it is stopped, run the same command again to continue.",
    )
    parser.add_argument(
        "sources",
        nargs="+",
        metavar="SOURCE",
        help="files or folders of text or .jsonl (also compressed: .xz, .gz, .zst), .parquet, or token files (.npy, "
        ".bin); fineweb[:SAMPLE] or hub:DATASET[:CONFIGURATION] streams from the Hugging Face Hub; builtin is the "
        "training text of the package",
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
        progress.say("stopped; run the same command again to continue")
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
    """Prints text that may come from an untrusted folder, without terminal control sequences."""
    print(clean_text("\n".join(lines)), flush=True)
