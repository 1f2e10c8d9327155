"""``prepare``: documents into token shards, in parallel, so that a run killed at any moment goes on where it was."""

from __future__ import annotations

import fcntl
import json
import multiprocessing
import os
import shutil
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from softplus_attention.data import tokenizer as tokenizers
from softplus_attention.data.assembly import Assembler, is_begun
from softplus_attention.data.files import DataError, remove_temporary, sha256, write_json
from softplus_attention.data.index import FORMAT, INDEX, PARTIAL, VERSION, Index
from softplus_attention.data.pieces import (
    Piece,
    Settings,
    Worker,
    is_validation,
    one_thread,
    start_worker,
    write_in_worker,
)
from softplus_attention.data.progress import Progress
from softplus_attention.data.sources import Reading, Source, find
from softplus_attention.data.token_files import TokenFile
from softplus_attention.utils.files import FULL
from softplus_attention.validation import fail

PLAN = "plan.json"
TOKENIZER = "tokenizer.json"
LOCK = "lock"
# What a worker takes at a time.
PIECE_CHARACTERS = 4 << 20
PIECE_DOCUMENTS = 1 << 16
# A BPE learns little from more text than this.
TRAINING_BYTES = 200_000_000
DEFAULT_VOCABULARY = 8192
SMALLEST_VOCABULARY = 257


def prepare(
    sources: Sequence[str | Path],
    output: str | Path,
    *,
    tokenizer: str = "gpt2",
    vocabulary_size: int | None = None,
    end_of_document: str | None = None,
    validation_fraction: float = 0.005,
    seed: int = 0,
    shard_tokens: int = 100_000_000,
    errors: str = "strict",
    text_field: str = "text",
    separator: str | None = None,
    token_dtype: str = "uint16",
    limit: int | None = None,
    workers: int | None = None,
    piece_characters: int = PIECE_CHARACTERS,
    report: Callable[[str], None] | None = None,
) -> Index:
    """Writes the documents of ``sources`` as token shards into the folder ``output`` and gives its index.

    The arguments mean what the options of ``softplus-attention data prepare`` mean. The result does not depend on
    ``workers`` nor on ``piece_characters``, the text a worker takes at a time (a kill loses a few of these). A stopped
    run goes on when called again with the same arguments.
    """
    output = Path(output)
    names = [str(source) for source in sources]
    if tokenizer == "bpe" and vocabulary_size is None:
        vocabulary_size = DEFAULT_VOCABULARY
    options = {
        "tokenizer": tokenizer,
        "vocabulary_size": vocabulary_size,
        "end_of_document": end_of_document,
        "validation_fraction": validation_fraction,
        "seed": seed,
        "shard_tokens": shard_tokens,
        "errors": errors,
        "text_field": text_field,
        "separator": separator,
        "token_dtype": token_dtype,
        "limit": limit,
    }
    if workers is None:
        workers = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    check_options(options, workers)
    found = find(names, Reading(errors, text_field, separator, token_dtype), output)
    if found[0].holds_tokens and tokenizer == "bpe":
        fail("--tokenizer", "the one that made the token files", "'bpe', which is trained on text", DataError)
    plan = {
        "sources": names,
        "options": options,
        "inputs": [source.identity() for source in found],
        "tokenizer_file": sum_of_tokenizer(Path(tokenizer)),
        "tokenizers": version("tokenizers"),
    }
    try:
        with claimed(output, plan) as finished:
            if not finished:
                run(found, output, plan, workers, piece_characters, Progress(report, len(found)))
            return Index.load(output)
    except OSError as error:
        if error.errno in FULL:
            raise DataError(f"no room to write in {output}: make room and run the same command again") from error
        raise


def sum_of_tokenizer(path: Path) -> str | None:
    """None for one by name."""
    path = path / "tokenizer.json" if path.is_dir() else path
    return sha256(path) if path.is_file() else None


def check_options(options: dict[str, Any], workers: int) -> None:
    size = options["vocabulary_size"]
    if size is not None and options["tokenizer"] != "bpe":
        fail("--vocabulary-size", "given only with --tokenizer bpe", size, DataError)
    if size is not None and size < SMALLEST_VOCABULARY:
        fail(
            "--vocabulary-size", f"at least {SMALLEST_VOCABULARY}: the bytes and the end of a document", size, DataError
        )
    if options["end_of_document"] is not None and options["tokenizer"] in ("bpe", "bytes"):
        fail(
            "--end-of-document",
            f"left out with --tokenizer {options['tokenizer']}",
            options["end_of_document"],
            DataError,
        )
    if not 0 <= options["validation_fraction"] <= 1:
        fail("--validation-fraction", "from 0 to 1", options["validation_fraction"], DataError)
    if not 0 <= options["seed"] < 2**64:
        fail("--seed", "from 0 to 2**64 - 1", options["seed"], DataError)
    if options["shard_tokens"] < 1:
        fail("--shard-tokens", "at least 1", options["shard_tokens"], DataError)
    if options["errors"] not in ("strict", "replace"):
        fail("--errors", "strict or replace", repr(options["errors"]), DataError)
    if options["token_dtype"] not in ("uint16", "uint32"):
        fail("--token-dtype", "uint16 or uint32", repr(options["token_dtype"]), DataError)
    if options["separator"] == "":
        fail("--separator", "some text", "an empty one", DataError)
    if options["limit"] is not None and options["limit"] < 1:
        fail("--limit", "at least 1", options["limit"], DataError)
    if workers < 1:
        fail("--workers", "at least 1", workers, DataError)


@contextmanager
def claimed(output: Path, plan: dict[str, Any]) -> Iterator[bool]:
    """Makes the folder this plan's own for the time of a run; gives whether the plan was carried out already."""
    work = output / PARTIAL
    if output.exists() and not output.is_dir():
        fail("--output", "a folder", f"the file {str(output)!r}", DataError)
    if (output / INDEX).is_file():
        # A folder that is complete stays what was asked for under another version of the library.
        made = {**Index.load(output).plan, "tokenizers": plan["tokenizers"]}
        check_same(made, plan, f"{output} is complete and was made with other options")
        shutil.rmtree(work, ignore_errors=True)
        yield True
        return
    if output.is_dir() and any(output.iterdir()) and not work.is_dir():
        fail(
            "--output",
            "a new or empty folder, or one whose preparation was stopped",
            f"{output}, which holds something else",
            DataError,
        )
    work.mkdir(parents=True, exist_ok=True)
    with os.fdopen(os.open(work / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW), "w") as lock:
        try:
            # Released by the system however the process ends, and not inherited by the workers.
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            fail("--output", "a folder that no other preparation is writing", str(output), DataError)
        if is_begun(work):
            before = json.loads((work / PLAN).read_text())
            if plan["options"]["errors"] == "replace":
                # What was read strictly so far had nothing to replace.
                before["options"]["errors"] = "replace"
            check_same(before, plan, f"{output} was begun with other options")
        elif (work / PLAN).is_file() and json.loads((work / PLAN).read_text()) != plan:
            (output / TOKENIZER).unlink(missing_ok=True)  # that of other options
        write_json(work / PLAN, plan)
        remove_temporary(output)
        remove_temporary(work)
        yield False
    shutil.rmtree(work)


def check_same(before: Any, now: dict[str, Any], sentence: str) -> None:
    changes = []
    for name, value in now["options"].items():
        if before["options"].get(name) != value:
            changes.append(f"--{name.replace('_', '-')} was {before['options'].get(name)}, is {value}")
    if before["sources"] != now["sources"]:
        changes.append(f"SOURCE was {' '.join(before['sources'])}, is {' '.join(now['sources'])}")
    elif before["inputs"] != now["inputs"]:
        was = [item for item in before["inputs"] if item not in now["inputs"]]
        new = [item for item in now["inputs"] if item not in before["inputs"]]
        changes.append(f"the files of SOURCE were {was[:3]}, are {new[:3]}")
    if before["tokenizer_file"] not in (None, now["tokenizer_file"]):  # None too for a folder, in older plans
        changes.append(f"the file {now['options']['tokenizer']} has changed")
    if before["tokenizers"] != now["tokenizers"]:
        changes.append(f"the tokenizers library was {before['tokenizers']}, is {now['tokenizers']}")
    if changes:
        raise DataError(
            f"{sentence}: {'; '.join(changes)}. Go back to those, choose another --output, or delete that folder"
        )


def run(
    sources: list[Source],
    output: Path,
    plan: dict[str, Any],
    workers: int,
    piece_characters: int,
    progress: Progress,
) -> None:
    options = plan["options"]
    tokenizer = saved_tokenizer(sources, output, options, progress)
    vocabulary = tokenizers.vocabulary_size(tokenizer)
    end_id: int = tokenizer.get_vocab(with_added_tokens=True)[tokenizers.saved_end(output)]
    dtype = np.dtype("<u2" if vocabulary <= 2**16 else "<u4")
    for source in sources:
        if isinstance(source, TokenFile):
            source.bind(end_id, vocabulary)
    settings = Settings(
        work=output / PARTIAL,
        tokenizer=output / TOKENIZER,
        as_bytes=options["tokenizer"] == "bytes",
        dtype=dtype,
        end_id=end_id,
        seed=options["seed"],
        validation_fraction=options["validation_fraction"],
    )
    assembler = Assembler(output, settings.work, dtype, options["shard_tokens"])
    assembler.resume()
    progress.begin(assembler)
    work = pieces(sources, assembler, options["limit"], piece_characters, progress)
    carry_out(work, settings, assembler, workers, progress)
    if not assembler.counts["documents"]:
        shutil.rmtree(output)
        fail("SOURCE", "at least one document that is not empty", f"{assembler.counts['empty']} empty ones", DataError)
    splits = assembler.finish()
    index = {
        "format": FORMAT,
        "version": VERSION,
        "dtype": dtype.name,
        "vocabulary_size": vocabulary,
        "end_of_document": end_id,
        "counts": assembler.counts,
        "splits": splits,
        "tokenizer_files": [
            {"file": name, "bytes": (output / name).stat().st_size, "sha256": sha256(output / name)}
            for name in (TOKENIZER, "tokenizer_config.json")
        ],
        "plan": plan,
    }
    write_json(output / INDEX, index)
    progress.end(assembler)


def saved_tokenizer(sources: list[Source], output: Path, options: dict[str, Any], progress: Progress) -> Tokenizer:
    """The tokenizer in the output folder: made or fetched once, so that a continued run has the same."""
    path = output / TOKENIZER
    if not path.is_file():
        name = options["tokenizer"]
        if name == "bytes":
            made = tokenizers.bytes_tokenizer()
        elif name == "bpe":
            progress.say(f"training a BPE of {options['vocabulary_size']} tokens")
            made = tokenizers.train(training_texts(sources, options), options["vocabulary_size"])
        else:
            made = tokenizers.load(name, options["end_of_document"])
        tokenizers.save(made, output, tokenizers.end_token(made, options["end_of_document"]))
    return Tokenizer.from_file(str(path))


def training_texts(sources: list[Source], options: dict[str, Any]) -> Iterator[str]:
    """Training documents only: the tokenizer learns nothing of validation."""
    size = records = 0
    for source in sources:
        for document in source.documents(None):
            assert isinstance(document, str)
            content = document.encode()
            if not is_validation(content, options["seed"], options["validation_fraction"]):
                size += len(content)
                yield document
            records += 1
            if size >= TRAINING_BYTES or records == options["limit"]:
                return


def pieces(
    sources: list[Source], assembler: Assembler, limit: int | None, characters: int, progress: Progress
) -> Iterator[Piece]:
    """The documents behind what was assembled."""
    number = assembler.next_piece
    left = sys.maxsize if limit is None else limit - assembler.counts["records"]
    first = assembler.position or {"source": 0, "inner": None}
    documents: list[Any] = []
    size = 0
    position = first
    for place in range(first["source"], len(sources)):
        source = sources[place]
        progress.place = place
        inner = first["inner"] if place == first["source"] else None
        for document in source.documents(inner) if left > 0 else ():
            documents.append(document)
            size += len(document)
            left -= 1
            if size >= characters or len(documents) >= PIECE_DOCUMENTS:
                yield Piece(number, documents, {"source": place, "inner": source.position()})
                number, documents, size = number + 1, [], 0
            if left == 0:
                break
        position = {"source": place + 1, "inner": None}
    if documents:
        yield Piece(number, documents, position)


def carry_out(
    work: Iterator[Piece], settings: Settings, assembler: Assembler, workers: int, progress: Progress
) -> None:
    """Each piece is written by some worker and added in its turn."""
    if workers == 1:
        own = Worker(settings)
        for piece in work:
            with one_thread():
                own.write(piece)
            assembler.add()
            progress.update(assembler)
        return
    waiting: deque[Future[int]] = deque()
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(workers, context, start_worker, (settings,)) as pool:
        try:
            # The workers are forked here, before the reading of the sources starts threads of its own.
            pool.submit(os.getpid).result()
            for piece in work:
                waiting.append(pool.submit(write_in_worker, piece))
                while len(waiting) > 2 * workers or (waiting and waiting[0].done()):
                    add_first(waiting, assembler, progress)
            while waiting:
                add_first(waiting, assembler, progress)
        except BrokenProcessPool as error:
            raise DataError(
                "a worker process was ended from outside, most often for want of memory. Nothing is lost: run the "
                "same command again, with fewer --workers, and it continues"
            ) from error
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def add_first(waiting: deque[Future[int]], assembler: Assembler, progress: Progress) -> None:
    waiting.popleft().result()
    assembler.add()
    progress.update(assembler)
