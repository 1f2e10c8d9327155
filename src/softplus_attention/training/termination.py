"""A run that is asked to stop finishes its step, writes a checkpoint and leaves: SIGTERM, or Ctrl-C."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from softplus_attention.training import parallel
from softplus_attention.training.errors import RunStopped

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Terminated(RunStopped):
    """The run was asked to stop and did; started again, it goes on."""

    def __init__(self, message: str, signal_number: int) -> None:
        super().__init__(message)
        self.exit_status = 128 + signal_number


class Termination(TrainerCallback):
    """Stops after the step in which a signal came. A second one stops at once, as if nobody listened."""

    def __init__(self) -> None:
        self.asked = 0  # the number of the signal
        self.stopped_by = 0

    @contextmanager
    def listening(self) -> Iterator[None]:
        # Signals reach the main thread only; a run inside of another one is not ours to stop.
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self.ask) for number in SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def ask(self, number: int, frame: FrameType | None) -> None:
        self.asked = number
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any) -> None:
        # All processes have to stop after the same step, and to ask each other costs a wait for the device: a run of
        # several does so where it waits anyway, to log.
        if parallel.world_size() > 1 and not control.should_log:
            return
        self.stopped_by = max(parallel.everyone(self.asked))
        if self.stopped_by and state.global_step < state.max_steps:
            control.should_save = control.should_training_stop = True

    def leave_if_asked(self, step: int, steps: int) -> None:
        if self.stopped_by and step < steps:
            words = f"stopped by {signal.Signals(self.stopped_by).name} after step {step} of {steps}, with a checkpoint"
            raise Terminated(f"{words}: run the same command again to go on", self.stopped_by)
