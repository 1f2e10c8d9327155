"""Commit, versions and machine, recorded in every result file."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from softplus_attention import __version__

UNKNOWN = "unknown"
PACKAGES = ("torch", "triton", "transformers", "accelerate", "tokenizers", "numpy", "safetensors")


def commit() -> str:
    """The commit of the package's own repository, with "-dirty" if files are modified; "unknown" outside of it."""
    # An installed package may lie inside the repository of another project.
    is_ours = ("git", "ls-files", "--error-unmatch", Path(__file__).name)
    describe = ("git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")
    try:
        for command in (is_ours, describe):
            result = subprocess.run(
                command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True, timeout=20
            )
    except (OSError, subprocess.SubprocessError):
        return UNKNOWN
    return result.stdout.strip() or UNKNOWN


def command(script: str) -> str:
    """The command line of ``script``, a path in the repository. Absolute paths are reduced to the file name."""
    arguments = (Path(word).name if Path(word).is_absolute() else word for word in sys.argv[1:])
    return shlex.join(["python", script, *arguments])


def versions(packages: Iterable[str] = PACKAGES) -> dict[str, str]:
    found = {"softplus-attention": __version__, "python": platform.python_version(), "cuda": str(torch.version.cuda)}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def processor() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def machine(device: torch.device | None = None) -> dict[str, Any]:
    """The processor, and the GPU if ``device`` is one; without ``device`` the current GPU if there is one."""
    found: dict[str, Any] = {"cpu": processor(), "cores": os.cpu_count()}
    found["system"] = f"{platform.system()} {platform.machine()}"
    if device.type == "cuda" if device is not None else torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name(device)
    return found
