"""The attention backend that our models give their layers: any attention of the catalogue over vLLM's paged cache."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.platforms import current_platform
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
)
from vllm.v1.kv_cache_layout import KVCacheLayout

from softplus_attention.attentions.catalog import SOFTMAX, Attention
from softplus_attention.attentions.spec import AttentionSpec
from softplus_attention.dispatch import unit_keys
from softplus_attention.paged import attend_pages
from softplus_attention.serving.vllm.plugin import BACKEND, refuse_untested_device


def is_plain_softmax(spec: AttentionSpec) -> bool:
    """Whether vLLM's own backends compute it; they are given the window of the layer."""
    return spec.positions != "alibi" and spec.but(window=None, positions=SOFTMAX.positions) == SOFTMAX


class SoftplusBackend(AttentionBackend):
    """The cache is (blocks, H_kv, block, 2 D), see ``keys_and_values``; keys are of length 1 where the attention
    normalises them."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]

    @staticmethod
    def get_name() -> str:
        return BACKEND

    @staticmethod
    def get_impl_cls() -> type[PagedAttention]:
        return PagedAttention

    @staticmethod
    def get_builder_cls() -> type[PagedBatchBuilder]:
        return PagedBatchBuilder

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        return (KVCacheLayout.LBHNC, KVCacheLayout.LBNHC)


@dataclass
class PagedBatch(AttentionMetadata):
    """What all layers of a cache group need of one step."""

    tokens: int  # the rest is padding
    blocks: Tensor  # (tokens,) where the new keys go
    offsets: Tensor
    block_table: Tensor
    seq_lens: Tensor
    cu_seqlens_q: Tensor
    max_seqlen_q: int
    max_seqlen_k: int


class PagedBatchBuilder(AttentionMetadataBuilder[PagedBatch]):
    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.block_size = kv_cache_spec.block_size

    def build(self, common_prefix_len: int, common: CommonAttentionMetadata, fast_build: bool = False) -> PagedBatch:
        if common_prefix_len:
            # Its two parts are joined by softmax's sums; here the second stage needs the first over all keys.
            raise NotImplementedError("softplus_attention: cascade attention is not supported; use --disable-cascade")
        if common.causal is not True:
            raise NotImplementedError("softplus_attention: vLLM asks for attention that is not causal")
        tokens = common.num_actual_tokens
        slots = common.slot_mapping[:tokens]
        longest = int(common.seq_lens.max()) if common.seq_lens.device.type == "cpu" else common.max_seq_len
        return PagedBatch(
            tokens,
            slots // self.block_size,
            slots % self.block_size,
            common.block_table_tensor,
            common.seq_lens,
            common.query_start_loc,
            common.max_query_len,
            min(longest, common.block_table_tensor.shape[1] * self.block_size),
        )


def keys_and_values(kv_cache: Tensor) -> tuple[Tensor, Tensor]:
    """(blocks, H_kv, block, D) each. Where a head's part of a block is one piece of memory, its keys come first and its
    values after them: a decode step reads all keys, and on the way no values that it will leave out."""
    blocks, heads, size, width = kv_cache.shape
    if kv_cache.stride(2) == width and kv_cache.stride(3) == 1:
        keys, values = kv_cache.view(blocks, heads, 2, size, width // 2).unbind(2)
    else:
        keys, values = kv_cache.split(width // 2, -1)
    return keys, values


class PagedAttention(AttentionImpl[PagedBatch]):
    """One layer's ``attention``; ``parameters`` gives what the layer has learned for it, of this rank's heads."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        *,
        attention: Attention,
        parameters: Callable[[], Mapping[str, Tensor]] = dict,
        **others: Any,
    ) -> None:
        refuse_untested_device(current_platform.device_type)
        self.num_heads, self.head_size, self.scale = num_heads, head_size, scale
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.kv_cache_dtype = kv_cache_dtype
        self.attention, self.parameters = attention, parameters
        windows = [w for w in (sliding_window, attention.spec.window) if w is not None]
        self.window = min(windows, default=None)
        self.sliding_window = sliding_window
        own = str(torch.get_default_dtype()).removeprefix("torch.")
        asked = {
            "ALiBi": alibi_slopes,
            "soft-capping of the scores": logits_soft_cap,
            f"attention of the kind {attn_type!r}": attn_type != AttentionType.DECODER,
            "a key/value cache shared between layers": kv_sharing_target_layer_name,
            f"kv_cache_dtype={kv_cache_dtype!r} in a model of {own}": kv_cache_dtype not in ("auto", own),
            "context parallelism": self.total_cp_world_size > 1 or self.pcp_world_size > 1,
            **{f"`{word}`": value for word, value in others.items()},
        }
        for what, value in asked.items():
            if value:
                raise NotImplementedError(f"the attention {attention.name!r} in vLLM: {what} is not supported")

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: PagedBatch | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """query (tokens, H, D) into ``output``; what is beyond the batch's tokens is not written."""
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError(f"the attention {self.attention.name!r} in vLLM: a quantized output")
        if attn_metadata is None:  # memory is being profiled
            return output.zero_()
        batch, normalized = attn_metadata, self.attention.spec.qk_norm
        keys, values = keys_and_values(kv_cache)
        key, value = key[: batch.tokens], value[: batch.tokens]
        keys[batch.blocks, :, batch.offsets] = unit_keys(key[None])[0] if normalized else key
        values[batch.blocks, :, batch.offsets] = value
        parameters = self.parameters()
        bounds = (self.window, batch.max_seqlen_k)
        decode = partial(self.attention.decode, normalized_keys=normalized, enable_gqa=True, parameters=parameters)
        output[: batch.tokens] = attend_pages(
            decode,
            query[: batch.tokens],
            keys,
            values,
            batch.block_table,
            batch.seq_lens,
            batch.cu_seqlens_q,
            batch.max_seqlen_q,
            batch.max_seqlen_k,
            self.window,
            one_row=self.attention.one_row_over_pages(query, parameters, bounds, normalized),
        )
        return output
