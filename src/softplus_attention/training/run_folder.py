"""The folder of a training run: lock, record, checkpoint to resume from, saved model.

run.json        settings, data checksum, and command, commit and machine of each start
metrics.jsonl   a line per log entry
checkpoint-N/   see checkpoints.py
model/          for ``from_pretrained``
"""

from __future__ import annotations

import datetime
import shlex
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from softplus_attention.training import checkpoints, distributed
from softplus_attention.training.errors import ConfigChanged, RunStopped, RunWarning
from softplus_attention.training.metrics import METRICS, keep_until
from softplus_attention.utils import provenance
from softplus_attention.utils.files import (
    LockedError,
    check_no_strangers,
    clean_text,
    flush,
    is_disk_full,
    lock,
    remove_folder,
    write_json,
)
from softplus_attention.utils.untrusted import read_json

if TYPE_CHECKING:
    from softplus_attention.training.config import TrainConfig

RUN = "run.json"
MODEL = "model"
LOCK = ".lock"
NOTES = ("*.log", "*.yaml", "*.yml")  # files that a user may have put into the folder of a new run
# These cannot change in a run. The position in the data depends on batch size and sequence length, the saved state on
# the optimizer. Weights load with any number of heads of the same total width, but only one number is right.
FIXED = ("batch_size", "sequence_length", "optimizer", "heads")
SHAPE = ("layers", "width", "vocab_size", "bias")  # determine the shape of the weights
ALLOW = ", or pass --allow-config-changes to continue with the new ones"


class RunFolder:
    def __init__(self, path: Path, model: Path | None = None) -> None:
        """``model`` is the folder of the saved model (default: ``model`` in the run folder)."""
        self.path, self.model = path, path / MODEL if model is None else model

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Locks the folder against a second run. The system releases the lock when the process ends."""
        with ExitStack() as held:

            def acquire() -> None:
                try:
                    self.path.mkdir(parents=True, exist_ok=True)
                    held.enter_context(lock(self.path / LOCK))
                except LockedError:
                    wait = "wait for it, or choose another --output"
                    raise RunStopped(f"another process is training in {self.path}: {wait}") from None
                except OSError as error:
                    reason = (error.strerror or str(error)).lower()
                    raise ValueError(f"{self.path} cannot be written: {reason}. Choose another --output") from None

            distributed.broadcast_from_rank0(acquire)
            try:
                yield
            except RunStopped:
                raise
            except Exception as error:
                # safetensors and torch raise their own errors for a full disk.
                if not is_disk_full(error):
                    raise
                raise RunStopped(
                    f"there is no room left on the disk to write to {self.path}. Make room there and run the same "
                    "command again: it continues from the last checkpoint"
                ) from error

    # ---- the record

    def read(self) -> dict[str, Any] | None:
        """The content of run.json; None in a folder without one."""
        path = self.path / RUN
        kinds: dict[str, Any] = {"config": dict, "data": str, "starts": list, "changes": list}
        try:
            record = read_json(path)
            if not isinstance(record, dict) or not {"config", "data"} <= record.keys():
                raise ValueError("config or data is missing")
            for name, kind in kinds.items():
                if not isinstance(record.get(name, kind()), kind):
                    raise ValueError(f"{name} is of type {type(record[name]).__name__}")
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise RunStopped(
                f"{path} is damaged or not the record of a run ({error}): restore it from a copy, or choose another "
                "--output. Nothing was changed"
            ) from None
        return record

    def write(self, record: dict[str, Any]) -> None:
        if distributed.is_rank0():
            write_json(self.path / RUN, record)

    def load_record(self, config: TrainConfig, data: str, allow_changes: bool) -> dict[str, Any]:
        """The existing or a new record. Raises if the folder contains a run with other settings."""
        return distributed.broadcast_from_rank0(lambda: self.compare(config, data, allow_changes))

    def compare(self, config: TrainConfig, data: str, allow_changes: bool) -> dict[str, Any]:
        now: dict[str, Any] = {"config": config.as_dict(), "data": data}
        before = self.read()
        if before is None:
            self.check_unused()
            return now
        if not checkpoints.checkpoints(self.path) and not self.model.exists():
            return before | now  # nothing was saved yet, so the settings may change
        changed = config.changes(before["config"])
        if before["data"] != data:
            changed["data"] = f"the data in {config.data} has changed since the run was started"
        if changed and not allow_changes:
            can_continue = not set(changed) & {*FIXED, *SHAPE}
            raise ConfigChanged(
                f"{self.path} contains a run with other settings: {'; '.join(changed.values())}. Restore them to "
                f"continue it, or choose another --output for a new run{ALLOW if can_continue else ''}. "
                "Nothing was changed"
            )
        fixed = [changed[name] for name in FIXED if name in changed]
        if fixed:
            raise RunStopped(
                f"{self.path} cannot continue with these changes: {'; '.join(fixed)}. Its weights, optimizer state and "
                "position in the data would be invalid. Choose another --output. Nothing was changed"
            )
        if changed:
            say(f"continuing with changes: {'; '.join(changed.values())}")
            now["changes"] = [*before.get("changes", []), [*changed.values()]]
            before.pop("finished", None)
        return before | now

    def check_unused(self) -> None:
        """Raises if a folder without run.json has unrelated files, or files that this run would overwrite."""
        found = "checkpoints" if checkpoints.checkpoints(self.path) else METRICS
        if found == "checkpoints" or (self.path / METRICS).exists():
            raise RunStopped(
                f"{self.path} contains {found} but no {RUN}; refusing to overwrite. Choose another --output. "
                "Nothing was changed"
            )
        check_no_strangers("--output", self.path, NOTES)

    # ---- continuing

    def newest_checkpoint(self) -> Path | None:
        return distributed.broadcast_from_rank0(lambda: checkpoints.newest_intact(self.path, warn))

    def check(self, checkpoint: Path | None, model: nn.Module) -> None:
        """Raises if the run cannot continue from ``checkpoint``, before anything in the folder is changed."""
        if checkpoint is not None:
            checkpoints.check_fits(checkpoint, model)
        elif self.model.is_dir():
            raise RunStopped(
                f"{self.path} contains a trained model and no intact checkpoint to continue from: a new run would "
                "replace the model. Choose another --output. Nothing was changed"
            )

    def rewind(self, checkpoint: Path | None) -> None:
        """Removes log entries after the checkpoint, which will be logged again."""
        if distributed.is_rank0():
            if checkpoint is None:
                checkpoints.archive_if_damaged(self.path, METRICS)
            keep_until(self.path, 0 if checkpoint is None else checkpoints.checkpoint_step(checkpoint))

    # ---- the end

    def save(self, write: Callable[[Path], None]) -> Path:
        """Calls ``write`` with a folder, which then becomes ``model`` atomically."""
        partial = self.path / (MODEL + checkpoints.PARTIAL)
        remove_folder(partial)
        write(partial)
        for path in (*checkpoints.files_in(partial), partial):
            flush(path)
        remove_folder(self.model)
        partial.replace(self.model)
        flush(self.model.parent)
        return self.model

    def remove_checkpoints(self) -> None:
        """For a finished run that will not be continued."""
        if distributed.is_rank0():
            for checkpoint in checkpoints.checkpoints(self.path):
                remove_folder(checkpoint)


def started(device: torch.device, step: int) -> dict[str, Any]:
    """The record of a start; a resumed run has several."""
    return {
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "from_step": step,
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "commit": provenance.commit(),
        "versions": provenance.versions(),
        "machine": {**provenance.machine(device), "processes": distributed.world_size()},
    }


def say(line: str) -> None:
    if distributed.is_rank0():
        print(clean_text(line), file=sys.stderr, flush=True)


def warn(line: str) -> None:
    warnings.warn(line, RunWarning, stacklevel=2)
