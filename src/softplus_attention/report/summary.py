"""The top of a report: a verdict on each model, the table of models, and the dates."""

from __future__ import annotations

from collections.abc import Sequence

from softplus_attention.charts.model import Table
from softplus_attention.evaluation.measures import lengths
from softplus_attention.evaluation.measures.loaded import LoadedResult
from softplus_attention.report.discovery import ResultSet
from softplus_attention.report.sections import Section

SUMMARY = "Summary"
MAX_VERDICTS = 12
CAPTION = (
    "Losses in nats. A model holds to the last length before its loss exceeds that at 1x by more than 0.01 and more "
    "than two standard errors. The gain is from context beyond 1x at the longest length."
)


def summary(members: Sequence[LoadedResult]) -> Section:
    verdicts = [verdict for m in members if (verdict := lengths.verdict(m))]
    rows = [lengths.summary_row(m) for m in members if m.content]
    table = [Table("Models", lengths.SUMMARY_HEAD, rows, CAPTION)] if rows else []
    return Section(SUMMARY, [*(verdicts if len(verdicts) <= MAX_VERDICTS else []), *table])


def dates(found: ResultSet) -> str:
    """Dates of the results, for the lead of the page."""
    made = [
        result.data.get("made") if isinstance(result.data.get("made"), dict) else result.data
        for result in found.results
    ]
    days = sorted(str(each["date"])[:10] for each in made if each and each.get("date"))
    if not days:
        return ""
    return f", measured on {days[0]}" if days[0] == days[-1] else f", measured from {days[0]} to {days[-1]}"
