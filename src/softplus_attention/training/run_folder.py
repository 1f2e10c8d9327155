"""The folder of a training run: its lock, its record, where it resumes, and the saved model.

run.json        settings, data, and command, commit and machine of each start
metrics.jsonl   a line per log
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
NOTES = ("*.log", "*.yaml", "*.yml")  # what a user may have put there for a run that begins
# These cannot change in a run. The place in the data is counted in sequences of one length and number, the saved state
# is the optimizer's own, and weights of one shape load with any number of heads, but mean nothing with another.
FIXED = ("batch_size", "sequence_length", "optimizer", "heads")
SHAPE = ("layers", "width", "vocab_size", "bias")  # of the weights
ALLOW = ", or give --allow-config-changes to continue with the new ones"


class RunFolder:
    def __init__(self, path: Path, model: Path | None = None) -> None:
        """``model``: where the trained model is saved (default: in the folder)."""
        self.path, self.model = path, path / MODEL if model is None else model

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Two runs in one folder would overwrite each other. The lock ends with the process, however it ends."""
        with ExitStack() as held:

            def take() -> None:
                try:
                    self.path.mkdir(parents=True, exist_ok=True)
                    held.enter_context(lock(self.path / LOCK))
                except LockedError:
                    wait = "wait for it, or choose another --output"
                    raise RunStopped(f"another process is training in {self.path}: {wait}") from None
                except OSError as error:
                    reason = (error.strerror or str(error)).lower()
                    raise ValueError(f"{self.path} cannot be written: {reason}. Choose another --output") from None

            distributed.broadcast_from_rank0(take)
            try:
                yield
            except RunStopped:
                raise
            except Exception as error:
                # safetensors and torch have errors of their own for it.
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
                raise ValueError("it holds no config and data")
            for name, kind in kinds.items():
                if not isinstance(record.get(name, kind()), kind):
                    raise ValueError(f"its {name} is of type {type(record[name]).__name__}")
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise RunStopped(
                f"{path} is damaged, or no record of a run ({error}): restore it from a copy, or choose another "
                "--output. Nothing was changed"
            ) from None
        return record

    def write(self, record: dict[str, Any]) -> None:
        if distributed.is_rank0():
            write_json(self.path / RUN, record)

    def load_record(self, config: TrainConfig, data: str, allow_changes: bool) -> dict[str, Any]:
        """The record of the run, new or found. Raises where the folder holds a run with other settings."""
        return distributed.broadcast_from_rank0(lambda: self.compare(config, data, allow_changes))

    def compare(self, config: TrainConfig, data: str, allow_changes: bool) -> dict[str, Any]:
        now: dict[str, Any] = {"config": config.as_dict(), "data": data}
        before = self.read()
        if before is None:
            self.refuse_what_others_made()
            return now
        if not checkpoints.checkpoints(self.path) and not self.model.exists():
            return before | now  # nothing was saved: it begins, with whatever settings
        changed = config.changes(before["config"])
        if before["data"] != data:
            changed["data"] = f"the data in {config.data} is not what the run was started with"
        if changed and not allow_changes:
            can_go_on = not set(changed) & {*FIXED, *SHAPE}
            raise ConfigChanged(
                f"{self.path} holds a run with other settings: {'; '.join(changed.values())}. Put them back to "
                f"continue it, or choose another --output for a new run{ALLOW if can_go_on else ''}. "
                "Nothing was changed"
            )
        fixed = [changed[name] for name in FIXED if name in changed]
        if fixed:
            raise RunStopped(
                f"{self.path} cannot go on with these changes: {'; '.join(fixed)}. Its weights, its optimizer's state "
                "and its place in the data are those of its own settings. Choose another --output. Nothing was changed"
            )
        if changed:
            say(f"continuing with changes: {'; '.join(changed.values())}")
            now["changes"] = [*before.get("changes", []), [*changed.values()]]
            before.pop("finished", None)
        return before | now

    def refuse_what_others_made(self) -> None:
        """Raises where a folder without run.json is that of something else, or holds what this run would overwrite."""
        found = "checkpoints" if checkpoints.checkpoints(self.path) else METRICS
        if found == "checkpoints" or (self.path / METRICS).exists():
            raise RunStopped(
                f"{self.path} contains {found} but no {RUN}; refusing to overwrite. Choose another --output. "
                "Nothing was changed"
            )
        check_no_strangers("--output", self.path, NOTES)

    # ---- continuing

    def newest_checkpoint(self) -> Path | None:
        return distributed.broadcast_from_rank0(lambda: checkpoints.newest_whole(self.path, warn))

    def check(self, checkpoint: Path | None, model: nn.Module) -> None:
        """Raises where the run cannot continue from ``checkpoint``; nothing in the folder has been changed yet."""
        if checkpoint is not None:
            checkpoints.check_fits(checkpoint, model)
        elif self.model.is_dir():
            raise RunStopped(
                f"{self.path} holds a trained model and no whole checkpoint to continue from: a new run would replace "
                "it. Choose another --output. Nothing was changed"
            )

    def rewind(self, checkpoint: Path | None) -> None:
        """Drops log entries after the checkpoint: they will be logged again."""
        if distributed.is_rank0():
            if checkpoint is None:
                checkpoints.keep_beside_damaged(self.path, METRICS)
            keep_until(self.path, 0 if checkpoint is None else checkpoints.checkpoint_step(checkpoint))

    # ---- the end

    def save(self, write: Callable[[Path], None]) -> Path:
        """``write`` fills a folder, which then becomes ``model``: whole or not there."""
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
        """For a run whose model is saved and that will not be continued."""
        if distributed.is_rank0():
            for checkpoint in checkpoints.checkpoints(self.path):
                remove_folder(checkpoint)


def started(device: torch.device, step: int) -> dict[str, Any]:
    """The record of one start; an interrupted run has several."""
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
