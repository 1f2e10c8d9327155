"""The public name of ``AttentionSpec``."""

from softplus_attention.attentions.spec import AttentionSpec

__all__ = ["AttentionSpec"]
