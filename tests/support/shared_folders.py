"""Folders that are slow to create, created once for all processes of a test run."""

from __future__ import annotations

import fcntl
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest


def make_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], None]) -> Path:
    """This process's own copy of the folder that ``make`` fills."""
    root = factory.getbasetemp()
    shared = (root.parent if root.name.startswith("popen-") else root) / f"shared-{name}"
    with shared.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not shared.exists():
            make(partial := shared.with_suffix(".partial"))
            partial.rename(shared)
    return Path(shutil.copytree(shared, factory.mktemp(name) / "copy"))
