"""``softplus-attention report``: one page from a folder of results."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from softplus_attention.utils import counted

if TYPE_CHECKING:
    from argparse import _SubParsersAction


def add_command(commands: _SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "report",
        help="make one page from a folder of results",
        description="Gathers every result file under a folder (of evaluate, demo, newton, the benchmarks and training "
        "runs) into one HTML page that needs nothing beside it: curves, heat maps, an attention explorer, tables and "
        "the settings of each run. Every figure is also written as PNG and SVG, and its numbers as CSV, into a folder "
        "beside the page.",
    )
    parser.add_argument("folder", metavar="DIR", type=Path, help="folder with results, at any depth")
    parser.add_argument("--output", metavar="FILE", type=Path, help="the page to write (default: DIR/report.html)")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    import matplotlib  # noqa: F401  missing, it is named before anything is written

    from softplus_attention.report.build import write_report

    def progress(done: int, of: int) -> None:
        if sys.stderr.isatty():
            print(f"\rfigures: {done} of {of} ", end="\n" if done == of else "", file=sys.stderr, flush=True)

    written = write_report(options.folder, options.output, progress)
    for path, words in written.found.problems:
        print(f"softplus-attention: not shown: {path}: {words}", file=sys.stderr)
    print(f"{counted(len(written.found.results), 'result file')}, {written.figures} figures and tables")
    print(f"  {written.page}")
    print(f"  {written.page.parent / (written.page.stem + '-files')}/  as PNG, SVG and CSV")
    return 0
