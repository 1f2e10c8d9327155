"""Models of this package in inference servers."""
