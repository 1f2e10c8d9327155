"""What a command says where a package that it needs is not installed."""

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
    ("arguments", "status", "words"),
    [
        (["info"], 0, "torch"),
        (["--version"], 0, softplus_attention.__version__),
        (["train", "--help"], 0, "--preset"),
        (["generate", "--help"], 0, "--prompt"),
        (
            ["generate", "--model", "x", "--prompt", "y"],
            2,
            "`generate` needs transformers: pip install 'softplus-attention[",
        ),
        (["evaluate", "lengths", "x", "--text", "y"], 2, "`evaluate` needs "),
        (["data", "prepare", "builtin", "--output", "x", "--tokenizer", "bytes"], 2, "`data` needs "),
        (["demo"], 2, "`demo` needs transformers: pip install 'softplus-attention["),
    ],
)
def test_with_torch_alone(arguments: list[str], status: int, words: str, tmp_path: Path) -> None:
    """What needs more says which extra has it."""
    code = BARE.format(names=NOT_TORCH, arguments=arguments)
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert found.returncode == status, found.stderr
    assert words in (found.stdout if status == 0 else found.stderr)
    assert "Traceback" not in found.stderr


@pytest.mark.parametrize(
    ("missing", "arguments", "words"),
    [
        ("matplotlib", ["demo"], "`demo` needs matplotlib: pip install 'softplus-attention[plots]'"),
        (
            "pyoperon",
            ["newton", "--preset", "cpu"],
            "`newton` needs pyoperon: pip install 'softplus-attention[physics]'",
        ),
        (
            "entmax",
            [
                "train",
                "--preset",
                "tiny",
                "--data",
                "data",
                "--output",
                "run",
                "--attention",
                "entmax",
                "--evaluate-every",
                "0",
            ],
            "`train` needs entmax: pip install 'softplus-attention[baselines]'",
        ),
    ],
)
def test_one_package_is_missing(missing: str, arguments: list[str], words: str, tmp_path: Path) -> None:
    """Said at once, not after minutes of work."""
    if arguments[0] == "train":
        prepare = ["data", "prepare", "builtin", "--output", "data", "--tokenizer", "bytes"]
        subprocess.run([sys.executable, "-m", "softplus_attention", *prepare], check=True, cwd=tmp_path, timeout=120)
    code = BARE.format(names=[missing], arguments=arguments)
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert found.returncode == 2, found.stderr
    assert words in found.stderr
    assert "Traceback" not in found.stderr
    assert not (tmp_path / "demo" / "runs").exists()
