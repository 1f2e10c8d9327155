"""Optional C++ kernels for the CPU. ``softplus-attention build`` compiles them once per machine.

With impl="chunked" they run if they are found; calls that they do not support use PyTorch operations.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

VARIABLE = "SOFTPLUS_ATTENTION_CPU"
MODES = ("auto", "torch", "native")


class Status(NamedTuple):
    """``ops`` are the operators of the library; None means that PyTorch operations are used, for ``reason``."""

    ops: Any | None
    reason: str


_found: Status | None = None


def status() -> Status:
    """Looks for the library in the first call and caches the result."""
    global _found
    if _found is None:
        _found = find(os.environ.get(VARIABLE) or "auto")
    return _found


def find(mode: str) -> Status:
    from softplus_attention.kernels.cpu.native.build import library_path

    if mode not in MODES:
        raise ValueError(f"{VARIABLE} must be one of {', '.join(MODES)}, got {mode!r}")
    if mode == "torch":
        return Status(None, f"{VARIABLE}=torch")
    path = library_path()
    if not path.exists():
        reason = "not built on this machine for this version and torch: run softplus-attention build"
        if mode == "native":
            raise RuntimeError(f"{VARIABLE}=native: the C++ kernels are {reason}")
        return Status(None, f"the C++ kernels are {reason}")
    try:
        check_owner(path)
        torch.ops.load_library(path)
    except OSError as error:
        reason = f"{path} cannot be loaded: {error}"
        if mode == "native":
            raise RuntimeError(f"{VARIABLE}=native: {reason}") from error
        warnings.warn(f"softplus_attention: {reason}; using PyTorch operations instead", stacklevel=2)
        return Status(None, reason)
    ops = torch.ops.softplus_attention_native
    return Status(ops, f"{ops.instructions()}, {path}")


def check_owner(path: Path) -> None:
    """Raises PermissionError if another user could have written the library, which is code."""
    for place in (path, path.parent):
        found = place.stat()
        if found.st_uid not in (0, os.getuid()) or found.st_mode & 0o022:
            raise PermissionError(f"other users can write to {place}; remove it and build again")


@contextmanager
def using(mode: str) -> Iterator[Status]:
    """Overrides the environment variable, for tests and benchmarks."""
    global _found
    before, _found = _found, find(mode)
    try:
        yield _found
    finally:
        _found = before
