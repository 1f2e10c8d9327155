"""Fault injection for commands that write a folder: kills, full disks, and two processes in one folder.

Nothing may be lost, and running the same command again must give the result of an undisturbed run. Each command is a
``Job``.
"""

from __future__ import annotations

import random
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from commands import Limits, Process, run


@dataclass(frozen=True)
class Job:
    name: str
    arguments: Callable[[Path], tuple[object, ...]]  # of the command, given its output folder
    result: Callable[[Path], Any]  # must be equal to that of an undisturbed run
    file_size: int  # limit in bytes that simulates a full disk
    source: Path | None = None  # initial content of the folder

    def begin(self, folder: Path) -> Path:
        if self.source is not None:
            shutil.copytree(self.source, folder)
        return folder

    def finish(self, folder: Path) -> Any:
        done = run(*self.arguments(folder))
        assert done.status == 0, done.text
        return self.result(folder)


@dataclass(frozen=True)
class Undisturbed:
    result: Any
    seconds: float


def undisturbed(job: Job, folder: Path) -> Undisturbed:
    job.begin(folder)
    started = time.monotonic()
    result = job.finish(folder)
    assert result
    return Undisturbed(result, time.monotonic() - started)


def kill_often(job: Job, expected: Undisturbed, folder: Path, kills: int, seed: int = 0) -> int:
    """``kill -9`` at random moments; returns how many processes were still running."""
    chance = random.Random(f"{job.name} {seed}")
    job.begin(folder)
    killed = 0
    for _ in range(kills):
        process = Process.start(*job.arguments(folder))
        time.sleep(chance.uniform(0.1, 1) * expected.seconds)
        killed += process.is_running
        process.kill()
        process.log.unlink()
    assert job.finish(folder) == expected.result
    return killed


def fill_the_disk(job: Job, expected: Undisturbed, folder: Path) -> None:
    """Limits the file size, like a full disk, then lifts the limit."""
    job.begin(folder)
    check_full(run(*job.arguments(folder), limits=Limits(file_size=job.file_size)))
    assert job.finish(folder) == expected.result


def check_full(done: Any) -> None:
    assert done.status in (1, 2), done.text
    assert "Traceback" not in done.text, done.text
    assert len(done.errors) == 1, done.text
    assert any(reason in done.errors[0] for reason in ("no room", "File too large", "No space left")), done.text


@contextmanager
def small_disk(folder: Path, size: int) -> Iterator[Path]:
    """Mounts a tmpfs of that size; skips the test if mounting is not allowed."""
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"mounting is not allowed: {mounted.stderr.decode().strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)


def fill_a_small_disk(job: Job, expected: Undisturbed, folder: Path, size: int) -> None:
    with small_disk(folder, size) as disk:
        job.begin(disk / "out")
        check_full(run(*job.arguments(disk / "out")))
        subprocess.run(["mount", "-o", "remount,size=1G", disk], check=True)
        assert job.finish(disk / "out") == expected.result


def run_twice_at_once(job: Job, expected: Undisturbed, folder: Path) -> None:
    """One process may be refused with an error line; neither may corrupt what the other writes."""
    job.begin(folder)
    both = [Process.start(*job.arguments(folder)) for _ in range(2)]
    statuses = [process.wait() for process in both]
    text = "\n".join(process.text for process in both)
    assert min(statuses) == 0, text
    assert max(statuses) in (0, 1, 2), text
    assert "Traceback" not in text, text
    assert job.finish(folder) == expected.result
