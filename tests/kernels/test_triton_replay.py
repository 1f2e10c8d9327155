"""Calls that are launched as a whole, with a stand-in for the kernel: which of them are alike, and where their tensors
lie. ``launches_without_gpu.py`` compares the launches of the real ones, ``gpu_checks.py replays`` their numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from stub_kernel import Kernel, Launcher
from torch import Tensor

pytest.importorskip("triton")
from softplus_attention.kernels import launch_cache
from softplus_attention.kernels.launch_cache import Scratch, launch, replay, replay_key


@pytest.fixture(autouse=True)
def known_binaries(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (launch_cache, launch_cache):
        monkeypatch.setattr(module, "KNOWN_BINARIES", True)
    monkeypatch.setattr(launch_cache, "_calls", {})


class Caller:
    """Launches one kernel with an input, a part of an output, and scratch; counts how often it was asked what to
    launch."""

    def __init__(self, all_of_it: bool = True) -> None:
        self.kernel, self.binary_key, self.all_of_it, self.asked = Kernel(), object(), all_of_it, 0

    def __call__(self, q: Tensor, out: Tensor, key: Any = "given") -> None:
        def launch_all() -> Scratch | None:
            self.asked += 1
            rows, again = q.new_empty(8), q.new_zeros(32, dtype=torch.int32)
            tensors = (q, out[2:], rows, again, again[16:])
            launch(self.kernel, (1, 2, 3), tensors, (7,), {}, self.binary_key, 9)
            return Scratch((rows,), (again,)) if self.all_of_it else None

        key = replay_key("call", (q,), None, (1.0,)) if key == "given" else key
        replay(key, (q, out), launch_all)


def tensors() -> tuple[Tensor, Tensor]:
    return torch.zeros(4, 16), torch.zeros(3, 16)


def test_addresses_are_those_of_the_new_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    call = Caller()
    call(*tensors())
    made: list[tuple[str, Tensor]] = []

    def noted(name: str) -> Callable[..., Tensor]:
        original = getattr(Tensor, name)
        return lambda *given, **named: made.append((name, original(*given, **named))) or made[-1][1]

    for name in ("new_empty", "new_zeros"):
        monkeypatch.setattr(Tensor, name, noted(name))
    q, out = tensors()
    call(q, out)
    assert call.asked == 1
    [(first, rows), (second, again)] = made
    assert (first, second) == ("new_empty", "new_zeros")
    assert (rows.shape, rows.dtype, again.shape, again.dtype) == ((8,), torch.float32, (32,), torch.int32)
    [run] = call.kernel.binary.run.launched
    assert run[:3] == (1, 2, 3)
    of_out, of_again = out.data_ptr() + 2 * 64, again.data_ptr() + 64
    assert run[-6:] == (q.data_ptr(), of_out, rows.data_ptr(), again.data_ptr(), of_again, 7)


def test_what_is_not_known_is_asked_again() -> None:
    for call, key in ((Caller(), None), (Caller(all_of_it=False), "given")):
        for _ in range(3):
            call(*tensors(), key=key)
        assert call.asked == 3
    call = Caller()
    call(*tensors())
    call(torch.zeros(4, 32), torch.zeros(3, 32))
    assert call.asked == 2


def test_a_part_of_two_tensors_is_of_neither() -> None:
    """As powers that lie between the numbers of the queries: in the next call they may lie elsewhere."""
    call = Caller()
    for _ in range(2):
        together = torch.zeros(8, 16)
        call(together[:4], together[:8])  # whose part begins where both have it
    assert call.asked == 2


@pytest.mark.parametrize("why", ["memory of their own", "another version of Triton"])
def test_some_binaries_are_launched_by_triton(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if why == "memory of their own":
        monkeypatch.setattr(Launcher, "profile_scratch_size", 128)
    else:
        monkeypatch.setattr(launch_cache, "KNOWN_LAUNCHERS", ())
    call = Caller()
    call(*tensors())
    q, out = tensors()
    call(q, out)
    assert call.asked == 1
    run = call.kernel.binary.run
    assert run.launched == []
    [arguments] = run.called
    assert arguments[1:3] == (2, 3)
    assert arguments[4:9] == ("function", "metadata", None, None, None)
    assert (arguments[9], arguments[-1]) == (q.data_ptr(), 7)


def test_few_calls_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_cache, "MAX_CALLS", 3)
    call = Caller()
    for length in range(1, 12):
        call(torch.zeros(4, 16 * length), torch.zeros(3, 16))
    assert 1 <= len(launch_cache._calls) <= 3


def test_a_failed_call_leaves_nothing_behind() -> None:
    def fail() -> Scratch:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        replay("key", tensors(), fail)
    assert getattr(launch_cache._of_thread, "launches", None) is None
    assert not launch_cache._calls


OPTIONS: tuple[Any, ...] = (None, None, None, True, None, True, 15.0, None, [1.0, 2.0, 3.0], True, 4.0, False, False)


def test_keys_tell_calls_apart() -> None:
    q, k = torch.zeros(2, 4, 32, 64), torch.zeros(2, 4, 32, 64)
    powers = torch.zeros(1, 4, 32)
    others: list[Any] = [
        replay_key("backward", (q, k), None, OPTIONS),
        replay_key("forward", (q[:1], k), None, OPTIONS),
        replay_key("forward", (q, k[:, :2]), None, OPTIONS),
        replay_key("forward", (q.transpose(1, 2).contiguous().transpose(1, 2), k), None, OPTIONS),
        replay_key("forward", (q.half(), k), None, OPTIONS),
        replay_key("forward", (q, k), powers, OPTIONS),
        replay_key("forward", (q, k), powers[:, :, :1], OPTIONS),
        replay_key("forward", (q, k), powers.double(), OPTIONS),
        replay_key("forward", (q, k), powers.expand(2, 4, 32), OPTIONS),
    ]
    changed = {3: False, 4: 7, 5: False, 6: 3.0, 8: [1.0, 2.0, 4.0], 9: False, 10: 5.0, 11: True, 12: True}
    for place, value in changed.items():
        options = (*OPTIONS[:place], value, *OPTIONS[place + 1 :])
        others.append(replay_key("forward", (q, k), None, options))
    mine = replay_key("forward", (q, k), None, OPTIONS)
    assert mine == replay_key("forward", (torch.ones_like(q), torch.ones_like(k)), None, OPTIONS)
    assert None not in others
    assert len({mine, *others}) == 1 + len(others)


def test_calls_without_a_key() -> None:
    q, k, stats = torch.zeros(2, 4, 32, 64), torch.zeros(2, 4, 32, 64), torch.zeros(64)
    apart = torch.zeros(2 * 4 * 32 * 64 + 1)[1:].view(2, 4, 32, 64)
    powers = torch.zeros(1, 4, 32)
    assert replay_key("x", (q, k), powers, (powers, True), (stats,)) is not None
    assert replay_key("x", (q, apart), None, OPTIONS) is None  # not aligned
    assert replay_key("x", (q, k), torch.zeros(33)[1:], OPTIONS) is None
    assert replay_key("x", (q, k), None, OPTIONS, (stats[1:],)) is None
    assert (
        replay_key("x", (q, k.transpose(2, 3).contiguous().transpose(2, 3)), None, OPTIONS) is None
    )  # is copied first
    assert replay_key("x", (q, q), None, OPTIONS) is None
    assert replay_key("x", (q, k), None, (stats, True)) is None  # ranges or a mask
