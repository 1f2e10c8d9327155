"""Results as figures and as one self-contained page."""
