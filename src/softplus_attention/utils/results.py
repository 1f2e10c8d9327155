"""Result files: one JSON per model and measure (docs/evaluation.md), saved incrementally and resumed."""

from __future__ import annotations

import datetime
import hashlib
import itertools
import json
import math
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote_plus

import torch

from softplus_attention.utils import provenance, untrusted
from softplus_attention.utils.files import ABANDONED, csv_text, remove_temporary, write_csv, write_json
from softplus_attention.validation import fail

FORMAT = "softplus-attention result"
VERSION = 1
MAX_NAME_LENGTH = 150
MAX_FILE_BYTES = 128 * untrusted.MIB


def file_name(measure: str, name: str, variant: str = "") -> str:
    """Different names give different files: the name is URL-quoted, and a long one cut and hashed."""
    quoted = quote_plus(name, safe="=,()")
    if len(quoted) > MAX_NAME_LENGTH:
        quoted = f"{quoted[:MAX_NAME_LENGTH]}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"
    return f"{measure}--{quoted}{f'--{variant}' if variant else ''}.json"


def result_path(folder: Path, result: Mapping[str, Any]) -> Path:
    return folder / file_name(result["measure"], result["model"]["name"], result.get("variant", ""))


def to_jsonable(data: Any) -> Any:
    """``data`` as JSON types: NaN and infinity become null, tuples lists, other objects text."""
    if isinstance(data, Mapping):
        return {str(key): to_jsonable(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [to_jsonable(value) for value in data]
    if isinstance(data, float):
        return data if math.isfinite(data) else None
    if data is None or isinstance(data, bool | int | str):
        return data
    return str(data)


def run_metadata(device: torch.device) -> dict[str, Any]:
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "commit": provenance.commit(),
        "versions": provenance.versions(),
        "machine": provenance.machine(device),
    }


def free_name(path: Path) -> Path:
    """``path``, or ``path`` with the first free number appended."""
    numbered = (path.with_name(f"{path.name}{number}") for number in itertools.count(2))
    return next(free for free in itertools.chain([path], numbered) if not free.exists())


def keep_foreign(path: Path, is_ours: Callable[[Path], bool]) -> None:
    """Renames an existing file that is not ours to .old before it would be overwritten."""
    if path.is_file() and not path.is_symlink() and not is_ours(path):
        aside = free_name(path.with_name(path.name + ".old"))
        path.replace(aside)
        print(f"{path} was not written by this command: kept as {aside.name}", file=sys.stderr, flush=True)


def write_table(path: Path, head: Sequence[str], rows: Iterable[Sequence[Any]]) -> Path:
    keep_foreign(path, lambda found: untrusted.begins_with(found, csv_text(head, ()).encode()))
    return write_csv(path, head, rows)


class ResultFile:
    """The results of one measure for one model. The measure fills ``results``; ``save`` may be called at any time.

    Results of an earlier run with the same model and settings are loaded. Other settings get a file of their own. A
    file with the same settings but another model of that name is renamed to .json.old, .json.old2 and so on. Without
    a ``folder`` nothing is written.
    """

    def __init__(
        self,
        folder: Path | None,
        measure: str,
        model: Mapping[str, Any],
        settings: Mapping[str, Any],
        device: torch.device,
        empty: Mapping[str, Any],
        variant: str = "",
    ) -> None:
        """``variant`` distinguishes files of one measure and model."""
        self.frame: dict[str, Any] = {
            "format": FORMAT,
            "version": VERSION,
            "measure": measure,
            "variant": variant,
            "complete": False,
            "model": to_jsonable(model),
            "settings": to_jsonable(settings),
            "made": run_metadata(device),
        }
        self.results: dict[str, Any] = dict(empty)
        self.path: Path | None = None
        if folder is not None:
            remove_temporary(folder, older=ABANDONED)
            self.path = self.place_in(folder)
            before = self.earlier(self.path)
            if before is not None:
                self.results |= before["results"]
                self.results["skipped"] = []

    def place_in(self, folder: Path) -> Path:
        path = result_path(folder, self.frame)
        if path.exists() and read(path)["settings"] != self.frame["settings"]:
            digest = hashlib.sha256(json.dumps(self.frame["settings"], sort_keys=True).encode()).hexdigest()[:8]
            self.frame["variant"] = "-".join(filter(None, (self.frame["variant"], digest)))
        return result_path(folder, self.frame)

    def earlier(self, path: Path) -> dict[str, Any] | None:
        if not path.exists():
            return None
        before = read(path)
        if identity(before) == identity(self.frame):
            return before
        aside = free_name(path.with_suffix(".json.old"))
        path.replace(aside)
        print(f"{path} held another model of that name: kept as {aside.name}", file=sys.stderr, flush=True)
        return None

    def has(self, key: str, **values: Any) -> bool:
        """Whether ``results[key]`` holds an entry with these values."""
        return any(all(entry[name] == value for name, value in values.items()) for entry in self.results[key])

    def add(self, key: str, entry: Mapping[str, Any], order: Sequence[str]) -> None:
        entries = [*self.results[key], to_jsonable(entry)]
        self.results[key] = sorted(entries, key=lambda found: [found[field] for field in order])
        self.save()

    def save(self, complete: bool = False) -> dict[str, Any]:
        whole = {**self.frame, "complete": complete, "results": to_jsonable(self.results)}
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_json(self.path, whole)
        return whole


def identity(result: Mapping[str, Any]) -> tuple[Any, ...]:
    """What two runs must have in common to be parts of one result."""
    model = result["model"]
    own = tuple(
        json.dumps(model.get(field), sort_keys=True)
        for field in ("fingerprint", "options", "dtype", "attention", "training_length")
    )
    return (result["measure"], own, json.dumps(result["settings"], sort_keys=True))


def read(path: Path) -> dict[str, Any]:
    try:
        result = untrusted.read_json(path, MAX_FILE_BYTES)
        if result["format"] != FORMAT or result["version"] != VERSION or not isinstance(result["measure"], str):
            raise KeyError("format")
        if not all(isinstance(result[field], dict) for field in ("model", "settings", "results")):
            raise TypeError("model, settings and results must be objects")
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = error.reason if isinstance(error, untrusted.UntrustedFileError) else repr(error)
        fail("result file", f"written by `softplus-attention evaluate` (format {VERSION})", f"{str(path)!r}: {reason}")
    return result


def results_in(folder: Path, measure: str) -> list[dict[str, Any]]:
    """The results of a measure in a folder, sorted by file name."""
    return [read(path) for path in sorted(folder.glob(f"{measure}--*.json"))]
