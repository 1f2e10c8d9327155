"""Reading prepared folders: tokens, documents, packed sequences, the built-in text, and light imports."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from softplus_attention.data import PackedTokens, TokenDataset, builtin_text, long_documents, prepare

END = 256


def prepared(folder: Path, lengths: list[int], shard_tokens: int = 50) -> Path:
    """Documents of these lengths (including the end), with tokens unique to document and position."""
    stream: list[int] = []
    for number, length in enumerate(lengths):
        stream += [*(300 + 200 * number + place for place in range(length - 1)), END]
    vocabulary = {f"t{token}": token for token in range(max(stream) + 1)}
    vocabulary["<eos>"] = vocabulary.pop(f"t{END}")
    from tokenizers import Tokenizer, models

    Tokenizer(models.WordLevel(vocabulary, unk_token="t0")).save(str(folder / "words.json"))
    np.save(folder / "a.npy", np.array(stream, np.uint32))
    options: dict[str, Any] = {"tokenizer": str(folder / "words.json"), "validation_fraction": 0}
    prepare([folder / "a.npy"], folder / "out", shard_tokens=shard_tokens, workers=1, **options)
    return folder / "out"


def documents_of(tokens: list[int]) -> list[list[int]]:
    parts: list[list[int]] = [[]]
    for token in tokens:
        parts[-1].append(token)
        if token == END:
            parts.append([])
    assert not parts[-1]
    return parts[:-1]


class TestTokenDataset:
    @settings(max_examples=15)
    @given(lengths=st.lists(st.integers(2, 60), min_size=1, max_size=12), shard=st.integers(1, 70), data=st.data())
    def test_slices(
        self, tmp_path_factory: pytest.TempPathFactory, lengths: list[int], shard: int, data: st.DataObject
    ) -> None:
        folder = prepared(tmp_path_factory.mktemp("read"), lengths, shard)
        tokens = TokenDataset.open(folder, "train")
        whole = [token for part in tokens.shards for token in part.tolist()]
        assert tokens.total_tokens == len(whole) == sum(lengths)
        start = data.draw(st.integers(0, len(whole)))
        stop = data.draw(st.integers(start, len(whole)))
        assert tokens.tokens(start, stop).tolist() == whole[start:stop]
        assert [tokens.document(n).tolist() for n in range(tokens.total_documents)] == documents_of(whole)
        assert tokens.lengths().tolist() == lengths
        minimum = data.draw(st.integers(0, 60))
        expected = [document for document in documents_of(whole) if len(document) >= minimum]
        assert [document.tolist() for document in long_documents(folder, "train", minimum)] == expected

    def test_bounds(self, tmp_path: Path) -> None:
        tokens = TokenDataset.open(prepared(tmp_path, [5, 6]), "train")
        for start, stop in ((-1, 2), (0, 12), (5, 4)):
            with pytest.raises(ValueError, match=r"`start, stop` must be 0 <= start <= stop <= 11, got"):
                tokens.tokens(start, stop)
        with pytest.raises(IndexError, match="from 0 to 1, got 2"):
            tokens.document(2)
        with pytest.raises(ValueError, match="`split` must be one of train, validation, got 'test'"):
            TokenDataset.open(tmp_path / "out", "test")
        assert TokenDataset.open(tmp_path / "out", "validation").total_documents == 0
        assert list(long_documents(tmp_path / "out", "validation", 0)) == []

    def test_pickles_as_its_path(self, tmp_path: Path) -> None:
        tokens = TokenDataset.open(prepared(tmp_path, [100] * 90), "train")
        packed = pickle.dumps(tokens)
        assert len(packed) < 1000
        assert pickle.loads(packed).document(70).tolist() == tokens.document(70).tolist()


class TestPackedTokens:
    LENGTHS = (2, 30, 7, 55, 3, 3, 19, 41, 2, 28)

    @settings(max_examples=15)
    @given(
        lengths=st.lists(st.integers(2, 40), min_size=1, max_size=15),
        length=st.integers(2, 30),
        seed=st.integers(0, 5),
        epoch=st.integers(0, 3),
    )
    def test_every_token_once(
        self, tmp_path_factory: pytest.TempPathFactory, lengths: list[int], length: int, seed: int, epoch: int
    ) -> None:
        folder = prepared(tmp_path_factory.mktemp("packed"), lengths)
        if sum(lengths) < length:
            with pytest.raises(ValueError, match="`sequence_length` must be at most the tokens of the train split"):
                PackedTokens(folder, "train", length)
            return
        packed = PackedTokens(folder, "train", length, seed=seed, document_mask=True)
        packed.set_epoch(epoch)
        assert len(packed) == sum(lengths) // length
        rows = [packed[number] for number in range(len(packed))]
        stream: list[int] = []
        for number in np.argsort(packed.sequences).tolist():
            stream += rows[number]["input_ids"].tolist()
        rest = sum(lengths) - len(stream)
        assert 0 <= rest < length
        source = TokenDataset.open(folder, "train")
        shuffled = [token for document in packed.documents.tolist() for token in source.document(document).tolist()]
        assert stream == shuffled[: len(stream)]
        assert sorted(packed.documents.tolist()) == list(range(len(lengths)))

    def test_document_mask(self, tmp_path: Path) -> None:
        folder = prepared(tmp_path, list(self.LENGTHS))
        packed = PackedTokens(folder, "train", 16, seed=3, document_mask=True)
        for row in packed:  # type: ignore[attr-defined]
            ids, labels, positions = (row[name].tolist() for name in ("input_ids", "labels", "position_ids"))
            assert positions[0] == 0
            for place in range(16):
                first = (ids[place] - 300) % 200 == 0 if ids[place] != END else False
                assert labels[place] == (-100 if first else ids[place])
                if place:
                    assert positions[place] == (0 if ids[place - 1] == END else positions[place - 1] + 1)
        plain = PackedTokens(folder, "train", 16, seed=3)
        for number in range(len(plain)):
            assert plain[number].keys() == {"input_ids", "labels"}
            assert plain[number]["input_ids"].equal(packed[number]["input_ids"])
            assert plain[number]["labels"].equal(plain[number]["input_ids"])
            assert plain[number]["labels"].data_ptr() != plain[number]["input_ids"].data_ptr()

    def test_order_depends_on_seed_and_epoch(self, tmp_path: Path) -> None:
        folder = prepared(tmp_path, list(self.LENGTHS))

        def order(seed: int, epoch: int) -> list[list[int]]:
            packed = PackedTokens(folder, "train", 8, seed=seed)
            packed.set_epoch(epoch)
            return [packed[number]["input_ids"].tolist() for number in range(len(packed))]

        assert order(1, 0) == order(1, 0)
        assert order(1, 2) == order(1, 2)
        assert len({json.dumps(order(seed, epoch)) for seed in (0, 1) for epoch in (0, 1)}) == 4

    def test_data_loaders(self, tmp_path: Path) -> None:
        packed = PackedTokens(prepared(tmp_path, list(self.LENGTHS)), "train", 16, seed=1, document_mask=True)
        alone = [packed[number]["input_ids"] for number in range(len(packed))]
        batches = list(DataLoader(packed, batch_size=2, num_workers=1))
        assert torch.cat([batch["input_ids"] for batch in batches]).equal(torch.stack(alone))
        assert batches[0]["position_ids"].shape == (2, 16)

    def test_errors(self, tmp_path: Path) -> None:
        folder = prepared(tmp_path, [10])
        with pytest.raises(ValueError, match="`sequence_length` must be an int >= 2, got 1"):
            PackedTokens(folder, "train", 1)
        with pytest.raises(ValueError, match="`seed` must be an int >= 0, got -1"):
            PackedTokens(folder, "train", 4, seed=-1)
        with pytest.raises(IndexError, match="a sequence from 0 to 1, got 2"):
            PackedTokens(folder, "train", 4)[2]

    def test_transformers_separates_documents(self, tmp_path: Path) -> None:
        """The loss of a packed row equals that of its documents one by one."""
        from transformers import LlamaConfig, LlamaForCausalLM

        folder = prepared(tmp_path, list(self.LENGTHS))
        size = TokenDataset.open(folder, "train").vocabulary_size
        torch.manual_seed(0)
        model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=size, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2
            )
        ).eval()
        packed = PackedTokens(folder, "train", 64, document_mask=True)
        row = next(row for row in packed if (row["position_ids"] == 0).sum() > 2)  # type: ignore[attr-defined]
        with torch.no_grad():
            loss = model(**{name: value[None] for name, value in row.items()}, use_cache=False).loss
            total, count = 0.0, 0
            for part in torch.tensor_split(row["input_ids"], (row["position_ids"] == 0).nonzero().flatten()[1:]):
                if len(part) > 1:
                    total += float(model(input_ids=part[None], labels=part[None]).loss) * (len(part) - 1)
                    count += len(part) - 1
        assert float(loss) == pytest.approx(total / count, rel=1e-5)


class TestBuiltinText:
    def test_works(self) -> None:
        train, validation = builtin_text()
        assert sum(map(len, train)) > 6_000_000
        assert len(validation) == 4
        assert all(len(text.encode()) >= 65_536 for text in validation)
        assert not set(train) & set(validation)
        for text in (*train, *validation):
            for boilerplate in ("gutenberg", "http", "copyright", "transcriber", "public domain"):
                assert boilerplate not in text.lower()

    def test_size_and_licence(self) -> None:
        import softplus_attention.data.builtin as builtin

        folder = Path(builtin.__file__).parent
        assert (folder / "text.jsonl.xz").stat().st_size < 3_000_000
        readme = (folder / "README.md").read_text()
        assert "public domain" in readme
        assert readme.count("| train |") + readme.count("| validation |") == sum(map(len, builtin_text()))


def test_reading_needs_torch_and_numpy_only(tmp_path: Path) -> None:
    folder = prepared(tmp_path, [20, 30])
    code = (
        "import sys\n"
        "for name in ('datasets', 'pyarrow', 'zstandard', 'tokenizers', 'transformers'): sys.modules[name] = None\n"
        "from softplus_attention.cli import data\n"
        "print([name for name in sys.modules if name.startswith('softplus_attention.data.')])\n"
        "from softplus_attention.data import PackedTokens, TokenDataset, builtin_text, long_documents, verify\n"
        "verify(sys.argv[1])\n"
        "print(len(PackedTokens(sys.argv[1], 'train', 10)), len(list(long_documents(sys.argv[1], 'train', 25))))"
    )
    result = subprocess.run([sys.executable, "-c", code, str(folder)], capture_output=True, text=True)
    assert result.stdout.splitlines() == ["['softplus_attention.data.options']", "5 1"], result.stderr
