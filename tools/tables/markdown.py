"""Markdown tables and number formats."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

Row = TypeVar("Row")


class TableError(Exception):
    """A page or its data is wrong; the message is shown to the user."""


def read_results(path: Path, program: str) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(path.read_text())
    except OSError as error:
        raise TableError(f"{path} cannot be read: {error.strerror}; {program} writes it") from error
    except ValueError as error:
        raise TableError(f"{path} is damaged: {error}; {program} writes it") from error
    return found


def plain(value: float, digits: int = 3) -> str:
    return f"{value:.{digits}f}"


def signed(value: float, digits: int = 3) -> str:
    text = f"{value:+.{digits}f}"
    return text[1:] if math.isfinite(value) and float(text) == 0 else text


def hundredths(value: float) -> str:
    return plain(value, 2)


def value_range(values: Sequence[float], write: Callable[[float], str] = plain) -> str:
    """Lowest to highest; one number if both have the same text."""
    return " to ".join(dict.fromkeys((write(min(values)), write(max(values))))) if values else ""


def table_lines(head: Sequence[str], columns: Sequence[Sequence[str]], rule: str = "---:") -> list[str]:
    rows = [head, ["---", *[rule] * (len(head) - 1)], *zip(*columns, strict=True)]
    return [*("| " + " | ".join(row) + " |" for row in rows), ""]


def table(head: Sequence[str], columns: Sequence[Sequence[str]], rule: str = "---:") -> str:
    return "\n".join(table_lines(head, columns, rule)).strip()


def table_by_cells(rows: Sequence[Row], cells: Mapping[str, Callable[[Row], str]]) -> str:
    """One line per row of data, one column per entry of ``cells``."""
    return table(list(cells), [[write(row) for row in rows] for write in cells.values()])
