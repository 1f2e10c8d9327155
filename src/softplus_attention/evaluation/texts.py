"""What an evaluation reads: the documents of a prepared folder, of text files, or of the text in the package."""

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

# Letters, spaces, digits and signs of several kinds: tokenizers that read it alike are one.
PROBE = 'The quick brown fox\n\n  jumped 12,345 times; "naïve" 日本 😀\t<|endoftext|> don\'t'


class Documents:
    """Documents as tokens, without what ends them; ``lengths`` are known before any is read."""

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
        fail("--split", f"a split of {folder} that holds documents", repr(split))
    records = [(record["file"], record["sha256"]) for record in index.files()]
    source = {
        "data": str(folder),
        "split": split,
        "fingerprint": hashlib.sha256(repr(records).encode()).hexdigest()[:16],
    }
    return Documents(dataset.lengths() - 1, lambda number: dataset.document(number)[:-1].astype(np.int64), source)


def raw_texts(sources: Sequence[str], *, to_train: bool = False) -> list[str]:
    """The documents of text files, folders or "builtin", the validation or the training text of the package."""
    texts: list[str] = []
    for name in sources:
        if name == BUILTIN and not Path(name).exists():
            texts += builtin_text()[0 if to_train else 1]
            continue
        if not Path(name).exists():
            which = "training" if to_train else "validation"
            expected = f"files or folders of text, or {BUILTIN} for the {which} text of the package"
            fail("--text", expected, f"{name!r}, which does not exist")
        for found in find([name], PrepareOptions(), Path("/nonexistent"), argument="--text"):
            if found.holds_tokens:
                fail("--text", "text (tokens are read by --data)", repr(found.name))
            # Line ends as ``data prepare`` makes them.
            texts += [text.replace("\r\n", "\n") for text in found.documents(None) if isinstance(text, str) and text]
    if not texts:
        raise ValueError(f"no text in {', '.join(sources)} (--text)")
    return texts


def text_documents(texts: Sequence[str], sources: Sequence[str], tokenizer: Any) -> Documents:
    tokens = [np.asarray(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]) for text in texts]
    source = {"text": list(sources), "fingerprint": digest_tokens(*tokens)}
    return Documents([len(ids) for ids in tokens], tokens.__getitem__, source)


def digest_tokens(*sequences: Any) -> str:
    """Of sequences of tokens: another tokenizer gives another."""
    digest = hashlib.sha256()
    for ids in sequences:
        digest.update(np.asarray(ids).astype("<i8").tobytes())
    return digest.hexdigest()[:16]


def tokenizer_digest(tokenizer: Any) -> str:
    """Changes with what a tokenizer makes of any text."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    words = sorted(tokenizer.get_vocab().items()) if backend is None else backend.to_str()
    return hashlib.sha256(str(words).encode()).hexdigest()[:16]


def check_same_tokenizer(folder: str, tokenizer: str) -> None:
    """Tokens of another tokenizer are numbers without meaning to a model, however many it knows. Nothing is said where
    the folder or the model has none."""
    import tokenizers

    place = Path(tokenizer)
    files = [path / "tokenizer.json" for path in (Path(folder), place)]
    files[1] = place if place.is_file() else files[1]
    if not all(file.is_file() for file in files):
        return
    found = [tokenizers.Tokenizer.from_file(str(file)) for file in files]
    if len({tuple(one.encode(PROBE, add_special_tokens=False).ids) for one in found}) > 1:
        expected = f"prepared with the tokenizer of {tokenizer} (or of another folder, named by --tokenizer)"
        fail("--data", expected, f"{folder}, whose tokenizer reads text as other tokens")


def check_ids(largest: int, model: Any, argument: str) -> None:
    """Tokens beyond the vocabulary would crash in the embedding, on a GPU without a word about why."""
    vocabulary = model.get_input_embeddings().num_embeddings
    if largest >= vocabulary:
        fail(argument, f"one whose tokens are below {vocabulary}, the vocabulary of the model", f"token {largest}")


def check_vocabulary(documents: Documents, model: Any) -> None:
    longest = int(np.argmax(documents.lengths))
    argument = "--tokenizer" if "text" in documents.source else "--data"
    check_ids(int(documents.read(longest).max(initial=0)), model, argument)
