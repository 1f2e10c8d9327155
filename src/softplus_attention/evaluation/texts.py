"""Texts of an evaluation: documents of a prepared folder, of text files, or of the package's own text."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from softplus_attention.data import Index, TokenDataset, builtin_text
from softplus_attention.data.options import PrepareOptions
from softplus_attention.data.sources import BUILTIN, find
from softplus_attention.validation import fail

# Two tokenizers count as equal if they encode this text alike.
PROBE = 'The quick brown fox\n\n  jumped 12,345 times; "naïve" 日本 😀\t<|endoftext|> don\'t'


class Documents:
    """Tokenized documents without end-of-document tokens, read lazily; ``lengths`` are known in advance."""

    def __init__(self, lengths: Any, read: Any, source: dict[str, Any]) -> None:
        self.lengths = np.asarray(lengths, dtype=np.int64)
        self.read = read
        self.source = source

    def long_enough(self, length: int) -> int:
        return int((self.lengths >= length).sum())

    @property
    def longest(self) -> int:
        return int(self.lengths.max(initial=0))

    def at_least(self, length: int) -> Iterator[Any]:
        for number in np.flatnonzero(self.lengths >= length).tolist():
            yield self.read(number)


def folder_documents(folder: str, split: str = "validation") -> Documents:
    index = Index.load(folder, "--data")
    dataset = TokenDataset.open(folder, split)
    if not dataset.total_documents:
        fail("--split", f"a split of {folder} with documents", repr(split))
    records = [(record["file"], record["sha256"]) for record in index.files()]
    source = {
        "data": str(folder),
        "split": split,
        "fingerprint": hashlib.sha256(repr(records).encode()).hexdigest()[:16],
    }
    return Documents(dataset.lengths() - 1, lambda number: dataset.document(number)[:-1].astype(np.int64), source)


def raw_texts(sources: Sequence[str], *, to_train: bool = False) -> list[str]:
    """Documents of text files, folders or "builtin", the package's validation or training text."""
    texts: list[str] = []
    for name in sources:
        if name == BUILTIN and not Path(name).exists():
            texts += builtin_text()[0 if to_train else 1]
            continue
        if not Path(name).exists():
            which = "training" if to_train else "validation"
            expected = f"text files, folders, or {BUILTIN} for the package's {which} text"
            fail("--text", expected, f"{name!r}, which does not exist")
        for found in find([name], PrepareOptions(), Path("/nonexistent"), argument="--text"):
            if found.holds_tokens:
                fail("--text", "text (use --data for tokens)", repr(found.name))
            # Line ends as in ``data prepare``.
            texts += [text.replace("\r\n", "\n") for text in found.documents(None) if isinstance(text, str) and text]
    if not texts:
        raise ValueError(f"no text in {', '.join(sources)} (--text)")
    return texts


def text_documents(texts: Sequence[str], sources: Sequence[str], tokenizer: Any) -> Documents:
    tokens = [np.asarray(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]) for text in texts]
    source = {"text": list(sources), "fingerprint": digest_tokens(*tokens)}
    return Documents([len(ids) for ids in tokens], tokens.__getitem__, source)


def digest_tokens(*sequences: Any) -> str:
    """Hash of token sequences, which differs between tokenizers."""
    digest = hashlib.sha256()
    for ids in sequences:
        digest.update(np.asarray(ids).astype("<i8").tobytes())
    return digest.hexdigest()[:16]


def tokenizer_digest(tokenizer: Any) -> str:
    """Hash of a tokenizer's definition."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    definition = sorted(tokenizer.get_vocab().items()) if backend is None else backend.to_str()
    return hashlib.sha256(str(definition).encode()).hexdigest()[:16]


def check_same_tokenizer(folder: str, tokenizer: str) -> None:
    """Raise if the folder was prepared with another tokenizer; without tokenizer files nothing is checked."""
    import tokenizers

    path = Path(tokenizer)
    files = [Path(folder) / "tokenizer.json", path if path.is_file() else path / "tokenizer.json"]
    if not all(file.is_file() for file in files):
        return
    first, second = (tokenizers.Tokenizer.from_file(str(file)) for file in files)
    if first.encode(PROBE, add_special_tokens=False).ids != second.encode(PROBE, add_special_tokens=False).ids:
        expected = f"prepared with the tokenizer of {tokenizer} (or choose another with --tokenizer)"
        fail("--data", expected, f"{folder}, whose tokenizer encodes text differently")


def check_ids(largest: int, model: Any, argument: str) -> None:
    """Tokens outside the vocabulary would crash in the embedding, on a GPU without a useful message."""
    vocabulary = model.get_input_embeddings().num_embeddings
    if largest >= vocabulary:
        fail(argument, f"one with tokens below {vocabulary}, the model's vocabulary size", f"token {largest}")


def check_vocabulary(documents: Documents, model: Any) -> None:
    longest = int(np.argmax(documents.lengths))
    argument = "--tokenizer" if "text" in documents.source else "--data"
    check_ids(int(documents.read(longest).max(initial=0)), model, argument)
