"""Runs Gluon kernels on a CPU, as Triton's interpreter runs Triton's: the Python of a kernel on torch tensors.

What a layout decides (which thread holds what, register hazards, barriers inside a program) is left to the compiler and
to the GPU tests. What is kept of the hardware:

- Copies and products that are asynchronous happen as late as the kernel allows. A tile on its way holds GARBAGE from
  the start of its copy to the wait for it, and so does a product from its issue to the wait that returns it; with
  ``late_products=False`` products read their tiles when they are issued. Between the two, a tile that is read before
  it has come or overwritten while it is still read shows. (NaN would not: kernels have a second look where they meet
  it.)
- What the copy engine brings has come when its barrier was waited for; a barrier waits for as many bytes as were
  announced, and one that is never told of any would be waited for in vain, which is an error. Barriers end, after all
  of their copies.
- The tensor cores see what threads wrote to shared memory only after a fence.
- A load or store outside of the tensor that its pointer came from is an error.
- The maximum of NaN and a number is the number. Integers do not overflow, and are divided as Python does it.
"""

from __future__ import annotations

import ast
import inspect
import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from types import CodeType, FunctionType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.runtime.jit import ConstexprFunction

from softplus_attention.kernels.hopper.tiles import Tiles

NAN = float("nan")
GARBAGE = 777.0
MIN_NORMAL = 2.0**-126  # what is below is nothing to some instructions


class Value(torch.Tensor):
    """A tensor or number of a kernel. Never changed in place, as ``x += 1`` would do to other names of it."""

    @property
    def type(self) -> Any:  # type: ignore[override]
        return SimpleNamespace(layout=None)

    def to(self, dtype: torch.dtype, bitcast: bool = False) -> Any:  # type: ignore[override]
        return self.view(dtype) if bitcast else super().to(dtype)

    def __iadd__(self, other: Any) -> Any:
        return self + other

    def __isub__(self, other: Any) -> Any:
        return self - other

    def __imul__(self, other: Any) -> Any:
        return self * other


def value(x: Any, dtype: torch.dtype | None = None) -> Value:
    if isinstance(x, int) and dtype is None:
        dtype = torch.int64
    return torch.as_tensor(x, dtype=dtype).as_subclass(Value)


class Pointer:
    """Addresses inside one tensor of the caller's: its elements in memory order, and offsets among them."""

    def __init__(self, memory: Tensor, offsets: Any = 0) -> None:
        self.memory = memory
        self.offsets = offsets
        self.dtype = SimpleNamespace(element_ty=memory.dtype)

    @classmethod
    def to(cls, x: Tensor) -> Pointer:
        extent = 1 + sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True)) if x.numel() else 0
        return cls(x.detach().as_strided((extent,), (1,)))

    def __add__(self, offset: Any) -> Pointer:
        return Pointer(self.memory, self.offsets + offset)

    def places(self, mask: Any) -> tuple[Tensor, Tensor]:
        """Offsets, 0 where masked out, and the mask, both of one shape."""
        offsets = torch.as_tensor(self.offsets).as_subclass(Tensor)
        mask = torch.as_tensor(True if mask is None else mask).as_subclass(Tensor)
        offsets, mask = torch.broadcast_tensors(offsets, mask)
        wrong = mask & ((offsets < 0) | (offsets >= self.memory.numel()))
        if wrong.any():
            raise IndexError(f"offset {int(offsets[wrong][0])} of {self.memory.numel()} elements")
        return torch.where(mask, offsets, 0), mask

    def load(self, mask: Any = None, other: float = GARBAGE) -> Value:
        offsets, mask = self.places(mask)
        found = self.memory[offsets] if self.memory.numel() else self.memory.new_zeros(offsets.shape)
        return torch.where(mask, found, torch.as_tensor(other, dtype=found.dtype)).as_subclass(Value)

    def store(self, x: Any, mask: Any = None) -> None:
        offsets, mask = self.places(mask)
        x = torch.as_tensor(x).as_subclass(Tensor).to(self.memory.dtype).expand(offsets.shape)
        self.memory[offsets[mask]] = x[mask]


class Described:
    """A tensor as the copy engine knows it, from a descriptor."""

    layout = None

    def __init__(self, tiles: Tiles) -> None:
        self.tensor = tiles.base.detach()
        self.block_shape = tiles.block_shape
        self.dtype = tiles.base.dtype

    def tile(self, place: Sequence[Any]) -> Tensor:
        """Zeros beyond the tensor."""
        found = torch.zeros(self.block_shape, dtype=self.dtype)
        first = [int(x) for x in place]
        shape = zip(first, self.block_shape, self.tensor.shape, strict=True)
        part = self.tensor[tuple(slice(min(at, n), min(at + size, n)) for at, size, n in shape)]
        found[tuple(slice(0, n) for n in part.shape)] = part
        return found


class Barrier:
    """In shared memory: waits for the copies of one phase after the other."""

    def __init__(self) -> None:
        self.phase = 0
        self.announced: int | None = None  # bytes
        self.arriving: list[Callable[[], int]] = []

    def complete(self) -> None:
        assert self.announced is not None, "a barrier is waited for that no copy was announced to"
        came = sum(arrive() for arrive in self.arriving)
        assert came == self.announced, f"{self.announced} bytes were announced, and {came} came"
        self.phase, self.announced, self.arriving = self.phase + 1, None, []


class Shared:
    """A piece of shared memory. ``allocation`` is that of the whole: a fence is known for all of it."""

    def __init__(self, data: Tensor, allocation: dict[str, bool], awaited: set[int]) -> None:
        self.data = data
        self.allocation = allocation
        self.awaited = awaited  # addresses of the tiles that copies are on their way into
        self.dtype = data.dtype

    @property
    def shape(self) -> torch.Size:
        return self.data.shape

    def index(self, i: Any) -> Shared:
        if not 0 <= int(i) < self.data.shape[0]:
            raise IndexError(f"slot {int(i)} of {self.data.shape[0]}")
        return Shared(self.data[int(i)], self.allocation, self.awaited)

    def permute(self, order: Sequence[int]) -> Shared:
        return Shared(self.data.permute(*order), self.allocation, self.awaited)

    def reshape(self, shape: Sequence[int]) -> Shared:
        return Shared(self.data.view(*shape), self.allocation, self.awaited)

    def slice(self, start: int, length: int) -> Shared:
        assert 0 <= start <= start + length <= self.data.shape[0], "a slice goes beyond its tile"
        return Shared(self.data[start : start + length], self.allocation, self.awaited)

    def store(self, x: Tensor) -> None:
        assert self.data.data_ptr() not in self.awaited, "a tile is written while a copy is on its way into it"
        self.data.copy_(x.as_subclass(Tensor))
        self.allocation["fenced"] = False

    def load(self, layout: Any) -> Value:
        return self.data.clone().as_subclass(Value)

    def for_tensor_cores(self) -> Tensor:
        assert self.allocation["fenced"], "the tensor cores read shared memory that was written without a fence"
        return self.data.float()


class Product(Value):
    """What an asynchronous product returns: GARBAGE until a wait gives back its result."""

    compute: Callable[[], Tensor]
    result: Tensor | None

    def finished(self) -> Tensor:
        if self.result is None:
            self.result = self.compute()
        return self.result


def plain(x: Any) -> Tensor:
    """The numbers of an operand, those of a product that is done or must be by now included."""
    return x.finished() if isinstance(x, Product) else x.as_subclass(Tensor)


class Program:
    """One program of the grid: its shared memory, and what is on its way."""

    def __init__(self, place: tuple[int, ...], grid: tuple[int, ...], warps: int, late_products: bool) -> None:
        self.place = place
        self.grid = grid
        self.warps = warps
        self.late_products = late_products
        self.allocations: list[dict[str, bool]] = []
        self.awaited: set[int] = set()
        self.copies: list[Callable[[], None]] = []  # since the last commit
        self.groups: list[list[Callable[[], None]]] = []
        self.products: list[Product] = []
        self.barriers: dict[int, Barrier] = {}  # by the address of the number that stands for one
        self.mbarrier = SimpleNamespace(
            MBarrierLayout=lambda: None,
            init=self.init_barrier,
            expect=self.expect,
            wait=self.wait_for_barrier,
            invalidate=self.end_barrier,
        )
        self.tma = SimpleNamespace(async_copy_global_to_shared=self.copy_tile)

    def allocate_shared_memory(self, dtype: torch.dtype, shape: Sequence[int], layout: Any) -> Shared:
        self.allocations.append({"fenced": True})
        return Shared(torch.full(tuple(shape), int(GARBAGE), dtype=dtype), self.allocations[-1], self.awaited)

    def init_barrier(self, place: Shared, count: int) -> None:
        assert count == 1, "one thread announces"
        self.barriers[place.data.data_ptr()] = Barrier()

    def expect(self, place: Shared, announced: int, pred: Any = True) -> None:
        if pred:
            barrier = self.barriers[place.data.data_ptr()]
            assert barrier.announced is None, "copies are announced before those of the last phase were waited for"
            barrier.announced = int(announced)

    def wait_for_barrier(self, place: Shared, phase: Any) -> None:
        barrier = self.barriers[place.data.data_ptr()]
        if int(phase) == barrier.phase & 1:  # else that phase is over
            barrier.complete()

    def end_barrier(self, place: Shared) -> None:
        assert self.barriers.pop(place.data.data_ptr()).announced is None, "a barrier ends before its copies have come"

    def copy_tile(self, source: Described, at: Sequence[Any], place: Shared, tile: Shared, pred: Any = True) -> None:
        if not pred:
            return
        waiting = self.barriers[place.data.data_ptr()]
        assert waiting.announced is not None, "a copy that was not announced"
        arriving = source.tile(at)
        arrive = self.on_its_way(tile, arriving)

        def bytes_of() -> int:
            arrive()
            return arriving.numel() * arriving.element_size()

        waiting.arriving.append(bytes_of)

    def on_its_way(self, tile: Shared, arriving: Tensor) -> Callable[[], None]:
        """What ends a copy into a tile."""
        place = tile.data.data_ptr()
        assert place not in self.awaited, "a second copy into a tile before the first has come"
        self.awaited.add(place)
        tile.data.fill_(GARBAGE)

        def arrive() -> None:
            tile.data.copy_(arriving)
            self.awaited.discard(place)

        return arrive

    def async_copy_global_to_shared(self, tile: Shared, pointer: Pointer, mask: Any = None) -> None:
        arrive = self.on_its_way(tile, pointer.load(mask, other=0.0).as_subclass(Tensor))

        def by_threads() -> None:
            arrive()
            tile.allocation["fenced"] = False

        self.copies.append(by_threads)

    def commit_group(self) -> None:
        self.groups.append(self.copies)
        self.copies = []

    def wait_group(self, pending: int) -> None:
        while len(self.groups) > pending:
            for arrive in self.groups.pop(0):
                arrive()

    def fence_async_shared(self) -> None:
        for allocation in self.allocations:
            allocation["fenced"] = True

    def warpgroup_mma(self, a: Any, b: Shared, acc: Any, *, use_acc: bool = True, is_async: bool = False) -> Any:
        for operand in (a, b):
            assert not isinstance(operand, Product), "a product is an operand before it was waited for"

        def compute() -> Tensor:
            left = a.for_tensor_cores() if isinstance(a, Shared) else plain(a).float()
            product = left @ b.for_tensor_cores()
            return product + plain(acc) if use_acc else product

        token = torch.full((a.shape[0], b.shape[1]), GARBAGE).as_subclass(Product)
        token.compute, token.result = compute, None
        if not self.late_products:
            token.finished()
        self.products.append(token)
        return token if is_async else self.warpgroup_mma_wait(0, deps=[token])

    def warpgroup_mma_wait(self, pending: int, deps: Sequence[Any]) -> Any:
        while len(self.products) > pending:
            self.products.pop(0).finished()
        kept = [
            x.result.as_subclass(Value) if isinstance(x, Product) and x.result is not None and not self.runs(x) else x
            for x in deps
        ]
        return kept[0] if len(kept) == 1 else tuple(kept)

    def runs(self, token: Product) -> bool:
        return any(token is other for other in self.products)


def elementwise(function: Callable[..., Tensor]) -> Callable[..., Value]:
    def of(*operands: Any, **_options: Any) -> Value:
        return function(*(torch.as_tensor(x) for x in operands)).as_subclass(Value)

    return of


def chosen(condition: Any, a: Any, b: Any) -> Any:
    if isinstance(a, Pointer):
        assert a.memory is b.memory, "of two tensors' addresses one is chosen"
        return Pointer(a.memory, elementwise(torch.where)(condition, a.offsets, b.offsets))
    return elementwise(torch.where)(condition, a, b)


def larger(a: Tensor, b: Tensor) -> Tensor:
    return torch.fmax(a, b) if a.is_floating_point() or b.is_floating_point() else torch.maximum(a, b)


def smaller(a: Tensor, b: Tensor) -> Tensor:
    return torch.fmin(a, b) if a.is_floating_point() or b.is_floating_point() else torch.minimum(a, b)


def largest(x: Tensor, axis: int) -> Value:
    if x.is_floating_point():
        spoilt = x.isnan()
        return torch.where(spoilt.all(axis), NAN, torch.where(spoilt, -float("inf"), x).amax(axis)).as_subclass(Value)
    return x.amax(axis).as_subclass(Value)


def assembly(text: str, constraints: str, operands: Sequence[Any], dtype: Any, is_pure: bool, pack: int) -> Value:
    if text.startswith("fma.rn.sat.f32"):
        a, b, c = (torch.as_tensor(x).double() for x in operands)
        return (a * b + c).float().clamp(0.0, 1.0).nan_to_num(nan=0.0).as_subclass(Value)
    if text.startswith("lg2.approx.ftz.f32"):
        return torch.log2(torch.as_tensor(operands[0])).as_subclass(Value)
    if text.startswith("rcp.approx.ftz.f32"):
        x = torch.as_tensor(operands[0])
        return torch.where(x.abs() < MIN_NORMAL, x * 0.0, x).reciprocal().as_subclass(Value)
    raise NotImplementedError(text)


def counted(*bounds: Any) -> Iterator[Value]:
    return (value(i) for i in range(*(int(bound) for bound in bounds)))


def of_gluon(x: Any) -> Any:
    """A number type as a function of constants knows it."""
    return {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16}.get(x, x) if isinstance(x, torch.dtype) else x


def constant(x: Any) -> Any:
    """What a function of constants gives; of a layout, which means nothing here, nothing."""
    x = getattr(x, "value", x)
    return x if isinstance(x, int | float) else None


class Language:
    """The functions of ``triton.experimental.gluon.language`` and ``triton.language`` that the kernels use."""

    float16, bfloat16, float32 = torch.float16, torch.bfloat16, torch.float32
    int32, int64 = torch.int32, torch.int64
    constexpr = object
    maximum, minimum = staticmethod(elementwise(larger)), staticmethod(elementwise(smaller))
    abs, exp2, log, log2, sqrt, rsqrt = (
        staticmethod(elementwise(f)) for f in (torch.abs, torch.exp2, torch.log, torch.log2, torch.sqrt, torch.rsqrt)
    )
    where = staticmethod(chosen)
    max = staticmethod(largest)
    static_range = staticmethod(range)
    inline_asm_elementwise = staticmethod(assembly)
    NVMMASharedLayout = SimpleNamespace(get_default_for=lambda *_: None)

    def __init__(self, program: Program) -> None:
        self.program = program
        self.allocate_shared_memory = program.allocate_shared_memory

    def __getattr__(self, name: str) -> Any:
        if name.endswith("Layout"):
            return lambda *_: None
        raise AttributeError(f"the interpreter of Gluon does not know {name}")

    def program_id(self, axis: int) -> Value:
        return value(self.program.place[axis])

    def num_programs(self, axis: int) -> Value:
        return value(self.program.grid[axis])

    def num_warps(self) -> int:
        return self.program.warps

    @staticmethod
    def arange(low: int, high: int, layout: Any = None) -> Value:
        return value(torch.arange(low, high))

    @staticmethod
    def zeros(shape: Sequence[int], dtype: torch.dtype, layout: Any = None) -> Value:
        return value(torch.zeros(tuple(shape), dtype=dtype))

    @staticmethod
    def static_assert(holds: bool) -> None:
        assert holds

    @staticmethod
    def cdiv(a: Any, b: Any) -> Any:
        return (a + b - 1) // b

    @staticmethod
    def to_tensor(x: int) -> Value:
        return value(x)

    @staticmethod
    def multiple_of(x: Any, factor: int) -> Any:
        if isinstance(x, Pointer):
            assert int(x.offsets) % factor == 0, f"offset {int(x.offsets)} is said to be a multiple of {factor}"
        return x

    @staticmethod
    def convert_layout(x: Value, layout: Any, assert_trivial: bool = False) -> Value:
        return x

    @staticmethod
    def reshape(x: Value, shape: Sequence[int]) -> Value:
        return x.reshape(tuple(shape))

    @staticmethod
    def min(x: Value, axis: int) -> Value:
        assert not x.is_floating_point(), "NaN would count"
        return x.amin(axis)

    @staticmethod
    def sum(x: Value, axis: int) -> Value:
        return x.sum(axis)

    @staticmethod
    def load(pointer: Pointer, mask: Any = None, other: float = GARBAGE) -> Value:
        return pointer.load(mask, other)

    @staticmethod
    def store(pointer: Pointer, x: Any, mask: Any = None) -> None:
        pointer.store(x, mask)

    @staticmethod
    def atomic_add(pointer: Pointer, x: Any) -> Value:
        before = pointer.load()
        pointer.store(before + x)
        return before

    @staticmethod
    def atomic_max(pointer: Pointer, x: Any) -> None:
        pointer.store(larger(pointer.load(), torch.as_tensor(x)))


class Assignments(ast.NodeTransformer):
    """``x = 0`` makes a number of the kernel of a constant, ``x: gl.constexpr = 0`` does not."""

    def visit_Assign(self, node: ast.Assign) -> ast.Assign:
        node.value = ast.copy_location(ast.Call(ast.Name("assigned", ast.Load()), [node.value], []), node.value)
        return ast.fix_missing_locations(node)


def assigned(x: Any) -> Any:
    return value(x) if type(x) in (int, float) else x


@cache
def code_of(function: FunctionType) -> CodeType:
    """A kernel's function, with its assignments as Triton reads them."""
    tree = ast.parse(inspect.getsource(function))
    definition = tree.body[0]
    assert isinstance(definition, ast.FunctionDef)
    definition.decorator_list, definition.returns = [], None
    for parameter in (*definition.args.args, *definition.args.kwonlyargs):
        parameter.annotation = None
    ast.increment_lineno(tree, function.__code__.co_firstlineno - 1)
    module = compile(Assignments().visit(tree), function.__code__.co_filename, "exec", dont_inherit=True)
    return next(code for code in module.co_consts if isinstance(code, CodeType))


def interpreted(kernel: Any, program: Program, called: set[str]) -> FunctionType:
    """The Python function behind a jit function, with everything that it uses interpreted too; the names of the
    functions that it calls go to ``called``."""
    language = Language(program)
    replaced: dict[str, Any] = {"gl": language, "tl": language, "async_copy": program, "range": counted}
    replaced |= {"mbarrier": program.mbarrier, "tma": program.tma}
    replaced |= {name: getattr(program, name) for name in ("fence_async_shared", "warpgroup_mma", "warpgroup_mma_wait")}
    # Nothing but their being there means something, to the compiler alone.
    replaced |= {"warpgroup_mma_init": lambda x: x}
    replaced |= {"mma_v2": lambda a, b, acc: acc + a.float() @ b.float()}  # by registers: it waits for nothing
    # Here it is not Triton's interpreter: kernels take the path of the hardware.
    replaced |= {"assigned": assigned, "INTERPRETED": False}
    done: dict[FunctionType, FunctionType] = {}

    def of(function: FunctionType) -> FunctionType:
        if function not in done:
            code = code_of(function)
            known = {"__builtins__": __builtins__} | {
                name: replaced[name] if name in replaced else translated(function.__globals__[name])
                for name in code.co_names
                if name in replaced or name in function.__globals__
            }
            done[function] = FunctionType(code, known, argdefs=function.__defaults__)
        return done[function]

    def noted(function: FunctionType) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            called.add(function.__name__)
            return function(*arguments, **named)

        return call

    def translated(x: Any) -> Any:
        if isinstance(x, ConstexprFunction):
            return lambda *arguments: constant(x(*map(of_gluon, arguments)))
        if isinstance(getattr(x, "fn", None), FunctionType):
            return noted(of(x.fn))
        return getattr(x, "value", x)  # of a constant

    return of(kernel.fn)


class InterpretedKernel:
    """Stands for a Gluon kernel: ``kernel[grid](...)`` runs every program, one after the other."""

    def __init__(self, kernel: Any, late_products: bool, ran: list[str] | None = None) -> None:
        self.kernel = kernel
        self.__name__ = kernel.fn.__name__
        self.late_products = late_products
        self.ran = [] if ran is None else ran
        self.called: set[str] = set()
        self.grids: list[tuple[int, int, int]] = []

    def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., None]:
        def launch(*arguments: Any, maxnreg: int | None = None) -> None:
            self.ran.append(self.__name__)
            self.grids.append(grid)
            parameters = self.kernel.params
            assert len(arguments) == len(parameters), "an argument is missing, or there is one too many"
            assert parameters[-1].name == "num_warps"
            for z, y, x in itertools.product(*map(range, reversed(grid))):
                program = Program((x, y, z), grid, arguments[-1], self.late_products)
                given = [
                    x if parameter.is_constexpr else argument(x)
                    for x, parameter in zip(arguments, parameters, strict=True)
                ]
                interpreted(self.kernel, program, self.called)(*given)
                assert not program.copies, "copies that no group holds"
                assert not program.awaited, "copies that nobody waits for"
                assert not program.barriers, "barriers that do not end"
                assert not program.products, "products that nobody waits for"

        return launch


def argument(x: Any) -> Any:
    if isinstance(x, Tiles):
        return Described(x)
    if isinstance(x, Tensor):
        return Pointer.to(x)
    if isinstance(x, tuple):
        return tuple(argument(part) for part in x)
    return value(x, torch.float32) if isinstance(x, float) else value(x)
