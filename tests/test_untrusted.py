"""Reading untrusted files: file types, sizes, JSON and array headers."""

from __future__ import annotations

import json
import math
import struct
import zipfile
from pathlib import Path

import pytest
from mutations import place_special

from softplus_attention.utils.untrusted import (
    DEEPEST_JSON,
    UnreadableError,
    UntrustedFileError,
    count_of,
    mapped_array,
    read_arrays,
    read_bytes,
    read_json,
    read_json_lines,
)


def test_regular_files_and_links(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text('{"name": "Röntgen", "loss": [1.5, null]}', encoding="utf-8")
    (tmp_path / "link").symlink_to(path)
    for name in ("a.json", "link"):
        assert read_json(tmp_path / name) == {"name": "Röntgen", "loss": [1.5, None]}
    (tmp_path / "lines").write_text('{"a": 1}\n\n[2]\n')
    assert read_json_lines(tmp_path / "lines") == [{"a": 1}, [2]]


@pytest.mark.parametrize("kind", ["fifo", "device", "folder"])
def test_other_files_are_refused(kind: str, tmp_path: Path) -> None:
    place_special(tmp_path / "a.json", kind)
    with pytest.raises(UntrustedFileError, match=r"a\.json: not a regular file"):
        read_json(tmp_path / "a.json")


def test_limits(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(b"12345")
    assert read_bytes(path, 5) == b"12345"
    with pytest.raises(UntrustedFileError, match="larger than"):
        read_bytes(path, 4)
    for depth, is_read in ((DEEPEST_JSON, True), (DEEPEST_JSON + 1, False), (100_000, False)):
        path.write_text("[" * depth + "]" * depth)
        if is_read:
            assert read_json(path) == json.loads(path.read_text())
        else:
            with pytest.raises(UntrustedFileError, match=r"nested|recursion"):
                read_json(path)


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe\x00", b'{"a": ' + b"9" * 5000 + b"}"])
def test_invalid_json(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(UntrustedFileError, match="not JSON"):
        read_json(tmp_path / "a.json")


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, 0.5, -1, 10**400, "1", True])
def test_invalid_counts(value: object) -> None:
    with pytest.raises(UnreadableError):
        count_of({"tokens": value}, "tokens")


HEADERS = {
    "objects": "{'descr': '|O', 'fortran_order': False, 'shape': (1,)}",
    "negative": "{'descr': '<u2', 'fortran_order': False, 'shape': (-5,)}",
    "huge": "{'descr': '<u2', 'fortran_order': False, 'shape': (1099511627776,)}",
    "overflow": "{'descr': '<u2', 'fortran_order': False, 'shape': (4611686018427387904,)}",
    "wide": "{'descr': '<U1000000000', 'fortran_order': False, 'shape': (100000,)}",
    "code": "__import__('os').system('true')",
    "deep": "-" * 5000 + "1",
}


@pytest.mark.parametrize("header", HEADERS.values(), ids=HEADERS)
@pytest.mark.filterwarnings("ignore:overflow encountered")
def test_forged_array_headers(header: str, tmp_path: Path) -> None:
    content = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header.encode() + b"\0" * 64
    (tmp_path / "a.npy").write_bytes(content)
    with pytest.raises(UntrustedFileError, match="not an array"):
        mapped_array(tmp_path / "a.npy")
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        archive.writestr("a.npy", content)
    with pytest.raises(UntrustedFileError, match="not arrays"):
        read_arrays(tmp_path / "a.npz")
