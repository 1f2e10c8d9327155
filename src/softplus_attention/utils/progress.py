"""One line that changes on a terminal; elsewhere a line now and then."""

from __future__ import annotations

import sys
import time

from softplus_attention.utils.files import clean_text

SECONDS_BETWEEN_LINES = 15.0


class Progress:
    def __init__(self) -> None:
        self.last = time.monotonic()
        self.shown = False

    def say(self, line: str) -> None:
        """Something that stays."""
        self.clear()
        print(clean_text(line), file=sys.stderr, flush=True)

    def update(self, line: str) -> None:
        line = clean_text(line)
        if sys.stderr.isatty():
            print(f"\r{line[:100]:<100}", end="", file=sys.stderr, flush=True)
            self.shown = True
        elif time.monotonic() - self.last >= SECONDS_BETWEEN_LINES:
            self.last = time.monotonic()
            print(line, file=sys.stderr, flush=True)

    def clear(self) -> None:
        if self.shown:
            print("\r" + " " * 100 + "\r", end="", file=sys.stderr, flush=True)
            self.shown = False
