"""run.json: what a run was asked for and what it ran on, so that it can be told from another and done again."""

from __future__ import annotations

import datetime
import json
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from softplus_attention.training.errors import RunStopped
from softplus_attention.utils import provenance
from softplus_attention.utils.files import write_json

RUN = "run.json"


def start(device: torch.device, processes: int, step: int) -> dict[str, Any]:
    """One start of the command: a run that was interrupted has several."""
    return {
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "from_step": step,
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "commit": provenance.commit(),
        "versions": provenance.versions(),
        "machine": {**provenance.machine(device), "processes": processes},
    }


def read(run: Path) -> dict[str, Any] | None:
    try:
        record = json.loads((run / RUN).read_text(encoding="utf-8"))
        if not {"config", "data"} <= record.keys():
            raise ValueError("it holds no config and data")
    except FileNotFoundError:
        return None
    except (AttributeError, ValueError) as error:
        raise RunStopped(
            f"{run / RUN} is damaged, or no record of a run ({error}): restore it from a copy, or choose another "
            "--output. Nothing was changed"
        ) from None
    return record


def write(run: Path, record: Mapping[str, Any]) -> None:
    write_json(run / RUN, record)
