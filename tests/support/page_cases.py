"""What the tests of all pages share whose tables are made from data (pages/page_blocks.py)."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest


def words(folder: Path) -> list[str]:
    """The options of a page's script for data and a page in one folder."""
    return ["--results", str(folder), "--page", str(folder / "page.md")]


def assert_rewritten(page: ModuleType, folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """A page that is out of date is said to be, then rewritten, and then is not; gives its new text."""
    assert page.main([*words(folder), "--check"]) == 1
    assert "page.md is out of date" in capsys.readouterr().err
    assert page.main(words(folder)) == 0
    assert page.main([*words(folder), "--check"]) == 0
    return (folder / "page.md").read_text()
