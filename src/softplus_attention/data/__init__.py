"""Text to token shards (``prepare``), and token shards to training sequences.

``TokenDataset``, ``PackedTokens`` and ``long_documents`` read; they need torch and numpy only. Names are imported on
first use, so importing the package is cheap.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from softplus_attention.utils.lazy import lazy_names

if TYPE_CHECKING:
    from softplus_attention.data.builtin import builtin_text
    from softplus_attention.data.dataset import PackedTokens, TokenDataset, long_documents
    from softplus_attention.data.index import Index, verify
    from softplus_attention.data.preparation import prepare

IGNORED = -100  # the label of a token without a loss, torch's ignore_index

__all__ = [
    "IGNORED",
    "DataError",
    "Index",
    "PackedTokens",
    "TokenDataset",
    "builtin_text",
    "long_documents",
    "prepare",
    "verify",
]


class DataError(ValueError):
    """Unusable input, output folder or prepared folder; the message says what to do."""


__getattr__, _ = lazy_names(
    __name__,
    {
        "Index": "index",
        "PackedTokens": "dataset",
        "TokenDataset": "dataset",
        "builtin_text": "builtin",
        "long_documents": "dataset",
        "prepare": "preparation",
        "verify": "index",
    },
)


def __dir__() -> list[str]:
    return [*__all__]
