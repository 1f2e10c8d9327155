"""Text into token shards, and token shards into training sequences.

The writing side is ``prepare``; the reading side is ``TokenDataset``, ``PackedTokens`` and ``long_documents``, which
need torch and numpy only. Names load when first used, so that importing the package costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from softplus_attention.data.builtin import builtin_text
    from softplus_attention.data.dataset import PackedTokens, TokenDataset, long_documents
    from softplus_attention.data.index import Index, verify
    from softplus_attention.data.preparation import prepare

IGNORED = -100  # the label of a token that is not to be predicted, torch's own

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
    """Input, a preparation or a prepared folder that cannot be used as it is; the message says what to do."""


HOMES = {
    "Index": "index",
    "PackedTokens": "dataset",
    "TokenDataset": "dataset",
    "builtin_text": "builtin",
    "long_documents": "dataset",
    "prepare": "preparation",
    "verify": "index",
}


def __getattr__(name: str) -> Any:
    home = HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__]
