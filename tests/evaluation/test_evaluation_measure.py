"""``evaluate lengths``: losses and control, result files, resuming, batches by memory, and texts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from evaluation_cases import open_saved, saved_model
from transformers import AutoModelForCausalLM

from softplus_attention.attentions.composed import MAX_WEIGHTS
from softplus_attention.data import prepare
from softplus_attention.evaluation import lengths, memory
from softplus_attention.evaluation.lengths import token_losses
from softplus_attention.evaluation.measures import measures
from softplus_attention.evaluation.measures.base import parse_lengths
from softplus_attention.evaluation.measures.lengths import csv_rows, measure_lengths, position_rows, table
from softplus_attention.evaluation.memory import TooLongError, in_batches, sequences_at_once
from softplus_attention.evaluation.texts import check_same_tokenizer, folder_documents, raw_texts, text_documents
from softplus_attention.huggingface.loading import load_tokenizer
from softplus_attention.utils.results import read, results_in, to_jsonable

TEXTS = ["The quick brown fox jumps over the lazy dog. " * 12, "0123456789" * 20, "too short"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return saved_model(tmp_path_factory.mktemp("models") / "lssar" / "model")


@pytest.fixture(scope="module")
def documents(folder):
    return text_documents(TEXTS, ["text"], load_tokenizer(str(folder)))


def text_rows():
    """The texts cut to rows of 64 bytes."""
    return torch.cat([torch.tensor(list(text.encode()))[: len(text) // 64 * 64].view(-1, 64) for text in TEXTS[:2]])


def transformers_loss(model, rows, labels=None) -> float:
    with torch.no_grad():
        return model(rows, labels=rows if labels is None else labels).loss.item()


class TestLengths:
    def test_against_transformers(self, folder, documents, tmp_path):
        found = open_saved(folder)
        result = measure_lengths(found, documents, [16, 32, 64], tmp_path)
        rows = text_rows()
        assert result["results"]["used"] == {"documents": 2, "sequences": 8 + 3, "longest": 64}
        assert result["results"]["documents"][0] == {"length": 16, "long_enough": 2}
        for entry in result["results"]["lengths"]:
            cut = rows.reshape(-1, entry["length"])
            assert entry["loss"] == pytest.approx(transformers_loss(found.model, cut), rel=1e-5)
            assert entry["sequences"] == len(cut)
            assert entry["times"] == entry["length"] / 16
            buckets = entry["positions"]
            weighted = sum((part["end"] - part["first"]) * part["loss"] for part in buckets)
            assert weighted / (entry["length"] - 1) == pytest.approx(entry["loss"], rel=1e-5)
        assert read(tmp_path / "lengths--lssar.json") == result
        assert result["complete"] is True
        assert result["model"]["power"] == 15

    @pytest.mark.parametrize(("share", "windows"), [(0.0, 1), (0.25, 2), (0.6, 4), (1.0, 7)])
    def test_control(self, folder, documents, tmp_path, share, windows):
        """The end of each sequence is scored with all 64 tokens and with windows of 16, of which the second half
        counts. A share of 1 leaves out only the first half of the first window."""
        found = open_saved(folder)
        result = measure_lengths(found, documents, [16, 64], tmp_path, control_share=share)
        entries = result["results"]["lengths"]
        assert entries[0]["control"] is None
        rows = text_rows()
        first = 64 - 8 * windows
        labels = rows.clone()
        labels[:, :first] = -100
        full, shorts = transformers_loss(found.model, rows, labels), []
        for begin in range(first - 8, 64 - 15, 8):
            window = rows[:, begin : begin + 16]
            shorts.append(transformers_loss(found.model, window, torch.where(torch.arange(16) >= 8, window, -100)))
        assert len(shorts) == windows
        short = sum(shorts) / windows
        control = entries[1]["control"]
        assert (control["window"], control["first"], control["targets"]) == (16, first, 11 * 8 * windows)
        assert control["full"] == pytest.approx(full, rel=1e-5)
        assert control["short"] == pytest.approx(short, rel=1e-5)
        assert control["gain"] == pytest.approx(control["short"] - control["full"], abs=1e-7)
        labels[:, :-8] = -100
        assert control["last"]["full"] == pytest.approx(transformers_loss(found.model, rows, labels), rel=1e-5)
        assert control["last"]["short"] == pytest.approx(shorts[-1], rel=1e-5)
        assert control["last"]["targets"] == 11 * 8

    def test_standard_errors_are_over_texts(self, folder, documents, tmp_path):
        """Losses are first averaged per text: 11 values at every length."""
        found = open_saved(folder)
        rows = text_rows()
        losses = token_losses(found.model, rows).double()
        short = token_losses(found.model, rows[:, -16:]).double()[:, -8:]
        entries = measure_lengths(found, documents, [16, 64], tmp_path, control_share=0)["results"]["lengths"]

        def error(by_text):
            return np.std(by_text.numpy(), ddof=1) / 11**0.5

        pieces = token_losses(found.model, rows.reshape(-1, 16)).double().mean(1).view(11, 4).mean(1)
        assert entries[0]["standard_error"] == pytest.approx(error(pieces), rel=1e-5)
        assert entries[0]["by_text"] == pytest.approx(pieces.tolist(), abs=1e-5)
        assert entries[1]["standard_error"] == pytest.approx(error(losses.mean(1)), rel=1e-5)
        gains = (short - losses[:, -8:]).mean(1)
        assert entries[1]["control"]["standard_error"] == pytest.approx(error(gains), rel=1e-4)
        assert entries[1]["control"]["by_text"] == pytest.approx(gains.tolist(), abs=1e-5)

    def test_nan_loss_at_one_length(self, folder, documents, tmp_path, monkeypatch):
        """It is null in the file, named in the table and missing in the chart."""
        found = open_saved(folder)
        forward = found.model.model.forward

        def forward_with_nan(*args, **kwargs):
            out = forward(*args, **kwargs)
            out.last_hidden_state[:, 40:] = torch.nan
            return out

        monkeypatch.setattr(found.model.model, "forward", forward_with_nan)
        result = measure_lengths(found, documents, [16, 64], tmp_path)
        entries = result["results"]["lengths"]
        assert entries[0]["loss"] > 0
        assert entries[1]["loss"] is None
        assert table([result]).count("not finite") == 2
        assert measures()["lengths"].blocks([result])[0].series[0].y == [entries[0]["loss"], None]

    def test_nan_loss_at_every_length(self, folder, documents, tmp_path):
        found = open_saved(folder)
        with torch.no_grad():
            found.model.get_input_embeddings().weight.fill_(torch.nan)
        with pytest.raises(ValueError, match="`MODEL` must be a model with finite logits, got SoftplusGPT"):
            measure_lengths(found, documents, [16, 64], tmp_path)

    def test_without_control(self, folder, documents, tmp_path):
        entries = measure_lengths(open_saved(folder), documents, [64], tmp_path, control=False)["results"]["lengths"]
        assert entries[0]["control"] is None

    def test_other_control_share_is_measured_again(self, folder, documents, tmp_path):
        found = open_saved(folder)
        results = [measure_lengths(found, documents, [64], tmp_path, control_share=share) for share in (0.0, 0.25)]
        targets = [result["results"]["lengths"][0]["control"]["targets"] for result in results]
        assert targets == [11 * 8, 11 * 16]

    @pytest.mark.parametrize("share", [-0.1, 1.5, float("nan")])
    def test_invalid_control_share(self, folder, documents, tmp_path, share):
        with pytest.raises(ValueError, match=r"`control_share` must be a fraction of the sequence, from 0 to 1"):
            measure_lengths(open_saved(folder), documents, [64], tmp_path, control_share=share)

    @pytest.mark.parametrize("length", [17, 23, 24, 31])
    def test_lengths_between_one_and_two_windows(self, folder, documents, tmp_path, length):
        result = measure_lengths(open_saved(folder), documents, [length], tmp_path, control_share=1.0)
        control = result["results"]["lengths"][0]["control"]
        assert control["first"] == length - 8 * (1 + (length - 16) // 8)
        assert control["first"] >= 8

    def test_windowed_model_has_no_gain(self, documents, tmp_path):
        found = open_saved(saved_model(tmp_path / "windowed", num_hidden_layers=1, window=4))
        control = measure_lengths(found, documents, [16, 64], tmp_path)["results"]["lengths"][1]["control"]
        assert control["gain"] == pytest.approx(0, abs=1e-5)

    def test_longer_than_any_document(self, folder, documents, tmp_path):
        result = measure_lengths(open_saved(folder), documents, [16, 512, 4096], tmp_path)
        reason = "the longest document has 540 tokens"
        assert result["results"]["skipped"] == [{"length": 4096, "reason": reason}]
        assert [entry["length"] for entry in result["results"]["lengths"]] == [16, 512]
        assert result["results"]["used"]["documents"] == 1
        assert result["results"]["documents"][-1] == {"length": 4096, "long_enough": 0}
        shown = table([result])
        assert f"skipped: lssar at 4096: {reason}" in shown
        assert "from 1 document of at least that length" in shown
        with pytest.raises(ValueError, match=r"at most 540 \(the longest document has 540 tokens\), got 1024"):
            measure_lengths(open_saved(folder), documents, [1024, 4096], tmp_path)

    def test_parse_lengths(self):
        assert parse_lengths("1,2,64", 16) == [16, 32, 1024]
        assert parse_lengths("4x, 1x", 16) == [16, 64]
        assert parse_lengths("512,16", 16) == [16, 512]
        with pytest.raises(ValueError, match=r"must be 2x,8x for multiples .* or up to 16 tokens.*, got '2,8'"):
            parse_lengths("2,8", 16)
        for text in ("", "one", "1,-2", "0", "1.5"):
            with pytest.raises(ValueError, match="`--lengths` must be"):
                parse_lengths(text, 16)

    def test_lengths_that_do_not_divide(self, folder, documents, tmp_path):
        with pytest.raises(ValueError, match="divisors of 64, the longest that fits into a document, got 48"):
            measure_lengths(open_saved(folder), documents, [48, 64], tmp_path)

    def test_tables(self, folder, documents, tmp_path):
        found = [open_saved(folder), open_saved(f"{folder}+power=3")]
        results = [measure_lengths(one, documents, [16, 64], tmp_path) for one in found]
        shown = table(results)
        for result in results:
            assert result["model"]["name"] in shown
            assert f"{result['results']['lengths'][1]['loss']:.4f}" in shown
            assert f"{result['results']['lengths'][1]['control']['gain']:+.4f}" in shown
        head, rows = csv_rows(results)
        assert len(rows) == 4
        assert len(head) == len(rows[0])
        assert len(position_rows(results)[1]) == 2 * (1 + 3)
        assert [result["model"]["name"] for result in results_in(tmp_path, "lengths")] == ["lssar power=3", "lssar"]

    def test_mixed_precision_matches_autocast(self, folder, documents, tmp_path):
        found = open_saved(folder, dtype="mixed")
        assert found.model.dtype == torch.float32
        result = measure_lengths(found, documents, [16, 64], tmp_path)
        assert result["model"]["dtype"] == "mixed"
        exact = measure_lengths(open_saved(folder), documents, [16, 64], tmp_path / "exact")
        with torch.autocast("cpu", torch.bfloat16):
            expected = transformers_loss(AutoModelForCausalLM.from_pretrained(folder), text_rows())
        assert result["results"]["lengths"][-1]["loss"] == pytest.approx(expected, rel=1e-4)
        assert result["results"]["lengths"][-1]["loss"] != exact["results"]["lengths"][-1]["loss"]


class TestResume:
    def test_continues_at_the_interrupted_length(self, folder, documents, tmp_path, monkeypatch):
        found = open_saved(folder)
        whole = measure_lengths(found, documents, [16, 32, 64], tmp_path / "whole")
        seen = []
        real = lengths.LengthEvaluator.at

        def at(self, length, progress):
            seen.append(length)
            if seen == [16, 32]:
                raise KeyboardInterrupt
            return real(self, length, progress)

        monkeypatch.setattr(lengths.LengthEvaluator, "at", at)
        with pytest.raises(KeyboardInterrupt):
            measure_lengths(found, documents, [16, 32, 64], tmp_path)
        assert read(tmp_path / "lengths--lssar.json")["complete"] is False
        again = measure_lengths(found, documents, [16, 32, 64], tmp_path)
        assert seen == [16, 32, 32, 64]

        def losses(result):
            return [(entry["length"], entry["loss"], entry["control"]) for entry in result["results"]["lengths"]]

        assert losses(again) == losses(whole)

    def test_other_settings_and_texts_have_own_files(self, folder, documents, tmp_path):
        """The same call finds each of them again."""
        found = open_saved(folder)
        other = text_documents(["another text " * 20], ["other"], load_tokenizer(str(folder)))
        calls = [(documents, None), (documents, 2), (other, 2)]
        first, again = (
            [measure_lengths(found, texts, [16, 64], tmp_path, sequences=count) for texts, count in calls] for _ in "ab"
        )
        assert [{**result, "made": 0} for result in again] == [{**result, "made": 0} for result in first]
        assert (first[0]["variant"], len({result["variant"] for result in first})) == ("", 3)
        files = [read(path) for path in tmp_path.iterdir()]
        assert len(files) == 3
        assert all(result in files for result in again)

    def test_results_of_other_models_are_renamed(self, documents, tmp_path, capsys):
        results = []
        for width in (32, 48, 64):
            other = saved_model(tmp_path / f"{width}" / "lssar", hidden_size=width)
            results.append(measure_lengths(open_saved(other), documents, [16], tmp_path))
            assert results[-1]["model"]["config"]["hidden_size"] == width
        files = [json.loads((tmp_path / f"lengths--lssar.json{end}").read_text()) for end in (".old", ".old2", "")]
        assert files == results
        assert "held another model of that name: kept as lengths--lssar.json.old2" in capsys.readouterr().err

    def test_truncated_file(self, folder, documents, tmp_path):
        (tmp_path / "lengths--lssar.json").write_text('{"format": "softplus-att')
        with pytest.raises(ValueError, match="`result file` must be written by"):
            measure_lengths(open_saved(folder), documents, [16], tmp_path)

    @pytest.mark.parametrize("missing", ["model", "settings", "results"])
    def test_file_with_missing_keys(self, folder, documents, tmp_path, missing):
        found, path = open_saved(folder), tmp_path / "lengths--lssar.json"
        whole = measure_lengths(found, documents, [16], tmp_path)
        path.write_text(json.dumps({key: value for key, value in whole.items() if key != missing}))
        with pytest.raises(ValueError, match=f"`result file` must be written by .*{missing}"):
            measure_lengths(found, documents, [16], tmp_path)


class TestMemory:
    def test_batches_are_halved(self):
        sizes = []

        def run(batch):
            if len(batch) > 3:
                raise torch.OutOfMemoryError("CUDA out of memory")
            sizes.append(len(batch))
            return batch.sum(1)

        rows = torch.arange(20).view(10, 2)
        assert in_batches(rows, 8, run).tolist() == rows.sum(1).tolist()
        assert sizes == [2] * 5

        def never(batch):
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes")

        with pytest.raises(TooLongError, match="one sequence of 2 tokens does not fit"):
            in_batches(rows, 8, never)
        with pytest.raises(RuntimeError, match="other"):
            in_batches(rows, 8, lambda batch: (_ for _ in ()).throw(RuntimeError("other")))

    def test_batch_size_follows_free_memory(self, folder, monkeypatch):
        model = open_saved(folder).model
        one = memory.sequence_bytes(model, 64)
        logits = 3 * 4 * 64 * 320
        monkeypatch.setattr(memory, "free_bytes", lambda device: int(5.5 * one / memory.SHARE) + logits)
        assert sequences_at_once(model, 64) == 5
        assert sequences_at_once(model, 16) > 5
        monkeypatch.setattr(memory, "free_bytes", lambda device: one + logits)
        with pytest.raises(TooLongError, match="one sequence of 64 tokens needs about"):
            sequences_at_once(model, 64)

    def test_length_beyond_memory_is_skipped(self, folder, documents, tmp_path, monkeypatch):
        found = open_saved(folder)
        enough = memory.sequence_bytes(found.model, 64) / memory.SHARE + 3 * 4 * 64 * 320
        monkeypatch.setattr(memory, "free_bytes", lambda device: int(enough) + 1)
        result = measure_lengths(found, documents, [16, 64, 512], tmp_path)["results"]
        assert [entry["length"] for entry in result["lengths"]] == [16, 64]
        assert "one sequence of 512 tokens needs about" in result["skipped"][0]["reason"]
        monkeypatch.undo()
        result = measure_lengths(found, documents, [16, 64, 512], tmp_path)["results"]
        assert [entry["length"] for entry in result["lengths"]] == [16, 64, 512]
        assert not result["skipped"]

    def test_dense_attentions_need_more(self, folder, tmp_path):
        softmax = saved_model(tmp_path / "softmax", attention="softmax")
        assert memory.free_bytes(torch.device("cpu")) > 0
        cpu = torch.device("cpu")
        for fused in (folder, f"{folder}+window=4", softmax, f"{softmax}+window=4"):
            assert memory.weights_bytes(open_saved(fused).model.config, 1 << 20, cpu) == 0
        composed = open_saved(softmax).model.config
        composed._attn_implementation = "sigmoid"
        assert memory.weights_bytes(composed, 10, cpu) == memory.DENSE_COPIES * 4 * 2 * 100
        long = memory.weights_bytes(composed, 1 << 20, cpu)
        assert long == memory.weights_bytes(composed, 1 << 16, cpu) == memory.DENSE_COPIES * 4 * MAX_WEIGHTS["cpu"]
        dense = open_saved(softmax).model
        dense.config._attn_implementation = "eager"
        extra = memory.sequence_bytes(dense, 1000) - memory.sequence_bytes(open_saved(softmax).model, 1000)
        assert extra == memory.DENSE_COPIES * 2 * 1000 * 1000 * 4

    def test_memory_limit_of_a_container(self, tmp_path):
        (tmp_path / "memory.max").write_text("1000\n")
        (tmp_path / "memory.current").write_text("700\n")
        (tmp_path / "memory.stat").write_text("anon 500\ninactive_file 150\n")
        assert memory.container_memory(tmp_path) == 450
        (tmp_path / "memory.max").write_text("max\n")
        assert memory.container_memory(tmp_path) is None
        assert memory.container_memory(tmp_path / "none") is None


class TestTexts:
    def test_folder(self, folder, tmp_path):
        source = tmp_path / "text.jsonl"
        source.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
        prepare([source], tmp_path / "data", tokenizer="bytes", validation_fraction=0.0, workers=1)
        found = folder_documents(str(tmp_path / "data"), "train")
        assert sorted(found.lengths.tolist()) == [9, 200, 540]
        assert bytes(next(found.at_least(540)).tolist()).decode() == TEXTS[0]
        assert found.long_enough(200) == 2
        with pytest.raises(ValueError, match="`--split` must be a split of"):
            folder_documents(str(tmp_path / "data"))

    def test_builtin(self):
        assert all(len(text) > 65536 for text in raw_texts(["builtin"]))

    def test_tokens_outside_the_vocabulary(self, folder, tmp_path):
        found = open_saved(folder)
        documents = text_documents(["abc"], ["text"], lambda text, **_: {"input_ids": [5000] * 50})
        with pytest.raises(ValueError, match=r"`--tokenizer` must be one with tokens below 320.*got token 5000"):
            measure_lengths(found, documents, [16], tmp_path)

    @pytest.mark.parametrize("name", ["tokenizer.json", ""])
    def test_data_prepared_with_another_tokenizer(self, folder, tmp_path, name):
        (tmp_path / "text.txt").write_text("some words to learn from, and more of them " * 9)
        options = {"validation_fraction": 0, "workers": 1}
        prepare([tmp_path / "text.txt"], tmp_path / "bytes", tokenizer="bytes", **options)
        prepare([tmp_path / "text.txt"], tmp_path / "bpe", tokenizer="bpe", vocabulary_size=270, **options)
        check_same_tokenizer(str(tmp_path / "bytes"), str(folder / name))
        with pytest.raises(ValueError, match=r"`--data` must be prepared with the tokenizer of .*encodes text diff"):
            check_same_tokenizer(str(tmp_path / "bpe"), str(folder / name))
        check_same_tokenizer(str(tmp_path / "bpe"), "a/name-on-the-hub")

    def test_no_text(self, tmp_path):
        (tmp_path / "empty.txt").write_text("")
        with pytest.raises(ValueError, match="no text in"):
            raw_texts([str(tmp_path / "empty.txt")])
        with pytest.raises(ValueError, match="which does not exist"):
            raw_texts([str(tmp_path / "none.txt")])


PEAK = """
import resource, sys
from pathlib import Path
from evaluation_cases import open_saved
from softplus_attention.evaluation.inside import look_inside
from softplus_attention.evaluation.lengths import token_losses
import torch

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

torch.set_num_threads(1)
model = open_saved(sys.argv[1]).model
rows = torch.randint(0, 256, (1, 8192))
token_losses(model, rows[:, :128])
look_inside(model, rows[:, :128], frozen_length=128)
before = peak()
token_losses(model, rows)
look_inside(model, rows, frozen_length=128)
print(peak() - before)
"""


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["lssar", "softmax"])
def test_bounded_memory_at_64_times_the_length(tmp_path, attention):
    """8192 = 64 x 128 tokens: dense float32 weights of the two heads would take 537 MB."""
    saved_model(tmp_path, attention=attention)
    command = [sys.executable, "-c", PEAK, str(tmp_path)]
    done = subprocess.run(
        command, cwd=Path(__file__).parents[1] / "support", capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 200


def test_no_nan_in_json():
    assert to_jsonable({"a": float("nan"), "b": (1, float("inf")), "c": torch.float32}) == {
        "a": None,
        "b": [1, None],
        "c": "torch.float32",
    }
