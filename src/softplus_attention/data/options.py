"""The options of ``prepare`` and ``data prepare``, as one dataclass."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from typing import Any

from softplus_attention.data import DataError
from softplus_attention.validation import fail

TOKEN_DTYPES = ("uint16", "uint32")
ERRORS = ("strict", "replace")
DEFAULT_VALIDATION = 0.005
SINGLE_VALIDATION = 0.1  # of the tokens of a single document
DEFAULT_VOCABULARY = 8192
SMALLEST_VOCABULARY = 257


def unescaped(text: str) -> str:
    r"""Replaces the escapes \n, \r, \t, \\, \xNN and \uNNNN as Python does."""
    escapes = r"\\(?:[nrt\\]|x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4})"
    return re.sub(escapes, lambda found: found[0].encode().decode("unicode_escape"), text)


def escaped(text: str) -> str:
    r"""The inverse of ``unescaped``, on one line."""
    return re.sub(r"[\x00-\x1f\x7f-\x9f\\]", lambda found: found[0].encode("unicode_escape").decode(), text)


def option(help_text: str, default: Any, kind: Any = str, metavar: str | None = None, choices: Any = None) -> Any:
    """A field with its type and ``--help`` text."""
    metadata = {"help": help_text, "type": kind, "metavar": metavar, "choices": choices}
    return dataclasses.field(default=default, metadata=metadata)


@dataclass(frozen=True)
class PrepareOptions:
    tokenizer: str = option(
        "gpt2 (included in the package), bytes, bpe (trained on the data), a tokenizer.json file, or a name on the Hub",
        "gpt2",
        metavar="NAME",
    )
    vocabulary_size: int | None = option(f"size of a trained BPE (default: {DEFAULT_VOCABULARY})", None, int, "N")
    end_of_document: str | None = option("default: <|endoftext|> or the tokenizer's own", None, metavar="TOKEN")
    validation_fraction: float = option(
        "fraction of documents for validation; for a single document, the fraction at its end (there 0.1 by default)",
        DEFAULT_VALIDATION,
        float,
        "F",
    )
    seed: int = option("seed of the split", 0, int, "N")
    shard_tokens: int = option("tokens per shard", 100_000_000, int, "N")
    errors: str = option("how to treat text that is not UTF-8", "strict", choices=ERRORS)
    text_field: str = option("field of JSON Lines or column of parquet files with the text", "text", metavar="NAME")
    separator: str | None = option(
        r"text between documents of a text file, such as '\n\n' or '<|endoftext|>' (default: one document per file)",
        None,
        unescaped,
        "TEXT",
    )
    token_dtype: str = option("dtype of raw .bin files", "uint16", choices=TOKEN_DTYPES)
    limit: int | None = option("stop after N documents", None, int, "N")

    def __post_init__(self) -> None:
        if self.tokenizer == "bpe" and self.vocabulary_size is None:
            object.__setattr__(self, "vocabulary_size", DEFAULT_VOCABULARY)
        size = self.vocabulary_size
        if size is not None and self.tokenizer != "bpe":
            fail("--vocabulary-size", "given only with --tokenizer bpe", size, DataError)
        if size is not None and size < SMALLEST_VOCABULARY:
            expected = f"at least {SMALLEST_VOCABULARY} (256 bytes and the end-of-document token)"
            fail("--vocabulary-size", expected, size, DataError)
        if self.end_of_document is not None and self.tokenizer in ("bpe", "bytes"):
            fail("--end-of-document", f"left out with --tokenizer {self.tokenizer}", self.end_of_document, DataError)
        if not 0 <= self.validation_fraction <= 1:
            fail("--validation-fraction", "from 0 to 1", self.validation_fraction, DataError)
        if not 0 <= self.seed < 2**64:
            fail("--seed", "from 0 to 2**64 - 1", self.seed, DataError)
        if self.shard_tokens < 1:
            fail("--shard-tokens", "at least 1", self.shard_tokens, DataError)
        if self.errors not in ERRORS:
            fail("--errors", " or ".join(ERRORS), repr(self.errors), DataError)
        if self.token_dtype not in TOKEN_DTYPES:
            fail("--token-dtype", " or ".join(TOKEN_DTYPES), repr(self.token_dtype), DataError)
        if self.separator == "":
            fail("--separator", "a non-empty text", "an empty one", DataError)
        if self.limit is not None and self.limit < 1:
            fail("--limit", "at least 1", self.limit, DataError)

    @property
    def single_validation(self) -> float:
        """The validation fraction of a single document."""
        return SINGLE_VALIDATION if self.validation_fraction == DEFAULT_VALIDATION else self.validation_fraction

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
