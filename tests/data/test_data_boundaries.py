"""Cutting a text where GPT-2's words end gives the same tokens as the whole text."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, pre_tokenizers

from softplus_attention.data import builtin_text
from softplus_attention.data.tokenizer import Encoder, bytes_tokenizer, can_cut, cut, save, train

WORDS = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
# Samples of each class in the pattern: letters, digits, punctuation, apostrophes, all kinds of whitespace.
PARTS = st.one_of(
    st.sampled_from(
        ["'s", "'ll", "'", "''", "l", "re", " ", "  ", "\n", "\n\n ", "\r\n", "\t", "7", "日本", "。", "é"]
    ),
    st.sampled_from(["\u00a0", "\u2003", "\u3000", "\u0085", "\x1c", "\x1f", "\u200b", "\u2028", "😀", "\u0301", "\0"]),
    st.text(max_size=4),
)
TEXTS = st.lists(PARTS, max_size=40).map("".join)


@pytest.fixture(scope="module")
def trained() -> Tokenizer:
    return train(iter([builtin_text()[1][3]]), 1000)


def words(text: str) -> list[str]:
    return [word for word, _ in WORDS.pre_tokenize_str(text)]


@settings(max_examples=300)
@given(TEXTS, st.integers(1, 6))
def test_pieces_have_the_words_of_the_whole(text: str, piece: int) -> None:
    pieces, forced = cut(text, piece)
    assert "".join(pieces) == text
    assert forced == 0
    assert [word for part in pieces for word in words(part)] == words(text)


@settings(max_examples=100)
@given(TEXTS, st.integers(1, 6))
def test_pieces_have_the_tokens_of_the_whole(trained: Tokenizer, text: str, piece: int) -> None:
    pieces, _ = cut(text, piece)
    assert [token for part in pieces for token in trained.encode(part).ids] == trained.encode(text).ids


def check_characters(step: int) -> None:
    """Every character, before and after each class of characters."""
    for first in range(0, sys.maxunicode + 1, 50_000):
        characters = [chr(n) for n in range(first, min(first + 50_000, sys.maxunicode + 1), step)]
        text = "".join(f"{c} a{c}. {c}\n1{c}{c}'s 。{c}。" for c in characters if not "\ud800" <= c <= "\udfff")
        pieces, _ = cut(text, 1)
        assert not text or len(pieces) > len(text) / 40
        assert [word for part in pieces for word in words(part)] == words(text)


def test_every_211th_character_of_unicode() -> None:
    check_characters(211)


@pytest.mark.slow
def test_every_character_of_unicode() -> None:
    check_characters(1)


@pytest.mark.parametrize("run", ["a", " ", "\n", "é", "!"])
def test_long_run_without_word_end_is_cut(run: str) -> None:
    pieces, forced = cut(run * 100, 5, 30)
    assert "".join(pieces) == run * 100
    assert max(map(len, pieces)) <= 30
    assert forced == 3


def test_only_gpt2_tokenizers_are_cut(trained: Tokenizer) -> None:
    assert can_cut(trained)
    assert not can_cut(bytes_tokenizer())
    other = Tokenizer.from_str(trained.to_str())
    other.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    assert not can_cut(other)
    other = Tokenizer.from_str(trained.to_str())
    other.add_tokens(["new york"])
    assert not can_cut(other)


def test_special_token_in_a_text_is_text(trained: Tokenizer, tmp_path: Path) -> None:
    save(trained, tmp_path, "<|endoftext|>")
    encoder = Encoder(tmp_path / "tokenizer.json", as_bytes=False, dtype=np.dtype(np.uint16))
    (ids,), _ = encoder.encode(["a<|endoftext|>b"])
    assert trained.token_to_id("<|endoftext|>") not in ids
    assert trained.decode(ids.tolist()) == "a<|endoftext|>b"
