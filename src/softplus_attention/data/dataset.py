"""Memory-mapped tokens and documents of a prepared folder, and training sequences of fixed length."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from softplus_attention.data import IGNORED
from softplus_attention.data.index import Index
from softplus_attention.validation import fail

Tokens = np.ndarray[Any, np.dtype[Any]]


class TokenDataset:
    """The concatenated documents of a split, each ending with the end-of-document token.

    Opening checks the dtype and length of every file against the index, and that the document offsets match the
    tokens. ``softplus-attention data verify`` also compares checksums.
    """

    def __init__(self, index: Index, split: str) -> None:
        self.index = index
        self.split = split
        self.total_tokens = index.split(split).tokens
        self.offsets: np.ndarray[Any, np.dtype[np.int64]]
        self.shards: list[Tokens]
        self.offsets, self.shards = index.open_split(split)
        self.ends = np.cumsum([len(shard) for shard in self.shards], dtype=np.int64)

    @classmethod
    def open(cls, directory: str | Path, split: str) -> TokenDataset:
        return cls(Index.load(directory), split)

    def __reduce__(self) -> tuple[Callable[..., TokenDataset], tuple[Path, str]]:
        # Pickling a memory map would copy its content; the other process opens the files instead.
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
        """Tokens ``start`` to ``stop`` of the split: a view of the file, or a copy if they span shards."""
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
        tokens = parts[0] if len(parts) == 1 else np.concatenate(parts)
        self.index.check_ids(tokens)
        return tokens

    def document(self, number: int) -> Tokens:
        """The tokens of a document, including the end-of-document token."""
        if not 0 <= number < self.total_documents:
            fail("number", f"a document from 0 to {self.total_documents - 1}", number, IndexError)
        return self.tokens(int(self.offsets[number]), int(self.offsets[number + 1]))

    def lengths(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Tokens of each document, including the end-of-document token."""
        return np.diff(self.offsets)

    def long_documents(self, minimum_tokens: int) -> Iterator[Tokens]:
        """The documents of at least that many tokens, in order."""
        for number in np.flatnonzero(self.lengths() >= minimum_tokens).tolist():
            yield self.document(number)


def long_documents(directory: str | Path, split: str, minimum_tokens: int) -> Iterator[Tokens]:
    """The documents of a split with at least that many tokens, including the end-of-document token."""
    return TokenDataset.open(directory, split).long_documents(minimum_tokens)


class PackedTokens(Dataset[dict[str, Tensor]]):
    """Map-style dataset: sequence i depends only on folder, split, length, seed and epoch.

    Documents are shuffled by seed and epoch and concatenated. The stream is cut into sequences of ``sequence_length``
    tokens (the remainder is dropped), which are shuffled too, so that parts of a long document are not neighbours.
    ``set_epoch`` (called by accelerate's data loaders) draws both orders anew.

    Each item is {"input_ids", "labels"}, equal, for models that shift the labels, as transformers' do. With
    ``document_mask``, "position_ids" restart at each document, by which transformers separates packed documents, and
    the label of each document's first token is -100, so that no prediction crosses documents. transformers uses these
    positions only without an attention mask and a cache: use its default collator (others add a mask) and
    ``use_cache=False`` (the Trainer's default).
    """

    def __init__(
        self, directory: str | Path, split: str, sequence_length: int, *, seed: int = 0, document_mask: bool = False
    ) -> None:
        if isinstance(sequence_length, bool) or not isinstance(sequence_length, int) or sequence_length < 2:
            fail("sequence_length", "an int >= 2", repr(sequence_length))
        if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
            fail("seed", "an int >= 0", repr(seed))
        self.source = TokenDataset.open(directory, split)
        self.sequence_length = sequence_length
        self.seed = seed
        self.document_mask = document_mask
        if self.source.total_tokens < sequence_length:
            fail(
                "sequence_length",
                f"at most the tokens of the {split} split, {self.source.total_tokens}",
                sequence_length,
            )
        self.set_epoch(0)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        order = np.random.default_rng([self.seed, epoch])
        self.documents = order.permutation(self.source.total_documents)
        self.ends = np.cumsum(self.source.lengths()[self.documents])
        self.sequences = order.permutation(len(self))

    def __len__(self) -> int:
        return self.source.total_tokens // self.sequence_length

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        if not -len(self) <= number < len(self):
            fail("number", f"a sequence from 0 to {len(self) - 1}", number, IndexError)
        ids = torch.empty(self.sequence_length, dtype=torch.int64)
        positions = torch.empty_like(ids) if self.document_mask else None
        document_starts = []
        filled = 0
        for start, stop, is_begin in self._parts(int(self.sequences[number]) * self.sequence_length):
            count = stop - start
            ids[filled : filled + count] = torch.from_numpy(self.source.tokens(start, stop).astype(np.int64))
            if positions is not None:
                torch.arange(count, out=positions[filled : filled + count])
                if is_begin:
                    document_starts.append(filled)
            filled += count
        labels = ids.clone()
        if positions is None:
            return {"input_ids": ids, "labels": labels}
        labels[document_starts] = IGNORED
        return {"input_ids": ids, "labels": labels, "position_ids": positions}

    def _parts(self, begin: int) -> Iterator[tuple[int, int, bool]]:
        """The spans of the split that make up the sequence at ``begin`` of the shuffled stream.

        Yields start, stop, and whether a document starts there.
        """
        end = begin + self.sequence_length
        place = int(np.searchsorted(self.ends, begin, side="right"))
        while begin < end:
            document = int(self.documents[place])
            start, stop = int(self.source.offsets[document]), int(self.source.offsets[document + 1])
            skipped = begin - (int(self.ends[place]) - (stop - start))
            count = min(stop - start - skipped, end - begin)
            yield start + skipped, start + skipped + count, skipped == 0
            begin += count
            place += 1
