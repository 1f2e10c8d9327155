"""Files that appear whole or not at all."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

TEMPORARY = ".tmp"
FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}  # the numbers of errors that say so of a disk


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
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_whole(path: Path, text: str) -> None:
    with replacing(path) as file:
        file.write(text.encode())


def json_bytes(data: object) -> bytes:
    return (json.dumps(data, indent=1, ensure_ascii=False) + "\n").encode()


def write_json(path: Path, data: object) -> None:
    with replacing(path) as file:
        file.write(json_bytes(data))
