"""The public names of ``softplus_attention.attentions``: every attention by name."""

from softplus_attention.attentions.catalog import (
    ABLATIONS,
    ATTENTIONS,
    KNOWN,
    LEARNED_SOFTMAX,
    LSSA,
    LSSAR,
    SIGMOID,
    SOFTMAX,
    Attention,
    attention,
    names,
)

__all__ = [
    "ABLATIONS",
    "ATTENTIONS",
    "KNOWN",
    "LEARNED_SOFTMAX",
    "LSSA",
    "LSSAR",
    "SIGMOID",
    "SOFTMAX",
    "Attention",
    "attention",
    "names",
]
