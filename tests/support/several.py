"""A function in several processes over gloo, forked from the server that has imported everything once."""

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
    """What torchrun tells a process."""
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": processes, "RANK": rank, "LOCAL_RANK": rank}
    return {name: str(value) for name, value in place.items()}


def together(program: str, processes: int, *arguments: Any, seconds: float = 300) -> Any:
    """What ``main(*arguments)`` of a module of this folder returns on the first process, as JSON holds it."""
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        log, answer = Path(folder, "log"), Path(folder, "answer.json")
        running = []
        for rank in range(processes):
            words = (program, [str(word) for word in arguments], str(answer))
            running.append(Process.of(join, words, log, environment=place_of(rank, processes, port)))
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
