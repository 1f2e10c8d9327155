"""Tokenizers: GPT-2's, one by file or name, a BPE trained on the data, or bytes. Saved in transformers' format."""

from __future__ import annotations

import json
import lzma
import re
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from softplus_attention.data import DataError
from softplus_attention.utils.files import replacing, write_json
from softplus_attention.utils.untrusted import is_tokenizer_error, read_json
from softplus_attention.validation import fail

END = "<|endoftext|>"
KNOWN_ENDS = (END, "<|end_of_text|>", "</s>", "<eos>", "[SEP]")
BYTE_VALUES = 256
# Characters encoded at a time, which bounds the memory of the results.
AT_ONCE = 1 << 20
EXPECTED = "gpt2, bytes, bpe, a tokenizer.json file or its folder, or the name of a tokenizer on the Hugging Face Hub"


def load(name: str, end: str | None) -> Tokenizer:
    """Loads a tokenizer by file, folder or Hub name and marks its end-of-document token as special."""
    path = Path(name)
    if path.is_dir():
        path = path / "tokenizer.json"
    if path.is_file():
        try:
            tokenizer = Tokenizer.from_file(str(path))
        except BaseException as error:
            if not is_tokenizer_error(error):
                raise
            raise DataError(f"{path} is not a tokenizer ({error}). --tokenizer takes {EXPECTED}") from None
    elif name == "gpt2":
        tokenizer = gpt2_tokenizer()
    elif path.suffix == ".json" or name.count("/") > 1 or Path(name).exists():
        raise DataError(f"{path}: no such file. --tokenizer takes {EXPECTED}")
    else:
        try:
            tokenizer = Tokenizer.from_pretrained(name)
        except Exception as error:
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise DataError(
                f"tokenizer {name!r} is not on the Hugging Face Hub, or the Hub could not be reached ({reason}). gpt2, "
                "bytes and bpe need no network"
            ) from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    if tokenizer.num_special_tokens_to_add(False):
        # Documents are encoded without special tokens; the saved tokenizer must do the same.
        tokenizer.post_processor = None  # type: ignore[assignment]
    mark_end(tokenizer, end)
    return tokenizer


def mark_end(tokenizer: Tokenizer, end: str | None) -> str:
    found = end_token(tokenizer, end)
    tokenizer.add_special_tokens([AddedToken(found, special=True, normalized=False)])
    return found


def end_token(tokenizer: Tokenizer, end: str | None) -> str:
    if end is not None:
        if tokenizer.token_to_id(end) is None:
            fail("--end-of-document", "a token of the tokenizer", repr(end), DataError)
        return end
    for known in KNOWN_ENDS:
        if tokenizer.token_to_id(known) is not None:
            return known
    expected = f"given, since the tokenizer has none of {', '.join(KNOWN_ENDS)}"
    fail("--end-of-document", expected, "nothing", DataError)


def vocabulary_size(tokenizer: Tokenizer) -> int:
    return max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1


def bytes_tokenizer() -> Tokenizer:
    """A byte-level BPE without merges: ids are byte values, 256 ends a document."""
    vocabulary = {character: value for value, character in byte_characters().items()}
    vocabulary[END] = BYTE_VALUES
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    mark_end(tokenizer, END)
    return tokenizer


def gpt2_tokenizer() -> Tokenizer:
    """Built from the merges in the package: the vocabulary is the bytes, the merges and the end-of-document token."""
    packed = files(__package__).joinpath("gpt2", "merges.txt.xz").read_bytes()
    merges = [(left, right) for left, right in map(str.split, lzma.decompress(packed).decode().splitlines())]
    characters = byte_characters()
    printable_first = sorted(characters, key=lambda byte: ord(characters[byte]) != byte)
    tokens = [*(characters[byte] for byte in printable_first), *(left + right for left, right in merges), END]
    tokenizer = Tokenizer(models.BPE(vocab={token: number for number, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def byte_characters() -> dict[int, str]:
    """The character for each byte in byte-level models: itself if printable, else one from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = iter(range(0x100, 0x200))
    return {value: chr(value if value in printable else next(spare)) for value in range(BYTE_VALUES)}


def train(texts: Iterator[str], size: int) -> Tokenizer:
    """Trains a byte-level BPE with GPT-2's pre-tokeniser and at most ``size`` tokens, end-of-document included."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator((piece for text in texts for piece in cut(text)[0]), trainer)
    return tokenizer


def save(tokenizer: Tokenizer, folder: Path, end: str) -> None:
    """Writes tokenizer_config.json, then tokenizer.json, which thus implies that both exist."""
    configuration = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": end,
        "eos_token": end,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 10**30,
    }
    write_json(folder / "tokenizer_config.json", configuration)
    with replacing(folder / "tokenizer.json") as file:
        file.write(tokenizer.to_str(pretty=True).encode())


def saved_end(folder: Path) -> str:
    return read_json(folder / "tokenizer_config.json")["eos_token"]


class Encoder:
    """Encodes documents without the end-of-document id. Special tokens within a text are encoded as text."""

    def __init__(self, path: Path, *, as_bytes: bool, dtype: np.dtype[Any]) -> None:
        self.dtype = dtype
        self.as_bytes = as_bytes
        if not as_bytes:
            self.tokenizer = Tokenizer.from_file(str(path))
            self.cuttable = can_cut(self.tokenizer)
            self.tokenizer.encode_special_tokens = True

    def encode(self, texts: list[str]) -> tuple[list[np.ndarray[Any, Any]], int]:
        """The ids of each text, and the number of forced cuts."""
        if self.as_bytes:
            return [np.frombuffer(text.encode(), np.uint8).astype(self.dtype) for text in texts], 0
        forced = 0
        pieces: list[str] = []
        counts = []
        for text in texts:
            parts, cuts = cut(text) if self.cuttable else ([text], 0)
            pieces += parts
            counts.append(len(parts))
            forced += cuts
        ids = self._ids(pieces)
        return [joined([next(ids) for _ in range(count)], self.dtype) for count in counts], forced

    def _ids(self, pieces: list[str]) -> Iterator[np.ndarray[Any, Any]]:
        for batch in batches(pieces):
            try:
                encodings = self.tokenizer.encode_batch_fast(batch, add_special_tokens=False)
            except BaseException as error:
                if not is_tokenizer_error(error):
                    raise
                # Unlike the original error, a worker process can pickle this one.
                raise DataError(f"the tokenizer failed: it is damaged or unsuitable for this text ({error})") from None
            for encoding in encodings:
                yield np.array(encoding.ids, dtype=self.dtype)


def batches(pieces: list[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    size = 0
    for piece in pieces:
        batch.append(piece)
        size += len(piece)
        if size >= AT_ONCE:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def joined(parts: list[np.ndarray[Any, Any]], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    if len(parts) == 1:
        return parts[0]
    return np.concatenate(parts) if parts else np.empty(0, dtype)


# ---- safe cuts
#
# Places where a text can be cut so that GPT-2's byte-level BPE gives the pieces the same tokens as the whole.
#
# The pattern of the pre-tokeniser is
#
#     's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+
#
# No alternative matches a non-space character followed by whitespace, nor a letter or digit followed by punctuation, so
# a word always ends there. The run left of such a place matches the same at the end of a text; the part right of it is
# matched without lookbehind. BPE never merges across words.

# Short pieces are also faster: a tenth less CPU time than whole documents.
PIECE = 2_048
# A longer run without a safe place (not found in real text) is cut anyway, to bound memory.
LONGEST = 1 << 20

# Python's \S is narrower than the pattern's (it also excludes U+001C to U+001F), which is safe. Letters are listed by
# blocks that no version of Unicode has reassigned.
WORD = "A-Za-z0-9\u00c0-\u00d6\u00d8-\u00f6\u0400-\u0481\u3041-\u3094\u30a1-\u30fa\u4e00-\u9fa5\uac00-\ud7a3"
MARK = "!-/:-@\\[-`{-~\u3001\u3002\uff01\uff08\uff09\uff0c\uff1a\uff1b\uff1f"
SAFE = re.compile(rf"(?<=\S)(?=[ \t\n\r])|(?<=[{WORD}])(?=[{MARK}])")


def cut(text: str, piece: int = PIECE, longest: int = LONGEST) -> tuple[list[str], int]:
    """The text in pieces of about ``piece`` characters, and the number of forced cuts."""
    pieces = []
    forced = 0
    start = 0
    while len(text) - start > piece:
        found = SAFE.search(text, start + piece, start + longest)
        if found:
            stop = found.start()
        elif len(text) - start > longest:
            stop = start + longest
            forced += 1
        else:
            break
        pieces.append(text[start:stop])
        start = stop
    pieces.append(text[start:])
    return pieces, forced


def can_cut(tokenizer: Tokenizer) -> bool:
    """Whether the tokenizer uses GPT-2's pattern and nothing in it looks beyond a word."""
    parts = json.loads(tokenizer.to_str())
    before = parts["pre_tokenizer"] or {}
    return (
        parts["normalizer"] is None
        and before.get("type") == "ByteLevel"
        and before.get("use_regex", True)
        and not before.get("add_prefix_space", True)
        and parts["model"]["type"] == "BPE"
        and not parts["model"].get("dropout")
        and all(token["special"] for token in parts["added_tokens"])
    )
