"""The docs site: links that leave docs/, the API page, and (slow) the site that mkdocs builds."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import softplus_attention
from tools import site

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("source", "markdown", "rendered"),
    [
        ("start.md", "[a](../results/demo.json)", f"[a]({site.REPOSITORY}/results/demo.json)"),
        ("start.md", "![a](../results/x.png)", f"![a]({site.RAW}/results/x.png)"),
        ("dev/log.md", "[a](../results.md)", "[a](../results.md)"),
        ("dev/log.md", "[a](../../Makefile)", f"[a]({site.REPOSITORY}/Makefile)"),
        ("start.md", "[a](https://x.org/../y) [b](#c)", "[a](https://x.org/../y) [b](#c)"),
        ("start.md", "<!-- begin: runs -->\n| a |\n<!-- end: runs -->\n", "| a |\n"),
    ],
)
def test_links_that_leave_docs(source: str, markdown: str, rendered: str) -> None:
    page = SimpleNamespace(file=SimpleNamespace(src_uri=source))
    assert site.on_page_markdown(markdown, page, config=None, files=None) == rendered


def test_pages_missing_from_nav_are_added() -> None:
    files = SimpleNamespace(documentation_pages=lambda: [SimpleNamespace(src_uri=x) for x in ("a.md", "b.md", "c.md")])
    config = SimpleNamespace(nav=[{"Home": "a.md"}, {"Guides": [{"B": "b.md"}]}])
    site.on_files(files, config)
    assert config.nav[2] == {site.MORE: ["c.md"]}


def test_api_page_has_public_names() -> None:
    """All public names of the package, and only names that can be imported."""
    named = re.findall(r"^::: (\S+)$", (ROOT / "docs" / "api.md").read_text(), re.MULTILINE)
    for path in named:
        module, _, name = path.rpartition(".")
        assert hasattr(__import__(module, fromlist=[name]), name), path
    public = {f"softplus_attention.{name}" for name in softplus_attention.__all__} - {"softplus_attention.__version__"}
    assert public <= set(named)


@pytest.mark.slow
def test_site_builds(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert built.returncode == 0, built.stderr
    api = (tmp_path / "api" / "index.html").read_text()
    assert "the sharpening power" in api  # a docstring
    searched = json.loads((tmp_path / "search" / "search_index.json").read_text())["docs"]
    assert {"start/", "op/", "api/", "dev/log/"} <= {entry["location"] for entry in searched}
    pages = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")}
    for page in pages - {"index.md"}:
        assert (tmp_path / page.removesuffix(".md") / "index.html").exists(), page
    home = (tmp_path / "index.html").read_text()
    loaded = re.findall(r"<(?:script|img|link)[^>]*(?:src|href)=\"?(https?://[^\s\">]+)", home)
    assert [url for url in loaded if not url.startswith("https://softplus-attention.github.io/")] == []
