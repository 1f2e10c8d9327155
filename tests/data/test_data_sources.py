"""Document sources: every kind of file, streamed datasets, unusual and damaged input, and resuming."""

from __future__ import annotations

import gzip
import json
import lzma
import resource
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import zstandard
from pyarrow import parquet

from softplus_attention.cli import main
from softplus_attention.data import DataError, TokenDataset, builtin_text, prepare
from softplus_attention.data.options import PrepareOptions
from softplus_attention.data.sources import Source, find
from softplus_attention.data.token_files import TokenFile
from softplus_attention.data.tokenizer import END, bytes_tokenizer

DOCUMENTS = [
    "First one.\n",
    "",
    "Zweites: größer",
    "第三の文書",
    "four\r\nlines\n\n",
    'quoted "five" \\ \u2028 end',
    "six",
] * 5
COMPRESS = {".xz": lzma.compress, ".gz": gzip.compress, ".zst": zstandard.ZstdCompressor().compress, "": bytes}


def jsonl(documents: list[str]) -> bytes:
    return "".join(json.dumps({"id": 1, "text": text}, ensure_ascii=False) + "\n" for text in documents).encode()


def open_one(name: str | Path, **options: Any) -> Source:
    (source,) = find([str(name)], PrepareOptions(**options), Path("/nowhere"))
    return source


def read(name: str | Path, **options: Any) -> list[str]:
    return [str(document) for document in open_one(name, **options).documents(None)]


def fineweb(folder: Path, documents: list[str]) -> str:
    """A small copy of FineWeb with its schema, folders and configurations: two files with several row groups."""
    schema = {
        "text": pa.string(),
        "id": pa.string(),
        "dump": pa.string(),
        "url": pa.string(),
        "date": pa.string(),
        "file_path": pa.string(),
        "language": pa.string(),
        "language_score": pa.float64(),
        "token_count": pa.int64(),
    }
    sample = folder / "sample" / "10BT"
    sample.mkdir(parents=True)
    half = len(documents) // 2
    for number, part in enumerate((documents[:half], documents[half:])):
        columns: dict[str, Any] = {name: ["x"] * len(part) for name in schema}
        columns |= {"text": part, "language_score": [0.9] * len(part), "token_count": [len(text) for text in part]}
        table = pa.table(columns, schema=pa.schema(list(schema.items())))
        parquet.write_table(table, sample / f"{number:03d}_00000.parquet", row_group_size=4)
    (folder / "README.md").write_text(
        "---\nconfigs:\n- config_name: sample-10BT\n  data_files:\n  - split: train\n    path: sample/10BT/*\n---\n"
    )
    return f"hub:{folder}:sample-10BT"


@pytest.fixture
def every_kind(tmp_path: Path) -> dict[str, str]:
    """The same documents in every format that can contain several."""
    names = {"hub": fineweb(tmp_path / "fineweb", DOCUMENTS)}
    table = pa.table({"text": DOCUMENTS})
    parquet.write_table(table, tmp_path / "a.parquet", row_group_size=3, compression="zstd")
    names["parquet"] = str(tmp_path / "a.parquet")
    for suffix, compress in COMPRESS.items():
        names[f"jsonl{suffix}"] = str(tmp_path / f"a.jsonl{suffix}")
        Path(names[f"jsonl{suffix}"]).write_bytes(compress(jsonl(DOCUMENTS)))
        names[f"txt{suffix}"] = str(tmp_path / f"a.txt{suffix}")
        Path(names[f"txt{suffix}"]).write_bytes(compress("<|sep|>".join(DOCUMENTS).encode()))
    return names


class TestEveryKind:
    def test_same_documents(self, every_kind: dict[str, str]) -> None:
        for name in every_kind.values():
            assert read(name, separator="<|sep|>") == DOCUMENTS, name

    def test_resumes_from_every_position(self, every_kind: dict[str, str]) -> None:
        for kind, name in every_kind.items():
            for stop in range(1, len(DOCUMENTS), 4 if kind == "hub" else 1):
                source = open_one(name, separator="<|sep|>")
                documents = source.documents(None)
                before = [next(documents) for _ in range(stop)]
                position = json.loads(json.dumps(source.position()))
                documents.close()  # type: ignore[attr-defined]
                again = open_one(name, separator="<|sep|>")
                after = list(again.documents(position))
                assert [*before, *after] == DOCUMENTS, (kind, stop)

    def test_streamed_fineweb_matches_its_files(self, tmp_path: Path) -> None:
        documents = [f"page {number}" for number in range(60)]
        name = fineweb(tmp_path / "fineweb", documents)
        options: dict[str, Any] = {"tokenizer": "bytes", "validation_fraction": 0.3, "piece_characters": 50}
        streamed = prepare([name], tmp_path / "streamed", workers=2, **options)
        local = prepare([tmp_path / "fineweb"], tmp_path / "local", workers=1, **options)
        assert streamed.counts == local.counts
        assert streamed.splits == local.splits

    def test_fineweb_by_name(self) -> None:
        source = open_one("fineweb")
        assert (source.dataset, source.configuration) == ("HuggingFaceFW/fineweb", "sample-10BT")  # type: ignore[attr-defined]
        source = open_one("fineweb:sample-100BT")
        assert (source.dataset, source.configuration) == ("HuggingFaceFW/fineweb", "sample-100BT")  # type: ignore[attr-defined]

    def test_builtin_text(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        source = open_one("builtin")
        works = list(source.documents(None))
        assert works == builtin_text()[0]
        reading = source.documents(None)
        assert [next(reading), next(reading)] == works[:2]
        assert next(open_one("builtin").documents(source.position())) == works[2]
        monkeypatch.chdir(tmp_path)
        Path("builtin").mkdir()
        Path("builtin/own.txt").write_text("mine")
        assert list(open_one("builtin").documents(None)) == ["mine"]

    def test_missing_dataset(self, tmp_path: Path) -> None:
        with pytest.raises(DataError, match=r"`SOURCE` must be .*, got 'hub:.*missing', which `datasets` cannot open"):
            list(open_one(f"hub:{tmp_path}/missing").documents(None))
        name = fineweb(tmp_path / "fineweb", ["a"] * 8)
        with pytest.raises(DataError, match=r"`--text-field` must be a column of hub:.*\(text, id, dump.*got 'body'"):
            list(open_one(name, text_field="body").documents(None))

    def test_folder_in_order_of_paths(self, tmp_path: Path) -> None:
        (tmp_path / "sub").mkdir()
        (tmp_path / ".hidden").mkdir()
        for name in ("b.txt", "a.txt", "sub/c.py", ".hidden/d.txt", "notes.md"):
            (tmp_path / name).write_text(name)
        (tmp_path / "picture.png").write_bytes(b"\x89PNG\0")

        def documents() -> list[Any]:
            found = find([str(tmp_path)], PrepareOptions(), Path("/nowhere"))
            return [document for source in found for document in source.documents(None)]

        assert documents() == ["a.txt", "b.txt", "notes.md", "sub/c.py"]
        (tmp_path / "c.jsonl").write_bytes(jsonl(["c"]))  # in a folder with records, only .txt is text
        assert documents() == ["a.txt", "b.txt", "c"]

    @pytest.mark.parametrize("name", ["a.md", "a.py", "a.csv", "a.tex", "a", "a.txt", "a.md.gz", "a.xz"])
    def test_text_files_by_content(self, tmp_path: Path, name: str) -> None:
        (tmp_path / name).write_bytes(COMPRESS.get(Path(name).suffix, bytes)("größer".encode()))
        assert read(tmp_path / name) == ["größer"]


class TestUnusualText:
    @pytest.mark.parametrize("suffix", ["", ".xz"])
    def test_not_utf8(self, tmp_path: Path, suffix: str) -> None:
        data = "é" * 600_000 + "caf"
        path = tmp_path / f"a.txt{suffix}"
        path.write_bytes(COMPRESS[suffix](data.encode() + b"\xe9 latin"))
        with pytest.raises(
            DataError, match=rf"a\.txt{suffix} is not UTF-8: .*0xe9.* at byte 1200003 .*--errors replace"
        ):
            read(path)
        assert read(path, errors="replace") == [data + "\ufffd latin"]

    def test_separator_matches_crlf(self, tmp_path: Path) -> None:
        (tmp_path / "a.txt").write_bytes(b"a\r\nb\r\n\r\nc\n\nd\r\n\ne")
        assert read(tmp_path / "a.txt", separator="\n\n") == ["a\r\nb", "c", "d", "e"]

    def test_separator_escapes(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        (tmp_path / "a.txt").write_bytes(b"a\n\nb\\nc")
        command = ["data", "prepare", str(tmp_path / "a.txt"), "--tokenizer", "bytes", "--validation-fraction", "0"]
        for place, (separator, count) in enumerate({r"\n\n": 2, r"\\n": 2, r"\x0a": 2, r"\u000A": 2, r"\d": 1}.items()):
            output = str(tmp_path / str(place))
            assert main([*command, "--separator", separator, "--output", output]) == 0
            summary = capsys.readouterr().out
            assert f"text         {count} document" in summary
            again = shlex.split(summary.splitlines()[-1].removeprefix("made by"))
            assert main(again[1:]) == 0
            assert capsys.readouterr().out == summary

    def test_not_utf8_after_a_separator(self, tmp_path: Path) -> None:
        (tmp_path / "a.txt").write_bytes(b"one|two|t\xffree")
        with pytest.raises(DataError, match="at byte 9 "):
            read(tmp_path / "a.txt", separator="|")

    def test_byte_order_mark_is_removed(self, tmp_path: Path) -> None:
        (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfab\xff")
        with pytest.raises(DataError, match="at byte 5 "):
            read(tmp_path / "a.txt")
        (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfab")
        assert read(tmp_path / "a.txt") == ["ab"]

    def test_json(self, tmp_path: Path) -> None:
        path = tmp_path / "a.jsonl"
        path.write_text('{"text": "a"}\n\n{"text": null}\n{"text": "a\\ud83d\\ude00"}')
        assert read(path) == ["a", "", "a😀"]
        path.write_text('{"text": "a"}\n{"text": \n')
        with pytest.raises(DataError, match=r"line 2 of .*a\.jsonl is not JSON"):
            read(path)
        path.write_text('{"text": 3}\n')
        with pytest.raises(DataError, match=r"`--text-field` .*line 1 .*of type int"):
            read(path)
        path.write_text('{"text": "a\\uD83Db"}\n')
        with pytest.raises(DataError, match=r"line 1 .*lone surrogate, \\ud83d"):
            read(path)
        assert read(path, errors="replace") == ["a\ufffdb"]

    @pytest.mark.parametrize("suffix", [".xz", ".gz", ".zst"])
    def test_truncated(self, tmp_path: Path, suffix: str) -> None:
        rng = np.random.default_rng(0)
        data = COMPRESS[suffix](jsonl([rng.bytes(3000).hex()] * 20))
        path = tmp_path / f"a.jsonl{suffix}"
        for size in (len(data) - 1, len(data) // 2):
            path.write_bytes(data[:size])
            with pytest.raises(DataError, match=rf"a\.jsonl{suffix} is truncated or damaged"):
                read(path)

    def test_several_zstandard_frames(self, tmp_path: Path) -> None:
        path = tmp_path / "a.jsonl.zst"
        compress = zstandard.ZstdCompressor().compress
        path.write_bytes(b"".join(compress(jsonl([document])) for document in DOCUMENTS))
        assert read(path) == DOCUMENTS

    def test_damaged_parquet_file(self, tmp_path: Path) -> None:
        path = tmp_path / "a.parquet"
        parquet.write_table(pa.table({"text": ["a"] * 100}), path)
        with pytest.raises(DataError, match=r"`--text-field` must be a column of .*\(text\), got 'body'"):
            read(path, text_field="body")
        path.write_bytes(path.read_bytes()[:-10])
        with pytest.raises(DataError, match="is truncated or damaged"):
            read(path)


class TestTokenFiles:
    STREAM = (7, 8, 256, 9, 256, 256, 1, 2, 3)

    def read(self, path: Path, **options: Any) -> list[list[int]]:
        """The documents, also checked when resumed after each of them."""
        source = open_one(path, **options)
        assert isinstance(source, TokenFile)
        source.bind(256, 257)
        whole = [document.tolist() for document in source.documents(None)]
        for stop in range(1, len(whole)):
            documents = source.documents(None)
            before = [next(documents).tolist() for _ in range(stop)]
            after = [document.tolist() for document in source.documents(source.position())]
            assert before + after == whole
        return whole

    @pytest.mark.parametrize("dtype", ["uint16", "uint32"])
    @pytest.mark.parametrize("kind", ["npy", "raw", "llm.c"])
    @pytest.mark.parametrize("first", [(), (256,)])
    def test_documents(self, tmp_path: Path, dtype: str, kind: str, first: tuple[int, ...]) -> None:
        stream = np.array([*first, *self.STREAM], dtype)
        path = tmp_path / ("a.npy" if kind == "npy" else "a.bin")
        if kind == "npy":
            np.save(path, stream)
        else:
            header = np.zeros(256, np.int32)
            header[:3] = (20240520, 1, len(stream)) if dtype == "uint16" else (20240801, 7, len(stream))
            path.write_bytes((header.tobytes() if kind == "llm.c" else b"") + stream.tobytes())
        assert self.read(path, token_dtype=dtype) == [[7, 8], [9], [], [1, 2, 3]]

    def test_prepares(self, tmp_path: Path) -> None:
        np.save(tmp_path / "a.npy", np.array(self.STREAM, np.uint16))
        bytes_tokenizer().save(str(tmp_path / "tokenizer.json"))
        options: dict[str, Any] = {"tokenizer": str(tmp_path / "tokenizer.json"), "end_of_document": END}
        index = prepare([tmp_path / "a.npy"], tmp_path / "out", validation_fraction=0, workers=1, **options)
        data = TokenDataset.open(tmp_path / "out", "train")
        assert data.tokens(0, data.total_tokens).tolist() == [7, 8, 256, 9, 256, 1, 2, 3, 256]
        assert index.counts["empty"] == 1

    def test_errors(self, tmp_path: Path) -> None:
        np.save(tmp_path / "a.npy", np.array([1, 2, 300], np.uint16))
        with pytest.raises(DataError, match=r"`--tokenizer` must be the tokenizer of .*a\.npy .*got id 300 at token 2"):
            self.read(tmp_path / "a.npy")
        np.save(tmp_path / "b.npy", np.zeros(3, np.int64))
        with pytest.raises(DataError, match=r"1-D arrays of uint16 or uint32, got .*b\.npy: int64"):
            self.read(tmp_path / "b.npy")
        (tmp_path / "c.npy").write_bytes(b"nothing")
        with pytest.raises(DataError, match=r"c\.npy is not a \.npy file"):
            self.read(tmp_path / "c.npy")
        (tmp_path / "d.bin").write_bytes(b"abc")
        with pytest.raises(DataError, match=r"`--token-dtype` must be the dtype of .*3 bytes, got uint16"):
            self.read(tmp_path / "d.bin")
        header = np.zeros(256, np.int32)
        header[:3] = (20240520, 1, 5)
        (tmp_path / "e.bin").write_bytes(header.tobytes() + bytes(8))
        with pytest.raises(DataError, match="header says 5 tokens, 1034 bytes, but it has 1032"):
            self.read(tmp_path / "e.bin")


@pytest.mark.slow
def test_document_of_100_megabytes(tmp_path: Path) -> None:
    """Memory may grow by at most ten times the text, in one process; the tokens are those of its lines."""
    from tokenizers import Tokenizer

    line = "The quick brown fox's 1,234 jumps: über die  faule Katze.\n"
    with (tmp_path / "a.txt").open("w") as file:
        for number in range(100_000_000 // len(line.encode())):
            file.write(line if number % 2 else line.upper())
    size = (tmp_path / "a.txt").stat().st_size
    assert size > 99_000_000
    (tmp_path / "small.txt").write_text((line + line.upper()) * 100)
    prepare([tmp_path / "small.txt"], tmp_path / "small", tokenizer="bpe", vocabulary_size=300, validation_fraction=0)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    options: dict[str, Any] = {"tokenizer": str(tmp_path / "small"), "shard_tokens": 10_000_000, "workers": 1}
    prepare([tmp_path / "a.txt"], tmp_path / "out", validation_fraction=0, **options)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
    assert grown < 10 * size
    data = TokenDataset.open(tmp_path / "out", "train")
    assert data.total_documents == 1
    assert len(data.shards) > 2
    tokenizer = Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json"))
    pair = tokenizer.encode(line.upper() + line, add_special_tokens=False).ids
    count = (data.total_tokens - 1) // len(pair)
    whole = data.tokens(0, count * len(pair)).reshape(count, len(pair))
    assert (whole == np.array(pair)).all()
