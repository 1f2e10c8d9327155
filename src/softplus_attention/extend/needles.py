"""Needles in ordinary text: one haystack holds several, each with a name that its question uses."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from softplus_attention.validation import fail

Encode = Callable[[str], list[int]]

NAMES = (
    *("Paris", "London", "Berlin", "Madrid", "Rome", "Vienna", "Moscow", "Tokyo", "Cairo", "Boston", "Chicago"),
    *("Dublin", "Athens", "Oslo", "Lisbon", "Prague", "Warsaw", "Delhi", "Sydney", "Toronto", "Denver", "Geneva"),
)


@dataclass(frozen=True)
class Form:
    """The hidden sentence, and a question that ends with the answer."""

    needle: str
    question: str
    answer: str = " {key}"


FORMS = {
    "passkey": Form(
        "\nThe pass key for {name} is {key}. Remember it. {key} is the pass key for {name}.\n",
        "\nWhat is the pass key for {name}? The pass key for {name} is",
    ),
    "number": Form(
        "\nOne of the special magic numbers for {name} is: {key}.\n",
        "\nWhat is the special magic number for {name}? The special magic number for {name} is:",
    ),
    "telephone": Form(
        "\nTo reach our office in {name}, dial the telephone number {key} at any time.\n",
        "\nTo reach our office in {name}, dial the telephone number",
    ),
}


@dataclass(frozen=True)
class Question:
    form: str
    depth: float
    ids: list[int]  # the question and its answer
    answer: int  # number of answer tokens at the end of ids
    span: tuple[int, int]  # first and end position of the needle in the haystack


@dataclass(frozen=True)
class Haystack:
    ids: list[int]
    questions: list[Question]


def make_haystack(
    encode: Encode,
    filler: Sequence[int],
    length: int,
    form: str,
    depths: Sequence[float],
    seed: int,
    start: Sequence[int] = (),
) -> Haystack:
    """``start``, then text with a needle at each depth; at most ``length`` tokens together with any question."""
    if len(depths) > len(NAMES):
        fail("depths", f"at most {len(NAMES)}", len(depths))
    rng = random.Random(f"{seed} {form} {length}")
    texts = FORMS[form]
    names = rng.sample(NAMES, len(depths))
    keys = [str(rng.randrange(10000, 100000)) for _ in depths]
    needles, asked = [], []
    for name, key in zip(names, keys, strict=True):
        needles.append(encode(texts.needle.format(name=name, key=key)))
        asked.append((encode(texts.question.format(name=name)), encode(texts.answer.format(key=key))))
    room = length - len(start) - sum(map(len, needles)) - max(len(question) + len(answer) for question, answer in asked)
    if room < 0:
        fail("length", f"at least {length - room} tokens, for {len(depths)} needles", length)
    if len(filler) < room:
        fail("filler", f"at least {room} tokens of text", len(filler))
    ids = [*start]
    spans, taken = [], 0
    for depth, needle in sorted(zip(depths, needles, strict=True), key=lambda pair: pair[0]):
        place = round(depth * room)
        ids += filler[taken:place]
        taken = place
        spans.append((len(ids), len(ids) + len(needle)))
        ids += needle
    ids += filler[taken:room]
    order = sorted(range(len(depths)), key=lambda number: depths[number])
    questions = [
        Question(form, depths[number], asked[number][0] + asked[number][1], len(asked[number][1]), span)
        for number, span in zip(order, spans, strict=True)
    ]
    return Haystack(ids, questions)
