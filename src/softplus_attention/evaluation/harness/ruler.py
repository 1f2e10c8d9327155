"""The parts of the harness's `ruler`: prompts of a given length, generated from local essays and questions.

The harness's own functions generate them. Calling these functions here lets data come from local files, generates only
as many prompts as are used, and turns a length that is too short for a part into an error: the harness would loop
forever.
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
"""Parts in the harness's order, and the YAML file of each."""
SOURCES = {
    "essays": (
        "essays.jsonl",
        ("niah_single_2", "niah_single_3", "niah_multikey_1", "niah_multiquery", "niah_multivalue"),
    ),
    "squad": ("squad.json", ("ruler_qa_squad",)),
    "hotpotqa": ("hotpotqa.json", ("ruler_qa_hotpot",)),
}
WITH_SOURCES = tuple(part for _, parts in SOURCES.values() for part in parts)
MAX_SAMPLES = 500  # per length, as in the harness
LENGTHS = (4096,)  # default, as in the harness
# Tokens by which another random draw of words and numbers can exceed the smallest prompt.
MARGIN = 48
# Length of ruler_vt's example in the prompt; with one token per byte even the shortest example is longer.
EXAMPLE = 500


@dataclass(frozen=True)
class Texts:
    """Local sources of the parts of ruler, instead of the files that the harness downloads."""

    essays: Path | None = None
    squad: Path | None = None
    hotpotqa: Path | None = None

    def paths(self) -> dict[str, Path]:
        return {field.name: path for field in fields(self) if (path := getattr(self, field.name)) is not None}


def write_overrides(folder: Path, built_in: Path, parts: Sequence[str], texts: Texts | None, limit: int | None) -> None:
    """Write a YAML file for each part that uses ``build_dataset`` and includes the harness's file for all else."""
    if parts:
        needle_module()
    for part in parts:
        kwargs: dict[str, Any] = {"part": part, "samples": min(limit or MAX_SAMPLES, MAX_SAMPLES)}
        kwargs |= {source: str(path) for source, path in (texts or Texts()).paths().items()}
        task = {"include": str(built_in / f"{PARTS[part]}.yaml"), "task": part, "dataset_kwargs": kwargs}
        # JSON is YAML, except for the tag of the function.
        function = f'"custom_dataset": !function {__name__}.build_dataset'
        text = json.dumps(task, indent=1).rstrip("}").rstrip() + f",\n {function}\n}}\n"
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
    """The dataset of a part; ``kwargs`` come from the harness, among them the lengths and the tokenizer."""
    kwargs["max_seq_lengths"] = list(kwargs.get("max_seq_lengths") or LENGTHS)
    if part.startswith("niah"):
        return needle_dataset(part, samples, essays, kwargs)
    if part in ("ruler_vt", "ruler_cwe", "ruler_fwe"):
        return word_dataset(part, samples, kwargs)
    return question_dataset(part, samples, squad if part == "ruler_qa_squad" else hotpotqa, kwargs)


@contextlib.contextmanager
def patched(module: Any, **values: Any) -> Iterator[None]:
    before = {name: getattr(module, name) for name in values}
    for name, value in values.items():
        setattr(module, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(module, name, value)


def needle_dataset(part: str, samples: int, essays: str | None, kwargs: Mapping[str, Any]) -> Any:
    prepare_niah = needle_module()
    from lm_eval.tasks.ruler import niah_utils

    generate = niah_utils.generate_samples

    def generate_few(*args: Any, **settings: Any) -> Any:
        return generate(*args, **{**settings, "num_samples": samples})

    def haystack(type_haystack: str) -> Any:
        if type_haystack != "essay":
            return prepare_niah.get_haystack(type_haystack=type_haystack)
        words = prepare_niah.get_haystack(type_haystack="essay") if essays is None else essay_words(Path(essays))
        # The harness adds words in steps of 500; if the first 500 do not fit, its haystack is a single word.
        smallest = token_counter(kwargs)(f"{niah_utils.TEMPLATE} {' '.join(words[:500])}") + 128 + 5 * MARGIN
        check_lengths_fit(part, kwargs["max_seq_lengths"], lambda length: smallest)
        return words

    may_download = part in SOURCES["essays"][1] and essays is None
    splitter = sentence_splitter(prepare_niah.nltk, may_download)
    with (
        patched(prepare_niah, sent_tokenize=splitter),
        patched(niah_utils, generate_samples=generate_few, get_haystack=haystack),
    ):
        return getattr(niah_utils, part)(**kwargs)


def essay_words(path: Path) -> list[str]:
    """All essays as one list of words, as the harness has them."""
    essays = [record["text"] for record in read_json_lines(path, LARGEST)]
    return re.sub(r"\s+", " ", " ".join(essays)).strip().split(" ")


def needle_module() -> Any:
    """Import the harness's module without its download of nltk data at import."""
    nltk = import_module("nltk")
    with patched(nltk, download=lambda name: False), contextlib.redirect_stdout(io.StringIO()):
        return import_module("lm_eval.tasks.ruler.prepare_niah")


def sentence_splitter(nltk: Any, may_download: bool) -> Any:
    """nltk's English splitter if its data is available, else the one without data, which fails on abbreviations."""
    try:
        nltk.data.find("tokenizers/punkt_tab")
    except LookupError:
        if not may_download or not nltk.download("punkt_tab", quiet=True):
            return nltk.tokenize.PunktSentenceTokenizer().tokenize
    return nltk.sent_tokenize


def token_counter(kwargs: Mapping[str, Any]) -> Callable[[str], int]:
    from lm_eval.tasks.ruler.common_utils import get_tokenizer, resolve_tokenizer_name

    tokenizer = get_tokenizer(resolve_tokenizer_name(dict(kwargs)))
    return lambda text: len(tokenizer(text).input_ids)


def word_dataset(part: str, samples: int, kwargs: Mapping[str, Any]) -> Any:
    from lm_eval.tasks.ruler import cwe_utils, fwe_utils, vt_utils

    count = token_counter(kwargs)
    if part == "ruler_fwe":
        check_lengths_fit(part, kwargs["max_seq_lengths"], lambda length: count(fwe_utils.TEMPLATE) + MARGIN)
        with patched(fwe_utils, sys_kwext=partial(fwe_utils.sys_kwext, num_samples=samples)):
            return fwe_utils.fwe_download(**kwargs)
    if part == "ruler_cwe":

        def shortest(length: int) -> int:
            example, text, _ = cwe_utils.generate_input_output(10, length)
            return count(f"{example}\n{text}") + 120 + 4 * MARGIN

        check_lengths_fit(part, kwargs["max_seq_lengths"], shortest)
        generate = cwe_utils.sys_word_pair_random
        few = patched(cwe_utils, sys_word_pair_random=lambda **given: generate(**{**given, "num_samples": samples}))
        with few:
            return cwe_utils.get_cw_dataset(**kwargs)
    example = max(EXAMPLE, count(vt_utils.generate_input_output(5, 1, 4, is_icl=True)[0]) + 30 + 2 * MARGIN)
    track = vt_utils.sys_vartrack_w_noise_random

    def track_few(**given: Any) -> Any:
        if given.get("icl_example") is None:
            return track(**{**given, "max_seq_length": example})
        return track(**{**given, "num_samples": samples})

    smallest = count(vt_utils.generate_input_output(10, 1, 4)[0]) + 30 + example + 2 * MARGIN
    check_lengths_fit(part, kwargs["max_seq_lengths"], lambda length: smallest)
    # It prints every attempt.
    with contextlib.redirect_stdout(io.StringIO()), patched(vt_utils, sys_vartrack_w_noise_random=track_few):
        return vt_utils.get_vt_dataset(**kwargs)


def check_lengths_fit(part: str, lengths: Sequence[int], smallest: Callable[[int], int]) -> None:
    for length in lengths:
        need = smallest(length)
        if length < need:
            raise ValueError(f"{length} tokens are too short for {part} with this tokenizer: it needs about {need}")


def question_dataset(part: str, samples: int, path: str | None, kwargs: Mapping[str, Any]) -> Any:
    from lm_eval.tasks.ruler import qa_utils

    source = "squad" if part == "ruler_qa_squad" else "hotpotqa"
    read = getattr(qa_utils, f"read_{source}")
    questions, documents = read() if path is None else read_questions(source, read_json(Path(path), LARGEST))
    generate, generate_one = qa_utils.generate_samples, qa_utils.generate_input_output

    def generate_few(**given: Any) -> Any:
        return generate(**{**given, "num_samples": min(samples, len(questions))})

    def generate_from_copy(*args: Any, docs: list[str], **settings: Any) -> Any:
        # If all documents fit into a prompt, the harness shuffles the list that its indices refer to.
        return generate_one(*args, docs=list(docs), **settings)

    changed = {"generate_samples": generate_few, "generate_input_output": generate_from_copy}
    with patched(qa_utils, **changed, **{f"read_{source}": lambda: (questions, documents)}):
        return qa_utils.get_qa_dataset(source, **kwargs)


def read_questions(source: str, data: Any) -> tuple[list[dict[str, Any]], list[str]]:
    """Parse the content of a file that the harness would download, with its own parser."""
    from lm_eval.tasks.ruler import qa_utils

    with patched(qa_utils, download_json=lambda url: data):
        found: tuple[list[dict[str, Any]], list[str]] = getattr(qa_utils, f"read_{source}").__wrapped__("")
    return found
