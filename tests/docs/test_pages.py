"""README and docs: length, links, and names of extras."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
HOME = PROJECT["urls"]["Homepage"]
RAW = HOME.replace("github.com", "raw.githubusercontent.com")
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
PAGES += sorted((ROOT / "checkpoints").rglob("*.md"))


def without_code(text: str) -> str:
    return re.sub(r"```.*?```", "", text, flags=re.DOTALL)


def anchors(page: Path) -> set[str]:
    """Anchors of the headings, as on GitHub."""
    titles = re.findall(r"^#+ (.*)$", without_code(page.read_text()), re.MULTILINE)
    plain = (re.sub(r"\[([^\]]*)\]\([^)]*\)|`", r"\1", title) for title in titles)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in plain}


def broken_links(page: Path) -> list[str]:
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", without_code(page.read_text())):
        path, _, anchor = target.partition("#")
        for start in (f"{HOME}/blob/main/", f"{RAW}/main/"):
            if path.startswith(start):
                path = str(ROOT / path.removeprefix(start))
        if path.startswith(("http", "mailto:")):
            continue
        file = (page.parent / path).resolve() if path else page
        if not file.exists() or (anchor and file.suffix == ".md" and anchor not in anchors(file)):
            broken.append(target)
    return broken


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_broken_links(page: Path) -> None:
    assert broken_links(page) == []


def test_broken_link_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        f"# A `b` c\n[x](#a-b-c) [y](#d) [z](other.md) [w]({HOME}/blob/main/nothing.md)\n```\n[v](no.md)\n```\n"
    )
    assert broken_links(page) == ["#d", "other.md", f"{HOME}/blob/main/nothing.md"]


def test_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().split()) <= 1300


def test_readme_links_are_absolute() -> None:
    """PyPI shows the README without the files of the repository."""
    targets = re.findall(r"\]\(([^)\s]+)\)", without_code((ROOT / "README.md").read_text()))
    assert [target for target in targets if not target.startswith("https://")] == []


def test_extras_exist() -> None:
    text = "".join(page.read_text() for page in PAGES)
    named = {name for group in re.findall(r"softplus-attention\[([\w,]+)\]", text) for name in group.split(",")}
    assert named
    assert named <= PROJECT["optional-dependencies"].keys()
