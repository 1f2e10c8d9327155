"""Training runs in separate processes: start, watch, kill, and read the logged losses."""

from __future__ import annotations

import contextlib
import json
import os
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from commands import Limits, Process
from data_files import write_jsonl
from several import free_port, place_of

import softplus_attention.data

# Takes seconds on one core. Checkpoints every four steps, a log entry for each.
TINY: dict[str, Any] = {
    "attention": "lssar", "power": "3,7@0.25,15@0.5", "layers": 2, "width": 32, "heads": 2, "sequence_length": 24,
    "steps": 24, "batch_size": 8, "micro_batch_size": 4, "learning_rate": 0.01, "log_every": 1, "save_every": 4,
    "keep": 3, "device": "cpu",
}  # fmt: skip


def text_folder(folder: Path, seed: int = 0) -> Path:
    """A prepared folder of random words as bytes, with several steps per epoch."""
    vocabulary = [bytes([97 + i % 26, 97 + i // 3 % 26, 97 + i // 7 % 26]).decode() for i in range(60)]
    chance = random.Random(seed)
    documents = [" ".join(chance.choices(vocabulary, k=chance.randint(5, 60))) for _ in range(60)]
    source = write_jsonl(folder / "text.jsonl", documents)
    softplus_attention.data.prepare(
        [source], folder / "data", tokenizer="bytes", validation_fraction=0.2, workers=1, shard_tokens=4000
    )
    return folder / "data"


@dataclass
class Run:
    """A run folder and its settings; ``start`` may be called repeatedly, to resume it."""

    output: Path
    settings: dict[str, Any]
    processes: list[Process] = field(default_factory=list)

    def arguments(self, extra: list[str], **changes: Any) -> list[str]:
        arguments = []
        for name, value in {**self.settings, "output": self.output, **changes}.items():
            flag = name.replace("_", "-")
            if isinstance(value, bool):
                arguments.append(f"--{'' if value else 'no-'}{flag}")
            elif value is not None:
                arguments += [f"--{flag}", str(value)]
        return [*arguments, *extra]

    @property
    def log(self) -> Path:
        return self.output.with_name(self.output.name + ".log")

    def start(
        self,
        *extra: str,
        processes: int = 1,
        file_size: int | None = None,
        memory: int | None = None,
        **changes: Any,
    ) -> None:
        self.log.write_text("")
        self.processes = []
        port = free_port()
        for rank in range(processes):
            environment = place_of(rank, processes, port) if processes > 1 else {}
            arguments = self.arguments(list(extra), **changes)
            limits = Limits(file_size, memory)
            process = Process.start("train", *arguments, log=self.log, environment=environment, limits=limits)
            self.processes.append(process)

    def wait(self, seconds: float = 120) -> int:
        """The largest exit status."""
        deadline = time.monotonic() + seconds
        try:
            return max(abs(process.wait(deadline - time.monotonic())) for process in self.processes)
        finally:
            self.kill()

    def signal(self, number: int, first: int = 0) -> None:
        """Sends a signal to the processes from rank ``first`` on."""
        for process in self.processes[first:]:
            os.kill(process.pid, number)

    def kill(self) -> None:
        for process in self.processes:
            process.kill()

    def wait_until(self, happened: Any, seconds: float = 60) -> bool:
        """False if the run ended before."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if happened():
                return True
            if not any(process.is_running for process in self.processes):
                return False
            time.sleep(0.001)
        raise AssertionError(f"timeout after {seconds} s:\n{self.words()}")

    def kill_when(self, happened: Any) -> bool:
        found = self.wait_until(happened)
        self.kill()
        return found

    def kill_at(self, name: str, *extra: str, **changes: Any) -> None:
        """Starts the run and kills it as soon as that file or folder exists."""
        self.start(*extra, **changes)
        assert self.kill_when(lambda: (self.output / name).exists()), self.words()

    def finish(self, *extra: str, **changes: Any) -> Run:
        self.start(*extra, **changes)
        assert self.wait() == 0, self.words()
        return self

    def fail(self, status: int, *extra: str, seconds: float = 120, **changes: Any) -> str:
        """Starts the run, checks that it ends with ``status`` and without a traceback, and returns its output."""
        self.start(*extra, **changes)
        assert self.wait(seconds) == status, self.words()
        assert "Traceback" not in self.words(), self.words()
        return self.words()

    def words(self) -> str:
        return self.log.read_text()

    def entries(self) -> list[dict[str, Any]]:
        path = self.output / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def last_step(self) -> int:
        """The last logged step, ignoring a partly written line."""
        path = self.output / "metrics.jsonl"
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        return json.loads(lines[-1])["step"] if lines else 0

    def losses(self, name: str = "loss") -> dict[int, float]:
        return {entry["step"]: entry[name] for entry in self.entries() if name in entry}

    def checkpoints(self) -> list[int]:
        return sorted(int(path.name.split("-")[1]) for path in self.output.glob("checkpoint-*") if "." not in path.name)


@contextlib.contextmanager
def running(output: Path, **settings: Any) -> Iterator[Run]:
    run = Run(output, settings)
    try:
        yield run
    finally:
        run.kill()
