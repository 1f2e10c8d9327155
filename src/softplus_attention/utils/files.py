"""Atomic file writes. A symlink at the destination is replaced, never followed."""

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
ABANDONED = 3600.0  # age in seconds at which a temporary file is considered abandoned
FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
# torch, tokenizers and safetensors pass on the system's message without the errno.
FULL_MESSAGES = ("No space left on device", "Disk quota exceeded", "File too large", "failed writing file")
# Control characters and lone surrogates: unsafe or invalid in terminals, pages, figures and tables.
UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")


class LockedError(Exception):
    """Another process holds the lock."""


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Opens a temporary file for writing; on success it is fsynced and renamed to ``path``.

    The folder may be untrusted, so no symlink is followed, neither at ``path`` nor at the temporary name. Every
    ``OSError`` carries the file name, also when the disk is full.
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
    """Yields a folder of the same name for other writers; on success its files are fsynced and moved to ``folder``.

    After a failure ``folder`` contains ``UNFINISHED``.
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
    """Removes a folder and its contents. If ``path`` is a symlink, only the link is removed."""
    path.unlink() if path.is_symlink() else shutil.rmtree(path, ignore_errors=True)


def flush(path: Path) -> None:
    """fsync of a file or a folder."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def is_disk_full(error: BaseException) -> bool:
    """Whether an error or one of its causes is a full disk, a quota or a file-size limit."""
    pending: list[Any] = [error]
    seen: set[int] = set()
    while pending:
        found = pending.pop()
        if found is None or id(found) in seen:
            continue
        seen.add(id(found))
        if (isinstance(found, OSError) and found.errno in FULL) or any(text in str(found) for text in FULL_MESSAGES):
            return True
        # torch.distributed.checkpoint collects the errors of all ranks here.
        failures = getattr(found, "failures", None)
        pending += [found.__cause__, found.__context__, *(cause for cause, _ in dict(failures or {}).values())]
    return False


def append_line(path: Path, line: str) -> None:
    """Appends a line to a file, which must not be a symlink."""
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
    """Raises if the folder has files and none of them matches a pattern of ``own``."""
    files = [path for path in folder.iterdir() if path.is_file()] if folder.is_dir() else []
    names = sorted(path.name for path in files if not path.name.startswith("."))
    if names and not any(path.match(pattern) for path in files for pattern in own):
        reason = f"{folder} contains unrelated files ({names[0]})"
        raise ValueError(f"{reason}. `{argument}` must be a new or empty folder, or one written by this command")


def csv_text(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    handle = io.StringIO()
    writer = csv.writer(handle, lineterminator="\n")
    writer.writerow([plain_cell(cell) for cell in head])
    writer.writerows([plain_cell(cell) for cell in row] for row in rows)
    return handle.getvalue()


def plain_cell(value: Any) -> Any:
    """Quotes text that a spreadsheet would run as a formula: names may come from untrusted files."""
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
    """Removes temporary files left by a killed ``replacing``.

    ``older`` is the minimum age in seconds, for folders where no lock rules out another writer.
    """
    for path in folder.glob(f"*.{'[0-9a-f]' * 12}{TEMPORARY}"):
        with suppress(FileNotFoundError):
            if path.lstat().st_mtime <= time.time() - older:
                path.unlink()


@contextmanager
def lock(path: Path) -> Iterator[None]:
    """An exclusive lock; raises ``LockedError`` if another process holds it.

    The system releases it when the process ends. Child processes do not inherit it.
    """
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    with os.fdopen(handle, "wb") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise LockedError(str(path)) from error
        yield
