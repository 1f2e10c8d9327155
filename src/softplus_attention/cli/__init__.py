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
from softplus_attention.utils.files import clean_text, is_disk_full
from softplus_attention.utils.untrusted import is_tokenizer_error

LONGEST_SENTENCE = 1500
# What a command needs beyond torch, by the extra that installs it.
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


# In the order of --help. A command's module holds its options; what it runs with is imported when it runs.
COMMANDS = (
    "demo", "data", "train", "evaluate", "report", "convert", "extend", "generate", "newton", "bench", "plan", "info",
    "build",
)  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    # torch says so of itself, with no way to act on it: nothing here needs NumPy unless an extra brings it.
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    parser = Parser(
        prog="softplus-attention", description="Attention that trains short and runs long (LSSA and LSSAR)."
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    # Only the parser that is needed: all of them together take longer than many a command.
    for name in arguments[:1] if arguments[:1] and arguments[0] in COMMANDS else COMMANDS:
        importlib.import_module(f"softplus_attention.cli.{name}").add_command(commands)

    from softplus_attention.training.errors import RunStopped

    options = parser.parse_args(arguments)
    try:
        return options.run(options)
    except RunStopped as stopped:
        complain(str(stopped))
        return stopped.exit_status
    except ValueError as error:
        complain(str(error))
        return 2
    except KeyboardInterrupt:
        print("softplus-attention: stopped", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # Whoever read the output has seen enough. What is left of it would be flushed at exit, into nothing again.
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
            complain(f"the tokenizer failed, so its tokenizer.json is damaged or made for other texts: {error}")
            return 2
        reason = explain(error, options)
        if reason is None:
            raise
        complain(reason)
        return 1


def explain(error: BaseException, options: argparse.Namespace) -> str | None:
    """What the machine refused; None for an error in the program."""
    if isinstance(error, OSError) and error.filename is not None and error.strerror is not None:
        return f"{error.filename}: {error.strerror}{where_from(error.filename, options)}"
    if is_disk_full(error):
        return "there is no room left on the disk, or a file-size limit is reached"
    # torch has an error of its own for a GPU, and none for the CPU.
    if isinstance(error, MemoryError) or "allocate memory" in str(error) or "out of memory" in str(error):
        return " ".join(["not enough memory.", *str(error).split()])
    # gloo has no error of its own: "[pair.cc:537] Read error [127.0.0.1]:11187: Connection reset by peer. This is ..."
    lost = re.match(r"\[[^]]*gloo[^]]*\] ([^\n]*)", str(error))
    if lost is not None or type(error).__name__ in ("DistBackendError", "DistNetworkError", "DistError"):
        first = str(error).splitlines()[0] if lost is None else lost[1].partition(". This is typically")[0]
        again = "run the same command again, it continues"
        return f"another process was killed or cannot be reached ({first}): {again}"
    return None


def complain(sentence: str) -> None:
    """Names and values in it may come from files of others. Under torchrun its summary ends with the sentence, and what
    all processes would say is said once: it ends the others as soon as the first one has ended."""
    sentence = sentence if len(sentence) <= LONGEST_SENTENCE else f"{sentence[:LONGEST_SENTENCE]}..."
    line = f"softplus-attention: {clean_text(' '.join(sentence.splitlines()))}"
    if int(os.environ.get("RANK", 0)):
        time.sleep(3)
    if (path := os.environ.get("TORCHELASTIC_ERROR_FILE")) is not None:
        more = {"py_callstack": line, "timestamp": str(int(time.time()))}
        Path(path).write_text(json.dumps({"message": {"message": line, "extraInfo": more}}))
    print(line, file=sys.stderr, flush=True)


def where_from(path: object, options: argparse.Namespace) -> str:
    """Which option of the command asked for something to be written there, or beside it."""
    place = Path(str(path)).absolute()
    for word in ("output", "out"):
        named = getattr(options, word, None)
        if named is not None and Path(named).absolute().parent in (place, *place.parents):
            return f" (--{word} {named})"
    return ""
