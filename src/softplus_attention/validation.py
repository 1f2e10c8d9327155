"""Checks of user arguments: each error names the argument, what was expected and what was passed."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable
from importlib.util import find_spec
from itertools import pairwise
from typing import NoReturn

import torch
from torch import Tensor

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
# softplus underflows in float32 beyond this.
LARGEST_SCORE = 80.0
LARGEST_HEAD_DIM = 256
UNIT_TOLERANCE = 0.02  # of the norm of a unit key, above the rounding of bfloat16


def fail(name: str, expected: str, got: object, kind: type[Exception] = ValueError) -> NoReturn:
    raise kind(f"`{name}` must be {expected}, got {got}")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name.lower(), list(known), n=1, cutoff=0.6)
    return f"; did you mean {close[0]!r}?" if close else ""


def fail_choice(name: str, known: Iterable[str], got: object, kind: type[Exception] = ValueError) -> NoReturn:
    known = list(known)
    fail(name, f"one of {', '.join(known)}", f"{got!r}{did_you_mean(str(got), known)}", kind)


def describe_tensor(x: object) -> str:
    """Anything else is described by its type."""
    return f"a {x.dtype} tensor of shape {tuple(x.shape)} on {x.device}" if isinstance(x, Tensor) else type(x).__name__


def check_installed(*packages: str) -> None:
    """Fails before minutes of work that would be lost without the packages."""
    for package in packages:
        if find_spec(package) is None:
            raise ModuleNotFoundError(f"No module named {package!r}", name=package)


def check_qkv(q: Tensor, k: Tensor, v: Tensor, *, layout: str, enable_gqa: bool, names: tuple[str, str, str]) -> None:
    """``layout`` of the three tensors is "(B, H, T, D)" or "(total, H, D)"."""
    rank = layout.count(",") + 1
    for name, x in zip(names, (q, k, v), strict=True):
        if not isinstance(x, Tensor):
            fail(name, f"a tensor {layout}", type(x).__name__, TypeError)
        if x.is_nested:
            expected = f"a dense tensor {layout}, or packed documents for softplus_attention_varlen"
            fail(name, expected, "a nested tensor", TypeError)
        if x.dim() != rank:
            fail(name, f"a tensor {layout}", describe_tensor(x))
        if x.dtype not in FLOATS:
            fail(name, "float16, bfloat16, float32 or float64", describe_tensor(x), TypeError)
    dtype, device, q_shape, k_shape, v_shape = q.dtype, q.device, q.shape, k.shape, v.shape
    for name, x, shape in ((names[1], k, k_shape), (names[2], v, v_shape)):
        if x.dtype != dtype:
            fail(name, f"of `{names[0]}`'s dtype, {dtype}", describe_tensor(x), TypeError)
        if x.device != device:
            fail(name, f"on `{names[0]}`'s device, {device}", describe_tensor(x))
        if rank == 4 and shape[0] != q_shape[0]:
            fail(name, f"of `{names[0]}`'s batch size, {q_shape[0]}", describe_tensor(x))
    if k_shape[-1] != q_shape[-1]:
        fail(names[1], f"of `{names[0]}`'s head dimension, {q_shape[-1]}", describe_tensor(k))
    length = 2 if rank == 4 else 0
    if v_shape[length] != k_shape[length]:
        fail(names[2], f"as long as `{names[1]}`, {k_shape[length]} keys", describe_tensor(v))
    if v_shape[1] != k_shape[1]:
        fail(names[2], f"of as many heads as `{names[1]}`, {k_shape[1]}", describe_tensor(v))
    for name, x, width in ((names[0], q, q_shape[-1]), (names[2], v, v_shape[-1])):
        if not 1 <= width <= LARGEST_HEAD_DIM:
            fail(name, f"of head dimension 1 to {LARGEST_HEAD_DIM}", describe_tensor(x))
    h, h_kv = q_shape[1], k_shape[1]
    if h != h_kv:
        divides = h_kv > 0 and h % h_kv == 0
        hint = "" if divides or rank == 3 else ". Tensors are (B, H, T, D): transpose(1, 2) those of FlashAttention"
        if not enable_gqa:
            fail(names[1], f"of `{names[0]}`'s {h} heads (or pass enable_gqa=True)", describe_tensor(k) + hint)
        if not divides:
            fail(names[1], f"of a number of heads that divides `{names[0]}`'s {h}", describe_tensor(k) + hint)


def check_offset(offset: bool) -> None:
    if not isinstance(offset, bool):
        fail("offset", "True or False", repr(offset), TypeError)


def check_sdpa_options(dropout_p: float, scale: float | None, reason: str) -> None:
    """Options of SDPA that this attention does not support; ``reason`` says why it has no ``scale``."""
    if dropout_p:
        fail("dropout_p", "0: dropout is not supported", repr(dropout_p))
    if scale is not None:
        fail("scale", f"None: {reason}", repr(scale))


def check_causal(is_causal: bool) -> None:
    if not isinstance(is_causal, bool):
        fail("is_causal", "True or False", repr(is_causal), TypeError)


def check_window(window: int | None, is_causal: bool) -> None:
    if window is None:
        return
    if isinstance(window, bool) or not isinstance(window, int | torch.SymInt):
        fail("window", "an int >= 1 or None", repr(window), TypeError)
    if window < 1:
        fail("window", "an int >= 1 or None", window)
    if not is_causal:
        fail("window", "None where `is_causal` is False (a window covers earlier keys)", window)


def check_mask(mask: Tensor | None, shape: tuple[int, int, int, int], device: torch.device) -> Tensor | None:
    """The mask with four axes, each of full size or 1."""
    if mask is None:
        return None
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        expected = "a bool tensor, True = visible (additive biases are not supported)"
        fail("attn_mask", expected, describe_tensor(mask), TypeError)
    if mask.device != device:
        fail("attn_mask", f"on the device of the queries, {device}", describe_tensor(mask))
    if mask.dim() > 4 or any(m not in (1, n) for m, n in zip(reversed(mask.shape), reversed(shape), strict=False)):
        fail("attn_mask", f"broadcastable to (B, H, T_q, T_k) = {shape}", describe_tensor(mask))
    return mask.reshape((1,) * (4 - mask.dim()) + mask.shape)


def check_bounds(name: str, bound: Tensor | None, batch: int, t_q: int, device: torch.device) -> Tensor | None:
    if bound is None:
        return None
    if not isinstance(bound, Tensor):
        fail(name, f"an int32 tensor (B, T_q) = ({batch}, {t_q})", type(bound).__name__, TypeError)
    if bound.dtype not in (torch.int32, torch.int64):
        fail(name, "int32", describe_tensor(bound), TypeError)
    if bound.dim() != 2 or bound.shape[0] not in (1, batch) or bound.shape[1] != t_q:
        fail(name, f"of shape (B, T_q) = ({batch}, {t_q})", describe_tensor(bound))
    if bound.device != device:
        fail(name, f"on the device of the queries, {device}", describe_tensor(bound))
    return bound


def readable(x: Tensor, validate: bool) -> bool:
    """Whether to check values: always on a CPU, elsewhere on request (it synchronizes), never while tracing and never
    of tensors without values of their own: fake tensors, and those of vmap and grad."""
    if torch.compiler.is_compiling() or not (x.device.type == "cpu" or validate):
        return False
    plain = type(x) is Tensor or type(x) is torch.nn.Parameter
    return plain and not torch._C._functorch.is_functorch_wrapped_tensor(x)


def check_score_scale(score_scale: float | None, head_dim: int, bounds: Iterable[int | None]) -> float:
    """``bounds`` on the number of keys that a row sees are those of ``Visibility.bounds``."""
    if score_scale is None:
        score_scale = math.log(head_dim)
    elif isinstance(score_scale, bool) or not isinstance(score_scale, int | float):
        fail("score_scale", "a number or None (log of the head dimension)", repr(score_scale), TypeError)
    if not 0 <= score_scale <= 1.7976931348623157e308:  # the largest float; dynamo would make a global symbolic
        fail("score_scale", "a finite number >= 0", score_scale)
    if not torch.compiler.is_compiling() and score_scale:  # a compiled call would be guarded by the length
        seen = min(bound for bound in bounds if bound is not None)
        if seen > math.exp(min(LARGEST_SCORE / score_scale, 700)):
            expected = f"at most {LARGEST_SCORE:g} / log({seen} keys), or softplus underflows"
            fail("score_scale", expected, f"{score_scale:g}")
    return float(score_scale)


def check_cu_seqlens(name: str, cu: Tensor, total: int, longest: int, device: torch.device, validate: bool) -> None:
    if not isinstance(cu, Tensor) or cu.dtype not in (torch.int32, torch.int64):
        fail(name, "an int32 tensor", describe_tensor(cu), TypeError)
    if cu.dim() != 1 or cu.numel() < 2:
        fail(name, "1-D with at least two entries", describe_tensor(cu))
    if cu.device != device:
        fail(name, f"on the device of the queries, {device}", describe_tensor(cu))
    if readable(cu, validate):
        ends = cu.tolist()
        if ends[0] != 0:
            fail(name, "starting at 0", f"{ends[0]} first")
        if any(b < a for a, b in pairwise(ends)):
            fail(name, "non-decreasing", ends)
        if ends[-1] != total:
            fail(name, f"ending at the number of packed tokens, {total}", f"{ends[-1]} last")
        most = max(b - a for a, b in pairwise(ends))
        if most > longest:
            suffix = name.removeprefix("cu_seqlens")
            fail(f"max_seqlen{suffix}", f"at least the longest document, {most}", longest)


def check_unit_keys(k: Tensor, seen: Tensor) -> None:
    """``seen`` (B, t_k): the keys that some row may see. Zero keys are allowed, and NaN propagates to the result."""
    norms = k.float().norm(dim=-1)
    wrong = seen[:, None] & norms.isfinite() & (norms != 0) & ((norms - 1).abs() > UNIT_TOLERANCE)
    if bool(wrong.any()):
        fail("normalized_keys", "False, or a cache of unit keys", f"True with a key of length {norms[wrong][0]:g}")


def check_cache_lengths(
    name: str, lengths: Tensor, batch: int, least: int, most: int, device: torch.device, validate: bool
) -> None:
    if not isinstance(lengths, Tensor) or lengths.dtype not in (torch.int32, torch.int64):
        fail(name, "an int32 or int64 tensor", describe_tensor(lengths), TypeError)
    if lengths.dim() != 1 or lengths.shape[0] != batch:
        fail(name, f"of shape (B,) = ({batch},)", describe_tensor(lengths))
    if lengths.device != device:
        fail(name, f"on the device of the queries, {device}", describe_tensor(lengths))
    if readable(lengths, validate) and batch and not bool(((lengths >= least) & (lengths <= most)).all()):
        fail(name, f"from {least} to {most}", lengths.tolist())
