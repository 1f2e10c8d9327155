"""Forms of a synthetic task: results of two of them are not two models of one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def form_of(task: str, settings: Mapping[str, Any]) -> str:
    """The task in words, with what makes its forms differ, as far as the settings of the result say it."""
    pairs = settings.get("pairs")
    if task != "recall" or pairs is None:
        return task
    return f"recall, {pairs} pairs" if pairs else "recall, as many pairs as fit"
