"""transformers' continuous batching (``generate_batch``, ``transformers serve``) with the attentions of the catalogue.

Its cache is paged, and requests may share pages. In a step with one new token per request the op reads the pages
through the block table. In any other step the cache returns the keys of all requests as packed documents.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers.generation.continuous_batching import ContinuousBatchingManager, PagedAttentionCache

from softplus_attention.attentions.catalog import KNOWN, Attention
from softplus_attention.paged import attend_pages

try:
    from transformers.generation.continuous_batching import initialization
    from transformers.generation.continuous_batching.cache import ATTN_TYPE_TO_ALLOCATOR, group_layers_by_attn_type
except ImportError:  # older transformers, which pass no paged cache to the attention
    ATTN_TYPE_TO_ALLOCATOR = None


def is_paged(options: Mapping[str, Any]) -> bool:
    return isinstance(options.get("cache"), PagedAttentionCache)


def attend_paged(
    chosen: Attention,
    layer: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    options: Mapping[str, Any],
    *,
    window: int | None = None,
    parameters: Mapping[str, Tensor] | None = None,
    normalized_keys: bool = False,
) -> Tensor:
    """Appends the keys and values to the cache; returns (1, H, T, D_v) for the rows (1, H, T, D) of all requests."""
    state = dict(options)  # the cache adds this layer's pages to it
    key, value = state.pop("cache").update(key_states=key, value_states=value, layer_idx=layer, kwargs=state)
    window = min((one for one in (window, chosen.window(None)) if one is not None), default=None)
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    rows, keys = (state[name].to(torch.int32) for name in ("cu_seq_lens_q", "cu_seq_lens_k"))
    common: dict[str, Any] = {"parameters": parameters, "enable_gqa": True}
    if state.get("block_table") is not None:
        pages = write_pages(state["k_cache"], state["v_cache"], state["block_table"], keys.diff(), k, v)
        decode = partial(chosen.decode, normalized_keys=normalized_keys, **common)
        # Lengths cannot be read while a CUDA graph is captured: use the capacity of the block table there.
        capacity = state["block_table"].shape[1] * state["k_cache"].shape[1]
        longest = capacity if q.is_cuda else max(1, int(keys.diff().max()))
        one_row = chosen.one_row_over_pages(q, parameters, (window, longest), normalized_keys)
        out = attend_pages(decode, q, *pages, rows, 1, longest, window, one_row=one_row)
    else:
        total_rows, total_keys = int(rows[-1]), int(keys[-1])  # the rest is padding
        q, k, v = q[:total_rows], k[:total_keys], v[:total_keys]
        lengths = int(state["max_length_q"]), int(state["max_length_k"])
        packed = chosen.varlen(q, k, v, rows, keys, *lengths, is_causal=True, window=window, **common)
        out = packed.new_zeros(query.shape[2], *packed.shape[1:])
        out[:total_rows] = packed
    return out.transpose(0, 1)[None]


def write_pages(
    k_pages: Tensor, v_pages: Tensor, table: Tensor, lengths: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Append one key and value (B, H_kv, D) to each request; pages are (pages, page, H_kv, D).

    Requests that pad the batch have no page: they write to page 0, which no request uses.
    """
    page, table, lengths = k_pages.shape[1], table.clamp(min=0), lengths.clamp(min=1)
    last = (lengths - 1).to(torch.int64)
    index = table.gather(1, (last // page)[:, None].to(torch.int64))[:, 0].to(torch.int64), last % page
    k_pages.index_put_(index, k.to(k_pages.dtype))
    v_pages.index_put_(index, v.to(v_pages.dtype))
    return k_pages.transpose(1, 2), v_pages.transpose(1, 2), table, lengths


def patch_continuous_batching() -> None:
    """Without this ``generate_batch`` switches to flash attention's softmax, or raises where that is not installed."""
    if ATTN_TYPE_TO_ALLOCATOR is None:
        refuse_without_pages()
        return
    switch = ContinuousBatchingManager.switch_to_cb_friendly_attn
    ensure = initialization.ensure_decode_fast_path_is_available

    @functools.wraps(switch)
    def switch_others(self: Any, model: Any, *args: Any, **kwargs: Any) -> None:
        name = model.config._attn_implementation
        if name == "softplus-extension":
            kind = type(model).__name__
            raise ValueError(f"generate_batch: the cache of {kind} is not paged; use generate()")
        if name not in KNOWN:
            switch(self, model, *args, **kwargs)

    @functools.wraps(ensure)
    def ensure_pages(config: Any, cb_config: Any, user_requested: bool) -> None:
        kinds = group_layers_by_attn_type(config)
        has_pages = all(ATTN_TYPE_TO_ALLOCATOR[kind].supports_block_table for kind in kinds)
        if config._attn_implementation not in KNOWN or not has_pages:
            ensure(config, cb_config, user_requested)

    ContinuousBatchingManager.switch_to_cb_friendly_attn = switch_others  # type: ignore[method-assign]
    initialization.ensure_decode_fast_path_is_available = ensure_pages


def refuse_without_pages() -> None:
    """For transformers before 5.22, which would replace the attention by softmax over its pages."""
    init = ContinuousBatchingManager.__init__

    @functools.wraps(init)
    def init_others(self: Any, model: Any, *args: Any, **kwargs: Any) -> None:
        if model.config._attn_implementation in (*KNOWN, "softplus-extension"):
            reason = f"transformers {transformers.__version__} passes attentions no paged cache"
            raise ValueError(f"generate_batch: {reason}; install transformers 5.22 or newer, or use generate()")
        init(self, model, *args, **kwargs)

    ContinuousBatchingManager.__init__ = init_others  # type: ignore[method-assign]
