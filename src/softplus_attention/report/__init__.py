"""Results as figures and as one self-contained page: ``report(folder)`` and the command `report`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from softplus_attention.report.build import Written

__all__ = ["report"]


def __dir__() -> list[str]:
    return __all__


def report(folder: str | Path, output: str | Path | None = None) -> Written:
    """Gathers every result file under a folder into one HTML page, as `softplus-attention report` does.

    Args:
        folder: where the results are, at any depth.
        output: the page to write; None: ``report.html`` in the folder.

    Gives what was written (``page``, ``files``), what was found and what could not be shown (``found.problems``). A
    notebook shows the verdicts and a link to the page.
    """
    from softplus_attention.report.build import write_report

    return write_report(Path(folder), None if output is None else Path(output))
