"""The table of measures in docs/evaluation.md, from the measures themselves."""

from __future__ import annotations

from pathlib import Path

from softplus_attention.evaluation.measures import measures
from tools.tables.markdown import table


def make_tables(results: Path) -> dict[str, str]:
    """``results`` is unused: the text comes from each measure's help."""
    found = measures().values()
    names, answers = [f"`evaluate {measure.name}`" for measure in found], [measure.help for measure in found]
    return {"measures": table(["measure", "what it answers"], [names, answers], "---")}
