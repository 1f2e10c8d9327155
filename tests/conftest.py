"""Shared set-up: threads, hypothesis profiles, poisoned memory."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

# Read when torch loads: waiting threads do not spin, and the profiler does not log its start and stop.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("KINETO_LOG_LEVEL", "99")

# Tests do not depend on a build by the user: tests of the C++ kernels request them.
os.environ["SOFTPLUS_ATTENTION_CPU"] = "torch"

import fcntl
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings

# Read when triton loads: without a GPU, kernels run in its interpreter.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

if os.environ.get("TRITON_INTERPRET") == "1" and find_spec("triton"):
    import triton.language as tl
    from triton.runtime import interpreter

    # On a GPU the maximum of NaN and a number is the number; the interpreter would return NaN.
    interpreter.InterpreterBuilder.create_maxnumf = lambda self, lhs, rhs: self.binary_op(lhs, rhs, np.fmax)
    interpreter.InterpreterBuilder.create_minnumf = lambda self, lhs, rhs: self.binary_op(lhs, rhs, np.fmin)

    # By default every call in a kernel patches the whole language again, which takes half of the interpreter's time.
    patch_language, patched = interpreter._patch_lang, set[int]()
    no_patch = interpreter._LangPatchScope()

    def patch_language_once(function: Callable[..., object]) -> object:
        languages = {id(x) for x in function.__globals__.values() if x is tl or x is tl.core}
        if languages <= patched:
            return no_patch
        scope = patch_language(function)
        patched.update(languages)
        restore = scope.restore

        def restored() -> None:
            patched.clear()
            restore()

        scope.restore = restored
        return scope

    interpreter._patch_lang = patch_language_once

settings.register_profile(
    "repeatable",
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("repeatable")


@pytest.fixture(autouse=True)
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    """Every test starts with the ``THREADS`` of its file, and must restore them. The default is one, since tests run in
    parallel, one process per core."""
    count = getattr(request.module, "THREADS", 1)
    torch.set_num_threads(count)
    yield
    left = torch.get_num_threads()
    torch.set_num_threads(count)
    assert left == count, "the number of threads was not restored"


@pytest.fixture
def poisoned_memory() -> Iterator[None]:
    import helpers

    with helpers.poisoned_memory():
        yield


@pytest.fixture(scope="session")
def native_library(request: pytest.FixtureRequest) -> Path:
    """The C++ kernels, built once for all runs and processes of the suite, in pytest's cache."""
    from softplus_attention.kernels.cpu.native import build

    folder = Path(request.config.cache.mkdir("cpu-kernels"))
    with pytest.MonkeyPatch.context() as patch, (folder / "lock").open("w") as lock:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        build.library_path.cache_clear()
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not build.library_path().exists():
            try:
                build.compiler()
            except build.BuildError as error:
                pytest.skip(str(error))
            build.build()
        return build.library_path()


@pytest.fixture(params=["torch", "native"])
def cpu_kernels(request: pytest.FixtureRequest) -> Iterator[str]:
    """Run a test with PyTorch operations and with the C++ kernels."""
    from softplus_attention.kernels.cpu import native

    if request.param == "native":
        request.getfixturevalue("native_library")
    with native.using(request.param):
        yield request.param


@pytest.fixture
def impl(request: pytest.FixtureRequest) -> Iterator[str]:
    """For ``parametrize(..., indirect=True)``: an implementation; "native" is "chunked" with the C++ kernels."""
    from softplus_attention.kernels.cpu import native

    if request.param != "native":
        yield request.param
        return
    request.getfixturevalue("native_library")
    with native.using("native"):
        yield "chunked"
