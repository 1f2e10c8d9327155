"""The figure and the CSV tables of a folder's results, where they can be drawn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from softplus_attention.utils import results as files
from softplus_attention.utils.files import write_csv
from softplus_attention.validation import fail

Rows = Callable[[Sequence[dict[str, Any]]], tuple[list[str], list[list[Any]]]]
# The tables of each measure: file name, module and function that makes its rows.
TABLES: dict[str, dict[str, tuple[str, str]]] = {
    "lengths": {
        "lengths": ("length_measure", "csv_rows"),
        "lengths-positions": ("length_measure", "position_rows"),
    },
    "passkey": {"passkey": ("passkey_measure", "csv_rows")},
    "synthetic": {"synthetic": ("synthetic_measure", "csv_rows")},
    "inside": {"inside": ("inside_measure", "csv_rows")},
    "maps": {"maps": ("inside", "map_rows")},
    "downstream": {"downstream": ("harness", "csv_rows")},
}


def tables_of(measure: str) -> dict[str, Rows]:
    return {
        name: getattr(import_module(f"softplus_attention.evaluation.{module}"), function)
        for name, (module, function) in TABLES[measure].items()
    }


def write_tables(folder: Path, measure: str, results: Sequence[dict[str, Any]]) -> list[Path]:
    return [write_csv(folder / f"{name}.csv", *rows(results)) for name, rows in tables_of(measure).items()]


def check_whole(folder: Path, measure: str, results: Sequence[dict[str, Any]]) -> None:
    """Files that somebody has changed or cut are named before anything is written."""
    for result in results:
        try:
            for rows in tables_of(measure).values():
                rows([result])
        except (AttributeError, IndexError, KeyError, TypeError) as error:
            path = files.path_of(folder, result) if "name" in result.get("model", {}) else folder
            fail("result file", f"one that holds what `evaluate {measure}` measured", f"{str(path)!r}: {error!r}")


def draw(folder: Path, measure: str, results: Sequence[dict[str, Any]]) -> list[Path]:
    """The figure as PNG and SVG; nothing where matplotlib is missing, or where there is nothing to draw."""
    if find_spec("matplotlib") is None:
        return []
    from softplus_attention.charts.draw import draw
    from softplus_attention.charts.model import LineChart, Table
    from softplus_attention.evaluation.charts import charts_for

    shown = [r for r in results if r["results"].get("lengths", True) and r["results"].get("cells", True)]
    blocks = [block for block in charts_for(measure, shown) if not isinstance(block, Table | str)]
    if measure == "inside":  # each head has its place in the report
        blocks = [block for block in blocks if isinstance(block, LineChart)]
    return draw(blocks, folder / measure) if blocks else []


def draw_folder(folder: Path) -> list[Path]:
    """Figures and tables of everything in a folder of results: for results that came from a machine without them."""
    if not folder.is_dir():
        fail("FOLDER", "a folder of results", repr(str(folder)))
    written = []
    for measure in files.MEASURES:
        results = files.results_in(folder, measure)
        if results:
            check_whole(folder, measure, results)
            written += [*write_tables(folder, measure, results), *draw(folder, measure, results)]
    if not written:
        fail("FOLDER", "a folder of results written by `softplus-attention evaluate`", repr(str(folder)))
    return written
