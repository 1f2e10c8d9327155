"""Runs survive: kills at any moment, damaged checkpoints, a full disk, a loss that is no number, other settings."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from training_runs import TINY, Run, running, text_folder
from transformers import TrainerControl, TrainerState

from softplus_attention.training.trainer import Terminated, Termination


def weights(run: Run) -> bytes:
    return (run.output / "model" / "model.safetensors").read_bytes()


class TestKilled:
    def test_in_and_between_steps(self, run: Run, uninterrupted: Run) -> None:
        for step in (6, 13):
            run.start()
            assert run.kill_when(lambda step=step: run.last_step() >= step)
        run.finish()
        assert run.losses() == uninterrupted.losses()
        assert weights(run) == weights(uninterrupted)
        assert "continuing" in run.words()

    def test_while_a_checkpoint_is_written(self, run: Run, uninterrupted: Run) -> None:
        run.start()
        assert run.kill_when(lambda: (run.output / "checkpoint-8.partial").exists())
        assert run.checkpoints() in ([4], [4, 8])
        run.finish()
        assert run.losses() == uninterrupted.losses()
        assert not list(run.output.glob("*.partial"))

    def test_after_the_last_step(self, run: Run, uninterrupted: Run) -> None:
        run.start()
        assert run.kill_when(lambda: (run.output / "checkpoint-24").exists())
        run.finish()
        assert run.losses() == uninterrupted.losses()
        assert weights(run) == weights(uninterrupted)
        assert json.loads((run.output / "model" / "config.json").read_text())["power"] == 15

    @pytest.mark.slow
    def test_checkpoint_between_logs_keeps_losses(self, run: Run, uninterrupted: Run) -> None:
        run.start(log_every=3)
        assert run.kill_when(lambda: (run.output / "checkpoint-8").exists())
        run.finish(log_every=3)
        single = uninterrupted.losses()
        for step, loss in run.losses().items():
            assert loss == pytest.approx(sum(single[step - i] for i in range(3)) / 3, rel=1e-6)

    @pytest.mark.slow
    @pytest.mark.parametrize("optimizer", ["adamw", "muon"])
    def test_20_times_at_random_moments(self, data: Path, tmp_path: Path, optimizer: str) -> None:
        settings = {**TINY, "data": data, "optimizer": optimizer, "steps": 240, "save_every": 7, "evaluate_every": 11}
        whole = Run(tmp_path / "whole", settings).finish()
        chance = random.Random(optimizer)
        with running(tmp_path / "run", **settings) as run:
            for kill in range(20):
                # Somewhere in the next 20th of the run, at no particular point of a step, or while it starts.
                run.start()
                if chance.random() < 0.8:
                    goal = chance.uniform(10 * kill, 10 * (kill + 1))
                    run.wait_until(lambda goal=goal: run.last_step() >= goal)
                    time.sleep(chance.uniform(0, 0.05))
                else:
                    time.sleep(chance.uniform(0, 0.6))
                assert run.processes[0].exitcode is None, run.words()
                run.kill()
            assert run.last_step() < settings["steps"]
            run.finish()
            assert run.losses() == whole.losses()
            assert weights(run) == weights(whole)


class TestAskedToStop:
    """The step is finished, a checkpoint written, and the same command goes on as if nothing had happened."""

    @pytest.mark.parametrize(
        ("number", "status"), [(signal.SIGTERM, 143), pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow)]
    )
    def test_one_process(self, run: Run, uninterrupted: Run, number: int, status: int) -> None:
        run.start(save_every=1000)
        run.wait_until(lambda: run.last_step() >= 6)
        run.signal(number)
        assert run.wait() == status
        (step,) = run.checkpoints()
        assert 6 <= step < 24
        assert f"stopped by {signal.Signals(number).name} after step {step} of 24, with a checkpoint" in run.words()
        assert not (run.output / "model").exists()
        run.finish(save_every=1000)
        assert f"from step {step}" in run.words()
        assert run.losses() == uninterrupted.losses()
        assert weights(run) == weights(uninterrupted)

    def test_signal_to_readers_too(self, run: Run, uninterrupted: Run) -> None:
        """As clusters and torchrun do it: the signal goes to the whole group."""
        words = run.arguments([], save_every=1000, workers=1)
        command = [sys.executable, "-m", "softplus_attention.cli", "train", *words]
        with subprocess.Popen(command, start_new_session=True, stderr=subprocess.PIPE, text=True) as process:
            wait_for(process, lambda: run.last_step() >= 3)
            for child in children_of(process.pid):
                os.kill(child, signal.SIGTERM)
            wait_for(process, lambda: run.last_step() >= 12)  # beyond what was read before
            os.killpg(process.pid, signal.SIGTERM)
            _, said = process.communicate(timeout=60)
        assert process.returncode == 143, said
        assert "stopped by SIGTERM" in said
        run.finish(save_every=1000)
        assert run.losses() == uninterrupted.losses()

    @pytest.mark.slow
    def test_two_processes_stop_at_the_same_step(self, run: Run) -> None:
        """Only one of them is asked; they agree where they log."""
        run.start(save_every=1000, log_every=4, processes=2)
        run.wait_until(lambda: run.last_step() >= 8)
        run.signal(signal.SIGTERM, first=1)
        assert run.wait() == 143
        (step,) = run.checkpoints()
        assert step % 4 == 0
        run.finish(save_every=1000, log_every=4, processes=2)
        assert [process.exitcode for process in run.processes] == [0, 0]
        assert max(run.losses()) == 24

    def test_in_the_last_step_it_finishes(self) -> None:
        termination = Termination()
        termination.received = signal.SIGTERM
        for step, stops in ((2, True), (3, False)):
            control, state = TrainerControl(), TrainerState(global_step=step, max_steps=3)
            termination.on_step_end(None, state, control)
            assert control.should_training_stop == control.should_save == stops
        termination.raise_if_stopped(3, 3)
        with pytest.raises(Terminated, match="stopped by SIGTERM after step 2 of 3"):
            termination.raise_if_stopped(2, 3)


def wait_for(process: subprocess.Popen[str], happened: Callable[[], bool], seconds: float = 90) -> None:
    end = time.monotonic() + seconds
    while not happened():
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < end, f"it did not happen in {seconds} s"
        time.sleep(0.01)


def children_of(process: int) -> list[int]:
    found = [int(child) for child in Path(f"/proc/{process}/task/{process}/children").read_text().split()]
    assert found, "the process has no children"
    return found


def truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def with_a_bit_flipped(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


class TestDamagedCheckpoint:
    @pytest.mark.parametrize(
        ("name", "damage"),
        [
            ("state/__0_0.distcp", truncated),
            ("state/.metadata", with_a_bit_flipped),
            pytest.param("manifest.json", truncated, marks=pytest.mark.slow),
            pytest.param("scheduler.pt", Path.unlink, marks=pytest.mark.slow),
        ],
        ids=["truncated", "bit flipped", "manifest cut", "file missing"],
    )
    def test_the_one_before_is_used(
        self, run: Run, uninterrupted: Run, name: str, damage: Callable[[Path], None]
    ) -> None:
        run.start()
        assert run.kill_when(lambda: (run.output / "checkpoint-12").exists())
        newest = run.checkpoints()[-1]
        damage(run.output / f"checkpoint-{newest}" / name)
        run.finish()
        assert f"checkpoint-{newest} is damaged" in run.words()
        assert f"from step {newest - 4}" in run.words()
        assert run.losses() == uninterrupted.losses()

    @pytest.mark.slow
    def test_without_a_whole_one_it_starts_anew(self, run: Run, uninterrupted: Run) -> None:
        run.start()
        assert run.kill_when(lambda: (run.output / "checkpoint-4").exists())
        for step in run.checkpoints():
            truncated(run.output / f"checkpoint-{step}" / "trainer_state.json")
        before = (run.output / "metrics.jsonl").read_bytes()
        run.finish()
        assert "the run starts again at step 0" in run.words()
        assert "continuing" not in run.words()
        assert run.losses() == uninterrupted.losses()
        assert (run.output / "metrics.jsonl.damaged").read_bytes() == before


class TestFullDisk:
    def test_no_room_for_a_checkpoint(self, run: Run, uninterrupted: Run) -> None:
        run.start()
        assert run.kill_when(lambda: (run.output / "checkpoint-8").exists())
        before = {path: path.read_bytes() for path in run.output.glob("checkpoint-*/**/*") if path.is_file()}
        run.start(file_size=100_000)
        assert run.wait() == 1
        assert "no room left on the disk" in run.words()
        assert "run the same command again" in run.words()
        assert "Traceback" not in run.words()
        assert not list(run.output.glob("*.partial"))
        assert {path: path.read_bytes() for path in before} == before
        run.finish()
        assert run.losses() == uninterrupted.losses()

    @pytest.mark.slow
    def test_no_room_for_the_metrics(self, run: Run, uninterrupted: Run) -> None:
        run.start(save_every=1000, file_size=3000)
        assert run.wait() == 1
        assert "no room left on the disk" in run.words()
        assert "Traceback" not in run.words()
        run.finish()
        assert run.losses() == uninterrupted.losses()

    @pytest.mark.slow
    def test_no_room_for_the_model(self, run: Run, uninterrupted: Run) -> None:
        run.start()
        assert run.kill_when(lambda: (run.output / "checkpoint-24").exists())
        assert not (run.output / "model").exists()
        run.start(file_size=50_000)
        assert run.wait() == 1
        assert "no room left on the disk" in run.words()
        assert "Traceback" not in run.words()
        assert not (run.output / "model").exists()
        run.finish()
        assert weights(run) == weights(uninterrupted)

    def test_a_missing_shard_is_named(self, run: Run, data: Path) -> None:
        shard = data / "train-00000.npy"
        run.start()
        assert run.kill_when(lambda: (run.output / "checkpoint-4").exists())
        aside = shard.rename(shard.with_suffix(".aside"))
        try:
            run.start()
            assert run.wait() == 2
        finally:
            aside.rename(shard)
        assert f"{shard} is missing" in run.words()
        assert "Traceback" not in run.words()
        assert run.checkpoints()


class TestProcessesThatReadData:
    """The run ends with the first error, not when its readers do."""

    @pytest.mark.parametrize("what", ["a reader is killed", "a shard is cut", "no memory"])
    def test_end_with_the_run(self, run: Run, data: Path, tmp_path: Path, what: str) -> None:
        shutil.copytree(data, tmp_path / "data")
        words: dict[str, Any] = {"data": tmp_path / "data", "workers": 2, "steps": 9000, "save_every": 9000}
        if what == "no memory":
            words |= {"batch_size": 8192, "micro_batch_size": 8192}
        run.start(**words, memory=600 << 20 if what == "no memory" else None)
        if what != "no memory":
            assert run.wait_until(lambda: run.last_step() >= 3), run.words()
            readers = children_of(run.processes[0].pid)
            if what == "a reader is killed":
                os.kill(readers[0], signal.SIGKILL)
            else:
                (tmp_path / "data" / "train-00000.npy").write_bytes(b"")
        begun = time.monotonic()
        assert run.wait(60) == 1
        assert time.monotonic() - begun < 60
        reason = {"no memory": "out of memory"}.get(what, "a data loader worker was killed")
        assert reason in run.words()
        assert "the same command again" in run.words()
        assert "Traceback" not in run.words()

    def test_end_with_a_loss_that_is_no_number(self, run: Run) -> None:
        run.start(learning_rate=1e30, clip=0, warmup=0, workers=2)
        assert run.wait(60) == 1
        assert "NaN or infinite" in run.words()


class TestTokenizer:
    def test_is_loaded_before_the_first_step(self, run: Run, data: Path, tmp_path: Path) -> None:
        shutil.copytree(data, tmp_path / "data")
        (file,) = (tmp_path / "data").rglob("tokenizer.json")
        file.write_bytes(file.read_bytes().replace(b'"', b"'"))
        run.start(data=tmp_path / "data")
        assert run.wait() == 2
        assert "Prepare the data again, or restore the tokenizer's files" in run.words()
        assert "Traceback" not in run.words()
        assert run.last_step() == 0

    def test_is_needed_at_the_start_alone(self, run: Run, data: Path, tmp_path: Path) -> None:
        shutil.copytree(data, tmp_path / "data")
        run.start(data=tmp_path / "data", steps=60)
        assert run.wait_until(lambda: run.last_step() >= 1)
        (file,) = (tmp_path / "data").rglob("tokenizer.json")
        file.write_text("{}")
        assert run.wait() == 0, run.words()
        assert len((run.output / "model" / "tokenizer.json").read_bytes()) > 100


class TestLossThatIsNoNumber:
    def test_stops_saves_nothing_and_can_continue(self, run: Run, uninterrupted: Run) -> None:
        run.start()
        assert run.kill_when(lambda: (run.output / "checkpoint-8").exists())
        before = run.checkpoints()
        run.start("--allow-config-changes", learning_rate=1e30, clip=0)
        assert run.wait() == 1
        assert "NaN or infinite" in run.words()
        assert "--learning-rate" in run.words()
        assert "Traceback" not in run.words()
        assert run.checkpoints() == before
        run.finish("--allow-config-changes")
        assert run.losses() == uninterrupted.losses()

    def test_before_the_first_checkpoint(self, run: Run) -> None:
        run.start(learning_rate=1e30, clip=0, warmup=0)
        assert run.wait() == 1
        assert "start again with a lower --learning-rate" in run.words()
        assert run.checkpoints() == []
        run.finish(steps=4)
        assert sorted(run.losses()) == [1, 2, 3, 4]

    def test_of_learned_powers(self, run: Run) -> None:
        """They are looked at in the forward, where the loss is not known yet."""
        run.start(learning_rate=1e30, clip=0, warmup=0, power="learned-log", log_every=24)
        assert run.wait() == 1
        assert "start again with a lower --learning-rate" in run.words()
        assert "`power`" not in run.words()


def test_unfinished_folders_of_others_stay(run: Run) -> None:
    run.start()
    assert run.kill_when(lambda: (run.output / "checkpoint-4").exists())
    for name in ("data.partial", "checkpoint-best.partial", "checkpoint-99.partial"):
        (run.output / name).mkdir()
    run.finish()
    assert sorted(path.name for path in run.output.glob("*.partial")) == ["checkpoint-best.partial", "data.partial"]


class TestFolderThatIsNoRun:
    def test_is_left_as_it_is(self, run: Run) -> None:
        own = run.output / "checkpoint-2" / "mine.txt"
        own.parent.mkdir(parents=True)
        own.write_text("mine")
        run.start()
        assert run.wait() == 1
        assert "contains checkpoints but no run.json" in run.words()
        assert own.read_text() == "mine"

    def test_metrics_of_others_are_left_too(self, run: Run) -> None:
        run.output.mkdir(parents=True)
        own = run.output / "metrics.jsonl"
        own.write_text('{"step": 99, "mine": 1}\nnot json\n')
        run.start()
        assert run.wait() == 1
        assert "contains metrics.jsonl but no run.json" in run.words()
        assert own.read_text() == '{"step": 99, "mine": 1}\nnot json\n'

    def test_files_of_something_else(self, run: Run) -> None:
        """The user's current folder, or one of prepared data."""
        run.output.mkdir(parents=True)
        (run.output / "thesis.txt").write_text("mine")
        run.start()
        assert run.wait() == 2
        assert "contains unrelated files (thesis.txt)" in run.words()
        assert [path.name for path in run.output.iterdir() if not path.name.startswith(".")] == ["thesis.txt"]

    @pytest.mark.parametrize("content", ["{}", "[]", '{"config": {}}', '{"config"', '{"config": [], "data": ""}'])
    def test_a_record_that_is_none(self, run: Run, content: str) -> None:
        run.output.mkdir(parents=True)
        (run.output / "run.json").write_text(content)
        run.start()
        assert run.wait() == 1
        assert "run.json is damaged or not the record of a run" in run.words()
        assert "Traceback" not in run.words()
        assert (run.output / "run.json").read_text() == content


class TestSettingsThatNoModelHas:
    @pytest.mark.parametrize(
        ("settings", "words"),
        [
            ({"local_attention": "lssarr", "window": 8, "global_every": 2}, "lssarr"),
            ({"width": 6, "heads": 2}, "even"),
        ],
    )
    def test_are_one_sentence(self, run: Run, settings: dict[str, Any], words: str) -> None:
        run.start(**settings)
        assert run.wait() == 2
        assert words in run.words()
        assert "Traceback" not in run.words()


class TestChangedSettings:
    def test_stop_and_name_what_changed(self, run: Run, uninterrupted: Run) -> None:
        run.start()
        assert run.kill_when(lambda: (run.output / "checkpoint-8").exists())
        run.start(power="3,15@0.5", width=64)
        assert run.wait() == 1
        assert "width was 32 and is 64" in run.words()
        assert "power was '3,7@0.25,15@0.5' and is '3,15@0.5'" in run.words()
        assert "--allow-config-changes" not in run.words()  # the weights of another width cannot go on
        run.start(power="3,15@0.5")
        assert run.wait() == 1
        assert "--allow-config-changes" in run.words()
        run.finish(keep=1, micro_batch_size=4, save_every=5)
        assert run.checkpoints() == [24]
        assert run.losses() == uninterrupted.losses()

    def test_changes_that_state_cannot_follow(self, run: Run) -> None:
        run.finish(steps=4, save_every=4)
        record = (run.output / "run.json").read_bytes()
        for changes, words in (
            (
                {"batch_size": 16, "micro_batch_size": 4},
                "cannot continue with these changes: batch_size was 8 and is 16",
            ),
            ({"optimizer": "muon"}, "cannot continue with these changes: optimizer was 'adamw' and is 'muon'"),
            ({"heads": 4}, "cannot continue with these changes: heads was 2 and is 4"),
            ({"steps": 2}, "is already at step 4, beyond --steps 2"),
            ({"width": 64}, "do not match a model with these settings"),
            ({"power": "learned"}, "raw_power, missing there and (2,) now"),
        ):
            run.start("--allow-config-changes", **{"steps": 6, "save_every": 4, **changes})
            assert run.wait() == 1
            assert words in run.words()
            assert "Traceback" not in run.words()
            assert (run.output / "run.json").read_bytes() == record

    def test_of_a_finished_run_need_its_checkpoint(self, run: Run) -> None:
        run.finish(steps=4, save_every=4)
        shutil.rmtree(run.output / "checkpoint-4")
        before = weights(run), (run.output / "metrics.jsonl").read_bytes(), (run.output / "run.json").read_bytes()
        run.start("--allow-config-changes", steps=6)
        assert run.wait() == 1
        assert "no intact checkpoint to continue from" in run.words()
        assert before == (
            weights(run),
            (run.output / "metrics.jsonl").read_bytes(),
            (run.output / "run.json").read_bytes(),
        )

    @pytest.mark.slow
    def test_of_the_data_stop_too(self, run: Run, tmp_path: Path) -> None:
        run.start()
        assert run.kill_when(lambda: (run.output / "checkpoint-4").exists())
        for name in ("same", "other"):
            (tmp_path / name).mkdir()
        run.start(data=text_folder(tmp_path / "other", seed=1))
        assert run.wait() == 1
        assert "has changed since the run was started" in run.words()
        run.finish(data=text_folder(tmp_path / "same"))

    @pytest.mark.slow
    def test_accepted_a_finished_run_goes_on(self, run: Run) -> None:
        run.finish(steps=8, power="3")
        first = run.losses()
        run.start(steps=12, power="3")
        assert run.wait() == 1
        assert "steps was 8 and is 12" in run.words()
        run.finish("--allow-config-changes", steps=12, power="3")
        assert {step: loss for step, loss in run.losses().items() if step <= 8} == first
        assert max(run.losses()) == 12
        assert len(json.loads((run.output / "run.json").read_text())["starts"]) == 2

    def test_a_finished_run_stays_as_it_is(self, uninterrupted: Run) -> None:
        before = weights(uninterrupted)
        uninterrupted.finish()
        assert "is finished" in uninterrupted.words()
        assert weights(uninterrupted) == before

    def test_two_runs_in_one_folder(self, run: Run, data: Path) -> None:
        run.start(steps=2000)
        second = Run(run.output, run.settings)
        while not run.last_step():
            assert run.processes[0].exitcode is None, run.words()
        second.start()
        assert second.wait() == 1
        assert "another process is training in" in second.words()
