"""Reads the results of experiments/study/run.py, and averages them over seeds."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from experiments.study.arms import ARMS, SIZES
from softplus_attention.report.study import KINDS, layer_kind

BASELINE = "baseline"
SMALL = ("books", "bytes")  # sizes trained only for the ablations
PROGRAM = "experiments/study/run.py"


class RecordError(Exception):
    """A file is not a run of the study, or is not comparable with the others."""


@dataclass(frozen=True)
class Curve:
    """Losses and controls by multiple of the training length."""

    loss: dict[int, float]
    error: dict[int, float | None]
    gain: dict[int, float]
    gain_error: dict[int, float | None]


@dataclass(frozen=True)
class Run:
    arm: str
    size: str
    seed: int
    config: dict[str, Any]
    tokens: int
    data: str
    step_seconds: float
    processes: int  # number of processes that shared the GPU
    commit: str
    versions: dict[str, str]
    machine: str
    parameters: int
    own: Curve
    far: Curve  # control over the last quarter of each text, without losses; empty for older runs
    far_targets: set[int]
    used: dict[str, int]
    variants: dict[str, Curve]
    passkey: dict[int, list[tuple[int, int]]]  # (correct, trials) per depth
    inside: dict[int, dict[str, float | None]]
    learned: list[dict[str, list[float]]]  # per layer: values of the heads by name of the quantity

    @property
    def kind(self) -> str:
        return layer_kind(self.config)

    @property
    def family(self) -> str:
        attention = self.config["attention"]
        return next((name for name in ("lssar", "lssa") if attention.startswith(name)), BASELINE)

    def same_for_a_size(self) -> dict[str, Any]:
        """What must be equal for losses to be comparable in one table."""
        names = ("layers", "width", "heads", "sequence_length", "steps", "batch_size")
        return {**{name: self.config[name] for name in names}, "data": self.data, "texts": self.used}


@dataclass(frozen=True)
class Spread:
    """The mean over seeds and half of their range."""

    mean: float
    half_range: float
    count: int


@dataclass(frozen=True)
class Size:
    name: str
    arms: dict[str, list[Run]]  # sorted by kind, then in the order of arms.py

    @property
    def any_run(self) -> Run:
        return next(iter(self.arms.values()))[0]

    @property
    def runs(self) -> list[Run]:
        return [run for runs in self.arms.values() for run in runs]

    @property
    def multiples(self) -> list[int]:
        return sorted({multiple for run in self.runs for multiple in run.own.loss})

    @property
    def longest(self) -> int:
        return self.multiples[-1]

    @property
    def kinds(self) -> list[str]:
        return [kind for kind in KINDS if any(run.kind == kind for run in self.runs)]

    def of_kind(self, kind: str) -> Size:
        return Size(self.name, {arm: runs for arm, runs in self.arms.items() if runs[0].kind == kind})

    def of_family(self, family: str) -> list[str]:
        return [arm for arm, runs in self.arms.items() if runs[0].family == family]

    def options(self, arm: str) -> list[str]:
        return list(dict.fromkeys(option for run in self.arms[arm] for option in run.variants))

    def far(self, arm: str) -> list[Curve]:
        return [run.far for run in self.arms[arm]]

    def curves(self, arm: str, option: str | None = None) -> list[Curve]:
        if option is None:
            return [run.own for run in self.arms[arm]]
        return [run.variants[option] for run in self.arms[arm] if option in run.variants]


def read_curve(results: Mapping[str, Any], length: int) -> Curve:
    entries = {entry["length"] // length: entry for entry in results["lengths"]}
    controls = {multiple: entry["control"] for multiple, entry in entries.items() if entry["control"]}
    return Curve(
        {multiple: float(entry["loss"]) for multiple, entry in entries.items()},
        {multiple: entry["standard_error"] for multiple, entry in entries.items()},
        *read_gains(controls),
    )


def read_gains(controls: Mapping[int, Mapping[str, Any]]) -> tuple[dict[int, float], dict[int, float | None]]:
    """Gains and their standard errors by multiple."""
    gains = {multiple: float(control["gain"]) for multiple, control in controls.items()}
    return gains, {multiple: control["standard_error"] for multiple, control in controls.items()}


def read_record(record: Mapping[str, Any]) -> Run:
    found, length = record["evaluation"], record["config"]["sequence_length"]
    far = found.get("far_control", [])
    passkey: dict[int, list[tuple[int, int]]] = {}
    for cell in found["passkey"]:
        passkey.setdefault(cell["length"] // length, []).append((cell["correct"], cell["trials"]))
    return Run(
        **{name: record[name] for name in ("arm", "size", "seed", "config", "tokens", "data", "commit", "versions")},
        step_seconds=float(record["training"]["step_seconds"]),
        processes=int(record["training"].get("processes", 1)),
        machine=record["machine"].get("gpu", record["machine"]["cpu"]),
        parameters=int(found["parameters"]),
        own=read_curve(found["lengths"], length),
        far=Curve({}, {}, *read_gains({entry["length"] // length: entry for entry in far})),
        far_targets={int(entry["targets"]) for entry in far},
        used=found["lengths"]["used"],
        variants={option: read_curve(results, length) for option, results in found["variants"].items()},
        passkey=passkey,
        inside={entry["length"] // length: entry for entry in found["inside"]},
        learned=[
            {name: [float(number) for number in heads] for name, heads in layer.items()}
            for layer in found.get("learned", [])
        ],
    )


def read_run(path: Path) -> Run:
    try:
        record = json.loads(path.read_text())
    except ValueError as error:
        raise RecordError(f"{path} is damaged: {error}") from error
    try:
        run = read_record(record)
        run.same_for_a_size()
        run.config["attention"]
    except KeyError as error:
        raise RecordError(f"{path} is not a run of {PROGRAM}: it has no {error}") from error
    except (TypeError, ValueError, AttributeError) as error:
        raise RecordError(f"{path} is not a run of {PROGRAM}: {error}") from error
    if run.size not in SIZES or run.arm not in ARMS:
        raise RecordError(f"{path} has an arm or size that {PROGRAM} does not know: {run.size}, {run.arm}")
    if path.name != f"{run.size}-{run.arm}-seed{run.seed}.json":
        raise RecordError(f"{path} holds a run that differs from its name: {run.size}, {run.arm}, seed {run.seed}")
    if not run.own.loss:
        raise RecordError(f"{path} has no measured length")
    return run


def read_study(folder: Path) -> list[Size]:
    """The runs by size, kind of layers and arm; sizes and arms in the order of arms.py."""
    found: dict[tuple[str, str], list[Run]] = {}
    first: dict[tuple[str, str], tuple[Path, Any]] = {}
    for path in sorted(folder.glob("*.json")):
        run = read_run(path)
        # Settings that the arm itself defines may differ.
        shared = {name: value for name, value in run.same_for_a_size().items() if name not in ARMS[run.arm]}
        others = {name: first.setdefault((run.size, name), (path, value)) for name, value in shared.items()}
        different = {name: other for name, (other, value) in others.items() if value != shared[name]}
        if different:
            other = next(iter(different.values()))
            raise RecordError(f"{path} is not comparable with {other}: they differ in {', '.join(different)}")
        found.setdefault((run.size, run.arm), []).append(run)
    for runs in found.values():
        runs.sort(key=lambda run: run.seed)
    sizes = []
    for size in SIZES:
        arms = [arm for arm in ARMS if (size, arm) in found]
        if not arms:
            continue
        arms.sort(key=lambda arm: KINDS.index(found[size, arm][0].kind))
        sizes.append(Size(size, {arm: found[size, arm] for arm in arms}))
    return sizes


def spread(values: Iterable[float | None]) -> Spread | None:
    """None if no run has the value."""
    known = [value for value in values if value is not None]
    if not known:
        return None
    return Spread(sum(known) / len(known), (max(known) - min(known)) / 2, len(known))


def loss_at(curves: Sequence[Curve], multiple: int) -> Spread | None:
    return spread(curve.loss.get(multiple) for curve in curves)


def rise(curves: Sequence[Curve], longest: int) -> Spread | None:
    both = [curve.loss for curve in curves if 1 in curve.loss and longest in curve.loss]
    return spread(loss[longest] - loss[1] for loss in both)


def gain_at(curves: Sequence[Curve], multiple: int) -> Spread | None:
    return spread(curve.gain.get(multiple) for curve in curves)


def gain_error_at(curves: Sequence[Curve], multiple: int) -> Spread | None:
    """The mean standard error over seeds, not reduced by their number: they are measured on the same texts."""
    return spread(curve.gain_error.get(multiple) for curve in curves)


def passkey_at(runs: Sequence[Run], multiple: int) -> float | None:
    """The mean over depths and seeds, as an exact fraction so that nine of ten count as 90%."""
    cells = [Fraction(*cell) for run in runs for cell in run.passkey.get(multiple, [])]
    return float(sum(cells) / len(cells)) if cells else None


def timed(size: Size) -> dict[str, Spread]:
    """Milliseconds per step of runs alone on the GPU, with the same commit as the run of softmax."""
    alone = {arm: [run for run in runs if run.processes == 1] for arm, runs in size.arms.items()}
    commits = [run.commit for run in alone.get("softmax", [])][:1]
    times = {
        arm: spread(1000 * run.step_seconds for run in runs if run.commit in commits) for arm, runs in alone.items()
    }
    return {arm: time for arm, time in times.items() if time is not None}


def option_words(option: str) -> str:
    """A readable description of an option of `softplus-attention evaluate`."""
    name, _, value = option.partition("=")
    kind, _, number = value.partition(":")
    if name == "window":
        return f"sliding window of {value}"
    if name == "rope":
        return {"yarn": "YaRN", "dynamic": "dynamic NTK"}.get(kind, kind) + f", factor {number}"
    if name == "power" and kind == "grow":
        first, _, growth = number.partition(",")
        return f"power growing from {first}, {growth} for each factor e of keys"
    return {"power": f"p = {value}", "reweight": "re-weighted at inference"}.get(name, option)
