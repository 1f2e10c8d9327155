"""What results of ``evaluate`` show, a module for each measure: drawn by matplotlib, and by the page of a report.

Each has its TITLE in a report, ``read``, which checks the ``results`` of a file, and ``charts``, which takes what was
measured together. Nothing here needs more than the files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from softplus_attention.charts.model import Block, SeriesStyles
from softplus_attention.evaluation.charts import downstream, inside, lengths, maps, passkey, synthetic
from softplus_attention.evaluation.charts.results import load

# By measure, in the order of a report.
CHARTS: dict[str, Any] = {
    "lengths": lengths,
    "passkey": passkey,
    "synthetic": synthetic,
    "inside": inside,
    "maps": maps,
    "downstream": downstream,
}


def charts_for(measure: str, results: Sequence[Mapping[str, Any]]) -> list[Block]:
    """Of result files of one measure, as `utils.results` reads them."""
    module = CHARTS[measure]
    found: list[Block] = module.charts([load(dict(result), module.read) for result in results], SeriesStyles())
    return found
