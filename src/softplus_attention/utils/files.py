"""Writing files: each appears whole or not at all, and a link at its name is replaced, never followed."""

from __future__ import annotations

import csv
import errno
import fcntl
import io
import json
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

TEMPORARY = ".tmp"
UNFINISHED = ".unfinished"
ABANDONED = 3600.0  # seconds after which nobody still writes a temporary file
FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}  # the numbers of errors that say so of a disk
# torch, tokenizers and safetensors pass the system's words on without the number.
FULL_WORDS = ("No space left on device", "Disk quota exceeded", "File too large", "failed writing file")
# Control characters and lone surrogates cannot be shown in a page, a figure, a table or a terminal.
UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")


class LockedError(Exception):
    """Another process holds the lock."""


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file to write that takes its name only when it is complete and on the disk.

    Folders come from strangers too: no link is followed, neither at ``path`` nor at the temporary name. An ``OSError``
    names the file, a full disk's too.
    """
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(6)}{TEMPORARY}")
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666)
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename is None and error.errno is not None:
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise


@contextmanager
def filling(folder: Path) -> Iterator[Path]:
    """A folder of the same name for other writers than ours: its files move to ``folder`` when all of them are complete
    and on the disk.

    Where that did not end well, ``UNFINISHED`` in ``folder`` says so.
    """
    unfinished = folder / UNFINISHED
    remove_folder(unfinished)
    partial = unfinished / folder.resolve().name
    partial.mkdir(parents=True)
    try:
        yield partial
        for path in sorted(partial.iterdir()):
            flush(path)
            path.replace(folder / path.name)
        flush(folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    shutil.rmtree(unfinished, ignore_errors=True)


def remove_folder(path: Path) -> None:
    """A folder with all that is in it, or a link in its place: what it leads to stays."""
    path.unlink() if path.is_symlink() else shutil.rmtree(path, ignore_errors=True)


def flush(path: Path) -> None:
    """fsync of a file or a folder."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def is_disk_full(error: BaseException) -> bool:
    """Whether an error, or what caused it, is a disk without room or a file-size limit."""
    waiting: list[Any] = [error]
    seen: set[int] = set()
    while waiting:
        found = waiting.pop()
        if found is None or id(found) in seen:
            continue
        seen.add(id(found))
        if (isinstance(found, OSError) and found.errno in FULL) or any(words in str(found) for words in FULL_WORDS):
            return True
        # torch's checkpoints collect what went wrong on each process.
        failures = getattr(found, "failures", None)
        waiting += [found.__cause__, found.__context__, *(cause for cause, _ in dict(failures or {}).values())]
    return False


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


def write_arrays(path: Path, arrays: Mapping[str, Any], compress: bool = False) -> None:
    """A .npz file."""
    import numpy as np

    with replacing(path) as file:
        (np.savez_compressed if compress else np.savez)(file, **arrays)


def clean_text(text: str) -> str:
    return UNPRINTABLE.sub("\ufffd", text)


def check_no_strangers(argument: str, folder: Path, own: Sequence[str]) -> None:
    """Refuses a folder in which files lie and none of them is ours, by the patterns of ``own``."""
    files = [path for path in folder.iterdir() if path.is_file()] if folder.is_dir() else []
    names = sorted(path.name for path in files if not path.name.startswith("."))
    if names and not any(path.match(pattern) for path in files for pattern in own):
        reason = f"the folder {folder} holds files of something else ({names[0]})"
        raise ValueError(f"{reason}: `{argument}` takes a new folder, an empty one, or one of its own")


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


def remove_temporary(folder: Path, older: float = 0) -> None:
    """What a killed ``replacing`` left there; ``older``: only what is so many seconds old, where no lock tells that
    nobody else is writing."""
    for path in folder.glob(f"*.{'[0-9a-f]' * 12}{TEMPORARY}"):
        with suppress(FileNotFoundError):
            if path.lstat().st_mtime <= time.time() - older:
                path.unlink()


@contextmanager
def lock(path: Path) -> Iterator[None]:
    """Held by one process at a time; a second gets ``LockedError``. However the process ends, the system releases it;
    child processes do not inherit it."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    with os.fdopen(handle, "wb") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise LockedError(str(path)) from error
        yield
