"""Untrusted result folders, reports and checkpoints: nothing outside them changes, and every command ends."""

from __future__ import annotations

import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import report_results
import torch
from commands import Process, refused, run, wait_until
from mutations import CreatesFile, place_special, seal
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save
from training_runs import TINY, Run, text_folder

# ---- results and reports


def plant(folder: Path, outside: Path, names: list[str]) -> dict[str, str]:
    """Creates links with these names to files outside, and returns the content of those files."""
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
    done = run("evaluate", "figures", str(results))
    assert done.status == 0, done.text
    assert contents(tmp_path / "outside") == before
    for name in (*names, "lengths-positions.csv"):
        assert (results / name).is_file()
        assert not (results / name).is_symlink()
    assert "'=a,lssar,128," in (results / "lengths.csv").read_text()
    assert "\x1b" not in (results / "passkey.csv").read_text()


def test_foreign_tables_are_kept(tmp_path: Path) -> None:
    """They are renamed once; our own tables are replaced from then on."""
    for measure, found in (("lengths", report_results.lengths(0)), ("maps", report_results.maps(True))):
        report_results.write(tmp_path, {f"{measure}--a.json": report_results.frame(measure, "a", found)})
        (tmp_path / f"{measure}.csv").write_text("mine\n")
    for _ in range(2):
        assert run("evaluate", "figures", tmp_path).status == 0
        assert sorted(path.name for path in tmp_path.glob("*.old*")) == ["lengths.csv.old", "maps.csv.old"]
        assert (tmp_path / "lengths.csv.old").read_text() == (tmp_path / "maps.csv.old").read_text() == "mine\n"
        assert (tmp_path / "lengths.csv").read_text().startswith("model,")


def test_foreign_passkey_data_is_kept(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("the cat sat on the mat. " * 400)
    (tmp_path / "passkey.jsonl").write_text("mine")
    words = ["evaluate", "passkey-data", "--text", tmp_path / "text.txt", "--output", tmp_path, "--documents", 3]
    for _ in range(2):
        assert "3 documents" in run(*words).text
        assert [path.read_text() for path in tmp_path.glob("*.old*")] == ["mine"]
    assert run(*words, "--seed", 1).status == 0
    assert len(list(tmp_path.glob("passkey.jsonl.old*"))) == 2


def test_report_follows_no_links(tmp_path: Path) -> None:
    results = tmp_path / "results"
    one = report_results.frame("downstream", "a", report_results.downstream())
    report_results.write(results, {"downstream--a.json": one, "demo.json": report_results.demo()})
    assert run("report", str(results), "--png", "--output", str(tmp_path / "elsewhere.html")).status == 0
    names = [path.name for path in (tmp_path / "elsewhere-files").iterdir()]
    assert len(names) == 9
    before = plant(results / "report-files", tmp_path / "outside", names)
    (tmp_path / "outside" / "page").write_text("Made by softplus-attention, once")
    (results / "report.html").symlink_to(tmp_path / "outside" / "page")
    before["page"] = "Made by softplus-attention, once"
    done = run("report", str(results), "--png")
    assert done.status == 0, done.text
    assert contents(tmp_path / "outside") == before
    assert not [path for path in results.rglob("*") if path.is_symlink()]


def test_report_refuses_a_linked_folder(tmp_path: Path) -> None:
    report_results.write(tmp_path / "results", {"demo.json": report_results.demo()})
    (tmp_path / "outside").mkdir()
    (tmp_path / "results" / "report-files").symlink_to(tmp_path / "outside")
    assert "report-files" in refused("report", tmp_path / "results")
    assert contents(tmp_path / "outside") == {}


def test_report_reads_regular_files_only(tmp_path: Path) -> None:
    """FIFOs, links to devices, and deep or large JSON in place of all files that a report reads."""
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
    done = run("report", str(tmp_path), seconds=60)
    assert done.status == 0, done.text
    for line in (
        "lengths--fifo.json: not a regular file",
        "lengths--zero.json: not a regular file",
        "deep.json: JSON nested deeper than 64 levels",
        "large.json: larger than 128 MiB",
        "lists.json: JSON with more than 2000000 lists and objects",
        "run.json: a result of kind training, but metrics.jsonl: not a regular file",
    ):
        assert f"not shown: {line}" in done.text
    assert "2 result files" in done.text


def test_report_in_place_of_a_fifo(tmp_path: Path) -> None:
    report_results.write(tmp_path, {"demo.json": report_results.demo()})
    os.mkfifo(tmp_path / "report.html")
    assert "a report to replace" in refused("report", tmp_path, seconds=60)


@pytest.mark.parametrize("kind", ["fifo", "device", "deep"])
def test_figures_read_regular_files_only(kind: str, tmp_path: Path) -> None:
    place_special(tmp_path / "lengths--a.json", kind)
    reason = "not JSON" if kind == "deep" else "not a regular file"
    assert reason in refused("evaluate", "figures", tmp_path, seconds=60)


# ---- checkpoints of a run


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run that was killed after its first checkpoint."""
    folder = tmp_path_factory.mktemp("stopped")
    run = Run(folder / "run", {**TINY, "data": text_folder(folder), "keep": 1, "steps": 12})
    run.kill_at("checkpoint-8", save_every=8)
    return run


def copy_of(run: Run, folder: Path) -> tuple[Run, Path]:
    shutil.copytree(run.output, folder / "run")
    return Run(folder / "run", run.settings), folder / "run" / "checkpoint-8"


def with_code(state: Path, mark: Path) -> None:
    (state / ".metadata").write_bytes(pickle.dumps(CreatesFile(mark)))


def with_code_in_an_entry(state: Path, mark: Path) -> None:
    metadata = pickle.loads((state / ".metadata").read_bytes())
    metadata.planner_data = CreatesFile(mark)
    (state / ".metadata").write_bytes(pickle.dumps(metadata))


def with_bytes_entry(state: Path, mark: Path) -> None:
    """torch would load entries other than tensors as arbitrary pickles."""
    shutil.rmtree(state)
    save({"model.x": torch.zeros(2), "extra": CreatesFile(mark)}, storage_writer=FileSystemWriter(state), no_dist=True)


def moved_to(file: str) -> Callable[[Path, Path], None]:
    def change(state: Path, mark: Path) -> None:
        metadata = pickle.loads((state / ".metadata").read_bytes())
        for place in metadata.storage_data.values():
            place.relative_path = file.format(outside=mark.parent)
        shutil.copy(state / "__0_0.distcp", mark.parent / "__0_0.distcp")
        (state / ".metadata").write_bytes(pickle.dumps(metadata))

    return change


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (with_code, "posix.system is not allowed in a tensor index"),
        (with_code_in_an_entry, "posix.system is not allowed in a tensor index"),
        (with_bytes_entry, "BytesStorageMetadata is not allowed in a tensor index"),
        (moved_to("../../../__0_0.distcp"), "is not a tensor file in this folder"),
        (moved_to("{outside}/__0_0.distcp"), "is not a tensor file in this folder"),
    ],
    ids=["code", "nested code", "not a tensor", "parent folder", "absolute path"],
)
def test_train_unpickles_nothing(
    stopped: Run, tmp_path: Path, change: Callable[[Path, Path], None], reason: str
) -> None:
    run, checkpoint = copy_of(stopped, tmp_path)
    change(checkpoint / "state", tmp_path / "mark")
    seal(checkpoint)
    before = {path: path.read_bytes() for path in run.output.rglob("*") if path.is_file()}
    output = run.fail(2)
    assert reason in output
    assert output.count("\n") == 1
    assert not (tmp_path / "mark").exists()
    assert before == {path: path.read_bytes() for path in run.output.rglob("*") if path.is_file()}


def test_train_rejects_altered_tensors(stopped: Run, tmp_path: Path) -> None:
    """A tensor file replaced by a pickle: torch's weights-only reader rejects it."""
    run, checkpoint = copy_of(stopped, tmp_path)
    file = checkpoint / "state" / "__0_0.distcp"
    file.write_bytes(pickle.dumps(CreatesFile(tmp_path / "mark")).ljust(file.stat().st_size, b"."))
    seal(checkpoint)
    assert "was not written by training" in run.fail(2)
    assert not (tmp_path / "mark").exists()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("trainer_state.json", b'{"global_step": 8, "mine": 1}'),
        ("trainer_state.json", b'{"global_step": 8, "log_history": 5}'),
        ("trainer_state.json", b"[" * 100_000),
        ("position.json", b"[]"),
        ("scheduler.pt", b"mine"),
        ("rng_state.pth", b"mine"),
    ],
    ids=["unknown field", "wrong type", "deep", "position", "scheduler", "random state"],
)
def test_train_names_foreign_files(stopped: Run, tmp_path: Path, name: str, content: bytes) -> None:
    run, checkpoint = copy_of(stopped, tmp_path)
    (checkpoint / name).write_bytes(content)
    seal(checkpoint)
    assert f"was not written by training: {name.partition('.')[0]}" in run.fail(2)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("empty", "manifest.json does not list state/.metadata"),
        ("extra file", "rng_state_1.pth is not listed in manifest.json"),
        ("link", "scheduler.pt is not a regular file"),
    ],
)
def test_manifest_lists_every_file(stopped: Run, tmp_path: Path, change: str, reason: str) -> None:
    run, checkpoint = copy_of(stopped, tmp_path)
    if change == "empty":
        (checkpoint / "manifest.json").write_text('{"files": {}}')
    elif change == "link":
        (checkpoint / "scheduler.pt").rename(tmp_path / "elsewhere")
        (checkpoint / "scheduler.pt").symlink_to(tmp_path / "elsewhere")
    else:
        (checkpoint / "rng_state_1.pth").write_bytes(b"mine")
    run.finish()
    assert f"checkpoint-8 is damaged ({reason})" in run.words()
    assert "the run starts again at step 0" in run.words()


def test_synthetic_locks_and_unpickles_nothing(tmp_path: Path) -> None:
    arguments = ["evaluate", "synthetic", "lssa", "--task", "copy", "--output", str(tmp_path / "out")]
    arguments += ["--layers", "2", "--width", "16", "--heads", "1", "--steps", "400", "--train-length", "16"]
    started = Process.start(*arguments)
    models = tmp_path / "out" / "synthetic-models"
    assert wait_until(lambda: list(models.glob("*/metrics.jsonl")), started)
    assert "another process is training in" in refused(*arguments, status=1)
    assert wait_until(lambda: list(models.glob("*/checkpoint-100")), started)
    started.kill()
    (checkpoint,) = models.glob("*/checkpoint-100")
    with_bytes_entry(checkpoint / "state", tmp_path / "mark")
    seal(checkpoint)
    done = run(*arguments)
    assert done.status == 2
    assert "BytesStorageMetadata is not allowed in a tensor index" in done.text
    assert done.text.count("\n") == 1
    assert not (tmp_path / "mark").exists()
