"""The vLLM attention backend of our models: any attention of the catalogue over vLLM's paged cache."""

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
    """Whether vLLM's own backends compute it; they get the layer's window."""
    return spec.positions != "alibi" and spec.but(window=None, positions=SOFTMAX.positions) == SOFTMAX


class SoftplusBackend(AttentionBackend):
    """The cache is (blocks, H_kv, block, 2 D), see ``keys_and_values``; it holds unit keys if the attention normalises
    keys."""

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
    """What all layers of a cache group need for one step."""

    tokens: int  # the rest is padding
    blocks: Tensor  # (tokens,) the blocks of the new keys
    offsets: Tensor  # (tokens,) the places in these blocks
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
            # vLLM merges the two parts by softmax's sums; our second stage needs the first stage over all keys.
            raise NotImplementedError("softplus_attention: cascade attention is not supported; use --disable-cascade")
        if common.causal is not True:
            raise NotImplementedError("softplus_attention: non-causal attention is not supported in vLLM")
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
    """(blocks, H_kv, block, D) each. If a head's part of a block is contiguous, its keys are stored before its values:
    a decode step reads all keys, but skips values without weight."""
    blocks, heads, size, width = kv_cache.shape
    if kv_cache.stride(2) == width and kv_cache.stride(3) == 1:
        keys, values = kv_cache.view(blocks, heads, 2, size, width // 2).unbind(2)
    else:
        keys, values = kv_cache.split(width // 2, -1)
    return keys, values


class PagedAttention(AttentionImpl[PagedBatch]):
    """One layer's ``attention``; ``parameters`` returns its learned parameters for this rank's heads."""

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
        **kwargs: Any,
    ) -> None:
        refuse_untested_device(current_platform.device_type)
        self.num_heads, self.head_size, self.scale = num_heads, head_size, scale
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.kv_cache_dtype = kv_cache_dtype
        self.attention, self.parameters = attention, parameters
        windows = [w for w in (sliding_window, attention.spec.window) if w is not None]
        self.window = min(windows, default=None)
        self.sliding_window = sliding_window
        dtype = str(torch.get_default_dtype()).removeprefix("torch.")
        unsupported = {
            "ALiBi": alibi_slopes,
            "soft-capping of the scores": logits_soft_cap,
            f"attn_type={attn_type!r}": attn_type != AttentionType.DECODER,
            "a key/value cache shared between layers": kv_sharing_target_layer_name,
            f"kv_cache_dtype={kv_cache_dtype!r} in a model of {dtype}": kv_cache_dtype not in ("auto", dtype),
            "context parallelism": self.total_cp_world_size > 1 or self.pcp_world_size > 1,
            **{f"`{name}`": value for name, value in kwargs.items()},
        }
        for feature, value in unsupported.items():
            if value:
                raise NotImplementedError(f"the attention {attention.name!r} in vLLM: {feature} is not supported")

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
        """Writes the result for query (tokens, H, D) to ``output``, only for the batch's tokens."""
        if output_scale is not None or output_block_scale is not None:
            name = self.attention.name
            raise NotImplementedError(f"the attention {name!r} in vLLM: quantized output is not supported")
        if attn_metadata is None:  # vLLM profiles memory
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
