"""One piece of work: some documents in, their tokens by split out, as a file of the work folder."""

from __future__ import annotations

import hashlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from softplus_attention.data.assembly import piece_path, write_arrays
from softplus_attention.data.index import SPLITS
from softplus_attention.data.sources import Document
from softplus_attention.data.tokenizer import Encoder

Array = np.ndarray[Any, Any]
PARALLELISM = "TOKENIZERS_PARALLELISM"


@dataclass(frozen=True)
class Settings:
    """What every worker must know."""

    work: Path
    tokenizer: Path
    as_bytes: bool
    dtype: np.dtype[Any]
    end_id: int
    seed: int
    validation_fraction: float


@dataclass(frozen=True)
class Piece:
    number: int
    documents: list[Document]
    position: Any


def is_validation(content: bytes, seed: int, fraction: float) -> bool:
    """By content and seed alone: equal documents fall on the same side, whatever comes before or beside them."""
    digest = hashlib.blake2b(content, digest_size=8, key=seed.to_bytes(8, "little")).digest()
    return int.from_bytes(digest, "little") < fraction * 2**64


class Worker:
    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.encoder = Encoder(settings.tokenizer, as_bytes=settings.as_bytes, dtype=settings.dtype)

    def write(self, piece: Piece) -> None:
        """The tokens of each split, each document's length, and where reading goes on after the piece."""
        kept: list[bool] = []
        texts: list[str] = []
        given: list[Array] = []
        size = 0
        for document in piece.documents:
            if isinstance(document, str):
                if not document or document.isspace():
                    continue
                content = document.encode()
                texts.append(document)
            else:
                if not len(document):
                    continue
                content = document.astype("<u4").tobytes()
                given.append(document.astype(self.settings.dtype))
            size += len(content)
            kept.append(is_validation(content, self.settings.seed, self.settings.validation_fraction))
        encoded, forced = self.encoder.encode(texts) if texts else (given, 0)
        counts = {
            "records": len(piece.documents),
            "documents": len(kept),
            "empty": len(piece.documents) - len(kept),
            "bytes": size,
            "forced_cuts": forced,
        }
        arrays: dict[str, Array] = {}
        end = np.array([self.settings.end_id], self.settings.dtype)
        for name in SPLITS:
            own = [tokens for tokens, held_out in zip(encoded, kept, strict=True) if held_out == (name == SPLITS[1])]
            parts = [part for tokens in own for part in (tokens, end)]
            arrays[name] = np.concatenate(parts) if parts else np.empty(0, self.settings.dtype)
            arrays[f"{name}_lengths"] = np.array([len(tokens) + 1 for tokens in own], np.int64)
        meta = {"counts": counts, "position": piece.position}
        write_arrays(piece_path(self.settings.work, piece.number), meta, arrays)


@contextmanager
def one_thread() -> Iterator[None]:
    """Each process encodes on one thread, as many processes as asked for; the caller's setting comes back."""
    before = os.environ.get(PARALLELISM)
    os.environ[PARALLELISM] = "false"
    try:
        yield
    finally:
        del os.environ[PARALLELISM]
        if before is not None:
            os.environ[PARALLELISM] = before


worker: Worker | None = None


def start_worker(settings: Settings) -> None:
    """In a new process: the parent alone answers the keyboard, and a worker does not outlive its parent."""
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
