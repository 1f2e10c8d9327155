"""Text that comes with the package: old works in the public domain (README.md beside this file lists them)."""

from __future__ import annotations

import json
import lzma
from importlib.resources import files


def builtin_text() -> tuple[list[str], list[str]]:
    """(training documents, validation documents): whole works; each of validation is longer than 64 KB."""
    documents: dict[str, list[str]] = {"train": [], "validation": []}
    packed = files(__package__).joinpath("text.jsonl.xz").read_bytes()
    for line in lzma.decompress(packed).splitlines():
        work = json.loads(line)
        documents[work["split"]].append(work["text"])
    return documents["train"], documents["validation"]
