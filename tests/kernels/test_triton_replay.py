"""Replays of whole calls by the launch cache, with a stub kernel: cache keys and tensor addresses.

``launches_without_gpu.py`` compares launches of real kernels, ``gpu_checks.py replays`` their results.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from stub_kernel import Kernel, Launcher
from torch import Tensor

pytest.importorskip("triton")
from softplus_attention.kernels import launch_cache, private_launch
from softplus_attention.kernels.launch_cache import Scratch, launch, replay, replay_key


@pytest.fixture(autouse=True)
def known_binaries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(private_launch, "is_known", lambda: True)
    monkeypatch.setattr(launch_cache, "_calls", {})


class Caller:
    """Launches one kernel with an input, part of an output, and scratch. Counts the calls that were not replayed."""

    def __init__(self, replayable: bool = True) -> None:
        self.kernel, self.binary_key, self.replayable, self.prepared = Kernel(), object(), replayable, 0

    def __call__(self, q: Tensor, out: Tensor, key: Any = "given") -> None:
        def launch_all() -> Scratch | None:
            self.prepared += 1
            rows, blocks = q.new_empty(8), q.new_zeros(32, dtype=torch.int32)
            tensors = (q, out[2:], rows, blocks, blocks[16:])
            launch(self.kernel, (1, 2, 3), tensors, (7,), {}, self.binary_key, 9)
            return Scratch((rows,), (blocks,)) if self.replayable else None

        key = replay_key("call", (q,), None, (1.0,)) if key == "given" else key
        replay(key, (q, out), launch_all)


def tensors() -> tuple[Tensor, Tensor]:
    return torch.zeros(4, 16), torch.zeros(3, 16)


def test_replay_uses_new_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    call = Caller()
    call(*tensors())
    made: list[tuple[str, Tensor]] = []

    def record(name: str) -> Callable[..., Tensor]:
        original = getattr(Tensor, name)
        return lambda *args, **kwargs: made.append((name, original(*args, **kwargs))) or made[-1][1]

    for name in ("new_empty", "new_zeros"):
        monkeypatch.setattr(Tensor, name, record(name))
    q, out = tensors()
    call(q, out)
    assert call.prepared == 1
    [(first, rows), (second, blocks)] = made
    assert (first, second) == ("new_empty", "new_zeros")
    assert (rows.shape, rows.dtype, blocks.shape, blocks.dtype) == ((8,), torch.float32, (32,), torch.int32)
    [run] = call.kernel.binary.run.launched
    assert run[:3] == (1, 2, 3)
    out_part, second_half = out.data_ptr() + 2 * 64, blocks.data_ptr() + 64
    assert run[-6:] == (q.data_ptr(), out_part, rows.data_ptr(), blocks.data_ptr(), second_half, 7)


def test_unknown_calls_are_prepared_again() -> None:
    for call, key in ((Caller(), None), (Caller(replayable=False), "given")):
        for _ in range(3):
            call(*tensors(), key=key)
        assert call.prepared == 3
    call = Caller()
    call(*tensors())
    call(torch.zeros(4, 32), torch.zeros(3, 32))
    assert call.prepared == 2


def test_overlapping_tensors_are_not_replayed() -> None:
    """A view at an address inside two inputs cannot be assigned to either, since they may be separate next time."""
    call = Caller()
    for _ in range(2):
        together = torch.zeros(8, 16)
        call(together[:4], together[:8])  # the view of `out` starts inside both
    assert call.prepared == 2


@pytest.mark.parametrize("why", ["own scratch memory", "unknown version of Triton"])
def test_triton_launches_and_nothing_is_replayed(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if why == "own scratch memory":
        monkeypatch.setattr(Launcher, "profile_scratch_size", 128)
    else:
        monkeypatch.setattr(private_launch, "is_known", lambda: False)
    call = Caller()
    call(*tensors())
    q, out = tensors()
    call(q, out)
    assert call.prepared == 2
    binary = call.kernel.binary
    assert binary.run.launched == []
    [(grid, (first, *_, number), options)] = binary.calls
    assert (grid, number, options) == ((1, 2, 3), 7, {})
    assert first is q


def test_number_of_cached_calls_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_cache, "MAX_CALLS", 3)
    call = Caller()
    for length in range(1, 12):
        call(torch.zeros(4, 16 * length), torch.zeros(3, 16))
    assert 1 <= len(launch_cache._calls) <= 3


def test_failed_call_is_not_cached() -> None:
    def fail() -> Scratch:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        replay("key", tensors(), fail)
    assert getattr(launch_cache._of_thread, "launches", None) is None
    assert not launch_cache._calls


OPTIONS: tuple[Any, ...] = (None, None, None, True, None, True, 15.0, None, [1.0, 2.0, 3.0], True, 4.0, False, False)


def test_different_calls_have_different_keys() -> None:
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
    for index, value in changed.items():
        options = (*OPTIONS[:index], value, *OPTIONS[index + 1 :])
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
