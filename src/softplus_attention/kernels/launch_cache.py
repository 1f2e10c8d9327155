"""Caches the binaries of kernel launches, so that Triton does not have to select them again.

Triton examines every argument of every launch: its type, its alignment, whether it is 1. In a decode step this takes
longer than the kernels, with a short sequence nearly as long. Here the caller gives launches that need the same binary
the same key; ``kinds`` builds the part of it that depends on the arguments. Everything that depends on Triton's private
interfaces is in ``private_launch.py``.
"""

from __future__ import annotations

import marshal
import threading
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from softplus_attention.kernels import private_launch
from softplus_attention.kernels.private_launch import Relaunch

# Triton specializes pointers and integers on divisibility by this.
ALIGNMENT = 16
MAX_KINDS = 4096  # bounds the cache, because every length makes an entry
_binaries: dict[Hashable, Any] = {}
_relaunches: dict[Hashable, Relaunch | None] = {}
_of_thread = threading.local()  # ``launches``: the list that ``noted`` fills, if any
_kinds: dict[bytes, tuple[Hashable, ...]] = {}
_here = nullcontext()


class Launch(NamedTuple):
    """A launch that was made. ``key`` is None if its binary is not cached."""

    key: Hashable
    grid: tuple[int, int, int]
    tensors: tuple[Tensor, ...]
    numbers: tuple[Any, ...]
    tiles: tuple[Any, ...]


def launch(
    kernel: Any,
    grid: tuple[int, int, int],
    tensors: tuple[Tensor, ...],
    numbers: tuple[Any, ...],
    options: Mapping[str, Any],
    key: Hashable,
    stream: int | None,
    addresses: list[int] | None = None,
    tiles: tuple[Any, ...] = (),
) -> None:
    """``kernel[grid](*tiles, *tensors, *numbers, **options)``, with arguments and constants in the kernel's order.

    Two launches with the same ``key`` must agree in everything that Triton specializes on: kernel, device, options,
    constants, dtypes, and for every number and pointer that is not exempt whether it is 1, a multiple of 16 or beyond
    32 bits. With None, Triton selects the binary. ``stream`` is ``current_stream`` of the tensors' device, which must
    be the current device. ``addresses`` are those of the tensors, if the caller already has them. ``tiles`` are
    descriptors (``hopper.tiles.Tiles``).
    """
    binary = None if key is None else _binaries.get(key)
    if binary is None:
        binary = kernel[grid](*tiles, *tensors, *numbers, **options)
        if key is not None and binary is not None:  # the interpreter returns None
            _binaries[key] = binary
    elif launches_itself() and (relaunch := find_relaunch(key)) is not None:
        addresses = collect_addresses(tensors) if addresses is None else addresses
        relaunch(grid, stream, [x.described() for x in tiles], addresses, numbers)
    else:
        binary[grid](*tiles, *tensors, *numbers)
    launches = getattr(_of_thread, "launches", None)
    if launches is not None:
        launches.append(Launch(None if binary is None else key, grid, tensors, numbers, tiles))


def launches_itself() -> bool:
    """Whether cached binaries are launched without Triton's Python code."""
    return private_launch.is_known() and not private_launch.has_hooks()


def find_relaunch(key: Hashable) -> Relaunch | None:
    """A function that launches the cached binary of ``key``; None if Triton itself must launch it."""
    if key not in _relaunches:
        _relaunches[key] = private_launch.relaunch(_binaries[key])
    return _relaunches[key]


@contextmanager
def noted() -> Iterator[list[Launch]]:
    """Yields a list to which every launch of this thread is appended."""
    launches: list[Launch] = []
    _of_thread.launches = launches
    try:
        yield launches
    finally:
        _of_thread.launches = None


def collect_addresses(tensors: tuple[Tensor, ...]) -> list[int]:
    return [x.data_ptr() for x in tensors]


def kinds(tensors: tuple[Tensor, ...], addresses: list[int], numbers: tuple[Any, ...]) -> tuple[Hashable, ...] | None:
    """What Triton specializes on in the arguments that are not constants. None on ROCm, where Triton also looks at the
    size of tensors."""
    if torch.version.hip is not None:
        return None
    bits = 0
    for address in addresses:
        bits |= address
    aligned = True if bits % ALIGNMENT == 0 else tuple([x % ALIGNMENT == 0 for x in addresses])
    written = marshal.dumps(numbers, 2)  # tells 1 from 1.0
    alike = _kinds.get(written)
    if alike is None:
        if len(_kinds) >= MAX_KINDS:
            _kinds.clear()
        alike = _kinds[written] = tuple([kind_of_number(x) for x in numbers])
    return (tuple([x.dtype for x in tensors]), aligned, alike)


def kind_of_number(x: Any) -> Hashable:
    if x.__class__ is tuple:
        return tuple([kind_of_number(part) for part in x])
    if x.__class__ is not int:
        return x.__class__
    return (x == 1, x % ALIGNMENT == 0) if -(2**31) <= x < 2**31 else x


def current_stream(device: torch.device) -> int | None:
    """The handle of torch's current stream on ``device``; None if it is not a CUDA device."""
    return None if device.type != "cuda" else torch._C._cuda_getCurrentRawStream(device.index)


def current_device(x: Tensor) -> AbstractContextManager[Any]:
    """``torch.cuda.device_of``, at no cost if the tensor's device is already current."""
    if not x.is_cuda or x.get_device() == torch.cuda.current_device():
        return _here
    return torch.cuda.device_of(x)


def all_aligned(pointers: tuple[Tensor, ...], numbers: tuple[int, ...]) -> bool:
    """Whether Triton would specialize all of them in the same way: as multiples of 16 within 32 bits."""
    bits = 0
    for number in numbers:
        bits |= number
    if not 0 <= bits < 2**31:
        return False
    for pointer in pointers:
        bits |= pointer.data_ptr()
    return bits % ALIGNMENT == 0


# Replay of whole calls: all launches of a forward or backward, with new tensor addresses. A call selects its launches
# by many small decisions about shapes, strides, powers and alignment. Calls that differ only in tensor addresses decide
# the same, and in Python the decisions take longer than the launches.
MAX_CALLS = 1024  # bounds the cache, because every length makes an entry


class Scratch(NamedTuple):
    """Temporary tensors that a call has allocated."""

    empty: tuple[Tensor, ...] = ()
    zeros: tuple[Tensor, ...] = ()


class ReplayedLaunch(NamedTuple):
    """A recorded launch. A tensor argument is an index into the call's tensors and a byte offset from that tensor's
    first element."""

    run: Relaunch
    grid: tuple[int, int, int]
    tiles: list[tuple[int, tuple[Any, ...]]]  # tensor index, and ``Tiles.described`` without the address
    places: list[tuple[int, int]]
    numbers: tuple[Any, ...]


class ReplayedCall(NamedTuple):
    steps: list[ReplayedLaunch]
    empty: list[tuple[torch.Size, torch.dtype]]
    zeros: list[tuple[torch.Size, torch.dtype]]


_calls: dict[Hashable, ReplayedCall] = {}


def replay_key(
    name: str,
    given: tuple[Tensor, ...],
    powers: Tensor | None,
    options: tuple[Any, ...],
    others: tuple[Tensor, ...] = (),
) -> Hashable:
    """Equal for calls that make the same launches. None if the call cannot be replayed: an option other than
    ``powers`` is a tensor, an address is not aligned, the call copies an input first, or one tensor is given twice, so
    that a recorded launch could mean either. Of ``others`` only the addresses may differ between calls."""
    if not private_launch.is_known() or len({id(x) for x in given}) < len(given):
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
    """Repeats the launches that ``launch_all`` made in an earlier call with the same key; without one, calls it and
    records them. ``tensors`` are all that it reads and writes, except those that it allocates and returns. It returns
    None if some launches did not go through ``launch_cache.launch``; then nothing is recorded."""
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
    steps = [step for x in made if (step := record_step(x, all_tensors)) is not None]
    if len(steps) < len(made):
        return
    if len(_calls) >= MAX_CALLS:
        _calls.clear()
    _calls[key] = ReplayedCall(steps, *([(x.shape, x.dtype) for x in some] for some in scratch))


def record_step(launch: Launch, tensors: tuple[Tensor, ...]) -> ReplayedLaunch | None:
    """None if its binary is not cached or its tensors cannot be identified."""
    tiled = [locate(x.base, tensors) for x in launch.tiles]
    places = [place for x in launch.tensors if (place := locate(x, tensors)) is not None]
    tiles = [(y[0], x.described()[1:]) for x, y in zip(launch.tiles, tiled, strict=True) if y is not None]
    if launch.key is None or len(tiles) < len(launch.tiles) or len(places) < len(launch.tensors):
        return None
    relaunch = find_relaunch(launch.key)
    return None if relaunch is None else ReplayedLaunch(relaunch, launch.grid, tiles, places, launch.numbers)


def locate(x: Tensor, tensors: tuple[Tensor, ...]) -> tuple[int, int] | None:
    """Index of the tensor that ``x`` is, or is a view of, and the byte offset in it; None if there is no such tensor or
    more than one. A whole tensor is found by identity and only a view by address, because two tensors may share an
    address in this call and not in the next."""
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
    """Bytes from the first element to the end of the last, including gaps in a view."""
    last = sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))
    return (last + 1) * x.element_size() if x.numel() else 0
