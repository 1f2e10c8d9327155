"""Compiled kernels and launches match the recorded fingerprints of ``tests/kernel_fingerprints.py``."""

from __future__ import annotations

import json

import pytest
from helpers import ROOT, run_compiled

TESTS = ROOT / "tests"
SLOW = [f"{room} D{d}" for room in ("hopper", "triton", "decode") for d in (64, 128)]


@pytest.mark.parametrize(
    "cases", ["decode D64 bfloat16 LSSA", *(pytest.param(x, marks=pytest.mark.slow) for x in SLOW)]
)
def test_kernels_match_recorded_fingerprints(cases: str) -> None:
    triton = pytest.importorskip("triton")
    recorded = json.loads((TESTS / "kernels" / "fingerprints.json").read_text())["triton"]
    if triton.__version__ != recorded:
        pytest.skip(f"recorded with triton {recorded}, this is {triton.__version__}")
    assert "cases as recorded" in run_compiled(str(TESTS / "kernel_fingerprints.py"), cases)


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
    run_compiled("-c", NAMES, python_path=("src", "tests"))
