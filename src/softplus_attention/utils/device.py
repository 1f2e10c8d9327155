"""Which device a command runs on, checked before any work."""

from __future__ import annotations

import torch

from softplus_attention.validation import fail


def parse_device(name: str | None) -> torch.device:
    """By its name, whether it is here or not; without a name the best that is here."""
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return torch.device(name)
    except RuntimeError:
        fail("--device", "a torch device such as cpu or cuda:0", repr(name))


def resolve_device(name: str | None) -> torch.device:
    device = parse_device(name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        fail("--device", f"one of those that torch sees here, {torch.cuda.device_count()} of CUDA", repr(name))
    return device


def check_device(name: str | None) -> None:
    """torch knows the names of devices that it cannot use, and says so only once something is put on them."""
    device = resolve_device(name)
    try:
        torch.empty(1, device=device)
        there = device.type != "meta"  # has shapes and no numbers
    except (AssertionError, ImportError, RuntimeError):
        there = False
    if not there:
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        known = "cpu" if accelerator is None else f"cpu or {accelerator.type}"
        fail("--device", f"one that torch can use here, {known}", repr(name))
