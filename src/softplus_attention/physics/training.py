"""Pre-training on orbits and fine-tuning on forces, in run folders like those of ``train``."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset
from transformers import PreTrainedModel, set_seed
from transformers.trainer_utils import SaveStrategy

from softplus_attention.huggingface.loading import load
from softplus_attention.physics.distributions import distribution
from softplus_attention.physics.modeling_orbit_gpt import (
    OrbitGPTForForce,
    OrbitGPTForTrajectories,
    check_checkpoint,
)
from softplus_attention.physics.orbits import OrbitalSystems, simulate
from softplus_attention.physics.presets import Experiment
from softplus_attention.physics.sequences import Batch, labelled_batch, mixed_batch
from softplus_attention.physics.stages import Cell
from softplus_attention.training import TrainConfig, checkpoints, distributed
from softplus_attention.training.run import build_trainer, fit, training_arguments
from softplus_attention.training.run_folder import RunFolder, started
from softplus_attention.utils.device import parse_device
from softplus_attention.validation import fail

# Purposes with independent random streams: with the same seed each draws other systems.
PRETRAIN, LABELS, PARTIAL, TEST, PROBE, LONG, BATCHES, SCALE = range(8)


def stream(seed: int, purpose: int, *more: int) -> np.random.Generator:
    return np.random.default_rng((seed, purpose, *more))


def to_tensors(batch: Batch) -> dict[str, Tensor]:
    return {name: torch.from_numpy(np.ascontiguousarray(values)) for name, values in batch.items()}


@dataclass(frozen=True)
class ComputeOptions:
    """Device and speed settings, which do not affect the result."""

    device: torch.device
    workers: int = 0
    compile: bool = False
    save_every: int = 0

    @classmethod
    def of(
        cls, name: str | None, *, workers: int | None = None, compile: bool = False, save_every: int = 0
    ) -> ComputeOptions:
        name = name or parse_device(None).type
        if name not in ("cpu", "cuda"):
            fail("--device", "cpu or cuda (choose a GPU by CUDA_VISIBLE_DEVICES)", repr(name))
        if name == "cuda" and not torch.cuda.is_available():
            fail("--device", "cpu, since torch finds no GPU", repr(name))
        distributed.start(name)
        if workers is None:
            workers = 2 if name == "cuda" else 0
        return cls(torch.device(name), workers, compile, save_every)


class OrbitBatches(Dataset[dict[str, Tensor]]):
    """Batches of new systems; batch ``index`` is the same in every run and process."""

    def __init__(self, experiment: Experiment, seed: int) -> None:
        self.experiment, self.seed = experiment, seed
        self.drawn = distribution(experiment.distribution)

    def __len__(self) -> int:
        return 1 << 40

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        rng = stream(self.seed, PRETRAIN, index)
        wanted = self.experiment
        return to_tensors(
            mixed_batch(self.drawn, wanted.sequence_form, wanted.pretrain_batch, wanted.most_planets, rng)
        )


class LabelledBatches(Dataset[dict[str, Tensor]]):
    """Batches from a fixed set of labelled sequences, drawn with replacement."""

    def __init__(self, labelled: dict[str, Tensor], size: int, seed: int) -> None:
        self.labelled, self.seed = labelled, seed
        self.count = labelled["coordinates"].shape[0]
        self.size = min(size, self.count)

    def __len__(self) -> int:
        return 1 << 40

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        chosen = torch.from_numpy(stream(self.seed, BATCHES, index).choice(self.count, self.size, replace=False))
        return {name: values[chosen] for name, values in self.labelled.items()}


def train(
    model: PreTrainedModel,
    batches: Dataset[dict[str, Tensor]],
    run: RunFolder,
    title: str,
    options: ComputeOptions,
    experiment: Experiment,
    *,
    updates: int,
    rate: float,
    seed: int,
) -> dict[str, Any]:
    """Trains ``model`` in place, from the last checkpoint of the run if there is one. Returns time and losses.

    The caller must have locked the run folder.
    """
    config = TrainConfig(
        data="simulated",
        output=str(run.path),
        layers=experiment.layers,
        width=experiment.width,
        heads=experiment.heads,
        sequence_length=experiment.positions,
        steps=updates,
        batch_size=distributed.world_size(),  # one item of the dataset per process: each item is a batch
        learning_rate=rate,
        final_learning_rate=0.02,
        warmup=min(100, max(1, updates // 20)),
        weight_decay=experiment.weight_decay,
        seed=seed,
        device=options.device.type,
        precision="bf16" if experiment.precision == "bf16" else "fp32",
        compile=options.compile,
        workers=options.workers,
        log_every=max(1, updates // 50),
        save_every=options.save_every or updates,
        keep=1,
        report_to="none",
    )
    if options.device.type == "cuda":
        torch.set_float32_matmul_precision("high" if experiment.precision == "tf32" else "highest")
    arguments = training_arguments(config)
    if not options.save_every:
        arguments.save_strategy = SaveStrategy.NO
    record = run.load_record(config, experiment.distribution, False)
    checkpoint = run.newest_checkpoint()
    trainer = build_trainer(config, arguments, model, batches, collator=lambda whole: whole[0], title=title, seconds=10)
    if checkpoint is not None:
        checkpoints.check_fits(checkpoint, trainer.model)
    step = 0 if checkpoint is None else checkpoints.checkpoint_step(checkpoint)
    run.write(record | {"starts": [*record.get("starts", []), started(options.device, step)]})
    begun = time.perf_counter()
    fit(run, trainer, checkpoint)
    seconds = time.perf_counter() - begun
    losses = [(entry["step"], entry["loss"]) for entry in trainer.state.log_history if "loss" in entry]
    return {"updates": updates, "seconds": seconds, "loss": losses[-1][1], "losses": losses}


def usual_displacement(experiment: Experiment) -> float:
    """The root mean square displacement of a body in one time step, per coordinate."""
    systems = distribution(experiment.distribution).sample(1000, stream(0, SCALE))
    displacements = np.diff(simulate(systems, 8).positions, axis=1)
    return float(np.sqrt((displacements**2).mean()))


def pretrain(
    experiment: Experiment, arm_name: str, seed: int, run: RunFolder, options: ComputeOptions
) -> tuple[OrbitGPTForTrajectories, dict[str, Any]]:
    set_seed(seed)
    model = OrbitGPTForTrajectories(experiment.config(arm_name, usual_displacement(experiment)))
    title, batches = f"pretrain {arm_name}, seed {seed}", OrbitBatches(experiment, seed)
    updates, rate = experiment.pretrain_updates, experiment.pretrain_rate
    measured = train(model, batches, run, title, options, experiment, updates=updates, rate=rate, seed=seed)
    measured["parameters"] = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return model, measured


def labelled_systems(experiment: Experiment, labels: int, seed: int) -> dict[str, Tensor]:
    """``labels`` systems with a force at every step from ``first_label`` on, and the partly labelled ones."""
    if labels < 1:
        fail("labels", "at least 1 labelled system", labels)
    drawn, form, target = distribution(experiment.distribution), experiment.clean_form, experiment.target
    systems = drawn.sample(labels, stream(seed, LABELS))
    first = experiment.first_label
    batch = labelled_batch(
        systems,
        form,
        target,
        stream(seed, LABELS, 1),
        drawn.time_steps,
        lambda count, steps: np.broadcast_to(np.arange(steps) >= first, (count, steps)),
    )
    if experiment.partial_systems:
        partial = labelled_batch(
            partial_systems(experiment, seed),
            form,
            target,
            stream(seed, PARTIAL, 1),
            drawn.time_steps,
            lambda count, steps: partial_choice(experiment, seed, count, steps),
        )
        batch = {name: np.concatenate([batch[name], partial[name]]) for name in batch}
    return to_tensors(batch)


def partial_systems(experiment: Experiment, seed: int) -> OrbitalSystems:
    return distribution(experiment.distribution).sample(experiment.partial_systems, stream(seed, PARTIAL))


def partial_choice(experiment: Experiment, seed: int, count: int, steps: int) -> NDArray[np.bool_]:
    """Mask of the labelled steps of the partly labelled systems."""
    order = stream(seed, PARTIAL, 2).random((count, steps)).argsort(1)
    return order < experiment.partial_labels


def tune(
    experiment: Experiment, cell: Cell, pretrained: Path, run: RunFolder, options: ComputeOptions
) -> tuple[OrbitGPTForForce, dict[str, Any]]:
    """Tunes a force model from the orbit model at ``pretrained``, or from new weights if the cell says so."""
    labelled = labelled_systems(experiment, cell.labels, cell.seed)
    known = labelled["forces"][~labelled["forces"].isnan()].double()
    # Vectors are scaled but not shifted, to keep their direction.
    mean = 0.0 if experiment.target == "vector" else known.mean().item()
    target: dict[str, Any] = {
        "target": experiment.target,
        "target_mean": mean,
        "target_scale": max((known - mean).square().mean().sqrt().item(), 1e-12),
    }
    set_seed(cell.seed)
    if cell.pretrained:
        check_checkpoint(pretrained, experiment.form)
        model = load(OrbitGPTForForce, "checkpoint", str(pretrained), False, **target)
    else:
        config = experiment.config(cell.arm, usual_displacement(experiment))
        for name, value in target.items():
            setattr(config, name, value)
        model = OrbitGPTForForce(config)
    title, batches = f"tune {cell.title}", LabelledBatches(labelled, experiment.tune_batch, cell.seed)
    updates, rate = experiment.tune_updates, experiment.tune_rate
    measured = train(model, batches, run, title, options, experiment, updates=updates, rate=rate, seed=cell.seed)
    return model, {**measured, "labels": cell.labels, "label_values": known.numel()}
