"""The Triton kernels, for every GPU that Triton supports, and their launches."""
