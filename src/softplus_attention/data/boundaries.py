"""Where a text can be cut so that GPT-2's byte-level BPE gives the same tokens for the pieces as for the whole.

The pre-tokeniser's pattern is

    's|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+

No alternative matches a character that is no whitespace followed by whitespace, nor a letter or digit followed by
punctuation, so a word always ends there. What stands left of such a place ends in a run that is as greedy at the end of
a text; what stands right of it is matched without looking back. BPE never merges across words.
"""

from __future__ import annotations

import json
import re

from tokenizers import Tokenizer

# Short pieces also run faster than long ones: a tenth less processor time than whole documents.
PIECE = 2_048
# A longer run without a safe place (no text has one) is cut anyway, or memory would grow with it.
LONGEST = 1 << 20

# Python's \S is narrower than the pattern's (it also leaves out U+001C to U+001F), which is the safe side. Letters are
# listed by blocks that no version of Unicode has reassigned.
WORD = "A-Za-z0-9\u00c0-\u00d6\u00d8-\u00f6\u0400-\u0481\u3041-\u3094\u30a1-\u30fa\u4e00-\u9fa5\uac00-\ud7a3"
MARK = "!-/:-@\\[-`{-~\u3001\u3002\uff01\uff08\uff09\uff0c\uff1a\uff1b\uff1f"
SAFE = re.compile(rf"(?<=\S)(?=[ \t\n\r])|(?<=[{WORD}])(?=[{MARK}])")


def cut(text: str, piece: int = PIECE, longest: int = LONGEST) -> tuple[list[str], int]:
    """The text in pieces of about ``piece`` characters, and how many cuts were made at no safe place."""
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
    """Whether the tokenizer's words are those of GPT-2's pattern, with nothing that sees more than a word."""
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
