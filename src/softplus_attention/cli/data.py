"""``softplus-attention data prepare | info | verify``."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from argparse import _SubParsersAction

SECONDS_BETWEEN_LINES = 10.0


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
        "by document into train and validation. A run that was stopped goes on when the same command is given again.",
    )
    parser.add_argument(
        "sources",
        nargs="+",
        metavar="SOURCE",
        help="files or folders of .txt, .jsonl (also .xz, .gz, .zst), .parquet, or token files .npy and .bin; "
        "fineweb[:SAMPLE] or hub:DATASET[:CONFIGURATION] to stream from the Hugging Face hub; builtin, the training "
        "text of the package",
    )
    parser.add_argument("--output", required=True, metavar="DIR", help="a new folder")
    parser.add_argument(
        "--tokenizer",
        default="gpt2",
        help="a name on the Hugging Face hub, a tokenizer.json file, bytes, or bpe to train one (default: %(default)s)",
    )
    parser.add_argument("--vocabulary-size", type=int, metavar="N", help="tokens of a trained BPE (default: 8192)")
    parser.add_argument("--end-of-document", metavar="TOKEN", help="default: <|endoftext|> or what the tokenizer has")
    parser.add_argument(
        "--validation-fraction", type=float, default=0.005, metavar="F", help="of the documents (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the split (default: %(default)s)")
    parser.add_argument(
        "--shard-tokens", type=int, default=100_000_000, metavar="N", help="tokens of a shard (default: %(default)s)"
    )
    parser.add_argument("--errors", choices=("strict", "replace"), default="strict", help="for text that is not UTF-8")
    parser.add_argument("--text-field", default="text", metavar="NAME", help="of JSON and parquet (default: text)")
    parser.add_argument("--separator", metavar="TEXT", help="between the documents of a .txt file (default: one each)")
    parser.add_argument("--token-dtype", choices=("uint16", "uint32"), default="uint16", help="of raw .bin files")
    parser.add_argument("--limit", type=int, metavar="N", help="stop after N documents")
    parser.add_argument("--workers", type=int, metavar="N", help="processes (default: one per core)")
    parser.set_defaults(run=run_prepare)


def run_prepare(options: argparse.Namespace) -> int:
    from softplus_attention.data.files import DataError
    from softplus_attention.data.preparation import prepare

    given = {name: value for name, value in vars(options).items() if name not in ("command", "action", "run")}
    try:
        index = prepare(**given, report=reporter())
    except KeyboardInterrupt:
        print("\nstopped; the same command continues where it was", file=sys.stderr)
        return 130
    except OSError as error:
        raise DataError(str(error)) from error
    finally:
        if sys.stderr.isatty():
            print(file=sys.stderr)
    for line in index.summary():
        print(line)
    return 0


def reporter() -> Callable[[str], None]:
    """One line that changes on a terminal; elsewhere a line now and then, and the last."""
    if sys.stderr.isatty():
        return lambda line: print(f"\r{line:<100}", end="", file=sys.stderr, flush=True)
    last = -SECONDS_BETWEEN_LINES

    def report(line: str) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= SECONDS_BETWEEN_LINES or not line.startswith("source"):
            last = now
            print(line, file=sys.stderr, flush=True)

    return report


def run_info(options: argparse.Namespace) -> int:
    from softplus_attention.data.index import Index

    for line in Index.load(options.directory).summary():
        print(line)
    return 0


def run_verify(options: argparse.Namespace) -> int:
    from softplus_attention.data.index import verify

    index = verify(options.directory, report=print)
    print(f"{index.folder}: {len(index.files())} files, all as written")
    return 0
