"""Pieces in their order become shards; what was assembled survives a kill at any moment.

A piece is a file of the work folder with the tokens of some documents. Pieces are added in order; when a shard is full
it is written, the state of the assembly is written, and only then the pieces behind it are removed.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from softplus_attention.data.files import DataError, replacing, write_array
from softplus_attention.data.index import SPLITS

STATE = "assembled.npz"
COUNTS = ("records", "documents", "empty", "bytes", "forced_cuts")
Array = np.ndarray[Any, Any]


@dataclass
class SplitState:
    shards: list[dict[str, Any]] = field(default_factory=list)
    waiting: list[Array] = field(default_factory=list)
    lengths: list[Array] = field(default_factory=list)

    def waiting_tokens(self) -> int:
        return sum(len(part) for part in self.waiting)


def is_begun(work: Path) -> bool:
    """Whether tokens were written there that a preparation with other options would mix with its own."""
    return (work / STATE).is_file() or any(work.glob("piece-*.npz"))


def piece_path(work: Path, number: int) -> Path:
    return work / f"piece-{number:08d}.npz"


def write_arrays(path: Path, meta: dict[str, Any], arrays: dict[str, Array]) -> None:
    with replacing(path) as file:
        np.savez(file, meta=np.frombuffer(json.dumps(meta).encode(), np.uint8), **arrays)  # type: ignore[arg-type]


def read_arrays(path: Path) -> tuple[dict[str, Any], dict[str, Array]]:
    with np.load(path) as stored:
        arrays = {name: stored[name] for name in stored.files}
    return json.loads(arrays.pop("meta").tobytes()), arrays


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
        """Takes up the state on the disk and the pieces that follow it without a gap; removes the others."""
        if (self.work / STATE).is_file():
            meta, arrays = read_arrays(self.work / STATE)
            self.next_piece, self.position, self.counts = meta["next_piece"], meta["position"], meta["counts"]
            self.tokens = meta["tokens"]
            for name, split in self.splits.items():
                split.shards = meta["shards"][name]
                split.waiting = [arrays[name]]
                split.lengths = [arrays[f"{name}_lengths"]]
                self.check(split.shards)
        while piece_path(self.work, self.next_piece).is_file():
            self.add()
        for path in self.work.glob("piece-*.npz"):
            if path >= piece_path(self.work, self.next_piece):
                path.unlink()

    def check(self, shards: list[dict[str, Any]]) -> None:
        for shard in shards:
            path = self.output / shard["file"]
            if not path.is_file() or path.stat().st_size != shard["bytes"]:
                raise DataError(f"{path} was removed or changed meanwhile: delete {self.output} and start again")

    def add(self) -> None:
        """The next piece, from its file."""
        meta, arrays = read_arrays(piece_path(self.work, self.next_piece))
        self.next_piece += 1
        self.position = meta["position"]
        for name in COUNTS:
            self.counts[name] += meta["counts"][name]
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
        """Writes the last shards and the document offsets; gives the splits' part of the index."""
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
