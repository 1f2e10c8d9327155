"""Runs a function in several processes over gloo, forked from the fork server of ``commands``."""

from __future__ import annotations

import importlib
import json
import socket
import tempfile
import warnings
from pathlib import Path
from typing import Any

from commands import Process


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def place_of(rank: int, processes: int, port: int) -> dict[str, str]:
    """The environment variables that torchrun sets."""
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": processes, "RANK": rank, "LOCAL_RANK": rank}
    return {name: str(value) for name, value in place.items()}


def together(program: str, processes: int, *arguments: Any, seconds: float = 300) -> Any:
    """Runs ``main(*arguments)`` of module ``program`` in all processes; returns rank 0's result, passed as JSON."""
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        log, answer = Path(folder, "log"), Path(folder, "answer.json")
        running = []
        for rank in range(processes):
            args = (program, [str(argument) for argument in arguments], str(answer))
            running.append(Process.of(join, args, log, environment=place_of(rank, processes, port)))
        try:
            statuses = [process.wait(seconds) for process in running]
        finally:
            for process in running:
                process.kill()
        assert not any(statuses), log.read_text()[-3000:]
        return json.loads(answer.read_text())


def join(program: str, arguments: list[str], answer: str) -> int:
    import torch.distributed as dist

    warnings.filterwarnings("ignore")
    dist.init_process_group("gloo")
    found = importlib.import_module(program).main(*arguments)
    if dist.get_rank() == 0:
        Path(answer).write_text(json.dumps(found))
    dist.destroy_process_group()
    return 0


__all__ = ["free_port", "place_of", "together"]
