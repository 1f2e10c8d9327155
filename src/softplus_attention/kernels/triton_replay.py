"""Whole calls once more: all that a forward or a backward launches, but for the addresses of its tensors.

A call says which launches it needs by many small questions, about shapes, strides, powers and alignment. For calls that
differ in nothing but where their tensors lie, the answers are the same, and asking takes Python longer than launching.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from softplus_attention.kernels.triton_relaunch import (
    ALIGNMENT,
    KNOWN_BINARIES,
    Launch,
    Relaunch,
    current_stream,
    launches_itself,
    noted,
    relaunch_of,
)

MOST_CALLS = 1024  # that are remembered: lengths may all differ


class Scratch(NamedTuple):
    """What a call has allocated for itself."""

    empty: tuple[Tensor, ...] = ()
    zeros: tuple[Tensor, ...] = ()


class ReplayedLaunch(NamedTuple):
    """A launch. Tensors are named by their number among those of the call, and how many bytes after its first element
    they begin."""

    run: Relaunch
    grid: tuple[int, int, int]
    tiles: list[tuple[int, tuple[Any, ...]]]  # a tensor, and what ``Tiles.described`` says of it after its address
    places: list[tuple[int, int]]
    numbers: tuple[Any, ...]


class ReplayedCall(NamedTuple):
    steps: list[ReplayedLaunch]
    empty: list[tuple[torch.Size, torch.dtype]]
    zeros: list[tuple[torch.Size, torch.dtype]]


_calls: dict[Hashable, ReplayedCall] = {}


def key_of(
    name: str,
    given: tuple[Tensor, ...],
    powers: Tensor | None,
    options: tuple[Any, ...],
    others: tuple[Tensor, ...] = (),
) -> Hashable:
    """Equal for calls that launch the same; None where one may differ in more than is looked at here: in tensors among
    the options other than ``powers``, in addresses that are not aligned, or in copies that are made first. None also
    where one tensor is given twice: which of the two a launch takes would not be known. Of ``others`` nothing but the
    address is free."""
    if not KNOWN_BINARIES or len({id(x) for x in given}) < len(given):
        return None
    of_options: list[Any] = []
    for x in options:
        if isinstance(x, Tensor) and x is not powers:
            return None
        of_options.append(tuple(x) if isinstance(x, list) else None if x is powers else x)
    bits = 0
    of_tensors: list[Any] = [name, given[0].device]
    for tensor in given:
        strides = tensor.stride()
        bits |= tensor.data_ptr() if strides[-1] == 1 else 1
        of_tensors += (tensor.dtype, tensor.shape, strides)
    for tensor in others:
        bits |= tensor.data_ptr()
    if powers is not None:
        bits |= powers.data_ptr()
        of_tensors += (powers.dtype, powers.shape, powers.stride())
    return (*of_tensors, *of_options) if bits % ALIGNMENT == 0 else None


def replay(key: Hashable, tensors: tuple[Tensor, ...], launch_all: Callable[[], Scratch | None]) -> None:
    """Launches what ``launch_all`` has launched for an earlier call of the same key; at first, and where there is none,
    calls it. ``tensors`` are all that it reads and writes, but for what it allocates and returns; None in place of that
    says that not all went by ``triton_relaunch.launch``, and nothing is remembered."""
    call = None if key is None else _calls.get(key)
    if call is not None and launches_itself():
        like = tensors[0]
        own = [like.new_empty(shape, dtype=dtype) for shape, dtype in call.empty]
        own += [like.new_zeros(shape, dtype=dtype) for shape, dtype in call.zeros]
        first = [x.data_ptr() for x in (*tensors, *own)]
        stream = current_stream(like.device)
        for run, grid, tiles, places, numbers in call.steps:
            run(grid, stream, [(first[i], *x) for i, x in tiles], [first[i] + offset for i, offset in places], numbers)
        return
    with noted() as made:
        scratch = launch_all()
    if key is None or scratch is None or not launches_itself():
        return
    all_tensors = (*tensors, *scratch.empty, *scratch.zeros)
    steps = [step for x in made if (step := step_of(x, all_tensors)) is not None]
    if len(steps) < len(made):
        return
    if len(_calls) >= MOST_CALLS:
        _calls.clear()
    _calls[key] = ReplayedCall(steps, *([(x.shape, x.dtype) for x in some] for some in scratch))


def step_of(launch: Launch, tensors: tuple[Tensor, ...]) -> ReplayedLaunch | None:
    """None where no binary is kept, or where it is not sure which tensors it takes."""
    tiled = [place_of(x.base, tensors) for x in launch.tiles]
    places = [place for x in launch.tensors if (place := place_of(x, tensors)) is not None]
    tiles = [(y[0], x.described()[1:]) for x, y in zip(launch.tiles, tiled, strict=True) if y is not None]
    if launch.key is None or len(tiles) < len(launch.tiles) or len(places) < len(launch.tensors):
        return None
    return ReplayedLaunch(relaunch_of(launch.key), launch.grid, tiles, places, launch.numbers)


def place_of(x: Tensor, tensors: tuple[Tensor, ...]) -> tuple[int, int] | None:
    """Two of the tensors may lie at one address in this call, and not in the next: a tensor is looked for by what it
    is, and only a part of one by where it lies. None where that is in none of them, or in several."""
    for i, tensor in enumerate(tensors):
        if x is tensor:
            return i, 0
    storage, found = x.untyped_storage().data_ptr(), []
    for i, tensor in enumerate(tensors):
        offset = x.data_ptr() - tensor.data_ptr()
        if tensor.untyped_storage().data_ptr() == storage and 0 <= offset < extent(tensor):
            found.append((i, offset))
    return found[0] if len(found) == 1 else None


def extent(x: Tensor) -> int:
    """Bytes from its first element to the end of its last; of a view more than it has itself."""
    last = sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))
    return (last + 1) * x.element_size() if x.numel() else 0
