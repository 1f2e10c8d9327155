"""The mask function that transformers calls for our attentions: a range of keys per row instead of a dense mask.

Causal, windowed, padded, packed and cached attention all give each row one range of keys, so the mask is an int32
tensor (B, 1, T_q, 2) of [start, end), or None for plain causal attention aligned bottom-right. Any other pattern (a
padding mask with holes, blockwise or custom patterns) becomes transformers' boolean mask.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import masking_utils

from softplus_attention import validation as check
from softplus_attention.visibility import Visibility

# The last position_ids: the tensor, its version, and the ranges of its documents.
_last_positions: tuple[Callable[[], Tensor | None], int | None, Tensor | None] = (lambda: None, 0, None)
# Document boundaries, as passed by transformers' flattening collator.
PACKING = ("cu_seq_lens_q", "cu_seq_lens_k")


@dataclass(frozen=True)
class Pattern:
    """The parts of a transformers mask function that leaves each row one range of keys."""

    causal: bool = False
    window: int | None = None
    documents: Tensor | None = None


def recognize_pattern(mask_function: Callable[..., Any]) -> Pattern | None:
    """The pattern of a mask function; None if it does not give ranges."""
    if mask_function is masking_utils.causal_mask_function:
        return Pattern(causal=True)
    if mask_function is masking_utils.bidirectional_mask_function:
        return Pattern()
    if torch.compiler.is_compiling():
        return None
    # transformers builds the kwargs as closures; their qualname starts with the function that made them.
    maker = mask_function.__qualname__.partition(".")[0]
    closure = dict(
        zip(mask_function.__code__.co_freevars, (c.cell_contents for c in mask_function.__closure__ or ()), strict=True)
    )
    if maker == "sliding_window_overlay":
        return Pattern(window=closure["sliding_window"])
    if maker == "packed_sequence_mask_function":
        return Pattern(documents=closure["packed_sequence_mask"])
    if maker != "and_masks":
        return None
    joined = Pattern()
    for part in closure["mask_functions"]:
        found = recognize_pattern(part)
        if found is None:
            return None
        if found.causal:
            joined = replace(joined, causal=True)
        if found.window is not None:
            joined = replace(joined, window=found.window)
        if found.documents is not None:
            joined = replace(joined, documents=found.documents)
    # A window that is not causal extends to both sides, unlike ours.
    return joined if joined.causal or joined.window is None else None


def range_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int | Tensor = 0,
    mask_function: Callable[..., Any] = masking_utils.causal_mask_function,
    attention_mask: Tensor | None = None,
    device: torch.device | str = "cpu",
    **kwargs: Any,
) -> Tensor | None:
    """None, an int32 (B, 1, T_q, 2) tensor of ranges, or a boolean (B, 1, T_q, T_k) mask."""
    pattern = None if isinstance(kv_offset, Tensor) else recognize_pattern(mask_function)
    padding = padding_range(attention_mask, kv_length, kv_offset)
    sizes = (batch_size, q_length, kv_length, q_offset, kv_offset)
    if pattern is None and torch.compiler.is_compiling() and attention_mask is None and not kwargs.get("use_vmap"):
        return traced_ranges(masking_utils.sdpa_mask(*sizes, mask_function, allow_is_causal_skip=False, device=device))
    ends_together = not isinstance(q_offset, Tensor) and q_offset + q_length == kv_offset + kv_length
    if pattern is None or padding is None or needs_dense_mask(pattern, ends_together, kwargs):
        kwargs |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        return masking_utils.sdpa_mask(*sizes, mask_function, attention_mask, device=device, **kwargs)

    within = pattern.window is None or kv_length <= pattern.window
    if pattern.causal and within and pattern.documents is None and padding == (None, None) and ends_together:
        return None

    # In absolute positions, up to the return.
    row = torch.arange(q_length, device=device)[None] + q_offset
    start, end = torch.zeros_like(row), torch.full_like(row, int(kv_offset) + kv_length)
    if pattern.causal:
        end = torch.minimum(end, row + 1)
    if pattern.window is not None:
        start = torch.maximum(start, row + 1 - pattern.window)
    if pattern.documents is not None:
        start = torch.maximum(start, first_of_document(pattern.documents))
        if not pattern.causal:
            end = torch.minimum(end, end_of_document(pattern.documents))
    first, last = padding
    if first is not None and last is not None:
        start, end = torch.maximum(start, first[:, None]), torch.minimum(end, last[:, None])
    start = (start - kv_offset).clamp(0, kv_length)
    end = (end - kv_offset).clamp(0, kv_length)
    ranges = torch.stack([start, torch.maximum(start, end)], -1).to(torch.int32)
    return ranges[:, None].expand(batch_size, 1, q_length, 2)


def needs_dense_mask(pattern: Pattern, ends_together: bool, kwargs: Mapping[str, Any]) -> bool:
    """Whether the model forbids skipping the mask: T5Gemma2 concatenates two masks. transformers forbids it also for
    packed documents and for causal rows that do not end with the keys, but there ranges suffice."""
    if pattern.documents is not None or (pattern.causal and not ends_together):
        return False
    return kwargs.get("allow_is_causal_skip" if pattern.causal else "allow_is_bidirectional_skip") is False


def traced_ranges(visible: Tensor) -> Tensor:
    """The ranges (B, 1, T_q, 2) of a dense mask, inside a compiled graph.

    transformers' closures cannot be inspected there, but the compiler fuses the mask into the reductions and never
    stores it. The masks that transformers builds leave every row one range, which is asserted.
    """
    key = torch.arange(visible.shape[-1], device=visible.device)
    start = torch.where(visible, key, visible.shape[-1]).amin(-1)
    end = torch.where(visible, key + 1, 0).amax(-1)
    start = torch.minimum(start, end)
    one_range = visible.sum(-1) == end - start
    torch._assert_async(one_range.all(), "the attention mask leaves a row more than one range of keys")
    return torch.stack([start, end], -1).to(torch.int32)


def padding_range(
    attention_mask: Tensor | None, kv_length: int, kv_offset: int | Tensor
) -> tuple[Tensor | None, Tensor | None] | None:
    """Start and end (B,) of the real tokens; (None, None) if there is no padding; None if they are not one range.

    This reads the mask and so waits for the device, as transformers' mask functions do. A compiled graph cannot, so
    there the mask stays dense.
    """
    if attention_mask is None:
        return None, None
    if torch.compiler.is_compiling() or isinstance(kv_offset, Tensor):
        return None
    length = attention_mask.shape[-1]
    index = torch.arange(length, device=attention_mask.device)
    first = torch.where(attention_mask, index, length).amin(-1)
    end = torch.where(attention_mask, index + 1, 0).amax(-1)
    first = torch.minimum(first, end)
    count = attention_mask.sum(-1)
    in_one_range, everything = torch.stack([(count == end - first).all(), (count == length).all()]).tolist()
    if everything and length >= kv_length + kv_offset:
        return None, None
    return (first, end) if in_one_range else None


def first_of_document(documents: Tensor) -> Tensor:
    """(B, T): the start of each position's document, for document numbers (B, T) that do not recur."""
    return documents.shape[-1] - end_of_document(documents.flip(-1)).flip(-1)


def end_of_document(documents: Tensor) -> Tensor:
    """(B, T): one past the last position of each position's document."""
    length = documents.shape[-1]
    index = torch.arange(1, length + 1, device=documents.device)
    last = torch.ones_like(documents, dtype=torch.bool)
    last[..., :-1] = documents[..., 1:] != documents[..., :-1]
    ends = torch.where(last, index, length)
    return ends.flip(-1).cummin(-1).values.flip(-1)


def documents_in_positions(position_ids: Any, length: int) -> Tensor | None:
    """The ranges (B, 1, T, 2) of packed documents, whose positions restart at 0 and grow by one; None for other
    positions. It waits for the device once for each tensor of positions."""
    global _last_positions
    if not isinstance(position_ids, Tensor) or position_ids.dim() != 2 or position_ids.shape[1] != length:
        return None
    if torch.compiler.is_compiling() or (position_ids.is_cuda and torch.cuda.is_current_stream_capturing()):
        return None
    # Inference tensors have no version counter, so they are read every time.
    version = None if position_ids.is_inference() else position_ids._version
    last, last_version, found = _last_positions
    if last() is not position_ids or version is None or version != last_version:
        restarts = position_ids == 0
        restarts[:, 0] = False
        found = None
        if restarts.any() & (restarts[:, 1:] | (position_ids.diff(dim=1) == 1)).all():
            row = torch.arange(length, device=position_ids.device)[None]
            start = (row - position_ids).clamp(min=0)
            found = torch.stack([start, (row + 1).expand_as(start)], -1).to(torch.int32)[:, None]
        _last_positions = weakref.ref(position_ids), version, found
    return found


def with_documents(
    mask: Tensor | None, options: Mapping[str, Any], sizes: tuple[int, int, int], is_causal: bool, device: torch.device
) -> Tensor | None:
    """The mask restricted to documents by the options in PACKING, which transformers' mask functions ignore.
    ``sizes`` are (B, T_q, T_k)."""
    batch, t_q, t_k = sizes
    rows: Any
    keys: Any
    rows, keys = (options.get(name) for name in PACKING)
    if rows is None and keys is None:
        return mask
    if batch > 1:
        check.fail("cu_seq_lens_q", "None, or for documents packed into a batch of 1", f"a batch of {batch}")
    for name, bounds, total in zip(PACKING, (rows, keys), (t_q, t_k), strict=True):
        check.check_cu_seqlens(name, bounds, total, total, device, False)
    if rows.numel() == 2:
        return mask
    ranges = Visibility.from_documents(rows, keys, t_q, t_k, is_causal=is_causal, window=None).ranges()
    start, end = (bound[:, None] for bound in ranges)  # (1, 1, T_q)
    if mask is not None and mask.dtype == torch.bool:
        key = torch.arange(t_k, device=device)
        return mask[..., :t_k] & (key >= start[..., None]) & (key < end[..., None])
    if mask is not None:
        start, end = torch.maximum(start, mask[..., 0]), torch.minimum(end, mask[..., 1])
    return torch.stack([start, torch.maximum(start, end)], -1)
