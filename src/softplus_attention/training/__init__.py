"""Training on transformers' Trainer: ``train(TrainConfig(...))``, the same as ``softplus-attention train``."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from softplus_attention.training.config import PRESETS, TrainConfig, configured
    from softplus_attention.training.errors import RunStopped
    from softplus_attention.training.run import train
    from softplus_attention.training.schedules import PowerSchedule, power_schedule

HOMES = {
    "PRESETS": "config",
    "PowerSchedule": "schedules",
    "RunStopped": "errors",
    "TrainConfig": "config",
    "configured": "config",
    "power_schedule": "schedules",
    "train": "run",
}
__all__ = ["PRESETS", "PowerSchedule", "RunStopped", "TrainConfig", "configured", "power_schedule", "train"]


def __getattr__(name: str) -> Any:
    home = HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{home}"), name)


def __dir__() -> list[str]:
    return [*__all__]
