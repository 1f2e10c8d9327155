"""Runs the Python code of Gluon kernels on torch CPU tensors, as Triton's interpreter does for Triton kernels.

Layouts are ignored: which thread holds which element, register hazards and barriers inside a program are left to the
compiler and to the GPU tests. These properties of the hardware are modelled:

- Asynchronous copies and products complete as late as the kernel allows. The destination tile of a copy holds GARBAGE
  until the kernel waits for it, and so does the result of a product. With ``late_products=False`` products read their
  tiles when they are issued. Running both ways reveals tiles that are read before they arrive or overwritten while
  still in use. (GARBAGE is not NaN, since kernels recompute blocks that contain NaN.)
- Copies of the copy engine complete when the kernel waits for their barrier. The expected number of bytes must match
  the copies, and waiting for a barrier without expected bytes is an error. Barriers are invalidated after their copies.
- The tensor cores see writes of threads to shared memory only after a fence.
- A load or store outside the tensor of its pointer is an error.
- The maximum of NaN and a number is the number. Integers do not overflow, and are divided as in Python.
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
MIN_NORMAL = 2.0**-126  # some instructions flush smaller numbers to zero


class Value(torch.Tensor):
    """A tensor or number of a kernel. Immutable: ``x += 1`` must not change other names of the same value."""

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
    """Addresses in one tensor of the caller: its elements in memory order, and offsets into them."""

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

    def masked_offsets(self, mask: Any) -> tuple[Tensor, Tensor]:
        """Offsets, with 0 where masked out, and the mask, broadcast to the same shape."""
        offsets = torch.as_tensor(self.offsets).as_subclass(Tensor)
        mask = torch.as_tensor(True if mask is None else mask).as_subclass(Tensor)
        offsets, mask = torch.broadcast_tensors(offsets, mask)
        wrong = mask & ((offsets < 0) | (offsets >= self.memory.numel()))
        if wrong.any():
            raise IndexError(f"offset {int(offsets[wrong][0])} of {self.memory.numel()} elements")
        return torch.where(mask, offsets, 0), mask

    def load(self, mask: Any = None, other: float = GARBAGE) -> Value:
        offsets, mask = self.masked_offsets(mask)
        found = self.memory[offsets] if self.memory.numel() else self.memory.new_zeros(offsets.shape)
        return torch.where(mask, found, torch.as_tensor(other, dtype=found.dtype)).as_subclass(Value)

    def store(self, x: Any, mask: Any = None) -> None:
        offsets, mask = self.masked_offsets(mask)
        x = torch.as_tensor(x).as_subclass(Tensor).to(self.memory.dtype).expand(offsets.shape)
        self.memory[offsets[mask]] = x[mask]


class TensorDescriptor:
    """A tensor that the copy engine reads by a descriptor."""

    layout = None

    def __init__(self, tiles: Tiles) -> None:
        self.tensor = tiles.base.detach()
        self.block_shape = tiles.block_shape
        self.dtype = tiles.base.dtype

    def tile(self, place: Sequence[Any]) -> Tensor:
        """The tile at ``place``, with zeros beyond the tensor."""
        found = torch.zeros(self.block_shape, dtype=self.dtype)
        first = [int(x) for x in place]
        shape = zip(first, self.block_shape, self.tensor.shape, strict=True)
        part = self.tensor[tuple(slice(min(at, n), min(at + size, n)) for at, size, n in shape)]
        found[tuple(slice(0, n) for n in part.shape)] = part
        return found


class Barrier:
    """A barrier in shared memory, which tracks the copies of one phase after another."""

    def __init__(self) -> None:
        self.phase = 0
        self.expected_bytes: int | None = None
        self.arriving: list[Callable[[], int]] = []

    def complete(self) -> None:
        assert self.expected_bytes is not None, "wait for a barrier that expects no copy"
        received = sum(arrive() for arrive in self.arriving)
        assert received == self.expected_bytes, f"expected {self.expected_bytes} bytes, received {received}"
        self.phase, self.expected_bytes, self.arriving = self.phase + 1, None, []


class Shared:
    """A view of shared memory. ``allocation`` belongs to the whole allocation, which tracks fences as one."""

    def __init__(self, data: Tensor, allocation: dict[str, bool], awaited: set[int]) -> None:
        self.data = data
        self.allocation = allocation
        self.awaited = awaited  # addresses of tiles with a pending copy
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
        assert 0 <= start <= start + length <= self.data.shape[0], "a slice exceeds its tile"
        return Shared(self.data[start : start + length], self.allocation, self.awaited)

    def store(self, x: Tensor) -> None:
        assert self.data.data_ptr() not in self.awaited, "a tile is written while a copy into it is pending"
        self.data.copy_(x.as_subclass(Tensor))
        self.allocation["fenced"] = False

    def load(self, layout: Any) -> Value:
        return self.data.clone().as_subclass(Value)

    def for_tensor_cores(self) -> Tensor:
        assert self.allocation["fenced"], "the tensor cores read shared memory that was written without a fence"
        return self.data.float()


class Product(Value):
    """The result of an asynchronous product: GARBAGE until the kernel waits for it."""

    compute: Callable[[], Tensor]
    result: Tensor | None

    def finished(self) -> Tensor:
        if self.result is None:
            self.result = self.compute()
        return self.result


def plain(x: Any) -> Tensor:
    """An operand as a plain tensor. A product is completed, since it must be complete by now."""
    return x.finished() if isinstance(x, Product) else x.as_subclass(Tensor)


class Program:
    """One program of the grid: its shared memory and pending operations."""

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
        self.barriers: dict[int, Barrier] = {}  # by address
        self.mbarrier = SimpleNamespace(
            MBarrierLayout=lambda: None,
            init=self.init_barrier,
            expect=self.expect,
            wait=self.wait_for_barrier,
            invalidate=self.invalidate_barrier,
        )
        self.tma = SimpleNamespace(async_copy_global_to_shared=self.copy_tile)

    def allocate_shared_memory(self, dtype: torch.dtype, shape: Sequence[int], layout: Any) -> Shared:
        self.allocations.append({"fenced": True})
        return Shared(torch.full(tuple(shape), int(GARBAGE), dtype=dtype), self.allocations[-1], self.awaited)

    def init_barrier(self, place: Shared, count: int) -> None:
        assert count == 1, "one thread arrives at a barrier"
        self.barriers[place.data.data_ptr()] = Barrier()

    def expect(self, place: Shared, expected_bytes: int, pred: Any = True) -> None:
        if pred:
            barrier = self.barriers[place.data.data_ptr()]
            assert barrier.expected_bytes is None, "a barrier expects copies before the wait for its last phase"
            barrier.expected_bytes = int(expected_bytes)

    def wait_for_barrier(self, place: Shared, phase: Any) -> None:
        barrier = self.barriers[place.data.data_ptr()]
        if int(phase) == barrier.phase & 1:  # else that phase is complete
            barrier.complete()

    def invalidate_barrier(self, place: Shared) -> None:
        barrier = self.barriers.pop(place.data.data_ptr())
        assert barrier.expected_bytes is None, "a barrier is invalidated before its copies are complete"

    def copy_tile(
        self, source: TensorDescriptor, at: Sequence[Any], place: Shared, tile: Shared, pred: Any = True
    ) -> None:
        if not pred:
            return
        barrier = self.barriers[place.data.data_ptr()]
        assert barrier.expected_bytes is not None, "a copy whose barrier does not expect it"
        arriving = source.tile(at)
        complete = self.begin_copy(tile, arriving)

        def arrive() -> int:
            complete()
            return arriving.numel() * arriving.element_size()

        barrier.arriving.append(arrive)

    def begin_copy(self, tile: Shared, arriving: Tensor) -> Callable[[], None]:
        """Start a copy into a tile, and return the function that completes it."""
        place = tile.data.data_ptr()
        assert place not in self.awaited, "a second copy into a tile before the first is complete"
        self.awaited.add(place)
        tile.data.fill_(GARBAGE)

        def complete() -> None:
            tile.data.copy_(arriving)
            self.awaited.discard(place)

        return complete

    def async_copy_global_to_shared(self, tile: Shared, pointer: Pointer, mask: Any = None) -> None:
        complete = self.begin_copy(tile, pointer.load(mask, other=0.0).as_subclass(Tensor))

        def complete_unfenced() -> None:
            complete()
            tile.allocation["fenced"] = False

        self.copies.append(complete_unfenced)

    def commit_group(self) -> None:
        self.groups.append(self.copies)
        self.copies = []

    def wait_group(self, pending: int) -> None:
        while len(self.groups) > pending:
            for complete in self.groups.pop(0):
                complete()

    def fence_async_shared(self) -> None:
        for allocation in self.allocations:
            allocation["fenced"] = True

    def warpgroup_mma(self, a: Any, b: Shared, acc: Any, *, use_acc: bool = True, is_async: bool = False) -> Any:
        for operand in (a, b):
            assert not isinstance(operand, Product), "a product is used as an operand before the wait for it"

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


def where(condition: Any, a: Any, b: Any) -> Any:
    if isinstance(a, Pointer):
        assert a.memory is b.memory, "a choice between addresses in two tensors"
        return Pointer(a.memory, elementwise(torch.where)(condition, a.offsets, b.offsets))
    return elementwise(torch.where)(condition, a, b)


def maximum(a: Tensor, b: Tensor) -> Tensor:
    return torch.fmax(a, b) if a.is_floating_point() or b.is_floating_point() else torch.maximum(a, b)


def minimum(a: Tensor, b: Tensor) -> Tensor:
    return torch.fmin(a, b) if a.is_floating_point() or b.is_floating_point() else torch.minimum(a, b)


def largest(x: Tensor, axis: int) -> Value:
    if x.is_floating_point():
        spoilt = x.isnan()
        return torch.where(spoilt.all(axis), NAN, torch.where(spoilt, -float("inf"), x).amax(axis)).as_subclass(Value)
    return x.amax(axis).as_subclass(Value)


def inline_asm(text: str, constraints: str, operands: Sequence[Any], dtype: Any, is_pure: bool, pack: int) -> Value:
    if text.startswith("fma.rn.sat.f32"):
        a, b, c = (torch.as_tensor(x).double() for x in operands)
        return (a * b + c).float().clamp(0.0, 1.0).nan_to_num(nan=0.0).as_subclass(Value)
    if text.startswith("lg2.approx.ftz.f32"):
        return torch.log2(torch.as_tensor(operands[0])).as_subclass(Value)
    if text.startswith("rcp.approx.ftz.f32"):
        x = torch.as_tensor(operands[0])
        return torch.where(x.abs() < MIN_NORMAL, x * 0.0, x).reciprocal().as_subclass(Value)
    raise NotImplementedError(text)


def kernel_range(*bounds: Any) -> Iterator[Value]:
    return (value(i) for i in range(*(int(bound) for bound in bounds)))


def to_gluon_dtype(x: Any) -> Any:
    """Convert a dtype for functions of constants."""
    return {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16}.get(x, x) if isinstance(x, torch.dtype) else x


def constant(x: Any) -> Any:
    """The result of a function of constants; None for a layout, which is ignored here."""
    x = getattr(x, "value", x)
    return x if isinstance(x, int | float) else None


class Language:
    """The functions of ``triton.experimental.gluon.language`` and ``triton.language`` that the kernels use."""

    float16, bfloat16, float32 = torch.float16, torch.bfloat16, torch.float32
    int32, int64 = torch.int32, torch.int64
    constexpr = object
    maximum, minimum = staticmethod(elementwise(maximum)), staticmethod(elementwise(minimum))
    abs, exp2, log, log2, sqrt, rsqrt = (
        staticmethod(elementwise(f)) for f in (torch.abs, torch.exp2, torch.log, torch.log2, torch.sqrt, torch.rsqrt)
    )
    where = staticmethod(where)
    arange = staticmethod(lambda low, high, layout=None: value(torch.arange(low, high)))
    zeros = staticmethod(lambda shape, dtype, layout=None: value(torch.zeros(tuple(shape), dtype=dtype)))
    cdiv = staticmethod(lambda a, b: (a + b - 1) // b)
    convert_layout = staticmethod(lambda x, layout, assert_trivial=False: x)
    max, sum, reshape = staticmethod(largest), staticmethod(torch.sum), staticmethod(torch.reshape)
    load, store, to_tensor = staticmethod(Pointer.load), staticmethod(Pointer.store), staticmethod(value)
    static_range = staticmethod(range)
    inline_asm_elementwise = staticmethod(inline_asm)
    NVMMASharedLayout = SimpleNamespace(get_default_for=lambda *_: None)

    def __init__(self, program: Program) -> None:
        self.program = program
        self.allocate_shared_memory = program.allocate_shared_memory

    def __getattr__(self, name: str) -> Any:
        if name.endswith("Layout"):
            return lambda *_: None
        raise AttributeError(f"the Gluon interpreter does not implement {name}")

    def program_id(self, axis: int) -> Value:
        return value(self.program.place[axis])

    def num_programs(self, axis: int) -> Value:
        return value(self.program.grid[axis])

    def num_warps(self) -> int:
        return self.program.warps

    @staticmethod
    def static_assert(holds: bool) -> None:
        assert holds

    @staticmethod
    def multiple_of(x: Any, factor: int) -> Any:
        if isinstance(x, Pointer):
            assert int(x.offsets) % factor == 0, f"offset {int(x.offsets)} is declared a multiple of {factor}"
        return x

    @staticmethod
    def min(x: Value, axis: int) -> Value:
        assert not x.is_floating_point(), "NaN handling is not implemented"
        return x.amin(axis)

    @staticmethod
    def atomic_add(pointer: Pointer, x: Any) -> Value:
        before = pointer.load()
        pointer.store(before + x)
        return before

    @staticmethod
    def atomic_max(pointer: Pointer, x: Any) -> None:
        pointer.store(maximum(pointer.load(), torch.as_tensor(x)))


class Assignments(ast.NodeTransformer):
    """``x = 0`` creates a number of the kernel, ``x: gl.constexpr = 0`` a constant."""

    def visit_Assign(self, node: ast.Assign) -> ast.Assign:
        node.value = ast.copy_location(ast.Call(ast.Name("assigned", ast.Load()), [node.value], []), node.value)
        return ast.fix_missing_locations(node)


def assigned(x: Any) -> Any:
    return value(x) if type(x) in (int, float) else x


@cache
def compile_kernel(function: FunctionType) -> CodeType:
    """Compile a kernel's function with Triton's semantics of assignments."""
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
    """The Python function of a jit function, with everything it uses interpreted too. ``called`` collects the names of
    the functions it calls."""
    language = Language(program)
    replaced: dict[str, Any] = {"gl": language, "tl": language, "async_copy": program, "range": kernel_range}
    replaced |= {"mbarrier": program.mbarrier, "tma": program.tma}
    replaced |= {name: getattr(program, name) for name in ("fence_async_shared", "warpgroup_mma", "warpgroup_mma_wait")}
    # Matters only to the compiler.
    replaced |= {"warpgroup_mma_init": lambda x: x}
    replaced |= {"mma_v2": lambda a, b, acc: acc + a.float() @ b.float()}  # in registers: synchronous
    # Kernels take the code path of the hardware, not that of Triton's interpreter.
    replaced |= {"assigned": assigned, "INTERPRETED": False}
    done: dict[FunctionType, FunctionType] = {}

    def interpret_function(function: FunctionType) -> FunctionType:
        if function not in done:
            code = compile_kernel(function)
            known = {"__builtins__": __builtins__} | {
                name: replaced[name] if name in replaced else translated(function.__globals__[name])
                for name in code.co_names
                if name in replaced or name in function.__globals__
            }
            done[function] = FunctionType(code, known, argdefs=function.__defaults__)
        return done[function]

    def record_call(function: FunctionType) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            called.add(function.__name__)
            return function(*arguments, **named)

        return call

    def translated(x: Any) -> Any:
        if isinstance(x, ConstexprFunction):
            return lambda *arguments: constant(x(*map(to_gluon_dtype, arguments)))
        if isinstance(getattr(x, "fn", None), FunctionType):
            return record_call(interpret_function(x.fn))
        return getattr(x, "value", x)  # of a constant

    return interpret_function(kernel.fn)


class InterpretedKernel:
    """Replaces a Gluon kernel: ``kernel[grid](...)`` runs its programs one after another."""

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
            assert len(arguments) == len(parameters), "wrong number of arguments"
            assert parameters[-1].name == "num_warps"
            for z, y, x in itertools.product(*map(range, reversed(grid))):
                program = Program((x, y, z), grid, arguments[-1], self.late_products)
                given = [
                    x if parameter.is_constexpr else argument(x)
                    for x, parameter in zip(arguments, parameters, strict=True)
                ]
                interpreted(self.kernel, program, self.called)(*given)
                assert not program.copies, "copies without a commit"
                assert not program.awaited, "copies without a wait"
                assert not program.barriers, "barriers that are not invalidated"
                assert not program.products, "products without a wait"

        return launch


def argument(x: Any) -> Any:
    if isinstance(x, Tiles):
        return TensorDescriptor(x)
    if isinstance(x, Tensor):
        return Pointer.to(x)
    if isinstance(x, tuple):
        return tuple(argument(part) for part in x)
    return value(x, torch.float32) if isinstance(x, float) else value(x)
