"""What sentences that are made from data are built of: how numbers are written, and claims that must hold."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

from page_blocks import PageError, plain

NUMBERS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")
Data = TypeVar("Data")


class MissingError(Exception):
    """Data that a sentence speaks of."""


class ClaimError(PageError):
    """A sentence that the data do not bear, in words."""


def holds(condition: bool, claim: str) -> None:
    if not condition:
        raise ClaimError(claim)


def nats(difference: float, digits: int = 3) -> str:
    """The size of a difference whose sign the sentence says."""
    holds(difference >= 0, f"the words give a difference of {difference:+.4f} the other sign")
    return plain(difference, digits)


def hundredths(value: float) -> str:
    return plain(value, 2)


def tenths(value: float) -> str:
    return plain(value, 1)


def between(values: Iterable[float], write: Callable[[float], str] = plain) -> str:
    found = list(values)
    return " to ".join(dict.fromkeys((write(min(found)), write(max(found)))))


def gaps(values: Iterable[float], digits: int = 3) -> str:
    return between(values, lambda value: nats(value, digits))


def listed(words: Iterable[str]) -> str:
    *first, last = words
    return f"{', '.join(first)} and {last}" if first else last


def each(values: Iterable[float], write: Callable[[float], str] = plain) -> str:
    return listed(write(value) for value in values)


def percent(share: float) -> str:
    return f"{100 * share:.0f}"


def number(count: int) -> str:
    return NUMBERS[count] if count < len(NUMBERS) else str(count)


def seeds(count: int) -> str:
    return f"{number(count)} seed{'' if count == 1 else 's'}"


def sentences(findings: Iterable[Callable[[Data], str]], data: Data) -> list[str]:
    """All claims that do not hold are named at once, so that nobody has to mend them one by one."""
    made, broken, missing = [], [], []
    for finding in findings:
        try:
            made.append(finding(data))
        except MissingError as error:
            missing.append(str(error))
        except ClaimError as error:
            broken.append(f"{finding.__name__}: {error}")
    if missing:
        raise MissingError("; ".join(dict.fromkeys(missing)))
    if broken:
        raise ClaimError("; ".join(broken))
    return made


def written(blocks: Mapping[str, Callable[[Data], str]], data: Data, script: str) -> dict[str, str]:
    """Blocks of a page by name; the error names the script that has to be rewritten."""
    try:
        return dict(zip(blocks, sentences(blocks.values(), data), strict=True))
    except MissingError as error:
        raise PageError(f"{script} speaks of what is not there: {error}") from error
    except ClaimError as error:
        raise PageError(f"the results do not bear what {script} says: {error}") from error
