"""Files that appear whole or not at all, and what to say when the disk is full."""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
TEMPORARY = ".tmp"


class DataError(ValueError):
    """Input, a preparation or a prepared folder that cannot be used as it is; the message says what to do."""


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file to write that takes its name only when it is complete and on the disk."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}{TEMPORARY}")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        if error.errno in FULL:
            raise DataError(
                f"no room to write {path}: {error.strerror}. Nothing is lost: make room and run the same command "
                "again, it continues where it stopped"
            ) from error
        raise
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_json(path: Path, data: object) -> None:
    with replacing(path) as file:
        file.write((json.dumps(data, indent=1, ensure_ascii=False) + "\n").encode())


def write_array(path: Path, parts: list[np.ndarray[Any, Any]], dtype: np.dtype[Any]) -> dict[str, Any]:
    """Writes the parts as one .npy file; gives its name, bytes and SHA-256."""
    length = sum(len(part) for part in parts)
    head = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        head, {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": (length,)}
    )
    digest = hashlib.sha256(head.getvalue())
    size = len(head.getvalue()) + length * dtype.itemsize
    with replacing(path) as file:
        file.write(head.getvalue())
        for part in parts:
            raw = np.ascontiguousarray(part, dtype).view(np.uint8).data
            digest.update(raw)
            file.write(raw)
    return {"file": path.name, "bytes": size, "sha256": digest.hexdigest()}


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def remove_temporary(folder: Path) -> None:
    for path in folder.glob(f"*{TEMPORARY}"):
        path.unlink(missing_ok=True)
