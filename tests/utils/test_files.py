"""Atomic writes, appended lines and CSV."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from softplus_attention.utils.files import append_line, csv_text, replacing, write_json, write_whole


def test_replaces_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    write_whole(path, "old\n")
    write_whole(path, "newer: ü\n")
    assert path.read_bytes() == "newer: ü\n".encode()
    assert os.listdir(tmp_path) == ["notes.txt"]


def test_json(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", {"name": "Röntgen", "loss": [1.5, None]})
    text = (tmp_path / "a.json").read_text(encoding="utf-8")
    assert "Röntgen" in text
    assert json.loads(text) == {"name": "Röntgen", "loss": [1.5, None]}


def test_error_keeps_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    write_whole(path, "old\n")

    def fail_while_writing() -> None:
        with replacing(path) as file:
            file.write(b"half of the n")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail_while_writing()
    assert path.read_text() == "old\n"
    assert os.listdir(tmp_path) == ["notes.txt"]


def test_kill_keeps_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    write_whole(path, "old\n")
    program = (
        "import os, signal, sys; from pathlib import Path; from softplus_attention.utils.files import replacing\n"
        "with replacing(Path(sys.argv[1])) as file:\n"
        "    file.write(b'half of the n'); file.flush(); os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(path)])
    assert done.returncode == -signal.SIGKILL
    assert path.read_text() == "old\n"


def test_links_are_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a link at the name nor one planted at the temporary name is followed."""
    outside = tmp_path / "outside"
    outside.write_text("mine")
    path = tmp_path / "notes.txt"
    path.symlink_to(outside)
    write_whole(path, "new\n")
    assert (path.read_text(), path.is_symlink(), outside.read_text()) == ("new\n", False, "mine")
    monkeypatch.setattr("secrets.token_hex", lambda _: "guessed")
    (tmp_path / "notes.txt.guessed.tmp").symlink_to(outside)
    with pytest.raises(FileExistsError):
        write_whole(path, "newer\n")
    assert (path.read_text(), outside.read_text()) == ("new\n", "mine")


@pytest.mark.parametrize("kind", ["link", "fifo"])
def test_append_to_regular_files_only(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "log"
    append_line(path, "one")
    append_line(path, "two")
    assert path.read_text() == "one\ntwo\n"
    other = tmp_path / "other"
    other.symlink_to(path) if kind == "link" else os.mkfifo(other)
    with pytest.raises(OSError, match=r"Too many levels|No such device"):
        append_line(other, "three")
    assert path.read_text() == "one\ntwo\n"


def test_csv_has_no_formulas() -> None:
    rows = [["=1+1", -0.5, "-0.5"], ["@x", None, "\x1b[31mred"], ["\ttab", "+1e5", "\rreturn"]]
    assert csv_text(["-a", "b"], rows) == ("'-a,b\n'=1+1,-0.5,-0.5\n'@x,,\ufffd[31mred\n'\ttab,+1e5,'\ufffdreturn\n")
