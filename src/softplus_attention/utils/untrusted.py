"""Reading files that strangers may have made: regular files, up to a size; JSON up to a depth, field by field."""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Any

MIB = 1 << 20
PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,199}")
DEEPEST_JSON = 64
MOST_CONTAINERS = 2_000_000  # lists and objects: an empty one takes 2 bytes of the file and 64 of memory


class UntrustedFileError(ValueError):
    """A file that is not read; ``reason`` is the message without the path."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"{path}: {reason}")
        self.reason = reason


def check_regular(path: Path) -> None:
    """The file, which may be a link, is no FIFO and no device."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise UntrustedFileError(path, "not a regular file")


def check_plain_name(path: Path, name: str) -> str:
    """A name in the file ``path`` that must be one of a file beside it."""
    if not PLAIN_NAME.fullmatch(name):
        raise UntrustedFileError(path, f"{short(name)} is no plain file name")
    return name


def read_bytes(path: Path, limit: int) -> bytes:
    """The whole file, which may be a link. Never waits for a FIFO, and opens no device."""
    check_regular(path)
    # Between the two looks another file can take the name.
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY), "rb") as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise UntrustedFileError(path, "not a regular file")
        if found.st_size > limit:
            raise UntrustedFileError(path, f"larger than {limit / MIB:g} MiB")
        return file.read(found.st_size)


def read_text(path: Path, limit: int) -> str:
    try:
        return read_bytes(path, limit).decode()
    except UnicodeDecodeError as error:
        raise UntrustedFileError(path, f"not UTF-8: {error}") from None


def read_json(path: Path, limit: int = 64 * MIB) -> Any:
    return parse_json(path, read_bytes(path, limit))


def read_json_lines(path: Path, limit: int = 64 * MIB) -> list[Any]:
    return [parse_json(path, line) for line in read_bytes(path, limit).splitlines() if line.strip()]


def parse_json(path: Path, content: bytes) -> Any:
    if content.count(b"[") + content.count(b"{") > MOST_CONTAINERS:
        raise UntrustedFileError(path, f"JSON of more than {MOST_CONTAINERS} lists and objects")
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
    """The content of a file is not what it must be."""


# Fields of JSON, of a type; the error names the field.
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
    """The number, or None where the file says null or nothing."""
    return number(data.get(name), name)


def count_of(data: dict[str, Any], name: str) -> int:
    value = number_of(data, name)
    if value is None or value != int(value) or not 0 <= value < 1e15:
        raise UnreadableError(f"`{name}` must be a whole number, got {short(data.get(name))}")
    return int(value)


def number(value: Any, name: str) -> float | None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
        raise UnreadableError(f"`{name}` must be a number, got {short(value)}")
    return value


def typed(data: Any, name: str, kind: type, words: str) -> Any:
    if not isinstance(data, dict) or not isinstance(data.get(name), kind):
        got = data.get(name) if isinstance(data, dict) else data
        raise UnreadableError(f"`{name}` must be {words}, got {short(got)}")
    return data[name]


def short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."
