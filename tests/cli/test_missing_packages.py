"""Errors of commands that need a package that is not installed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import softplus_attention

BARE = """
import sys
for name in {names}:
    sys.modules[name] = None  # as if it were not installed
from softplus_attention.cli import main
sys.exit(main({arguments}))
"""
NOT_TORCH = ["numpy", "transformers", "huggingface_hub", "tokenizers", "accelerate", "safetensors", "matplotlib"]


@pytest.mark.parametrize(
    ("command", "status", "message"),
    [
        ("info", 0, "torch"),
        ("--version", 0, softplus_attention.__version__),
        ("train --help", 0, "--preset"),
        ("generate --help", 0, "--prompt"),
        ("generate --model x --prompt y", 2, "`generate` needs transformers: pip install 'softplus-attention["),
        ("evaluate lengths x --text y", 2, "`evaluate` needs "),
        ("data prepare builtin --output x --tokenizer bytes", 2, "`data` needs "),
        ("demo", 2, "`demo` needs transformers: pip install 'softplus-attention["),
    ],
)
def test_only_torch_installed(command: str, status: int, message: str, tmp_path: Path) -> None:
    assert message in run_without(NOT_TORCH, command, status, tmp_path)


@pytest.mark.parametrize(
    ("missing", "command", "extra"),
    [
        ("matplotlib", "demo", "plots"),
        ("pyoperon", "newton --preset cpu", "physics"),
        ("entmax", "train --preset tiny --data data --output run --attention entmax --evaluate-every 0", "baselines"),
    ],
)
def test_one_package_missing(missing: str, command: str, extra: str, tmp_path: Path) -> None:
    """Reported before minutes of work."""
    name = command.partition(" ")[0]
    if name == "train":
        prepare = ["data", "prepare", "builtin", "--output", "data", "--tokenizer", "bytes"]
        subprocess.run([sys.executable, "-m", "softplus_attention", *prepare], check=True, cwd=tmp_path, timeout=120)
    error = run_without([missing], command, 2, tmp_path)
    assert f"`{name}` needs {missing}: pip install 'softplus-attention[{extra}]'" in error
    assert not (tmp_path / "demo" / "runs").exists()


def run_without(packages: list[str], command: str, status: int, folder: Path) -> str:
    """The command's output, or its error message if ``status`` is not 0."""
    code = BARE.format(names=packages, arguments=command.split())
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, cwd=folder)
    assert done.returncode == status, done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr if status else done.stdout
