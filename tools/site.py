"""What the docs site needs beyond Markdown as GitHub shows it; mkdocs.yml names this file under ``hooks``."""

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
    """A page that nav does not name stands with the guides."""
    missing = sorted({file.src_uri for file in files.documentation_pages()} - pages_in(config.nav))
    if missing:
        config.nav.insert(2, {MORE: missing})
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links that leave docs/ lead to the repository; the marks around generated tables go."""
    markdown = re.sub(r"^<!-- (begin|end): .*-->\n?", "", markdown, flags=re.MULTILINE)
    return re.sub(r"(!?\[[^\]]*\])\(([^)\s]+)\)", lambda match: link(match, page.file.src_uri), markdown)


def link(match: re.Match[str], source: str) -> str:
    words, target = match.groups()
    path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
    if re.match(r"[a-z]+:|#", target) or not path.startswith("../"):
        return match[0]
    return f"{words}({RAW if words.startswith('!') else REPOSITORY}/{path.removeprefix('../')})"
