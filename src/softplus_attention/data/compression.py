"""Files that may be compressed, read as bytes: a cut-off or damaged one is an error, never a short text."""

from __future__ import annotations

import gzip
import io
import lzma
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, cast

from softplus_attention.data.files import DataError

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

COMPRESSIONS = (".xz", ".gz", ".zst")
BLOCK = 1 << 20


@contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    damage: tuple[type[Exception], ...] = (lzma.LZMAError, gzip.BadGzipFile, zlib.error, EOFError)
    if path.suffix == ".zst":
        import zstandard

        damage = (*damage, zstandard.ZstdError)
    try:
        with path.open("rb") as raw:
            yield decompressed(path, raw)
    except damage as error:
        raise DataError(f"{path} is cut off or damaged ({error}): fetch or compress it again") from error


def decompressed(path: Path, raw: BinaryIO) -> BinaryIO:
    if path.suffix == ".xz":
        return io.BufferedReader(lzma.LZMAFile(raw), BLOCK)  # type: ignore[arg-type]
    if path.suffix == ".gz":
        return io.BufferedReader(gzip.GzipFile(fileobj=raw), BLOCK)  # type: ignore[arg-type]
    if path.suffix == ".zst":
        return cast(BinaryIO, io.BufferedReader(ZstandardFile(raw), BLOCK))
    return raw


class ZstandardFile(io.RawIOBase):
    """One or more frames. zstandard's own reader takes a frame that was cut off for the end of the file."""

    def __init__(self, raw: BinaryIO) -> None:
        import zstandard

        self.raw = raw
        self.new_frame = zstandard.ZstdDecompressor().decompressobj
        self.frame: Any = None
        self.ready = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer) -> int:
        view = memoryview(buffer).cast("B")
        while not self.ready:
            block = self.raw.read(BLOCK)
            if not block:
                if self.frame is not None:
                    raise EOFError("the last zstandard frame is not complete")
                return 0
            self.ready = self._decompressed(block)
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
        return b"".join(parts)
