"""The parts of a report, those of the measures of `evaluate` among them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from softplus_attention.charts import model
from softplus_attention.charts.model import AttentionMaps, Figure, SeriesStyles, Table
from softplus_attention.evaluation.measures import measures
from softplus_attention.evaluation.measures.loaded import LoadedResult, load
from softplus_attention.report.discovery import Result, ResultSet
from softplus_attention.utils.untrusted import UnreadableError


@dataclass(frozen=True)
class Explorer:
    """Maps of one or more models, of the same text or of different ones, which the page says."""

    maps: Sequence[AttentionMaps]


@dataclass(frozen=True)
class Picture:
    """A PNG that a result brought along."""

    description: str
    png: bytes


Block = model.Block | Explorer | Picture


@dataclass
class Section:
    title: str
    blocks: list[Block] = field(default_factory=list)

    def figures(self) -> list[Figure | Table]:
        """What is also written as files, the explorer's maps one by one."""
        found: list[Figure | Table] = []
        for block in self.blocks:
            if isinstance(block, Explorer):
                found += block.maps
            elif not isinstance(block, Picture | str):
                found.append(block)
        return found


def checked(found: ResultSet, kind: str, read: Callable[[Result], Any]) -> list[Any]:
    good = []
    for result in found.of(kind):
        try:
            good.append(read(result))
        except UnreadableError as error:
            found.problems.append((result.path, f"a result of kind {kind}, but {error}"))
            found.results.remove(result)
    return good


def load_result(read: Callable[[dict[str, Any]], Any], result: Result) -> LoadedResult:
    return load(result.data, read, result.group)


def measure_sections(found: ResultSet, styles: SeriesStyles) -> list[Section]:
    """A section for each measure; what lies in one folder was measured together and is shown together."""
    sections = []
    for measure in measures().values():
        groups: dict[str, list[LoadedResult]] = {}
        for loaded in checked(found, measure.name, partial(load_result, measure.read)):
            groups.setdefault(loaded.group, []).append(loaded)
        blocks: list[Block] = []
        for group, members in groups.items():
            blocks += measure.charts(members, styles, f" ({group or 'top folder'})" if len(groups) > 1 else "")
        maps = [block for block in blocks if isinstance(block, AttentionMaps)]
        sections.append(Section(measure.title, [Explorer(maps)] if maps else blocks))
    return sections
