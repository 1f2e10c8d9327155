"""Folders of strangers, read and written by real processes: nothing outside them changes, and every command ends."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import report_results

# ---- results and reports


def command(*words: str, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "softplus_attention", *words], capture_output=True, text=True, timeout=timeout
    )


def plant(folder: Path, outside: Path, names: list[str]) -> dict[str, str]:
    """Links at the names to files outside, and what those files must still hold in the end."""
    outside.mkdir()
    folder.mkdir(exist_ok=True)
    for place, name in enumerate(names):
        target = outside / f"{place}.txt"
        target.write_text(f"mine {place}")
        (folder / name).symlink_to(target)
    return contents(outside)


def contents(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.iterdir()}


def test_figures_follow_no_links(tmp_path: Path) -> None:
    results = tmp_path / "results"
    for measure, name, found in (
        ("lengths", "=a", report_results.lengths(0)),
        ("passkey", "\x1bb", report_results.passkey(1)),
    ):
        report_results.write(results, {f"{measure}--a.json": report_results.frame(measure, name, found)})
    names = [f"{name}.{end}" for name in ("lengths", "passkey") for end in ("csv", "png", "svg")]
    before = plant(results, tmp_path / "outside", [*names, "lengths-positions.csv"])
    done = command("evaluate", "figures", str(results))
    assert done.returncode == 0, done.stderr
    assert contents(tmp_path / "outside") == before
    for name in (*names, "lengths-positions.csv"):
        assert (results / name).is_file()
        assert not (results / name).is_symlink()
    assert "'=a,lssar,128," in (results / "lengths.csv").read_text()
    assert "\x1b" not in (results / "passkey.csv").read_text()


def test_report_follows_no_links(tmp_path: Path) -> None:
    results = tmp_path / "results"
    one = report_results.frame("downstream", "a", report_results.downstream())
    report_results.write(results, {"downstream--a.json": one, "demo.json": report_results.demo()})
    assert command("report", str(results), "--output", str(tmp_path / "elsewhere.html")).returncode == 0
    names = [path.name for path in (tmp_path / "elsewhere-files").iterdir()]
    assert len(names) == 5
    before = plant(results / "report-files", tmp_path / "outside", names)
    (tmp_path / "outside" / "page").write_text("Made by softplus-attention, once")
    (results / "report.html").symlink_to(tmp_path / "outside" / "page")
    before["page"] = "Made by softplus-attention, once"
    done = command("report", str(results))
    assert done.returncode == 0, done.stderr
    assert contents(tmp_path / "outside") == before
    assert not [path for path in results.rglob("*") if path.is_symlink()]


def test_report_refuses_a_linked_folder(tmp_path: Path) -> None:
    report_results.write(tmp_path / "results", {"demo.json": report_results.demo()})
    (tmp_path / "outside").mkdir()
    (tmp_path / "results" / "report-files").symlink_to(tmp_path / "outside")
    done = command("report", str(tmp_path / "results"))
    assert done.returncode == 2
    assert "report-files" in done.stderr
    assert contents(tmp_path / "outside") == {}


def test_report_reads_regular_files_only(tmp_path: Path) -> None:
    """FIFOs and links to devices, in place of results and of all else that a report reads."""
    more = {"demo.json": report_results.demo(), "newton.json": report_results.newton(), "run.json": {}}
    report_results.write(tmp_path, more | {"run.json": report_results.training()})
    os.mkfifo(tmp_path / "lengths--fifo.json")
    (tmp_path / "lengths--zero.json").symlink_to("/dev/zero")
    (tmp_path / "deep.json").write_text('{"a":' * 100 + "1" + "}" * 100)
    with (tmp_path / "large.json").open("wb") as file:
        file.truncate(1 << 30)
    (tmp_path / "lists.json").write_text("[" + "[]," * 3_000_000 + "1]")
    for name in ("metrics.jsonl", "a.png"):
        os.mkfifo(tmp_path / name)
    (tmp_path / "report-files").mkdir()
    os.mkfifo(tmp_path / "report-files" / ".drawn")
    done = command("report", str(tmp_path), timeout=60)
    assert done.returncode == 0, done.stderr
    for line in (
        "lengths--fifo.json: not a regular file",
        "lengths--zero.json: not a regular file",
        "deep.json: JSON nested deeper than 64 levels",
        "large.json: larger than 128 MiB",
        "lists.json: JSON of more than 2000000 lists and objects",
        "run.json: a result of kind training, but metrics.jsonl: not a regular file",
    ):
        assert f"not shown: {line}" in done.stderr
    assert "2 result files" in done.stdout


def test_report_in_place_of_a_fifo(tmp_path: Path) -> None:
    report_results.write(tmp_path, {"demo.json": report_results.demo()})
    os.mkfifo(tmp_path / "report.html")
    done = command("report", str(tmp_path), timeout=60)
    assert done.returncode == 2
    assert "a report to replace" in done.stderr


@pytest.mark.parametrize("kind", ["fifo", "zero", "deep"])
def test_figures_read_regular_files_only(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "lengths--a.json"
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "zero":
        path.symlink_to("/dev/zero")
    else:
        path.write_text('{"a":' * 100_000)
    done = command("evaluate", "figures", str(tmp_path), timeout=60)
    assert done.returncode == 2
    assert ("not JSON" if kind == "deep" else "not a regular file") in done.stderr
    assert "Traceback" not in done.stderr
