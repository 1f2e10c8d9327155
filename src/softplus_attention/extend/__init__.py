"""Longer contexts for pretrained models: which key heads need them, what the others may forget, and what it costs."""
