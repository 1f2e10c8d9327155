"""The command line, ``softplus-attention COMMAND``. Each command imports what it needs when it runs."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path

from softplus_attention import __version__
from softplus_attention.cli.options import Parser
from softplus_attention.utils import DOCS
from softplus_attention.utils.files import clean_text, is_disk_full
from softplus_attention.utils.untrusted import is_tokenizer_error

MAX_ERROR_LENGTH = 1500
# Optional packages, and the extra that installs each.
EXTRAS = {
    "numpy": "huggingface",
    "transformers": "huggingface",
    "huggingface_hub": "huggingface",
    "accelerate": "huggingface",
    "tokenizers": "huggingface",
    "safetensors": "huggingface",
    "datasets": "data",
    "pyarrow": "data",
    "zstandard": "data",
    "matplotlib": "plots",
    "scipy": "physics",
    "pyoperon": "physics",
    "lm_eval": "harness",
    "entmax": "baselines",
    "rouge_score": "harness",
    "wonderwords": "harness",
}
# In the order of --help. A command's module defines its options; heavy imports happen in its run().
COMMANDS = (
    "demo", "data", "train", "evaluate", "report", "convert", "extend", "generate", "newton", "bench", "plan", "info",
    "build",
)  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    # torch warns about this on import; NumPy is needed only by extras that install it.
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    parser = Parser(
        prog="softplus-attention",
        description="Attention that trains short and runs long (LSSA and LSSAR).",
        epilog=f"Options of a command: softplus-attention COMMAND --help. Documentation: {DOCS}",
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    # Build only the parser that is needed: building all of them takes longer than some commands.
    for name in arguments[:1] if arguments[:1] and arguments[0] in COMMANDS else COMMANDS:
        importlib.import_module(f"softplus_attention.cli.{name}").add_command(commands)

    from softplus_attention.training.errors import RunStopped

    options = parser.parse_args(arguments)
    try:
        return options.run(options)
    except RunStopped as stopped:
        print_error(str(stopped))
        return stopped.exit_status
    except ValueError as error:
        print_error(str(error))
        return 2
    except KeyboardInterrupt:
        print("softplus-attention: stopped", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader closed the pipe. Python flushes stdout again at exit, which must not raise a second time.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in EXTRAS:
            raise
        extra = f"pip install 'softplus-attention[{EXTRAS[package]}]'"
        print(f"softplus-attention: `{options.command}` needs {package}: {extra}", file=sys.stderr)
        return 2
    except BaseException as error:
        if is_tokenizer_error(error):
            print_error(f"the tokenizer failed: its tokenizer.json is damaged or does not fit this text: {error}")
            return 2
        reason = explain(error, options)
        if reason is None:
            raise
        print_error(reason)
        return 1


def explain(error: BaseException, options: argparse.Namespace) -> str | None:
    """A message for errors of the machine (files, disk, memory, network); None for an error in the program."""
    if isinstance(error, OSError) and error.filename is not None and error.strerror is not None:
        return f"{error.filename}: {error.strerror}{requesting_option(error.filename, options)}"
    if is_disk_full(error):
        return "there is no room left on the disk, or a file-size limit is reached"
    # torch has an error class for GPU memory, but none for CPU memory.
    if isinstance(error, MemoryError) or "allocate memory" in str(error) or "out of memory" in str(error):
        return " ".join(["not enough memory.", *str(error).split()])
    # gloo has no error class: "[pair.cc:537] Read error [127.0.0.1]:11187: Connection reset by peer. This is ..."
    lost = re.match(r"\[[^]]*gloo[^]]*\] ([^\n]*)", str(error))
    if lost is not None or type(error).__name__ in ("DistBackendError", "DistNetworkError", "DistError"):
        first = str(error).splitlines()[0] if lost is None else lost[1].partition(". This is typically")[0]
        return f"another process was killed or cannot be reached ({first}): run the same command again to continue"
    return None


def print_error(message: str) -> None:
    """Prints one cleaned line: the message may contain text from untrusted files. torchrun shows it in its summary."""
    message = message if len(message) <= MAX_ERROR_LENGTH else f"{message[:MAX_ERROR_LENGTH]}..."
    line = f"softplus-attention: {clean_text(' '.join(message.splitlines()))}"
    # torchrun ends all processes when the first one has ended: only rank 0 prints an error that all of them have.
    if int(os.environ.get("RANK", 0)):
        time.sleep(3)
    if (path := os.environ.get("TORCHELASTIC_ERROR_FILE")) is not None:
        more = {"py_callstack": line, "timestamp": str(int(time.time()))}
        Path(path).write_text(json.dumps({"message": {"message": line, "extraInfo": more}}))
    print(line, file=sys.stderr, flush=True)


def requesting_option(path: object, options: argparse.Namespace) -> str:
    """The output option that led to this path, in parentheses; "" for other paths."""
    place = Path(str(path)).absolute()
    for name in ("output", "out"):
        value = getattr(options, name, None)
        if value is not None and Path(value).absolute().parent in (place, *place.parents):
            return f" (--{name} {value})"
    return ""
