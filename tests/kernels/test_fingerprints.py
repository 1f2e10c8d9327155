"""Compiled kernels and launches match the recorded fingerprints of ``tests/kernel_fingerprints.py``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]


def compare(*words: str) -> str:
    """Run in a process without Triton's interpreter, which these tests may have enabled."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, str(TESTS / "kernel_fingerprints.py"), *words]
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-2000:]
    return run.stdout


@pytest.mark.parametrize(
    "words",
    [("decode D64 bfloat16 LSSA",)]
    + [
        pytest.param((f"{room} D{d}",), marks=pytest.mark.slow)
        for room in ("hopper", "triton", "decode")
        for d in (64, 128)
    ],
    ids="".join,
)
def test_kernels_match_recorded_fingerprints(words: tuple[str, ...]) -> None:
    triton = pytest.importorskip("triton")
    recorded = json.loads((TESTS / "kernels" / "fingerprints.json").read_text())["triton"]
    if triton.__version__ != recorded:
        pytest.skip(f"recorded with triton {recorded}, this is {triton.__version__}")
    assert "cases as recorded" in compare(*words)


NAMES = """
from kernel_fingerprints import instructions
head = ".file 1 \\"a.py\\"\\n.visible .entry kernel(\\n.param .u64 kernel_param_0\\n)\\n"
one = head + "{\\n.loc 1 2 3 // a.py:2\\nadd.s32 %r1, %r2, 1;\\n}"
two = one.replace("kernel", "moved").replace("a.py", "b.py").replace(".loc 1 2 3", ".loc 1 9 9")
assert instructions(one) == instructions(two)
assert instructions(one) != instructions(one.replace("%r2, 1", "%r2, 2"))
assert "add.s32" in instructions(one)
"""


def test_names_and_lines_do_not_matter() -> None:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    run = subprocess.run([sys.executable, "-c", NAMES], env=environment, cwd=TESTS, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
