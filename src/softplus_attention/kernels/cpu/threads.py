"""Runs independent pieces of one op on several cores, each piece on one core from start to end.

PyTorch parallelises every single operation and synchronizes after it; for chains of short operations that costs more
than the work. It releases the GIL inside its operations, so plain threads run such chains in parallel.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

Piece = TypeVar("Piece")

_pool: tuple[int, ThreadPoolExecutor] | None = None
_lock = threading.Lock()


def _forget_pool() -> None:
    """A forked process inherits the pool, but not its threads."""
    global _pool, _lock
    _pool, _lock = None, threading.Lock()


os.register_at_fork(after_in_child=_forget_pool)


def _workers(threads: int) -> ThreadPoolExecutor:
    """A pool of at least ``threads`` threads."""
    global _pool
    with _lock:
        if _pool is None or _pool[0] < threads:
            _pool = (threads, ThreadPoolExecutor(threads, "softplus-attention"))
        return _pool[1]


def one_by_one(work: Callable[[Piece], None], pieces: Sequence[Piece]) -> None:
    for piece in pieces:
        work(piece)


def for_each(work: Callable[[Piece], None], pieces: Sequence[Piece]) -> None:
    """Calls ``work`` on every piece, on as many threads as PyTorch may use; the first exception is raised here."""
    threads = min(torch.get_num_threads(), len(pieces))
    if threads <= 1:
        one_by_one(work, pieces)
        return

    allowed = torch.get_num_threads()
    inference = torch.is_inference_mode_enabled()
    remaining = iter(pieces)
    taking = threading.Lock()
    stop = threading.Event()

    def run() -> None:
        torch.set_num_threads(1)  # on every call: the number is per thread in torch, but global in the matrix library
        with torch.inference_mode(inference), torch.no_grad():
            while not stop.is_set():
                with taking:
                    piece = next(remaining, None)
                if piece is None:
                    return
                try:
                    work(piece)
                except BaseException:
                    stop.set()
                    raise

    workers = _workers(threads)
    running = [workers.submit(run) for _ in range(threads)]
    try:
        for future in running:
            future.result()
    finally:
        # However the wait ended, no thread may still write into the caller's tensors.
        stop.set()
        for future in running:
            future.exception()
        torch.set_num_threads(allowed)
