"""The CPU kernels in C++: optional, built once on this machine by ``softplus-attention build``, loaded when found.

They run behind impl="chunked" and mean the same; what they do not take goes to PyTorch's operations.
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
    """What computes on a CPU: ``ops``, the operators of the library, or with None PyTorch's operations; and why."""

    ops: Any | None
    reason: str


_found: Status | None = None


def status() -> Status:
    """Looks for the library at the first call, and remembers."""
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
        reason = "not built on this machine for this version and torch: softplus-attention build"
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
        warnings.warn(f"softplus_attention: {reason}; PyTorch's operations run instead", stacklevel=2)
        return Status(None, reason)
    ops = torch.ops.softplus_attention_native
    return Status(ops, f"{ops.instructions()}, {path}")


def check_owner(path: Path) -> None:
    """The library is code: nobody else may have put it there, or be able to."""
    for place in (path, path.parent):
        found = place.stat()
        if found.st_uid not in (0, os.getuid()) or found.st_mode & 0o022:
            raise PermissionError(f"others than you can write {place}; remove it, and build again")


@contextmanager
def using(mode: str) -> Iterator[Status]:
    """Another way than the environment's, for tests and benchmarks."""
    global _found
    before, _found = _found, find(mode)
    try:
        yield _found
    finally:
        _found = before
