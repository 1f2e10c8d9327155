"""Launching a kernel again without asking Triton again which binary it needs.

Triton looks at every argument of every launch: its type, its alignment, whether it is 1. For a decode step that takes
longer than the kernels run, and for a short sequence nearly as long. Here the caller says by a key which launches are
alike; ``kinds`` makes one of all arguments.
"""

from __future__ import annotations

import inspect
import marshal
import threading
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton import knobs

# Versions of which is known what their launcher calls, with which arguments.
KNOWN_LAUNCHERS = ("3.6.0", "3.7.1")
# What Triton specialises pointers and strides on.
ALIGNMENT = 16
# Versions whose launchers were seen to take addresses for tensors; another is asked in its own way.
KNOWN_BINARIES = triton.__version__.startswith(("3.6.", "3.7.")) and torch.version.hip is None
Relaunch = Callable[[tuple[int, int, int], int | None, list[Any], list[int], tuple[Any, ...]], None]
MAX_KINDS = 4096  # that are remembered: lengths may all differ
_binaries: dict[Hashable, Any] = {}
_relaunches: dict[Hashable, Relaunch] = {}
_descriptors: dict[tuple[Any, ...], list[Any]] = {}
_of_thread = threading.local()  # ``launches``: a list, where somebody wants to know of them
_kinds: dict[bytes, tuple[Hashable, ...]] = {}
_here = nullcontext()


class Launch(NamedTuple):
    """One that was made; without a key where no binary is kept."""

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
    """``kernel[grid](*tiles, *tensors, *numbers, **options)``. Arguments come in the kernel's order, constants too.

    Two launches of one ``key`` must agree in whatever Triton specialises on: kernel, device, options, constants,
    dtypes, and for every number and pointer that is not exempt whether it is 1, a multiple of 16 or beyond 32 bits.
    None says nothing, and Triton looks for itself. ``stream`` is ``current_stream`` of the tensors' device, which is
    the current one; ``addresses`` are those of the tensors, where the caller has asked for them. ``tiles`` are
    descriptors (``hopper.tiles.Tiles``).
    """
    binary = None if key is None else _binaries.get(key)
    if binary is None:
        binary = kernel[grid](*tiles, *tensors, *numbers, **options)
        if key is not None and binary is not None:  # the interpreter has none
            _binaries[key] = binary
    elif launches_itself():
        addresses = collect_addresses(tensors) if addresses is None else addresses
        find_relaunch(key)(grid, stream, [x.described() for x in tiles], addresses, numbers)
    else:
        binary[grid](*tiles, *tensors, *numbers)
    launches = getattr(_of_thread, "launches", None)
    if launches is not None:
        launches.append(Launch(None if binary is None else key, grid, tensors, numbers, tiles))


def launches_itself() -> bool:
    """Whether kept binaries are launched by what is behind Triton's launcher."""
    return KNOWN_BINARIES and not has_hooks()


def find_relaunch(key: Hashable) -> Relaunch:
    """What launches the binary of a key, given a grid, a stream, what ``Tiles.described`` says, addresses and numbers.
    An address is taken as it is; of a tensor the driver would be asked whether it may be read."""
    found = _relaunches.get(key)
    if found is None:
        binary = _binaries[key]
        # Triton's launcher also allocates what a binary asks for, as those of its sanitizer do.
        own_memory = binary.run.global_scratch_size or binary.run.profile_scratch_size
        found = by_launcher(binary) if own_memory or triton.__version__ not in KNOWN_LAUNCHERS else behind(binary)
        _relaunches[key] = found
    return found


def by_launcher(binary: Any) -> Relaunch:
    """Triton's own launcher."""

    def relaunch(grid: Any, stream: Any, tiles: list[Any], addresses: list[int], numbers: tuple[Any, ...]) -> None:
        described = [Described(*tile) for tile in tiles]
        of_binary = (binary.function, binary.packed_metadata, None, None, None)  # without hooks
        binary.run(*grid, stream, *of_binary, *described, *addresses, *numbers)

    return relaunch


def behind(binary: Any) -> Relaunch:
    """What Triton's launcher calls in the end. Before that it makes every descriptor anew and looks for more of them
    among all other arguments, which takes as long as the launch."""
    run, no_hooks, no_scratch = binary.run, (None, None, None), (None, None)
    call, kinds_of_tiles = run.launch, list[Any]()
    if inspect.isfunction(call):  # it makes descriptors
        inside = inspect.getclosurevars(call).nonlocals
        call, kinds_of_tiles = inside["launcher"], inside["tensordesc_meta"]
    of_binary = (binary.function, run.launch_cooperative_grid, run.launch_pdl)
    one_by_one = triton.__version__.startswith("3.6.")
    before: tuple[Any, ...]
    if one_by_one:
        before = (*of_binary, *no_scratch, binary.packed_metadata, *no_hooks)
    else:
        types = (run.arg_annotations, run.kernel_signature)
        before = (*of_binary, binary.packed_metadata, *no_hooks, *no_scratch, *types)

    def relaunch(grid: Any, stream: Any, tiles: list[Any], addresses: list[int], numbers: tuple[Any, ...]) -> None:
        given: list[Any] = []
        for tile, kind in zip(tiles, kinds_of_tiles, strict=True):
            given += descriptor(tile, kind)
        if one_by_one:
            call(*grid, stream, *before, *given, *addresses, *numbers)
        else:
            call(*grid, stream, *before, (*given, *addresses, *numbers))

    return relaunch


def descriptor(tile: tuple[Any, ...], kind: Any) -> list[Any]:
    """What the driver gets of a descriptor, made once for every place, shape and strides: a training step comes by the
    same memory again. ``kind`` is what Triton keeps of it with the binary."""
    made = _descriptors.get(tile)
    if made is None:
        from triton.backends.nvidia.driver import make_tensordesc_arg

        if len(_descriptors) >= MAX_KINDS:
            _descriptors.clear()
        made = _descriptors[tile] = make_tensordesc_arg(Described(*tile), kind)
    return made


class Described:
    """As much of ``Tiles`` as Triton makes a descriptor of."""

    padding, round_f32_to_tf32 = "zero", False

    def __init__(self, address: int, dtype: torch.dtype, shape: Any, strides: Any, rows: int) -> None:
        self.address, self.shape, self.strides = address, shape, strides

    @property
    def base(self) -> Described:
        return self

    def data_ptr(self) -> int:
        return self.address


@contextmanager
def noted() -> Iterator[list[Launch]]:
    """A list that is told of every launch of this thread."""
    launches: list[Launch] = []
    _of_thread.launches = launches
    try:
        yield launches
    finally:
        _of_thread.launches = None


def collect_addresses(tensors: tuple[Tensor, ...]) -> list[int]:
    return [x.data_ptr() for x in tensors]


def kinds(tensors: tuple[Tensor, ...], addresses: list[int], numbers: tuple[Any, ...]) -> tuple[Hashable, ...] | None:
    """What Triton specialises on, of arguments that are no constants; None where it looks at more than is known here
    (on ROCm at the size of tensors)."""
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


def has_hooks() -> bool:
    """Whether somebody, such as a profiler, wants to hear of every launch."""
    enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


def current_stream(device: torch.device) -> int | None:
    """The handle of the stream on which torch works there; None where there are no streams."""
    return None if device.type != "cuda" else torch._C._cuda_getCurrentRawStream(device.index)


def current_device(x: Tensor) -> AbstractContextManager[Any]:
    """``torch.cuda.device_of``, at no cost where the tensor's device is current already."""
    if not x.is_cuda or x.get_device() == torch.cuda.current_device():
        return _here
    return torch.cuda.device_of(x)


def all_aligned(pointers: tuple[Tensor, ...], numbers: tuple[int, ...]) -> bool:
    """Whether Triton would specialise each of them alike: on a multiple of 16 within 32 bits."""
    bits = 0
    for number in numbers:
        bits |= number
    if not 0 <= bits < 2**31:
        return False
    for pointer in pointers:
        bits |= pointer.data_ptr()
    return bits % ALIGNMENT == 0


# Whole calls once more: all that a forward or a backward launches, but for the addresses of its tensors. A call says
# which launches it needs by many small questions, about shapes, strides, powers and alignment. For calls that differ in
# nothing but where their tensors lie, the answers are the same, and asking takes Python longer than launching.
MAX_CALLS = 1024  # that are remembered: lengths may all differ


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


def replay_key(
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
    says that not all went by ``launch_cache.launch``, and nothing is remembered."""
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
    """None where no binary is kept, or where it is not sure which tensors it takes."""
    tiled = [locate(x.base, tensors) for x in launch.tiles]
    places = [place for x in launch.tensors if (place := locate(x, tensors)) is not None]
    tiles = [(y[0], x.described()[1:]) for x, y in zip(launch.tiles, tiled, strict=True) if y is not None]
    if launch.key is None or len(tiles) < len(launch.tiles) or len(places) < len(launch.tensors):
        return None
    return ReplayedLaunch(find_relaunch(launch.key), launch.grid, tiles, places, launch.numbers)


def locate(x: Tensor, tensors: tuple[Tensor, ...]) -> tuple[int, int] | None:
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
