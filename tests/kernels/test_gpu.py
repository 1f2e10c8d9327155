"""The checks of gpu_checks.py as tests."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import gpu_checks
import gpu_inputs
import pytest
import torch

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.gpu
@pytest.mark.parametrize("name", gpu_checks.CHECKS)
def test_on_gpu(name: str) -> None:
    """In its own process, since a check may corrupt the CUDA context, and some count the kernels compiled in it."""
    command = [sys.executable, str(Path(gpu_checks.__file__)), "--here", name]
    done = subprocess.run(command, capture_output=True, text=True, timeout=gpu_checks.TIMEOUT_SECONDS)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter needs CPU tensors")
@pytest.mark.parametrize(
    "name", ["compile decode", "opcheck causal", "one above a crowd float16", "value without weight float32 D64"]
)
def test_in_the_interpreter(name: str) -> None:
    """Checks that are small without a GPU."""
    assert gpu_checks.CHECKS[name]()


class TestRunner:
    def test_failures_are_reported(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        def fails() -> str:
            raise AssertionError("first line\n\nsecond line")

        monkeypatch.setitem(gpu_checks.CHECKS, "fails", fails)
        monkeypatch.setitem(gpu_checks.CHECKS, "passes", lambda: "7 of 7")
        assert not gpu_checks.run_here("fails")
        assert gpu_checks.run_here("passes")
        lines = capsys.readouterr().out.splitlines()
        assert lines[0].startswith("FAIL fails: AssertionError: first line second line (")
        assert lines[1].startswith("PASS passes: 7 of 7 (")

    def test_words_select_checks(self) -> None:
        assert gpu_checks.select(["graph", "packed"]) == ["graph packed"]
        assert gpu_checks.select([]) == list(gpu_checks.CHECKS)
        assert not gpu_checks.select(["no such check"])

    def test_needs_no_pytest(self) -> None:
        code = "import gpu_checks, sys; assert not {'pytest', 'hypothesis'} & set(sys.modules)"
        path = str(Path(gpu_checks.__file__).parent)
        done = subprocess.run([sys.executable, "-c", code], cwd=path, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


class TestComparison:
    def test_detects_one_bit(self) -> None:
        x = torch.ones(5)
        gpu_inputs.assert_same([x], [x.clone()])
        y = x.clone()
        y[3] = torch.nextafter(y[3], torch.tensor(2.0))
        with pytest.raises(AssertionError, match="1 of 5 differ"):
            gpu_inputs.assert_same([x], [y])

    def test_rejects_nan(self) -> None:
        x = torch.tensor([1.0, torch.nan])
        with pytest.raises(AssertionError, match="not finite"):
            gpu_inputs.assert_same([x], [x])

    def test_control_must_fail(self) -> None:
        with pytest.raises(AssertionError, match="went unnoticed"):
            gpu_inputs.assert_raises(lambda: None, "went unnoticed")
