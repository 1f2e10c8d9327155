"""The measures of ``evaluate``: every module in this package that defines ``MEASURE`` (see CONTRIBUTING.md)."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules

from softplus_attention.evaluation.measures.base import Measure
from softplus_attention.utils.results import results_in
from softplus_attention.validation import fail


@cache
def measures() -> dict[str, Measure]:
    """Measures by name, in the order of --help and of the report."""
    modules = [import_module(f"{__name__}.{found.name}") for found in iter_modules(__path__)]
    found: list[Measure] = [module.MEASURE for module in modules if hasattr(module, "MEASURE")]
    return {measure.name: measure for measure in sorted(found, key=lambda measure: measure.place)}


def draw_folder(folder: Path) -> list[Path]:
    """Write the figures and tables of all results in a folder, which may come from a machine without matplotlib."""
    if not folder.is_dir():
        fail("FOLDER", "an existing folder with results", repr(str(folder)))
    written = []
    for name, measure in measures().items():
        results = results_in(folder, name)
        if results:
            measure.check(folder, results)
            written += [*measure.write_tables(folder, results), *measure.draw(folder, results)]
    if not written:
        fail("FOLDER", "a folder with results of `softplus-attention evaluate`", repr(str(folder)))
    return written
