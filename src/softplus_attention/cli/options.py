"""Checks of options that several commands take."""

from __future__ import annotations

import torch

from softplus_attention.validation import fail


def check_device(name: str | None) -> None:
    """torch knows the names of devices that it cannot use, and says so only once something is put on them."""
    from softplus_attention.huggingface.loading import device_of

    device = device_of(name)
    try:
        torch.empty(1, device=device)
        there = device.type != "meta"  # has shapes and no numbers
    except (AssertionError, ImportError, RuntimeError):
        there = False
    if not there:
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        known = "cpu" if accelerator is None else f"cpu or {accelerator.type}"
        fail("--device", f"one that torch can use here, {known}", repr(name))
