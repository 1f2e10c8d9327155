"""Pages of which some parts are made from data: between <!-- begin: NAME --> and <!-- end: NAME -->."""

from __future__ import annotations

import argparse
import math
import re
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

Row = TypeVar("Row")
MARKER = re.compile(r"^<!-- (begin|end): (\S+) -->$", re.MULTILINE)


class PageError(Exception):
    """What is wrong with a page or with the data behind it, for a reader."""


def plain(value: float, digits: int = 3) -> str:
    return f"{value:.{digits}f}"


def signed(value: float, digits: int = 3) -> str:
    text = f"{value:+.{digits}f}"
    return text[1:] if math.isfinite(value) and float(text) == 0 else text


def table(head: Sequence[str], columns: Sequence[Sequence[str]], rule: str = "---:") -> list[str]:
    rows = [head, ["---", *[rule] * (len(head) - 1)], *zip(*columns, strict=True)]
    return [*("| " + " | ".join(row) + " |" for row in rows), ""]


def table_text(head: Sequence[str], columns: Sequence[Sequence[str]], rule: str = "---:") -> str:
    return "\n".join(table(head, columns, rule)).strip()


def table_of(rows: Sequence[Row], cells: Mapping[str, Callable[[Row], str]]) -> str:
    """A line for each row of data; a column for each cell, by the words above it."""
    return table_text(list(cells), [[write(row) for row in rows] for write in cells.values()])


Places = dict[str, tuple[int, int]]  # of blocks by name: where the content begins and ends


def parts_of(page: Path, names: Collection[str]) -> tuple[str, Places]:
    """The page's text, and where all of these blocks are."""
    return parts_of_several([page], names)[page]


def parts_of_several(pages: Sequence[Path], names: Collection[str]) -> dict[Path, tuple[str, Places]]:
    """The same of pages that have these blocks among them, each once."""
    found: dict[Path, tuple[str, Places]] = {}
    where: dict[str, Path] = {}
    for page in pages:
        found[page] = marked_parts(page)
        for name in found[page][1]:
            if name not in names or name in where:
                raise PageError(f"{page}: block {name!r} is {'there twice' if name in where else 'unknown'}")
            where[name] = page
    for name in names:
        if name not in where:
            raise PageError(f"{' and '.join(map(str, pages))} has no <!-- begin: {name} -->")
    return found


def marked_parts(page: Path) -> tuple[str, Places]:
    if not page.exists():
        raise PageError(f"{page} does not exist")
    text = page.read_text()
    places: Places = {}
    markers = list(MARKER.finditer(text))
    for begin, end in zip(markers[::2], [*markers[1::2], None], strict=False):
        name = begin[2]
        if begin[1] != "begin" or end is None or end.groups() != ("end", name):
            raise PageError(f"{page}: <!-- {begin[1]}: {name} --> is not one of a pair of begin and end")
        if name in places:
            raise PageError(f"{page}: block {name!r} is there twice")
        places[name] = begin.end(), end.start()
    return text, places


def rewritten(text: str, places: Places, blocks: Mapping[str, str]) -> tuple[str, list[str]]:
    """The page with its blocks, and the names of those that change."""
    changed = []
    for name, (begin, end) in sorted(places.items(), key=lambda item: item[1], reverse=True):
        content = f"\n{blocks[name]}\n"
        if text[begin:end] != content:
            changed.append(name)
        text = text[:begin] + content + text[end:]
    return text, changed[::-1]


def write_page(
    script: str,
    arguments: Sequence[str] | None,
    results: Path,
    page: Path,
    names: Collection[str],
    blocks_of: Callable[[Path], Mapping[str, str]],
) -> int:
    """The command of a script that writes the blocks of a page from a folder of results."""
    parser = argparse.ArgumentParser(prog=script, description=f"Writes the tables of {page.name}.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit status 1 where it would")
    parser.add_argument("--results", type=Path, default=results, help="folder of the data")
    parser.add_argument("--page", type=Path, default=page)
    options = parser.parse_args(arguments)
    try:
        blocks = blocks_of(options.results)
        text, places = parts_of(options.page, names)
    except PageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    text, changed = rewritten(text, places, blocks)
    if options.check:
        if changed:
            stale = ", ".join(changed)
            print(f"{options.page} is out of date: {stale}; run python pages/{script}", file=sys.stderr)
        return 1 if changed else 0
    options.page.write_text(text)
    print(f"{options.page}: {', '.join(changed) or 'nothing'} changed")
    return 0
