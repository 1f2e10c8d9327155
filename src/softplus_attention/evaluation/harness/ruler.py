"""The parts of the harness's `ruler`: texts of a length that the harness makes, from local essays and questions.

The harness's own functions make them. They are called here, so that what they would fetch can come from files, only as
many are made as are used, and a length that a part has no texts of is an error: there the harness loops for ever.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from softplus_attention.utils.files import write_whole
from softplus_attention.utils.untrusted import MIB, read_json, read_json_lines

LARGEST = 1024 * MIB
PARTS = {
    "niah_single_1": "niah_single_1",
    "niah_single_2": "niah_single_2",
    "niah_single_3": "niah_single_3",
    "niah_multikey_1": "niah_multikey_1",
    "niah_multikey_2": "niah_multikey_2",
    "niah_multikey_3": "niah_multikey_3",
    "niah_multiquery": "niah_multiquery",
    "niah_multivalue": "niah_multivalue",
    "ruler_vt": "vt",
    "ruler_cwe": "cwe",
    "ruler_fwe": "fwe",
    "ruler_qa_squad": "qa_squad",
    "ruler_qa_hotpot": "qa_hotpot",
}
"""By name, in the harness's order, the YAML file of each."""
SOURCES = {
    "essays": (
        "essays.jsonl",
        ("niah_single_2", "niah_single_3", "niah_multikey_1", "niah_multiquery", "niah_multivalue"),
    ),
    "squad": ("squad.json", ("ruler_qa_squad",)),
    "hotpotqa": ("hotpotqa.json", ("ruler_qa_hotpot",)),
}
WITH_SOURCES = tuple(part for _, parts in SOURCES.values() for part in parts)
MAX_SAMPLES = 500  # of each length, the harness's number
LENGTHS = (4096,)  # where none is asked for, the harness's
# Random words and numbers of the smallest text have a few tokens more in another draw.
MARGIN = 48
# Of ruler_vt's example in the prompt; with one token per byte even the smallest is longer.
EXAMPLE = 500


@dataclass(frozen=True)
class Texts:
    """What the parts of ruler are made from, in place of what the harness fetches."""

    essays: Path | None = None
    squad: Path | None = None
    hotpotqa: Path | None = None

    def paths(self) -> dict[str, Path]:
        return {field.name: path for field in fields(self) if (path := getattr(self, field.name)) is not None}


def write_overrides(folder: Path, built_in: Path, parts: Sequence[str], texts: Texts | None, limit: int | None) -> None:
    """A YAML file for each part that makes its texts here; all else is the harness's."""
    if parts:
        needle_module()
    for part in parts:
        made: dict[str, Any] = {"part": part, "samples": min(limit or MAX_SAMPLES, MAX_SAMPLES)}
        made |= {source: str(path) for source, path in (texts or Texts()).paths().items()}
        word = {"include": str(built_in / f"{PARTS[part]}.yaml"), "task": part, "dataset_kwargs": made}
        # A tag is the one thing here that JSON has no form for.
        function = f'"custom_dataset": !function {__name__}.build_dataset'
        text = json.dumps(word, indent=1).rstrip("}").rstrip() + f",\n {function}\n}}\n"
        write_whole(folder / f"{part}.yaml", text)


def build_dataset(
    *,
    part: str,
    samples: int,
    essays: str | None = None,
    squad: str | None = None,
    hotpotqa: str | None = None,
    **kwargs: Any,
) -> Any:
    """The dataset of a part; ``kwargs`` are what the harness gives, among them the lengths and the tokenizer."""
    kwargs["max_seq_lengths"] = list(kwargs.get("max_seq_lengths") or LENGTHS)
    if part.startswith("niah"):
        return needles(part, samples, essays, kwargs)
    if part in ("ruler_vt", "ruler_cwe", "ruler_fwe"):
        return words_and_variables(part, samples, kwargs)
    return questions(part, samples, squad if part == "ruler_qa_squad" else hotpotqa, kwargs)


@contextlib.contextmanager
def replaced(module: Any, **values: Any) -> Iterator[None]:
    before = {name: getattr(module, name) for name in values}
    for name, value in values.items():
        setattr(module, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(module, name, value)


def needles(part: str, samples: int, essays: str | None, kwargs: Mapping[str, Any]) -> Any:
    prepare_niah = needle_module()
    from lm_eval.tasks.ruler import niah_utils

    generate = niah_utils.generate_samples

    def some(*given: Any, **settings: Any) -> Any:
        return generate(*given, **{**settings, "num_samples": samples})

    def haystack(type_haystack: str) -> Any:
        if type_haystack != "essay":
            return prepare_niah.get_haystack(type_haystack=type_haystack)
        found = prepare_niah.get_haystack(type_haystack="essay") if essays is None else essay_words(Path(essays))
        # It takes words by the 500, and where these do not fit it leaves one.
        smallest = token_counter(kwargs)(f"{niah_utils.TEMPLATE} {' '.join(found[:500])}") + 128 + 5 * MARGIN
        check_room(part, kwargs["max_seq_lengths"], lambda length: smallest)
        return found

    changed = {"generate_samples": some, "get_haystack": haystack}
    may_fetch = part in SOURCES["essays"][1] and essays is None
    splitter = sentence_splitter(prepare_niah.nltk, may_fetch)
    with replaced(prepare_niah, sent_tokenize=splitter), replaced(niah_utils, **changed):
        return getattr(niah_utils, part)(**kwargs)


def essay_words(path: Path) -> list[str]:
    """As the harness has the essays of the hub: one list of words."""
    essays = [record["text"] for record in read_json_lines(path, LARGEST)]
    return re.sub(r"\s+", " ", " ".join(essays)).strip().split(" ")


def needle_module() -> Any:
    """The harness's, without its attempt to download data of nltk whenever it is imported."""
    nltk = import_module("nltk")
    with replaced(nltk, download=lambda name: False), contextlib.redirect_stdout(io.StringIO()):
        return import_module("lm_eval.tasks.ruler.prepare_niah")


def sentence_splitter(nltk: Any, may_fetch: bool) -> Any:
    """nltk's for English where its data can be had, else nltk's without any: it stumbles over abbreviations."""
    try:
        nltk.data.find("tokenizers/punkt_tab")
    except LookupError:
        if not may_fetch or not nltk.download("punkt_tab", quiet=True):
            return nltk.tokenize.PunktSentenceTokenizer().tokenize
    return nltk.sent_tokenize


def token_counter(kwargs: Mapping[str, Any]) -> Callable[[str], int]:
    from lm_eval.tasks.ruler.common_utils import get_tokenizer, resolve_tokenizer_name

    tokenizer = get_tokenizer(resolve_tokenizer_name(dict(kwargs)))
    return lambda text: len(tokenizer(text).input_ids)


def words_and_variables(part: str, samples: int, kwargs: Mapping[str, Any]) -> Any:
    from lm_eval.tasks.ruler import cwe_utils, fwe_utils, vt_utils

    count = token_counter(kwargs)
    if part == "ruler_fwe":
        check_room(part, kwargs["max_seq_lengths"], lambda length: count(fwe_utils.TEMPLATE) + MARGIN)
        with replaced(fwe_utils, sys_kwext=partial(fwe_utils.sys_kwext, num_samples=samples)):
            return fwe_utils.fwe_download(**kwargs)
    if part == "ruler_cwe":

        def shortest(length: int) -> int:
            example, text, _ = cwe_utils.generate_input_output(10, length)
            return count(f"{example}\n{text}") + 120 + 4 * MARGIN

        check_room(part, kwargs["max_seq_lengths"], shortest)
        generate = cwe_utils.sys_word_pair_random
        few = replaced(cwe_utils, sys_word_pair_random=lambda **given: generate(**{**given, "num_samples": samples}))
        with few:
            return cwe_utils.get_cw_dataset(**kwargs)
    example = max(EXAMPLE, count(vt_utils.generate_input_output(5, 1, 4, is_icl=True)[0]) + 30 + 2 * MARGIN)
    track = vt_utils.sys_vartrack_w_noise_random

    def some(**given: Any) -> Any:
        if given.get("icl_example") is None:
            return track(**{**given, "max_seq_length": example})
        return track(**{**given, "num_samples": samples})

    smallest = count(vt_utils.generate_input_output(10, 1, 4)[0]) + 30 + example + 2 * MARGIN
    check_room(part, kwargs["max_seq_lengths"], lambda length: smallest)
    # It prints what it tries, in the middle of our table.
    with contextlib.redirect_stdout(io.StringIO()), replaced(vt_utils, sys_vartrack_w_noise_random=some):
        return vt_utils.get_vt_dataset(**kwargs)


def check_room(part: str, lengths: Sequence[int], smallest: Callable[[int], int]) -> None:
    for length in lengths:
        need = smallest(length)
        if length < need:
            reason = f"{part} has no texts of {length} tokens with this tokenizer"
            raise ValueError(f"{reason}: the smallest that it makes have about {need}")


def questions(part: str, samples: int, path: str | None, kwargs: Mapping[str, Any]) -> Any:
    from lm_eval.tasks.ruler import qa_utils

    source = "squad" if part == "ruler_qa_squad" else "hotpotqa"
    read = getattr(qa_utils, f"read_{source}")
    asked, documents = read() if path is None else read_questions(source, read_json(Path(path), LARGEST))
    generate, one_text = qa_utils.generate_samples, qa_utils.generate_input_output

    def some(**given: Any) -> Any:
        return generate(**{**given, "num_samples": min(samples, len(asked))})

    def one(*given: Any, docs: list[str], **settings: Any) -> Any:
        # Where all documents fit into a text, the harness shuffles the list that its indices point into.
        return one_text(*given, docs=list(docs), **settings)

    changed = {"generate_samples": some, "generate_input_output": one, f"read_{source}": lambda: (asked, documents)}
    with replaced(qa_utils, **changed):
        return qa_utils.get_qa_dataset(source, **kwargs)


def read_questions(source: str, data: Any) -> tuple[list[dict[str, Any]], list[str]]:
    """The harness's reading of a file that it would download."""
    from lm_eval.tasks.ruler import qa_utils

    with replaced(qa_utils, download_json=lambda url: data):
        found: tuple[list[dict[str, Any]], list[str]] = getattr(qa_utils, f"read_{source}").__wrapped__("")
    return found
