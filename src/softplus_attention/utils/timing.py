"""Time and memory of calls to compare, run alternately in one process so that other load affects all of them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

Work = Callable[[], Any]  # one call, with its result
MIN_GPU_MS = 2.0  # a sample on a GPU repeats short calls until they take this long


def milliseconds(work: Work, device: torch.device, calls: int = 1) -> float:
    """Mean time of one of ``calls`` calls."""
    if device.type != "cuda":
        start = time.perf_counter()
        for _ in range(calls):
            work()
        return 1e3 * (time.perf_counter() - start) / calls
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(calls):
        work()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / calls


def alternate(
    works: Mapping[str, Work], device: torch.device, repetitions: int, seconds: float | None = None
) -> dict[str, list[float]]:
    """Milliseconds of each call, for ``repetitions`` rounds or until ``seconds`` have passed, one round at least.

    Warm up before: the first call compiles and allocates workspaces.
    """
    deadline = None if seconds is None else time.monotonic() + seconds
    calls = dict.fromkeys(works, 1)
    if device.type == "cuda":
        calls = {name: max(1, round(MIN_GPU_MS / milliseconds(work, device))) for name, work in works.items()}
    samples: dict[str, list[float]] = {name: [] for name in works}
    for repetition in range(repetitions):
        if repetition and deadline is not None and time.monotonic() > deadline:
            break
        for name, work in works.items():
            samples[name].append(milliseconds(work, device, calls[name]))
    return samples


def medians(samples: Mapping[str, list[float]]) -> dict[str, float]:
    return {name: statistics.median(values) for name, values in samples.items()}


def peak_bytes(work: Work, device: torch.device) -> int:
    """Peak memory of the call beyond what was allocated before, results included.

    On a CPU it runs on one thread, the only one the profiler sees.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        _kept = work()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
            _kept = work()
    finally:
        torch.set_num_threads(threads)
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak
