"""experiments/stability.py trains, measures, and skips finished runs."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

from experiments import stability
from softplus_attention.data import prepare


def test_trains_once(tmp_path: Path) -> None:
    text = " ".join(f"The {n}th line of a long story, told to {n * n} people." for n in range(300))
    (tmp_path / "train.txt").write_text(text)
    prepare([tmp_path / "train.txt"], tmp_path / "data", tokenizer="bytes", validation_fraction=0)
    command = [str(tmp_path / "data"), "--size", "smoke", "--output", str(tmp_path / "out")]
    command += ["--runs", str(tmp_path / "runs"), "--precisions", "fp32", "--rates", "1e-3", "1e4"]
    command += ["--arms", "softmax", "lssar-p15"]
    assert stability.main(command) == 0
    # Called as a script, it skips the finished runs.
    program = [sys.executable, str(Path(stability.__file__))]
    again = subprocess.run([*program, *command], capture_output=True, text=True, timeout=300)
    assert again.returncode == 0, again.stderr
    assert again.stdout.count("already finished") == 4
    found = {path.stem: json.loads(path.read_text()) for path in (tmp_path / "out").glob("*.json")}
    usual, high = (found[f"smoke-softmax-fp32-{rate}-seed0"] for rate in ("0.001", "10000"))
    assert 5 < usual["losses"][-1][1] < 6
    assert usual["stopped"] is None
    assert high["stopped"] or high["largest_score"] > 1000 * usual["largest_score"]
    # The scores are cosines times log d times log N, which bounds them for any weights.
    bound = math.log(16) * math.log(64)
    assert 0.5 * bound < found["smoke-lssar-p15-fp32-0.001-seed0"]["largest_score"] <= bound * 1.001
