"""Runs survive kills, damaged checkpoints, full disks, NaN losses and changed settings."""

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
from mutations import state_of
from training_runs import TINY, Run, running, text_folder
from transformers import TrainerControl, TrainerState

from softplus_attention.training.trainer import Terminated, Termination


def weights(run: Run) -> bytes:
    return (run.output / "model" / "model.safetensors").read_bytes()


class TestKilled:
    def test_during_steps(self, run: Run, uninterrupted: Run) -> None:
        for step in (6, 13):
            run.start()
            assert run.kill_when(lambda step=step: run.last_step() >= step)
        run.finish()
        assert run.losses() == uninterrupted.losses()
        assert weights(run) == weights(uninterrupted)
        assert "continuing" in run.words()

    def test_while_a_checkpoint_is_written(self, run: Run, uninterrupted: Run) -> None:
        run.kill_at("checkpoint-8.partial")
        assert run.checkpoints() in ([4], [4, 8])
        run.finish()
        assert run.losses() == uninterrupted.losses()
        assert not list(run.output.glob("*.partial"))

    def test_after_the_last_step(self, run: Run, uninterrupted: Run) -> None:
        run.kill_at("checkpoint-24")
        run.finish()
        assert run.losses() == uninterrupted.losses()
        assert weights(run) == weights(uninterrupted)
        assert json.loads((run.output / "model" / "config.json").read_text())["power"] == 15

    @pytest.mark.slow
    def test_checkpoint_between_logs_keeps_losses(self, run: Run, uninterrupted: Run) -> None:
        run.kill_at("checkpoint-8", log_every=3)
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
                # At a random time in the next 20th of the run, or during the start.
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


class TestStopSignals:
    """The run finishes the step and writes a checkpoint; a resumed run gives the same losses."""

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

    def test_signal_to_the_process_group(self, run: Run, uninterrupted: Run) -> None:
        """Clusters and torchrun also signal the data loader workers."""
        arguments = run.arguments([], save_every=1000, workers=1)
        command = [sys.executable, "-m", "softplus_attention.cli", "train", *arguments]
        with subprocess.Popen(command, start_new_session=True, stderr=subprocess.PIPE, text=True) as process:
            wait_for(process, lambda: run.last_step() >= 3)
            for child in children_of(process.pid):
                os.kill(child, signal.SIGTERM)
            wait_for(process, lambda: run.last_step() >= 12)  # beyond the prefetched batches
            os.killpg(process.pid, signal.SIGTERM)
            _, errors = process.communicate(timeout=60)
        assert process.returncode == 143, errors
        assert "stopped by SIGTERM" in errors
        run.finish(save_every=1000)
        assert run.losses() == uninterrupted.losses()

    @pytest.mark.slow
    def test_two_processes_stop_at_the_same_step(self, run: Run) -> None:
        """Only one gets the signal; they agree on the step when they log."""
        run.start(save_every=1000, log_every=4, processes=2)
        run.wait_until(lambda: run.last_step() >= 8)
        run.signal(signal.SIGTERM, first=1)
        assert run.wait() == 143
        (step,) = run.checkpoints()
        assert step % 4 == 0
        run.finish(save_every=1000, log_every=4, processes=2)
        assert [process.exitcode for process in run.processes] == [0, 0]
        assert max(run.losses()) == 24

    def test_signal_in_the_last_step(self) -> None:
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
        assert time.monotonic() < end, f"timeout after {seconds} s"
        time.sleep(0.01)


def children_of(process: int) -> list[int]:
    found = [int(child) for child in Path(f"/proc/{process}/task/{process}/children").read_text().split()]
    assert found, "the process has no children"
    return found


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


class TestDamagedCheckpoint:
    @pytest.mark.parametrize(
        ("name", "damage"),
        [
            ("state/__0_0.distcp", truncate),
            ("state/.metadata", flip_bit),
            pytest.param("manifest.json", truncate, marks=pytest.mark.slow),
            pytest.param("scheduler.pt", Path.unlink, marks=pytest.mark.slow),
        ],
        ids=["truncated", "bit flipped", "manifest truncated", "file missing"],
    )
    def test_previous_one_is_used(
        self, run: Run, uninterrupted: Run, name: str, damage: Callable[[Path], None]
    ) -> None:
        run.kill_at("checkpoint-12")
        newest = run.checkpoints()[-1]
        damage(run.output / f"checkpoint-{newest}" / name)
        run.finish()
        assert f"checkpoint-{newest} is damaged" in run.words()
        assert f"from step {newest - 4}" in run.words()
        assert run.losses() == uninterrupted.losses()

    @pytest.mark.slow
    def test_restarts_without_an_intact_one(self, run: Run, uninterrupted: Run) -> None:
        run.kill_at("checkpoint-4")
        for step in run.checkpoints():
            truncate(run.output / f"checkpoint-{step}" / "trainer_state.json")
        before = (run.output / "metrics.jsonl").read_bytes()
        run.finish()
        assert "the run starts again at step 0" in run.words()
        assert "continuing" not in run.words()
        assert run.losses() == uninterrupted.losses()
        assert (run.output / "metrics.jsonl.damaged").read_bytes() == before


class TestFullDisk:
    def test_no_room_for_a_checkpoint(self, run: Run, uninterrupted: Run) -> None:
        run.kill_at("checkpoint-8")
        before = {path: path.read_bytes() for path in run.output.glob("checkpoint-*/**/*") if path.is_file()}
        output = run.fail(1, file_size=100_000)
        assert "no room left on the disk" in output
        assert "run the same command again" in output
        assert not list(run.output.glob("*.partial"))
        assert {path: path.read_bytes() for path in before} == before
        run.finish()
        assert run.losses() == uninterrupted.losses()

    @pytest.mark.slow
    def test_no_room_for_the_metrics(self, run: Run, uninterrupted: Run) -> None:
        assert "no room left on the disk" in run.fail(1, save_every=1000, file_size=3000)
        run.finish()
        assert run.losses() == uninterrupted.losses()

    @pytest.mark.slow
    def test_no_room_for_the_model(self, run: Run, uninterrupted: Run) -> None:
        run.kill_at("checkpoint-24")
        assert not (run.output / "model").exists()
        assert "no room left on the disk" in run.fail(1, file_size=50_000)
        assert not (run.output / "model").exists()
        run.finish()
        assert weights(run) == weights(uninterrupted)

    def test_a_missing_shard_is_named(self, run: Run, data: Path) -> None:
        shard = data / "train-00000.npy"
        run.kill_at("checkpoint-4")
        aside = shard.rename(shard.with_suffix(".aside"))
        try:
            assert f"{shard} is missing" in run.fail(2)
        finally:
            aside.rename(shard)
        assert run.checkpoints()


class TestDataLoaderWorkers:
    """The run ends at the first error, without waiting for its workers."""

    @pytest.mark.parametrize("problem", ["worker killed", "shard truncated", "out of memory"])
    def test_errors_end_the_run(self, run: Run, data: Path, tmp_path: Path, problem: str) -> None:
        shutil.copytree(data, tmp_path / "data")
        settings: dict[str, Any] = {"data": tmp_path / "data", "workers": 2, "steps": 9000, "save_every": 9000}
        if problem == "out of memory":
            settings |= {"batch_size": 8192, "micro_batch_size": 8192, "memory": 600 << 20}
        run.start(**settings)
        if problem != "out of memory":
            assert run.wait_until(lambda: run.last_step() >= 3), run.words()
            workers = children_of(run.processes[0].pid)
            if problem == "worker killed":
                os.kill(workers[0], signal.SIGKILL)
            else:
                (tmp_path / "data" / "train-00000.npy").write_bytes(b"")
        assert run.wait(60) == 1
        assert (problem if problem == "out of memory" else "a data loader worker was killed") in run.words()
        assert "the same command again" in run.words()
        assert "Traceback" not in run.words()

    def test_nan_loss_ends_the_run(self, run: Run) -> None:
        assert "NaN or infinite" in run.fail(1, seconds=60, learning_rate=1e30, clip=0, warmup=0, workers=2)


class TestTokenizer:
    def test_is_loaded_before_the_first_step(self, run: Run, data: Path, tmp_path: Path) -> None:
        shutil.copytree(data, tmp_path / "data")
        (file,) = (tmp_path / "data").rglob("tokenizer.json")
        file.write_bytes(file.read_bytes().replace(b'"', b"'"))
        assert "Prepare the data again, or restore the tokenizer's files" in run.fail(2, data=tmp_path / "data")
        assert run.last_step() == 0

    def test_is_needed_only_at_the_start(self, run: Run, data: Path, tmp_path: Path) -> None:
        shutil.copytree(data, tmp_path / "data")
        run.start(data=tmp_path / "data", steps=60)
        assert run.wait_until(lambda: run.last_step() >= 1)
        (file,) = (tmp_path / "data").rglob("tokenizer.json")
        file.write_text("{}")
        assert run.wait() == 0, run.words()
        assert len((run.output / "model" / "tokenizer.json").read_bytes()) > 100


class TestNanLoss:
    def test_stops_saves_nothing_and_can_continue(self, run: Run, uninterrupted: Run) -> None:
        run.kill_at("checkpoint-8")
        before = run.checkpoints()
        output = run.fail(1, "--allow-config-changes", learning_rate=1e30, clip=0)
        assert "NaN or infinite" in output
        assert "--learning-rate" in output
        assert run.checkpoints() == before
        run.finish("--allow-config-changes")
        assert run.losses() == uninterrupted.losses()

    def test_before_the_first_checkpoint(self, run: Run) -> None:
        assert "start again with a lower --learning-rate" in run.fail(1, learning_rate=1e30, clip=0, warmup=0)
        assert run.checkpoints() == []
        run.finish(steps=4)
        assert sorted(run.losses()) == [1, 2, 3, 4]

    def test_of_learned_powers(self, run: Run) -> None:
        """The forward pass validates them, before the loss is known."""
        output = run.fail(1, learning_rate=1e30, clip=0, warmup=0, power="learned-log", log_every=24)
        assert "start again with a lower --learning-rate" in output
        assert "`power`" not in output


def test_foreign_partial_folders_are_kept(run: Run) -> None:
    run.kill_at("checkpoint-4")
    for name in ("data.partial", "checkpoint-best.partial", "checkpoint-99.partial"):
        (run.output / name).mkdir()
    run.finish()
    assert sorted(path.name for path in run.output.glob("*.partial")) == ["checkpoint-best.partial", "data.partial"]


@pytest.mark.parametrize(
    ("name", "content", "status", "reason"),
    [
        ("checkpoint-2/mine.txt", "mine", 1, "contains checkpoints but no run.json"),
        ("metrics.jsonl", '{"step": 99, "mine": 1}\nnot json\n', 1, "contains metrics.jsonl but no run.json"),
        ("thesis.txt", "mine", 2, "contains unrelated files (thesis.txt)"),
        *(
            ("run.json", content, 1, "run.json is damaged or not the record of a run")
            for content in ("{}", "[]", '{"config": {}}', '{"config"', '{"config": [], "data": ""}')
        ),
    ],
)
def test_foreign_folders_are_not_changed(run: Run, name: str, content: str, status: int, reason: str) -> None:
    path = run.output / name
    path.parent.mkdir(parents=True)
    path.write_text(content)
    assert reason in run.fail(status)
    assert path.read_text() == content
    assert [path for path in run.output.rglob("*") if path.is_file() and path.name != ".lock"] == [path]


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"local_attention": "lssarr", "window": 8, "global_every": 2}, "lssarr"),
        ({"width": 6, "heads": 2}, "even"),
    ],
)
def test_invalid_model_settings(run: Run, settings: dict[str, Any], reason: str) -> None:
    assert reason in run.fail(2, **settings)


class TestChangedSettings:
    def test_are_named(self, run: Run, uninterrupted: Run) -> None:
        run.kill_at("checkpoint-8")
        output = run.fail(1, power="3,15@0.5", width=64)
        assert "width was 32 and is 64" in output
        assert "power was '3,7@0.25,15@0.5' and is '3,15@0.5'" in output
        assert "--allow-config-changes" not in output  # weights of another width cannot be used
        assert "--allow-config-changes" in run.fail(1, power="3,15@0.5")
        run.finish(keep=1, micro_batch_size=4, save_every=5)
        assert run.checkpoints() == [24]
        assert run.losses() == uninterrupted.losses()

    def test_incompatible_with_the_state(self, run: Run) -> None:
        run.finish(steps=4, save_every=4)
        record = (run.output / "run.json").read_bytes()
        for changes, reason in (
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
            assert reason in run.fail(1, "--allow-config-changes", **{"steps": 6, "save_every": 4, **changes})
            assert (run.output / "run.json").read_bytes() == record

    def test_of_a_finished_run_need_its_checkpoint(self, run: Run) -> None:
        run.finish(steps=4, save_every=4)
        shutil.rmtree(run.output / "checkpoint-4")
        before = state_of(run.output)
        assert "no intact checkpoint to continue from" in run.fail(1, "--allow-config-changes", steps=6)
        assert state_of(run.output) == before

    @pytest.mark.slow
    def test_of_the_data(self, run: Run, tmp_path: Path) -> None:
        run.kill_at("checkpoint-4")
        for name in ("same", "other"):
            (tmp_path / name).mkdir()
        output = run.fail(1, data=text_folder(tmp_path / "other", seed=1))
        assert "has changed since the run was started" in output
        run.finish(data=text_folder(tmp_path / "same"))

    @pytest.mark.slow
    def test_allowed_in_a_finished_run(self, run: Run) -> None:
        run.finish(steps=8, power="3")
        first = run.losses()
        assert "steps was 8 and is 12" in run.fail(1, steps=12, power="3")
        run.finish("--allow-config-changes", steps=12, power="3")
        assert {step: loss for step, loss in run.losses().items() if step <= 8} == first
        assert max(run.losses()) == 12
        assert len(json.loads((run.output / "run.json").read_text())["starts"]) == 2

    def test_none_in_a_finished_run(self, uninterrupted: Run) -> None:
        before = weights(uninterrupted)
        uninterrupted.finish()
        assert "is finished" in uninterrupted.words()
        assert weights(uninterrupted) == before

    def test_two_runs_in_one_folder(self, run: Run, data: Path) -> None:
        run.start(steps=2000)
        second = Run(run.output, run.settings)
        while not run.last_step():
            assert run.processes[0].exitcode is None, run.words()
        assert "another process is training in" in second.fail(1)
