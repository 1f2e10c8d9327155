"""Types of options that several commands take."""

from __future__ import annotations


def power(text: str) -> int | float:
    """A sharpening power; an int where it is one, since integer powers have the fast kernels."""
    number = float(text)
    return int(number) if number.is_integer() else number
