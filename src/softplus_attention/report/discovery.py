"""Find result files under a folder, with the kind of each, and the problems of files that cannot be shown."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from softplus_attention.evaluation.measures import measures
from softplus_attention.utils import untrusted
from softplus_attention.utils.files import clean_text
from softplus_attention.utils.results import FORMAT, MAX_FILE_BYTES, VERSION
from softplus_attention.utils.untrusted import UnreadableError, short

LARGEST_NUMBER = 1e100
# Files of models, tokenizers, prepared data, training and the stages of `newton`.
WORKING_FILES = re.compile(
    r"(generation_|adapter_|preprocessor_)?config\.json|(tokenizer|special_tokens|added_tokens|vocab|merges).*\.json"
    r"|(chat_template|.*\.index|trainer_state|index|plan|manifest|position)\.json"
    r"|(experiment|pretrain|probes|tune|long|laws|ranking|seed\d+)\.json"
)


@dataclass(frozen=True)
class Result:
    path: str  # relative to the folder, cleaned
    kind: str  # a measure, or "demo", "study", "stability", "newton", "speed", "training"
    data: dict[str, Any]

    @property
    def group(self) -> str:
        return self.path.rpartition("/")[0]


@dataclass
class ResultSet:
    folder: Path
    results: list[Result] = field(default_factory=list)
    problems: list[tuple[str, str]] = field(default_factory=list)  # (path, reason)
    working_files: int = 0

    def of(self, kind: str) -> list[Result]:
        return [result for result in self.results if result.kind == kind]


def find_results(folder: Path, skip: Path | None = None) -> ResultSet:
    """Read every JSON file under the folder except under ``skip``. Working files are counted, not listed."""
    found = ResultSet(folder)
    problem: Callable[[OSError], None] = lambda error: found.problems.append(  # noqa: E731
        (relative(Path(error.filename or folder), folder), error.strerror or "cannot be read")
    )
    for place, folders, files in os.walk(folder, onerror=problem):
        folders[:] = sorted(
            name for name in folders if not name.startswith(".") and (skip is None or Path(place, name) != skip)
        )
        for name in sorted(files):
            if not name.endswith(".json"):
                continue
            path = Path(place, name)
            try:
                data = read_json(path)
                kind = check_kind(data)
            except UnreadableError as error:
                if WORKING_FILES.fullmatch(name):
                    found.working_files += 1
                else:
                    found.problems.append((relative(path, folder), str(error)))
                continue
            if kind == "training" and data["config"].get("data") == "simulated":
                found.working_files += 1  # a stage of `newton`
                continue
            found.results.append(Result(relative(path, folder), kind, data))
    return found


def relative(path: Path, folder: Path) -> str:
    return clean_text(str(path.relative_to(folder) if path.is_relative_to(folder) else path))


def read_json(path: Path) -> dict[str, Any]:
    try:
        data = untrusted.read_json(path, MAX_FILE_BYTES)
    except untrusted.UntrustedFileError as error:
        raise UnreadableError(clean_text(error.reason)) from None
    except OSError as error:
        raise UnreadableError(clean_text(error.strerror or str(error))) from None
    if not isinstance(data, dict):
        raise UnreadableError("not a result: the file is not a JSON object")
    return cleaned(data)


def check_kind(data: dict[str, Any]) -> str:
    if data.get("format") == FORMAT:
        if data.get("version") != VERSION:
            raise UnreadableError(f"a result of version {short(data.get('version'))}; supported is version {VERSION}")
        if data.get("measure") not in list(measures()):
            raise UnreadableError(f"a result of the unknown measure {short(data.get('measure'))}")
        return str(data["measure"])
    if data.get("kind") == "newton":
        return "newton"
    if {"arm", "size", "evaluation"} <= set(data):
        return "study"
    if {"arm", "learning_rate", "largest_score"} <= set(data):
        return "stability"
    if isinstance(data.get("config"), dict) and is_table(data.get("starts")):
        return "training"
    if {"lengths", "loss", "settings"} <= set(data) and isinstance(data["loss"], dict):
        return "demo"
    # Benchmarks write a command or a machine, and tables.
    if {"command", "machine"} & set(data) and any(is_table(v) or is_numbers(k, v) for k, v in data.items()):
        return "speed"
    raise UnreadableError("not a result: it has neither a known format nor a table of measurements")


def is_table(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(row, dict) and row for row in value)


def is_numbers(name: str, value: Any) -> bool:
    """Whether ``value`` maps names to measured numbers, rather than recording settings."""
    if name in ("machine", "versions", "settings", "shape", "config") or not isinstance(value, dict) or not value:
        return False
    return all(isinstance(item, int | float) and not isinstance(item, bool) for item in value.values())


def cleaned(value: Any) -> Any:
    """Strings made printable; numbers too large for a page or figure, and NaN, replaced by None."""
    if isinstance(value, str):
        return clean_text(value)
    if isinstance(value, dict):
        return {clean_text(str(name)): cleaned(item) for name, item in value.items()}
    if isinstance(value, list):
        return [cleaned(item) for item in value]
    if isinstance(value, bool) or value is None:
        return value
    return value if abs(value) < LARGEST_NUMBER else None
