"""Several processes over gloo: DDP and FSDP2 give the losses of one process and resume each other's runs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from commands import SERVER, Process
from several import free_port, place_of
from training_runs import TINY, Run, running

TOLERANCE = 1e-4
SETTINGS = {**TINY, "steps": 12, "micro_batch_size": 2, "evaluate_every": 6}


@pytest.fixture(scope="module")
def one_process(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return Run(tmp_path_factory.mktemp("runs") / "one_process", {**SETTINGS, "data": data}).finish()


@pytest.fixture
def run(data: Path, tmp_path: Path) -> Iterator[Run]:
    with running(tmp_path / "run", **SETTINGS, data=data) as run:
        yield run


def assert_same_losses(run: Run, other: Run) -> None:
    losses, expected = run.losses(), other.losses()
    assert losses.keys() == expected.keys()
    assert losses == pytest.approx(expected, abs=TOLERANCE)
    validation = [entry["eval_loss"] for entry in run.entries() if "eval_loss" in entry]
    assert validation == pytest.approx([e["eval_loss"] for e in other.entries() if "eval_loss" in e], abs=TOLERANCE)


@pytest.mark.parametrize("parallel", [pytest.param("ddp", marks=pytest.mark.slow), "fsdp"])
def test_two_processes_match_one(run: Run, one_process: Run, parallel: str) -> None:
    run.finish(processes=2, parallel=parallel)
    assert_same_losses(run, one_process)


def check_sharding(rank: int, port: int, arguments: list[str], output: str) -> None:
    """Run in a separate process: checks parameters and optimizer state of the trainer that the command builds."""
    os.environ |= place_of(rank, 2, port)
    import argparse

    import torch
    from torch.distributed.tensor import DTensor, Shard

    from softplus_attention.cli import train as command
    from softplus_attention.training import run as runs

    torch.set_num_threads(1)
    parser = argparse.ArgumentParser()
    command.add_command(parser.add_subparsers())
    options = vars(parser.parse_args(["train", *arguments]))
    names = runs.TrainConfig.__dataclass_fields__
    config = runs.TrainConfig(**{name: value for name, value in options.items() if name in names})
    Path(config.output).mkdir(exist_ok=True)
    trainer = runs.build(config, runs.training_arguments(config), runs.Folder(Path(config.data)))
    trainer.train()
    for name, parameter in trainer.model.named_parameters():
        assert isinstance(parameter, DTensor), name
        assert parameter.placements == (Shard(0),), name
        assert parameter.to_local().numel() < parameter.numel(), name
    moments = [value for state in trainer.optimizer.state.values() for value in state.values() if value.dim()]
    assert moments
    assert all(isinstance(value, DTensor) for value in moments)
    (Path(output) / str(rank)).write_text("sharded")


@pytest.mark.parametrize("optimizer", ["adamw", pytest.param("muon", marks=pytest.mark.slow)])
def test_fsdp_shards_parameters_and_optimizer(run: Run, tmp_path: Path, optimizer: str) -> None:
    arguments = run.arguments([], parallel="fsdp", steps=2, optimizer=optimizer)
    port = free_port()
    run.log.write_text("")
    for rank in range(2):
        process = SERVER.Process(target=check_sharding, args=(rank, port, arguments, str(tmp_path)))
        process.start()
        run.processes.append(Process(run.log, process))
    assert run.wait() == 0
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.isdigit()) == ["0", "1"]


class TestAnotherNumberOfProcesses:
    @pytest.mark.parametrize(
        ("first", "then"),
        [
            ((2, "fsdp"), (1, "ddp")),
            pytest.param((2, "ddp"), (1, "ddp"), marks=pytest.mark.slow),
            pytest.param((1, "ddp"), (2, "fsdp"), marks=pytest.mark.slow),
            pytest.param((2, "fsdp"), (4, "fsdp"), marks=pytest.mark.slow),
            pytest.param((2, "fsdp"), (2, "ddp"), marks=pytest.mark.slow),
        ],
        ids=lambda place: f"{place[0]} {place[1]}",
    )
    def test_continues(self, run: Run, one_process: Run, first: tuple[int, str], then: tuple[int, str]) -> None:
        run.kill_at("checkpoint-8", processes=first[0], parallel=first[1])
        files = list((run.output / "checkpoint-4" / "state").glob("*.distcp"))
        assert len(files) == first[0]
        run.finish(processes=then[0], parallel=then[1])
        assert re.search(r"from step (4|8)", run.words())
        assert_same_losses(run, one_process)

    @pytest.mark.slow
    @pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
    def test_same_number_continues_exactly(self, run: Run, data: Path, tmp_path: Path, parallel: str) -> None:
        whole = Run(tmp_path / "whole", {**SETTINGS, "data": data}).finish(processes=2, parallel=parallel)
        run.kill_at("checkpoint-4", processes=2, parallel=parallel)
        run.finish(processes=2, parallel=parallel)
        assert run.losses() == whole.losses()

    @pytest.mark.slow
    @pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
    def test_with_muon(self, run: Run, data: Path, tmp_path: Path, parallel: str) -> None:
        """Muon amplifies rounding differences; the tolerance comes from one process that sums in another order."""
        settings = {**SETTINGS, "data": data, "optimizer": "muon"}
        whole = Run(tmp_path / "whole", settings).finish()
        reordered = Run(tmp_path / "reordered", settings).finish(micro_batch_size=8)
        difference = max(abs(reordered.losses()[step] - loss) for step, loss in whole.losses().items())
        assert difference < 1e-3
        run.kill_at("checkpoint-8", processes=2, parallel=parallel, optimizer="muon")
        run.finish(processes=1, optimizer="muon")
        assert run.losses() == pytest.approx(whole.losses(), abs=4 * difference)


@pytest.mark.slow
class TestOneOfTwo:
    @pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
    def test_full_disk_stops_both_with_one_line(self, run: Run, parallel: str) -> None:
        assert "no room left on the disk" in run.fail(1, processes=2, parallel=parallel, file_size=40_000)
        assert not list(run.output.glob("*.partial"))
        run.finish(processes=2, parallel=parallel)


class TestTorchrun:
    def test_runs_the_command(self, run: Run, one_process: Run) -> None:
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port"]
        command += [str(free_port()), "-m", "softplus_attention.cli", "train", *run.arguments([])]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        result = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
        assert result.returncode == 0, result.stderr
        assert_same_losses(run, one_process)

    def test_fsdp_without_it_is_refused(self, run: Run) -> None:
        assert "torchrun" in run.fail(2, parallel="fsdp")

    def test_indivisible_batch_is_refused(self, run: Run) -> None:
        output = run.fail(2, processes=2, batch_size=7)
        assert "`--batch-size` must be a multiple of the 2 processes, got 7" in output
