"""The files of prepared data: whole or not at all, with their checksums, and what to say when the disk is full."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from softplus_attention.utils import files
from softplus_attention.utils.files import FULL


class DataError(ValueError):
    """Input, a preparation or a prepared folder that cannot be used as it is; the message says what to do."""


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """``files.replacing``, which says what to do where the disk is full."""
    try:
        with files.replacing(path) as file:
            yield file
    except OSError as error:
        if error.errno in FULL:
            raise DataError(
                f"no room to write {path}: {error.strerror}. Nothing is lost: make room and run the same command "
                "again, it continues where it stopped"
            ) from error
        raise


def write_json(path: Path, data: object) -> None:
    with replacing(path) as file:
        file.write(files.json_bytes(data))


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
    for path in folder.glob(f"*{files.TEMPORARY}"):
        path.unlink(missing_ok=True)
