"""Document sources: text, JSON Lines and parquet files, Hugging Face datasets, and the built-in text.

A source yields its documents in a fixed order. Its position after each one is a JSON value from which reading can
resume.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import lzma
import os
import re
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Protocol, cast

import numpy as np

from softplus_attention.data import DataError
from softplus_attention.data.builtin import builtin_text
from softplus_attention.data.options import PrepareOptions
from softplus_attention.utils.untrusted import open_regular
from softplus_attention.validation import fail

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

Document = str | np.ndarray[Any, Any]
Position = Any

COMPRESSIONS = (".xz", ".gz", ".zst")
BLOCK = 1 << 20
ZSTANDARD_BLOCK = 1 << 10  # expands to at most 32 MiB: 4 bytes can encode 128 KiB
TEXTS = (".txt", *(".txt" + packed for packed in COMPRESSIONS))
JSON_LINES = (".jsonl", ".ndjson")
TOKENS = (".npy", ".bin")
RECORDS = (*JSON_LINES, *(name + packed for name in JSON_LINES for packed in COMPRESSIONS), ".parquet", *TOKENS)
BUILTIN = "builtin"
HUB = "hub:"
FINEWEB = "fineweb"
FINEWEB_DATASET = "HuggingFaceFW/fineweb"
FINEWEB_SAMPLE = "sample-10BT"
EXPECTED = (
    f"files or folders of text, .jsonl, .parquet, .npy or .bin; {FINEWEB}[:SAMPLE] or {HUB}DATASET[:CONFIGURATION] for "
    f"a dataset on the Hugging Face Hub; or {BUILTIN} for the training text of the package"
)
SAMPLE = 1 << 13
# Bytes at each end of a file that identify it, without reading all of it.
FINGERPRINT = 1 << 16


class Source(Protocol):
    name: str
    holds_tokens: bool

    def identity(self) -> str:
        """Must be unchanged when a run resumes."""

    def documents(self, position: Position) -> Iterator[Document]:
        """The documents from ``position``; None is the start."""

    def position(self) -> Position:
        """The position after the last document yielded."""


def find(names: Sequence[str], options: PrepareOptions, output: Path, argument: str = "SOURCE") -> list[Source]:
    """The sources in the given order, the files of a folder sorted by path. ``argument`` names them in errors."""
    if not names:
        fail(argument, EXPECTED, "nothing", DataError)
    found: list[Source] = []
    seen: set[Path] = set()
    for name in names:
        if name == BUILTIN and not Path(name).exists():
            found.append(BuiltinText())
            continue
        if name.startswith(HUB) or (name.partition(":")[0] == FINEWEB and not Path(name).exists()):
            found.append(hub_source(name, options))
            continue
        for path in find_files(name, output, argument):
            if path.resolve() in seen:
                fail(argument, "different files", f"{path} twice", DataError)
            seen.add(path.resolve())
            found.append(file_source(path, options))
    if len({source.holds_tokens for source in found}) > 1:
        fail(argument, "either text or token files", "both", DataError)
    return found


def find_files(name: str, output: Path, argument: str) -> list[Path]:
    """A file, or the files of a folder: records, tokens and .txt if it has records or tokens, else all text files."""
    path = Path(name)
    if not path.exists():
        hint = "" if path.suffix else f" (a dataset on the Hugging Face Hub is {HUB}{name})"
        raise DataError(f"{name}: no such file or folder{hint}")
    if path.is_file():
        if path.name.endswith(".json"):
            raise DataError(
                f"{name}: JSON, not JSON Lines. Convert it to .jsonl, one object per line, or rename it to .txt"
            )
        if not path.name.endswith(RECORDS) and (reason := why_not_text(path)):
            raise DataError(f"{name}: {reason}. {argument} takes {EXPECTED}")
        return [path]
    if not path.is_dir():
        raise DataError(f"{name}: not a regular file. {argument} takes {EXPECTED}")
    if output.resolve().is_relative_to(path.resolve()):
        fail("--output", f"outside the source folder {name!r}", f"{str(output)!r}", DataError)
    files = sorted(
        file
        for file in path.rglob("*")
        if not any(part.startswith(".") for part in file.relative_to(path).parts) and file.is_file()
    )
    if any(file.name.endswith(RECORDS) for file in files):
        found = [file for file in files if file.name.endswith((*RECORDS, *TEXTS))]
    else:
        found = [file for file in files if not why_not_text(file)]
    if not found:
        raise DataError(f"{name}: a folder without text. {argument} takes {EXPECTED}")
    return found


def why_not_text(path: Path) -> str:
    """Why the start of a file is not UTF-8 text; "" if it may be."""
    with opened(path) as file:
        sample = file.read(SAMPLE)
    if sample.startswith((b"\xff\xfe", b"\xfe\xff")):
        return "UTF-16, convert it to UTF-8 (iconv -f UTF-16 -t UTF-8)"
    return "a binary file" if b"\0" in sample or sample.startswith(b"%PDF") else ""


def file_source(path: Path, options: PrepareOptions) -> Source:
    if path.suffix in TOKENS:
        from softplus_attention.data.token_files import TokenFile

        return TokenFile(path, options)
    if path.suffix == ".parquet":
        return ParquetFile(path, options)
    return (JsonLinesFile if path.name.endswith(RECORDS) else TextFile)(path, options)


def file_identity(path: Path) -> str:
    size = path.stat().st_size
    with open_regular(path) as file:
        digest = hashlib.sha256(file.read(FINGERPRINT))
        file.seek(max(0, size - FINGERPRINT))
        digest.update(file.read(FINGERPRINT))
    return f"{path}, {size} bytes, {digest.hexdigest()[:16]}"


class FileSource:
    holds_tokens = False

    def __init__(self, path: Path, options: PrepareOptions) -> None:
        self.path = path
        self.name = str(path)
        self.options = options
        self.given = 0

    def identity(self) -> str:
        return file_identity(self.path)

    def position(self) -> Position:
        return self.given

    def decoded(self, data: bytes, offset: int) -> str:
        """``offset`` is the position of ``data`` in the decompressed file."""
        try:
            return data.decode(errors=self.options.errors)
        except UnicodeDecodeError as error:
            where = "of the decompressed text " if self.path.suffix in COMPRESSIONS else ""
            raise DataError(
                f"{self.name} is not UTF-8: {error.reason} (0x{data[error.start]:02x}) at byte {offset + error.start} "
                f"{where}- convert the file (iconv -t UTF-8), or pass --errors replace to insert U+FFFD"
            ) from None


@contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    damage: tuple[type[Exception], ...] = (lzma.LZMAError, gzip.BadGzipFile, zlib.error, EOFError)
    if path.suffix == ".zst":
        import zstandard

        damage = (*damage, zstandard.ZstdError)
    try:
        with open_regular(path) as raw:
            yield decompressed(path, raw)
    except damage as error:
        raise DataError(f"{path} is truncated or damaged ({error}): download or compress it again") from error


def decompressed(path: Path, raw: BinaryIO) -> BinaryIO:
    if path.suffix == ".xz":
        return io.BufferedReader(lzma.LZMAFile(raw), BLOCK)  # type: ignore[arg-type]
    if path.suffix == ".gz":
        return io.BufferedReader(gzip.GzipFile(fileobj=raw), BLOCK)  # type: ignore[arg-type]
    if path.suffix == ".zst":
        return cast(BinaryIO, io.BufferedReader(ZstandardFile(raw), BLOCK))
    return raw


class ZstandardFile(io.RawIOBase):
    """One or more frames. zstandard's own reader treats a truncated frame as the end of the file."""

    def __init__(self, raw: BinaryIO) -> None:
        import zstandard

        self.raw = raw
        self.new_frame = zstandard.ZstdDecompressor().decompressobj
        self.frame: Any = None
        self.ready = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer) -> int:
        view = memoryview(buffer).cast("B")
        while not self.ready:
            block = self.raw.read(ZSTANDARD_BLOCK)
            if not block:
                if self.frame is not None:
                    raise EOFError("the last zstandard frame is not complete")
                return 0
            self.ready = memoryview(self._decompressed(block))
        count = min(len(view), len(self.ready))
        view[:count] = self.ready[:count]
        self.ready = self.ready[count:]
        return count

    def _decompressed(self, block: bytes) -> bytes:
        parts = []
        while block:
            if self.frame is None:
                self.frame = self.new_frame()
            parts.append(self.frame.decompress(block))
            block = b""
            if self.frame.eof:
                block = self.frame.unused_data
                self.frame = None
        return parts[0] if len(parts) == 1 else b"".join(parts)


class TextFile(FileSource):
    """One document, or several with a separator."""

    def documents(self, position: Position) -> Iterator[str]:
        self.given = 0
        with opened(self.path) as file:
            for offset, data in self.records(file):
                self.given += 1
                if self.given > (position or 0):
                    yield self.decoded(data, offset)

    def records(self, file: Any) -> Iterator[tuple[int, bytes]]:
        mark = file.read(3)
        offset, rest = (3, b"") if mark == b"\xef\xbb\xbf" else (0, mark)
        if self.options.separator is None:
            yield offset, rest + file.read()
            return
        separator = re.compile(re.escape(self.options.separator.encode()).replace(b"\\\n", b"\r?\n"))
        while block := file.read(16 * BLOCK):
            rest += block
            begin = 0
            for found in separator.finditer(rest):
                yield offset + begin, rest[begin : found.start()]
                begin = found.end()
            offset, rest = offset + begin, rest[begin:]
        yield offset, rest


class JsonLinesFile(FileSource):
    def __init__(self, path: Path, options: PrepareOptions) -> None:
        super().__init__(path, options)
        self.offset = 0

    def position(self) -> Position:
        return [self.given, self.offset]

    def documents(self, position: Position) -> Iterator[str]:
        first, start = position or (0, 0)
        self.given = self.offset = 0
        with opened(self.path) as file:
            if self.path.suffix not in COMPRESSIONS:
                file.seek(start)
                self.given, self.offset = first, start
            for line in file:
                offset = self.offset
                self.offset += len(line)
                self.given += 1
                if self.given > first and line.strip():
                    yield self.extract_text(line, offset)

    def extract_text(self, line: bytes, offset: int) -> str:
        field = self.options.text_field
        where = f"line {self.given} of {self.name}"
        text = self.decoded(line, offset)
        try:
            record = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{where} is not JSON: {error}") from None
        if not isinstance(record, dict) or field not in record:
            keys = ", ".join(record) if isinstance(record, dict) else type(record).__name__
            fail("--text-field", "a key of every record", f"{field!r}, and {where} has {keys}", DataError)
        value = record[field]
        if value is None:
            return ""
        if not isinstance(value, str):
            kind = type(value).__name__
            fail("--text-field", "the key of a string", f"{field!r}, which in {where} is of type {kind}", DataError)
        return without_surrogates(value, where, self.options.errors) if "\\ud" in text.lower() else value


def without_surrogates(text: str, where: str, errors: str) -> str:
    """JSON can escape a lone surrogate, which UTF-8 cannot encode."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        if errors == "strict":
            raise DataError(
                f"{where} has a lone surrogate, \\u{ord(text[error.start]):04x}: pass --errors replace to replace it "
                "with U+FFFD"
            ) from None
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


class ParquetFile(FileSource):
    ROWS = 1024

    def documents(self, position: Position) -> Iterator[str]:
        import pyarrow
        from pyarrow import parquet

        first = position or 0
        try:
            with parquet.ParquetFile(self.path, memory_map=True) as file:
                self.check(file.schema_arrow, pyarrow)
                self.given = 0
                for group in range(file.num_row_groups):
                    rows = file.metadata.row_group(group).num_rows
                    if self.given + rows <= first:
                        self.given += rows
                        continue
                    column = [self.options.text_field]
                    for batch in file.iter_batches(self.ROWS, row_groups=[group], columns=column, use_threads=False):
                        for value in batch.column(0).to_pylist():
                            self.given += 1
                            if self.given > first:
                                yield value or ""
        except (pyarrow.ArrowInvalid, OSError) as error:
            if isinstance(error, FileNotFoundError | PermissionError):
                raise
            raise DataError(f"{self.name} is truncated or damaged ({error}): download it again") from error

    def check(self, schema: Any, pyarrow: Any) -> None:
        field = self.options.text_field
        if field not in schema.names:
            fail("--text-field", f"a column of {self.name} ({', '.join(schema.names)})", repr(field), DataError)
        kind = schema.field(field).type
        if not (pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind)):
            fail("--text-field", f"a column of strings in {self.name}", f"{field!r} of {kind}", DataError)


class BuiltinText:
    """The training works of the package; its validation works are for evaluation only."""

    name = BUILTIN
    holds_tokens = False

    def __init__(self) -> None:
        self.given = 0

    def identity(self) -> str:
        digest = hashlib.sha256("\0".join(builtin_text()[0]).encode())
        return f"{self.name}, {digest.hexdigest()[:16]}"

    def position(self) -> Position:
        return self.given

    def documents(self, position: Position) -> Iterator[str]:
        self.given = position or 0
        for text in builtin_text()[0][self.given :]:
            self.given += 1
            yield text


def hub_source(name: str, options: PrepareOptions) -> HubDataset:
    if name.startswith(HUB):
        dataset, _, configuration = name.removeprefix(HUB).partition(":")
        if not dataset:
            fail("SOURCE", EXPECTED, repr(name), DataError)
        return HubDataset(name, dataset, configuration or None, options)
    return HubDataset(name, FINEWEB_DATASET, name.partition(":")[2] or FINEWEB_SAMPLE, options)


class HubDataset:
    """The train split of a dataset, streamed; only the tokens are stored."""

    holds_tokens = False

    def __init__(self, name: str, dataset: str, configuration: str | None, options: PrepareOptions) -> None:
        self.name = name
        self.dataset = dataset
        self.configuration = configuration
        self.options = options
        self.stream: Any = None

    def identity(self) -> str:
        return self.name

    def position(self) -> Position:
        return self.stream.state_dict()

    def documents(self, position: Position) -> Iterator[str]:
        field = self.options.text_field
        self.stream = self.load()
        if self.stream.column_names and field not in self.stream.column_names:
            columns = ", ".join(self.stream.column_names)
            fail("--text-field", f"a column of {self.name} ({columns})", repr(field), DataError)
        if position is not None:
            self.stream.load_state_dict(position)
        try:
            for record in self.stream:
                yield record[field] or ""
        except Exception as error:
            raise DataError(
                f"reading {self.name} failed ({type(error).__name__}: {error}). Nothing is lost: run the same command "
                "again to continue"
            ) from error

    def load(self) -> Any:
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
        import datasets

        try:
            return datasets.load_dataset(self.dataset, name=self.configuration, split="train", streaming=True)
        except Exception as error:
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            fail("SOURCE", EXPECTED, f"{self.name!r}, which `datasets` cannot open: {reason}", DataError)
