"""Every check that needs a GPU beyond the kernels' own cases (triton_cases.py); needs no pytest.

    PYTHONPATH=src python tests/gpu_checks.py [WORD...] [--jobs N] [--list]

runs the checks whose name holds every word, each in a process of its own, so that a crash or a spoilt CUDA context
ends one check alone. A line for each: PASS or FAIL, what was measured, seconds. The status is 1 where one failed.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from functools import partial
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).parent / "support"))
import decode_cases
import gpu_integration
import gpu_numbers
import gpu_training

Check = Callable[[], str]
SECONDS = 300  # the longest a check may take, its compilation included


def check_decode_powers(d: int, dtype: torch.dtype) -> str:
    outside = []
    calls = [(name, True) for name in decode_cases.POWERS] + [("15", False), ("per head", False)]
    for name, offset in calls:
        try:
            decode_cases.assert_power_on_gpu(decode_cases.POWERS[name], d, dtype, offset)
        except AssertionError as error:
            outside.append(f"p {name}{'' if offset else ' without offset'}: {error}")
    assert not outside, "; ".join(outside)
    return f"{len(calls)} calls within the yardstick"


def check_decode_not_finite() -> str:
    for bad in (float("nan"), float("inf")):
        for rows in (1, 16, 48):
            decode_cases.check_values_that_are_not_finite(bad, rows)
    for power in (None, 15, 2.5):
        decode_cases.check_a_key_that_is_not_finite(power)
    return "9 calls"


def check_decode_graph() -> str:
    decode_cases.check_a_graph_serves_every_length()
    return "6 replays of one capture equal to eager"


def check_decode_unit_vectors() -> str:
    decode_cases.check_unit_vectors("cuda", decode_cases.GPU_DTYPES)
    return "every size, layout and head dimension to a rounding"


def check_decode_launches() -> str:
    decode_cases.check_launches_again()
    return "156 launches with odd and even strides, pointers, lengths and powers"


DECODE: dict[str, Check] = {
    **{
        f"decode {str(dtype).removeprefix('torch.')} D{d}": partial(check_decode_powers, d, dtype)
        for dtype in decode_cases.GPU_DTYPES
        for d in reversed(decode_cases.GPU_HEAD_DIMS)
    },
    "decode not finite": check_decode_not_finite,
    "graph decode": check_decode_graph,
    "decode launches": check_decode_launches,
    "decode unit vectors": check_decode_unit_vectors,
}
LARGE = gpu_numbers.LARGE
CHECKS: dict[str, Check] = {
    **LARGE,
    **DECODE,
    **gpu_training.CHECKS,
    **gpu_numbers.CHECKS,
    **gpu_integration.CHECKS,
}


def here(name: str) -> bool:
    """Runs a check in this process and prints its line."""
    begun = time.perf_counter()
    try:
        word, figure = "PASS", CHECKS[name]()
    except Exception as error:
        lines = [x for x in str(error).splitlines() if x.strip()] or [""]
        word, figure = "FAIL", f"{type(error).__name__}: {' '.join(lines)[:300]}"
    print(f"{word} {name}: {figure} ({time.perf_counter() - begun:.1f} s)", flush=True)
    return word == "PASS"


def apart(name: str) -> bool:
    """The same in a process of its own."""
    command = [sys.executable, "-W", "ignore", __file__, "--here", name]
    # The compiler's own helpers would multiply with the processes here.
    environment = {"TORCHINDUCTOR_COMPILE_THREADS": "1", "OMP_NUM_THREADS": "1", **os.environ}
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        print(f"FAIL {name}: not done after {SECONDS} s", flush=True)
        return False
    lines = [x for x in done.stdout.splitlines() if x.startswith(("PASS ", "FAIL "))]
    print(*lines or [f"FAIL {name}: died with status {done.returncode}: {done.stderr[-300:]}"], sep="\n", flush=True)
    return done.returncode == 0 and bool(lines)


def chosen(words: list[str]) -> list[str]:
    return [name for name in CHECKS if all(word in name for word in words)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", metavar="WORD", help="run only the checks whose name holds every word")
    parser.add_argument(
        "--jobs", type=int, default=min(12, os.cpu_count() or 1), help="processes (default %(default)s)"
    )
    parser.add_argument("--list", action="store_true", help="print the names and run nothing")
    parser.add_argument("--here", metavar="NAME", help="one check, in this process")
    options = parser.parse_args()
    names = chosen(options.words)
    if options.here:
        return 0 if here(options.here) else 1
    if options.list:
        print(*names, sep="\n")
        return 0
    if not names or not torch.cuda.is_available():
        print("FAIL: no check has that name" if not names else "FAIL: there is no CUDA device")
        return 1
    begun, failed = time.perf_counter(), 0
    with ThreadPoolExecutor(1) as one_by_one, ThreadPoolExecutor(max(1, options.jobs - 1)) as together:
        work: list[Future[bool]] = [(one_by_one if x in LARGE else together).submit(apart, x) for x in names]
        for done in as_completed(work):
            failed += not done.result()
    print(f"{len(names) - failed} passed, {failed} failed ({time.perf_counter() - begun:.0f} s)")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
