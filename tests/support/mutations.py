"""Malicious changes to folders: bytes, JSON values, file types, links and sizes, drawn by hypothesis."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

DEEP = json.loads("[" * 60 + "]" * 60)
VALUES: list[Any] = [
    None, True, -1, 0, 1, 2**31, 2**63, 10**400, 1e308, float("nan"), 0.5, "", "x", "../x", "/etc/passwd",
    "\x1b[31mred\x07", "=1+1", "a" * 5000, [], {}, [None], {"a": 1}, DEEP, ["x"] * 1000,
]  # fmt: skip
CONTENTS = [
    b"", b"{", b"null", b"[]", b"{}", b"\xff\xfe\x00", b"[" * 100_000, b'{"a":' * 200 + b"1" + b"}" * 200,
    b"\x80\x04cos\nsystem\n.", b"[" + b"[]," * 3_000_000 + b"1]",
]  # fmt: skip
WAYS = ["bytes"] * 2 + ["json"] * 4 + ["cut", "content", "delete key", "remove", "link", "fifo", "folder", "large"]


@dataclass(frozen=True)
class Mutation:
    file: int  # index among the sorted files
    way: str
    place: float  # relative position in the file, or among its JSON values
    value: Any

    def __str__(self) -> str:
        return f"{self.way} {self.file} {self.place:.3f} {str(self.value)[:40]}"


@st.composite
def mutations(draw: Callable[..., Any]) -> Mutation:
    way = draw(st.sampled_from(WAYS))
    values = {
        "bytes": st.binary(min_size=1, max_size=8),
        "content": st.sampled_from(CONTENTS),
        "json": st.sampled_from(VALUES),
        "link": st.sampled_from(["outside", "/dev/zero", "nothing", "itself"]),
    }
    value = draw(values.get(way, st.none()))
    return Mutation(draw(st.integers(0, 200)), way, draw(st.floats(0, 0.999)), value)


def files_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def apply(mutation: Mutation, folder: Path, outside: Path) -> str:
    """Changes one file of the folder and returns its name. ``outside`` is a target for links."""
    files = files_of(folder)
    path = files[mutation.file % len(files)]
    content = path.read_bytes()
    way = mutation.way
    if way in ("json", "delete key"):
        changed = changed_json(content, mutation)
        if changed is not None:
            path.write_bytes(changed)
            return path.name
        way = "bytes"
    if way == "bytes":
        at = int(mutation.place * len(content))
        value = mutation.value if isinstance(mutation.value, bytes) else b"\x00"
        path.write_bytes(content[:at] + value + content[at + len(value) :])
    elif way == "cut":
        path.write_bytes(content[: int(mutation.place * len(content))])
    elif way == "content":
        path.write_bytes(mutation.value)
    elif way == "large":
        os.truncate(path, 1 << 36)
    elif way in ("fifo", "folder"):
        place_special(path, way)
    else:
        path.unlink()
        if way == "link":
            targets = {"outside": outside / path.name, "nothing": outside / "nothing", "itself": path}
            if mutation.value == "outside":
                (outside / path.name).write_bytes(content)
            path.symlink_to(targets.get(mutation.value, mutation.value))
    return path.name


def changed_json(content: bytes, mutation: Mutation) -> bytes | None:
    """Replaces or removes one value of the file, or of its first line, if that is JSON; else None."""
    lines = content.split(b"\n")
    try:
        data, rest = json.loads(content), b""
    except ValueError:
        try:
            data, rest = json.loads(lines[0]), b"\n".join([b"", *lines[1:]])
        except ValueError:
            return None
    places: list[tuple[Any, Any]] = []

    def visit(value: Any) -> None:
        names = value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
        for name in names:
            places.append((value, name))
            visit(value[name])

    visit(data)
    if not places:
        return None
    holder, name = places[int(mutation.place * len(places))]
    if mutation.way == "delete key":
        del holder[name]
    else:
        holder[name] = mutation.value
    return json.dumps(data).encode() + rest


def state_of(folder: Path) -> dict[str, str]:
    """Every path below a folder, with the SHA-256 of files."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "folder"
        for path in sorted(folder.rglob("*"))
    }


def seal(checkpoint: Path) -> None:
    """Writes a manifest that matches the files, as an attacker could."""
    paths = [path for path in files_of(checkpoint) if path.name != "manifest.json" and path.stat().st_size < 1 << 30]
    files = {
        path.relative_to(checkpoint).as_posix(): {
            "bytes": path.stat().st_size,
            "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        }
        for path in paths
    }
    manifest = checkpoint / "manifest.json"
    manifest.unlink(missing_ok=True)
    manifest.write_text(json.dumps({"files": files}))


class CreatesFile:
    """An object whose pickle creates a file when it is loaded."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.file}",)


def place_special(path: Path, kind: str) -> None:
    """Replaces a file by a FIFO, a link to an endless device, a folder, or deeply nested JSON."""
    path.unlink(missing_ok=True)
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "folder":
        path.mkdir()
    else:
        assert kind == "deep"
        path.write_text('{"a":' * 100_000)


def copy(source: Path, target: Path) -> Path:
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, target)
    return target
