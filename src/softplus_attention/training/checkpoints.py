"""Checkpoints that are complete or absent, verified when they are read, and loadable by another number of processes.

    checkpoint-200/
      state/              model and optimizer, by torch.distributed.checkpoint: a file per process, any number may load
      trainer_state.json  step, logged values
      position.json       where in the data, and losses not logged yet
      scheduler.pt, rng_state*.pth
      manifest.json       size and SHA-256 of every file above; written last

A checkpoint is written as ``checkpoint-200.partial``, flushed to the disk and renamed.
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
WEIGHT = "model."  # before the names of the weights in it
PARTIAL = ".partial"
DAMAGED = ".damaged"
WRITER = re.compile(r"(?:__|rng_state_)(\d+)")
NAME = re.compile(r"checkpoint-(\d+)")
UNFINISHED = re.compile(r"checkpoint-\d+(\.old)?" + re.escape(PARTIAL))
# What a checkpoint cannot do without.
PARTS = (f"{STATE}/{METADATA}", f"{STATE}/__*.distcp", TRAINER_STATE, SCHEDULER, POSITION, "rng_state*.pth")


def checkpoints(run: Path) -> list[Path]:
    """The checkpoints of a run, the newest first."""
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
    """``fill`` writes its files into a folder, on every process; the folder then becomes ``checkpoint-<step>``.

    If one process fails, none goes on, the half-written folder is removed, and what was there before stays.
    """
    final = run / f"checkpoint-{step}"
    partial = final.with_name(final.name + PARTIAL)
    distributed.broadcast_from_rank0(lambda: cleared(partial, final, step))
    together(run, partial, step, lambda: fill(partial))
    sums = together(run, partial, step, lambda: sums_of_share(partial))
    together(run, partial, step, lambda: publish(partial, final, sums) if distributed.is_rank0() else None)
    if distributed.is_rank0():
        for old in checkpoints(run)[keep:]:
            # Renamed first: a folder that is half deleted must not look like a checkpoint that went bad.
            doomed = old.with_name(old.name + ".old" + PARTIAL)
            remove_folder(doomed)
            old.replace(doomed)
            remove_folder(doomed)
    return final


def cleared(partial: Path, final: Path, step: int) -> None:
    try:
        remove_folder(partial)
        partial.mkdir(parents=True)
    except OSError as error:
        raise stopped(final.parent, step, describe_error(error)) from None


def together(run: Path, partial: Path, step: int, part: Callable[[], Any]) -> list[Any]:
    """Runs ``part`` on every process and returns all results; if one fails, all stop."""
    made: Any = None
    failure: BaseException | None = None
    try:
        made = part()
    except (Exception, CheckpointException) as error:
        failure = error
    results = distributed.all_gather_objects((made, failure and describe_error(failure)))
    failures = [reason for _, reason in results if reason]
    if not failures:
        return [result for result, _ in results]
    if distributed.is_rank0():
        remove_folder(partial)
    raise stopped(run, step, failures[0]) from failure


def describe_error(error: BaseException) -> str:
    if is_disk_full(error):
        return "there is no room left on the disk (or a file-size limit is reached)"
    return f"{type(error).__name__}: {error}".strip().splitlines()[0]


def stopped(run: Path, step: int, reason: str) -> RunStopped:
    before = checkpoints(run)
    intact = (
        f"the checkpoint of step {checkpoint_step(before[0])} is intact"
        if before
        else "no checkpoint was written before"
    )
    return RunStopped(
        f"the checkpoint of step {step} could not be written to {run}: {reason}. Make room there and run the same "
        f"command again: it continues where it can ({intact})"
    )


def sums_of_share(partial: Path) -> dict[str, Any]:
    """Size and SHA-256 of the files that this process wrote, once they are on the disk.

    By the numbers in their names, not by a common list: another machine may not see the newest files yet.
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


def newest_whole(run: Path, warn: Callable[[str], None]) -> Path | None:
    """The newest undamaged checkpoint; a warning names each newer one that is damaged."""
    for leftover in run.glob(f"checkpoint-*{PARTIAL}"):
        if UNFINISHED.fullmatch(leftover.name):
            remove_folder(leftover)
    found = checkpoints(run)
    for checkpoint in found:
        wrong = damage(checkpoint)
        if wrong is None:
            return checkpoint
        aside = checkpoint.with_name(checkpoint.name + DAMAGED)
        remove_folder(aside)
        checkpoint.replace(aside)
        warn(f"{checkpoint} is damaged ({wrong}): it is now {aside.name}")
    if found:
        warn(f"no checkpoint in {run} is whole: the run starts again at step 0")
    return None


def keep_beside_damaged(run: Path, name: str) -> None:
    """Keeps a file that a run without an undamaged checkpoint would overwrite."""
    if (run / name).exists() and any(run.glob(f"*{DAMAGED}")):
        (run / name).replace(run / (name + DAMAGED))


def damage(checkpoint: Path) -> str | None:
    """What is wrong with a checkpoint, or None. Its manifest must list exactly the files that are there."""
    try:
        files = read_json(checkpoint / MANIFEST)["files"]
        there = {path.relative_to(checkpoint).as_posix() for path in checkpoint.rglob("*") if is_no_folder(path)}
        for part in PARTS:
            if not fnmatch.filter(files, part):
                return f"{MANIFEST} does not list {part}"
        for name, written in files.items():
            path = checkpoint / name
            if name not in there:
                return f"{name} is missing"
            if not stat.S_ISREG(path.lstat().st_mode):
                return f"{name} is not a regular file"
            if path.stat().st_size != written["bytes"]:
                return f"{name} has {path.stat().st_size} bytes of {written['bytes']}"
            if sha256(path) != written["sha256"]:
                return f"{name} is not what was written"
        others = sorted(there - {*files, MANIFEST})
        if others:
            return f"{others[0]} is not listed in {MANIFEST}"
    except FileNotFoundError:
        return f"{MANIFEST} is missing"
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        return f"{MANIFEST} cannot be read: {error}"
    return None


def is_no_folder(path: Path) -> bool:
    return path.is_symlink() or not path.is_dir()


# ---- model and optimizer


def named_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Every tensor by a name that is the same for any number of processes; tied weights once."""
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
        raise refused(checkpoint, str(error)) from error


def refused(checkpoint: Path, reason: str) -> CheckpointRefused:
    return CheckpointRefused(
        f"{checkpoint} is not a checkpoint that training wrote: {reason}. Remove it to continue from the one before, "
        "or choose another --output"
    )


@contextmanager
def refusing(checkpoint: Path, name: str) -> Iterator[None]:
    """Turns any error from a file that training did not write into ``CheckpointRefused``."""
    try:
        yield
    except Exception as error:
        raise refused(checkpoint, f"{name}: {describe_error(error)}") from error


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
    """Where in the data, and losses not logged yet."""
    with refusing(checkpoint, POSITION):
        found = read_json(checkpoint / POSITION)
        losses, last = found["pending_losses"], found["last_logged_step"]
        if not losses or not all(isinstance(loss, int | float) for loss in losses) or type(last) is not int:
            raise ValueError("pending_losses or last_logged_step is no number")
        return found


def check_fits(folder: Path, model: nn.Module) -> None:
    """Raises where the saved weights do not fit ``model``; nothing of the run has been changed yet."""
    with refusing(folder, TRAINER_STATE):
        check_trainer_state(read_json(folder / TRAINER_STATE), checkpoint_step(folder))
    position(folder)
    sizes = state_reader(folder).sizes
    saved = {name: tuple(size) for name, size in sizes.items() if name.startswith(WEIGHT)}
    own = {name: tuple(value.shape) for name, value in weights_by_name(model).items()}
    differing = sorted(name for name in saved.keys() | own.keys() if saved.get(name) != own.get(name))
    if differing:
        first = differing[0]
        raise RunStopped(
            f"the weights in {folder} are not those of a model with these settings: {len(differing)} differ, such as "
            f"{first.removeprefix(WEIGHT)}, {saved.get(first, 'missing')} there and {own.get(first, 'missing')} now. "
            "Put the settings back to continue the run, or choose another --output. Nothing was changed"
        )
    # Of a parameter the optimizer keeps numbers and tensors of its shape.
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    for name in sizes.keys() - saved.keys():
        prefix, _, place = name.partition(".")
        parameter = place.rpartition(".")[0]
        if prefix != "optimizer" or tuple(sizes[name]) not in ((), shapes.get(parameter)):
            raise refused(folder, f"{name} of shape {tuple(sizes[name])} is no state of the optimizer")


@contextmanager
def suppress_single_process_warning() -> Iterator[None]:
    """torch warns at every checkpoint of a single process."""
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
        raise refused(folder, describe_error(cause)) from error
    # Its own load_state_dict puts each value on the right device.
    optimizer.load_state_dict(optimizer.state_dict())
