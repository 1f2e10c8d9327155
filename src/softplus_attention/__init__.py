"""Attention that trains short and runs long: softplus attention with re-weighting (LSSA and LSSAR)."""

from softplus_attention.functional import (
    attention_weights,
    softplus_attention,
    softplus_attention_decode,
    softplus_attention_varlen,
)
from softplus_attention.power import PowerByLength

__version__ = "0.1.0"

__all__ = [
    "PowerByLength",
    "__version__",
    "attention_weights",
    "softplus_attention",
    "softplus_attention_decode",
    "softplus_attention_varlen",
]
