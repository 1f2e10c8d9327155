"""The device a command runs on, checked before any work starts."""

from __future__ import annotations

import torch

from softplus_attention.validation import fail


def parse_device(name: str | None) -> torch.device:
    """The named device, available or not; without a name CUDA if available, else the CPU."""
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return torch.device(name)
    except RuntimeError:
        fail("--device", "a torch device such as cpu or cuda:0", repr(name))


def resolve_device(name: str | None) -> torch.device:
    device = parse_device(name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        fail("--device", f"available (torch sees {torch.cuda.device_count()} CUDA devices)", repr(name))
    return device


def check_device(name: str | None) -> None:
    """Allocates on the device: torch accepts the names of devices it cannot use until then."""
    device = resolve_device(name)
    try:
        torch.empty(1, device=device)
        is_usable = device.type != "meta"  # which has shapes but no data
    except (AssertionError, ImportError, RuntimeError):
        is_usable = False
    if not is_usable:
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        known = "cpu" if accelerator is None else f"cpu or {accelerator.type}"
        fail("--device", f"one that torch can use here, {known}", repr(name))
