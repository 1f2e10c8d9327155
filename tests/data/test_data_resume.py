"""``prepare`` that is killed, runs out of disk space or loses a worker, then resumes with the same result."""

from __future__ import annotations

import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data_files import write_jsonl
from mutations import state_of

from softplus_attention.data import DataError, builtin_text, prepare, verify
from softplus_attention.data.index import PARTIAL


class Run:
    """``prepare`` in a forked process."""

    def __init__(self, arguments: dict[str, Any], log: Path, file_limit: int | None = None) -> None:
        self.log = log
        self.process = multiprocessing.get_context("fork").Process(target=self._run, args=(arguments, file_limit))
        self.process.start()
        assert self.process.pid is not None
        self.pid = self.process.pid

    def _run(self, arguments: dict[str, Any], file_limit: int | None) -> None:
        lines: list[str] = []
        status = 1
        try:
            if file_limit:
                resource.setrlimit(resource.RLIMIT_FSIZE, (file_limit, file_limit))
            prepare(**arguments, report=lines.append)
            status = 0
        except DataError as error:
            lines.append(str(error))
        except BaseException as error:
            lines.append(f"Traceback: {error!r}")
        self.log.write_text("\n".join(lines))
        os._exit(status)

    def wait_until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 60
        while not condition():
            assert self.process.is_alive(), self.log.read_text()
            assert time.monotonic() < deadline
            time.sleep(0.002)

    def kill(self) -> None:
        """Kills it with `kill -9` and waits for the workers, which must exit too."""
        workers = workers_of(self.pid)
        os.kill(self.pid, signal.SIGKILL)
        self.process.join()
        deadline = time.monotonic() + 20
        while any(is_alive(pid) for pid in workers):
            assert time.monotonic() < deadline, "a worker outlives its parent"
            time.sleep(0.02)

    def end(self, timeout: float | None = None) -> tuple[int | None, str]:
        self.process.join(timeout)
        return self.process.exitcode, self.log.read_text() if self.log.exists() else ""


def workers_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """Arguments for ``prepare``, and the output folder of an undisturbed run."""
    folder = tmp_path_factory.mktemp("resume")
    rng = np.random.default_rng(0)
    text = " ".join(builtin_text()[0])[:600_000]
    ends = np.sort(rng.choice(len(text), 500, replace=False)).tolist()
    documents = [text[a:b] for a, b in zip([0, *ends], [*ends, len(text)], strict=True)]
    half = len(documents) // 2
    for name, part in (("a", documents[:half]), ("b", documents[half:])):
        write_jsonl(folder / f"{name}.jsonl", part)
    arguments = {
        "sources": [str(folder / "a.jsonl"), str(folder / "b.jsonl")],
        "tokenizer": "bpe",
        "vocabulary_size": 300,
        "shard_tokens": 75_000,
        "validation_fraction": 0.1,
        "piece_characters": 12_000,
        "workers": 2,
    }
    whole = folder / "whole"
    prepare(output=whole, **arguments)
    return arguments, whole


def test_killed_repeatedly(case: tuple[dict[str, Any], Path], tmp_path: Path) -> None:
    arguments, whole = case
    output = tmp_path / "out"
    arguments = {**arguments, "output": str(output)}
    work = output / PARTIAL
    # While the tokenizer is trained, before the first shard, after a shard, and late.
    moments: list[Callable[[], bool]] = [
        lambda: work.is_dir(),
        lambda: (work / "piece-00000004.npz").exists(),
        lambda: (output / "train-00001.npy").exists(),
        lambda: (output / "train-00002.npy").exists(),
    ]
    for moment in moments:
        run = Run(arguments, tmp_path / "log")
        run.wait_until(moment)
        run.kill()
        assert not (output / "index.json").exists()
    status, text = Run(arguments, tmp_path / "log").end()
    assert status == 0, text
    assert "continuing after" in text
    assert state_of(output) == state_of(whole)
    verify(output)


@pytest.mark.slow
def test_killed_at_any_moment(case: tuple[dict[str, Any], Path], tmp_path: Path) -> None:
    arguments, whole = case
    rng = np.random.default_rng(1)
    start = time.monotonic()
    assert Run({**arguments, "output": str(tmp_path / "timed")}, tmp_path / "log").end()[0] == 0
    seconds = time.monotonic() - start
    kills = 0
    for number in range(10):
        output, tries = tmp_path / str(number), 0
        while True:
            run = Run({**arguments, "output": str(output)}, tmp_path / "log")
            # Longer each time, since a short run may make no progress on a busy machine.
            status, text = run.end(timeout=seconds * (0.2 + 0.6 * rng.random()) * 1.1**tries)
            if status is not None:
                break
            run.kill()
            tries += 1
        assert status == 0, text
        assert state_of(output) == state_of(whole)
        kills += tries
    assert kills >= 10


def test_full_disk(case: tuple[dict[str, Any], Path], tmp_path: Path) -> None:
    """Files are limited to 100,000 bytes: the tokenizer and the pieces fit, the first shard does not."""
    arguments, whole = case
    output = tmp_path / "out"
    arguments = {**arguments, "output": str(output)}
    status, text = Run(arguments, tmp_path / "log", file_limit=100_000).end()
    assert status == 1
    assert "no room to write" in text
    assert "train-00000.npy" in text
    assert "Nothing is lost: make room and run the same command again to continue" in text
    assert "Traceback" not in text
    assert not list(output.rglob("*.tmp"))
    assert (output / PARTIAL / "piece-00000000.npz").exists()
    lines: list[str] = []
    prepare(**arguments, report=lines.append)
    assert lines[0].startswith("continuing after")
    assert state_of(output) == state_of(whole)


def test_full_disk_in_a_worker(case: tuple[dict[str, Any], Path], tmp_path: Path) -> None:
    arguments, whole = case
    arguments = {**arguments, "output": str(tmp_path / "out")}
    status, text = Run(arguments, tmp_path / "log", file_limit=15_000).end()
    assert status == 1
    assert "no room to write" in text
    assert "Nothing is lost" in text
    prepare(**arguments)
    assert state_of(tmp_path / "out") == state_of(whole)


def test_killed_worker(case: tuple[dict[str, Any], Path], tmp_path: Path) -> None:
    arguments, whole = case
    output = tmp_path / "out"
    arguments = {**arguments, "output": str(output)}
    run = Run(arguments, tmp_path / "log")
    run.wait_until(lambda: (output / PARTIAL / "piece-00000002.npz").exists())
    os.kill(workers_of(run.pid)[0], signal.SIGKILL)
    status, text = run.end()
    assert status == 1
    assert "a worker process was killed" in text
    prepare(**arguments)
    assert state_of(output) == state_of(whole)


class TestStopped:
    """A run that stopped at a byte that is not UTF-8 in its second file."""

    @pytest.fixture
    def arguments(self, tmp_path: Path) -> dict[str, Any]:
        write_jsonl(tmp_path / "a.jsonl", [f"document {number}" for number in range(100)])
        (tmp_path / "b.jsonl").write_bytes(b'{"text": "ca\xff\xfee"}\n')
        arguments = {
            "sources": [str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")],
            "output": str(tmp_path / "out"),
            "tokenizer": "bytes",
            "piece_characters": 100,
            "shard_tokens": 300,
            "workers": 1,
        }
        with pytest.raises(DataError, match=r"b\.jsonl is not UTF-8.*0xff.*at byte 12"):
            prepare(**arguments)
        return arguments

    def test_cannot_be_read(self, arguments: dict[str, Any]) -> None:
        from softplus_attention.data import TokenDataset

        with pytest.raises(DataError, match="not finished: run the same `data prepare` again"):
            TokenDataset.open(arguments["output"], "train")

    def test_refuses_other_options(self, arguments: dict[str, Any], tmp_path: Path) -> None:
        with pytest.raises(DataError, match=r"started with other options: --seed was 0, is 1\. Restore"):
            prepare(**{**arguments, "seed": 1})
        with pytest.raises(DataError, match=r"SOURCE was .*b\.jsonl, is .*a\.jsonl"):
            prepare(**{**arguments, "sources": arguments["sources"][:1]})
        (tmp_path / "b.jsonl").write_text('{"text": "cafe"}\n')
        with pytest.raises(DataError, match=r"the files of SOURCE were .*b\.jsonl"):
            prepare(**arguments)

    def test_resumes_with_replacement(self, arguments: dict[str, Any], tmp_path: Path) -> None:
        lines: list[str] = []
        prepare(**arguments, errors="replace", report=lines.append)
        assert lines[0].startswith("continuing after")
        prepare(**{**arguments, "output": str(tmp_path / "whole")}, errors="replace")
        assert state_of(tmp_path / "out") == state_of(tmp_path / "whole")

    def test_two_at_once(self, arguments: dict[str, Any]) -> None:
        code = "import fcntl, sys; lock = open(sys.argv[1], 'w'); fcntl.lockf(lock, fcntl.LOCK_EX); print(); input()"
        path = Path(arguments["output"]) / PARTIAL / "lock"
        command = [sys.executable, "-u", "-c", code, str(path)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
            assert other.stdout is not None
            other.stdout.readline()
            with pytest.raises(DataError, match="`--output` must be a folder that no other process is writing"):
                prepare(**arguments)
            other.communicate(b"\n")


def test_options_may_change_before_any_work(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(DataError, match="no such file"):
        prepare([tmp_path / "a.txt"], tmp_path / "out", tokenizer="typo.json")
    index = prepare([tmp_path / "a.txt"], tmp_path / "out", tokenizer="bytes", validation_fraction=0)
    assert index.splits["train"].tokens == 5


def test_options_may_change_before_the_first_write(tmp_path: Path) -> None:
    source = tmp_path / "a.jsonl"
    source.write_text('{"txt": "one"}\n{"txt": "two"}\n')
    common: dict[str, Any] = {"sources": [source], "output": tmp_path / "out", "workers": 1}
    with pytest.raises(DataError, match="`--text-field` must be a key of every record, got 'text', and line 1"):
        prepare(**common, tokenizer="bytes")
    prepare(**common, tokenizer="bpe", vocabulary_size=300, text_field="txt")
    fresh = {**common, "output": tmp_path / "fresh"}
    prepare(**fresh, tokenizer="bpe", vocabulary_size=300, text_field="txt")
    assert (tmp_path / "out" / "tokenizer.json").read_text() == (tmp_path / "fresh" / "tokenizer.json").read_text()
