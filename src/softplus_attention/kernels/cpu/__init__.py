"""The CPU path: tiles, one row over a cache, threads."""
