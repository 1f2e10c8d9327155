"""transformers' Trainer with our optimizer, sharding, checkpoints and figures. The training loop is Trainer's."""

from __future__ import annotations

import functools
import json
import time
from multiprocessing.sharedctypes import RawValue
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, Sampler, SequentialSampler
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState

from softplus_attention.training import checkpoints, parallel
from softplus_attention.training.checkpoints import POSITION, SCHEDULER, TRAINER_STATE
from softplus_attention.training.configuration import TrainConfig
from softplus_attention.training.errors import RunStopped
from softplus_attention.training.metrics import Throughput
from softplus_attention.training.optimizers import optimizer_of
from softplus_attention.training.power_callback import PowerCallback
from softplus_attention.training.termination import leave_signals_to_the_run


class SoftplusTrainer(Trainer):
    """A run of ``TrainConfig``; ``power`` and ``throughput`` add their figures to what is logged."""

    def __init__(
        self, config: TrainConfig, throughput: Throughput, power: PowerCallback | None = None, **words: Any
    ) -> None:
        self.config, self.throughput, self.power = config, throughput, power
        self.pending: dict[str, Any] = {}
        self.optimizer: Any
        super().__init__(**words)
        if parallel.is_sharded(self.model):
            # Autocast and placement only: the model is already what accelerate would wrap it into.
            self.accelerator.prepare_model = functools.partial(self.accelerator.prepare_model, evaluation_mode=True)
        self.add_callback(Restore(self))
        self.leaving = RawValue("b", 0)  # shared with the processes that read data

    def train(self, *arguments: Any, **words: Any) -> Any:
        try:
            return super().train(*arguments, **words)
        except (RuntimeError, ValueError, MemoryError) as error:
            stopped = explained(error, self.config)
            raise error if stopped is None else stopped from error
        finally:
            self.leaving.value = 1

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        if self.optimizer is None:
            config = self.config
            rate = config.learning_rate
            self.optimizer = optimizer_of(
                config.optimizer,
                self.model if model is None else model,
                learning_rate=rate,
                muon_learning_rate=rate if config.muon_learning_rate is None else config.muon_learning_rate,
                weight_decay=config.weight_decay,
                betas=(config.beta1, config.beta2),
            )
        return self.optimizer

    def _get_train_sampler(self, train_dataset: Dataset[Any] | None = None) -> Sampler[int]:
        # The order is in the dataset, by seed and epoch.
        dataset: Any = self.train_dataset if train_dataset is None else train_dataset
        return SequentialSampler(dataset)

    def get_train_dataloader(self) -> Any:
        loader = super().get_train_dataloader()
        return self.shielded(loader)

    def shielded(self, loader: Any) -> Any:
        own: Any = getattr(loader, "base_dataloader", loader)  # inside accelerate's
        own.worker_init_fn = functools.partial(leave_signals_to_the_run, self.leaving, own.worker_init_fn)
        return loader

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        self.args.dataloader_drop_last = False
        try:
            return self.shielded(super().get_eval_dataloader(eval_dataset))
        finally:
            self.args.dataloader_drop_last = True

    def floating_point_ops(self, inputs: dict[str, Tensor]) -> int:
        return 0  # counted by Throughput; Trainer's own count walks over all parameters in every step

    def compute_loss(self, *inputs: Any, **words: Any) -> Any:
        try:
            return super().compute_loss(*inputs, **words)
        except ValueError:
            # A power that heads learn is looked at in the forward: one that is gone is not the user's to mend.
            if all(bool(parameter.isfinite().all()) for parameter in self.model.parameters()):
                raise
            self.stop_if_not_finite(torch.tensor(torch.nan), None)
            raise

    def _clip_grad_norm(self, model: nn.Module) -> Tensor:
        return whole(super()._clip_grad_norm(model))

    def _get_grad_norm(self, model: nn.Module, grad_norm: Tensor | None = None) -> Tensor | float:
        return whole(super()._get_grad_norm(model, grad_norm=grad_norm))

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "train_runtime" in logs:
            return  # Trainer's sum at the end knows of this start alone: wrong in a run that was interrupted
        if "loss" in logs:
            logs["tokens"] = self.state.global_step * self.throughput.tokens_per_step
            if self.power is not None and self.power.power is not None:
                logs["power"] = self.power.power
            logs |= self.throughput.since_last(self.state.global_step)
        super().log(logs, start_time)

    def _maybe_log_save_evaluate(self, tr_loss: Tensor, grad_norm: Any, *rest: Any, **words: Any) -> None:
        if self.control.should_log or self.control.should_save:
            self.stop_if_not_finite(tr_loss, grad_norm)
        super()._maybe_log_save_evaluate(tr_loss, grad_norm, *rest, **words)

    def stop_if_not_finite(self, loss: Tensor, grad_norm: Tensor | float | None) -> None:
        """Looked at before anything is logged or saved, so that no checkpoint holds weights that are gone."""
        # In float16 a step whose gradient overflows is left out, and the loss is scaled down for the next.
        total = loss.detach().float() + (0.0 if grad_norm is None or self.args.fp16 else grad_norm)
        if bool(torch.isfinite(total)):
            return
        step = self.state.global_step
        run = Path(self.args.output_dir)
        before = checkpoints.checkpoints(run)
        intact = (
            f"the checkpoint of step {checkpoints.step_of(before[0])} is intact: to continue from it, run the same "
            f"command with another --learning-rate (now {self.config.learning_rate:g}) or --clip, and "
            "--allow-config-changes"
            if before
            else f"no checkpoint was written yet: start again with a lower --learning-rate "
            f"(now {self.config.learning_rate:g}) or a longer --warmup"
        )
        raise RunStopped(
            f"the loss or its gradient became NaN or infinite between step {self._globalstep_last_logged} and step "
            f"{step}, and nothing of it was saved; {intact}"
        )

    def _evaluate(self, *rest: Any, **words: Any) -> Any:
        begun = time.perf_counter()
        found = super()._evaluate(*rest, **words)
        parallel.reshard(self.model)
        self.throughput.paused += time.perf_counter() - begun
        return found

    # ---- checkpoints

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        begun = time.perf_counter()
        run = Path(self.args.output_dir)
        checkpoints.write(run, self.state.global_step, self.config.keep, self.fill)
        self.throughput.paused += time.perf_counter() - begun

    def fill(self, folder: Path) -> None:
        """The files of a checkpoint; every process calls it."""
        pending = parallel.everyone(float(self._tr_loss))
        checkpoints.save_state(folder, self.model, bare(self.optimizer))
        self._save_rng_state(str(folder))
        if not parallel.is_first():
            return
        torch.save(self.lr_scheduler.state_dict(), folder / SCHEDULER)
        for callback in (*self.callback_handler.callbacks, self.control):
            if isinstance(callback, ExportableState):
                self.state.stateful_callbacks[type(callback).__name__] = callback.state()
        self.state.save_to_json(str(folder / TRAINER_STATE))
        position = {
            "step": self.state.global_step,
            "sequences": self.state.global_step * self.config.batch_size,
            "processes": parallel.world_size(),
            "pending_losses": pending,
            "last_logged_step": self._globalstep_last_logged,
        }
        (folder / POSITION).write_text(json.dumps(position, indent=1) + "\n")

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Weights come with the optimizer's state, once the model is as it will be trained."""

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        folder = Path(checkpoint)
        checkpoints.load_state(folder, self.model, bare(self.optimizer))
        with checkpoints.refusing(folder, SCHEDULER):
            self.lr_scheduler.load_state_dict(torch.load(folder / SCHEDULER, weights_only=True))
            resume_rates(self.lr_scheduler, bare(self.optimizer))
        self.pending = checkpoints.position(folder)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        with checkpoints.refusing(Path(checkpoint or ""), "rng_state"):
            super()._load_rng_state(checkpoint)


class Restore(TrainerCallback):
    """Trainer starts counting losses anew when it continues: puts back what was not logged yet."""

    def __init__(self, trainer: SoftplusTrainer) -> None:
        self.trainer = trainer

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any
    ) -> None:
        trainer, pending = self.trainer, self.trainer.pending
        trainer.throughput.restart(state.global_step)
        # Trainer goes on with the intervals of the checkpoint, even where they were changed since.
        state.logging_steps, state.save_steps, state.eval_steps = args.logging_steps, args.save_steps, args.eval_steps
        if not pending:
            return
        losses = pending["pending_losses"]
        same = len(losses) == parallel.world_size()
        trainer._tr_loss += losses[parallel.rank()] if same else sum(losses) / len(losses)
        trainer._globalstep_last_logged = pending["last_logged_step"]


def explained(error: Exception, config: TrainConfig) -> RunStopped | None:
    """What stopped the run, where the error is not from its own code; None where it may be."""
    words = str(error)
    again = "run the same command again: it continues from the last checkpoint"
    if isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in words:
        if parallel.world_size() > 1:  # the others do not stop with a sentence
            return None
        first = words.splitlines()[0] if words else "MemoryError"
        return RunStopped(
            f"out of memory ({first}): lower --micro-batch-size (now {config.micro_batch_size}), or use "
            f"--loss chunked or --gradient-checkpointing, and {again}"
        )
    if words.startswith("DataLoader worker"):
        return RunStopped(f"a process that reads data was killed ({words.splitlines()[0].rstrip('. ')}): {again}")
    if words.startswith("Caught ") and "in DataLoader worker" in words:
        return RunStopped(f"a sequence cannot be read ({words.rstrip().splitlines()[-1]}). Mend the data and {again}")
    return None


def bare(optimizer: Any) -> torch.optim.Optimizer:
    """The optimizer inside accelerate's."""
    return getattr(optimizer, "optimizer", optimizer)


def resume_rates(schedule: torch.optim.lr_scheduler.LambdaLR, optimizer: torch.optim.Optimizer) -> None:
    """Where the schedule stands comes from the checkpoint, its peak from this start, in case it was changed."""
    schedule.base_lrs = [group["initial_lr"] for group in optimizer.param_groups]
    for group, peak, factor in zip(optimizer.param_groups, schedule.base_lrs, schedule.lr_lambdas, strict=True):
        group["lr"] = peak * factor(schedule.last_epoch)


def whole(value: Any) -> Any:
    """The norm of sharded gradients is itself in parts."""
    return value.full_tensor() if hasattr(value, "full_tensor") else value
