"""Write the page of a folder of results, every figure as PNG and SVG, and their numbers as CSV next to it."""

from __future__ import annotations

import functools
import hashlib
import json
import multiprocessing
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from html import escape
from pathlib import Path

from softplus_attention import __version__
from softplus_attention.charts.draw import draw
from softplus_attention.charts.model import Figure, SeriesStyles, Table, slug, text_rows
from softplus_attention.evaluation.measures.loaded import tell_apart
from softplus_attention.report import page as html_page
from softplus_attention.report.benchmarks import speed_blocks
from softplus_attention.report.discovery import ResultSet, find_results
from softplus_attention.report.newton import newton_blocks
from softplus_attention.report.runs import demo_blocks, demo_members, run_records, training_blocks
from softplus_attention.report.sections import Section, load_members, measure_sections
from softplus_attention.report.stability import stability_blocks
from softplus_attention.report.study import read_runs, study_blocks
from softplus_attention.report.summary import SUMMARY, dates, summary
from softplus_attention.utils import counted, untrusted
from softplus_attention.utils.files import ABANDONED, clean_text, remove_temporary, write_csv, write_whole
from softplus_attention.validation import fail

MADE_BY = "Made by softplus-attention"
LARGEST_PAGE = 1024 * untrusted.MIB
TABLE = "table"  # instead of a digest
# File with a digest of each drawn figure, so that an interrupted report continues and unchanged figures are kept.
DRAWN = ".drawn"
# Increase it when the same figure is drawn differently, so that existing pictures are drawn again.
DRAWING_VERSION = 4
MAX_SERIAL = 12  # this many figures are drawn faster without starting processes


@dataclass
class Written:
    page: Path
    files: list[Path]
    found: ResultSet
    figures: int
    verdicts: list[str]

    def _repr_html_(self) -> str:
        lines = "".join(f"<li>{escape(verdict)}</li>" for verdict in self.verdicts)
        return f'<ul>{lines}</ul><p><a href="{escape(str(self.page))}">{escape(str(self.page))}</a></p>'


def write_report(
    folder: Path, output: Path | None = None, progress: Callable[[int, int], None] | None = None, png: bool = False
) -> Written:
    if not folder.is_dir():
        reason = "a file" if folder.exists() else "no such folder"
        raise ValueError(f"{folder}: {reason}. DIR takes a folder with results")
    page = output if output is not None else folder / "report.html"
    if page.is_dir():
        fail("--output", "a file, not a folder", repr(str(page)))
    if page.exists() and not is_report(page):
        fail("--output", "a new file, or a report to replace", f"{str(page)!r}, which is another file")
    beside = page.parent / f"{page.stem}-files"
    has_files = any(not path.name.startswith(DRAWN) for path in beside.iterdir()) if beside.is_dir() else False
    if has_files and not (beside / DRAWN).exists():
        expected = "a page whose folder of figures is new or written by a report"
        fail("--output", expected, f"{str(beside)!r}, which has other files")
    if beside.is_symlink():
        fail(str(beside), "a folder for the report's figures", "a link, through which other files could be overwritten")
    found = find_results(folder, skip=beside)
    if not found.results:
        names = "; ".join(f"{path}: {reason}" for path, reason in found.problems[:5])
        fail("DIR", "a folder with at least one result file", f"{str(folder)!r}" + (f" ({names})" if names else ""))
    sections = all_sections(found)
    files = file_names(sections)
    beside.mkdir(parents=True, exist_ok=True)
    remove_temporary(beside, older=ABANDONED)
    if not has_files:  # before any other file, because it marks the folder as ours
        write_whole(beside / DRAWN, "{}")
    formats = ("svg", "png") if png else ("svg",)
    links = {key: name for key, (name, _) in files.items()}
    write_whole(page, render_html(found, sections, links, beside.name, formats))
    written = write_files(beside, list(files.values()), progress, formats)
    summaries = [section for section in sections if section.title == SUMMARY]
    verdicts = [block for section in summaries for block in section.blocks if isinstance(block, str)]
    return Written(page, written, found, len(files), verdicts)


def all_sections(found: ResultSet) -> list[Section]:
    """The sections that are not empty; reading results adds those that are not valid to ``found.problems``."""
    styles = SeriesStyles()
    demo = demo_blocks(found, styles)
    loaded = load_members(found)
    parts = measure_sections(loaded, styles)
    parts[0].blocks = [*demo, *parts[0].blocks]
    runs = read_runs(found)
    parts.insert(0, Section("The study", study_blocks(runs, styles)))
    parts.insert(0, summary([*demo_members(found), *tell_apart(loaded["lengths"]), *(run.lengths for run in runs)]))
    parts.append(Section("Training", training_blocks(found, styles)))
    parts.append(Section("Stability", stability_blocks(found, styles)))
    parts.append(Section("Newton from orbits", newton_blocks(found, styles)))
    parts.append(Section("Speed", speed_blocks(found)))
    return [part for part in parts if part.blocks]


def file_names(sections: list[Section]) -> dict[int, tuple[str, Figure | Table]]:
    figures = [figure for section in sections for figure in section.figures()]
    return {id(figure): (f"{place:02d}-{slug(figure.title)}", figure) for place, figure in enumerate(figures, 1)}


def render_html(
    found: ResultSet, sections: list[Section], files: dict[int, str], beside: str, formats: Sequence[str] = ("svg",)
) -> str:
    content = html_page.Document(files, beside, formats)
    parts = [(section.title, content.section(section, place)) for place, section in enumerate(sections)]
    records = html_page.runs(run_records(found))
    parts.append(("Runs and settings", html_page.plain_section("Runs and settings", len(parts), records)))
    if found.problems or found.working_files:
        body = html_page.problems(found.problems, found.working_files)
        parts.append(("Files not shown", html_page.plain_section("Files not shown", len(parts), body)))
    name = clean_text(found.folder.resolve().name) or "results"
    lead = f"{counted(len(found.results), 'result file')} from the folder {name}{dates(found)}."
    return html_page.page(f"Report: {name}", lead, parts, content, f"{MADE_BY} {__version__}.")


def write_files(
    folder: Path,
    figures: list[tuple[str, Figure | Table]],
    progress: Callable[[int, int], None] | None,
    formats: Sequence[str],
) -> list[Path]:
    """Write all CSV files, and PNG and SVG of figures that are new or changed."""
    drawn = read_drawn(folder / DRAWN)
    version = f"{__version__} {DRAWING_VERSION}"
    wanted: dict[str, str] = {}
    written: list[Path] = []
    missing: list[tuple[Figure, Path]] = []
    for name, figure in figures:
        head, rows = figure.table()
        written.append(write_csv(folder / f"{name}.csv", head, text_rows(rows)))
        wanted[name] = TABLE
        if isinstance(figure, Table):
            continue
        wanted[name] = hashlib.sha256(f"{version} {figure!r}".encode("utf-8", "replace")).hexdigest()
        pictures = [folder / f"{name}.{one}" for one in formats]
        if drawn.get(name) != wanted[name] or not all(picture.is_file() for picture in pictures):
            missing.append((figure, folder / name))
            if name in drawn and "png" not in formats:  # of an earlier report: it would show other numbers
                (folder / f"{name}.png").unlink(missing_ok=True)
        written += pictures
    done = {name: digest for name, digest in wanted.items() if name not in {path.name for _, path in missing}}
    for place, path in enumerate(draw_all(missing, formats), 1):
        done[path.name] = wanted[path.name]
        write_whole(folder / DRAWN, json.dumps({**drawn, **done}))
        if progress is not None:
            progress(place, len(missing))
    remove_old(folder, set(drawn) - set(wanted))
    write_whole(folder / DRAWN, json.dumps(wanted))
    return written


def draw_all(figures: Sequence[tuple[Figure, Path]], formats: Sequence[str]) -> Iterator[Path]:
    """Draw figures, many of them on all cores; yields the path of each drawn figure."""
    draw_own = functools.partial(draw_one, formats=formats)
    workers = min(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1, len(figures))
    if workers < 2 or len(figures) <= MAX_SERIAL or "fork" not in multiprocessing.get_all_start_methods():
        yield from map(draw_own, figures)
        return
    import matplotlib.figure  # noqa: F401  once, before forking

    with warnings.catch_warnings():
        # Python 3.12 warns about forking with threads; the children use nothing that the threads lock.
        warnings.simplefilter("ignore", DeprecationWarning)
        with ProcessPoolExecutor(workers, multiprocessing.get_context("fork")) as pool:
            yield from pool.map(draw_own, figures)


def draw_one(figure: tuple[Figure, Path], formats: Sequence[str]) -> Path:
    draw(*figure, formats=formats)
    return figure[1]


def is_report(page: Path) -> bool:
    try:
        return MADE_BY.encode() in untrusted.read_bytes(page, LARGEST_PAGE)
    except untrusted.UntrustedFileError:
        return False


def read_drawn(path: Path) -> dict[str, str]:
    try:
        found = untrusted.read_json(path)
    except (OSError, untrusted.UntrustedFileError):
        return {}
    return found if isinstance(found, dict) else {}


def remove_old(folder: Path, names: set[str]) -> None:
    """Remove figures and tables listed in the file of an earlier report, and nothing else."""
    for name in names:
        for suffix in (".png", ".svg", ".csv"):
            path = folder / f"{name}{suffix}"
            if path.parent == folder and path.is_file():
                path.unlink()
