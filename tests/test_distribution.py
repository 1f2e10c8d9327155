"""The distributions for PyPI: contents, size, metadata, and the workflows that build them."""

from __future__ import annotations

import email
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email.message import Message
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
import yaml

import softplus_attention

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
BUILT_IN_TEXT = "softplus_attention/data/builtin/text.jsonl.xz"  # 2.2 MB compressed


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "--directory", str(folder)]
    subprocess.run(command, check=True, cwd=ROOT, capture_output=True, timeout=120)
    return folder


@pytest.fixture(scope="module")
def wheel(built: Path) -> dict[str, int]:
    """Compressed bytes by name."""
    (path,) = built.glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        return {entry.filename: entry.compress_size for entry in archive.infolist()}


@pytest.fixture(scope="module")
def metadata(built: Path) -> Message:
    (path,) = built.glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("METADATA"))
        return email.message_from_bytes(archive.read(name))


def tracked(folder: str) -> set[str]:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", folder],
        check=True, cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    return {name for name in listed.stdout.split() if (ROOT / name).exists()}


def test_wheel_contains_only_the_package(wheel: dict[str, int]) -> None:
    names = {name for name in wheel if ".dist-info/" not in name}
    assert names == {name.removeprefix("src/") for name in tracked("src")}
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in wheel)


def test_sdist_builds_the_same_wheel(built: Path, wheel: dict[str, int], tmp_path: Path) -> None:
    (path,) = built.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        archive.extractall(tmp_path, filter="data")
    (source,) = tmp_path.iterdir()
    outside = {name.name for name in source.iterdir()}
    assert outside == {
        ".gitignore", "CHANGELOG.md", "CITATION.cff", "LICENSE", "PKG-INFO", "README.md", "pyproject.toml", "src",
    }  # fmt: skip
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(tmp_path / "again")]
    subprocess.run(command, check=True, cwd=source, capture_output=True, timeout=120)
    (again,) = (tmp_path / "again").iterdir()
    with zipfile.ZipFile(again) as archive:
        assert set(archive.namelist()) == wheel.keys()


def test_both_are_small(built: Path, wheel: dict[str, int]) -> None:
    """Below 1 MB without the built-in text, below 3.5 MB with it."""
    assert sum(wheel.values()) - wheel[BUILT_IN_TEXT] < 1e6
    text = (ROOT / "src" / BUILT_IN_TEXT).stat().st_size
    for path in built.iterdir():
        assert path.stat().st_size - text < 1e6, path.name
        assert path.stat().st_size < 3.5e6, path.name


def test_metadata(metadata: Message) -> None:
    assert metadata["Name"] == "softplus-attention"
    assert metadata["Version"] == softplus_attention.__version__
    assert metadata["Requires-Python"] == ">=3.11"
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert [x for x in metadata.get_all("Requires-Dist", []) if "extra ==" not in x] == ["torch>=2.11"]
    links = dict(entry.split(", ", 1) for entry in metadata.get_all("Project-URL", []))
    assert links.keys() >= {"Homepage", "Source", "Documentation", "Changelog", "Issues", "Paper"}


def test_citation_agrees() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == softplus_attention.__version__
    assert citation["license"] == PROJECT["license"]
    assert citation["repository-code"] == PROJECT["urls"]["Source"]
    assert citation["preferred-citation"]["url"] == PROJECT["urls"]["Paper"]
    bibtex = (ROOT / "docs" / "citing.md").read_text()
    assert citation["preferred-citation"]["title"] in bibtex
    assert citation["title"] in bibtex


def workflow(name: str) -> dict[str, Any]:
    return yaml.safe_load((ROOT / ".github" / "workflows" / f"{name}.yml").read_text())


def test_workflows_run_what_exists() -> None:
    """Every Python version in pyproject is tested; the `make` targets and test paths exist."""
    jobs = workflow("tests")["jobs"]
    named = [line.rsplit(" ", 1)[1] for line in PROJECT["classifiers"] if "Python :: 3." in line]
    assert jobs["tests"]["strategy"]["matrix"]["python"] == named
    commands = " ".join(step.get("run", "") for job in jobs.values() for step in job["steps"])
    targets = {word for before, word in zip(commands.split(), commands.split()[1:], strict=False) if before == "make"}
    assert targets == {"lint", "test", "setup", "first-hour"}
    makefile = (ROOT / "Makefile").read_text()
    assert all(f"\n{target}:" in makefile for target in targets)
    assert all((ROOT / word).exists() for word in commands.split() if word.startswith("tests/"))
    (oldest,) = (step["run"] for step in jobs["transformers"]["steps"] if "oldest" in step.get("if", ""))
    floor = subprocess.run(
        ["bash", "-c", oldest.splitlines()[0] + "; echo $floor"], check=True, cwd=ROOT, capture_output=True, text=True
    )
    assert f"transformers>={floor.stdout.strip()}" in PROJECT["optional-dependencies"]["huggingface"]


def test_release_publishes_without_a_password() -> None:
    jobs = workflow("release")["jobs"]
    assert jobs["publish"]["needs"] == "build"
    assert jobs["publish"]["permissions"] == {"id-token": "write"}
    assert "password" not in str(jobs)


def test_pre_commit_runs_what_make_lint_runs() -> None:
    (repository,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    entries = " ".join(hook["entry"] for hook in repository["hooks"])
    rule = (ROOT / "Makefile").read_text().partition("\nlint:")[2].partition("\n\n")[0]
    tools = [PurePosixPath(line.split()[0]).name for line in rule.splitlines()[1:]]
    assert [tool for tool in ("ruff", "mypy") if tool not in entries] == []
    assert set(tools) == {"ruff", "mypy"}
