"""The names that this module had before its measure moved; they stay for one release."""

from softplus_attention.evaluation.measures.lengths import measure_lengths
from softplus_attention.evaluation.measures.lengths import table as table_of

__all__ = ["measure_lengths", "table_of"]
