"""The op in PyTorch: compile, export, autocast, checkpointing, and unsupported uses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import randn, run, transposed
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

from softplus_attention import PowerByLength, softplus_attention, softplus_attention_decode, softplus_attention_varlen
from softplus_attention.kernels import ops as _registered  # noqa: F401

THREADS = 2
D = 16
POWERS: dict[str, Any] = {
    "p15": 15,
    "p2.5": 2.5,
    "lssa": None,
    "heads": torch.tensor([2.0, 15.0]),
    "length": PowerByLength(3, 1, 4),
}
IMPLS = ["chunked", "reference"]


def qkv(t: int = 20, *, heads: int = 2, dtype: torch.dtype = torch.float32, grad: bool = True) -> list[Tensor]:
    return [randn(2, heads, t, D, seed=seed, dtype=dtype).requires_grad_(grad) for seed in (1, 2, 3)]


def assert_same(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


# Numbers are literals, as in a model's code. Dynamo may treat numbers of closures and attributes as symbolic, and
# restarts where the op accepts only constants.
COMPILED_ONCE: dict[str, Callable[..., Tensor]] = {
    "power 15": lambda q, k, v: softplus_attention(q, k, v, is_causal=True),
    "power 2.5": lambda q, k, v: softplus_attention(q, k, v, is_causal=True, power=2.5, score_scale=1.5, window=9),
    "by length": lambda q, k, v: softplus_attention(q, k, v, is_causal=True, power=PowerByLength(3.0, 1.0, 16)),
    "LSSA": lambda q, k, v: softplus_attention(q, k, v, power=None),
    "reference": lambda q, k, v: softplus_attention(q, k, v, is_causal=True, impl="reference"),
}


class TestCompile:
    def assert_compiled_alike(
        self, function: Callable[..., Tensor], backend: str, lengths: tuple[int, ...], layout: Any = None
    ) -> None:
        """Compiled equals eager, forward and backward, and new lengths do not recompile."""
        compiled = torch.compile(function, backend=backend, fullgraph=True, dynamic=True)
        for count, t in enumerate(lengths):
            results = []
            for f in (compiled, function):
                leaves = qkv(t, dtype=torch.float64)
                q, k, v = leaves if layout is None else [layout(x) for x in leaves]
                with torch.compiler.set_stance("fail_on_recompile" if count else "default"):
                    out = f(q, k, v)
                results.append((out, *torch.autograd.grad(out.square().sum(), leaves)))
            torch.testing.assert_close(*results, rtol=1e-10, atol=1e-10)

    @pytest.mark.parametrize(
        ("options", "lengths", "layout"),
        [
            *[pytest.param({"power": power}, (20, 33, 7), None, id=name) for name, power in POWERS.items()],
            pytest.param({"window": 5}, (20,), None, id="window"),
            pytest.param({"attn_mask": torch.ones(2, 1, 1, 20, dtype=torch.bool)}, (20,), None, id="mask"),
            pytest.param({"key_start": torch.ones(2, 20, dtype=torch.int32)}, (20,), None, id="key-start"),
            pytest.param({}, (20, 33), transposed, id="transposed"),
            pytest.param({"impl": "reference"}, (20, 33), None, id="reference", marks=pytest.mark.slow),
        ],
    )
    def test_dynamic_lengths(self, options: dict[str, Any], lengths: tuple[int, ...], layout: Any) -> None:
        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return softplus_attention(q, k, v, is_causal=True, **options)

        self.assert_compiled_alike(attend, "aot_eager", lengths, layout)

    @pytest.mark.parametrize("name", COMPILED_ONCE)
    @pytest.mark.parametrize("dynamic", [True, None])
    def test_one_compilation(self, name: str, dynamic: bool | None) -> None:
        """For all lengths with ``dynamic=True`` or ``mark_dynamic``, also if the first T equals D."""
        counter = CompileCounterWithBackend("aot_eager")
        compiled = torch.compile(COMPILED_ONCE[name], backend=counter, fullgraph=True, dynamic=dynamic)
        for t in (20 if dynamic else D, 33, 7):
            given = [x.detach().requires_grad_() for x in qkv(t)]
            for x in given if dynamic is None else ():
                torch._dynamo.mark_dynamic(x, 2)
            torch.autograd.grad(compiled(*given).sum(), given)
        assert counter.frame_count == 1

    @pytest.mark.slow
    @pytest.mark.parametrize("layout", [None, transposed], ids=["contiguous", "transposed"])
    @pytest.mark.parametrize("masked", [False, True], ids=["causal", "masked"])
    def test_inductor(self, masked: bool, layout: Any) -> None:
        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, k, v = (x * 1.5 for x in (q, k, v))
            mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril() if masked else None
            return softplus_attention(q, k, v, is_causal=not masked, attn_mask=mask).sin()

        self.assert_compiled_alike(attend, "inductor", (20, 33), layout=layout)

    def test_packed(self) -> None:
        def attend(q: Tensor, k: Tensor, v: Tensor, cu: Tensor, longest: int) -> Tensor:
            lengths = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": longest, "max_seqlen_k": longest}
            return softplus_attention_varlen(q, k, v, is_causal=True, **lengths)

        compiled = torch.compile(attend, backend="aot_eager", fullgraph=True, dynamic=True)
        for ends in ([0, 4, 20], [0, 8, 9, 30]):
            cu = torch.tensor(ends, dtype=torch.int32)
            q, k, v = (randn(ends[-1], 2, D, seed=seed) for seed in (1, 2, 3))
            longest = int(cu.diff().max())
            assert_same(compiled(q, k, v, cu, longest), attend(q, k, v, cu, longest))

    def test_decode_does_not_recompile_as_the_cache_fills(self) -> None:
        def attend(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
            return softplus_attention_decode(q, k, v, lengths)

        compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
        q, k, v = randn(2, 2, 1, D, seed=1), randn(2, 2, 32, D, seed=2), randn(2, 2, 32, D, seed=3)
        for step, lengths in enumerate(([3, 9], [4, 10], [31, 32])):
            with torch.compiler.set_stance("fail_on_recompile" if step else "default"):
                found = compiled(q, k, v, torch.tensor(lengths))
            assert_same(found, attend(q, k, v, torch.tensor(lengths)))

    def test_errors_are_the_same_when_compiled(self) -> None:
        compiled = torch.compile(lambda q, k, v: softplus_attention(q, k, v, window=3), backend="aot_eager")
        with pytest.raises(ValueError, match="`window` must be None"):
            compiled(*qkv())


class Layer(torch.nn.Module):
    def __init__(self, power: Any, impl: str) -> None:
        super().__init__()
        self.power, self.impl = power, impl

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return softplus_attention(q, k, v, power=self.power, is_causal=True, impl=self.impl)


@pytest.mark.parametrize(
    ("impl", "power"),
    [("chunked", 15), ("chunked", None), ("chunked", PowerByLength(3, 1, 4)), ("reference", 15)],
    ids=["chunked-p15", "chunked-lssa", "chunked-length", "reference-p15"],
)
def test_export(impl: str, power: Any) -> None:
    layer = Layer(power, impl)
    length = torch.export.Dim("length")
    program = torch.export.export(layer, tuple(qkv(20, grad=False)), dynamic_shapes=[{2: length}] * 3)
    for t in (20, 45):
        inputs = qkv(t, grad=False)
        assert_same(program.module()(*inputs), layer(*inputs))


def op_arguments(**options: Any) -> dict[str, tuple[Any, ...]]:
    """Arguments of the registered op: q, k, v, start, end, mask, sharpen, power, power_rows, power_by_length, ..."""
    q, k, v = qkv(9, **options)
    start, end = torch.zeros(1, 9, dtype=torch.int32), torch.arange(1, 10, dtype=torch.int32)[None]
    mask = torch.rand(2, 1, 9, 9, generator=torch.Generator().manual_seed(1)) < 0.8
    ranges = start.expand(2, 9).contiguous(), end.expand(2, 9).contiguous()
    rows = torch.full((1, 2, 1), 2.5, requires_grad=True)
    empty = [x[:, :, :0].detach().clone().requires_grad_() for x in (q, k, v)]
    nothing = torch.zeros(1, 0, dtype=torch.int32)
    views = [transposed(x.detach()).requires_grad_() for x in (q, k, v)]
    return {
        "causal": (q, k, v, start, end, None, True, 15.0, None, None, True, 2.0, False),
        "lssa": (q, k, v, start, end, None, False, 1.0, None, None, True, 2.0, False),
        "mask": (q, k, v, *ranges, mask, True, 3.0, None, None, True, 2.0, False),
        "rows": (q, k, v, start, end, None, True, 1.0, rows, None, True, 2.0, False),
        "by-length": (q, k, v, start, end, None, True, 1.0, None, [3.0, 1.0, 4.0], True, 2.0, False),
        "normalised": (q, k, v, start, end, None, True, 15.0, None, None, True, 2.0, True),
        "without-offset": (q, k, v, start, end, None, True, 15.0, None, None, False, 2.0, False),
        "transposed": (*views, start, end, None, True, 15.0, None, None, True, 2.0, False),
        "transposed-mask": (*views, *ranges, mask, True, 15.0, None, None, True, 2.0, False),
        "empty": (*empty, nothing, nothing, None, True, 15.0, None, None, True, 2.0, False),
    }


OPCHECKED = [(name, torch.float32) for name in op_arguments()] + [("transposed", torch.bfloat16)]


@pytest.mark.parametrize(("name", "dtype"), OPCHECKED, ids=[f"{n}-{d}".replace("torch.", "") for n, d in OPCHECKED])
class TestOpcheck:
    def test_forward(self, name: str, dtype: torch.dtype) -> None:
        arguments = op_arguments(dtype=dtype)[name]
        torch.library.opcheck(torch.ops.softplus_attention.chunked_forward.default, arguments)

    def test_backward(self, name: str, dtype: torch.dtype) -> None:
        arguments = op_arguments(dtype=dtype)[name]
        arguments = tuple(x.detach() if isinstance(x, Tensor) else x for x in arguments)
        out, stats = torch.ops.softplus_attention.chunked_forward(*arguments)
        torch.library.opcheck(
            torch.ops.softplus_attention.chunked_backward.default, (torch.ones_like(out), stats, *arguments)
        )


class TestAutocast:
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
    @pytest.mark.parametrize("threads", [1, 2])
    @pytest.mark.parametrize("impl", IMPLS)
    def test_equals_a_call_in_that_dtype(self, impl: str, threads: int, dtype: torch.dtype) -> None:
        """The inputs are cast as in SDPA; the computation inside stays in float32."""
        q, k, v = qkv(300)
        expected = softplus_attention(*(x.to(dtype) for x in (q, k, v)), is_causal=True, impl=impl)
        torch.set_num_threads(threads)
        with torch.autocast("cpu", dtype=dtype):
            found = softplus_attention(q, k, v, is_causal=True, impl=impl)
            like = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        torch.set_num_threads(2)
        assert found.dtype == like.dtype == dtype
        assert torch.equal(found, expected)

    # The reference's backward is PyTorch's, which casts inside autocast; PyTorch advises against calling it there.
    @pytest.mark.parametrize(("impl", "inside"), [("reference", False), ("chunked", False), ("chunked", True)])
    def test_gradients_too(self, impl: str, inside: bool) -> None:
        grad_out = randn(2, 2, 100, D, seed=5, dtype=torch.bfloat16)
        leaves = qkv(100)
        out = softplus_attention(*(x.bfloat16() for x in leaves), is_causal=True, impl=impl)
        expected = torch.autograd.grad(out, leaves, grad_out)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = softplus_attention(*leaves, is_causal=True, impl=impl)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=inside):
            found = torch.autograd.grad(out, leaves, grad_out)
        assert {x.dtype for x in found} == {torch.float32}
        torch.testing.assert_close(found, expected, rtol=0, atol=0)

    def test_float64_is_left_alone(self) -> None:
        q, k, v = qkv(dtype=torch.float64)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert softplus_attention(q, k, v).dtype == torch.float64

    def test_mixed_dtypes_from_rotary_embeddings(self) -> None:
        """Under autocast, projections are bfloat16 while rotated q and k are float32."""
        q, k, v = qkv()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert softplus_attention(q, k, v.bfloat16()).dtype == torch.bfloat16


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("impl", IMPLS)
def test_checkpointing_gives_equal_gradients(impl: str, reentrant: bool) -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return softplus_attention(q, k, v, is_causal=True, impl=impl)

    results = []
    for f in (attend, lambda *x: checkpoint(attend, *x, use_reentrant=reentrant)):
        leaves = qkv(50)
        f(*leaves).square().sum().backward()
        results.append([x.grad for x in leaves])
    torch.testing.assert_close(*results, rtol=0, atol=0)


class TestUnsupported:
    @pytest.mark.parametrize("wanted", ["q", "k", "v", "power"])
    def test_double_backward(self, wanted: str) -> None:
        tensors = dict(zip("qkv", qkv(), strict=True)) | {"power": torch.tensor([3.0, 4.0], requires_grad=True)}
        out = softplus_attention(**tensors, impl="chunked")
        (grad,) = torch.autograd.grad(out.square().sum(), tensors[wanted], create_graph=True)
        with pytest.raises(RuntimeError, match="softplus_attention: the gradient of a gradient"):
            torch.autograd.grad(grad.sum(), tensors["q"])

    def test_the_reference_has_a_second_gradient(self) -> None:
        inputs = tuple(randn(1, 1, 5, 4, seed=s, dtype=torch.float64).requires_grad_() for s in (1, 2, 3))
        assert torch.autograd.gradgradcheck(
            lambda q, k, v: softplus_attention(q, k, v, power=3, is_causal=True, impl="reference"), inputs
        )

    @pytest.mark.parametrize("transform", ["grad", "vmap", "jvp", "jacrev"])
    def test_torch_func(self, transform: str) -> None:
        q, k, v = qkv(grad=False)

        def total(q: Tensor) -> Tensor:
            return softplus_attention(q, k, v, impl="chunked").sum()

        calls: dict[str, Callable[[], Any]] = {
            "grad": lambda: torch.func.grad(total)(q),
            "jacrev": lambda: torch.func.jacrev(total)(q),
            "jvp": lambda: torch.func.jvp(total, (q,), (q,)),
            "vmap": lambda: torch.func.vmap(lambda x: softplus_attention(x[None], k[:1], v[:1], impl="chunked"))(q),
        }
        with pytest.raises(RuntimeError, match=r"softplus_attention: torch\.func.*impl='chunked'.*impl='reference'"):
            calls[transform]()

    def test_torch_func_works_in_the_reference(self) -> None:
        q, k, v = qkv()
        found = torch.func.grad(lambda q: softplus_attention(q, k, v, impl="reference").square().sum())(q)
        (expected,) = torch.autograd.grad(softplus_attention(q, k, v, impl="reference").square().sum(), q)
        assert_same(found, expected)

    def test_forward_mode_gradients(self) -> None:
        """Silently dropping the tangent would give a wrong result."""
        q, k, v = qkv(grad=False)
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(q, torch.ones_like(q))
            with pytest.raises((RuntimeError, NotImplementedError), match="softplus_attention"):
                softplus_attention(dual, k, v, impl="chunked")

    @pytest.mark.parametrize("way", ["jvp", "dual inside", "dual from outside"])
    def test_forward_mode_gradients_of_a_compiled_call(self, way: str) -> None:
        forward_ad = torch.autograd.forward_ad
        q, k, v = qkv(grad=False)

        def out(x: Tensor) -> Tensor:
            return softplus_attention(x, k, v, impl="chunked")

        def inside(x: Tensor) -> Any:
            with forward_ad.dual_level():
                return forward_ad.unpack_dual(out(forward_ad.make_dual(x, x))).tangent

        torch._dynamo.reset()
        calls = {"jvp": lambda x: torch.func.jvp(out, (x,), (x,))[1], "dual inside": inside, "dual from outside": out}
        compiled = torch.compile(calls[way], backend="eager")
        if way != "dual from outside":
            with pytest.raises(
                RuntimeError, match=r"softplus_attention: (forward-mode|torch\.func).* are not supported"
            ):
                compiled(q)
            return
        compiled(q)
        with forward_ad.dual_level(), pytest.raises(RuntimeError, match="softplus_attention: forward-mode gradients"):
            compiled(forward_ad.make_dual(q, q))


class TestTensorsWithoutValues:
    """Fake tensors and tensors of vmap: shapes are validated, values are not."""

    def test_fake_tensors(self) -> None:
        from torch._subclasses import FakeTensorMode

        with FakeTensorMode():
            q, k, v = (torch.randn(1, 2, 8, 16) for _ in range(3))
            ends = torch.tensor([0, 3, 8], dtype=torch.int32)
            assert softplus_attention(q, k, v, power=torch.full((2,), 3.0)).shape == q.shape
            assert softplus_attention_decode(q[:, :, -1:], k, v, torch.tensor([8])).shape == (1, 2, 1, 16)
            packed = [x[0].transpose(0, 1) for x in (q, k, v)]
            assert softplus_attention_varlen(*packed, ends, ends, 5, 5).shape == (8, 2, 16)
            with pytest.raises(ValueError, match="`power` must be of shape"):
                softplus_attention(q, k, v, power=torch.full((3,), 3.0))

    def test_vmap_over_powers(self) -> None:
        q, k, v = (randn(1, 2, 8, 16, seed=s) for s in (1, 2, 3))
        powers = torch.tensor([[2.0, 3.0], [5.0, 7.0]])

        def one(power: Tensor) -> Tensor:
            return softplus_attention(q, k, v, power=power, impl="reference")

        assert_same(torch.func.vmap(one)(powers), torch.stack([one(power) for power in powers]))


class TestDropIn:
    """Calls as written for scaled_dot_product_attention."""

    @pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
    @pytest.mark.parametrize("t_k", [12, 20])
    def test_same_call_same_shape(self, t_k: int, causal: bool) -> None:
        q, k, v = randn(2, 4, 12, D, seed=1), randn(2, 4, t_k, D, seed=2), randn(2, 4, t_k, 24, seed=3)
        like = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
        out = softplus_attention(q, k, v, is_causal=causal)
        assert (out.shape, out.dtype, out.device) == (like.shape, like.dtype, like.device)

    def test_same_masks_and_gqa(self) -> None:
        q, k, v = randn(2, 4, 12, D, seed=1), randn(2, 2, 12, D, seed=2), randn(2, 2, 12, D, seed=3)
        mask = torch.ones(12, 12, dtype=torch.bool).tril()
        for options in ({"attn_mask": mask}, {"attn_mask": mask[None, None].expand(2, 4, 12, 12)}):
            like = F.scaled_dot_product_attention(q, k, v, enable_gqa=True, **options)
            out = softplus_attention(q, k, v, enable_gqa=True, **options)
            assert out.shape == like.shape
            assert_same(out, softplus_attention(q, k, v, enable_gqa=True, is_causal=True))

    def test_gqa_reads_the_same_key_head_as_sdpa(self) -> None:
        """The values identify the head: each output head equals the number of its key head."""
        q, k = randn(1, 6, 4, D, seed=1), randn(1, 3, 4, D, seed=2)
        v = torch.arange(3.0).view(1, 3, 1, 1).expand(1, 3, 4, D)
        like = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        assert_same(softplus_attention(q, k, v, enable_gqa=True), like)

    def test_auto_on_a_cpu_is_the_chunked_path(self) -> None:
        q, k, v = qkv(60, grad=False)
        grad_out = randn(2, 2, 60, D, seed=4)
        results = [run(softplus_attention, q, k, v, impl=impl, grad_out=grad_out) for impl in ("auto", "chunked")]
        torch.testing.assert_close(*results, rtol=0, atol=0)

    def test_in_a_module_under_autocast_with_an_optimiser(self) -> None:
        """A few steps of training lower the loss."""
        torch.manual_seed(0)
        project = torch.nn.Linear(D, 3 * D)
        power = torch.nn.Parameter(torch.full((2,), 3.0))
        optimiser = torch.optim.Adam([*project.parameters(), power], lr=1e-2)
        x, target = torch.randn(4, 12, D), torch.randn(4, 12, D)
        losses = []
        for _ in range(20):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                q, k, v = project(x).unflatten(-1, (3, 2, D // 2)).permute(2, 0, 3, 1, 4)
                out = softplus_attention(q, k, v, is_causal=True, power=power)
            loss = F.mse_loss(out.float().transpose(1, 2).flatten(2), target)
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            losses.append(float(loss.detach()))
        assert losses[-1] < 0.9 * losses[0]
        assert not torch.equal(power.detach(), torch.full((2,), 3.0))
