"""Decoding as PyTorch knows it: a schema and shapes for tracing. It has no gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from softplus_attention.kernels.triton.decode_launch import decode, empty_output

_library = torch.library.Library("softplus_attention", "FRAGMENT")
_library.define(
    "triton_decode(Tensor q, Tensor k_cache, Tensor v_cache, Tensor? cache_seqlens, Tensor? cache_starts, int? window, "
    "bool sharpen, float power, Tensor? power_rows, float[]? power_by_length, bool offset, float score_scale, "
    "bool normalized_keys) -> Tensor"
)


def _fake(q: Tensor, k_cache: Tensor, v_cache: Tensor, *options: Any) -> Tensor:
    return empty_output(q, v_cache)


for _key in ("CUDA", "CPU"):  # CPU tensors run in Triton's interpreter
    _library.impl("triton_decode", decode, _key)
torch.library.register_fake("softplus_attention::triton_decode", _fake, lib=_library)
