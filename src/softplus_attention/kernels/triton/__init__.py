"""The Triton kernels, for every GPU that Triton compiles for, and what launches them."""
