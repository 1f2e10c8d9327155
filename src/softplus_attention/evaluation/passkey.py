"""Passkeys: prompts of any length and depth, documents that teach the compact form, and a model's answers."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from softplus_attention.evaluation.memory import in_batches
from softplus_attention.utils.files import replacing
from softplus_attention.utils.results import keep_foreign
from softplus_attention.utils.untrusted import read_json, sha256
from softplus_attention.validation import fail, fail_choice

KEY = "{key}"


@dataclass(frozen=True)
class PasskeyPrompt:
    """start, filler, needle, filler, question, and the expected answer.

    An empty ``filler`` means ordinary text: passages of the given documents. ``ending`` follows the answer in training
    documents.
    """

    form: str
    start: str
    filler: str
    needle: str
    question: str
    answer: str
    ending: str
    digits: int = 5

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            kind = int if field.name == "digits" else str
            if not isinstance(getattr(self, field.name), kind):
                fail(f"prompt {field.name}", f"a {kind.__name__}", repr(getattr(self, field.name)))
        for name in ("needle", "answer"):
            if KEY not in getattr(self, name):
                fail(f"prompt {name}", f"a text that contains {KEY}", repr(getattr(self, name)))
        if KEY in self.question + self.start + self.filler:
            fail("prompt question, start and filler", f"without {KEY}, which would give the answer away", "one with it")
        if not 1 <= self.digits <= 20:
            fail("prompt digits", "from 1 to 20", self.digits)

    def key(self, chance: random.Random) -> str:
        return str(chance.randrange(10 ** (self.digits - 1), 10**self.digits))


FORMS = {
    # Mohtashami and Jaggi, "Landmark Attention" (2023), appendix.
    "sentences": PasskeyPrompt(
        form="sentences",
        start="There is an important info hidden inside a lot of irrelevant text. Find it and memorize them. I will "
        "quiz you about the important information there.\n",
        filler="The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. ",
        needle="The pass key is {key}. Remember it. {key} is the pass key.\n",
        question="What is the pass key? The pass key is",
        answer=" {key}",
        ending=".\n",
    ),
    # Few tokens, so that a small model learns it from a fraction of its training text.
    "compact": PasskeyPrompt(
        form="compact",
        start="",
        filler="",
        needle="\n[key={key}]\n",
        question="\n[key=",
        answer="{key}",
        ending="]\n",
    ),
}


def prompt_of(form: str, file: Path | None = None, digits: int | None = None) -> PasskeyPrompt:
    """The prompt named ``form``, with parts replaced by those in a JSON file."""
    if form not in FORMS:
        fail_choice("--form", FORMS, form)
    changes: dict[str, Any] = {} if digits is None else {"digits": digits}
    if file is not None:
        known = [field.name for field in dataclasses.fields(PasskeyPrompt)]
        try:
            given = read_json(file)
        except (OSError, ValueError) as error:
            fail("--prompt", "a readable JSON file", f"{str(file)!r}: {error}")
        if not isinstance(given, dict) or set(given) - set(known):
            fail("--prompt", f"a JSON object of some of {', '.join(known)}", f"{str(file)!r} with {given}")
        changes = given | changes
    return dataclasses.replace(FORMS[form], **changes)


class Filler:
    """Tokens to hide a passkey in: the prompt's sentences repeated, or passages of documents."""

    def __init__(self, prompt: PasskeyPrompt, encode: Any, documents: Sequence[Any] = ()) -> None:
        self.repeated = encode(prompt.filler) if prompt.filler else None
        self.documents = [list(map(int, document)) for document in documents if len(document)]
        if self.repeated is None and not self.documents:
            fail("--text", f"given: the form {prompt.form!r} hides the key in ordinary text", "nothing")

    def tokens(self, count: int, chance: random.Random) -> list[int]:
        if self.repeated is not None:
            return (self.repeated * (count // len(self.repeated) + 1))[:count]
        found: list[int] = []
        while len(found) < count:
            document = chance.choice(self.documents)
            begin = chance.randrange(max(1, len(document) - (count - len(found)) + 1))
            found += document[begin : begin + count - len(found)]
        return found


@dataclass(frozen=True)
class Trial:
    key: str
    ids: list[int]  # prompt and answer
    answer: int  # number of answer tokens at the end of ids


class TooShortError(ValueError):
    """The length is too short for the prompt with some key."""


def smallest_length(prompt: PasskeyPrompt, encode: Any) -> int:
    """Tokens of the prompt without filler."""
    key = "9" * prompt.digits
    parts = (prompt.start, prompt.needle, prompt.question, prompt.answer)
    return sum(len(encode(part.replace(KEY, key))) for part in parts if part)


def make_trial(
    prompt: PasskeyPrompt, encode: Any, filler: Filler, length: int, depth: float, chance: random.Random
) -> Trial:
    """A prompt of exactly ``length`` tokens, answer included; the fraction ``depth`` of its filler precedes the key."""
    key = prompt.key(chance)
    parts = (prompt.start, prompt.needle, prompt.question, prompt.answer)
    start, needle, question, answer = (encode(part.replace(KEY, key)) if part else [] for part in parts)
    room = length - sum(map(len, (start, needle, question, answer)))
    if room < 0:
        fail("length", f"at least {length - room} tokens, the prompt's own", length, TooShortError)
    stretch = filler.tokens(room, chance)
    place = round(depth * room)
    ids = [*start, *stretch[:place], *needle, *stretch[place:], *question, *answer]
    return Trial(key, ids, len(answer))


def make_trials(
    prompt: PasskeyPrompt, encode: Any, filler: Filler, length: int, depth: float, count: int, seed: int
) -> list[Trial]:
    """Trials that are reproducible from the arguments, with different keys for every length and depth."""
    return [
        make_trial(prompt, encode, filler, length, depth, random.Random(f"{seed} {length} {depth} {number}"))
        for number in range(count)
    ]


@torch.inference_mode()
def predictions(model: Any, ids: Tensor, count: int) -> Tensor:
    """(B, count): the most likely token at each of the last ``count`` positions, given all tokens before it.

    All are right exactly if greedy decoding would write the answer, so one forward pass without a cache is enough.
    """
    logits = model(input_ids=ids.to(model.device), use_cache=False, logits_to_keep=count + 1).logits
    logits = logits[:, -count - 1 : -1]
    if bool(logits.isnan().any()):
        got = f"{type(model).__name__}, which gives NaN at {ids.shape[1]} tokens"
        fail("MODEL", "a model with finite logits", got)
    return logits.argmax(-1)


def predict_keys(model: Any, trials: Sequence[Trial], at_once: int = 1) -> list[list[int]]:
    """The predicted tokens at the positions of each answer."""
    longest = max(trial.answer for trial in trials)
    rows = torch.tensor([trial.ids for trial in trials])
    found = in_batches(rows, at_once, lambda batch: predictions(model, batch, longest))
    return [line[longest - trial.answer :].tolist() for line, trial in zip(found, trials, strict=True)]


def is_right(trial: Trial, answer: list[int]) -> bool:
    return answer == trial.ids[-trial.answer :]


def passkey_documents(
    texts: Sequence[str],
    prompt: PasskeyPrompt,
    count: int,
    most_characters: int,
    seed: int = 0,
    questions: int = 1,
    least_characters: int = 0,
) -> Iterator[str]:
    """Training documents: text, a key, then ``questions`` times more text, the question and the answer.

    Their lengths are uniform between ``least_characters`` (or the length of the prompt) and ``most_characters``, which
    should be below the training length: the model learns only from sequences that hold the key and a question. Short
    documents teach short distances.
    """
    longest_key = "9" * prompt.digits
    answered = prompt.question + prompt.answer + prompt.ending
    least = len((prompt.start + prompt.needle + questions * answered).replace(KEY, longest_key))
    if questions < 1:
        fail("--questions", "at least 1", questions)
    if most_characters < least:
        fail("--max-characters", f"at least {least}, the prompt's own", most_characters)
    if not 0 <= least_characters <= most_characters:
        fail("--min-characters", f"from 0 to --max-characters, {most_characters}", least_characters)
    chance = random.Random(seed)
    long = [text for text in texts if len(text) >= most_characters]
    if not long and not prompt.filler:
        fail("--text", f"at least one document of {most_characters} characters", "shorter ones")
    for _ in range(count):
        room = chance.randrange(max(least_characters - least, 0), most_characters - least + 1)
        if prompt.filler:
            stretch = (prompt.filler * (room // len(prompt.filler) + 1))[:room]
        else:
            text = chance.choice(long)
            begin = chance.randrange(len(text) - room + 1)
            stretch = text[begin : begin + room]
        places = [0, *sorted(chance.randrange(room + 1) for _ in range(questions)), room]
        first, *others = (stretch[begin:end] for begin, end in pairwise(places))
        key = prompt.key(chance)
        needle, end = (part.replace(KEY, key) for part in (prompt.needle, answered))
        yield prompt.start + first + needle + "".join(other + end for other in others)


def write_documents(path: Path, documents: Iterable[str]) -> int:
    """Write a .jsonl file for `softplus-attention data prepare`; returns the number of characters."""
    characters = 0
    path.parent.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256()
    with replacing(path) as file:
        for text in documents:
            line = (json.dumps({"text": text}) + "\n").encode()
            file.write(line)
            digest.update(line)
            characters += len(text)
        keep_foreign(path, lambda found: sha256(found) == digest.hexdigest())
    return characters


# Deprecated names.
trials_of = make_trials
answers_of = predict_keys
