"""Orbit sequences that the simulator generates per second of processor time on one core.

python benchmarks/orbits.py --output results/newton/simulator.json
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

import numpy as np
from figures import write

from softplus_attention.physics.distributions import distribution
from softplus_attention.physics.orbits import simulate
from softplus_attention.utils import provenance

DISTRIBUTIONS = ("published-code", "published-text", "identifiable")
POSITIONS = 999  # of a sequence, without the time step at position 0


def sequences_per_second(name: str, planets: int, steps: int, sequences: int, runs: int) -> float:
    seconds = []
    for run in range(runs):
        start = time.process_time()
        simulate(distribution(name).sample(sequences, np.random.default_rng(run), planets=planets), steps)
        seconds.append(time.process_time() - start)
    return sequences / statistics.median(seconds)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, default=1000, help="sequences per run (default: %(default)s)")
    parser.add_argument("--runs", type=int, default=5, help="runs, whose median is used (default: %(default)s)")
    parser.add_argument("--output", type=Path, help="the JSON file to write")
    options = parser.parse_args()
    rows = []
    for name in DISTRIBUTIONS:
        for planets in (1, 4, 10):
            steps = -(-POSITIONS // (planets + 1))
            speed = sequences_per_second(name, planets, steps, options.sequences, options.runs)
            rows.append({"distribution": name, "planets": planets, "steps": steps, "sequences_per_cpu_second": speed})
            print(f"{name:16} {planets:2} planets, {steps} steps: {speed:8,.0f} sequences per second", flush=True)
    if options.output:
        about = {
            "kind": "orbit simulator",
            "command": provenance.command("benchmarks/orbits.py"),
            "commit": provenance.commit(),
            "machine": provenance.machine(),
            "versions": provenance.versions(("numpy",)),
            "what": f"processor time of one core, median of {options.runs} runs of {options.sequences} sequences",
        }
        write({**about, "rows": rows}, options.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
