"""The parts of a report, those of the measures of `evaluate` among them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from softplus_attention.charts import model
from softplus_attention.charts.model import AttentionMaps, Figure, SeriesStyles, Table
from softplus_attention.evaluation.measures import measures
from softplus_attention.evaluation.measures.loaded import LoadedResult, data_name, load, tell_apart
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


def load_members(found: ResultSet) -> dict[str, list[LoadedResult]]:
    """The results of each measure, in the order of a report."""
    return {name: checked(found, name, partial(load_result, measure.read)) for name, measure in measures().items()}


def measure_sections(loaded: dict[str, list[LoadedResult]], styles: SeriesStyles) -> list[Section]:
    """A section for each measure; what lies in one folder and was measured on one text is shown together."""
    sections = []
    for name, members in loaded.items():
        groups: dict[tuple[str, str], list[LoadedResult]] = {}
        for member in members:
            groups.setdefault((member.group, data_name(member.settings)), []).append(member)
        folders, texts = ({key[place] for key in groups} for place in (0, 1))
        blocks: list[Block] = []
        for (folder, text), those in groups.items():
            words = [folder or "top folder"] * (len(folders) > 1) + [text or "no text"] * (len(texts) > 1)
            suffix = f" ({', '.join(words)})" if words else ""
            blocks += measures()[name].charts(tell_apart(those), styles, suffix)
        maps = [block for block in blocks if isinstance(block, AttentionMaps)]
        sections.append(Section(measures()[name].title, [Explorer(maps)] if maps else blocks))
    return sections
