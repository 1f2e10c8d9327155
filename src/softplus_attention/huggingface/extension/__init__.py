"""Extension of pretrained models: most key heads see a window, a few see everything, by positions that they know."""
