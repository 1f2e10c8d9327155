"""Runs commands in separate processes, forked from a server that has imported everything once.

The slow imports happen once, and no state is left over between commands.
"""

from __future__ import annotations

import contextlib
import io
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
    memory: int | None = None  # bytes of address space beyond those after the fork


def child(target: Any, arguments: Any, log: str, stdin: str, environment: dict[str, str], limits: Limits) -> None:
    """The body of a process: stdout and stderr go to ``log``, ``stdin`` is its stdin."""
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    with tempfile.TemporaryFile() as file:
        file.write(stdin.encode())
        file.seek(0)
        os.dup2(file.fileno(), 0)
    sys.stdin = os.fdopen(0, closefd=False)  # multiprocessing closed the old one
    os.environ.update(environment)
    if limits.file_size is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limits.file_size, limits.file_size))
    import torch

    torch.set_num_threads(1)
    if limits.memory is not None:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + limits.memory,) * 2)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # as in the foreground
    sys.exit(target(*arguments))


def command(*arguments: str) -> int:
    from softplus_attention.cli import main

    return main(list(arguments))


@dataclass
class Process:
    """A running command; ``text`` is its output so far, stdout and stderr."""

    log: Path
    process: Any

    @classmethod
    def start(
        cls,
        *arguments: object,
        log: Path | None = None,
        stdin: str = "",
        environment: dict[str, str] | None = None,
        limits: Limits | None = None,
    ) -> Process:
        if log is None:
            handle, name = tempfile.mkstemp(suffix=".log")
            os.close(handle)
            log = Path(name)
        return cls.of(command, [str(argument) for argument in arguments], log, stdin, environment, limits)

    @classmethod
    def of(
        cls,
        target: Any,
        arguments: Sequence[Any],
        log: Path,
        stdin: str = "",
        environment: dict[str, str] | None = None,
        limits: Limits | None = None,
    ) -> Process:
        """Starts an importable function, which returns the exit status."""
        args = (target, arguments, str(log), stdin, environment or {}, limits or Limits())
        process = SERVER.Process(target=child, args=args)
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


def run(*arguments: object, seconds: float = 120, **kwargs: Any) -> Finished:
    """Runs a command to its end; ``errors`` are the lines of the output that report an error."""
    process = Process.start(*arguments, **kwargs)
    try:
        status = process.wait(seconds)
        text = process.text
    finally:
        process.log.unlink(missing_ok=True)
    return Finished(status, text, [line for line in text.splitlines() if line.startswith("softplus-attention: ")])


def refused(*arguments: object, status: int = 2, **kwargs: Any) -> str:
    """Checks that a command fails with one error line, the last of its output, and returns that line."""
    done = run(*arguments, **kwargs)
    assert done.status == status, done.text
    assert "Traceback" not in done.text, done.text
    assert len(done.errors) == 1, done.text
    assert done.text.rstrip().endswith(done.errors[0]), done.text
    return done.errors[0]


def refused_in_process(*arguments: object) -> str:
    """Like ``refused``, but faster: it calls ``main`` in this process."""
    from softplus_attention.cli import main

    with contextlib.redirect_stderr(io.StringIO()) as stderr:
        assert main([str(argument) for argument in arguments]) == 2
    error = stderr.getvalue().splitlines()[-1]
    assert error.startswith("softplus-attention: ")
    return error


def wait_until(happened: Any, process: Process, seconds: float = 60) -> bool:
    """False if the process ended before."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if happened():
            return True
        if not process.is_running:
            return False
        time.sleep(0.001)
    raise AssertionError(f"timeout after {seconds} s:\n{process.text}")
