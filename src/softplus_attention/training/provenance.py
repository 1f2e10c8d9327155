"""run.json: what a run was asked for and what it ran on, so that it can be told from another and done again."""

from __future__ import annotations

import datetime
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from softplus_attention import __version__
from softplus_attention.training.errors import RunStopped

RUN = "run.json"
PACKAGES = ("torch", "triton", "transformers", "accelerate", "tokenizers", "numpy", "safetensors")


def commit() -> str:
    """The commit that the package runs from, marked where files are changed; "unknown" outside a repository."""
    command = ("git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")
    try:
        result = subprocess.run(
            command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True, timeout=20
        )
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return result.stdout.strip() or "unknown"


def versions() -> dict[str, str]:
    found = {"softplus-attention": __version__, "python": platform.python_version(), "cuda": str(torch.version.cuda)}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def machine(device: torch.device, processes: int) -> dict[str, Any]:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    return {"device": name, "processes": processes, "system": f"{platform.system()} {platform.machine()}"}


def start(device: torch.device, processes: int, step: int) -> dict[str, Any]:
    """One start of the command: a run that was interrupted has several."""
    return {
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "from_step": step,
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "commit": commit(),
        "versions": versions(),
        "machine": machine(device, processes),
    }


def read(run: Path) -> dict[str, Any] | None:
    try:
        return json.loads((run / RUN).read_text())
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise RunStopped(
            f"{run / RUN} is damaged ({error}): restore it, or delete it to continue from the checkpoints beside it "
            "without a comparison of settings"
        ) from None


def write(run: Path, record: Mapping[str, Any]) -> None:
    write_whole(run / RUN, json.dumps(record, indent=1) + "\n")


def write_whole(path: Path, text: str) -> None:
    """A file that is the old or the new one, whatever happens in between."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
