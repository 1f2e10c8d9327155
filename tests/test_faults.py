"""Commands that are killed, run out of disk space, or run twice in one folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import faults
import mutations
import pytest
from commands import run
from extend_cases import write_llama
from faults import Job, Undisturbed
from training_runs import TINY, Run, text_folder

JOBS = ("train", "prepare", "evaluate", "report", "extend")
KILLS = 20


def training_result(folder: Path) -> Any:
    """The loss curve and the weights."""
    weights = {name: found for name, found in mutations.state_of(folder / "model").items() if "safetensors" in name}
    return Run(folder, {}).losses(), weights


def evaluation_result(folder: Path) -> Any:
    """All results except times."""
    results = json.loads(next(folder.glob("lengths--*.json")).read_text())
    assert results["complete"]
    for entry in results["results"]["lengths"]:
        entry.pop("seconds", None)
    return results["results"], results["settings"], results["model"], (folder / "lengths.csv").read_text()


def report_result(folder: Path) -> Any:
    """All figures and tables, without temporary files of a kill. The page differs: it names the folder."""
    assert (folder / "report.html").is_file()
    found = mutations.state_of(folder / "report-files")
    return {name: state for name, state in found.items() if not name.endswith(".tmp")}


def extension_result(folder: Path) -> Any:
    """The model, its heads and the measurements except times."""
    state = json.loads((folder / "extend.json").read_text())
    assert state["complete"]
    measured = {name: (own["loss"], own["needles"]) for name, own in state["measured"].items()}
    others = ("extend.json", "README.md", ".lock")
    files = {name: found for name, found in mutations.state_of(folder).items() if name not in others}
    return state["scores"], measured, files


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Job]:
    base = tmp_path_factory.mktemp("jobs")
    settings = {**TINY, "data": text_folder(base), "steps": 8, "save_every": 2, "keep": 2}
    model = Run(base / "run", {**settings, "steps": 2}).finish().output / "model"
    text = base / "long.txt"
    text.write_text("\n\n".join(f"line {n}: the cat sat on mat {n * 37 % 101}" for n in range(20_000)))
    lengths = ("--text", text, "--lengths", "1,2,4", "--sequences", 4)
    assert run("evaluate", "lengths", model, *lengths, "--output", base / "results").status == 0
    prepare = ("--tokenizer", "bytes", "--separator", r"\n\n", "--shard-tokens", 100_000, "--workers", 1)
    llama = write_llama(base / "llama")
    extend = ("--to", 512, "--heads", 1, "--prompts", 2, "--documents", 1, "--measure", 100, 800, "--text", text)
    for path in (base / "results").iterdir():
        if path.suffix != ".json":
            path.unlink()
    return {
        "train": Job("train", lambda out: ("train", *Run(out, settings).arguments([])), training_result, 20_000),
        "prepare": Job(
            "prepare", lambda out: ("data", "prepare", text, "--output", out, *prepare), mutations.state_of, 100_000
        ),
        "evaluate": Job(
            "evaluate", lambda out: ("evaluate", "lengths", model, *lengths, "--output", out), evaluation_result, 1000
        ),
        "report": Job("report", lambda out: ("report", out), report_result, 10_000, base / "results"),
        "extend": Job("extend", lambda out: ("extend", llama, "--output", out, *extend), extension_result, 60_000),
    }


@pytest.fixture(scope="module")
def undisturbed(jobs: dict[str, Job], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Undisturbed]:
    base = tmp_path_factory.mktemp("undisturbed")
    return {name: faults.undisturbed(job, base / name / "out") for name, job in jobs.items()}


@pytest.fixture(params=JOBS)
def case(
    request: pytest.FixtureRequest, jobs: dict[str, Job], undisturbed: dict[str, Undisturbed]
) -> tuple[Job, Undisturbed]:
    return jobs[request.param], undisturbed[request.param]


def test_killed_once(case: tuple[Job, Undisturbed], tmp_path: Path) -> None:
    faults.kill_often(*case, tmp_path / "out", 2)


def test_disk_is_full(case: tuple[Job, Undisturbed], tmp_path: Path) -> None:
    faults.fill_the_disk(*case, tmp_path / "out")


def test_two_processes_at_once(case: tuple[Job, Undisturbed], tmp_path: Path) -> None:
    faults.run_twice_at_once(*case, tmp_path / "out")


@pytest.mark.slow
def test_killed_often(case: tuple[Job, Undisturbed], tmp_path: Path) -> None:
    """One kill each in many folders, and many kills in one folder."""
    killed = [faults.kill_often(*case, tmp_path / str(seed), 1, seed) for seed in range(KILLS)]
    assert sum(killed) >= KILLS // 4, "most processes had ended before they were killed"
    faults.kill_often(*case, tmp_path / "out", KILLS)


@pytest.mark.slow
def test_small_disk(case: tuple[Job, Undisturbed], tmp_path: Path) -> None:
    sizes = {"train": 300_000, "prepare": 600_000, "evaluate": 4096, "report": 40_000, "extend": 160_000}
    faults.fill_a_small_disk(*case, tmp_path / "disk", sizes[case[0].name])
