"""Atomic checkpoints, verified when they are read and loadable by any number of processes.

    checkpoint-200/
      state/              model and optimizer, by torch.distributed.checkpoint: one file per process
      trainer_state.json  step, logged values
      position.json       position in the data, and losses not logged yet
      scheduler.pt, rng_state*.pth
      manifest.json       size and SHA-256 of every file above; written last

A checkpoint is written as ``checkpoint-200.partial``, fsynced and renamed.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import re
import stat
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from transformers import TrainerState

from softplus_attention.training import distributed
from softplus_attention.training.checkpoint_metadata import METADATA, StateReader
from softplus_attention.training.errors import CheckpointRefused, RunStopped
from softplus_attention.utils.files import flush, is_disk_full, remove_folder, write_json
from softplus_attention.utils.untrusted import read_json, sha256

MANIFEST = "manifest.json"
STATE = "state"
TRAINER_STATE = "trainer_state.json"
SCHEDULER = "scheduler.pt"
POSITION = "position.json"
WEIGHT = "model."  # prefix of the names of weights
PARTIAL = ".partial"
DAMAGED = ".damaged"
WRITER = re.compile(r"(?:__|rng_state_)(\d+)")
NAME = re.compile(r"checkpoint-(\d+)")
UNFINISHED = re.compile(r"checkpoint-\d+(\.old)?" + re.escape(PARTIAL))
# The files that a checkpoint must have.
PARTS = (f"{STATE}/{METADATA}", f"{STATE}/__*.distcp", TRAINER_STATE, SCHEDULER, POSITION, "rng_state*.pth")


def checkpoints(run: Path) -> list[Path]:
    """The checkpoints of a run, newest first."""
    found = [(int(match[1]), path) for path in run.glob("checkpoint-*") if (match := NAME.fullmatch(path.name))]
    return [path for _, path in sorted(found, reverse=True)]


def checkpoint_step(checkpoint: Path) -> int:
    match = NAME.fullmatch(checkpoint.name)
    assert match is not None
    return int(match[1])


def files_in(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST)


# ---- writing


def write(run: Path, step: int, keep: int, fill: Callable[[Path], None]) -> Path:
    """Calls ``fill`` with a folder on every process; the folder then becomes ``checkpoint-<step>``.

    If one process fails, all stop, and the partial folder is removed. Earlier checkpoints are not touched.
    """
    final = run / f"checkpoint-{step}"
    partial = final.with_name(final.name + PARTIAL)
    distributed.broadcast_from_rank0(lambda: create_empty(partial, final, step))
    run_on_all(run, partial, step, lambda: fill(partial))
    sums = run_on_all(run, partial, step, lambda: checksums(partial))
    run_on_all(run, partial, step, lambda: publish(partial, final, sums) if distributed.is_rank0() else None)
    if distributed.is_rank0():
        for old in checkpoints(run)[keep:]:
            # Renamed first, so that a partly deleted folder does not look like a damaged checkpoint.
            expired = old.with_name(old.name + ".old" + PARTIAL)
            remove_folder(expired)
            old.replace(expired)
            remove_folder(expired)
    return final


def create_empty(partial: Path, final: Path, step: int) -> None:
    try:
        remove_folder(partial)
        partial.mkdir(parents=True)
    except OSError as error:
        raise write_failed(final.parent, step, describe_error(error)) from None


def run_on_all(run: Path, partial: Path, step: int, part: Callable[[], Any]) -> list[Any]:
    """Runs ``part`` on every process and returns all results; if one fails, all stop."""
    result: Any = None
    failure: BaseException | None = None
    try:
        result = part()
    except (Exception, CheckpointException) as error:
        failure = error
    results = distributed.all_gather_objects((result, failure and describe_error(failure)))
    failures = [reason for _, reason in results if reason]
    if not failures:
        return [result for result, _ in results]
    if distributed.is_rank0():
        remove_folder(partial)
    raise write_failed(run, step, failures[0]) from failure


def describe_error(error: BaseException) -> str:
    if is_disk_full(error):
        return "there is no room left on the disk (or a file-size limit is reached)"
    return f"{type(error).__name__}: {error}".strip().splitlines()[0]


def write_failed(run: Path, step: int, reason: str) -> RunStopped:
    before = checkpoints(run)
    intact = (
        f"the checkpoint of step {checkpoint_step(before[0])} is intact" if before else "there is no earlier checkpoint"
    )
    return RunStopped(
        f"the checkpoint of step {step} could not be written to {run}: {reason}. Fix this and run the same "
        f"command again to continue ({intact})"
    )


def checksums(partial: Path) -> dict[str, Any]:
    """Size and SHA-256 of the files written by this process, after fsync.

    Each process selects its files by the rank in their names: other machines may not see the newest files yet.
    """
    sums = {}
    for path in files_in(partial):
        writer = WRITER.match(path.name)
        if int(writer[1] if writer else 0) != distributed.rank():
            continue
        flush(path)
        sums[str(path.relative_to(partial))] = {"bytes": path.stat().st_size, "sha256": sha256(path)}
    return sums


def publish(partial: Path, final: Path, sums: list[dict[str, Any]]) -> None:
    """Writes the manifest and renames the folder."""
    files = {name: written for share in sums for name, written in share.items()}
    manifest = partial / MANIFEST
    write_json(manifest, {"files": dict(sorted(files.items()))})
    for folder in {path.parent for path in files_in(partial)} | {partial}:
        flush(folder)
    remove_folder(final)
    partial.replace(final)
    flush(final.parent)


# ---- reading


def newest_intact(run: Path, warn: Callable[[str], None]) -> Path | None:
    """The newest undamaged checkpoint; a warning names each newer one that is damaged."""
    for leftover in run.glob(f"checkpoint-*{PARTIAL}"):
        if UNFINISHED.fullmatch(leftover.name):
            remove_folder(leftover)
    found = checkpoints(run)
    for checkpoint in found:
        problem = damage(checkpoint)
        if problem is None:
            return checkpoint
        aside = checkpoint.with_name(checkpoint.name + DAMAGED)
        remove_folder(aside)
        checkpoint.replace(aside)
        warn(f"{checkpoint} is damaged ({problem}): renamed to {aside.name}")
    if found:
        warn(f"no intact checkpoint in {run}: the run starts again at step 0")
    return None


def archive_if_damaged(run: Path, name: str) -> None:
    """Renames a file to .damaged that a restart without an intact checkpoint would overwrite."""
    if (run / name).exists() and any(run.glob(f"*{DAMAGED}")):
        (run / name).replace(run / (name + DAMAGED))


def damage(checkpoint: Path) -> str | None:
    """What is wrong with a checkpoint, or None. The manifest must list exactly the existing files."""
    try:
        files = read_json(checkpoint / MANIFEST)["files"]
        present = {path.relative_to(checkpoint).as_posix() for path in checkpoint.rglob("*") if is_file_or_link(path)}
        for part in PARTS:
            if not fnmatch.filter(files, part):
                return f"{MANIFEST} does not list {part}"
        for name, written in files.items():
            path = checkpoint / name
            if name not in present:
                return f"{name} is missing"
            if not stat.S_ISREG(path.lstat().st_mode):
                return f"{name} is not a regular file"
            if path.stat().st_size != written["bytes"]:
                return f"{name} has {path.stat().st_size} bytes of {written['bytes']}"
            if sha256(path) != written["sha256"]:
                return f"{name} has changed since it was written"
        others = sorted(present - {*files, MANIFEST})
        if others:
            return f"{others[0]} is not listed in {MANIFEST}"
    except FileNotFoundError:
        return f"{MANIFEST} is missing"
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        return f"{MANIFEST} cannot be read: {error}"
    return None


def is_file_or_link(path: Path) -> bool:
    return path.is_symlink() or not path.is_dir()


# ---- model and optimizer


def named_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Every tensor by a name that does not depend on the number of processes; tied weights once."""
    tensors = weights_by_name(model)
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            tensors[f"optimizer.{name}.{key}"] = value
    return tensors


def weights_by_name(model: nn.Module) -> dict[str, Tensor]:
    saved = model.state_dict().keys()
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in saved}
    return {f"{WEIGHT}{name}": value.detach() for name, value in (dict(model.named_parameters()) | buffers).items()}


def state_reader(checkpoint: Path) -> StateReader:
    try:
        return StateReader(checkpoint / STATE)
    except (ValueError, OSError) as error:
        raise invalid_checkpoint(checkpoint, str(error)) from error


def invalid_checkpoint(checkpoint: Path, reason: str) -> CheckpointRefused:
    return CheckpointRefused(
        f"{checkpoint} was not written by training: {reason}. Remove it to continue from the previous one, "
        "or choose another --output"
    )


@contextmanager
def reject_on_error(checkpoint: Path, name: str) -> Iterator[None]:
    """Turns any error while reading the file ``name`` into ``CheckpointRefused``."""
    try:
        yield
    except Exception as error:
        raise invalid_checkpoint(checkpoint, f"{name}: {describe_error(error)}") from error


def check_trainer_state(found: Any, step: int) -> None:
    known = dataclasses.asdict(TrainerState())
    for name, value in found.items():
        expected = known[name]
        kinds: Any = (list, dict) if isinstance(expected, list | dict) else (int, float, str, type(None))
        if isinstance(expected, int | float):
            kinds = (int, float, type(None))
        if not isinstance(value, kinds):
            raise ValueError(f"{name} is of type {type(value).__name__}")
    if found["global_step"] != step:
        raise ValueError(f"global_step is {found['global_step']}")


def position(checkpoint: Path) -> dict[str, Any]:
    """The position in the data, and losses not logged yet."""
    with reject_on_error(checkpoint, POSITION):
        found = read_json(checkpoint / POSITION)
        losses, last = found["pending_losses"], found["last_logged_step"]
        if not losses or not all(isinstance(loss, int | float) for loss in losses) or type(last) is not int:
            raise ValueError("pending_losses or last_logged_step is not a number")
        return found


def check_fits(folder: Path, model: nn.Module) -> None:
    """Raises if the saved weights do not match ``model``, before anything in the run is changed."""
    with reject_on_error(folder, TRAINER_STATE):
        check_trainer_state(read_json(folder / TRAINER_STATE), checkpoint_step(folder))
    position(folder)
    sizes = state_reader(folder).sizes
    saved = {name: tuple(size) for name, size in sizes.items() if name.startswith(WEIGHT)}
    own = {name: tuple(value.shape) for name, value in weights_by_name(model).items()}
    differing = sorted(name for name in saved.keys() | own.keys() if saved.get(name) != own.get(name))
    if differing:
        first = differing[0]
        raise RunStopped(
            f"the weights in {folder} do not match a model with these settings: {len(differing)} differ, such as "
            f"{first.removeprefix(WEIGHT)}, {saved.get(first, 'missing')} there and {own.get(first, 'missing')} now. "
            "Restore the settings to continue the run, or choose another --output. Nothing was changed"
        )
    # The optimizer state of a parameter is scalars and tensors of its shape.
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    for name in sizes.keys() - saved.keys():
        prefix, _, place = name.partition(".")
        parameter = place.rpartition(".")[0]
        if prefix != "optimizer" or tuple(sizes[name]) not in ((), shapes.get(parameter)):
            raise invalid_checkpoint(folder, f"{name} of shape {tuple(sizes[name])} is not optimizer state")


@contextmanager
def suppress_single_process_warning() -> Iterator[None]:
    """torch warns about a single process at every checkpoint."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def save_state(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    with suppress_single_process_warning():
        save(
            named_state(model, optimizer),
            storage_writer=FileSystemWriter(folder / STATE),
            no_dist=not dist.is_initialized(),
        )


def load_state(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Loads the saved tensors into the model and the optimizer, which may be sharded differently."""
    reader = state_reader(folder)
    tensors = weights_by_name(model)
    for parameter_name, parameter in model.named_parameters():
        state: dict[str, Tensor] = {}
        prefix = f"optimizer.{parameter_name}."
        for name, size in reader.sizes.items():
            if not name.startswith(prefix):
                continue
            place = torch.zeros_like(parameter) if size == parameter.shape else torch.zeros(size)
            tensors[name] = state[name.removeprefix(prefix)] = place.detach()
        optimizer.state[parameter] = state
    try:
        with suppress_single_process_warning():
            load(tensors, storage_reader=reader, no_dist=not dist.is_initialized())
    except CheckpointException as error:
        cause, _ = next(iter(error.failures.values()))
        raise invalid_checkpoint(folder, describe_error(cause)) from error
    # load_state_dict moves each value to the right device.
    optimizer.load_state_dict(optimizer.state_dict())
