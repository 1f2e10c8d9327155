"""mkdocs hooks: adapt Markdown that is written for GitHub to the docs site."""

from __future__ import annotations

import posixpath
import re
from typing import Any

REPOSITORY = "https://github.com/softplus-attention/softplus-attention/blob/main"
RAW = REPOSITORY.replace("github.com", "raw.githubusercontent.com").replace("/blob/", "/")
MORE = "More guides"


def pages_in(nav: Any) -> set[str]:
    if isinstance(nav, str):
        return {nav}
    parts = nav.values() if isinstance(nav, dict) else nav
    return {page for part in parts for page in pages_in(part)}


def on_files(files: Any, config: Any) -> Any:
    """Pages missing from nav are added in a section of their own."""
    missing = sorted({file.src_uri for file in files.documentation_pages()} - pages_in(config.nav))
    if missing:
        config.nav.insert(2, {MORE: missing})
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Points links that leave docs/ to the repository, and removes the markers of generated tables."""
    markdown = re.sub(r"^<!-- (begin|end): .*-->\n?", "", markdown, flags=re.MULTILINE)
    return re.sub(r"(!?\[[^\]]*\])\(([^)\s]+)\)", lambda match: link(match, page.file.src_uri), markdown)


def link(match: re.Match[str], source: str) -> str:
    text, target = match.groups()
    path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
    if re.match(r"[a-z]+:|#", target) or not path.startswith("../"):
        return match[0]
    return f"{text}({RAW if text.startswith('!') else REPOSITORY}/{path.removeprefix('../')})"
