"""Training runs as processes of their own, for the tests: started, watched, killed, and their logged losses read."""

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
from several import free_port, place_of

import softplus_attention.data

# Seconds on one core: two layers, 24 steps, a checkpoint every four, losses of single steps.
TINY: dict[str, Any] = {
    "attention": "lssar", "power": "3,7@0.25,15@0.5", "layers": 2, "width": 32, "heads": 2, "sequence_length": 24,
    "steps": 24, "batch_size": 8, "micro_batch_size": 4, "learning_rate": 0.01, "log_every": 1, "save_every": 4,
    "keep": 3, "device": "cpu",
}  # fmt: skip


def text_folder(folder: Path, seed: int = 0) -> Path:
    """A prepared folder of bytes: sentences of a small language, enough for an epoch of several steps."""
    words = [bytes([97 + i % 26, 97 + i // 3 % 26, 97 + i // 7 % 26]).decode() for i in range(60)]
    chance = random.Random(seed)
    documents = [" ".join(chance.choices(words, k=chance.randint(5, 60))) for _ in range(60)]
    source = folder / "text.jsonl"
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    softplus_attention.data.prepare(
        [source], folder / "data", tokenizer="bytes", validation_fraction=0.2, workers=1, shard_tokens=4000
    )
    return folder / "data"


@dataclass
class Run:
    """A folder and a configuration; ``start`` may be called again and again, as a user would."""

    output: Path
    settings: dict[str, Any]
    processes: list[Process] = field(default_factory=list)

    def arguments(self, extra: list[str], **changes: Any) -> list[str]:
        words = []
        for name, value in {**self.settings, "output": self.output, **changes}.items():
            flag = name.replace("_", "-")
            if isinstance(value, bool):
                words.append(f"--{'' if value else 'no-'}{flag}")
            elif value is not None:
                words += [f"--{flag}", str(value)]
        return [*words, *extra]

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
            place = place_of(rank, processes, port) if processes > 1 else {}
            words = ["train", *self.arguments(list(extra), **changes)]
            limits = Limits(file_size, memory)
            self.processes.append(Process.start(*words, log=self.log, environment=place, limits=limits))

    def wait(self, seconds: float = 120) -> int:
        """The worst exit status, 0 if all went well."""
        deadline = time.monotonic() + seconds
        try:
            return max(abs(process.wait(deadline - time.monotonic())) for process in self.processes)
        finally:
            self.kill()

    def signal(self, number: int, first: int = 0) -> None:
        """To the processes from the ``first`` on."""
        for process in self.processes[first:]:
            os.kill(process.pid, number)

    def kill(self) -> None:
        for process in self.processes:
            process.kill()

    def wait_until(self, happened: Any, seconds: float = 60) -> bool:
        """False where the run ended first."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if happened():
                return True
            if not any(process.is_running for process in self.processes):
                return False
            time.sleep(0.001)
        raise AssertionError(f"it did not happen in {seconds} s:\n{self.words()}")

    def kill_when(self, happened: Any) -> bool:
        found = self.wait_until(happened)
        self.kill()
        return found

    def finish(self, *extra: str, **words: Any) -> Run:
        self.start(*extra, **words)
        assert self.wait() == 0, self.words()
        return self

    def words(self) -> str:
        return self.log.read_text()

    def entries(self) -> list[dict[str, Any]]:
        path = self.output / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def last_step(self) -> int:
        """Of what is logged so far, a half-written line left out."""
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
