"""``softplus-attention report``: one HTML page from a folder of results."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from softplus_attention.utils import counted


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "report",
        help="make one HTML page from a folder of results",
        description="Collects all result files under a folder (of evaluate, demo, newton, bench, the benchmarks and "
        "training runs) into one self-contained HTML page: curves, heat maps, an attention explorer, tables and the "
        "settings of each run. Figures are also written as SVG, and their numbers as CSV, to a folder beside the page.",
    )
    parser.add_argument("folder", metavar="DIR", type=Path, help="folder with results, at any depth")
    parser.add_argument("--output", metavar="FILE", type=Path, help="the page to write (default: DIR/report.html)")
    parser.add_argument("--png", action="store_true", help="write each figure as PNG too, which takes twice as long")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    import matplotlib  # noqa: F401  raises before anything is written

    from softplus_attention.report.build import write_report

    def progress(done: int, of: int) -> None:
        if sys.stderr.isatty():
            print(f"\rfigures: {done} of {of} ", end="\n" if done == of else "", file=sys.stderr, flush=True)

    written = write_report(options.folder, options.output, progress, options.png)
    for path, reason in written.found.problems:
        print(f"softplus-attention: not shown: {path}: {reason}", file=sys.stderr)
    print(f"{counted(len(written.found.results), 'result file')}, {written.figures} figures and tables")
    print(f"  {written.page}")
    print(f"  {written.page.parent / (written.page.stem + '-files')}/  as {'PNG, ' if options.png else ''}SVG and CSV")
    return 0
