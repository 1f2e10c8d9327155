"""The parts of a report, and what they share: names, colours, and a result's own words about itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from softplus_attention.charts.model import AttentionMaps, Figure, Table
from softplus_attention.report.reading import Result, ResultSet, UnreadableError, mapping, number_of, text_of


@dataclass(frozen=True)
class Explorer:
    """Maps of one or more models, of the same text or of different ones, which the page says."""

    maps: Sequence[AttentionMaps]


@dataclass(frozen=True)
class Picture:
    """A PNG that a result brought along."""

    description: str
    png: bytes


Block = Figure | Table | Explorer | Picture | str


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


@dataclass(frozen=True)
class LoadedResult:
    """A result of `evaluate`: the frame that all measures share, read and checked."""

    result: Result
    name: str
    training_length: float | None
    complete: bool
    settings: dict[str, Any]
    results: dict[str, Any]
    content: Any  # what the measure's own reader made of ``results``

    @property
    def label(self) -> str:
        return self.name if self.complete else f"{self.name} (not finished)"


def measured(found: ResultSet, kind: str, reader: Callable[[dict[str, Any]], Any]) -> list[LoadedResult]:
    """The results of a kind; those that are not as they should be become problems."""

    def read(result: Result) -> LoadedResult:
        model = mapping(result.data, "model")
        results = mapping(result.data, "results")
        return LoadedResult(
            result,
            text_of(model, "name") or "(no name)",
            number_of(model, "training_length"),
            result.data.get("complete") is True,
            result.data["settings"] if isinstance(result.data.get("settings"), dict) else {},
            results,
            reader(results),
        )

    return checked(found, kind, read)


def checked(found: ResultSet, kind: str, read: Callable[[Result], Any]) -> list[Any]:
    good = []
    for result in found.of(kind):
        try:
            good.append(read(result))
        except UnreadableError as error:
            found.problems.append((result.path, f"a result of kind {kind}, but {error}"))
            found.results.remove(result)
    return good


def base_of(members: Sequence[LoadedResult]) -> float | None:
    """The training length, where all have the same."""
    lengths = {member.training_length for member in members}
    return lengths.pop() if len(lengths) == 1 else None


def groups(members: Iterable[LoadedResult]) -> dict[str, list[LoadedResult]]:
    """By folder: what was measured together is shown together."""
    found: dict[str, list[LoadedResult]] = {}
    for member in members:
        found.setdefault(member.result.group, []).append(member)
    return found


def where(group: str, many: bool) -> str:
    """The folder, in titles, where there is more than one."""
    return f" ({group or 'top folder'})" if many else ""


# What a comparison is about, and what leaves the numbers as they are: no reason to compare with care.
COMPARED = {"attention", "local_attention", "power", "power_rounding", "power_growth", "score_scale"}
WITHOUT_EFFECT = {
    "compile", "device", "evaluate_every", "evaluate_sequences", "gradient_checkpointing", "keep", "log_every", "loss",
    "micro_batch_size", "parallel", "peak_tflops", "save_every", "workers",
}  # fmt: skip


def flat_settings(settings: Mapping[str, Any], before: str = "") -> dict[str, str]:
    found: dict[str, str] = {}
    for name, value in settings.items():
        if before and name in COMPARED | WITHOUT_EFFECT:
            continue
        found |= flat_settings(value, f"{before}{name}: ") if isinstance(value, dict) else {before + name: repr(value)}
    return found


def differing_settings(members: Sequence[LoadedResult]) -> str:
    """Names of settings that are not the same for all: such curves are not to be compared without a thought."""
    settings = [flat_settings(member.settings) for member in members]
    names = {name for found in settings for name in found}
    return ", ".join(sorted(name for name in names if len({found.get(name) for found in settings}) > 1))


def notes(members: Sequence[LoadedResult]) -> list[str]:
    """What a reader must know of these results: lengths left out, settings that differ, results not finished."""
    found = []
    for member in members:
        skipped = member.results.get("skipped")
        if isinstance(skipped, list) and skipped:
            rows = [row for row in skipped if isinstance(row, dict)]
            words = "; ".join(f"{row.get('length', row.get('task'))}: {row.get('reason')}" for row in rows)
            found.append(f"{member.name}, not measured: {words}.")
    unequal = differing_settings(members)
    if unequal:
        found.append(f"Measured with different settings ({unequal}): compare with care.")
    unfinished = [member.name for member in members if not member.complete]
    if unfinished:
        found.append(f"Not finished: {', '.join(unfinished)}.")
    return found
