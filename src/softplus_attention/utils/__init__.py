"""Files, provenance, progress lines and results: what every room uses."""
