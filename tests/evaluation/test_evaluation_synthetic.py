"""Synthetic tasks: answers by hand, accuracy of models with known answers, and training that resumes."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from softplus_attention.evaluation import synthetic as training
from softplus_attention.evaluation.measures import synthetic as measure
from softplus_attention.evaluation.measures.synthetic import task_label
from softplus_attention.evaluation.synthetic import (
    IGNORED,
    TASKS,
    Copy,
    FlipFlop,
    Recall,
    TaskSequences,
    make_task,
)

TINY = {"layers": 1, "width": 16, "heads": 1, "steps": 8, "batch_size": 4, "learning_rate": 1e-2}


def sequence(task: Any, length: int, seed: int = 0) -> tuple[list[int], list[int]]:
    """Tokens and the positions of the answers."""
    ids, answers = task.sequence(length, np.random.default_rng(seed))
    assert len(ids) == length
    assert 0 <= ids.min() <= ids.max() < task.vocabulary
    return ids.tolist(), np.flatnonzero(answers).tolist()


class TestRecall:
    @pytest.mark.parametrize("seed", range(5))
    @pytest.mark.parametrize(
        "task",
        [
            Recall(pairs=0),
            Recall(symbols=8, pairs=5, queries=3),
            Recall(symbols=4, key_tokens=2, value_tokens=3, queries=2, pairs=0),
        ],
        ids=["full", "noise", "several tokens"],
    )
    def test_answers_follow_from_the_pairs(self, task, seed):
        ids, answers = sequence(task, 64, seed)
        separator = ids.index(task.vocabulary - 1)
        pairs, place = {}, 0
        while place < separator:
            if ids[place] >= 2 * task.symbols:
                place += 1
                continue
            key = tuple(ids[place : place + task.key_tokens])
            value = tuple(ids[place + task.key_tokens : place + task.key_tokens + task.value_tokens])
            assert key not in pairs
            pairs[key] = value
            place += task.key_tokens + task.value_tokens
        assert len(pairs) == task.pairs_at(64)
        each = task.key_tokens + task.value_tokens
        queries = [tuple(ids[begin : begin + each]) for begin in range(separator + 1, 64, each)]
        assert len(queries) == task.queries
        for query in queries:
            assert pairs[query[: task.key_tokens]] == query[task.key_tokens :]
        assert len(answers) == task.queries * task.value_tokens
        assert all(task.symbols <= ids[answer] < 2 * task.symbols for answer in answers)

    def test_pairs_grow_with_the_length(self):
        assert Recall(pairs=0).pairs_at(64) == (64 - 1 - 32) // 2
        assert Recall(pairs=6).pairs_at(6400) == 6

    def test_impossible_lengths(self):
        with pytest.raises(ValueError, match=r"`symbols \*\* key_tokens` must be at least 111"):
            Recall(symbols=64, pairs=0).check(256)
        Recall(symbols=64, key_tokens=2, pairs=0).check(8000)
        with pytest.raises(ValueError, match="`length` must be at least 37 tokens for 2 pairs and 16 queries"):
            Recall(pairs=0).check(36)
        with pytest.raises(ValueError, match="`length` must be at least 49 tokens for 8 pairs and 16 queries"):
            Recall().check(48)
        with pytest.raises(ValueError, match="`pairs` must be at least 0"):
            Recall(pairs=-1)


class TestCopy:
    @pytest.mark.parametrize("length", [4, 63, 64])
    def test_string_is_repeated(self, length):
        task = Copy(symbols=7)
        ids, answers = sequence(task, length)
        half = (length - 1) // 2
        assert ids[-half:] == ids[-2 * half - 1 : -half - 1]
        assert ids[-half - 1] == task.symbols
        assert answers == list(range(length - half, length))


class TestFlipFlop:
    @pytest.mark.parametrize("seed", range(5))
    @pytest.mark.parametrize("length", [20, 65, 2000])
    def test_reads_return_the_last_written_bit(self, length, seed):
        task = FlipFlop(writes=4)
        ids, answers = sequence(task, length, seed)
        begin = length % 2
        memory, reads = None, []
        for place in range(begin, length, 2):
            what, bit = ids[place], ids[place + 1]
            if what == task.WRITE:
                memory = bit
            elif what == task.READ:
                reads.append(place + 1)
                assert bit == memory
        assert reads == answers
        assert ids[begin] == task.WRITE
        assert answers[-1] == length - 1

    def test_distances_grow_with_the_length(self):
        counts = [
            np.mean([sequence(FlipFlop(), length, seed)[0].count(0) for seed in range(50)]) for length in (64, 6400)
        ]
        assert counts[0] == pytest.approx(4.9, abs=1)
        assert counts[1] == pytest.approx(5, abs=1)


class TestSequences:
    @pytest.mark.parametrize("name", list(TASKS))
    def test_sequences_are_reproducible(self, name):
        data = TaskSequences(make_task(name), 64, 10, seed=3)
        assert data[7]["input_ids"].equal(data[7]["input_ids"])
        assert not data[7]["input_ids"].equal(data[8]["input_ids"])
        assert not data[7]["input_ids"].equal(TaskSequences(make_task(name), 64, 10, seed=4)[7]["input_ids"])
        labels = data[7]["labels"]
        assert labels[labels != IGNORED].equal(data[7]["input_ids"][labels != IGNORED])

    def test_unknown_task_and_setting(self):
        with pytest.raises(ValueError, match="`task` must be one of recall, copy, flip-flop, got 'sort'"):
            make_task("sort")
        with pytest.raises(ValueError, match="`writes` must be left out: the task 'copy' has symbols"):
            make_task("copy", writes=3)


class Known(nn.Module):
    """Predicts the next token of the sequence, which it sees, plus ``wrong``."""

    def __init__(self, vocabulary: int, wrong: int) -> None:
        super().__init__()
        self.head = nn.Linear(vocabulary, vocabulary, bias=False)
        self.head.weight.data = torch.eye(vocabulary)
        self.vocabulary, self.wrong = vocabulary, wrong
        self.device = torch.device("cpu")
        self.config = SimpleNamespace(
            hidden_size=8, num_attention_heads=1, vocab_size=vocabulary, _attn_implementation="sdpa"
        )

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def get_decoder(self) -> Any:
        def decoder(input_ids: torch.Tensor, use_cache: bool) -> Any:
            following = (input_ids.roll(-1, 1) + self.wrong) % self.vocabulary
            return SimpleNamespace(last_hidden_state=nn.functional.one_hot(following, self.vocabulary).float())

        return decoder


class TestAccuracy:
    @pytest.mark.parametrize("name", list(TASKS))
    @pytest.mark.parametrize(("wrong", "share"), [(0, 1.0), (1, 0.0)])
    def test_known_models(self, name, wrong, share):
        task = make_task(name)
        found = training.accuracy_at(Known(task.vocabulary, wrong), task, 64, 5, seed=0)
        assert found["accuracy"] == found["exact"] == share
        assert found["sequences"] == 5
        assert found["answers"] == sum((TaskSequences(task, 64, 5, 1)[n]["labels"] != IGNORED).sum() for n in range(5))

    def test_partly_right(self):
        ids = torch.tensor([[0, 1, 2, 3], [0, 1, 2, 3]])
        labels = torch.tensor([[IGNORED, 1, 2, 3], [IGNORED, IGNORED, 2, 1]])
        assert training.right_answers(Known(5, 0), ids, labels).tolist() == [[3, 3], [1, 2]]


def tiny_config(folder: Path, name: str = "lssar", **changes: Any) -> Any:
    return training.training_config(Copy(), name, 16, folder, {**TINY, **changes}, seed=0, device="cpu")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
class TestTraining:
    def test_from_training_to_file(self, tmp_path):
        config = tiny_config(tmp_path)
        result = measure.measure_synthetic(Copy(), config, [16, 64, 2], tmp_path, sequences=6)
        assert result["model"]["name"] == "copy lssar"
        assert result["model"]["power"] == 15
        entries = result["results"]["lengths"]
        assert [(entry["length"], entry["times"], entry["answers"]) for entry in entries] == [
            (16, 1.0, 6 * 7),
            (64, 4.0, 6 * 31),
        ]
        assert result["results"]["skipped"] == [{"length": 2, "reason": "`length` must be at least 4 tokens, got 2"}]
        assert result["results"]["training"]["steps"] == 8
        saved = tmp_path / result["results"]["training"]["model"]
        assert json.loads((saved / "config.json").read_text())["use_cache"]
        table = measure.table([result])
        assert f"{100 * entries[1]['accuracy']:.1f}" in table
        # A second call does not train again.
        before = (Path(config.output) / "manifest.json").stat().st_mtime_ns
        measure.measure_synthetic(Copy(), config, [16], tmp_path, sequences=6)
        assert (Path(config.output) / "manifest.json").stat().st_mtime_ns == before

    def test_resumes_an_interrupted_training(self, tmp_path, monkeypatch):
        whole, _ = training.train_model(Copy(), tiny_config(tmp_path / "whole"))
        real = TaskSequences.__getitem__

        def interrupted(self, number):
            if number >= 5 * TINY["batch_size"]:
                raise KeyboardInterrupt
            return real(self, number)

        monkeypatch.setattr(TaskSequences, "__getitem__", interrupted)
        config = tiny_config(tmp_path / "cut")
        with pytest.raises(KeyboardInterrupt):
            training.train_model(Copy(), config)
        monkeypatch.undo()
        again, record = training.train_model(Copy(), config)
        assert record["steps_in_that_time"] < 8
        assert (whole / "model.safetensors").read_bytes() == (again / "model.safetensors").read_bytes()

    def test_folders_depend_on_settings(self, tmp_path):
        folders = {tiny_config(tmp_path, steps=steps, learning_rate=rate).output for steps in (8, 9) for rate in (1, 2)}
        assert len(folders) == 4
        assert tiny_config(tmp_path, "softmax").power is None
        assert tiny_config(tmp_path, "lssar", power="7").power == "7"


@pytest.mark.parametrize(
    ("task", "settings", "label"),
    [
        ("recall", {"pairs": 8}, "recall, 8 pairs"),
        ("recall", {"pairs": 0}, "recall, as many pairs as fit"),
        ("recall", {}, "recall"),
        ("copy", {"symbols": 32}, "copy"),
    ],
)
def test_task_labels(task, settings, label):
    assert task_label(task, settings) == label


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize(
    ("preset", "name", "attention", "seed", "lengths"),
    [
        ("rotary", "flip-flop", "softmax-qknorm-logn", 0, [64]),
        ("rotary", "copy", "softmax-qknorm-logn", 0, [64]),
        ("mixed", "recall", "lssar", 1, [64, 4096]),  # recall needs local and global layers
        ("mixed", "recall", "softmax-qknorm-logn", 1, [64, 4096]),
    ],
)
def test_presets_learn(preset, name, attention, seed, lengths, tmp_path):
    task, settings = make_task(name), dict(measure.PRESETS[preset])
    config = training.training_config(task, attention, 64, tmp_path, settings, seed=seed, device="cpu")
    result = measure.measure_synthetic(task, config, lengths, tmp_path)
    assert [entry["length"] for entry in result["results"]["lengths"]] == lengths
    assert all(entry["accuracy"] > 0.95 for entry in result["results"]["lengths"])
