"""The commit and command recorded in result files."""

from __future__ import annotations

import subprocess
import tomllib
from pathlib import Path

import pytest

from softplus_attention.utils import DOCS, provenance

ROOT = Path(__file__).parents[2]


def test_command_has_no_absolute_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    argv = ["/home/me/tool.py", "--output", "/tmp/of mine/x.json", "--data", "corpus/train", "--steps", "3"]
    monkeypatch.setattr("sys.argv", argv)
    expected = "python benchmarks/tool.py --output x.json --data corpus/train --steps 3"
    assert provenance.command("benchmarks/tool.py") == expected


def test_no_commit_of_another_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package installed inside the repository of another project does not report that commit."""
    installed = tmp_path / "environment" / "provenance.py"
    installed.parent.mkdir()
    installed.touch()
    (tmp_path / "theirs.py").touch()
    identity = ["-c", "user.name=x", "-c", "user.email=x@example.org"]
    for arguments in (["init", "-q"], ["add", "theirs.py"], [*identity, "commit", "-q", "-m", "theirs"]):
        subprocess.run(["git", *arguments], cwd=tmp_path, check=True)
    monkeypatch.setattr(provenance, "__file__", str(installed))
    assert provenance.commit() == "unknown"
    subprocess.run(["git", "add", "environment"], cwd=tmp_path, check=True)
    assert len(provenance.commit().removesuffix("-dirty")) == 40


def test_docs_url() -> None:
    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]["Documentation"] == DOCS
