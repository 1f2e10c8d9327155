"""``prepare``: tokenises documents into shards, in parallel; a killed run resumes where it was."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import sys
import time
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

from softplus_attention.data import DataError
from softplus_attention.data import tokenizer as tokenizers
from softplus_attention.data.index import FORMAT, INDEX, PARTIAL, VERSION, Index
from softplus_attention.data.options import DEFAULT_VOCABULARY, PrepareOptions, flag
from softplus_attention.data.shards import (
    STATE,
    Assembler,
    Piece,
    Worker,
    WorkerSettings,
    is_begun,
    is_blank,
    is_validation,
    one_thread,
    split_tail,
    start_worker,
    write_in_worker,
)
from softplus_attention.data.sources import Source, find
from softplus_attention.data.token_files import TokenFile
from softplus_attention.utils import counted, untrusted
from softplus_attention.utils.files import FULL, LockedError, lock, remove_temporary, write_json
from softplus_attention.utils.untrusted import sha256
from softplus_attention.validation import fail

PLAN = "plan.json"
TOKENIZER = "tokenizer.json"
TOKENIZER_FILES = (TOKENIZER, "tokenizer_config.json")
LOCK = "lock"
# The work of a worker at a time.
PIECE_CHARACTERS = 4 << 20
PIECE_DOCUMENTS = 1 << 16
# A BPE learns little from more text than this.
TRAINING_BYTES = 200_000_000


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
    """Writes the documents of ``sources`` as token shards to the folder ``output`` and returns its index.

    The arguments are the options of ``softplus-attention data prepare``. The result does not depend on ``workers`` or
    on ``piece_characters``, the amount of text per work item (a kill loses a few items). Call it again with the same
    arguments to resume a stopped run.
    """
    names = [str(source) for source in sources]
    options = PrepareOptions(
        tokenizer=tokenizer,
        vocabulary_size=vocabulary_size,
        end_of_document=end_of_document,
        validation_fraction=validation_fraction,
        seed=seed,
        shard_tokens=shard_tokens,
        errors=errors,
        text_field=text_field,
        separator=separator,
        token_dtype=token_dtype,
        limit=limit,
    )
    if workers is None:
        workers = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if workers < 1:
        fail("--workers", "at least 1", workers, DataError)
    output = Path(output)
    found = find(names, options, output)
    if found[0].holds_tokens and tokenizer == "bpe":
        fail("--tokenizer", "the tokenizer of the token files", "'bpe', which is trained on text", DataError)
    plan = {
        "sources": names,
        "options": options.as_dict(),
        "inputs": [source.identity() for source in found],
        "tokenizer_file": checksum_of_tokenizer(Path(tokenizer)),
        "tokenizers": version("tokenizers"),
    }
    try:
        with prepare_lock(output, plan) as finished:
            if not finished:
                run(found, output, plan, options, workers, piece_characters, Progress(report, len(found)))
            return Index.load(output)
    except OSError as error:
        if error.errno not in FULL:
            raise
        raise DataError(
            f"no room to write {error.filename or output}: {error.strerror}. Nothing is lost: make room and run the "
            "same command again to continue"
        ) from error


def checksum_of_tokenizer(path: Path) -> str | None:
    """None unless ``path`` is a tokenizer file or folder."""
    path = path / "tokenizer.json" if path.is_dir() else path
    return sha256(path) if path.is_file() else None


class Progress:
    """The progress messages of a run."""

    def __init__(self, report: Callable[[str], None] | None, sources: int) -> None:
        self.say = report or (lambda line: None)
        self.sources = sources
        self.place = 0

    def begin(self, assembler: Assembler) -> None:
        self.started = time.monotonic()
        self.bytes_before = assembler.counts["bytes"]
        if assembler.next_piece:
            self.say(f"continuing after {self.amount(assembler)}")

    def update(self, assembler: Assembler) -> None:
        self.say(f"source {self.place + 1} of {self.sources}: {self.amount(assembler)}, {self.speed(assembler)}")

    def end(self, assembler: Assembler) -> None:
        self.say(f"done: {self.amount(assembler)}, {self.speed(assembler)}")

    def speed(self, assembler: Assembler) -> str:
        seconds = time.monotonic() - self.started
        return f"{(assembler.counts['bytes'] - self.bytes_before) / 1e6 / max(seconds, 1e-9):.1f} MB/s, {seconds:.0f} s"

    def amount(self, assembler: Assembler) -> str:
        counts = assembler.counts
        tokens = sum(assembler.tokens.values())
        return f"{counted(counts['documents'], 'document')}, {counts['bytes'] / 1e6:,.1f} MB, {tokens:,} tokens"


# ---- the folder: new, to be continued, or finished


@contextmanager
def prepare_lock(output: Path, plan: dict[str, Any]) -> Iterator[bool]:
    """Locks the folder for a run of this plan; yields whether the plan was completed before."""
    work = output / PARTIAL
    if output.exists() and not output.is_dir():
        fail("--output", "a folder", f"the file {str(output)!r}", DataError)
    if (output / INDEX).is_file():
        # A complete folder remains valid with another version of tokenizers.
        before = {**Index.load(output).plan, "tokenizers": plan["tokenizers"]}
        check_same(before, plan, f"{output} is complete, but was made with other options")
        remove_work(work)
        yield True
        return
    if output.is_dir() and any(output.iterdir()) and (work.is_symlink() or not work.is_dir()):
        fail(
            "--output",
            "a new or empty folder, or one of a stopped `data prepare`",
            f"{output}, which contains something else",
            DataError,
        )
    work.mkdir(parents=True, exist_ok=True)
    try:
        with lock(work / LOCK):
            if is_begun(work):
                before = read_plan(work)
                if plan["options"]["errors"] == "replace":
                    # The input read so far had no errors to replace.
                    before["options"]["errors"] = "replace"
                check_same(before, plan, f"{output} was started with other options")
            elif (work / PLAN).is_file() and read_plan(work) != plan:
                (output / TOKENIZER).unlink(missing_ok=True)  # made with other options
            write_json(work / PLAN, plan)
            remove_temporary(output)
            remove_temporary(work)
            yield False
    except LockedError:
        fail("--output", "a folder that no other process is writing", str(output), DataError)
    remove_work(work)


def read_plan(work: Path) -> dict[str, Any]:
    plan = untrusted.read_json(work / PLAN) if (work / PLAN).is_file() else None
    kinds = {"sources": list, "inputs": list, "options": dict, "tokenizer_file": object, "tokenizers": object}
    if not isinstance(plan, dict) or not all(name in plan and isinstance(plan[name], kinds[name]) for name in kinds):
        raise DataError(f"{work / PLAN} is damaged: delete {work.parent} and start again")
    return plan


def remove_work(work: Path) -> None:
    """Removes the working files, and no others."""
    if work.is_symlink() or not work.is_dir():
        return
    remove_temporary(work)
    for path in (work / PLAN, work / LOCK, work / STATE, *work.glob("piece-*.npz")):
        path.unlink(missing_ok=True)
    if not any(work.iterdir()):
        work.rmdir()


def check_same(before: Any, now: dict[str, Any], problem: str) -> None:
    changes = []
    for name, value in now["options"].items():
        if before["options"].get(name) != value:
            changes.append(f"{flag(name)} was {before['options'].get(name)}, is {value}")
    if before["sources"] != now["sources"]:
        changes.append(f"SOURCE was {' '.join(map(str, before['sources']))}, is {' '.join(now['sources'])}")
    elif before["inputs"] != now["inputs"]:
        old = [item for item in before["inputs"] if item not in now["inputs"]]
        new = [item for item in now["inputs"] if item not in before["inputs"]]
        changes.append(f"the files of SOURCE were {old[:3]}, are {new[:3]}")
    if before["tokenizer_file"] not in (None, now["tokenizer_file"]):  # older plans have None for a folder too
        changes.append(f"the file {now['options']['tokenizer']} has changed")
    if before["tokenizers"] != now["tokenizers"]:
        changes.append(f"the tokenizers library was {before['tokenizers']}, is {now['tokenizers']}")
    if changes:
        raise DataError(
            f"{problem}: {'; '.join(changes)}. Restore these, choose another --output, or delete the folder"
        )


def run(
    sources: list[Source],
    output: Path,
    plan: dict[str, Any],
    options: PrepareOptions,
    workers: int,
    piece_characters: int,
    progress: Progress,
) -> None:
    holds_tokens = sources[0].holds_tokens
    tail = None if holds_tokens else validation_tail(sources, options)
    tokenizer = saved_tokenizer(sources, output, options, progress, tail)
    vocabulary = tokenizers.vocabulary_size(tokenizer)
    end_id: int = tokenizer.get_vocab(with_added_tokens=True)[tokenizers.saved_end(output)]
    dtype = np.dtype("<u2" if vocabulary <= 2**16 else "<u4")
    for source in sources:
        if isinstance(source, TokenFile):
            source.bind(end_id, vocabulary)
    if holds_tokens:
        tail = validation_tail(sources, options)
    settings = WorkerSettings(
        work=output / PARTIAL,
        tokenizer=output / TOKENIZER,
        as_bytes=options.tokenizer == "bytes",
        dtype=dtype,
        end_id=end_id,
        seed=options.seed,
        validation_fraction=options.validation_fraction,
        tail=tail,
    )
    assembler = Assembler(output, settings.work, dtype, options.shard_tokens)
    assembler.resume()
    progress.begin(assembler)
    work = pieces(sources, assembler, options.limit, piece_characters, progress)
    carry_out(work, settings, assembler, workers, progress)
    if not assembler.counts["documents"]:
        for name in TOKENIZER_FILES:
            (output / name).unlink(missing_ok=True)
        remove_work(output / PARTIAL)
        if not any(output.iterdir()):
            output.rmdir()
        raise DataError(f"no text in {', '.join(plan['sources'])}: no documents, or all are empty")
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
            for name in TOKENIZER_FILES
        ],
        "plan": plan,
    }
    write_json(output / INDEX, index)
    progress.end(assembler)


def saved_tokenizer(
    sources: list[Source], output: Path, options: PrepareOptions, progress: Progress, tail: float | None
) -> Tokenizer:
    """The tokenizer in the output folder, created or downloaded once, so that a resumed run uses the same."""
    path = output / TOKENIZER
    if not path.is_file():
        if options.tokenizer == "bytes":
            created = tokenizers.bytes_tokenizer()
        elif options.tokenizer == "bpe":
            size = options.vocabulary_size or DEFAULT_VOCABULARY
            progress.say(f"training a BPE of {size} tokens")
            created = tokenizers.train(training_texts(sources, options, tail), size)
        else:
            created = tokenizers.load(options.tokenizer, options.end_of_document)
        tokenizers.save(created, output, tokenizers.end_token(created, options.end_of_document))
    return Tokenizer.from_file(str(path))


def validation_tail(sources: list[Source], options: PrepareOptions) -> float | None:
    """The validation fraction of a single document; None if there are several."""
    if not 0 < options.single_validation < 1:
        return None
    read = itertools.chain.from_iterable(source.documents(None) for source in sources)
    found = (document for document in itertools.islice(read, options.limit) if not is_blank(document))
    return options.single_validation if len(list(itertools.islice(found, 2))) == 1 else None


def training_texts(sources: list[Source], options: PrepareOptions, tail: float | None) -> Iterator[str]:
    """The training documents: the tokenizer must not see validation text."""
    size = records = 0
    for source in sources:
        for document in source.documents(None):
            assert isinstance(document, str)
            document = document.replace("\r\n", "\n")
            if tail is not None and not is_blank(document):
                yield str((split_tail(document, tail) or [document])[0])
                return
            content = document.encode()
            if not is_validation(content, options.seed, options.validation_fraction):
                size += len(content)
                yield document
            records += 1
            if size >= TRAINING_BYTES or records == options.limit:
                return


def pieces(
    sources: list[Source], assembler: Assembler, limit: int | None, characters: int, progress: Progress
) -> Iterator[Piece]:
    """The documents after those already assembled."""
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
    work: Iterator[Piece], settings: WorkerSettings, assembler: Assembler, workers: int, progress: Progress
) -> None:
    """Workers write the pieces; the assembler adds them in order."""
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
            # Fork the workers now, before reading the sources starts threads.
            pool.submit(os.getpid).result()
            for piece in work:
                waiting.append(pool.submit(write_in_worker, piece))
                while len(waiting) > 2 * workers or (waiting and waiting[0].done()):
                    add_first(waiting, assembler, progress)
            while waiting:
                add_first(waiting, assembler, progress)
        except BrokenProcessPool as error:
            raise DataError(
                "a worker process was killed, probably for lack of memory. Nothing is lost: run the same command again "
                "with fewer --workers to continue"
            ) from error
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def add_first(waiting: deque[Future[int]], assembler: Assembler, progress: Progress) -> None:
    waiting.popleft().result()
    assembler.add()
    progress.update(assembler)
