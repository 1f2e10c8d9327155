"""Token files of other programs: .npy arrays, raw .bin files, and .bin files with the header of llm.c."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from softplus_attention.data import DataError
from softplus_attention.data.options import PrepareOptions
from softplus_attention.data.sources import FileSource, Position
from softplus_attention.utils.untrusted import mapped_array
from softplus_attention.validation import fail

# llm.c and modded-nanogpt: 256 int32, starting with magic number, version and number of tokens.
HEADER = 256
HEADER_BYTES = HEADER * 4
DTYPES_BY_MAGIC: dict[int, np.dtype[Any]] = {20240520: np.dtype("<u2"), 20240801: np.dtype("<u4")}
DTYPES: dict[str, np.dtype[Any]] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
BLOCK = 1 << 22


class TokenFile(FileSource):
    """Documents separated by end-of-document ids; a file may start with such an id, or end without one."""

    holds_tokens = True

    def __init__(self, path: Path, options: PrepareOptions) -> None:
        super().__init__(path, options)
        self.end_id = -1
        self.vocabulary = 0

    def bind(self, end_id: int, vocabulary: int) -> None:
        """Sets what is known only once the tokenizer is loaded."""
        self.end_id, self.vocabulary = end_id, vocabulary

    def documents(self, position: Position) -> Iterator[np.ndarray[Any, Any]]:
        tokens = self.map_tokens()
        begin = position or 0
        # llm.c puts the id before each document, so one at the very start ends no document.
        if begin == 0 and len(tokens) and tokens[0] == self.end_id:
            begin = 1
        for start in range(begin, len(tokens), BLOCK):
            block = tokens[start : start + BLOCK]
            self.check(block, start)
            for end in (start + np.flatnonzero(block == self.end_id)).tolist():
                self.given = end + 1
                yield np.array(tokens[begin:end])
                begin = end + 1
        if begin < len(tokens):
            self.given = len(tokens)
            yield np.array(tokens[begin:])

    def check(self, block: np.ndarray[Any, Any], start: int) -> None:
        if block.max(initial=0) >= self.vocabulary:
            at = int(np.flatnonzero(block >= self.vocabulary)[0])
            fail(
                "--tokenizer",
                f"the tokenizer of {self.name} (ids below {self.vocabulary})",
                f"id {block[at]} at token {start + at}",
                DataError,
            )

    def map_tokens(self) -> np.ndarray[Any, Any]:
        size = self.path.stat().st_size
        if size == 0:
            return np.empty(0, np.uint16)
        if self.path.suffix == ".npy":
            return self.map_npy()
        head = np.fromfile(self.path, "<i4", HEADER)
        if len(head) == HEADER and int(head[0]) in DTYPES_BY_MAGIC:
            dtype, count = DTYPES_BY_MAGIC[int(head[0])], int(head[2])
            expected = HEADER_BYTES + count * dtype.itemsize
            if size != expected:
                raise DataError(
                    f"{self.name} is truncated or damaged: its header says {count} tokens, {expected} bytes, "
                    f"but it has {size}: download it again"
                )
            return np.memmap(self.path, dtype, "r", HEADER_BYTES, (count,)) if count else np.empty(0, dtype)
        dtype = DTYPES[self.options.token_dtype]
        if size % dtype.itemsize:
            fail("--token-dtype", f"the dtype of {self.name}, {size} bytes", self.options.token_dtype, DataError)
        return np.memmap(self.path, dtype, "r")

    def map_npy(self) -> np.ndarray[Any, Any]:
        try:
            tokens = mapped_array(self.path)
        except ValueError as error:
            raise DataError(f"{self.name} is not a .npy file, or truncated ({error}): write it again") from error
        if tokens.ndim != 1 or tokens.dtype not in (np.uint16, np.uint32):
            fail("SOURCE", "1-D arrays of uint16 or uint32", f"{self.name}: {tokens.dtype} {tokens.shape}", DataError)
        return tokens
