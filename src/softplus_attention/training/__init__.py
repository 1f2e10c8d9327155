"""Training with transformers' Trainer: ``train(TrainConfig(...))``, or ``softplus-attention train``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from softplus_attention.utils.lazy import lazy_names

if TYPE_CHECKING:
    from softplus_attention.training.config import PRESETS, TrainConfig, configured
    from softplus_attention.training.errors import RunStopped
    from softplus_attention.training.run import train
    from softplus_attention.training.schedules import PowerSchedule, power_schedule

__all__ = ["PRESETS", "PowerSchedule", "RunStopped", "TrainConfig", "configured", "power_schedule", "train"]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "PRESETS": "config",
        "PowerSchedule": "schedules",
        "RunStopped": "errors",
        "TrainConfig": "config",
        "configured": "config",
        "power_schedule": "schedules",
        "train": "run",
    },
)
