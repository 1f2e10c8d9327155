"""What a long preparation says while it runs."""

from __future__ import annotations

import time
from collections.abc import Callable

from softplus_attention.data.assembly import Assembler


class Progress:
    def __init__(self, report: Callable[[str], None] | None, sources: int) -> None:
        self.say = report or (lambda line: None)
        self.sources = sources
        self.place = 0

    def begin(self, assembler: Assembler) -> None:
        self.started = time.monotonic()
        self.bytes_before = assembler.counts["bytes"]
        if assembler.next_piece:
            self.say(f"continuing after {self.amount(assembler)}")

    def update(self, assembler: Assembler) -> None:
        self.say(f"source {self.place + 1} of {self.sources}: {self.amount(assembler)}, {self.speed(assembler)}")

    def end(self, assembler: Assembler) -> None:
        self.say(f"done: {self.amount(assembler)}, {self.speed(assembler)}")

    def speed(self, assembler: Assembler) -> str:
        seconds = time.monotonic() - self.started
        return f"{(assembler.counts['bytes'] - self.bytes_before) / 1e6 / max(seconds, 1e-9):.1f} MB/s, {seconds:.0f} s"

    def amount(self, assembler: Assembler) -> str:
        counts = assembler.counts
        tokens = sum(assembler.tokens.values())
        return f"{counts['documents']:,} documents, {counts['bytes'] / 1e6:,.1f} MB, {tokens:,} tokens"
