"""GPU checks beyond the numerical cases of triton_cases.py. Does not need pytest.

    PYTHONPATH=src python tests/gpu_checks.py [WORD...] [--jobs N] [--list]

runs the checks whose names contain every word, each in its own process, so that a crash or a corrupted CUDA context
fails only one check. Prints one line per check: PASS or FAIL, the measured result, the time. Exits with 1 on failure.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).parent / "support"))
import decode_cases
import gpu_integration
import gpu_numbers
import gpu_training

Check = Callable[[], str]
TIMEOUT_SECONDS = 300  # of one check, including compilation


LARGE = gpu_numbers.LARGE
CHECKS: dict[str, Check] = {
    **LARGE,
    **decode_cases.CHECKS,
    **gpu_training.CHECKS,
    **gpu_numbers.CHECKS,
    **gpu_integration.CHECKS,
}


def run_here(name: str) -> bool:
    """Run a check in this process and print its result."""
    begun = time.perf_counter()
    try:
        status, result = "PASS", CHECKS[name]()
    except Exception as error:
        lines = [x for x in str(error).splitlines() if x.strip()] or [""]
        status, result = "FAIL", f"{type(error).__name__}: {' '.join(lines)[:300]}"
    print(f"{status} {name}: {result} ({time.perf_counter() - begun:.1f} s)", flush=True)
    return status == "PASS"


def run_in_subprocess(name: str) -> bool:
    command = [sys.executable, "-W", "ignore", __file__, "--here", name]
    # Every process would otherwise start its own pool of compiler workers.
    environment = {"TORCHINDUCTOR_COMPILE_THREADS": "1", "OMP_NUM_THREADS": "1", **os.environ}
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_SECONDS)
    except subprocess.TimeoutExpired:
        print(f"FAIL {name}: timed out after {TIMEOUT_SECONDS} s", flush=True)
        return False
    lines = [x for x in done.stdout.splitlines() if x.startswith(("PASS ", "FAIL "))]
    print(*lines or [f"FAIL {name}: exited with status {done.returncode}: {done.stderr[-300:]}"], sep="\n", flush=True)
    return done.returncode == 0 and bool(lines)


def select(words: list[str]) -> list[str]:
    return [name for name in CHECKS if all(word in name for word in words)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", metavar="WORD", help="run only the checks whose names contain every word")
    parser.add_argument(
        "--jobs", type=int, default=min(12, os.cpu_count() or 1), help="processes (default %(default)s)"
    )
    parser.add_argument("--list", action="store_true", help="print the names of the checks and exit")
    parser.add_argument("--here", metavar="NAME", help="run one check in this process")
    options = parser.parse_args()
    names = select(options.words)
    if options.here:
        return 0 if run_here(options.here) else 1
    if options.list:
        print(*names, sep="\n")
        return 0
    if not names or not torch.cuda.is_available():
        print("FAIL: no check name contains all of these words" if not names else "FAIL: there is no CUDA device")
        return 1
    begun, failed = time.perf_counter(), 0
    with ThreadPoolExecutor(1) as sequential, ThreadPoolExecutor(max(1, options.jobs - 1)) as parallel:
        work: list[Future[bool]] = [
            (sequential if x in LARGE else parallel).submit(run_in_subprocess, x) for x in names
        ]
        for done in as_completed(work):
            failed += not done.result()
    print(f"{len(names) - failed} passed, {failed} failed ({time.perf_counter() - begun:.0f} s)")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
