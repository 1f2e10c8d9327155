"""The command line in processes of its own, forked from a server that has imported everything once: what takes seconds
happens once, and nothing is left over from one command to the next."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import resource
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(
    [
        "matplotlib",
        "softplus_attention.cli.evaluate",
        "softplus_attention.cli.train",
        "softplus_attention.data.preparation",
        "softplus_attention.evaluation.length_measure",
        "softplus_attention.huggingface.loading",
        "softplus_attention.report.build",
        "softplus_attention.report.result_files",
        "softplus_attention.training.run",
    ]
)


@dataclass(frozen=True)
class Limits:
    file_size: int | None = None  # bytes of any file
    memory: int | None = None  # bytes that it may add to what it has


def child(target: Any, arguments: Any, log: str, given: str, environment: dict[str, str], limits: Limits) -> None:
    """The process of a command: what it prints goes to a file, the text ``given`` is its input."""
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    with tempfile.TemporaryFile() as file:
        file.write(given.encode())
        file.seek(0)
        os.dup2(file.fileno(), 0)
    sys.stdin = os.fdopen(0, closefd=False)  # multiprocessing has closed the other one
    os.environ.update(environment)
    if limits.file_size is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limits.file_size, limits.file_size))
    import torch

    torch.set_num_threads(1)
    if limits.memory is not None:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + limits.memory,) * 2)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # as in the foreground, wherever the tests run
    sys.exit(target(*arguments))


def command(*words: str) -> int:
    from softplus_attention.cli import main

    return main(list(words))


@dataclass
class Process:
    """A command that runs; ``text`` is what it printed so far, results and errors."""

    log: Path
    process: Any

    @classmethod
    def start(
        cls,
        *words: object,
        log: Path | None = None,
        given: str = "",
        environment: dict[str, str] | None = None,
        limits: Limits | None = None,
    ) -> Process:
        if log is None:
            handle, name = tempfile.mkstemp(suffix=".log")
            os.close(handle)
            log = Path(name)
        return cls.of(command, [str(word) for word in words], log, given, environment, limits)

    @classmethod
    def of(
        cls,
        target: Any,
        arguments: Sequence[Any],
        log: Path,
        given: str = "",
        environment: dict[str, str] | None = None,
        limits: Limits | None = None,
    ) -> Process:
        """A function of a module, which returns its exit status."""
        words = (target, arguments, str(log), given, environment or {}, limits or Limits())
        process = SERVER.Process(target=child, args=words)
        process.start()
        return cls(log, process)

    @property
    def text(self) -> str:
        return self.log.read_text(errors="replace")

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def exitcode(self) -> int | None:
        return self.process.exitcode

    @property
    def is_running(self) -> bool:
        return self.exitcode is None

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self.process.join()

    def wait(self, seconds: float = 120) -> int:
        self.process.join(max(0.1, seconds))
        if self.is_running:
            self.kill()
            raise AssertionError(f"not finished after {seconds} s:\n{self.text}")
        return self.process.exitcode


@dataclass(frozen=True)
class Finished:
    status: int
    text: str
    errors: list[str] = field(default_factory=list)


def run(*words: object, seconds: float = 120, **settings: Any) -> Finished:
    """The command to its end: its exit status, all that it printed, and the lines that name an error."""
    process = Process.start(*words, **settings)
    try:
        status = process.wait(seconds)
        text = process.text
    finally:
        process.log.unlink(missing_ok=True)
    return Finished(status, text, [line for line in text.splitlines() if line.startswith("softplus-attention: ")])


def refused(*words: object, **settings: Any) -> str:
    """The one line in which a command names what it does not do; status 2."""
    done = run(*words, **settings)
    assert done.status == 2, done.text
    assert "Traceback" not in done.text, done.text
    assert len(done.errors) == 1, done.text
    assert done.text.rstrip().endswith(done.errors[0]), done.text
    return done.errors[0]


def wait_until(happened: Any, process: Process, seconds: float = 60) -> bool:
    """False where the process ended first."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if happened():
            return True
        if not process.is_running:
            return False
        time.sleep(0.001)
    raise AssertionError(f"it did not happen in {seconds} s:\n{process.text}")
