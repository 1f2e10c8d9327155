"""Untrusted data folders and foreign output folders: nothing outside changes, and each error is one line."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard
from commands import refused, refused_in_process, run
from data_files import write_jsonl
from mutations import place_special

from softplus_attention.cli import main
from softplus_attention.data import DataError, PackedTokens, TokenDataset, prepare
from softplus_attention.utils.untrusted import sha256


@pytest.fixture
def data(tmp_path: Path) -> Path:
    source = write_jsonl(tmp_path / "a.jsonl", [f"document {number}" for number in range(40)])
    options: dict[str, Any] = {"tokenizer": "bytes", "validation_fraction": 0.3, "shard_tokens": 100, "workers": 1}
    prepare([source], tmp_path / "data", **options)
    return tmp_path / "data"


@pytest.mark.parametrize("name", ["../outside.npy", "{}/outside.npy", "sub/a.npy", "..", "", ".hidden", "a\nb"])
@pytest.mark.parametrize("entry", ["shard", "offsets", "tokenizer"])
def test_index_names_files_of_the_folder(data: Path, name: str, entry: str) -> None:
    index = json.loads((data / "index.json").read_text())
    train = index["splits"]["train"]
    record = {"shard": train["shards"][0], "offsets": train["offsets"], "tokenizer": index["tokenizer_files"][0]}[entry]
    record["file"] = name.format(data.parent)
    (data.parent / "outside.npy").write_bytes((data / "train-00000.npy").read_bytes())
    (data / "index.json").write_text(json.dumps(index))
    assert f"{data}/index.json is damaged (ValueError(" in refused_in_process("data", "verify", data)


CHANGES: dict[str, Callable[[dict[str, Any]], object]] = {
    "dtype": lambda index: index.update(dtype="float16"),
    "objects": lambda index: index.update(dtype="O"),
    "vocabulary": lambda index: index.update(vocabulary_size=10),
    "end": lambda index: index.update(end_of_document=-1),
    "tokens": lambda index: index["splits"]["train"].update(tokens=3),
    "documents": lambda index: index["splits"]["train"].update(documents=3),
    "negative": lambda index: index["splits"]["train"]["shards"][0].update(tokens=-1),
    "moved": lambda index: swap(index["splits"]["train"]["shards"]),
    "other split": lambda index: index["splits"].update(test=index["splits"]["train"]),
    "named twice": lambda index: index["splits"].update(validation=index["splits"]["train"]),
    "counts": lambda index: index.update(counts={}),
    "plan": lambda index: index["plan"]["options"].update(tokenizer={}),
}


def swap(shards: list[dict[str, Any]]) -> None:
    shards[0]["tokens"] += 1
    shards[1]["tokens"] -= 1


@pytest.mark.parametrize("name", CHANGES)
def test_index_matches_its_files(data: Path, name: str) -> None:
    index = json.loads((data / "index.json").read_text())
    CHANGES[name](index)
    (data / "index.json").write_text(json.dumps(index))
    with pytest.raises(DataError, match=r"damaged|does not match|has changed since"):
        TokenDataset.open(data, "train")


@pytest.mark.parametrize(
    "offsets", [[0, 5, 3, 9], [-1, 4, 5, 9], [0, 4, 5, 1 << 40], [0, 4, 5, 9, 12], [0.0, 4.0, 5.0, 9.0], [0, 0, 4, 9]]
)
def test_invalid_document_offsets(tmp_path: Path, offsets: list[Any]) -> None:
    np.save(tmp_path / "a.npy", np.array([1, 2, 3, 256, 256, 7, 8, 9, 256], np.uint16))
    (tmp_path / "a.jsonl").write_text('{"text": "abc"}\n{"text": "a"}\n{"text": "b"}\n')
    folder = tmp_path / "data"
    prepare([tmp_path / "a.jsonl"], folder, tokenizer="bytes", validation_fraction=0, workers=1)
    assert TokenDataset.open(folder, "train").offsets.tolist() == [0, 4, 6, 8]
    np.save(folder / "train-documents.npy", np.array(offsets))
    index = json.loads((folder / "index.json").read_text())
    index["splits"]["train"]["offsets"]["bytes"] = (folder / "train-documents.npy").stat().st_size
    (folder / "index.json").write_text(json.dumps(index))
    with pytest.raises(DataError, match=r"does not match|has changed since"):
        TokenDataset.open(folder, "train")


def test_ids_beyond_the_tokenizer(data: Path) -> None:
    """Detected when they are read, and by ``verify`` even if the checksum matches."""
    shard = np.lib.format.open_memmap(data / "train-00000.npy", mode="r+")
    shard[7] = 300
    shard.flush()
    with pytest.raises(DataError, match="has token 300, its vocabulary only 257"):
        list(PackedTokens(data, "train", 20))  # type: ignore[call-overload]
    index = json.loads((data / "index.json").read_text())
    index["splits"]["train"]["shards"][0]["sha256"] = sha256(data / "train-00000.npy")
    (data / "index.json").write_text(json.dumps(index))
    assert "has token 300" in refused_in_process("data", "verify", data)


@pytest.mark.parametrize("kind", ["fifo", "device", "deep", "pickle", "zip"])
def test_data_reads_regular_files_only(data: Path, kind: str) -> None:
    name = "train-00000.npy" if kind in ("pickle", "zip") else "index.json"
    size = (data / name).stat().st_size
    if kind in ("pickle", "zip"):
        objects = np.array([print], dtype=object)
        with (data / name).open("wb") as file:
            np.save(file, objects, allow_pickle=True) if kind == "pickle" else np.savez(file, objects)
            file.truncate(size)
    else:
        place_special(data / name, kind)
    reason = "has changed since it was written" if kind in ("pickle", "zip") else "is damaged"
    assert f"{data / name} {reason}" in refused("data", "verify", data)


def test_escape_codes_are_not_printed(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Neither in the summary of a folder nor in errors that quote it."""
    index = json.loads((data / "index.json").read_text())
    index["plan"]["sources"] = ["\x1b]0;owned\x07\x1b[2J"]
    index["plan"]["options"]["separator"] = "\x9b31m"
    (data / "index.json").write_text(json.dumps(index))
    arguments = ("train", "--preset", "tiny", "--data", str(data), "--output", str(data.parent / "run"))
    status = [main(["data", "info", str(data)]), main(["data", "verify", str(data)])]
    (data / "train-00000.npy").write_bytes(b"")
    status += [main(["data", "verify", str(data)]), main(arguments)]
    (data / "index.json").write_text('{"format": "\\u001b[2J", "version": 1}')
    status += [main(["data", "info", str(data)]), main(arguments)]
    (data.parent / "\x1b[31mred.jsonl").write_text("{")
    arguments = ("data", "prepare", str(data.parent / "\x1b[31mred.jsonl"), "--tokenizer", "bytes")
    status.append(main([*arguments, "--output", str(data.parent / "other")]))
    assert status == [0, 0, 2, 2, 2, 2, 2]
    output = "".join(capsys.readouterr())
    assert not {"\x1b", "\x07", "\x9b"} & set(output)
    assert output.count("\ufffd]0;owned") == 3
    assert "line 1 of" in output


def test_zst_bombs_take_bounded_memory(tmp_path: Path) -> None:
    """4 GiB of zeros in 131 KB."""
    frame = zstandard.ZstdCompressor().compress(bytes(1 << 30))
    (tmp_path / "a.jsonl.zst").write_bytes(frame * 4)
    program = (
        "import resource, sys; from pathlib import Path; from softplus_attention.data.sources import opened\n"
        "before, size = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, 0\n"
        "with opened(Path(sys.argv[1])) as file:\n"
        "    while block := file.read(1 << 20): size += len(block)\n"
        "print(size, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "a.jsonl.zst")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    size, kibibytes = map(int, done.stdout.split())
    assert size == 4 << 30
    assert kibibytes < 128 << 10


@pytest.mark.parametrize("started", [False, True])
def test_prepare_removes_only_its_own_files(tmp_path: Path, started: bool) -> None:
    """After the error for blank documents the folder is as before, including foreign files."""
    (tmp_path / "blank.txt").write_text(" \n")
    output = tmp_path / "out"
    mine = {"mine.txt", "notes.tmp", ".partial/mine.npz"} if started else set()
    for name in mine:
        (output / name).parent.mkdir(parents=True, exist_ok=True)
        (output / name).write_text("mine")
    command = ("data", "prepare", tmp_path / "blank.txt", "--tokenizer", "bytes", "--output", output)
    assert "no documents, or all are empty" in refused(*command)
    assert output.exists() == started
    assert {str(path.relative_to(output)) for path in output.rglob("*") if path.is_file()} == mine


def test_prepare_follows_no_links(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("some text")
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "plan.json").write_text("mine")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / ".partial").symlink_to(tmp_path / "outside")
    command = ("data", "prepare", tmp_path / "a.txt", "--tokenizer", "bytes", "--output", tmp_path / "out")
    assert "contains something else" in refused(*command)
    (tmp_path / "out" / ".partial").unlink()
    work = tmp_path / "out" / ".partial"
    work.mkdir()
    (work / "plan.json").symlink_to(tmp_path / "outside" / "plan.json")
    (tmp_path / "out" / "train-00000.npy").symlink_to(tmp_path / "outside" / "plan.json")
    assert "plan.json" in refused(*command)
    (work / "plan.json").unlink()
    done = run(*command)
    assert done.status == 0, done.text
    assert {path.name: path.read_text() for path in (tmp_path / "outside").iterdir()} == {"plan.json": "mine"}


@pytest.mark.parametrize("state", ["assembled.npz", "piece-00000000.npz"])
@pytest.mark.parametrize("content", [b"", b"PK\x05\x06" + bytes(18), b"[1]"])
def test_damaged_state_of_prepare(tmp_path: Path, state: str, content: bytes) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "some text"}\n' * 2 + "{")
    command = ("data", "prepare", tmp_path / "a.jsonl", "--tokenizer", "bytes", "--output", tmp_path / "out")
    command += ("--workers", 1)
    assert "line 3" in refused_in_process(*command)
    work = tmp_path / "out" / ".partial"
    (work / state).write_bytes(content)
    assert refused_in_process(*command).endswith("start again")
    (work / "plan.json").unlink()
    assert refused_in_process(*command).endswith("start again")
