"""Results as figures and one self-contained HTML page: ``report(folder)`` and the command `report`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from softplus_attention.report.build import Written

__all__ = ["report"]


def __dir__() -> list[str]:
    return __all__


def report(folder: str | Path, output: str | Path | None = None, png: bool = False) -> Written:
    """Collect all result files under a folder into one HTML page, like `softplus-attention report`.

    Args:
        folder: folder with results, at any depth.
        output: the page to write (default: ``report.html`` in the folder).
        png: write each figure as PNG too, besides SVG.

    Returns the written files (``page``, ``files``), the results found, and those that could not be shown
    (``found.problems``). Notebooks display the verdicts and a link to the page.
    """
    from softplus_attention.report.build import write_report

    return write_report(Path(folder), None if output is None else Path(output), png=png)
