"""Modules: attention with projections, rotary positions, and a key/value cache."""

from softplus_attention.nn.attention import SoftplusAttention
from softplus_attention.nn.cache import KeyValueCache
from softplus_attention.nn.rotary import RotaryEmbedding

__all__ = ["KeyValueCache", "RotaryEmbedding", "SoftplusAttention"]
