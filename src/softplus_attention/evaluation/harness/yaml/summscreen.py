"""ROUGE of the summscreen task. The harness loads this file by path, so it must not import the package."""

from __future__ import annotations

from functools import cache
from typing import Any

KINDS = ("rouge1", "rouge2", "rougeL")


@cache
def scorer() -> Any:
    from rouge_score.rouge_scorer import RougeScorer

    return RougeScorer(list(KINDS), use_stemmer=True)


def process_results(doc: dict[str, Any], results: list[str]) -> dict[str, float]:
    """F1 of each kind in percent, for one summary and one reference."""
    scores = scorer().score(doc["output"], results[0])
    return {kind: 100 * scores[kind].fmeasure for kind in KINDS}
