"""Sections of a report, and those of the measures of `evaluate`."""

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
    """Maps of one or more models, possibly of different texts."""

    maps: Sequence[AttentionMaps]


@dataclass(frozen=True)
class Picture:
    """A PNG file of a result."""

    description: str
    png: bytes


Block = model.Block | Explorer | Picture


@dataclass
class Section:
    title: str
    blocks: list[Block] = field(default_factory=list)

    def figures(self) -> list[Figure | Table]:
        """Figures and tables that are also written as files; each map of an explorer is one."""
        found: list[Figure | Table] = []
        for block in self.blocks:
            if isinstance(block, Explorer):
                found += block.maps
            elif not isinstance(block, Picture | str):
                found.append(block)
        return found


def checked(found: ResultSet, kind: str, read: Callable[[Result], Any]) -> list[Any]:
    """Read the results of one kind; invalid ones move to ``found.problems``."""
    valid = []
    for result in found.of(kind):
        try:
            valid.append(read(result))
        except UnreadableError as error:
            found.problems.append((result.path, f"a result of kind {kind}, but {error}"))
            found.results.remove(result)
    return valid


def load_result(read: Callable[[dict[str, Any]], Any], result: Result) -> LoadedResult:
    return load(result.data, read, result.group)


def load_members(found: ResultSet) -> dict[str, list[LoadedResult]]:
    """Results by measure, in the order of the report."""
    return {name: checked(found, name, partial(load_result, measure.read)) for name, measure in measures().items()}


def measure_sections(loaded: dict[str, list[LoadedResult]], styles: SeriesStyles) -> list[Section]:
    """One section per measure; results from one folder and on one text share their charts."""
    sections = []
    for name, members in loaded.items():
        groups: dict[tuple[str, str], list[LoadedResult]] = {}
        for member in members:
            groups.setdefault((member.group, data_name(member.settings)), []).append(member)
        folders, texts = {folder for folder, _ in groups}, {text for _, text in groups}
        blocks: list[Block] = []
        for (folder, text), those in groups.items():
            parts = [folder or "top folder"] * (len(folders) > 1) + [text or "no text"] * (len(texts) > 1)
            suffix = f" ({', '.join(parts)})" if parts else ""
            blocks += measures()[name].charts(tell_apart(those), styles, suffix)
        maps = [block for block in blocks if isinstance(block, AttentionMaps)]
        sections.append(Section(measures()[name].title, [Explorer(maps)] if maps else blocks))
    return sections
