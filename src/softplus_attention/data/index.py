"""The index of a prepared folder: what it holds, how it was made, and whether the files are still what was written."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from softplus_attention.data import DataError
from softplus_attention.utils.files import sha256
from softplus_attention.validation import fail

FORMAT = "softplus-attention tokens"
VERSION = 1
INDEX = "index.json"
PARTIAL = ".partial"
SPLITS = ("train", "validation")


@dataclass(frozen=True)
class Split:
    tokens: int
    documents: int
    shards: tuple[Mapping[str, Any], ...]
    offsets: Mapping[str, Any]


@dataclass(frozen=True)
class Index:
    folder: Path
    dtype: np.dtype[Any]
    vocabulary_size: int
    end_of_document: int
    splits: Mapping[str, Split]
    counts: Mapping[str, int]
    plan: Mapping[str, Any]
    tokenizer_files: tuple[Mapping[str, Any], ...]

    @classmethod
    def load(cls, folder: str | Path, argument: str = "directory") -> Index:
        """``argument`` is what errors call the folder."""
        folder = Path(folder)
        path = folder / INDEX
        if not path.is_file():
            if (folder / PARTIAL).is_dir():
                raise DataError(f"{folder} is not finished: run the same `data prepare` again, it continues")
            found = f"{str(folder)!r}, which " + (f"has no {INDEX}" if folder.is_dir() else "is no folder")
            fail(argument, "a folder written by `softplus-attention data prepare`", found, DataError)
        try:
            return cls.parsed(folder, json.loads(path.read_text()), argument)
        except DataError:
            raise
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DataError(
                f"{path} is damaged ({error!r}): restore it from a copy, or prepare the folder again"
            ) from None

    @classmethod
    def parsed(cls, folder: Path, data: Mapping[str, Any], argument: str = "directory") -> Index:
        if (data["format"], data["version"]) != (FORMAT, VERSION):
            found = f"{data['format']!r}, version {data['version']}"
            fail(argument, f"of format {FORMAT!r}, version {VERSION}", found, DataError)
        return cls(
            folder=folder,
            dtype=np.dtype(data["dtype"]),
            vocabulary_size=data["vocabulary_size"],
            end_of_document=data["end_of_document"],
            splits={
                name: Split(split["tokens"], split["documents"], tuple(split["shards"]), split["offsets"])
                for name, split in data["splits"].items()
            },
            counts=data["counts"],
            plan=data["plan"],
            tokenizer_files=tuple(data["tokenizer_files"]),
        )

    def split(self, name: str) -> Split:
        if name not in self.splits:
            fail("split", f"one of {', '.join(self.splits)}", repr(name), DataError)
        return self.splits[name]

    def files(self) -> list[Mapping[str, Any]]:
        found = [record for split in self.splits.values() for record in (*split.shards, split.offsets)]
        return [*found, *self.tokenizer_files]

    def check_size(self, record: Mapping[str, Any]) -> Path:
        """The path of a file of the folder that is there and as long as it was."""
        path = self.folder / record["file"]
        if not path.is_file():
            raise DataError(f"{path} is missing: {self.remedy()}")
        size = path.stat().st_size
        if size != record["bytes"]:
            raise DataError(f"{path} has {size} bytes and was written with {record['bytes']}: {self.remedy()}")
        return path

    def mapped(self, record: Mapping[str, Any]) -> np.ndarray[Any, Any]:
        """The numbers of a file, read where they are wanted."""
        path = self.check_size(record)
        try:
            return np.load(path, mmap_mode="r")
        except ValueError as error:
            reason = str(error).splitlines()[0]
            raise DataError(f"{path} is not what was written there ({reason}): {self.remedy()}") from None

    def summary(self) -> list[str]:
        counts = self.counts
        lines = [
            f"folder       {self.folder}",
            f"tokenizer    {self.plan['options']['tokenizer']}, {self.vocabulary_size} ids, "
            f"{self.end_of_document} ends a document",
            f"text         {counts['documents']:,} documents, {counts['bytes']:,} bytes, {counts['empty']:,} empty",
        ]
        if counts["forced_cuts"]:
            lines.append(f"cut          {counts['forced_cuts']:,} times inside runs without a word boundary")
        for name, split in self.splits.items():
            size = f"{split.tokens:,} tokens, {split.documents:,} documents"
            lines.append(f"{name:<13}{size}, {self.dtype.name}, shards: {len(split.shards)}")
            if not split.documents:
                remedy = "for documents in {}, change --validation-fraction"
                if counts["documents"] == 1:
                    remedy = "one document is not divided; add others, or part it with --separator"
                lines.append(f"             none: {remedy.format(name)}")
        return [*lines, f"made by      {command_of(self.plan, self.folder)}"]

    def remedy(self) -> str:
        command = command_of(self.plan, self.folder)
        return f"restore it from a copy, or delete the folder and make it again with `{command}`"


def command_of(plan: Mapping[str, Any], output: Path) -> str:
    """The command that carries out a plan."""
    words = ["softplus-attention", "data", "prepare", *plan["sources"], "--output", str(output)]
    for name, value in plan["options"].items():
        if value is not None:
            words += [f"--{name.replace('_', '-')}", str(value)]
    return shlex.join(words)


def verify(folder: str | Path, report: Callable[[str], None] = lambda line: None) -> Index:
    """Reads every file of a prepared folder and compares length and SHA-256; an error names the first that differs."""
    index = Index.load(folder)
    for record in index.files():
        path = index.check_size(record)
        if sha256(path) != record["sha256"]:
            raise DataError(f"{path} is not what was written (its SHA-256 differs): {index.remedy()}")
        report(f"{record['file']}: {record['bytes']:,} bytes as written")
    for name, split in index.splits.items():
        offsets = np.load(index.folder / split.offsets["file"], mmap_mode="r")
        whole = len(offsets) == split.documents + 1 and offsets[0] == 0 and offsets[-1] == split.tokens
        if not whole or sum(shard["tokens"] for shard in split.shards) != split.tokens:
            raise DataError(f"{index.folder / INDEX} and the {name} documents disagree: {index.remedy()}")
    return index
