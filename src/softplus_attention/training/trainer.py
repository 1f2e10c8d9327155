"""transformers' Trainer with this package's optimizers, sharding, checkpoints, power schedules and signal handling."""

from __future__ import annotations

import functools
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from multiprocessing.sharedctypes import RawValue
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, Sampler, SequentialSampler
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState

from softplus_attention.distributed import shard_batch, sharded
from softplus_attention.huggingface import set_power
from softplus_attention.training import checkpoints, distributed
from softplus_attention.training.checkpoints import POSITION, SCHEDULER, TRAINER_STATE
from softplus_attention.training.config import TrainConfig
from softplus_attention.training.errors import RunStopped
from softplus_attention.training.metrics import Throughput
from softplus_attention.training.optimizers import build_optimizer
from softplus_attention.training.schedules import PowerSchedule
from softplus_attention.utils.files import write_json

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class SoftplusTrainer(Trainer):
    """Trainer for a ``TrainConfig``; ``power`` and ``throughput`` add their values to each log entry."""

    def __init__(
        self,
        config: TrainConfig,
        throughput: Throughput,
        power: PowerCallback | None = None,
        group: Any = None,
        **kwargs: Any,
    ) -> None:
        self.config, self.throughput, self.power = config, throughput, power
        self.group = group  # the processes that share a sequence
        self.pending: dict[str, Any] = {}
        self.optimizer: Any
        super().__init__(**kwargs)
        if distributed.is_sharded(self.model):
            # Autocast and placement only: the model is already sharded.
            self.accelerator.prepare_model = functools.partial(self.accelerator.prepare_model, evaluation_mode=True)
        self.add_callback(RestorePendingLoss(self))
        self.leaving = RawValue("b", 0)  # shared with the data loader workers

    def train(self, *arguments: Any, **kwargs: Any) -> Any:
        try:
            return super().train(*arguments, **kwargs)
        except Exception as error:
            stopped = explain(error, self.config)
            if stopped is None:
                raise
            raise stopped from error
        finally:
            self.leaving.value = 1

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        if self.optimizer is None:
            config = self.config
            rate = config.learning_rate
            self.optimizer = build_optimizer(
                config.optimizer,
                self.model if model is None else model,
                learning_rate=rate,
                muon_learning_rate=rate if config.muon_learning_rate is None else config.muon_learning_rate,
                weight_decay=config.weight_decay,
                betas=(config.beta1, config.beta2),
            )
        return self.optimizer

    def _get_train_sampler(self, train_dataset: Dataset[Any] | None = None) -> Sampler[int]:
        # The dataset is already shuffled, by seed and epoch.
        dataset: Any = self.train_dataset if train_dataset is None else train_dataset
        return SequentialSampler(dataset)

    def get_train_dataloader(self) -> Any:
        loader = super().get_train_dataloader()
        return self.ignoring_signals(loader)

    def ignoring_signals(self, loader: Any) -> Any:
        own: Any = getattr(loader, "base_dataloader", loader)  # inside accelerate's
        own.worker_init_fn = functools.partial(ignore_stop_signals, self.leaving, own.worker_init_fn)
        return loader

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        self.args.dataloader_drop_last = False
        try:
            return self.ignoring_signals(super().get_eval_dataloader(eval_dataset))
        finally:
            self.args.dataloader_drop_last = True

    def get_cp_size(self) -> int:
        return self.config.context_parallel

    def get_tp_size(self) -> int:
        return self.config.tensor_parallel

    def _prepare_context_parallel_inputs(self, model: nn.Module, inputs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Trainer calls this around each forward and backward: returns a context and the rows of this process."""
        if self.group is None:
            return nullcontext, inputs
        record, inputs = shard_batch(inputs, self.group)
        return functools.partial(sharded, record), inputs

    def floating_point_ops(self, inputs: dict[str, Tensor]) -> int:
        return 0  # counted by Throughput; Trainer's count iterates over all parameters in every step

    def compute_loss(self, *inputs: Any, **kwargs: Any) -> Any:
        try:
            return super().compute_loss(*inputs, **kwargs)
        except ValueError:
            # The forward pass validates learned powers; NaN powers come from divergence, not from the user.
            if all(bool(parameter.isfinite().all()) for parameter in self.model.parameters()):
                raise
            self.stop_if_not_finite(torch.tensor(torch.nan), None)
            raise

    def _clip_grad_norm(self, model: nn.Module) -> Tensor:
        if self.config.tensor_parallel > 1:
            parameters = list(model.parameters())
            norm = distributed.gradient_norm(parameters)
            torch.nn.utils.clip_grads_with_norm_(parameters, self.args.max_grad_norm, norm, foreach=False)
            return norm
        return full_norm(super()._clip_grad_norm(model))

    def _get_grad_norm(self, model: nn.Module, grad_norm: Tensor | None = None) -> Tensor | float:
        if grad_norm is None and self.config.tensor_parallel > 1:
            return distributed.gradient_norm(list(model.parameters()))
        return full_norm(super()._get_grad_norm(model, grad_norm=grad_norm))

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "train_runtime" in logs:
            return  # Trainer's final summary covers this start only, so it is wrong for a resumed run
        if "loss" in logs:
            logs["tokens"] = self.state.global_step * self.throughput.tokens_per_step
            if self.power is not None and self.power.power is not None:
                logs["power"] = self.power.power
            logs |= self.throughput.since_last(self.state.global_step)
        super().log(logs, start_time)

    def _maybe_log_save_evaluate(self, tr_loss: Tensor, grad_norm: Any, *rest: Any, **kwargs: Any) -> None:
        if self.control.should_log or self.control.should_save:
            self.stop_if_not_finite(tr_loss, grad_norm)
        super()._maybe_log_save_evaluate(tr_loss, grad_norm, *rest, **kwargs)

    def stop_if_not_finite(self, loss: Tensor, grad_norm: Tensor | float | None) -> None:
        """Called before logging and saving, so that no checkpoint contains NaN weights."""
        # In float16 a step with an overflowing gradient is skipped and the loss scale lowered.
        total = loss.detach().float() + (0.0 if grad_norm is None or self.args.fp16 else grad_norm)
        if bool(torch.isfinite(total)):
            return
        step = self.state.global_step
        run = Path(self.args.output_dir)
        before = checkpoints.checkpoints(run)
        intact = (
            f"the checkpoint of step {checkpoints.checkpoint_step(before[0])} is intact: to continue from it, run the "
            f"same command with another --learning-rate (now {self.config.learning_rate:g}) or --clip, and "
            "--allow-config-changes"
            if before
            else f"no checkpoint was written yet: start again with a lower --learning-rate "
            f"(now {self.config.learning_rate:g}) or a longer --warmup"
        )
        raise RunStopped(
            f"the loss or its gradient became NaN or infinite between step {self._globalstep_last_logged} and step "
            f"{step}. Nothing after that was saved; {intact}"
        )

    def _evaluate(self, *rest: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        found = super()._evaluate(*rest, **kwargs)
        distributed.reshard(self.model)
        self.throughput.paused += time.perf_counter() - start
        return found

    # ---- checkpoints

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        start = time.perf_counter()
        run = Path(self.args.output_dir)
        checkpoints.write(run, self.state.global_step, self.config.keep, self.fill)
        self.throughput.paused += time.perf_counter() - start

    def fill(self, folder: Path) -> None:
        """Writes the files of a checkpoint. Every process must call it."""
        pending = distributed.all_gather_objects(float(self._tr_loss))
        checkpoints.save_state(folder, self.model, unwrap(self.optimizer))
        self._save_rng_state(str(folder))
        if not distributed.is_rank0():
            return
        torch.save(self.lr_scheduler.state_dict(), folder / SCHEDULER)
        for callback in (*self.callback_handler.callbacks, self.control):
            if isinstance(callback, ExportableState):
                self.state.stateful_callbacks[type(callback).__name__] = callback.state()
        self.state.save_to_json(str(folder / TRAINER_STATE))
        position = {
            "step": self.state.global_step,
            "sequences": self.state.global_step * self.config.batch_size,
            "processes": distributed.world_size(),
            "pending_losses": pending,
            "last_logged_step": self._globalstep_last_logged,
        }
        write_json(folder / POSITION, position)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Skipped: weights are loaded with the optimizer state, after the model is wrapped."""

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        folder = Path(checkpoint)
        checkpoints.load_state(folder, self.model, unwrap(self.optimizer))
        with checkpoints.reject_on_error(folder, SCHEDULER):
            self.lr_scheduler.load_state_dict(torch.load(folder / SCHEDULER, weights_only=True))
            restore_learning_rates(self.lr_scheduler, unwrap(self.optimizer))
        self.pending = checkpoints.position(folder)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        with checkpoints.reject_on_error(Path(checkpoint or ""), "rng_state"):
            super()._load_rng_state(checkpoint)


class RestorePendingLoss(TrainerCallback):
    """Restores the loss that was not logged yet, which Trainer resets when it resumes."""

    def __init__(self, trainer: SoftplusTrainer) -> None:
        self.trainer = trainer

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any
    ) -> None:
        trainer, pending = self.trainer, self.trainer.pending
        trainer.throughput.restart(state.global_step)
        # Trainer would use the intervals stored in the checkpoint.
        state.logging_steps, state.save_steps, state.eval_steps = args.logging_steps, args.save_steps, args.eval_steps
        if not pending:
            return
        losses = pending["pending_losses"]
        same_world_size = len(losses) == distributed.world_size()
        trainer._tr_loss += losses[distributed.rank()] if same_world_size else sum(losses) / len(losses)
        trainer._globalstep_last_logged = pending["last_logged_step"]


def explain(error: Exception, config: TrainConfig) -> RunStopped | None:
    """A one-line error for external causes (memory, data, reporters); None for all others."""
    message = str(error)
    if config.report_to and type(error).__module__.partition(".")[0] == config.report_to:
        reason = " ".join(message.split())[:200]
        return RunStopped(f"{config.report_to} cannot be used ({reason}). Pass --report-to none to train without it")
    again = "run the same command again: it continues from the last checkpoint"
    if isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in message:
        if distributed.world_size() > 1:  # the other ranks would still fail with a traceback
            return None
        first = message.splitlines()[0] if message else "MemoryError"
        return RunStopped(
            f"out of memory ({first}): lower --micro-batch-size (now {config.micro_batch_size}), or use "
            f"--loss chunked or --gradient-checkpointing, and {again}"
        )
    # Batches of a killed worker are fetched from it by a socket.
    is_killed = config.workers > 0 and isinstance(error, ConnectionError | EOFError)
    if is_killed or message.startswith("DataLoader worker"):
        first = message.splitlines()[0].rstrip(". ") if message else type(error).__name__
        return RunStopped(f"a data loader worker was killed ({first}): {again}")
    if message.startswith("Caught ") and "in DataLoader worker" in message:
        return RunStopped(f"cannot read a sequence ({message.rstrip().splitlines()[-1]}). Fix the data and {again}")
    return None


def unwrap(optimizer: Any) -> torch.optim.Optimizer:
    """The optimizer inside accelerate's wrapper."""
    return getattr(optimizer, "optimizer", optimizer)


def restore_learning_rates(schedule: torch.optim.lr_scheduler.LambdaLR, optimizer: torch.optim.Optimizer) -> None:
    """Takes the position of the schedule from the checkpoint and the peak rates from the current settings."""
    schedule.base_lrs = [group["initial_lr"] for group in optimizer.param_groups]
    for group, peak, factor in zip(optimizer.param_groups, schedule.base_lrs, schedule.lr_lambdas, strict=True):
        group["lr"] = peak * factor(schedule.last_epoch)


def full_norm(value: Any) -> Any:
    """The gradient norm as a plain tensor; of sharded gradients it is a DTensor."""
    return value.full_tensor() if hasattr(value, "full_tensor") else value


# ---- the power of each step


class PowerCallback(TrainerCallback):
    """Sets the power before each step. It depends only on the step, so it needs no state."""

    def __init__(self, schedule: PowerSchedule, steps: int) -> None:
        self.schedule, self.steps = schedule, steps
        self.power: float | None = None

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any
    ) -> None:
        self.set(others["model"], state.global_step)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any
    ) -> None:
        # A run resumed after its last step calls no on_step_begin.
        self.set(others["model"], max(0, state.global_step - 1))

    def set(self, model: Any, step: int) -> None:
        power = self.schedule.at(step, self.steps)
        if power != self.power:
            set_power(model, power)
            self.power = power


# ---- stop signals: finish the step and write a checkpoint


def ignore_stop_signals(leaving: Any, then: Callable[[int], None] | None, worker: int) -> None:
    """Initialiser of data loader workers, which must survive a signal to the process group until the step is done.

    Once the run is ``leaving``, a worker exits at SIGTERM; otherwise Python would wait for it forever.
    """

    def end(number: int, frame: FrameType | None) -> None:
        if leaving.value:
            os._exit(0)

    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if then is not None:
        then(worker)


class Terminated(RunStopped):
    """The run was stopped by a signal and can be resumed."""

    def __init__(self, message: str, signal_number: int) -> None:
        super().__init__(message)
        self.exit_status = 128 + signal_number


class Termination(TrainerCallback):
    """Stops the run after the step in which a signal arrives. A second signal stops it immediately."""

    def __init__(self) -> None:
        self.received = 0  # the signal received by this process
        self.stopped_by = 0  # the signal that all processes agreed on
        self.before: dict[signal.Signals, Any] = {}

    @contextmanager
    def handle_signals(self) -> Iterator[None]:
        # Python allows this in the main thread only. Ignored signals (of a background job) stay ignored.
        is_main = threading.current_thread() is threading.main_thread()
        handlers = {number: signal.getsignal(number) for number in SIGNALS if is_main}
        self.before = {number: one for number, one in handlers.items() if one not in (signal.SIG_IGN, None)}
        for number in self.before:
            signal.signal(number, self.receive)
        try:
            yield
        finally:
            self.restore_handlers()

    def restore_handlers(self) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def receive(self, number: int, frame: FrameType | None) -> None:
        self.received = number
        self.restore_handlers()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any) -> None:
        # All processes must stop after the same step. Agreeing on it synchronises with the device, so several
        # processes do it only when logging synchronises anyway.
        if distributed.world_size() == 1:
            self.stopped_by = self.received
        elif control.should_log:
            self.stopped_by = max(distributed.all_gather_objects(self.received))
        if self.stopped_by and state.global_step < state.max_steps:
            control.should_save = control.should_training_stop = True

    def raise_if_stopped(self, step: int, steps: int) -> None:
        if self.stopped_by and step < steps:
            message = (
                f"stopped by {signal.Signals(self.stopped_by).name} after step {step} of {steps}, with a checkpoint"
            )
            raise Terminated(f"{message}: run the same command again to continue", self.stopped_by)
