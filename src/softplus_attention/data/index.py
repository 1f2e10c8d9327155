"""The index of a prepared folder: its contents, how it was made, and checks that the files are unchanged."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from softplus_attention.data import DataError
from softplus_attention.data.options import TOKEN_DTYPES, escaped, flag
from softplus_attention.utils import counted, untrusted
from softplus_attention.utils.untrusted import sha256
from softplus_attention.validation import fail, fail_choice

FORMAT = "softplus-attention tokens"
VERSION = 1
INDEX = "index.json"
PARTIAL = ".partial"
SPLITS = ("train", "validation")
LARGEST_INDEX = 64 * untrusted.MIB
BLOCK = 1 << 22


@dataclass(frozen=True)
class Split:
    tokens: int
    documents: int
    shards: tuple[Mapping[str, Any], ...]
    offsets: dict[str, Any]

    @classmethod
    def parse(cls, name: str, data: Mapping[str, Any]) -> Split:
        split = cls(data["tokens"], data["documents"], tuple(map(file_record, data["shards"])), data["offsets"])
        check(name in SPLITS, f"a split {name!r}")
        check(is_count(split.documents) and is_count(split.tokens), f"the counts of {name}")
        file_record(split.offsets)
        sizes = [shard["tokens"] for shard in split.shards]
        check(all(map(is_count, sizes)) and sum(sizes) == split.tokens, f"the tokens of the shards of {name}")
        return split


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
        """``argument`` is the name of the folder in error messages."""
        folder = Path(folder)
        path = folder / INDEX
        if not path.exists():
            if (folder / PARTIAL).is_dir():
                raise DataError(f"{folder} is not finished: run the same `data prepare` again to continue")
            takes = f"`{argument}` takes a folder written by `softplus-attention data prepare`"
            if folder.is_file():
                raise DataError(f"{folder}: a file. {takes}; run that on the file first")
            raise DataError(f"{folder}: {f'no {INDEX} in it' if folder.is_dir() else 'no such folder'}. {takes}")
        try:
            return cls.parse(folder, untrusted.read_json(path, LARGEST_INDEX), argument)
        except DataError:
            raise
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            reason = error.reason if isinstance(error, untrusted.UntrustedFileError) else repr(error)
            raise DataError(
                f"{path} is damaged ({reason}): restore it from a copy, or prepare the folder again"
            ) from None

    @classmethod
    def parse(cls, folder: Path, data: Mapping[str, Any], argument: str = "directory") -> Index:
        """Raises for anything but a valid index, such as names outside the folder or inconsistent counts."""
        if (data["format"], data["version"]) != (FORMAT, VERSION):
            found = f"{data['format']!r}, version {data['version']}"
            fail(argument, f"of format {FORMAT!r}, version {VERSION}", found, DataError)
        check(data["dtype"] in TOKEN_DTYPES, "dtype")
        size, end, plan, counts = (data[name] for name in ("vocabulary_size", "end_of_document", "plan", "counts"))
        check(is_count(size) and is_count(end) and end < size <= 1 << 32, "vocabulary_size or end_of_document")
        check(all(is_count(counts[name]) for name in ("documents", "bytes", "empty", "forced_cuts")), "counts")
        check(is_count(counts.get("crlf", 0)), "counts")
        scalars = [*plan["sources"], *plan["options"].values(), plan["options"]["tokenizer"]]
        check(isinstance(plan["sources"], list), "the sources of the plan")
        check(not any(isinstance(value, list | dict) for value in scalars), "plan")
        index = cls(
            folder=folder,
            dtype=np.dtype(data["dtype"]),
            vocabulary_size=size,
            end_of_document=end,
            splits={name: Split.parse(name, split) for name, split in data["splits"].items()},
            counts=counts,
            plan=plan,
            tokenizer_files=tuple(map(file_record, data["tokenizer_files"])),
        )
        names = [record["file"] for record in index.files()]
        check(len(set(names)) == len(names), "two entries with the same name")
        return index

    def split(self, name: str) -> Split:
        if name not in self.splits:
            fail_choice("split", self.splits, name, DataError)
        return self.splits[name]

    def files(self) -> list[Mapping[str, Any]]:
        found = [record for split in self.splits.values() for record in (*split.shards, split.offsets)]
        return [*found, *self.tokenizer_files]

    def check_size(self, record: Mapping[str, Any]) -> Path:
        """The path of a file of the folder, which must exist and have the recorded size."""
        path = self.folder / record["file"]
        if not path.is_file():
            raise DataError(f"{path} is missing: {self.remedy()}")
        size = path.stat().st_size
        if size != record["bytes"]:
            raise DataError(f"{path} has {size} bytes instead of {record['bytes']}: {self.remedy()}")
        return path

    def map_array(self, record: Mapping[str, Any], dtype: np.dtype[Any], length: int) -> np.ndarray[Any, Any]:
        """Memory-maps a file after checking its size, dtype and shape."""
        path = self.check_size(record)
        try:
            found = untrusted.mapped_array(path)
            check((found.dtype, found.shape) == (dtype, (length,)), f"{found.dtype} {found.shape}")
        except ValueError as error:
            reason = error.reason if isinstance(error, untrusted.UntrustedFileError) else str(error)
            raise DataError(f"{path} has changed since it was written ({reason}): {self.remedy()}") from None
        return found

    def open_split(self, name: str) -> tuple[np.ndarray[Any, Any], list[np.ndarray[Any, Any]]]:
        """The document offsets and the shards of a split."""
        split = self.split(name)
        offsets = self.map_array(split.offsets, np.dtype(np.int64), split.documents + 1)
        increasing = all((np.diff(offsets[at : at + BLOCK + 1]) > 0).all() for at in range(0, len(offsets), BLOCK))
        if offsets[0] != 0 or offsets[-1] != split.tokens or not increasing:
            raise DataError(f"{self.folder / INDEX} does not match the {name} documents: {self.remedy()}")
        return offsets, [self.map_array(shard, self.dtype, shard["tokens"]) for shard in split.shards]

    def check_ids(self, tokens: np.ndarray[Any, Any]) -> None:
        if tokens.max(initial=0) >= self.vocabulary_size:
            raise DataError(
                f"{self.folder} has token {tokens.max()}, its vocabulary only {self.vocabulary_size}: {self.remedy()}"
            )

    def summary(self) -> list[str]:
        counts = self.counts
        documents = counted(counts["documents"], "document")
        lines = [
            f"folder       {self.folder}",
            f"tokenizer    {self.plan['options']['tokenizer']}, {self.vocabulary_size} ids, "
            f"{self.end_of_document} ends a document",
            f"text         {documents}, {counts['bytes']:,} bytes, {counts['empty']:,} empty",
        ]
        if counts.get("crlf"):
            lines.append(f"line ends    {counts['crlf']:,} CRLF became LF")
        if counts["forced_cuts"]:
            lines.append(f"cut          {counts['forced_cuts']:,} times within runs without a word boundary")
        for name, split in self.splits.items():
            size = f"{counted(split.tokens, 'token')}, {counted(split.documents, 'document')}"
            lines.append(f"{name:<13}{size}, {self.dtype.name}, shards: {len(split.shards)}")
            if not split.documents:
                lines.append(f"             none: for documents in {name}, change --validation-fraction")
        if counts["documents"] == 1 and all(split.documents for split in self.splits.values()):
            share = self.splits["validation"].tokens / sum(split.tokens for split in self.splits.values())
            lines.append(f"             a single document: its last {share:.0%} are the validation split")
        return [*lines, f"made by      {prepare_command(self.plan, self.folder)}"]

    def remedy(self) -> str:
        command = prepare_command(self.plan, self.folder)
        return f"restore it from a copy, or delete the folder and recreate it with `{command}`"


def check(is_valid: bool, what: str) -> None:
    if not is_valid:
        raise ValueError(what)


def is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 62


def file_record(record: dict[str, Any]) -> dict[str, Any]:
    """A valid entry of a file in the folder itself."""
    check(untrusted.PLAIN_NAME.fullmatch(record["file"]) is not None, f"the file name {record['file']!r}")
    check(is_count(record["bytes"]) and isinstance(record["sha256"], str), f"the entry of {record['file']}")
    return record


def prepare_command(plan: Mapping[str, Any], output: Path) -> str:
    """The command line of a plan."""
    arguments = ["softplus-attention", "data", "prepare", *plan["sources"], "--output", str(output)]
    for name, value in plan["options"].items():
        if value is not None:
            arguments += [flag(name), escaped(value) if name == "separator" and isinstance(value, str) else str(value)]
    return shlex.join(arguments)


def verify(folder: str | Path, report: Callable[[str], None] = lambda line: None) -> Index:
    """Compares the size and SHA-256 of every file with the index; an error names the first that differs."""
    index = Index.load(folder)
    for record in index.files():
        path = index.check_size(record)
        if sha256(path) != record["sha256"]:
            raise DataError(f"{path} has changed since it was written (its SHA-256 differs): {index.remedy()}")
        report(f"{record['file']}: {record['bytes']:,} bytes, unchanged")
    for name in index.splits:
        for shard in index.open_split(name)[1]:
            for start in range(0, len(shard), BLOCK):
                index.check_ids(shard[start : start + BLOCK])
    return index
