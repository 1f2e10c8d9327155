"""What benchmarks/attention.py times: our op, attentions made of torch's, and the shapes."""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

from softplus_attention import softplus_attention, softplus_attention_decode
from softplus_attention.power import power_by_log
from softplus_attention.reference import compute_dtype

Attention = Callable[..., Tensor]  # of q, k, v
Shape = tuple[int, int]  # head dim, length
full = functools.cache(torch.full)


@dataclass(frozen=True)
class Settings:
    device: str = "cuda"
    dtype: torch.dtype = torch.bfloat16
    tokens: int = 32768
    head_dims: tuple[int, ...] = (64, 128)
    lengths: tuple[int, ...] = (1024, 4096, 16384)
    long_lengths: tuple[int, ...] = tuple(2**n for n in range(9, 18))
    million: int = 2**20
    decode_shape: tuple[int, int, int, int] = (8, 32, 8, 128)  # B, H, H_kv, D
    contexts: tuple[int, ...] = (1024, 8192, 32768, 131072)
    check_lengths: tuple[int, ...] = (512, 333)
    repetitions: int = 3
    baseline: str = "sdpa flash"
    quick: bool = False

    def heads(self, head_dim: int) -> int:
        return 2 if self.quick else 12 if head_dim <= 64 else 16

    @property
    def shapes(self) -> list[Shape]:
        return [(head_dim, length) for head_dim in self.head_dims for length in self.lengths]


QUICK: dict[str, Any] = {
    "tokens": 256, "head_dims": (64,), "lengths": (64, 128), "long_lengths": (64, 128, 256), "million": 1024,
    "check_lengths": (64, 37), "decode_shape": (2, 4, 2, 64), "contexts": (64, 128), "quick": True,
}  # fmt: skip


@dataclass(frozen=True)
class Contender:
    name: str
    attend: Attention
    truth: Attention | None = None  # the reference, run in float64; None: not checked
    backward: bool = True
    dense: bool = False  # memory quadratic in T
    contiguous: bool = False  # needs (B, H, T, D) layout


def ours(power: int | None, impl: Any, offset: bool = True) -> Attention:
    return functools.partial(softplus_attention, power=power, offset=offset, is_causal=True, impl=impl)


def learned(impl: Any, offset: bool = True) -> Attention:
    """LSSAR with a learned factor of log N per head: one power per row, with a gradient."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        factors = torch.linspace(0.4, 1.0, q.shape[1], device=q.device).requires_grad_()
        counts = torch.arange(1, q.shape[2] + 1, device=q.device)[None, None]
        power = power_by_log(factors.to(compute_dtype(q.dtype)), counts)
        return softplus_attention(q, k, v, power=power, offset=offset, is_causal=True, impl=impl)

    return attend


def softplus_contender(name: str, make: Callable[[Any], Attention], impl: Any, **options: bool) -> Contender:
    return Contender(name, make(impl), truth=make("reference"), **options)


def sdpa(backend: SDPBackend, **options: bool) -> Attention:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, **options)

    return attend


@functools.cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    def refuse(*_: Any, **__: Any) -> Any:
        raise RuntimeError("torch.compile is measured only on CUDA")

    return torch.compile(function, dynamic=False) if torch.cuda.is_available() else refuse


@functools.cache
def causal_blocks(length: int, device: torch.device) -> Any:
    return create_block_mask(lambda b, h, i, j: i >= j, None, None, length, length, device=str(device))


def flex_softmax(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    blocks = causal_blocks(q.shape[2], q.device) if q.shape[2] > 1 else None
    return compiled(flex_attention)(q, k, v, block_mask=blocks, enable_gqa=q.shape[1] != k.shape[1])


def two_passes(q: Tensor, k: Tensor, v: Tensor, blocks: Any, power: int, flex: Attention = flex_attention) -> Tensor:
    """LSSAR as two softmaxes: of log f, whose log-sum-exp is log R, then of p log x. Not for rows of equal scores.

    ``flex`` may be compiled, but not this whole function: inductor raises an error for a score_mod that reads the
    log-sum-exp of the first call before its layout is fixed.
    """
    log_n = torch.arange(1, q.shape[2] + 1, device=q.device, dtype=torch.float32).log()
    row_scale = math.log(q.shape[-1]) * log_n / q.float().norm(dim=-1)
    key_scale = 1 / k.float().norm(dim=-1)
    offset = (log_n > math.log(3.5)).float()

    def log_softplus(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        s = score * (row_scale[b, h, i] * key_scale[b, h, j])
        return torch.log(torch.clamp(s, min=0) + torch.log1p(torch.exp(-torch.abs(s))))

    _, aux = flex(q, k, v, score_mod=log_softplus, block_mask=blocks, scale=1.0, return_aux=AuxRequest(lse=True))
    log_mean = aux.lse - log_n

    def log_sharpened(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        x = torch.exp(log_softplus(score, b, h, i, j) - log_mean[b, h, i]) - offset[i]
        return torch.where(x > 0, power * torch.log(torch.where(x > 0, x, 1.0)), -float("inf"))

    return flex(q, k, v, score_mod=log_sharpened, block_mask=blocks, scale=1.0)


@functools.cache
def contenders(settings: Settings) -> list[Contender]:
    """The contenders of the sections train and memory, the baseline first."""
    cuda = settings.device == "cuda"
    impl, backend = ("triton", SDPBackend.FLASH_ATTENTION) if cuda else ("chunked", SDPBackend.MATH)
    return [
        Contender(settings.baseline, sdpa(backend, is_causal=True)),
        Contender("sdpa cudnn", sdpa(SDPBackend.CUDNN_ATTENTION, is_causal=True)),
        softplus_contender("lssar p=15", functools.partial(ours, 15), impl),
        softplus_contender("lssar p=3", functools.partial(ours, 3), impl),
        softplus_contender("lssar learned", learned, impl),
        softplus_contender("lssar p=15 without offset", functools.partial(ours, 15, offset=False), impl),
        softplus_contender("lssar learned without offset", functools.partial(learned, offset=False), impl),
        softplus_contender("lssa", functools.partial(ours, None), impl),
        softplus_contender("reference p=15", functools.partial(ours, 15), "reference", dense=True),
        Contender("adasplash-2", lambda *qkv: importlib.import_module("adasplash").adasplash_v2(*qkv), contiguous=True),
    ]


def choose_contenders(section: str, settings: Settings) -> list[Contender]:
    """The contenders of a section that calls the op without a cache or compiler; empty for other sections."""
    everyone = contenders(settings)
    if section == "lengths":
        return [x for x in everyone if x.name in (settings.baseline, "lssar p=15", "lssa")]
    if section == "trained":  # without offset the time does not depend on the data
        return [x for x in everyone if not x.dense and "without offset" not in x.name]
    return everyone if section in ("train", "memory") else []


def compiled_contenders() -> list[Contender]:
    def flex_lssar(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return two_passes(q, k, v, causal_blocks(q.shape[2], q.device), 15, compiled(flex_attention))

    return [
        Contender("reference compiled", compiled(ours(15, "reference")), truth=ours(15, "reference"), dense=True),
        Contender("lssar p=15 compiled", compiled(ours(15, "triton")), truth=ours(15, "reference")),
        Contender("flex softmax", flex_softmax),
        # Last, because it takes a minute to compile.
        Contender("flex lssar p=15", flex_lssar, truth=ours(15, "reference"), backward=False),
    ]


def decode_ours(unit_keys: bool, impl: Any) -> Attention:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        lengths = full((q.shape[0],), k.shape[2], dtype=torch.int32, device=q.device)
        return softplus_attention_decode(q, k, v, lengths, normalized_keys=unit_keys, enable_gqa=True, impl=impl)

    return attend


def heads_as_rows(attend: Attention) -> Attention:
    """Query heads that share a key head become rows of one head, so that no key is read twice."""
    return lambda q, k, v: attend(q.reshape(q.shape[0], k.shape[1], -1, q.shape[-1]), k, v).reshape(q.shape)


def decode_contenders(settings: Settings) -> list[Contender]:
    """Only ours have a ``truth``; those named "unit keys" read a cache of normalised keys."""
    cuda = settings.device == "cuda"
    backends = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
    backends |= {"efficient": SDPBackend.EFFICIENT_ATTENTION, "math": SDPBackend.MATH}
    chosen = [Contender(f"sdpa {name}", sdpa(backend, enable_gqa=True)) for name, backend in backends.items()]
    chosen += [Contender(f"sdpa {x} heads as rows", heads_as_rows(sdpa(backends[x]))) for x in ("flash", "cudnn")]
    chosen += [Contender("flex softmax", flex_softmax)] if cuda else []
    for name, unit_keys in (("lssar p=15", False), ("lssar p=15 unit keys", True)):
        impl = "triton" if cuda else "chunked"
        chosen.append(softplus_contender(name, functools.partial(decode_ours, unit_keys), impl))
    return chosen
