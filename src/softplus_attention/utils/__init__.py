"""Shared helpers: files, provenance, progress and result files."""

DOCS = "https://softplus-attention.github.io/softplus-attention"  # for help and messages: a wheel has no docs/


def counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
