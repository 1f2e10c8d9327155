"""Reading a prepared folder: tokens and documents of one split, mapped into memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from softplus_attention.data.index import Index
from softplus_attention.validation import fail

Tokens = np.ndarray[Any, np.dtype[Any]]


class TokenDataset:
    """The documents of a split one after the other, each ending with the end-of-document token.

    Opening checks that every file is there and as long as it was written; ``softplus-attention data verify`` compares
    checksums.
    """

    def __init__(self, index: Index, split: str) -> None:
        held = index.split(split)
        self.index = index
        self.split = split
        self.total_tokens = held.tokens
        self.offsets: np.ndarray[Any, np.dtype[np.int64]] = index.mapped(held.offsets)
        self.shards: list[Tokens] = [index.mapped(shard) for shard in held.shards]
        self.ends = np.cumsum([len(shard) for shard in self.shards], dtype=np.int64)

    @classmethod
    def open(cls, directory: str | Path, split: str) -> TokenDataset:
        return cls(Index.load(directory), split)

    def __reduce__(self) -> tuple[Callable[..., TokenDataset], tuple[Path, str]]:
        # A memory map would be pickled as its content: another process opens the files instead.
        return TokenDataset.open, (self.index.folder, self.split)

    @property
    def total_documents(self) -> int:
        return len(self.offsets) - 1

    @property
    def vocabulary_size(self) -> int:
        return self.index.vocabulary_size

    @property
    def end_of_document(self) -> int:
        return self.index.end_of_document

    def tokens(self, start: int, stop: int) -> Tokens:
        """Tokens ``start`` to ``stop`` of the split: a view into the file, or a copy where they lie in two."""
        if not 0 <= start <= stop <= self.total_tokens:
            fail("start, stop", f"0 <= start <= stop <= {self.total_tokens}", f"{start}, {stop}")
        if start == stop:
            return np.empty(0, self.index.dtype)
        first = int(np.searchsorted(self.ends, start, side="right"))
        last = int(np.searchsorted(self.ends, stop, side="left"))
        parts = []
        for number in range(first, last + 1):
            shard = self.shards[number]
            begin = int(self.ends[number]) - len(shard)
            parts.append(shard[max(0, start - begin) : stop - begin])
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def document(self, number: int) -> Tokens:
        """A document's tokens, the last of them the end-of-document token."""
        if not 0 <= number < self.total_documents:
            fail("number", f"a document from 0 to {self.total_documents - 1}", number, IndexError)
        return self.tokens(int(self.offsets[number]), int(self.offsets[number + 1]))

    def lengths(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Tokens of each document, the end-of-document token counted."""
        return np.diff(self.offsets)

    def long_documents(self, minimum_tokens: int) -> Iterator[Tokens]:
        """The documents of at least that many tokens, in the order of the folder."""
        for number in np.flatnonzero(self.lengths() >= minimum_tokens).tolist():
            yield self.document(number)


def long_documents(directory: str | Path, split: str, minimum_tokens: int) -> Iterator[Tokens]:
    """The documents of a split that have at least that many tokens, the end-of-document token counted."""
    return TokenDataset.open(directory, split).long_documents(minimum_tokens)
