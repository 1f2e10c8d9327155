"""Deprecated import path of ``softplus_attention.evaluation.measures.lengths``, kept for one release."""

from softplus_attention.evaluation.measures.lengths import measure_lengths
from softplus_attention.evaluation.measures.lengths import table as table_of

__all__ = ["measure_lengths", "table_of"]
