"""Fast implementations of the op, and their registration with PyTorch (``ops``)."""
