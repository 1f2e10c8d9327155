"""Fuzzing: valid folders with one random change. A command must give the correct result or one error line, in bounded
time and memory, and must not touch files outside the folder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mutations
import pytest
from commands import Finished, Limits, run
from hypothesis import given, settings
from training_runs import TINY, Run, text_folder

SECONDS = 30
LIMITS = Limits(memory=2 << 30)
CASES = {"data": 112, "results": 30, "model": 50, "run": 8}
LONG = {"data": 2000, "results": 700, "model": 1300, "run": 200, "report": 400, "train on data": 400}


@dataclass(frozen=True)
class ValidFolders:
    folder: Path  # contains a folder of each kind, and ``text.txt``
    weights: str  # digest of the final weights of the run

    def command(self, kind: str, place: Path) -> tuple[object, ...]:
        """The command that reads a folder of that kind."""
        run_arguments = Run(place, {**TINY, "data": self.folder / "data", "keep": 1, "steps": 6}).arguments([])
        return {
            "data": ("data", "verify", place),
            "results": ("evaluate", "figures", place),
            "report": ("report", place),
            "model": ("generate", "--model", place, "--prompt", "a", "--max-new-tokens", 2),
            "run": ("train", *run_arguments),
            "train on data": ("train", *Run(place.parent / "new", {**TINY, "data": place, "steps": 1}).arguments([])),
        }[kind]


@pytest.fixture(scope="module")
def valid(tmp_path_factory: pytest.TempPathFactory) -> ValidFolders:
    folder = tmp_path_factory.mktemp("valid")
    whole = Run(folder / "whole", {**TINY, "data": text_folder(folder), "keep": 1, "steps": 6, "save_every": 4})
    whole.finish()
    stopped = Run(folder / "run", whole.settings)
    stopped.kill_at("checkpoint-4")
    for path in stopped.output.glob("*.partial"):
        path.rename(folder / path.name)
    (folder / "whole" / "model").rename(folder / "model")
    (folder / "text.txt").write_text("the cat sat on the mat. " * 40)
    options = ("--text", folder / "text.txt", "--lengths", "1,2", "--sequences", "2", "--output", folder / "results")
    assert run("evaluate", "lengths", folder / "model", *options).status == 0
    for path in (folder / "results").iterdir():
        if path.suffix != ".json":
            path.unlink()
    return ValidFolders(folder, weights_in(folder / "model"))


def weights_in(model: Path) -> str:
    return mutations.state_of(model)["model.safetensors"]


def check_answer(done: Finished, case: str) -> None:
    """Success, or a nonzero status with one error line."""
    assert "Traceback" not in done.text, f"{case}\n{done.text}"
    assert done.status in (0, 1, 2), f"{case}: {done.status}\n{done.text}"
    assert "\x1b" not in done.text, f"{case}\n{done.text!r}"
    if done.status:
        assert len(done.errors) == 1, f"{case}\n{done.text}"
        assert len(done.errors[0]) < 2000, f"{case}\n{done.text}"


def attempt(valid: ValidFolders, kind: str, mutation: mutations.Mutation, scratch: Path, command: str = "") -> None:
    place = mutations.copy(valid.folder / kind, scratch / "inside" / kind)
    outside = scratch / "outside"
    outside.mkdir(exist_ok=True)
    name = mutations.apply(mutation, place, outside)
    is_sealed = kind == "run" and mutation.place > 0.5
    if is_sealed:
        mutations.seal(place / "checkpoint-4")
    before = mutations.state_of(outside)
    others = mutations.state_of(valid.folder) if command else {}
    done = run(*valid.command(command or kind, place), seconds=SECONDS, limits=LIMITS)
    case = f"{kind} {name}: {mutation}"
    check_answer(done, case)
    assert mutations.state_of(outside) == before, case
    assert not command or mutations.state_of(valid.folder) == others, case
    if done.status == 0 and kind == "run" and not is_sealed and name != "run.json":
        assert weights_in(place / "model") == valid.weights, case
    if done.status == 0 and kind == "data" and not command:
        assert tokens_in(place) == tokens_in(valid.folder / "data"), case


def tokens_in(data: Path) -> dict[str, str]:
    return {name: found for name, found in mutations.state_of(data).items() if name.endswith(".npy")}


def mutated(kind: str, cases: int, command: str = "") -> Callable[[ValidFolders, Path], None]:
    @settings(max_examples=cases)
    @given(mutation=mutations.mutations())
    def test(valid: ValidFolders, scratch: Path, mutation: Any) -> None:
        attempt(valid, kind, mutation, scratch, command)

    return lambda valid, scratch: test(valid=valid, scratch=scratch)


@pytest.mark.parametrize("kind", CASES)
def test_mutated_folders(kind: str, valid: ValidFolders, tmp_path: Path) -> None:
    mutated(kind, CASES[kind])(valid, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("kind", LONG)
def test_mutated_folders_at_length(kind: str, valid: ValidFolders, tmp_path: Path) -> None:
    folder, command = {"report": ("results", kind), "train on data": ("data", kind)}.get(kind, (kind, ""))
    mutated(folder, LONG[kind], command)(valid, tmp_path)
