"""A bar in terminals and notebooks, plain lines elsewhere."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import termios
import types

import pytest

from softplus_attention.utils.progress import Progress, format_duration

COUNTS = """
import sys
from softplus_attention.utils.progress import Progress
with Progress("loss", total=4, unit="step", seconds=0) as progress:
    for step in range(1, 5):
        progress.update(f"at {step}" if step % 2 == 0 else "", done=step)
    progress.say("kept")
"""
TEXTS = """
from softplus_attention.utils.progress import Progress
with Progress() as progress:
    progress.update("lssar: running")
    progress.say("\\x1b[31mkept")
"""


def terminal_output(program: str) -> str:
    """What a program writes to stderr if that is a terminal."""
    leader, follower = pty.openpty()
    termios.tcsetwinsize(follower, (24, 100))
    process = subprocess.Popen([sys.executable, "-c", program], stderr=follower)
    os.close(follower)
    output = b""
    try:
        while part := os.read(leader, 4096):
            output += part
    except OSError:  # how Linux signals the end of a terminal
        pass
    assert process.wait() == 0
    os.close(leader)
    return output.decode()


def test_bar_in_a_terminal() -> None:
    shown = terminal_output(COUNTS)
    assert "4/4" in shown
    assert "100%" in shown
    assert "at 4" in shown
    assert "kept\r\n" in shown


def test_text_in_a_terminal_is_cleared() -> None:
    shown = terminal_output(TEXTS)
    assert "\rlssar: running" in shown
    assert "\ufffd[31mkept\r\n" in shown
    assert "\x1b[31m" not in shown
    assert shown.rstrip(" ").endswith("\r")


def test_plain_lines_elsewhere(capfd: pytest.CaptureFixture[str]) -> None:
    exec(COUNTS)
    lines = capfd.readouterr().err.splitlines()
    expected = [["loss: step 2/4", "at 2"], ["loss: step 4/4", "at 4"], ["kept"]]
    assert [line.split("  ")[:2] for line in lines] == expected
    assert lines[0].endswith(" left")


def test_plain_lines_are_rate_limited(capfd: pytest.CaptureFixture[str]) -> None:
    progress = Progress("read", total=10)
    for done in range(1, 11):
        progress.update(done=done)
    Progress().update("too early")
    assert capfd.readouterr().err == "read: 100%  0:00:00 left\n"


def test_bar_in_a_notebook(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    ipython = types.ModuleType("IPython")
    ipython.get_ipython = lambda: types.SimpleNamespace(kernel=1, config={})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    with Progress("read", total=2) as progress:
        progress.update(done=2)
    assert "2.00/2.00" in capfd.readouterr().err


def test_without_tqdm_plain_lines(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setitem(sys.modules, "tqdm", None)
    with Progress("read", total=2) as progress:
        progress.update(done=2)
    assert capfd.readouterr().err.startswith("read: 100%")


def test_duration() -> None:
    assert [format_duration(x) for x in (0.4, 61, 7322)] == ["0:00:00", "0:01:01", "2:02:02"]
