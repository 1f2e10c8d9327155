"""Progress of long tasks: a tqdm bar in terminals and notebooks, periodic plain lines elsewhere."""

from __future__ import annotations

import sys
import time
import warnings
from types import TracebackType
from typing import Any, Self

from softplus_attention.utils.files import clean_text

SECONDS_BETWEEN_LINES = 15.0


class Progress:
    """Counts to ``total``; without ``total`` it shows the text of the last ``update``."""

    def __init__(
        self,
        title: str = "",
        total: int | None = None,
        *,
        initial: int = 0,
        unit: str = "",
        seconds: float = SECONDS_BETWEEN_LINES,
        silent: bool = False,
    ) -> None:
        """``unit`` names what is counted; without it lines show a percentage. ``seconds`` is the minimum time between
        plain lines; 0 prints every update that has a text. ``silent`` prints nothing, for ranks other than 0.
        """
        self.title, self.total, self.initial, self.unit, self.seconds = clean_text(title), total, initial, unit, seconds
        self.done = initial
        self.started = self.last = time.monotonic()
        self.bar: Any = None
        self.silent = silent
        self.has_bar = has_bars() and not silent

    def say(self, line: str) -> None:
        """Prints a permanent line."""
        if self.silent:
            return
        if self.bar is None:
            print(clean_text(line), file=sys.stderr, flush=True)
        else:
            self.bar.write(clean_text(line), file=sys.stderr)

    def update(self, text: str = "", done: int | None = None) -> None:
        """Shows ``text`` and the count ``done``. Without a text and a total no plain line is printed."""
        text = clean_text(text)
        self.done = self.done if done is None else done
        if self.has_bar:
            self.update_bar(text)
            return
        if self.silent or (not text and (self.total is None or not self.seconds)):
            return
        now = time.monotonic()
        if now - self.last >= self.seconds or self.done == self.total:
            self.last = now
            print(self.line(text), file=sys.stderr, flush=True)

    def line(self, text: str) -> str:
        title = f"{self.title}: " if self.title else ""
        if self.total is None:
            return title + text
        done = max(1, self.done - self.initial)
        left = (time.monotonic() - self.started) / done * (self.total - self.done)
        share = f"{self.unit} {self.done}/{self.total}" if self.unit else f"{100 * self.done // self.total}%"
        return "  ".join(filter(None, [title + share, text, f"{format_duration(left)} left"]))

    def update_bar(self, text: str) -> None:
        if self.bar is None:
            self.bar = new_bar(self.title, self.total, self.initial, self.unit)
        if self.total is None:
            self.bar.set_description_str(": ".join(filter(None, (self.title, text))))
            return
        if text:
            self.bar.set_postfix_str(text, refresh=False)
        self.bar.update(self.done - self.bar.n)

    def clear(self) -> None:
        """Closes the bar. A bar with a total stays visible."""
        if self.bar is not None:
            self.bar.close()
            self.bar = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.clear()


def has_bars() -> bool:
    """Whether stderr is a terminal or a notebook, and tqdm (a dependency of transformers) is installed."""
    get_shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)
    is_notebook = hasattr(get_shell(), "kernel")
    if not (is_notebook or sys.stderr.isatty()):
        return False
    try:
        import tqdm  # type: ignore[import-untyped]  # noqa: F401
    except ImportError:
        return False
    return True


def new_bar(title: str, total: int | None, initial: int, unit: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # tqdm warns in a notebook without ipywidgets
        from tqdm.auto import tqdm  # type: ignore[import-untyped]
    if total is None:
        return tqdm(bar_format="{desc}", dynamic_ncols=True, leave=False)
    scale = not unit
    return tqdm(desc=title, total=total, initial=initial, unit=unit or "it", unit_scale=scale, dynamic_ncols=True)


def format_duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}"
