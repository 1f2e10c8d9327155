"""Attention that trains short and runs long: softplus attention with re-weighting (LSSA and LSSAR)."""

import inspect
import sys
from types import ModuleType

from softplus_attention.functional import (
    attention_weights,
    softplus_attention,
    softplus_attention_decode,
    softplus_attention_varlen,
)
from softplus_attention.paged import softplus_attention_paged
from softplus_attention.power import PowerByLength

__version__ = "0.1.0"

__all__ = [
    "PowerByLength",
    "__version__",
    "attention_weights",
    "softplus_attention",
    "softplus_attention_decode",
    "softplus_attention_paged",
    "softplus_attention_varlen",
]
ROOMS = ("catalog", "data", "evaluation", "huggingface", "nn", "recipes", "report", "training")


def __dir__() -> list[str]:
    """The public names, and the subpackages that are already imported."""
    return sorted({*__all__, *(set(ROOMS) & globals().keys())})


class _CallablePackage(ModuleType):
    """Makes the package callable: ``import softplus_attention.huggingface`` rebinds the function's name to it."""

    __call__ = staticmethod(softplus_attention)
    __signature__ = inspect.signature(softplus_attention)


sys.modules[__name__].__class__ = _CallablePackage
