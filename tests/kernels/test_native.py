"""The C++ kernels as an optional part: built on request, found, chosen, and never taken in silence."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from softplus_attention.cli import main
from softplus_attention.kernels.cpu import native
from softplus_attention.kernels.cpu.native import build

COMMAND = [sys.executable, "-m", "softplus_attention"]


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(native, "_found", None)
    monkeypatch.setattr(build, "library_path", build.library_path.__wrapped__)
    return tmp_path


def test_loads_and_names_its_instructions(native_library: Path) -> None:
    with native.using("native") as found:
        assert found.ops is not None
        assert str(native_library) in found.reason
        assert found.ops.instructions() in found.reason
        assert native.status() is found


def test_torch_is_taken_where_it_is_asked_for(native_library: Path) -> None:
    with native.using("torch") as found:
        assert found.ops is None


def test_without_a_build(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = native.find("auto")
    assert found.ops is None
    assert "softplus-attention build" in found.reason
    monkeypatch.setenv(native.VARIABLE, "native")
    with pytest.raises(RuntimeError, match="softplus-attention build"):
        native.status()
    monkeypatch.setenv(native.VARIABLE, "fast")
    with pytest.raises(ValueError, match="one of auto, torch, native, got 'fast'"):
        native.status()


def test_a_damaged_library_is_named(empty_cache: Path) -> None:
    path = build.library_path()
    path.parent.mkdir(parents=True)
    path.write_bytes(b"no library")
    with pytest.warns(UserWarning, match="cannot be loaded"):
        assert native.find("auto").ops is None
    with pytest.raises(RuntimeError, match="cannot be loaded"):
        native.find("native")


def test_a_library_of_others_is_not_loaded(empty_cache: Path) -> None:
    """It is code, at a place that is known: whoever could write it there could run it here."""
    path = build.library_path()
    path.parent.mkdir(parents=True)
    path.write_bytes(b"no library")
    path.chmod(0o666)
    with pytest.raises(RuntimeError, match="others than you can write"):
        native.find("native")


def test_without_a_compiler(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for program, reason in {"no-such-compiler": "no C++ compiler: no-such-compiler", "false": "false failed"}.items():
        monkeypatch.setenv("CXX", program)
        assert main(["build"]) == 1
        said = capsys.readouterr().err
        assert reason in said
        assert said.count("\n") == 1
    assert not list(empty_cache.rglob("*.so"))


def test_info_says_which_runs(
    native_library: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for mode, line in {"torch": "PyTorch operations (SOFTPLUS_ATTENTION_CPU=torch)", "native": "C++ ("}.items():
        monkeypatch.setenv(native.VARIABLE, mode)
        monkeypatch.setattr(native, "_found", None)
        assert main(["info"]) == 0
        assert f"CPU kernels        {line}" in capsys.readouterr().out


@pytest.mark.slow
def test_two_processes_build_at_once(tmp_path: Path) -> None:
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path), native.VARIABLE: "native"}
    both = [subprocess.Popen([*COMMAND, "build"], env=environment, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert [process.wait(300) for process in both] == [0, 0]
    assert all("loaded: " in process.stdout.read() for process in both if process.stdout)
    (library,) = tmp_path.rglob("*.so")
    assert [path.name for path in library.parent.iterdir()] == ["native.so"], "something temporary is left"
    subprocess.run([*COMMAND, "build", "--remove"], env=environment, check=True, capture_output=True)
    assert not list(tmp_path.rglob("*.so"))
