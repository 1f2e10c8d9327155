"""transformers' continuous batching (``generate_batch``, ``transformers serve``) with our attentions.

Its cache has pages that requests share. In a step where every request has one new token the op reads the pages by their
table; in any other step the cache hands out each request's keys one after another, as packed documents.
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
except ImportError:  # an older transformers, whose attentions are handed another cache
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
    """(1, H, T, D_v) of the rows (1, H, T, D) of several requests, whose keys are put into the cache."""
    given = dict(options)  # the cache puts in what belongs to this layer
    key, value = given.pop("cache").update(key_states=key, value_states=value, layer_idx=layer, kwargs=given)
    windows = [one for one in (window, chosen.window(None)) if one is not None]
    window = min(windows, default=None)
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    rows, keys = (given[name].to(torch.int32) for name in ("cu_seq_lens_q", "cu_seq_lens_k"))
    own: dict[str, Any] = {"parameters": parameters, "enable_gqa": True}
    if given.get("block_table") is not None:
        pages = write_pages(given["k_cache"], given["v_cache"], given["block_table"], keys.diff(), k, v)
        decode = partial(chosen.decode, normalized_keys=normalized_keys, **own)
        # Of a graph that is captured the lengths cannot be read: there all places of the table are looked at.
        most = given["block_table"].shape[1] * given["k_cache"].shape[1]
        longest = most if q.is_cuda else max(1, int(keys.diff().max()))
        one_row = chosen.one_row_over_pages(q, parameters, (window, longest), normalized_keys)
        out = attend_pages(decode, q, *pages, rows, 1, longest, window, one_row=one_row)
    else:
        total_rows, total_keys = int(rows[-1]), int(keys[-1])  # the rest is padding
        q, k, v = q[:total_rows], k[:total_keys], v[:total_keys]
        longest = int(given["max_length_q"]), int(given["max_length_k"])
        found = chosen.varlen(q, k, v, rows, keys, *longest, is_causal=True, window=window, **own)
        out = found.new_zeros(query.shape[2], *found.shape[1:])
        out[:total_rows] = found
    return out.transpose(0, 1)[None]


def write_pages(
    k_pages: Tensor, v_pages: Tensor, table: Tensor, lengths: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Put one new key and value (B, H_kv, D) of each request at its end; pages are (pages, page, H_kv, D).

    Requests that only fill a batch up have no page: they are written to the first, which belongs to nobody.
    """
    page, table, lengths = k_pages.shape[1], table.clamp(min=0), lengths.clamp(min=1)
    last = (lengths - 1).to(torch.int64)
    place = table.gather(1, (last // page)[:, None].to(torch.int64))[:, 0].to(torch.int64), last % page
    k_pages.index_put_(place, k.to(k_pages.dtype))
    v_pages.index_put_(place, v.to(v_pages.dtype))
    return k_pages.transpose(1, 2), v_pages.transpose(1, 2), table, lengths


def keep_attention() -> None:
    """Without this ``generate_batch`` replaces our attentions by flash softmax, or refuses them where there is none."""
    if ATTN_TYPE_TO_ALLOCATOR is None:
        refuse_ours()
        return
    switch = ContinuousBatchingManager.switch_to_cb_friendly_attn
    ensure = initialization.ensure_decode_fast_path_is_available

    @functools.wraps(switch)
    def switch_others(self: Any, model: Any, *args: Any, **kwargs: Any) -> None:
        name = model.config._attn_implementation
        if name == "softplus-extension":
            kind = type(model).__name__
            raise ValueError(f"generate_batch: {kind} has a cache of its own, which is not paged; use generate()")
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


def refuse_ours() -> None:
    """With a transformers older than its allocators of pages."""
    make = ContinuousBatchingManager.__init__

    @functools.wraps(make)
    def make_others(self: Any, model: Any, *args: Any, **kwargs: Any) -> None:
        if model.config._attn_implementation in (*KNOWN, "softplus-extension"):
            here = f"transformers {transformers.__version__} hands attentions no paged cache"
            raise ValueError(f"generate_batch: {here}; install transformers 5.22 or newer, or use generate()")
        make(self, model, *args, **kwargs)

    ContinuousBatchingManager.__init__ = make_others  # type: ignore[method-assign]
