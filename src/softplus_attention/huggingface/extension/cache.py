"""The cache of an extended model: a ring buffer and the sink for heads with a window, all tokens for far heads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from softplus_attention import validation as check
from softplus_attention.huggingface.extension.attention import EVERYTHING, Reach

MIN_SPARE, SPARE_SHARE = 64, 16  # a buffer grows by a sixteenth of its tokens, by 64 at least
PAST = 256  # older positions that a ring keeps if its last tokens may be removed


class KeyBuffer:
    """Keys and values (B, H, capacity, D) of the positions ``oldest`` to ``end``, at most the last ``limit`` ones.
    Position p is stored at p % limit. Rows see the last ``window`` positions."""

    def __init__(self, window: int = EVERYTHING) -> None:
        self.window = self.limit = window
        self.oldest = self.end = 0
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    def __len__(self) -> int:
        return min(self.end, self.limit)

    def append(self, keys: Tensor, values: Tensor) -> None:
        kept = min(keys.shape[2], self.limit)
        total = self.end + keys.shape[2]
        self.reserve(min(total, self.limit), keys, values)
        begin = (total - kept) % self.limit
        first = min(kept, self.limit - begin)  # up to the end of the ring; the rest goes to its start
        for held, new in ((self.keys, keys), (self.values, values)):
            assert held is not None
            new = new[:, :, keys.shape[2] - kept :]
            held[:, :, begin : begin + first] = new[:, :, :first]
            if first < kept:
                held[:, :, : kept - first] = new[:, :, first:]
        self.oldest, self.end = max(self.oldest, total - self.limit), total

    def reserve(self, tokens: int, keys: Tensor, values: Tensor) -> None:
        if self.keys is not None and self.keys.shape[2] >= tokens:
            return
        capacity = min(self.limit, tokens + max(MIN_SPARE, tokens // SPARE_SHARE))
        grown = []
        for held, like in ((self.keys, keys), (self.values, values)):
            larger = like.new_empty(*like.shape[:2], capacity, like.shape[3])
            if held is not None:
                larger[:, :, : held.shape[2]] = held
            grown.append(larger)
        self.keys, self.values = grown

    def seen(self) -> tuple[Tensor, Tensor]:
        """Keys and values of the last ``window`` positions, in any order."""
        if self.limit == self.window:
            return self.raw()
        keys, values = self.ordered()
        return keys[:, :, -self.window :], values[:, :, -self.window :]

    def raw(self) -> tuple[Tensor, Tensor]:
        """All keys and values, in storage order."""
        assert self.keys is not None
        assert self.values is not None
        return self.keys[:, :, : len(self)], self.values[:, :, : len(self)]

    def ordered(self) -> tuple[Tensor, Tensor]:
        """All keys and values, by position."""
        keys, values = self.raw()
        start = self.end % self.limit
        if self.end > self.limit and start:
            keys, values = keys.roll(-start, 2), values.roll(-start, 2)
        first = keys.shape[2] - (self.end - self.oldest)  # slots before it are of removed tokens
        return keys[:, :, first:], values[:, :, first:]

    def can_crop(self, tokens: int) -> bool:
        return self.oldest == 0 or self.end - tokens - self.window >= self.oldest

    def crop(self, tokens: int) -> None:
        self.end -= tokens

    def keep_past(self) -> None:
        """From now on the last ``PAST`` tokens can be removed."""
        if self.limit != self.window or self.window == EVERYTHING:
            return
        if self.keys is None:
            self.limit += PAST
            return
        (keys, values), end, oldest = self.ordered(), self.end, self.oldest
        self.limit += PAST
        self.keys, self.values, self.end = None, None, oldest
        self.append(keys, values)
        assert self.end == end

    def change(self, function: Callable[[Tensor], Tensor]) -> None:
        if self.keys is not None and self.values is not None:
            self.keys, self.values = function(self.keys), function(self.values)

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in (self.keys, self.values) if x is not None)


class SinkBuffer(KeyBuffer):
    """Keys and values of the first ``limit`` tokens of each sequence."""

    def can_crop(self, tokens: int) -> bool:
        return True

    def keep_past(self) -> None:
        pass

    def append(self, keys: Tensor, values: Tensor, starts: Sequence[int] | None = None) -> None:
        if self.keys is None:
            self.keys, self.values = (x.new_zeros(*x.shape[:2], self.limit, x.shape[3]) for x in (keys, values))
        assert self.values is not None
        total = self.end + keys.shape[2]
        for row, start in enumerate([0] if starts is None else starts):
            begin, end = max(self.end, start), min(total, start + self.limit)
            if begin < end:
                rows = slice(None) if starts is None else slice(row, row + 1)
                own, new = slice(begin - start, end - start), slice(begin - self.end, end - self.end)
                self.keys[rows, :, own] = keys[rows, :, new]
                self.values[rows, :, own] = values[rows, :, new]
        self.end = total


class ExtendedLayer(CacheLayerMixin):
    """For each group of heads a buffer of near keys, and one of far keys if it has any."""

    is_compileable = False
    is_sliding = False
    is_croppable = True

    def __init__(self, reaches: Sequence[Reach]) -> None:
        super().__init__()
        self.reaches = tuple(reaches)
        self.clear()

    def clear(self) -> None:
        self.near = [KeyBuffer(reach.near) for reach in self.reaches]
        self.far: list[KeyBuffer | None] = [
            None
            if reach.near == EVERYTHING or not reach.most_far
            else (KeyBuffer() if reach.most_far == EVERYTHING else SinkBuffer(reach.most_far))
            for reach in self.reaches
        ]

    @property
    def buffers(self) -> list[KeyBuffer]:
        return [*self.near, *(buffer for buffer in self.far if buffer is not None)]

    def get_seq_length(self) -> int:
        return self.near[0].end

    def get_max_length(self) -> int:
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        raise ValueError("past_key_values: an ExtendedCache works only with an extended model")

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last tokens. Once a ring has dropped keys, this needs ``activate_past_recording`` beforehand."""
        if tokens_to_remove > 0:
            check.fail("crop", "a negative number, the tokens to remove", tokens_to_remove)
        tokens = min(-tokens_to_remove, self.get_seq_length())
        full = [buffer.window for buffer in self.buffers if not buffer.can_crop(tokens)]
        if tokens and full:
            expected = f"0 once older keys than the window of {min(full)} tokens are dropped"
            check.fail("crop", f"{expected} (at most -{PAST} after activate_past_recording)", tokens_to_remove)
        for buffer in self.buffers:
            buffer.crop(tokens)

    def activate_past_recording(self) -> None:
        for buffer in self.buffers:
            buffer.keep_past()

    def reset(self) -> None:
        self.clear()

    def change(self, function: Callable[[Tensor], Tensor]) -> None:
        for buffer in self.buffers:
            buffer.change(function)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.change(lambda x: x.index_select(0, beam_idx.to(x.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.change(lambda x: x.repeat_interleave(repeats, 0))

    def batch_select_indices(self, indices: Tensor) -> None:
        self.change(lambda x: x[indices])

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self.buffers)


class ExtendedCache(Cache):
    """The cache for the config of an extended model. ``nbytes`` is the allocated memory."""

    def __init__(self, config: Any) -> None:
        from softplus_attention.huggingface.extension.settings import Extension

        extension = Extension.from_config(config)
        heads = config.num_key_value_heads
        super().__init__([ExtendedLayer(reaches_of(extension, row, heads)) for row in extension.far_heads])

    @property
    def nbytes(self) -> int:
        return sum(layer.nbytes for layer in self.layers)


def reaches_of(extension: Any, far_heads: Sequence[int], heads: int) -> list[Reach]:
    """The reaches of a layer's groups: the heads with a window, then the far heads. Empty groups are left out."""
    groups = [] if len(far_heads) == heads else [extension.window_reach]
    return [*groups, extension.far_reach] if far_heads else groups
