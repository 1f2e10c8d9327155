"""What the measures of ``softplus-attention evaluate`` share: their options, models and texts, and how they end."""

from __future__ import annotations

import argparse
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from functools import wraps
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from softplus_attention.cli.options import add_trust, check_device
from softplus_attention.validation import fail

if TYPE_CHECKING:
    from argparse import _SubParsersAction

    from softplus_attention.evaluation.models import Opened, Request
    from softplus_attention.evaluation.texts import Documents

MODEL_HELP = (
    "[NAME=]FOLDER[+OPTION=VALUE...]: a folder with a saved model or a name on the hub, what to call it, and what to "
    "change at inference for it alone, such as runs/lssar/model+power=31 or yarn=runs/softmax/model+rope=yarn:4"
)
RESUME = "The same command again reuses what is finished."


def measure_parser(
    actions: _SubParsersAction[argparse.ArgumentParser], name: str, words: str, description: str, run: Any
) -> argparse.ArgumentParser:
    parser = actions.add_parser(name, help=words, description=f"{description} {RESUME}")
    parser.add_argument("models", nargs="+", metavar="MODEL", help=MODEL_HELP)
    parser.add_argument(
        "--output", type=Path, default=Path("evaluation"), metavar="FOLDER", help="for results (default: %(default)s)"
    )
    parser.add_argument(
        "--train-length", type=int, metavar="N", help="tokens the models were trained at (default: from their config)"
    )
    parser.add_argument(
        "--dtype",
        choices=("auto", "float32", "bfloat16", "float16", "mixed"),
        default="auto",
        help="mixed: float32 weights in bfloat16 arithmetic, as in training on a GPU (default: as saved)",
    )
    parser.add_argument("--device", help="such as cpu or cuda:0 (default: cuda where there is one)")
    add_trust(parser)
    change = parser.add_argument_group("changes at inference, for every model")
    change.add_argument("--power", metavar="P", help="another power: a number, grow:BASE,SLOPE, or log:FACTOR")
    change.add_argument("--reweight", action="store_true", help="the second stage on weights trained without it")
    change.add_argument("--window", metavar="N", help="each token sees itself and the N - 1 before it")
    change.add_argument("--rope", metavar="TYPE:FACTOR", help="linear:4, ntk:4 (dynamic NTK) or yarn:4")
    parser.set_defaults(run=interruptible(run))
    return parser


def add_texts(parser: argparse.ArgumentParser, required: bool = True) -> None:
    texts = parser.add_mutually_exclusive_group(required=required)
    texts.add_argument("--data", metavar="FOLDER", help="written by `softplus-attention data prepare`")
    texts.add_argument(
        "--text", nargs="+", metavar="FILE", help=".txt or .jsonl files, or builtin: the validation text of the package"
    )
    parser.add_argument("--split", default="validation", help="of --data (default: %(default)s)")
    parser.add_argument("--tokenizer", help="for --text (default: the one saved with each model)")


def interruptible(run: Callable[[argparse.Namespace], int]) -> Callable[[argparse.Namespace], int]:
    @wraps(run)
    def wrapped(options: argparse.Namespace) -> int:
        try:
            with warnings.catch_warnings():
                # Of torch and transformers, about how they are used here: nothing that the user could change.
                warnings.simplefilter("ignore")
                return run(options)
        except KeyboardInterrupt:
            print("\nstopped; the same command continues where it was", file=sys.stderr)
            return 130

    return wrapped


def common_options(options: argparse.Namespace) -> dict[str, str]:
    given = {word: getattr(options, word) for word in ("power", "window", "rope")}
    found = {word: value for word, value in given.items() if value is not None}
    return found | ({"reweight": ""} if options.reweight else {})


def asked(options: argparse.Namespace) -> tuple[list[Request], int]:
    """The models and the length that all of them were trained at."""
    from softplus_attention.evaluation.models import check_request, requests_of, training_length_of
    from softplus_attention.huggingface.loading import quiet

    quiet()
    check_folder(options.output)
    check_device(options.device)
    requests = requests_of(options.models, common_options(options), options.trust_remote_code)
    found = {request.name: training_length_of(request) for request in requests}
    length = options.train_length
    if length is not None and length < 2:
        fail("--train-length", "at least 2", length)
    if length is None:
        lengths = set(found.values())
        if len(lengths) > 1 or None in lengths:
            words = ", ".join(f"{name}: {length or 'not in its config'}" for name, length in found.items())
            fail("--train-length", "given where the models' configs do not agree on it", words)
        length = next(length for length in lengths if length is not None)
    for request in requests:
        check_request(request, length)
    return requests, length


def check_folder(path: Path) -> None:
    """Before anything is measured for it."""
    if path.exists() and not path.is_dir():
        fail("--output", "a folder, or a name for one", f"{str(path)!r}, which is a file")
    there = next(folder for folder in (path, *path.absolute().parents) if folder.is_dir())
    try:
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        fail("--output", "a folder that can be written", f"{str(path)!r}: {error.strerror}")


def open_model(options: argparse.Namespace, request: Request, training_length: int) -> Opened:
    from softplus_attention.evaluation.models import opened

    return opened(request, training_length, dtype=options.dtype, device=options.device)


class Measured:
    """The results of the models that could be measured; ``status`` is 1 where some could not."""

    def __init__(self) -> None:
        self.results: list[dict[str, Any]] = []
        self.status = 0


def measure_each(
    options: argparse.Namespace,
    requests: Sequence[Request],
    training_length: int,
    measure: Callable[[Opened], dict[str, Any]],
) -> Measured:
    """One model in memory at a time. What went wrong with one of several is said, and the others are measured."""
    measured = Measured()
    for request in requests:
        try:
            measured.results.append(measure(open_model(options, request, training_length)))
        except Exception as error:
            if len(requests) == 1:
                raise
            kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
            print(f"{request.name} was not measured: {kind}{error}", file=sys.stderr)
            measured.status = 1
    if not measured.results:
        fail("MODEL", "at least one that can be measured", f"none of {len(requests)}")
    return measured


def check_positive(options: argparse.Namespace, *names: str) -> None:
    for name in names:
        if getattr(options, name) < 1:
            fail(f"--{name.replace('_', '-')}", "at least 1", getattr(options, name))


def documents_for(options: argparse.Namespace, request: Request) -> Documents:
    from softplus_attention.evaluation.texts import check_same_tokenizer, folder_documents, raw_texts, text_documents
    from softplus_attention.huggingface.loading import load_tokenizer

    if options.data is not None:
        check_same_tokenizer(options.data, options.tokenizer or request.source)
        return folder_documents(options.data, options.split)
    tokenizer = load_tokenizer(options.tokenizer or request.source, options.trust_remote_code)
    return text_documents(raw_texts(options.text), options.text, tokenizer)


def note_tokenizers(results: Sequence[dict[str, Any]]) -> None:
    if len({result["settings"]["data"]["fingerprint"] for result in results}) > 1:
        print("the models have different tokenizers: losses per token are not comparable between them")


def finish(folder: Path, measure: str, results: list[dict[str, Any]]) -> None:
    """Tables and figure of this run's models; says what was written."""
    from softplus_attention.report.result_files import draw, write_tables
    from softplus_attention.utils.results import path_of

    written = [path_of(folder, result) for result in results]
    written += [*write_tables(folder, measure, results), *draw(folder, measure, results)]
    print()
    for path in written:
        print(f"written: {path}")
    if find_spec("matplotlib") is None:
        print(
            "figures were left out, since matplotlib is not installed: draw them later, here or elsewhere, with "
            f"softplus-attention evaluate figures {folder}",
            file=sys.stderr,
        )


# ---- the measures
