"""Reading untrusted files: regular files up to a size, JSON up to a depth, fields checked by type."""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import stat
import zipfile
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

MIB = 1 << 20
LARGEST_TEXT = 1024 * MIB
# What NumPy raises for forged headers, among them headers of larger arrays than the file.
DAMAGED_ARRAYS = (
    ValueError, KeyError, TypeError, AttributeError, EOFError, SyntaxError, OverflowError, RuntimeError, MemoryError,
)  # fmt: skip
PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,199}")
DEEPEST_JSON = 64
MAX_CONTAINERS = 2_000_000  # lists and objects: an empty one takes 2 bytes in the file and 64 in memory


class UntrustedFileError(ValueError):
    """The file cannot be read safely; ``reason`` is the message without the path."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"{path}: {reason}")
        self.reason = reason


def check_regular(path: Path) -> None:
    """Raises for FIFOs, devices and folders; a symlink to a regular file is fine."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise UntrustedFileError(path, "not a regular file")


def check_plain_name(path: Path, name: str) -> str:
    """Raises unless ``name``, read from ``path``, is a file name without a folder."""
    if not PLAIN_NAME.fullmatch(name):
        raise UntrustedFileError(path, f"{short(name)} is not a plain file name")
    return name


def open_regular(path: Path) -> io.BufferedReader:
    """Opens a regular file, or a symlink to one, for reading. Never blocks on a FIFO or opens a device."""
    check_regular(path)
    file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY), "rb")
    # The file may have been replaced between the two checks.
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise UntrustedFileError(path, "not a regular file")
    return file


def is_tokenizer_error(error: BaseException) -> bool:
    """tokenizers raises plain ``Exception``, and ``PanicException``, a ``BaseException``, if its Rust code panics."""
    return type(error) is Exception or type(error).__name__ == "PanicException"


def sha256(path: Path) -> str:
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def begins_with(path: Path, content: bytes) -> bool:
    with open_regular(path) as file:
        return file.read(len(content)) == content


def read_bytes(path: Path, limit: int) -> bytes:
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > limit:
            raise UntrustedFileError(path, f"larger than {limit / MIB:g} MiB")
        return file.read(size)


def read_text(path: Path, limit: int) -> str:
    try:
        return read_bytes(path, limit).decode()
    except UnicodeDecodeError as error:
        raise UntrustedFileError(path, f"not UTF-8: {error}") from None


def read_option(option: str, path: Path) -> str:
    """Reads the text file named by an option; errors name the option."""
    try:
        return read_text(path, LARGEST_TEXT)
    except OSError as error:
        raise ValueError(f"{option} {path}: {(error.strerror or str(error)).lower()}") from None
    except UntrustedFileError as error:
        raise ValueError(f"{option} {error}") from None


def mapped_array(path: Path) -> Array:
    """Memory-maps a .npy file of numbers."""
    import numpy as np

    check_regular(path)
    try:
        return np.lib.format.open_memmap(path, mode="r")
    except (*DAMAGED_ARRAYS, OSError) as error:
        raise UntrustedFileError(path, f"not an array: {' '.join(str(error).split())[:200]}") from None


def read_arrays(path: Path, limit: int = 1 << 40) -> dict[str, Array]:
    """Reads a .npz file of numbers. ``limit`` bounds the decompressed bytes, since the file may be a zip bomb."""
    import numpy as np

    try:
        with open_regular(path) as file, np.load(file, allow_pickle=False) as stored:
            if sum(entry.file_size for entry in stored.zip.infolist()) > limit:
                raise UntrustedFileError(path, f"larger than {limit / MIB:g} MiB when decompressed")
            return {name: stored[name] for name in stored.files}
    except UntrustedFileError:
        raise
    # A forged header or archive can fail in many ways.
    except (*DAMAGED_ARRAYS, zipfile.BadZipFile, zlib.error) as error:
        raise UntrustedFileError(path, f"not arrays: {' '.join(str(error).split())[:200]}") from None


def read_json(path: Path, limit: int = 64 * MIB) -> Any:
    return parse_json(path, read_bytes(path, limit))


def read_json_lines(path: Path, limit: int = 64 * MIB) -> list[Any]:
    return [parse_json(path, line) for line in read_bytes(path, limit).splitlines() if line.strip()]


def parse_json(path: Path, content: bytes) -> Any:
    if content.count(b"[") + content.count(b"{") > MAX_CONTAINERS:
        raise UntrustedFileError(path, f"JSON with more than {MAX_CONTAINERS} lists and objects")
    try:
        data = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise UntrustedFileError(path, f"not JSON: {str(error)[:200]}") from None
    if is_deep(data):
        raise UntrustedFileError(path, f"JSON nested deeper than {DEEPEST_JSON} levels")
    return data


def is_deep(data: Any) -> bool:
    level = [data]
    for _ in range(DEEPEST_JSON):
        level = [item for container in level for item in items_of(container) if isinstance(item, dict | list)]
        if not level:
            return False
    return True


def items_of(data: Any) -> Iterable[Any]:
    if isinstance(data, dict):
        return data.values()
    return data if isinstance(data, list) else ()


class UnreadableError(ValueError):
    """A field of a file is missing or has the wrong type."""


# Typed access to JSON fields; the error names the field.
def mapping(data: Any, name: str) -> dict[str, Any]:
    return typed(data, name, dict, "an object")


def rows_of(data: Any, name: str) -> list[dict[str, Any]]:
    rows = typed(data, name, list, "a list")
    if not all(isinstance(row, dict) for row in rows):
        raise UnreadableError(f"`{name}` must be a list of objects")
    return rows


def numbers_of(data: Any, name: str) -> list[float | None]:
    return [number(value, name) for value in typed(data, name, list, "a list")]


def text_of(data: Any, name: str) -> str:
    return typed(data, name, str, "text")


def number_of(data: dict[str, Any], name: str) -> float | None:
    """The number, or None if the field is null or missing."""
    return number(data.get(name), name)


def count_of(data: dict[str, Any], name: str) -> int:
    value = number_of(data, name)
    if value is None or not 0 <= value < 1e15 or value != int(value):
        raise UnreadableError(f"`{name}` must be a whole number, got {short(data.get(name))}")
    return int(value)


def number(value: Any, name: str) -> float | None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
        raise UnreadableError(f"`{name}` must be a number, got {short(value)}")
    return value


def typed(data: Any, name: str, kind: type, description: str) -> Any:
    if not isinstance(data, dict) or not isinstance(data.get(name), kind):
        got = data.get(name) if isinstance(data, dict) else data
        raise UnreadableError(f"`{name}` must be {description}, got {short(got)}")
    return data[name]


def short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."
