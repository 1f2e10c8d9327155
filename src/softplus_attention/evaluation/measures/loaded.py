"""Result files in the form that charts take, and helpers shared by the charts of all measures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from softplus_attention.charts.model import LineChart, Number, Series
from softplus_attention.utils.untrusted import mapping, number_of, text_of

LENGTH = "length (tokens)"


@dataclass(frozen=True)
class LoadedResult:
    """A validated result of `evaluate`."""

    name: str
    training_length: float | None
    complete: bool
    settings: dict[str, Any]
    results: dict[str, Any]
    content: Any  # ``results`` as returned by the measure's ``read``
    group: str = ""  # folder; results of one folder are compared
    model: dict[str, Any] = field(default_factory=dict)

    @property
    def label(self) -> str:
        return self.name if self.complete else f"{self.name} (not finished)"


def load(data: dict[str, Any], read: Callable[[dict[str, Any]], Any], group: str = "") -> LoadedResult:
    model, results = mapping(data, "model"), mapping(data, "results")
    number_of(model, "parameters")
    return LoadedResult(
        text_of(model, "name") or "(no name)",
        number_of(model, "training_length"),
        data.get("complete") is True,
        data["settings"] if isinstance(data.get("settings"), dict) else {},
        results,
        read(results),
        group,
        model,
    )


def data_name(settings: Mapping[str, Any]) -> str:
    """Name of the texts, or "" if the settings have none."""
    data = settings.get("data", settings.get("text"))
    if not isinstance(data, dict):
        return ""
    names = [data.get("data"), data.get("split")] if "data" in data else data.get("text")
    return ", ".join(str(name).rstrip("/").rpartition("/")[2] for name in names) if isinstance(names, list) else ""


def tell_apart(members: Sequence[LoadedResult]) -> list[LoadedResult]:
    """Add what differs (texts, settings or fingerprint) to the names of results with the same name."""
    found = []
    for member in members:
        others = [other for other in members if other.name == member.name]
        if len(others) > 1:
            settings = [flat_settings(other.settings) for other in others]
            own = flat_settings(member.settings)
            different = [name for name in own if len({other.get(name) for other in settings}) > 1]
            data = data_name(member.settings) if len({data_name(other.settings) for other in others}) > 1 else ""
            parts = [data] * bool(data)
            parts += [
                f"{name} {own[name]}"
                for name in different
                if "fingerprint" not in name
                and "sha256" not in name
                and not (data and name.startswith(("data: ", "text: ")))
            ]
            member = replace(member, name=f"{member.name} ({', '.join(parts[:2]) or member.model.get('fingerprint')})")
        found.append(member)
    return found


def common_training_length(members: Sequence[LoadedResult]) -> float | None:
    """The training length if all members have the same, else None."""
    lengths = {member.training_length for member in members}
    return lengths.pop() if len(lengths) == 1 else None


def by_length(
    title: str, y_label: str, series: Sequence[Series], caption: str, base: float | None, **kwargs: Any
) -> LineChart:
    return LineChart(title, LENGTH, y_label, series, caption, x_scale="log2", times_of=base, **kwargs)


def columns_by_length(rows: Sequence[dict[str, Any]], *names: str) -> tuple[list[float], list[list[Number]]]:
    """The lengths, and for each name its values at these lengths."""
    return [row["length"] for row in rows], [[number_of(row, name) for row in rows] for name in names]


def length_names(lengths: Sequence[float], training_length: float | None) -> list[str]:
    """Column names of a heat map."""
    return [f"{n}" + (f"\n{n / training_length:g}x" if training_length else "") for n in lengths]


# Settings whose differences need no warning: those that are compared on purpose, and those that do not change results.
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
    """Names of settings that differ between members, for a warning."""
    settings = [flat_settings(member.settings) for member in members]
    names = {name for found in settings for name in found}
    return ", ".join(sorted(name for name in names if len({found.get(name) for found in settings}) > 1))


def notes(members: Sequence[LoadedResult]) -> list[str]:
    """Notes for the reader: skipped lengths, differing settings, unfinished results."""
    found = []
    for member in members:
        skipped = member.results.get("skipped")
        if isinstance(skipped, list) and skipped:
            rows = [row for row in skipped if isinstance(row, dict)]
            reasons = "; ".join(f"{row.get('length', row.get('task'))}: {row.get('reason')}" for row in rows)
            found.append(f"{member.name}, not measured: {reasons}.")
    unequal = differing_settings(members)
    if unequal:
        found.append(f"Measured with different settings ({unequal}): compare with care.")
    unfinished = [member.name for member in members if not member.complete]
    if unfinished:
        found.append(f"Not finished: {', '.join(unfinished)}.")
    return found
