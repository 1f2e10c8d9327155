"""benchmarks/cpu.py, cpu_training.py and cpu_decode.py: quick runs and their output files."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import softplus_attention

ROOT = Path(__file__).parents[2]


def python(*arguments: str) -> str:
    result = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert result.returncode == 0, result.stderr
    return result.stdout


class TestBenchmark:
    def test_help(self) -> None:
        text = python("benchmarks/cpu.py", "--help")
        assert "--quick" in text
        assert "--output" in text

    def test_quick(self, tmp_path: Path, native_library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", str(native_library.parents[3]))
        output = tmp_path / "deep" / "cpu.json"
        table = python("benchmarks/cpu.py", "--quick", "--output", str(output), "--figure", str(tmp_path / "growth"))
        data = json.loads(output.read_text())
        assert data["command"].startswith(f"python benchmarks/cpu.py --quick --output {output.name}")
        for key in ("date", "commit", "machine", "versions", "kernels"):
            assert data[key], key
        assert data["machine"]["cores"] >= 1
        assert data["versions"]["torch"] == torch.__version__
        assert data["versions"]["softplus_attention"] == softplus_attention.__version__
        for row in data["time"]:
            for arm in ("native", "torch"):
                assert row[f"{arm}_ratio"] == pytest.approx(row[f"{arm}_ms"] / (row["pairs"] * row["sdpa_ms"]))
                assert f"{row[f'{arm}_ratio']:.2f}" in table
        assert {row["direction"] for row in data["time"]} == {"forward", "forward+backward"}
        assert {row["threads"] for row in data["time"]} == {1, 2}
        assert {row["implementation"] for row in data["memory"]} == {"native", "torch", "sdpa", "reference"}
        assert all(row["bytes"] >= 0 for row in data["memory"])
        assert [row["length"] for row in data["growth"]] == [64, 128]
        assert (tmp_path / "growth.svg").exists()

    def test_wrong_result_is_not_timed(
        self, native_library: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        """A copy of the program whose native LSSA computes something else."""
        monkeypatch.setenv("XDG_CACHE_HOME", str(native_library.parents[3]))
        changed = tmp_path / "benchmarks" / "cpu.py"
        changed.parent.mkdir()
        source = (ROOT / "benchmarks" / "cpu.py").read_text()
        changed.write_text(source.replace('"lssa": None', '"lssa": 1.001 if impl == "chunked" else None'))
        command = [sys.executable, str(changed), "--quick", "--output", str(tmp_path / "cpu.json")]
        result = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert result.returncode == 1
        assert "native, lssa" in result.stderr
        assert "wrong result" in result.stderr
        assert not (tmp_path / "cpu.json").exists()


@pytest.mark.slow
def test_whole_training_step(tmp_path: Path, native_library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(native_library.parents[3]))
    output = tmp_path / "deep" / "training.json"
    options = ["--tokens", "64", "--batch", "1", "--steps", "2", "--threads", "1", "--output", str(output)]
    table = python("benchmarks/cpu_training.py", *options)
    data = json.loads(output.read_text())
    assert [row["arm"] for row in data["rows"]] == ["softmax", "lssar", "lssar, PyTorch's operations"]
    for row in data["rows"]:
        stages = row["profile"]["stages"]
        assert 0 < row["profile"]["attention_ms"] < stages["forward"] + stages["backward"]
        assert f"{row['tokens_per_second']:,.0f}" in table


@pytest.mark.slow
def test_decode_steps(native_library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOFTPLUS_ATTENTION_CPU", "native")
    monkeypatch.setenv("XDG_CACHE_HOME", str(native_library.parents[3]))
    output = tmp_path / "deep" / "decode.json"
    table = python("benchmarks/cpu_decode.py", "--quick", "--output", str(output))
    data = json.loads(output.read_text())
    assert data["kernels"].startswith("C++")
    for row in data["rows"]:
        assert row["error"] <= row["limit"]
        assert 0 < row["read"] < 1
        assert row["lssar_bytes"] < row["softmax_bytes"]
        assert f"ratio {row['ratio']:.2f}" in table
