"""Longer contexts for pretrained models: ranks key heads, extends the model, and measures loss, needles and cost."""
