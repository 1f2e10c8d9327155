"""What must hold of any command that writes a folder: killed at any moment, on a full disk, or twice at once in one
folder, nothing is lost, and the same command ends with what an undisturbed one gives.

A new command is one ``Job``.
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
    words: Callable[[Path], tuple[object, ...]]  # of the command that writes into a folder
    result: Callable[[Path], Any]  # what must be equal in the end
    file_size: int  # bytes of a file at which its disk is full
    source: Path | None = None  # what lies in the folder before

    def begin(self, folder: Path) -> Path:
        if self.source is not None:
            shutil.copytree(self.source, folder)
        return folder

    def finish(self, folder: Path) -> Any:
        done = run(*self.words(folder))
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


def kill_often(job: Job, whole: Undisturbed, folder: Path, kills: int, seed: int = 0) -> int:
    """``kill -9`` at random moments; gives how many of the processes were still at work."""
    chance = random.Random(f"{job.name} {seed}")
    job.begin(folder)
    found = 0
    for _ in range(kills):
        process = Process.start(*job.words(folder))
        time.sleep(chance.uniform(0.1, 1) * whole.seconds)
        found += process.is_running
        process.kill()
        process.log.unlink()
    assert job.finish(folder) == whole.result
    return found


def fill_the_disk(job: Job, whole: Undisturbed, folder: Path) -> None:
    """Files can have only so many bytes, as on a disk that is full; then there is room again."""
    job.begin(folder)
    check_full(run(*job.words(folder), limits=Limits(file_size=job.file_size)))
    assert job.finish(folder) == whole.result


def check_full(done: Any) -> None:
    assert done.status in (1, 2), done.text
    assert "Traceback" not in done.text, done.text
    assert len(done.errors) == 1, done.text
    assert any(words in done.errors[0] for words in ("no room", "File too large", "No space left")), done.text


@contextmanager
def small_disk(folder: Path, size: int) -> Iterator[Path]:
    """A file system of its own with so many bytes; the test is skipped where none may be mounted."""
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.decode().strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)


def fill_a_small_disk(job: Job, whole: Undisturbed, folder: Path, size: int) -> None:
    with small_disk(folder, size) as disk:
        job.begin(disk / "out")
        check_full(run(*job.words(disk / "out")))
        subprocess.run(["mount", "-o", "remount,size=1G", disk], check=True)
        assert job.finish(disk / "out") == whole.result


def run_twice_at_once(job: Job, whole: Undisturbed, folder: Path) -> None:
    """One of them may be refused, in one line; neither spoils what the other writes."""
    job.begin(folder)
    both = [Process.start(*job.words(folder)) for _ in range(2)]
    states = [process.wait() for process in both]
    text = "\n".join(process.text for process in both)
    assert min(states) == 0, text
    assert max(states) in (0, 1, 2), text
    assert "Traceback" not in text, text
    assert job.finish(folder) == whole.result
