"""``prepare``: complete and disjoint splits, tokenizers, error messages, damaged folders."""

from __future__ import annotations

import itertools
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from commands import refused_in_process
from data_files import write_jsonl
from hypothesis import given, settings
from hypothesis import strategies as st
from mutations import state_of

from softplus_attention.cli import main
from softplus_attention.data import DataError, TokenDataset, builtin_text, prepare, verify
from softplus_attention.data.index import SPLITS
from softplus_attention.data.shards import is_validation


def read_texts(folder: Path, split: str) -> list[str]:
    """The documents of a split that was prepared as bytes."""
    data = TokenDataset.open(folder, split)
    documents = [data.document(number) for number in range(data.total_documents)]
    assert all(document[-1] == data.end_of_document for document in documents)
    return [document[:-1].astype(np.uint8).tobytes().decode() for document in documents]


DOCUMENTS = st.lists(
    st.one_of(st.text(max_size=30), st.sampled_from(["", " \n", "twice", "a b"])), min_size=1, max_size=30
)


class TestSplits:
    @settings(max_examples=25)
    @given(
        documents=DOCUMENTS,
        seed=st.integers(0, 3),
        fraction=st.sampled_from([0.0, 0.3, 0.5, 1.0]),
        shard=st.integers(1, 60),
        piece=st.integers(1, 50),
    )
    def test_every_document_is_in_one_split(
        self,
        tmp_path_factory: pytest.TempPathFactory,
        documents: list[str],
        seed: int,
        fraction: float,
        shard: int,
        piece: int,
    ) -> None:
        folder = tmp_path_factory.mktemp("data")
        source = write_jsonl(folder / "a.jsonl", documents)
        # CRLF becomes LF. A single document is split at its end, which TestSingleDocument covers.
        kept = [document.replace("\r\n", "\n") for document in documents if document.strip()]
        fraction = round(fraction) if len(kept) == 1 else fraction
        options = {"tokenizer": "bytes", "seed": seed, "validation_fraction": fraction, "shard_tokens": shard}
        if not kept:
            with pytest.raises(DataError, match="no text in"):
                prepare([source], folder / "out", workers=1, **options)
            return
        index = prepare([source], folder / "out", workers=1, piece_characters=piece, **options)
        held_out = [is_validation(document.encode(), seed, fraction) for document in kept]
        expected = {
            "train": [document for document, held in zip(kept, held_out, strict=True) if not held],
            "validation": [document for document, held in zip(kept, held_out, strict=True) if held],
        }
        for split in SPLITS:
            data = TokenDataset.open(folder / "out", split)
            assert read_texts(folder / "out", split) == expected[split]
            stream = [token for text in expected[split] for token in (*text.encode(), 256)]
            assert data.tokens(0, data.total_tokens).tolist() == stream
            assert np.concatenate([*data.shards, []]).tolist() == stream
            assert all(len(part) == shard for part in data.shards[:-1])
        assert not set(expected["train"]) & set(expected["validation"])
        assert index.counts["documents"] == len(kept)
        assert index.counts["empty"] == len(documents) - len(kept)
        assert index.counts["crlf"] == sum(document.count("\r\n") for document in documents if document.strip())
        assert index.counts["bytes"] == sum(len(document.encode()) for document in kept)
        verify(folder / "out")

    def test_independent_of_workers_and_pieces(self, tmp_path: Path) -> None:
        rng = np.random.default_rng(0)
        words = builtin_text()[1][3].split()
        documents = [" ".join(rng.choice(words, rng.integers(0, 200))) for _ in range(120)]
        source = write_jsonl(tmp_path / "a.jsonl", documents)
        options = {"tokenizer": "bpe", "vocabulary_size": 500, "shard_tokens": 4_000, "validation_fraction": 0.2}
        prepare([source], tmp_path / "one", workers=1, **options)
        prepare([source], tmp_path / "two", workers=2, piece_characters=3_000, **options)
        prepare([source], tmp_path / "three", workers=3, piece_characters=1_000, **options)
        assert state_of(tmp_path / "one") == state_of(tmp_path / "two") == state_of(tmp_path / "three")

    def test_independent_of_the_tokenizer(self, tmp_path: Path) -> None:
        documents = [f"document {number}" for number in range(200)]
        source = write_jsonl(tmp_path / "a.jsonl", documents)
        for name in ("bytes", "bpe"):
            size = 300 if name == "bpe" else None
            options = {"tokenizer": name, "vocabulary_size": size, "validation_fraction": 0.25}
            index = prepare([source], tmp_path / name, workers=1, **options)
            assert 25 < index.splits["validation"].documents < 75
        counts = [TokenDataset.open(tmp_path / name, "validation").total_documents for name in ("bytes", "bpe")]
        assert counts[0] == counts[1]

    def test_document_longer_than_shards(self, tmp_path: Path) -> None:
        text = builtin_text()[1][3]
        (tmp_path / "a.txt").write_text(text)
        options = {"tokenizer": "bpe", "vocabulary_size": 400, "validation_fraction": 0}
        prepare([tmp_path / "a.txt"], tmp_path / "out", shard_tokens=9_999, workers=1, **options)
        data = TokenDataset.open(tmp_path / "out", "train")
        assert len(data.shards) > 4
        assert data.total_documents == 1
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json"))
        assert data.document(0)[:-1].tolist() == tokenizer.encode(text).ids

    def test_limit(self, tmp_path: Path) -> None:
        source = write_jsonl(tmp_path / "a.jsonl", [f"d{number}" for number in range(50)])
        options = {"tokenizer": "bytes", "validation_fraction": 0, "workers": 1}
        prepare([source], tmp_path / "out", limit=7, piece_characters=5, **options)
        assert read_texts(tmp_path / "out", "train") == [f"d{number}" for number in range(7)]

    def test_ids_beyond_16_bits(self, tmp_path: Path) -> None:
        from tokenizers import Tokenizer, models, pre_tokenizers

        vocabulary = {f"w{number}": number for number in range(70_000)}
        tokenizer = Tokenizer(models.WordLevel({**vocabulary, "<eos>": 70_000, "?": 70_001}, unk_token="?"))
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        tokenizer.save(str(tmp_path / "wide.json"))
        source = write_jsonl(tmp_path / "a.jsonl", ["w1 w69999 w65536"])
        options = {"tokenizer": str(tmp_path / "wide.json"), "validation_fraction": 0, "workers": 1}
        index = prepare([source], tmp_path / "out", **options)
        assert index.dtype == np.uint32
        assert TokenDataset.open(tmp_path / "out", "train").document(0).tolist() == [1, 69_999, 65_536, 70_000]


class TestSingleDocument:
    """Is split near its end, at the end of a line, so that it has a validation split too."""

    @pytest.mark.parametrize("fraction", [0.005, 0.25, 0.0])
    def test_text(self, tmp_path: Path, capsys: pytest.CaptureFixture[str], fraction: float) -> None:
        text = builtin_text()[1][3].replace("\n", "\r\n")
        (tmp_path / "my book.md").write_text(text, newline="")
        command = ["data", "prepare", str(tmp_path / "my book.md"), "--output", str(tmp_path / "out"), "--workers", "1"]
        assert main([*command, "--tokenizer", "bytes", "--validation-fraction", str(fraction)]) == 0
        output = capsys.readouterr().out
        parts = [read_texts(tmp_path / "out", split) for split in SPLITS]
        assert "".join(itertools.chain(*parts)) == text.replace("\r\n", "\n")
        assert f"{text.count(chr(13)):,} CRLF became LF" in output
        assert "1 document," in output
        if fraction == 0:
            assert parts[1] == []
            return
        (train,), (validation,) = parts
        expected = 0.1 if fraction == 0.005 else fraction
        assert len(validation) == pytest.approx(expected * len(train + validation), rel=0.01)
        assert train.endswith("\n")
        assert f"a single document: its last {expected:.0%} are the validation split" in output

    def test_bpe_is_not_trained_on_the_end(self, tmp_path: Path) -> None:
        (tmp_path / "a.txt").write_text("ab " * 300 + "\n" + "zq" * 40)
        prepare([tmp_path / "a.txt"], tmp_path / "out", tokenizer="bpe", vocabulary_size=270, workers=1)
        learned = json.loads((tmp_path / "out" / "tokenizer.json").read_text())["model"]["merges"]
        assert learned
        assert not any("q" in part for merge in learned for part in merge)

    def test_token_files_and_short_documents(self, tmp_path: Path) -> None:
        prepare([write_jsonl(tmp_path / "a.jsonl", [" ", "x"])], tmp_path / "short", tokenizer="bytes", workers=1)
        assert [read_texts(tmp_path / "short", split) for split in SPLITS] == [["x"], []]
        np.save(tmp_path / "a.npy", np.arange(100, dtype=np.uint16))
        prepare([tmp_path / "a.npy"], tmp_path / "out", tokenizer=str(tmp_path / "short"), workers=1)
        found = [TokenDataset.open(tmp_path / "out", split).document(0).tolist() for split in SPLITS]
        assert found == [[*range(90), 256], [*range(90, 100), 256]]


class TestTokenizers:
    def test_gpt2_is_built_in(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """The default needs no network; its ids are those documented by OpenAI and transformers."""
        import huggingface_hub.constants

        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
        index = prepare([write_jsonl(tmp_path / "a.jsonl", ["Hello world"] * 2)], tmp_path / "out", workers=1)
        assert (index.vocabulary_size, index.end_of_document) == (50_257, 50_256)
        assert TokenDataset.open(tmp_path / "out", "train").document(0).tolist() == [15496, 995, 50_256]
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
        for text in ("Replace me by any text you'd like.", "naïve 日本 😀\t\n\n  x"):
            assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
        ids = [3041, 5372, 502, 416, 597, 2420, 345, 1549, 588, 13]
        assert tokenizer("Replace me by any text you'd like.")["input_ids"] == ids

    @pytest.mark.parametrize("name", ["bytes", "bpe"])
    def test_transformers_loads_the_tokenizer(self, tmp_path: Path, name: str) -> None:
        from transformers import AutoTokenizer, PreTrainedTokenizerFast

        text = "Héllo  wörld\n\n日本 😀 it's \0 <|x|>"
        source = write_jsonl(tmp_path / "a.jsonl", [text, "more text " * 50])
        size = 300 if name == "bpe" else None
        options = {"tokenizer": name, "vocabulary_size": size, "validation_fraction": 0, "workers": 1}
        index = prepare([source], tmp_path / "out", **options)
        ids = TokenDataset.open(tmp_path / "out", "train").document(0).tolist()
        for kind in (AutoTokenizer, PreTrainedTokenizerFast):
            tokenizer = kind.from_pretrained(tmp_path / "out")
            assert tokenizer(text)["input_ids"] == ids[:-1]
            assert tokenizer.decode(ids[:-1]) == text
            assert tokenizer.eos_token_id == ids[-1] == index.end_of_document
            assert len(tokenizer) == index.vocabulary_size
        if name == "bytes":
            assert ids == [*text.encode(), 256]

    def test_tokenizer_file_and_prepared_folder(self, tmp_path: Path) -> None:
        source = write_jsonl(tmp_path / "a.jsonl", ["some words to learn from"] * 3)
        prepare([source], tmp_path / "one", tokenizer="bpe", vocabulary_size=270, validation_fraction=0, workers=1)
        for number, name in enumerate((tmp_path / "one", tmp_path / "one" / "tokenizer.json")):
            again = tmp_path / f"again{number}"
            prepare([source], again, tokenizer=str(name), validation_fraction=0, workers=1)
            assert state_of(again)["train-00000.npy"] == state_of(tmp_path / "one")["train-00000.npy"]

    def test_special_tokens_are_not_added(self, tmp_path: Path) -> None:
        """As by RoBERTa and T5, whose `</s>` at the end of a prompt would end the document."""
        from tokenizers import Tokenizer, processors
        from transformers import AutoTokenizer

        text = "some words to learn from"
        source = write_jsonl(tmp_path / "a.jsonl", [text] * 3)
        prepare([source], tmp_path / "one", tokenizer="bpe", vocabulary_size=270, validation_fraction=0, workers=1)
        adding = Tokenizer.from_file(str(tmp_path / "one" / "tokenizer.json"))
        adding.add_special_tokens(["<s>", "</s>"])
        ends = [(word, adding.token_to_id(word)) for word in ("<s>", "</s>")]
        adding.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=ends)
        adding.save(str(tmp_path / "adding.json"))
        options = {"tokenizer": str(tmp_path / "adding.json"), "end_of_document": "</s>", "validation_fraction": 0}
        prepare([source], tmp_path / "two", workers=1, **options)
        document = TokenDataset.open(tmp_path / "two", "train").document(0).tolist()
        assert [*AutoTokenizer.from_pretrained(tmp_path / "two")(text)["input_ids"], ends[1][1]] == document

    def test_changed_tokenizer_folder(self, tmp_path: Path) -> None:
        source = write_jsonl(tmp_path / "a.jsonl", ["some words to learn from"] * 3)
        for size in (270, 280):
            options = {"tokenizer": "bpe", "vocabulary_size": size, "validation_fraction": 0, "workers": 1}
            prepare([source], tmp_path / str(size), **options)
        by_folder = {"tokenizer": str(tmp_path / "270"), "validation_fraction": 0, "workers": 1}
        prepare([source], tmp_path / "out", **by_folder)
        prepare([source], tmp_path / "out", **by_folder)
        shutil.copy(tmp_path / "280" / "tokenizer.json", tmp_path / "270")
        with pytest.raises(DataError, match=r"the file .*270 has changed"):
            prepare([source], tmp_path / "out", **by_folder)

    def test_hub_name(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """From the Hub's cache, so that no network is needed; an unknown name is an error with the reason."""
        import huggingface_hub.constants

        from softplus_attention.data.tokenizer import bytes_tokenizer

        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
        revision = "0123456789abcdef0123456789abcdef01234567"
        cached = tmp_path / "hub" / "models--known"
        (cached / "snapshots" / revision).mkdir(parents=True)
        (cached / "refs").mkdir()
        (cached / "refs" / "main").write_text(revision)
        bytes_tokenizer().save(str(cached / "snapshots" / revision / "tokenizer.json"))
        source = write_jsonl(tmp_path / "a.jsonl", ["abc"])
        prepare([source], tmp_path / "out", tokenizer="known", validation_fraction=0, workers=1)
        assert TokenDataset.open(tmp_path / "out", "train").document(0).tolist() == [97, 98, 99, 256]
        with pytest.raises(DataError, match=r"tokenizer 'no-such-one' is not on the Hugging Face Hub, or the Hub"):
            prepare([source], tmp_path / "other", tokenizer="no-such-one", workers=1)


class TestErrors:
    """Each names the argument, the expected and the actual value; the folder is not changed."""

    def refused(self, *arguments: str | Path) -> str:
        return refused_in_process("data", "prepare", "--workers", 1, *arguments)

    @pytest.fixture
    def source(self, tmp_path: Path) -> Path:
        return write_jsonl(tmp_path / "a.jsonl", ["one", "two"])

    @pytest.mark.parametrize(
        ("arguments", "expected"),
        [
            (["--tokenizer", "missing.json"], "missing.json: no such file. --tokenizer takes gpt2, bytes, bpe"),
            (["--vocabulary-size", "300"], "`--vocabulary-size` must be given only with --tokenizer bpe, got 300"),
            (["--tokenizer", "bpe", "--vocabulary-size", "20"], "`--vocabulary-size` must be at least 257.*got 20"),
            (["--tokenizer", "bytes", "--validation-fraction", "2"], "`--validation-fraction` must be from 0 to 1"),
            (["--tokenizer", "bytes", "--seed", "-1"], "`--seed` must be from 0"),
            (["--tokenizer", "bytes", "--shard-tokens", "0"], "`--shard-tokens` must be at least 1, got 0"),
            (["--tokenizer", "bytes", "--limit", "0"], "`--limit` must be at least 1, got 0"),
            (["--tokenizer", "bytes", "--text-field", "body"], "`--text-field`.*'body', and line 1 of .*a.jsonl.*text"),
            (["--tokenizer", "bytes", "--end-of-document", "x"], "`--end-of-document` must be left out"),
        ],
    )
    def test_options(
        self,
        source: Path,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        arguments: list[str],
        expected: str,
    ) -> None:
        monkeypatch.chdir(tmp_path)
        message = self.refused(source, "--output", tmp_path / "out", *arguments)
        assert re.search(expected, message), message

    def test_sources(self, source: Path, tmp_path: Path) -> None:
        out = ["--output", tmp_path / "out", "--tokenizer", "bytes"]
        (tmp_path / "notes.md").write_bytes(b"x\0")
        (tmp_path / "wide.md").write_text("x", encoding="utf-16")
        (tmp_path / "a.json").write_text("[]")
        (tmp_path / "empty").mkdir()
        (tmp_path / "empty.jsonl").write_text("")
        np.save(tmp_path / "t.npy", np.arange(3, dtype=np.uint16))
        assert self.refused("nowhere.txt", *out) == "softplus-attention: nowhere.txt: no such file or folder"
        assert "on the Hugging Face Hub is hub:nowhere)" in self.refused("nowhere", *out)
        for name, reason in (("notes.md", "a binary file"), ("wide.md", "UTF-16, convert it"), ("a.json", "JSON, not")):
            assert f"{tmp_path / name}: {reason}" in self.refused(tmp_path / name, *out)
        assert f"{tmp_path}/empty: a folder without text. SOURCE" in self.refused(tmp_path / "empty", *out)
        assert "/dev/null: not a regular file. SOURCE takes" in self.refused("/dev/null", *out)
        assert "no text in" in self.refused(tmp_path / "empty.jsonl", *out)
        assert "either text or token files" in self.refused(source, tmp_path / "t.npy", *out)
        assert "must be different files" in self.refused(source, source, *out)
        assert not (tmp_path / "out").exists()
        inside = ["--output", tmp_path / "out", "--tokenizer", "bytes"]
        assert "`--output` must be outside the source folder" in self.refused(tmp_path, *inside)

    def test_foreign_output_folder(self, source: Path, tmp_path: Path) -> None:
        (tmp_path / "full").mkdir()
        (tmp_path / "full" / "precious").write_text("x")
        message = self.refused(source, "--output", tmp_path / "full", "--tokenizer", "bytes")
        assert "`--output` must be a new or empty folder" in message
        assert "contains something else" in message
        assert [path.name for path in (tmp_path / "full").iterdir()] == ["precious"]
        assert "`--output` must be a folder" in self.refused(source, "--output", source)

    def test_finished_folder(self, source: Path, tmp_path: Path) -> None:
        arguments = ["data", "prepare", str(source), "--output", str(tmp_path / "out"), "--tokenizer", "bytes"]
        assert main(arguments) == 0
        before = state_of(tmp_path / "out")
        assert main(arguments) == 0
        message = self.refused(*arguments[2:], "--seed", "3")
        assert "made with other options: --seed was 0, is 3" in message
        source.write_text(source.read_text() + '{"text": "more"}\n')
        assert "the files of SOURCE were" in self.refused(*arguments[2:])
        assert state_of(tmp_path / "out") == before


class TestDamage:
    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        source = write_jsonl(tmp_path / "a.jsonl", [f"document {number}" for number in range(40)])
        options = {"tokenizer": "bytes", "validation_fraction": 0.3, "shard_tokens": 100}
        prepare([source], tmp_path / "out", workers=1, **options)
        return tmp_path / "out"

    def test_intact(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["data", "verify", str(folder)]) == 0
        assert "all as written" in capsys.readouterr().out
        assert main(["data", "info", str(folder)]) == 0
        text = capsys.readouterr().out
        assert "40 documents" in text
        assert "data prepare" in text

    @pytest.mark.parametrize("name", ["train-00001.npy", "validation-documents.npy"])
    def test_missing(self, folder: Path, name: str) -> None:
        (folder / name).unlink()
        with pytest.raises(DataError, match=rf"{name} is missing: restore it from a copy, or delete the folder and"):
            TokenDataset.open(folder, name.partition("-")[0])

    def test_truncated(self, folder: Path) -> None:
        path = folder / "train-00000.npy"
        path.write_bytes(path.read_bytes()[:-1])
        with pytest.raises(DataError, match=r"has 327 bytes instead of 328: restore it .*data prepare"):
            TokenDataset.open(folder, "train")

    def test_invalid_header(self, folder: Path) -> None:
        path = folder / "train-00000.npy"
        path.write_bytes(b"x" * path.stat().st_size)
        with pytest.raises(DataError, match=r"train-00000.npy has changed since it was written .*: restore it from a"):
            TokenDataset.open(folder, "train")

    @pytest.mark.parametrize("name", ["train-00000.npy", "train-documents.npy", "tokenizer.json"])
    def test_one_bit_flipped(self, folder: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
        data = bytearray((folder / name).read_bytes())
        data[len(data) // 2] ^= 4
        (folder / name).write_bytes(data)
        assert main(["data", "verify", str(folder)]) == 2
        message = capsys.readouterr().err
        assert f"{name} has changed since it was written (its SHA-256 differs): restore it from a copy" in message

    def test_index(self, folder: Path) -> None:
        whole = json.loads((folder / "index.json").read_text())
        for damaged in ("{", "[]", json.dumps({**whole, "splits": 3}), json.dumps({"format": 1})):
            (folder / "index.json").write_text(damaged)
            with pytest.raises(DataError, match=r"index\.json is damaged"):
                TokenDataset.open(folder, "train")
        (folder / "index.json").write_text(json.dumps({**whole, "version": 99}))
        with pytest.raises(DataError, match=r"`directory` must be of format .*version 1, got .*version 99"):
            TokenDataset.open(folder, "train")
        (folder / "index.json").unlink()
        with pytest.raises(DataError, match=r"out: no index.json in it\. `directory` takes a folder written by"):
            TokenDataset.open(folder, "train")
