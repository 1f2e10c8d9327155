"""Documents to token shards: workers write pieces, the assembler joins them; a kill loses only unfinished pieces.

A piece is a file in the work folder with the tokens of some documents. Pieces are added in order. A full shard is
written first, then the state of the assembler, and only then are its pieces removed.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from softplus_attention.data import DataError
from softplus_attention.data.index import SPLITS, file_record
from softplus_attention.data.sources import Document
from softplus_attention.data.tokenizer import Encoder
from softplus_attention.utils import files, untrusted

STATE = "assembled.npz"
COUNTS = ("records", "documents", "empty", "bytes", "forced_cuts", "crlf")
PARALLELISM = "TOKENIZERS_PARALLELISM"
Array = np.ndarray[Any, Any]


# ---- array files


def write_array(path: Path, parts: list[Array], dtype: np.dtype[Any]) -> dict[str, Any]:
    """Writes the concatenated parts as a .npy file; returns its index entry."""
    length = sum(len(part) for part in parts)
    head = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        head, {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": (length,)}
    )
    digest = hashlib.sha256(head.getvalue())
    size = len(head.getvalue()) + length * dtype.itemsize
    with files.replacing(path) as file:
        file.write(head.getvalue())
        for part in parts:
            raw = np.ascontiguousarray(part, dtype).view(np.uint8).data
            digest.update(raw)
            file.write(raw)
    return {"file": path.name, "bytes": size, "sha256": digest.hexdigest()}


def piece_path(work: Path, number: int) -> Path:
    return work / f"piece-{number:08d}.npz"


def is_begun(work: Path) -> bool:
    """Whether tokens were written, after which the options must not change."""
    return (work / STATE).is_file() or any(work.glob("piece-*.npz"))


def write_arrays(path: Path, meta: dict[str, Any], arrays: dict[str, Array]) -> None:
    files.write_arrays(path, {"meta": np.frombuffer(json.dumps(meta).encode(), np.uint8), **arrays})


def read_arrays(path: Path) -> tuple[dict[str, Any], dict[str, Array]]:
    try:
        arrays = untrusted.read_arrays(path)
        return untrusted.parse_json(path, arrays.pop("meta").tobytes()), arrays
    except (ValueError, KeyError) as error:
        raise DataError(f"{path} is damaged ({error}): delete {path.parent.parent} and start again") from None


# ---- a worker: documents to a piece


@dataclass(frozen=True)
class WorkerSettings:
    work: Path
    tokenizer: Path
    as_bytes: bool
    dtype: np.dtype[Any]
    end_id: int
    seed: int
    validation_fraction: float
    tail: float | None  # validation fraction at the end of a single document


@dataclass(frozen=True)
class Piece:
    number: int
    documents: list[Document]
    position: Any


def is_validation(content: bytes, seed: int, fraction: float) -> bool:
    """Depends only on content and seed, so equal documents are always in the same split."""
    digest = hashlib.blake2b(content, digest_size=8, key=seed.to_bytes(8, "little")).digest()
    return int.from_bytes(digest, "little") < fraction * 2**64


def is_blank(document: Document) -> bool:
    return not len(document) or (isinstance(document, str) and document.isspace())


def split_tail(document: Document, share: float) -> tuple[Document, Document] | None:
    """Splits a document, a text preferably at the end of a line; None if a part would be blank."""
    place = round(len(document) * (1 - share))
    if isinstance(document, str):
        line, word = (document.find(sign, place, place + len(document) // 20) for sign in "\n ")
        place = next((found + 1 for found in (line, word) if found >= 0), place)
    parts = document[:place], document[place:]
    return None if any(map(is_blank, parts)) else parts


class Worker:
    def __init__(self, settings: WorkerSettings) -> None:
        self.settings = settings
        self.encoder = Encoder(settings.tokenizer, as_bytes=settings.as_bytes, dtype=settings.dtype)

    def write(self, piece: Piece) -> None:
        """Writes the tokens of each split, the document lengths, and the position to resume reading from."""
        held_out: list[bool] = []
        texts: list[str] = []
        given: list[Array] = []
        size = crlf = blank = 0
        for document in piece.documents:
            if is_blank(document):
                blank += 1
                continue
            if isinstance(document, str):
                crlf += document.count("\r\n")
                document = document.replace("\r\n", "\n")
            parts = None if self.settings.tail is None else split_tail(document, self.settings.tail)
            for part in parts or [document]:
                if isinstance(part, str):
                    content = part.encode()
                    texts.append(part)
                else:
                    content = part.astype("<u4").tobytes()
                    given.append(part.astype(self.settings.dtype))
                size += len(content)
                held_out.append(is_validation(content, self.settings.seed, self.settings.validation_fraction))
            if self.settings.tail is not None:
                held_out = [False, True] if parts else [False]
        encoded, forced = self.encoder.encode(texts) if texts else (given, 0)
        counts = {
            "records": len(piece.documents),
            "documents": len(piece.documents) - blank,
            "empty": blank,
            "bytes": size,
            "forced_cuts": forced,
            "crlf": crlf,
        }
        arrays: dict[str, Array] = {}
        end = np.array([self.settings.end_id], self.settings.dtype)
        for name in SPLITS:
            own = [tokens for tokens, held in zip(encoded, held_out, strict=True) if held == (name == SPLITS[1])]
            ended = [tokens_or_end for tokens in own for tokens_or_end in (tokens, end)]
            arrays[name] = np.concatenate(ended) if ended else np.empty(0, self.settings.dtype)
            arrays[f"{name}_lengths"] = np.array([len(tokens) + 1 for tokens in own], np.int64)
        meta = {"counts": counts, "position": piece.position}
        write_arrays(piece_path(self.settings.work, piece.number), meta, arrays)


@contextmanager
def one_thread() -> Iterator[None]:
    """Runs tokenizers on one thread and restores the setting."""
    before = os.environ.get(PARALLELISM)
    os.environ[PARALLELISM] = "false"
    try:
        yield
    finally:
        del os.environ[PARALLELISM]
        if before is not None:
            os.environ[PARALLELISM] = before


worker: Worker | None = None


def start_worker(settings: WorkerSettings) -> None:
    """Worker initialiser: ignores Ctrl-C, which the parent handles, and exits when the parent dies."""
    global worker
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
    os.environ[PARALLELISM] = "false"
    worker = Worker(settings)


def write_in_worker(piece: Piece) -> int:
    assert worker is not None
    worker.write(piece)
    return piece.number


# ---- the assembler: pieces to shards


@dataclass
class SplitState:
    shards: list[dict[str, Any]] = field(default_factory=list)
    waiting: list[Array] = field(default_factory=list)
    lengths: list[Array] = field(default_factory=list)

    def waiting_tokens(self) -> int:
        return sum(len(part) for part in self.waiting)


class Assembler:
    def __init__(self, output: Path, work: Path, dtype: np.dtype[Any], shard_tokens: int) -> None:
        self.output = output
        self.work = work
        self.dtype = dtype
        self.shard_tokens = shard_tokens
        self.next_piece = 0
        self.position: Any = None
        self.counts = dict.fromkeys(COUNTS, 0)
        self.splits = {name: SplitState() for name in SPLITS}
        self.tokens = dict.fromkeys(SPLITS, 0)

    def resume(self) -> None:
        """Reads the saved state and the consecutive pieces after it; removes other pieces."""
        try:
            if (self.work / STATE).is_file():
                self.read_state()
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DataError(f"{self.work / STATE} is damaged ({error}): delete {self.output} and start again") from None
        while piece_path(self.work, self.next_piece).is_file():
            self.add()
        for path in self.work.glob("piece-*.npz"):
            if path >= piece_path(self.work, self.next_piece):
                path.unlink()

    def read_state(self) -> None:
        meta, arrays = read_arrays(self.work / STATE)
        self.next_piece, self.position, self.tokens = meta["next_piece"], meta["position"], meta["tokens"]
        self.counts |= meta["counts"]
        for name, split in self.splits.items():
            split.shards = list(map(file_record, meta["shards"][name]))
            split.waiting = [arrays[name]]
            split.lengths = [arrays[f"{name}_lengths"]]
            self.check(split.shards)

    def check(self, shards: list[dict[str, Any]]) -> None:
        for shard in shards:
            path = self.output / shard["file"]
            if not path.is_file() or path.stat().st_size != shard["bytes"]:
                raise DataError(f"{path} was removed or changed: delete {self.output} and start again")

    def add(self) -> None:
        """Adds the next piece."""
        meta, arrays = read_arrays(piece_path(self.work, self.next_piece))
        self.next_piece += 1
        self.position = meta["position"]
        for name in COUNTS:
            self.counts[name] += meta["counts"].get(name, 0)
        full = False
        for name, split in self.splits.items():
            split.waiting.append(arrays[name])
            split.lengths.append(arrays[f"{name}_lengths"])
            self.tokens[name] += len(arrays[name])
            if split.waiting_tokens() >= self.shard_tokens:
                self.write_full_shards(name, split)
                full = True
        if full:
            self.save()

    def write_full_shards(self, name: str, split: SplitState) -> None:
        tokens = np.concatenate(split.waiting)
        while len(tokens) >= self.shard_tokens:
            self.write_shard(name, split, tokens[: self.shard_tokens])
            tokens = tokens[self.shard_tokens :]
        split.waiting = [tokens.copy()]

    def write_shard(self, name: str, split: SplitState, tokens: Array) -> None:
        path = self.output / f"{name}-{len(split.shards):05d}.npy"
        split.shards.append({"tokens": len(tokens), **write_array(path, [tokens], self.dtype)})

    def save(self) -> None:
        arrays: dict[str, Array] = {}
        for name, split in self.splits.items():
            split.lengths = [np.concatenate(split.lengths)]
            arrays[name] = np.concatenate(split.waiting)
            arrays[f"{name}_lengths"] = split.lengths[0]
        meta = {
            "next_piece": self.next_piece,
            "position": self.position,
            "counts": self.counts,
            "tokens": self.tokens,
            "shards": {name: split.shards for name, split in self.splits.items()},
        }
        write_arrays(self.work / STATE, meta, arrays)
        for path in self.work.glob("piece-*.npz"):
            if path < piece_path(self.work, self.next_piece):
                path.unlink()

    def finish(self) -> dict[str, Any]:
        """Writes the last shards and the document offsets; returns the index entry of each split."""
        index = {}
        for name, split in self.splits.items():
            rest = np.concatenate(split.waiting) if split.waiting else np.empty(0, self.dtype)
            if len(rest):
                self.write_shard(name, split, rest)
            lengths = np.concatenate([np.zeros(1, np.int64), *split.lengths])
            offsets = write_array(self.output / f"{name}-documents.npy", [np.cumsum(lengths)], np.dtype(np.int64))
            index[name] = {
                "tokens": int(lengths.sum()),
                "documents": len(lengths) - 1,
                "offsets": offsets,
                "shards": split.shards,
            }
        return index
