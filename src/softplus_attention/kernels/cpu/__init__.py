"""The CPU kernels: tiled prefill, decode of one row, threads."""
