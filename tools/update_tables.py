"""Rewrites the tables of README.md and docs/ between <!-- begin: NAME --> and <!-- end: NAME -->, from results/.

python -m tools.update_tables            writes the tables
python -m tools.update_tables --check    writes nothing; exit status 1 if a table is out of date
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tools.tables import benchmarks, extend, measures, newton, readme, stability, study, synthetic
from tools.tables.markdown import TableError

ROOT = Path(__file__).parents[1]
MARKER = re.compile(r"^<!-- (begin|end): (\S+) -->$", re.MULTILINE)


def make_tables(results: Path) -> dict[str, str]:
    """All tables by name."""
    made: dict[str, str] = {}
    for source in (readme, study, benchmarks, extend, newton, stability, synthetic, measures):
        made |= source.make_tables(results)
    return made


def rewrite(pages: Mapping[Path, str], tables: Mapping[str, str]) -> dict[Path, str]:
    """The new text of each page. Each table has its place on one page."""
    places: dict[str, Path] = {}

    def fill(page: Path, text: str) -> str:
        markers, filled, rest = list(MARKER.finditer(text)), "", 0
        for begin, end in zip(markers[::2], [*markers[1::2], None], strict=False):
            name = begin[2]
            if begin[1] != "begin" or end is None or end.groups() != ("end", name):
                raise TableError(f"{page}: <!-- {begin[1]}: {name} --> is not one of a pair of begin and end")
            if name not in tables:
                raise TableError(f"{page}: no table is called {name!r}")
            if name in places:
                raise TableError(f"{page}: table {name!r} is also in {places[name]}")
            places[name] = page
            filled += f"{text[rest : begin.end()]}\n{tables[name]}\n"
            rest = end.start()
        return filled + text[rest:]

    written = {page: fill(page, text) for page, text in pages.items()}
    if missing := sorted(tables.keys() - places.keys()):
        raise TableError(f"no page has <!-- begin: {missing[0]} -->")
    return written


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.update_tables", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit status 1 if a table is out of date")
    parser.add_argument("--root", type=Path, default=ROOT, help="folder of README.md, docs/ and results/")
    options = parser.parse_args(arguments)
    paths = [options.root / "README.md", *sorted((options.root / "docs").rglob("*.md"))]
    try:
        pages = {path: path.read_text() for path in paths}
        written = rewrite(pages, make_tables(options.root / "results"))
    except TableError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    changed = [path for path, text in written.items() if text != pages[path]]
    for path in changed:
        if options.check:
            print(f"{path.relative_to(options.root)} is out of date: run `make pages`", file=sys.stderr)
        else:
            path.write_text(written[path])
            print(f"{path.relative_to(options.root)}: written")
    return 1 if changed and options.check else 0


if __name__ == "__main__":
    sys.exit(main())
