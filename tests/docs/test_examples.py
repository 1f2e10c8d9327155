"""Every Python example of README and docs runs, and its assertions hold."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENTS = [path for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))) if path.exists()]
BLOCK = re.compile(r"^( *)```python[^\n]*\n(.*?)^\1```", re.MULTILINE | re.DOTALL)


def blocks(path: Path) -> list[tuple[int, str]]:
    """(line, code) of each Python block, padded with blank lines so that tracebacks have the page's line numbers."""
    text = path.read_text()
    found = []
    for match in BLOCK.finditer(text):
        indent = len(match[1])
        line = text.count("\n", 0, match.start()) + 1
        code = "\n".join(row[indent:] for row in match[2].splitlines())
        found.append((line, "\n" * line + code))
    return found


def test_blocks_are_found_and_numbered(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("a\n```python\nx = 1\n```\n```sh\nls\n```\n- b\n  ```python\n  y = 2\n  ```\n")
    assert [(line, code.strip()) for line, code in blocks(page)] == [(2, "x = 1"), (9, "y = 2")]


LONG = {"works-with.md"}  # trains with several libraries; `make first-hour` runs it too
PAGES = [
    pytest.param(path, id=str(path.relative_to(ROOT)), marks=[pytest.mark.slow] * (path.name in LONG))
    for path in DOCUMENTS
    if blocks(path)
]


@pytest.mark.parametrize("path", PAGES)
def test_every_example_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert_examples_run(path)


@pytest.mark.parametrize("code", ["x = y", "x = 1\nassert x == 2"])
def test_broken_example_is_found(code: str, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"```python\nz = 0\n```\n```python\n{code}\n```\n")
    with pytest.raises((NameError, AssertionError)):
        assert_examples_run(page)


def assert_examples_run(path: Path) -> None:
    """Runs all examples of a page in one namespace."""
    namespace: dict[str, Any] = {"__name__": "__example__"}
    for _, code in blocks(path):
        exec(compile(code, str(path), "exec"), namespace)
