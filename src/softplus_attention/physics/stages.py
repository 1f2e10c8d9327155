"""The stages of the experiment. Each stage writes files, and is skipped if its files exist."""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from softplus_attention.physics.presets import Experiment
from softplus_attention.training import distributed
from softplus_attention.utils import files, untrusted
from softplus_attention.validation import fail

# Settings that may differ within a folder, or that affect only the laws.
NOT_IDENTITY = ("arms", "seeds", "labels", "operators", "nearest_points")
UNDAMAGED = "a folder of undamaged files (delete a damaged one, and its stage writes it again)"


def write_json(path: Path, content: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    files.write_json(path, content)


def read_json(path: Path) -> Any:
    try:
        return untrusted.read_json(path)
    except ValueError as error:
        fail("--output", UNDAMAGED, f"{path}: {error}")


def write_arrays(path: Path, arrays: dict[str, Any]) -> None:
    """Stores floats as float32, half the size of float64 and more precise than any model."""
    path.parent.mkdir(parents=True, exist_ok=True)
    small: dict[str, Any] = {
        name: np.asarray(values, dtype=np.float32 if np.issubdtype(values.dtype, np.floating) else np.int32)
        for name, values in arrays.items()
    }
    files.write_arrays(path, small, compress=True)


def read_arrays(path: Path) -> dict[str, Any]:
    try:
        return {
            name: values.astype(np.float64 if values.dtype.kind == "f" else np.int64)
            for name, values in untrusted.read_arrays(path).items()
        }
    except ValueError as error:
        fail("--output", UNDAMAGED, f"{path}: {str(error).splitlines()[0]}")


@dataclass(frozen=True)
class Cell:
    """One tuned model."""

    arm: str
    seed: int
    labels: int
    pretrained: bool
    folder: Path

    @property
    def title(self) -> str:
        how = "" if self.pretrained else ", no pre-training"
        return f"{self.arm}, seed {self.seed}, {self.labels} labelled systems{how}"


class Folder:
    """The files of an experiment."""

    def __init__(self, path: Path, experiment: Experiment) -> None:
        self.path, self.experiment = path, experiment
        self.check_identity()

    def check_identity(self) -> None:
        """A folder holds one experiment: results of other settings are not comparable."""
        identity = {
            key: value
            for key, value in json.loads(json.dumps(self.experiment.to_json())).items()
            if key not in NOT_IDENTITY and not key.startswith("law_")
        }
        file = self.path / "experiment.json"
        if file.is_file():
            other = read_json(file)
            # Report the preset first: it is the cause of the other differences.
            for key in sorted(set(identity) | set(other), key=lambda key: (key != "preset", key)):
                if identity.get(key) != other.get(key):
                    expected = f"a folder of the same experiment: its `{key}` is {other.get(key)!r}"
                    fail("--output", expected, f"{key} = {identity.get(key)!r}")
        else:
            write_json(file, identity)

    def run(self, arm: str, seed: int) -> Path:
        return self.path / "arms" / arm / f"seed{seed}"

    def cell(self, arm: str, seed: int, labels: int, pretrained: bool) -> Cell:
        key = "tuned" if pretrained else "untrained"
        return Cell(arm, seed, labels, pretrained, self.run(arm, seed) / f"{key}-{labels}")

    def runs(self) -> Iterator[tuple[str, int]]:
        for arm in self.experiment.arms:
            for seed in self.experiment.seeds:
                yield arm, seed

    def existing_runs(self) -> list[tuple[str, int]]:
        """The runs of this call, and those of earlier calls."""
        found = [
            (path.parent.name, int(path.name.removeprefix("seed")))
            for path in sorted(self.path.glob("arms/*/seed*"))
            if path.name.removeprefix("seed").isdecimal()
        ]
        return list(dict.fromkeys([*self.runs(), *found]))

    def existing_cells(self) -> list[Cell]:
        cells = list(self.all_cells())
        for arm, seed in self.existing_runs():
            for path in sorted(self.run(arm, seed).glob("*-*")):
                key, _, labels = path.name.partition("-")
                if key in ("tuned", "untrained") and labels.isdecimal():
                    cells.append(self.cell(arm, seed, int(labels), key == "tuned"))
        return list(dict.fromkeys(cells))

    def cells(self, arm: str, seed: int) -> Iterator[Cell]:
        for labels in self.experiment.labels:
            yield self.cell(arm, seed, labels, True)
            if self.experiment.without_pretraining:
                yield self.cell(arm, seed, labels, False)

    def all_cells(self) -> list[Cell]:
        return [cell for arm, seed in self.runs() for cell in self.cells(arm, seed)]


def run_stages(folder: Folder, stages: tuple[str, ...], options: Any) -> None:
    """``options`` are ``training.ComputeOptions``."""
    of_a_run = {"pretrain": pretrain_stage, "probe": probe_stage, "tune": tune_stage, "long": long_stage}
    # All stages of one run before the next: an interrupted call leaves complete runs.
    for arm, seed in folder.runs():
        for name, stage in of_a_run.items():
            if name in stages:
                stage(folder, arm, seed, options)
                distributed.wait_for_all()
    for name, final_stage in (("laws", laws_stage), ("figures", figures_stage)):
        if name in stages:
            final_stage(folder)


def pretrain_stage(folder: Folder, arm: str, seed: int, options: Any) -> None:
    from softplus_attention.huggingface.saving import save_trained
    from softplus_attention.physics.training import pretrain
    from softplus_attention.training.run_folder import RunFolder

    place = folder.run(arm, seed)
    if (place / "pretrain.json").is_file():
        return
    run = RunFolder(place / "pretraining", model=place / "pretrained")
    with run.locked():
        model, measured = pretrain(folder.experiment, arm, seed, run, options)
        if distributed.is_rank0():
            run.save(functools.partial(save_trained, model))
            write_json(place / "pretrain.json", measured)
            run.remove_checkpoints()


def pretrained_model(folder: Folder, arm: str, seed: int, options: Any) -> Any:
    from softplus_attention.huggingface.loading import load
    from softplus_attention.physics.modeling_orbit_gpt import OrbitGPTForTrajectories, check_checkpoint

    path = folder.run(arm, seed) / "pretrained"
    check_checkpoint(path, folder.experiment.form)
    return load(OrbitGPTForTrajectories, "checkpoint", str(path), False).to(options.device)


def probe_stage(folder: Folder, arm: str, seed: int, options: Any) -> None:
    from softplus_attention.physics.measure import probe

    file = folder.run(arm, seed) / "probes.json"
    if file.is_file() or not distributed.is_rank0():
        return
    write_json(file, probe(pretrained_model(folder, arm, seed, options), folder.experiment, seed))
    print(f"probe {arm}, seed {seed}: done", flush=True)


def tune_stage(folder: Folder, arm: str, seed: int, options: Any) -> None:
    from softplus_attention.training.run_folder import RunFolder

    for cell in folder.cells(arm, seed):
        if (cell.folder / "tune.json").is_file():
            continue
        run = RunFolder(cell.folder)
        with run.locked():
            tune_cell(folder, cell, run, options)


def tune_cell(folder: Folder, cell: Cell, run: Any, options: Any) -> None:
    from softplus_attention.huggingface.saving import save_trained
    from softplus_attention.physics.measure import predicted_forces, quality
    from softplus_attention.physics.training import tune

    experiment, seed = folder.experiment, cell.seed
    model, measured = tune(experiment, cell, folder.run(cell.arm, seed) / "pretrained", run, options)
    if not distributed.is_rank0():
        return
    arrays = predicted_forces(model.to(options.device), experiment, seed)
    write_arrays(cell.folder / "force.npz", arrays)
    if cell.labels == max(experiment.labels):
        run.save(functools.partial(save_trained, model))
    measured["quality"] = {"inside": quality(arrays, "inside")}
    write_json(cell.folder / "tune.json", measured)
    run.remove_checkpoints()
    r2 = measured["quality"]["inside"].get("r2_ln_force", float("nan"))
    print(f"tune {cell.title}: R^2 of ln F {r2:.4f} in {measured['seconds']:.0f} s", flush=True)


def long_stage(folder: Folder, arm: str, seed: int, options: Any) -> None:
    from softplus_attention.huggingface.loading import load
    from softplus_attention.physics.measure import force_by_length, next_places, roll_outs
    from softplus_attention.physics.modeling_orbit_gpt import OrbitGPTForForce

    experiment, run = folder.experiment, folder.run(arm, seed)
    if not experiment.multiples or not distributed.is_rank0():
        return
    before = read_json(run / "long.json") if (run / "long.json").is_file() else None
    tuned = {
        cell.folder.name: cell.folder / "model"
        for cell in folder.cells(arm, seed)
        if (cell.folder / "model" / "config.json").is_file()
    }
    missing = [name for name in tuned if before is None or name not in before["force"]]
    if before is not None and not missing:
        return
    if experiment.learned_positions:
        print("long: skipped, learned positions end at the training length", flush=True)
        return
    begun = time.perf_counter()
    found: dict[str, Any]
    if before is not None:
        found = before
    else:
        model = pretrained_model(folder, arm, seed, options)
        rows, orbits = roll_outs(model, experiment, seed)
        found = {
            "trained_steps": experiment.steps,
            "next_place": next_places(model, experiment, seed),
            "roll_out": rows,
            "force": {},
            "seconds": 0.0,
        }
        write_arrays(run / "roll_out.npz", orbits)
    for name in missing:
        model = load(OrbitGPTForForce, "checkpoint", str(tuned[name]), False).to(options.device)
        found["force"][name] = force_by_length(model, experiment, seed)
    seconds = time.perf_counter() - begun
    found["seconds"] += seconds
    write_json(run / "long.json", found)
    print(f"long {arm}, seed {seed}: {seconds:.0f} s", flush=True)


def laws_stage(folder: Folder) -> None:
    from softplus_attention.physics.laws.regression import law_settings, regress, true_control

    experiment = folder.experiment
    settings = json.loads(json.dumps(law_settings(experiment)))

    def done(file: Path) -> bool:
        return file.is_file() and read_json(file)["settings"] == settings

    found = [cell for cell in folder.all_cells() if (cell.folder / "force.npz").is_file()]
    if not found:
        fail("--output", "a folder with forces of the stage `tune`", folder.path)
    for number, cell in enumerate(found, 1):
        truth = folder.path / "controls" / f"seed{cell.seed}.json"
        if not done(truth):
            arrays = read_arrays(cell.folder / "force.npz")
            write_json(truth, true_control(arrays, experiment, cell.labels, cell.seed))
        file = cell.folder / "laws.json"
        if done(file):
            continue
        begun = time.perf_counter()
        laws = regress(read_arrays(cell.folder / "force.npz"), experiment, cell.labels, cell.seed)
        laws["seconds"] = time.perf_counter() - begun
        write_json(file, laws)
        print(f"laws {number}/{len(found)} {cell.title}: {laws['seconds']:.0f} s", flush=True)


def figures_stage(folder: Folder) -> None:
    from softplus_attention.physics.figures import draw_all

    for path in draw_all(folder):
        print(f"figure {path}", flush=True)
