"""The optional C++ kernels: building, loading, selection, and errors."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import randn, run

from softplus_attention import PowerByLength, softplus_attention
from softplus_attention.cli import main
from softplus_attention.kernels.cpu import chunked, native
from softplus_attention.kernels.cpu.native import build

COMMAND = [sys.executable, "-m", "softplus_attention"]


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(native, "_found", None)
    monkeypatch.setattr(build, "library_path", build.library_path.__wrapped__)
    return tmp_path


def test_loads_and_reports_instruction_set(native_library: Path) -> None:
    with native.using("native") as found:
        assert found.ops is not None
        assert str(native_library) in found.reason
        assert found.ops.instructions() in found.reason
        assert native.status() is found


def test_torch_on_request(native_library: Path) -> None:
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


def test_damaged_library_is_reported(empty_cache: Path) -> None:
    path = build.library_path()
    path.parent.mkdir(parents=True)
    path.write_bytes(b"no library")
    with pytest.warns(UserWarning, match="cannot be loaded"):
        assert native.find("auto").ops is None
    with pytest.raises(RuntimeError, match="cannot be loaded"):
        native.find("native")


def test_library_writable_by_others_is_not_loaded(empty_cache: Path) -> None:
    """Its path is predictable: whoever can write the file could run code here."""
    path = build.library_path()
    path.parent.mkdir(parents=True)
    path.write_bytes(b"no library")
    path.chmod(0o666)
    with pytest.raises(RuntimeError, match="other users can write to"):
        native.find("native")


def test_without_a_compiler(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for program, reason in {"no-such-compiler": "no C++ compiler: no-such-compiler", "false": "false failed"}.items():
        monkeypatch.setenv("CXX", program)
        assert main(["build"]) == 1
        stderr = capsys.readouterr().err
        assert reason in stderr
        assert stderr.count("\n") == 1
    assert not list(empty_cache.rglob("*.so"))


def test_info_names_cpu_kernels(
    native_library: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for mode, line in {"torch": "PyTorch operations (SOFTPLUS_ATTENTION_CPU=torch)", "native": "C++ ("}.items():
        monkeypatch.setenv(native.VARIABLE, mode)
        monkeypatch.setattr(native, "_found", None)
        assert main(["info"]) == 0
        assert f"CPU kernels        {line}" in capsys.readouterr().out


# Calls that the kernels compute themselves, and calls that they leave to PyTorch operations.
NATIVE: dict[str, dict[str, Any]] = {
    "p15": {},
    "lssa": {"power": None},
    "real": {"power": 2.5},
    "rows": {"power": torch.linspace(1, 15, 4)},
    "by-length": {"power": PowerByLength(3, 1, 4)},
    "window": {"window": 5},
    "no-offset": {"offset": False},
    "zero-vectors": {"k": torch.zeros(1, 2, 70, 17)},
    "unseen": {
        "k": torch.cat([randn(1, 2, 50, 17, seed=2), torch.full((1, 2, 20, 17), torch.nan)], 2).expand(2, -1, -1, -1),
        "q": randn(2, 4, 70, 17, seed=1).masked_fill(torch.arange(70)[:, None] < 5, torch.nan),
        "v": randn(2, 2, 70, 17, seed=3),
        "key_start": torch.where(torch.arange(70) < 5, 70, 0)[None],
        "key_end": torch.tensor([[50], [30]]).expand(2, 70),
    },
    "ranges": {"is_causal": False, "key_start": torch.arange(70)[None] // 20 * 20},
}
FALLBACK = {
    "mask": {"attn_mask": torch.ones(70, 70, dtype=torch.bool).tril()},
    "nan": {"k": torch.full((1, 2, 70, 17), torch.nan)},
    "infinite": {"v": torch.full((1, 2, 70, 17), torch.inf)},
    "far-too-long": {"q": torch.full((1, 4, 70, 17), 1e30)},
    "far-too-short": {"k": torch.full((1, 2, 70, 17), 1e-36)},
    "steep": {"power": 1e6},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", [*NATIVE, *FALLBACK])
def test_which_calls_run_natively(
    name: str, dtype: torch.dtype, native_library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = {"q": randn(1, 4, 70, 17, seed=1), "k": randn(1, 2, 70, 17, seed=2), "v": randn(1, 2, 70, 17, seed=3)}
    call |= {"is_causal": True} | NATIVE.get(name, {}) | FALLBACK.get(name, {})
    for x in "qkv":
        call[x] = call[x].to(dtype).clone().requires_grad_()
    if dtype == torch.float16 and name in ("far-too-long", "far-too-short"):
        pytest.skip("float16 does not hold such numbers")
    tiled: list[str] = []
    for direction in ("forward", "backward"):
        whole = getattr(chunked, direction)
        record = lambda *given, direction=direction, whole=whole: (tiled.append(direction), whole(*given))[1]  # noqa: E731
        monkeypatch.setattr(chunked, direction, record)
    with native.using("native"):
        softplus_attention(**call, enable_gqa=True, impl="chunked").sum().backward()
    if name in NATIVE:
        assert all(call[x].grad.isfinite().all() for x in "qkv")
    assert tiled == ([] if name in NATIVE else ["forward", "backward"])


@pytest.mark.parametrize("kv_heads", [1, 3, 8])
def test_any_number_of_threads_and_heads(kv_heads: int, native_library: Path) -> None:
    """With few key heads several threads share a head; the order of summation stays the same."""
    given = [randn(1, n, 300, 20, seed=n, dtype=torch.float32) for n in (2 * kv_heads, kv_heads, kv_heads)]
    power = torch.linspace(2, 15, 2 * kv_heads)
    grad_out, options = randn(1, 2 * kv_heads, 300, 20, seed=9), {"is_causal": True, "enable_gqa": True}
    results = []
    for mode, threads in (("torch", 1), ("native", 1), ("native", 2), ("native", 5)):
        torch.set_num_threads(threads)
        with native.using(mode):
            found = run(softplus_attention, *given, impl="chunked", grad_out=grad_out, power=power, **options)
        results.append(found)
    torch.set_num_threads(1)
    for name, x in results[1].items():
        torch.testing.assert_close(x, results[0][name], rtol=1e-3, atol=1e-4 * float(x.abs().max()))
        assert all(torch.equal(x, other[name]) for other in results[2:]), name


@pytest.mark.slow
def test_two_processes_build_at_once(tmp_path: Path) -> None:
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path), native.VARIABLE: "native"}
    both = [subprocess.Popen([*COMMAND, "build"], env=environment, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert [process.wait(300) for process in both] == [0, 0]
    assert all("loaded: " in process.stdout.read() for process in both if process.stdout)
    (library,) = tmp_path.rglob("*.so")
    assert [path.name for path in library.parent.iterdir()] == ["native.so"], "temporary files remain"
    subprocess.run([*COMMAND, "build", "--remove"], env=environment, check=True, capture_output=True)
    assert not list(tmp_path.rglob("*.so"))
