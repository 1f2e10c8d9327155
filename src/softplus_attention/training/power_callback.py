"""The power schedule as Trainer carries it out."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from softplus_attention.huggingface import set_power
from softplus_attention.training.schedules import PowerSchedule


class PowerCallback(TrainerCallback):
    """Sets the power of each step before it begins: it follows from the step, so a run that continues has it too."""

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
        # A run that was killed after its last step has no step left to begin.
        self.set(others["model"], max(0, state.global_step - 1))

    def set(self, model: Any, step: int) -> None:
        power = self.schedule.at(step, self.steps)
        if power != self.power:
            set_power(model, power)
            self.power = power
