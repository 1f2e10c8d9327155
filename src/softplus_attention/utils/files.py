"""Writing files: each appears whole or not at all, and a link at its name is replaced, never followed."""

from __future__ import annotations

import csv
import errno
import io
import json
import os
import re
import secrets
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

TEMPORARY = ".tmp"
FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}  # the numbers of errors that say so of a disk
# Control characters and lone surrogates cannot be shown in a page, a figure, a table or a terminal.
UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file to write that takes its name only when it is complete and on the disk.

    Folders come from strangers too: no link is followed, neither at ``path`` nor at the temporary name.
    """
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(6)}{TEMPORARY}")
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666)
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def append_line(path: Path, line: str) -> None:
    """Adds a line to a file that grows, which must not be a link."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    with os.fdopen(handle, "ab") as file:
        file.write(f"{line}\n".encode())


def write_whole(path: Path, text: str) -> None:
    with replacing(path) as file:
        file.write(text.encode())


def json_bytes(data: object) -> bytes:
    return (json.dumps(data, indent=1, ensure_ascii=False) + "\n").encode()


def write_json(path: Path, data: object) -> None:
    with replacing(path) as file:
        file.write(json_bytes(data))


def clean_text(text: str) -> str:
    return UNPRINTABLE.sub("\ufffd", text)


def csv_text(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    handle = io.StringIO()
    writer = csv.writer(handle, lineterminator="\n")
    writer.writerow([plain_cell(cell) for cell in head])
    writer.writerows([plain_cell(cell) for cell in row] for row in rows)
    return handle.getvalue()


def plain_cell(value: Any) -> Any:
    """Text that a spreadsheet would take for a formula is quoted: names come from files of others."""
    if value is None:
        return ""
    if not isinstance(value, str):
        return value
    is_number = re.fullmatch(r"[-+]?[\d.]+(e[-+]?\d+)?", value)
    return clean_text(f"'{value}" if value[:1] in tuple("=+-@\t\r") and not is_number else value)


def write_csv(path: Path, head: Sequence[str], rows: Iterable[Sequence[Any]]) -> Path:
    write_whole(path, csv_text(head, rows))
    return path
