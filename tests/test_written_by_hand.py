"""What people write in README.md and docs/performance.md has no measured number: scripts write those, from results/."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# Versions, names, and one reading of a test that leaves no file.
ALLOWED = {
    "README.md": [
        r"Python 3\.11 or newer",
        r"torch 2\.13\.0",
        r"torch alone, 2\.11 or newer",
        r"triton 3\.6 or newer",
        r"triton 3\.7\.1",
        r"checkpoints/bytes-2\.7m",
        r"Apache-2\.0",
        r"is 0\.04 ms for a forward and 0\.17 to 0\.18 for a forward and backward on a quiet AMD EPYC",
    ],
    "docs/performance.md": [],
}
EARLIER = "Earlier runs"  # of commits whose files are in the history alone


def by_hand(text: str, allowed: list[str]) -> list[str]:
    """Decimal numbers and percentages outside of markers, code, addresses of links and what is said of earlier runs."""
    text = re.sub(r"<!-- begin: (\S+) -->\n.*?<!-- end: \1 -->", "", text, flags=re.DOTALL)
    text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    text = re.sub(r"`[^`\n]*`", "", text)
    text = re.sub(r"\]\([^)\s]*\)", "]", text)
    text = re.sub(rf"^(#+) {EARLIER}\n.*?(?=^#|\Z)", "", text, flags=re.DOTALL | re.MULTILINE)
    for words in allowed:
        text = re.sub(words, "", text)
    return re.findall(r"\d*\.\d+|\d+ ?%|\d+ per ?cent", text)


@pytest.mark.parametrize("page", ALLOWED)
def test_no_measured_number_is_written_by_hand(page: str) -> None:
    assert by_hand((ROOT / page).read_text(), ALLOWED[page]) == []


@pytest.mark.parametrize("page", ALLOWED)
def test_what_is_allowed_is_there(page: str) -> None:
    text = (ROOT / page).read_text()
    assert [words for words in ALLOWED[page] if not re.search(words, text)] == []


@pytest.mark.parametrize(
    "words", ["1.31 times", "0.07 to 0.08 nats", "behind by 2%", "find at least 90 % of", "torch 2.12.0", ".5 lower"]
)
def test_a_number_by_hand_is_found(words: str) -> None:
    found = [
        f"It is {words}.\n",
        f"# Page\n\n[a link to {words}](page.md)\n",
        f"### {EARLIER}\n\nOld.\n\n## New\n\n{words}\n",
    ]
    block = f"<!-- begin: a -->\n{words}\n<!-- end: a -->\n"
    code = f"```sh\n{words}\n```\n`{words}` [link](page-1.5.md)\n"
    earlier = f"### {EARLIER}\n\n- {words}\n"
    for page in ALLOWED:
        assert all(by_hand(block + text, ALLOWED[page]) for text in found), page
        assert not by_hand(block + code + earlier, ALLOWED[page])
