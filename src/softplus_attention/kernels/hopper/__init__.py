"""The Gluon kernels for compute capability 9.0, and their launches."""
