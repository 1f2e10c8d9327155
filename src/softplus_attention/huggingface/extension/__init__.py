"""Context extension of pretrained models: most key heads see a window, a few see all keys at trained distances."""
