"""Training data: the sequences of a prepared folder, repeated for all steps of a run."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.data import Dataset

from softplus_attention.data import IGNORED, Index, PackedTokens


class Sequences(Protocol):
    """The interface of a training dataset, such as ``softplus_attention.data.PackedTokens``."""

    def __len__(self) -> int: ...
    def __getitem__(self, number: int, /) -> dict[str, Tensor]: ...
    def set_epoch(self, epoch: int, /) -> None: ...


class RepeatedDataset(Dataset[dict[str, Tensor]]):
    """Sequence n of a run comes from epoch n // len, in the order of that epoch.

    The position in the data is thus steps times batch size, for any number of processes.
    """

    def __init__(self, sequences: Sequences, total: int) -> None:
        self.sequences, self.total = sequences, total
        self.epoch: int | None = None

    def __len__(self) -> int:
        return self.total

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        epoch, place = divmod(number, len(self.sequences))
        if epoch != self.epoch:
            self.sequences.set_epoch(epoch)
            self.epoch = epoch
        return self.sequences[place]


class SharedDataset(Dataset[dict[str, Tensor]]):
    """Gives each group of ``sharing`` consecutive processes the same sequences.

    accelerate deals out batches of ``batch`` sequences in turn: index n belongs to batch n // batch.
    """

    def __init__(self, sequences: Any, batch: int, sharing: int) -> None:
        self.sequences, self.batch, self.sharing = sequences, batch, sharing

    def __len__(self) -> int:
        return len(self.sequences) * self.sharing

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        turn, place = divmod(number, self.batch)
        return self.sequences[turn // self.sharing * self.batch + place]


def collate(sequences: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    batch = {name: torch.stack([sequence[name] for sequence in sequences]) for name in sequences[0]}
    # Nothing predicts the first token, but some versions of Trainer would count its label.
    batch["labels"][:, 0] = IGNORED
    return batch


class Folder:
    """A folder written by ``softplus-attention data prepare``."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.index = Index.load(path, "data")
        for record in self.index.tokenizer_files:  # saved with the model at the end
            self.index.check_size(record)

    def sequences(self, split: str, length: int, *, seed: int, document_mask: bool) -> PackedTokens:
        return PackedTokens(self.path, split, length, seed=seed, document_mask=document_mask)

    @property
    def has_validation(self) -> bool:
        return "validation" in self.index.splits and self.index.split("validation").tokens > 0

    @property
    def fingerprint(self) -> str:
        """A checksum of the data, independent of the folder's path and the sources."""
        sums = [(record["file"], record["sha256"]) for record in self.index.files()]
        return hashlib.sha256(json.dumps(sums).encode()).hexdigest()

    def tokenizer(self) -> Any:
        """The tokenizer, loaded by transformers; None for token files without one."""
        from softplus_attention.huggingface.loading import load_tokenizer

        places = {(self.path / record["file"]).parent for record in self.index.tokenizer_files}
        if not places:
            return None
        (place,) = places
        try:
            return load_tokenizer(str(place))
        except ValueError as error:
            raise ValueError(f"{error}. Prepare the data again, or restore the tokenizer's files") from error


def padded_vocabulary(size: int) -> int:
    """``size`` rounded up to a multiple of 64, for the tensor cores."""
    return -(-size // 64) * 64
