"""Pre-training on orbits and tuning on forces, through transformers' Trainer."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments, set_seed
from transformers.trainer_utils import get_last_checkpoint

from softplus_attention.physics.distributions import distribution
from softplus_attention.physics.modeling_orbit_gpt import (
    OrbitGPTForForce,
    OrbitGPTForTrajectories,
    check_checkpoint,
)
from softplus_attention.physics.orbits import OrbitalSystems, simulate
from softplus_attention.physics.presets import Experiment
from softplus_attention.physics.sequences import Batch, labelled_batch, mixed_batch
from softplus_attention.validation import fail

# Streams of random numbers that never meet: the same seed draws other systems for each purpose.
PRETRAIN, LABELS, PARTIAL, TEST, PROBE, LONG, BATCHES, SCALE = range(8)


def stream(seed: int, purpose: int, *more: int) -> np.random.Generator:
    return np.random.default_rng((seed, purpose, *more))


def to_tensors(batch: Batch) -> dict[str, Tensor]:
    return {name: torch.from_numpy(np.ascontiguousarray(values)) for name, values in batch.items()}


@dataclass(frozen=True)
class Machine:
    """Where and how a run computes; nothing that decides what it computes."""

    device: torch.device
    workers: int = 0
    compile: bool = False
    save_updates: int = 0

    @classmethod
    def of(
        cls, name: str | None, *, workers: int | None = None, compile: bool = False, save_updates: int = 0
    ) -> Machine:
        name = name or ("cuda" if torch.cuda.is_available() else "cpu")
        if name not in ("cpu", "cuda"):
            fail("--device", "cpu or cuda (which GPU: by CUDA_VISIBLE_DEVICES)", repr(name))
        if name == "cuda" and not torch.cuda.is_available():
            fail("--device", "cpu: this torch sees no GPU", repr(name))
        device = torch.device(name)
        usual = 2 if device.type == "cuda" else 0
        return cls(device, usual if workers is None else workers, compile, save_updates)


class OrbitBatches(Dataset[dict[str, Tensor]]):
    """Whole batches of fresh systems: batch ``index`` is the same in every run, process and resumption."""

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


class FromTheFirst(torch.utils.data.Sampler[int]):
    """0, 1, 2, ...: the batches are random already, and a permutation of 2^40 numbers would not fit."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Any:
        return iter(range(self.count))


class BatchTrainer(Trainer):
    """A Trainer whose dataset holds whole batches."""

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        return FromTheFirst(len(self.train_dataset))


class Progress(TrainerCallback):
    """One line that is rewritten on a terminal; elsewhere a line every ten seconds."""

    def __init__(self, title: str) -> None:
        self.title, self.begun, self.shown = title, time.perf_counter(), time.perf_counter()
        self.losses: list[tuple[int, float]] = []

    def on_log(self, arguments: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any) -> None:
        if not logs or "loss" not in logs:
            return
        self.losses.append((state.global_step, logs["loss"]))
        if not state.is_world_process_zero:
            return
        now = time.perf_counter()
        left = (now - self.begun) / state.global_step * (state.max_steps - state.global_step)
        line = f"{self.title}: {state.global_step}/{state.max_steps}, loss {logs['loss']:.4g}, {left:.0f} s left"
        if sys.stdout.isatty():
            print(f"\r{line:<100}", end="\n" if state.global_step == state.max_steps else "", flush=True)
        elif now - self.shown > 10 or state.global_step == state.max_steps:
            self.shown = now
            print(line, flush=True)


def train(
    model: torch.nn.Module,
    batches: Dataset[dict[str, Tensor]],
    folder: Path,
    title: str,
    machine: Machine,
    experiment: Experiment,
    *,
    updates: int,
    rate: float,
    seed: int,
) -> dict[str, Any]:
    """Trains in place; what it took comes back. Taken up from the last of the Trainer's own checkpoints, if any."""
    on_gpu = machine.device.type == "cuda"
    arguments = TrainingArguments(
        output_dir=str(folder / "trainer"),
        max_steps=updates,
        per_device_train_batch_size=1,
        learning_rate=rate,
        lr_scheduler_type="cosine_with_min_lr",
        lr_scheduler_kwargs={"min_lr_rate": 0.02},
        warmup_steps=min(100, max(1, updates // 20)),
        adam_beta1=0.9,
        adam_beta2=0.95,
        weight_decay=experiment.weight_decay,
        max_grad_norm=1.0,
        bf16=experiment.precision == "bf16",
        tf32=experiment.precision == "tf32" if on_gpu else None,
        optim="adamw_torch_fused" if on_gpu else "adamw_torch",
        torch_compile=machine.compile,
        use_cpu=not on_gpu,
        seed=seed,
        dataloader_num_workers=machine.workers,
        dataloader_pin_memory=on_gpu,
        remove_unused_columns=False,
        label_names=["targets", "forces"],
        logging_steps=max(1, updates // 50),
        logging_nan_inf_filter=False,
        report_to="none",
        log_level="error",
        log_level_replica="error",
        disable_tqdm=True,
        save_strategy="steps" if machine.save_updates else "no",
        save_steps=machine.save_updates or 500,
        save_total_limit=1,
        ddp_find_unused_parameters=False,
    )
    if arguments.n_gpu > 1:
        # Several GPUs are several processes (torchrun); the Trainer would otherwise split each batch among them.
        arguments._n_gpu = 1
    progress = Progress(title)
    trainer = BatchTrainer(
        model=model, args=arguments, train_dataset=batches, data_collator=lambda whole: whole[0], callbacks=[progress]
    )
    trainer.remove_callback(PrinterCallback)
    begun = time.perf_counter()
    last = get_last_checkpoint(arguments.output_dir) if Path(arguments.output_dir).is_dir() else None
    trainer.train(resume_from_checkpoint=last)
    final = progress.losses[-1][1] if progress.losses else float("nan")
    if not np.isfinite(final):
        raise RuntimeError(f"{title}: the loss became {final}; a lower rate may help")
    return {"updates": updates, "seconds": time.perf_counter() - begun, "loss": final, "losses": progress.losses}


def usual_displacement(experiment: Experiment) -> float:
    """The root mean square way of a body in one time step, per coordinate."""
    systems = distribution(experiment.distribution).sample(1000, stream(0, SCALE))
    ways = np.diff(simulate(systems, 8).positions, axis=1)
    return float(np.sqrt((ways**2).mean()))


def pretrain(
    experiment: Experiment, arm_name: str, seed: int, folder: Path, machine: Machine
) -> tuple[OrbitGPTForTrajectories, dict[str, Any]]:
    set_seed(seed)
    model = OrbitGPTForTrajectories(experiment.config(arm_name, usual_displacement(experiment)))
    batches = OrbitBatches(experiment, seed)
    updates, rate = experiment.pretrain_updates, experiment.pretrain_rate
    title = f"pretrain {arm_name}, seed {seed}"
    measured = train(model, batches, folder, title, machine, experiment, updates=updates, rate=rate, seed=seed)
    measured["parameters"] = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return model, measured


def labelled_systems(experiment: Experiment, labels: int, seed: int) -> dict[str, Tensor]:
    """``labels`` systems with a force at every step, and those that have only a few."""
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
    """Which steps of the partly labelled systems have a label."""
    order = stream(seed, PARTIAL, 2).random((count, steps)).argsort(1)
    return order < experiment.partial_labels


def tune(
    experiment: Experiment,
    arm_name: str,
    seed: int,
    labels: int,
    pretrained: Path | None,
    folder: Path,
    machine: Machine,
) -> tuple[OrbitGPTForForce, dict[str, Any]]:
    """A force model from the model of orbits at ``pretrained``, or from fresh weights where that is None."""
    labelled = labelled_systems(experiment, labels, seed)
    known = labelled["forces"][~labelled["forces"].isnan()].double()
    # A vector keeps its direction: it is scaled, not shifted.
    mean = 0.0 if experiment.target == "vector" else known.mean().item()
    words: dict[str, Any] = {
        "target": experiment.target,
        "target_mean": mean,
        "target_scale": max((known - mean).square().mean().sqrt().item(), 1e-12),
    }
    set_seed(seed)
    if pretrained is None:
        config = experiment.config(arm_name, usual_displacement(experiment))
        for word, value in words.items():
            setattr(config, word, value)
        model = OrbitGPTForForce(config)
    else:
        check_checkpoint(pretrained, experiment.form)
        model = OrbitGPTForForce.from_pretrained(pretrained, **words)
    how = "" if pretrained is not None else ", no pre-training"
    title = f"tune {arm_name}, seed {seed}, {labels} labelled systems{how}"
    batches = LabelledBatches(labelled, experiment.tune_batch, seed)
    updates, rate = experiment.tune_updates, experiment.tune_rate
    measured = train(model, batches, folder, title, machine, experiment, updates=updates, rate=rate, seed=seed)
    return model, {**measured, "labels": labels, "label_values": known.numel()}
