"""A run that is asked to stop finishes its step, writes a checkpoint and leaves: SIGTERM, or Ctrl-C."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from softplus_attention.training import parallel
from softplus_attention.training.errors import RunStopped

SIGNALS = (signal.SIGTERM, signal.SIGINT)


def leave_signals_to_the_run(leaving: Any, then: Callable[[int], None] | None, worker: int) -> None:
    """For a process that reads data: a signal to the whole group must not take it from under the step. Once the run is
    ``leaving`` it ends at SIGTERM, or Python would wait for it for ever."""

    def end(number: int, frame: FrameType | None) -> None:
        if leaving.value:
            os._exit(0)

    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if then is not None:
        then(worker)


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
        self.before: dict[signal.Signals, Any] = {}

    @contextmanager
    def listening(self) -> Iterator[None]:
        # Only the main thread may listen. What somebody set to be ignored (a run in the background) stays ignored.
        here = threading.current_thread() is threading.main_thread()
        found = {number: signal.getsignal(number) for number in SIGNALS if here}
        self.before = {number: one for number, one in found.items() if one not in (signal.SIG_IGN, None)}
        for number in self.before:
            signal.signal(number, self.ask)
        try:
            yield
        finally:
            self.stop_listening()

    def stop_listening(self) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def ask(self, number: int, frame: FrameType | None) -> None:
        self.asked = number
        self.stop_listening()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any) -> None:
        # All processes have to stop after the same step, and to ask each other costs a wait for the device: a run of
        # several does so where it waits anyway, to log.
        if parallel.world_size() == 1:
            self.stopped_by = self.asked
        elif control.should_log:
            self.stopped_by = max(parallel.everyone(self.asked))
        if self.stopped_by and state.global_step < state.max_steps:
            control.should_save = control.should_training_stop = True

    def leave_if_asked(self, step: int, steps: int) -> None:
        if self.stopped_by and step < steps:
            words = f"stopped by {signal.Signals(self.stopped_by).name} after step {step} of {steps}, with a checkpoint"
            raise Terminated(f"{words}: run the same command again to go on", self.stopped_by)
