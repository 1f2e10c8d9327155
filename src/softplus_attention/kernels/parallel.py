"""Independent pieces of one op on several cores, each piece on one core from beginning to end.

PyTorch splits every single operation over the cores and joins them again; for chains of short operations the joining
costs more than the work. It releases the GIL inside its operations, so plain threads run such chains side by side.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

Piece = TypeVar("Piece")


def for_each(work: Callable[[Piece], None], pieces: Sequence[Piece]) -> None:
    """Calls ``work`` on every piece, on as many threads as PyTorch may use; the first exception is raised here."""
    threads = min(torch.get_num_threads(), len(pieces))
    if threads <= 1:
        for piece in pieces:
            work(piece)
        return

    allowed = torch.get_num_threads()
    inference = torch.is_inference_mode_enabled()
    remaining = iter(pieces)
    lock = threading.Lock()
    errors: list[BaseException] = []

    def run() -> None:
        torch.set_num_threads(1)  # of this thread
        with torch.inference_mode(inference), torch.no_grad():
            while not errors:
                with lock:
                    piece = next(remaining, None)
                if piece is None:
                    return
                try:
                    work(piece)
                except BaseException as error:
                    errors.append(error)

    workers = [threading.Thread(target=run, name=f"softplus-attention-{i}") for i in range(threads)]
    try:
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    finally:
        torch.set_num_threads(allowed)  # threads started later take the last number set anywhere
    if errors:
        raise errors[0]
