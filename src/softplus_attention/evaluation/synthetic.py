"""Synthetic tasks of any length (associative recall, copy, flip-flop): generate sequences, train and test on them.

A task generates sequences of exactly the requested length and marks the answer tokens. The same seed and index give the
same sequence.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import set_seed

from softplus_attention.attentions.catalog import attention
from softplus_attention.data import IGNORED
from softplus_attention.evaluation.loss import LOGITS
from softplus_attention.evaluation.memory import in_batches, sequences_at_once
from softplus_attention.huggingface import SoftplusGPTForCausalLM
from softplus_attention.huggingface.saving import save_trained
from softplus_attention.training import TrainConfig, checkpoints
from softplus_attention.training.data import collate
from softplus_attention.training.metrics import METRICS
from softplus_attention.training.run import build_trainer, fit, model_config, training_arguments
from softplus_attention.training.run_folder import RunFolder
from softplus_attention.utils.files import write_whole
from softplus_attention.utils.untrusted import read_json, read_json_lines
from softplus_attention.validation import fail, fail_choice

# Separate random streams, so that test sequences never occur in training.
TRAINING, TESTING = 0, 1
TRAINED = "manifest.json"
RISING_POWER = "3,7@0.3,15@0.6"
Tokens = np.ndarray[Any, np.dtype[np.int64]]
Marks = np.ndarray[Any, np.dtype[np.bool_]]


class Task(Protocol):
    name: ClassVar[str]

    @property
    def vocabulary(self) -> int: ...
    def check(self, length: int) -> None:
        """Raise if the task has no sequence of this length."""

    def sequence(self, length: int, chance: np.random.Generator) -> tuple[Tokens, Marks]: ...


@dataclass(frozen=True)
class Recall:
    """Multi-query associative recall: key-value pairs, a separator, then queried keys whose values are the answers.

        k3 v3 . k1 v1 k2 v2 . . | k1 V1 k3 V3          (. is noise, capitals are answers)

    A key is ``key_tokens`` tokens from ``symbols`` symbols, and the keys of a sequence differ. Values have
    ``value_tokens`` tokens and may repeat. ``pairs`` pairs lie at random positions among noise; with 0, as many as fit
    fill the sequence. Queries are drawn independently, so earlier queries say nothing about later ones.
    """

    name: ClassVar[str] = "recall"
    symbols: int = 32
    key_tokens: int = 1
    value_tokens: int = 1
    pairs: int = 8
    queries: int = 16

    def __post_init__(self) -> None:
        for name, least in (("symbols", 2), ("key_tokens", 1), ("value_tokens", 1), ("queries", 1), ("pairs", 0)):
            if getattr(self, name) < least:
                fail(name, f"at least {least}", getattr(self, name))

    @property
    def vocabulary(self) -> int:
        # Keys, values, noise, and the separator.
        return 3 * self.symbols + 1

    def pairs_at(self, length: int) -> int:
        room = length - 1 - self.queries * (self.key_tokens + self.value_tokens)
        return self.pairs or room // (self.key_tokens + self.value_tokens)

    def check(self, length: int) -> None:
        pairs, each = self.pairs_at(length), self.key_tokens + self.value_tokens
        least = (max(pairs, 2) + self.queries) * each + 1
        if length < least:
            fail("length", f"at least {least} tokens for {max(pairs, 2)} pairs and {self.queries} queries", length)
        if pairs > self.symbols**self.key_tokens:
            expected = f"at least {pairs}, the keys of {length} tokens (more symbols, or keys of more tokens)"
            fail("symbols ** key_tokens", expected, self.symbols**self.key_tokens)

    def sequence(self, length: int, chance: np.random.Generator) -> tuple[Tokens, Marks]:
        pairs, each = self.pairs_at(length), self.key_tokens + self.value_tokens
        numbers = chance.choice(self.symbols**self.key_tokens, pairs, replace=False)
        keys = numbers[:, None] // self.symbols ** np.arange(self.key_tokens) % self.symbols
        values = self.symbols + chance.integers(self.symbols, size=(pairs, self.value_tokens))
        both = np.concatenate([keys, values], 1)
        queried = both[chance.integers(pairs, size=self.queries)].reshape(-1)
        body = length - 1 - len(queried)
        ids = 2 * self.symbols + chance.integers(self.symbols, size=length)
        # A random order of pairs and noise tokens gives the positions of the pairs.
        noise = body - pairs * each
        is_pair = np.zeros(pairs + noise, dtype=bool)
        is_pair[chance.choice(pairs + noise, pairs, replace=False)] = True
        begins = np.concatenate([[0], np.cumsum(np.where(is_pair, each, 1))[:-1]])[is_pair]
        ids[begins[:, None] + np.arange(each)] = both
        ids[body] = self.vocabulary - 1
        ids[body + 1 :] = queried
        answers = np.zeros(length, dtype=bool)
        answers[body + 1 :] = np.tile(np.arange(each) >= self.key_tokens, self.queries)
        return ids, answers


@dataclass(frozen=True)
class Copy:
    """A random string over ``symbols`` symbols, a separator, and the string again, which is the answer."""

    name: ClassVar[str] = "copy"
    symbols: int = 32

    def __post_init__(self) -> None:
        if self.symbols < 2:
            fail("symbols", "at least 2", self.symbols)

    @property
    def vocabulary(self) -> int:
        return self.symbols + 2

    def check(self, length: int) -> None:
        if length < 4:
            fail("length", "at least 4 tokens", length)

    def sequence(self, length: int, chance: np.random.Generator) -> tuple[Tokens, Marks]:
        count = (length - 1) // 2
        string = chance.integers(self.symbols, size=count)
        start = [self.symbols + 1] * (length - 1 - 2 * count)
        ids = np.concatenate([start, string, [self.symbols], string]).astype(np.int64)
        answers = np.zeros(length, dtype=bool)
        answers[-count:] = True
        return ids, answers


@dataclass(frozen=True)
class FlipFlop:
    """Write, ignore and read a bit: each read returns the last written bit (Liu et al., 2023).

        w 1 i 0 i 0 r 1 w 0 i 1 r 0

    A sequence of any length has about ``writes`` writes and as many reads, so their distances grow with the length.
    """

    name: ClassVar[str] = "flip-flop"
    writes: int = 4

    WRITE: ClassVar[int] = 0
    IGNORE: ClassVar[int] = 1
    READ: ClassVar[int] = 2
    BIT: ClassVar[int] = 3
    START: ClassVar[int] = 5

    def __post_init__(self) -> None:
        if self.writes < 1:
            fail("writes", "at least 1", self.writes)

    @property
    def vocabulary(self) -> int:
        return 6

    def check(self, length: int) -> None:
        if length < 4 * (self.writes + 1):
            fail("length", f"at least {4 * (self.writes + 1)} tokens for {self.writes} writes", length)

    def sequence(self, length: int, chance: np.random.Generator) -> tuple[Tokens, Marks]:
        count = length // 2
        share = min(0.5, self.writes / count)
        what = chance.choice(3, count, p=[share, 1 - 2 * share, share])
        what[0], what[-1] = self.WRITE, self.READ
        bits = chance.integers(2, size=count)
        # Position of the last write, whose bit a read repeats.
        last = np.maximum.accumulate(np.where(what == self.WRITE, np.arange(count), 0))
        bits = np.where(what == self.READ, bits[last], bits)
        ids = np.full(length, self.START)
        ids[length - 2 * count :: 2] = what
        ids[length - 2 * count + 1 :: 2] = self.BIT + bits
        answers = np.zeros(length, dtype=bool)
        answers[length - 2 * count + 1 :: 2] = what == self.READ
        return ids, answers


TASKS: dict[str, type[Recall] | type[Copy] | type[FlipFlop]] = {task.name: task for task in (Recall, Copy, FlipFlop)}


def make_task(name: str, **settings: Any) -> Task:
    if name not in TASKS:
        fail_choice("task", TASKS, name)
    known = [field.name for field in dataclasses.fields(TASKS[name])]
    for setting in settings:
        if setting not in known:
            fail(setting, f"left out: the task {name!r} has {', '.join(known)}", settings[setting])
    return TASKS[name](**settings)


class TaskSequences(Dataset[dict[str, Tensor]]):
    """Sequences of one seed, generated when they are read; only answer tokens have labels."""

    def __init__(self, task: Task, length: int, count: int, seed: int) -> None:
        task.check(length)
        self.task, self.length, self.count, self.seed = task, length, count, seed

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        ids, answers = self.task.sequence(self.length, np.random.default_rng([self.seed, self.length, number]))
        tokens = torch.from_numpy(ids)
        return {"input_ids": tokens, "labels": torch.where(torch.from_numpy(answers), tokens, IGNORED)}


def task_settings(task: Task) -> dict[str, Any]:
    assert dataclasses.is_dataclass(task)
    return {"task": task.name, **dataclasses.asdict(task)}


def training_config(
    task: Task, name: str, length: int, folder: Path, settings: dict[str, Any], *, seed: int, device: str
) -> TrainConfig:
    """``settings``: a preset with overrides. Without a power, attentions that have one use ``RISING_POWER``."""
    sharpened = attention(name).spec.second_stage == "relu_power"
    power = settings.get("power") or (RISING_POWER if sharpened else None)
    kwargs = {**settings, "power": power if sharpened else None, "attention": name, "sequence_length": length}
    kwargs |= {"micro_batch_size": settings["batch_size"], "weight_decay": 0.01, "warmup": 0.05, "keep": 1}
    kwargs |= {"save_every": max(1, settings["steps"] // 4), "log_every": max(1, settings["steps"] // 20)}
    identity = {**task_settings(task), **{name: value for name, value in kwargs.items() if name != "micro_batch_size"}}
    digest = hashlib.sha256(json.dumps([identity, seed], sort_keys=True).encode()).hexdigest()[:8]
    output = folder / "synthetic-models" / f"{task.name}--{name}--{digest}"
    return TrainConfig(data="made on the fly", output=str(output), seed=seed, device=device, **kwargs)


def train_model(task: Task, config: TrainConfig) -> tuple[Path, dict[str, Any]]:
    """Train, or resume a stopped run; a finished one is reused. Returns the model's folder and the training record."""
    run = RunFolder(Path(config.output))
    with run.locked():
        return run.model, train_in(run, task, config)


def train_in(run: RunFolder, task: Task, config: TrainConfig) -> dict[str, Any]:
    record = run.path / TRAINED
    if record.exists():
        return dict(read_json(record))
    task.check(config.sequence_length)
    arguments = training_arguments(config)
    checkpoint = run.newest_checkpoint()
    step = 0 if checkpoint is None else checkpoints.checkpoint_step(checkpoint)
    set_seed(config.seed)
    model = SoftplusGPTForCausalLM(model_config(config, task.vocabulary, None))
    total = config.steps * config.batch_size
    dataset = TaskSequences(task, config.sequence_length, total, 2 * config.seed + TRAINING)
    trainer = build_trainer(config, arguments, model, dataset)
    if checkpoint is not None:
        checkpoints.check_fits(checkpoint, trainer.model)
    started = time.perf_counter()
    fit(run, trainer, checkpoint)
    seconds = time.perf_counter() - started
    run.save(lambda place: save_trained(trainer.model, place))
    losses = read_json_lines(run.path / METRICS)
    final = next((entry["loss"] for entry in reversed(losses) if "loss" in entry), None)
    found = {"length": config.sequence_length, "steps": config.steps, "final_loss": final, "seconds": round(seconds, 1)}
    found |= {"steps_in_that_time": config.steps - step}
    write_whole(record, json.dumps(found) + "\n")
    run.remove_checkpoints()
    return found


@torch.inference_mode()
def right_answers(model: Any, ids: Tensor, labels: Tensor) -> Tensor:
    """(B, 2): correct and total answer tokens of each sequence. Logits are computed for answers only."""
    ids, labels = ids.to(model.device), labels.to(model.device)
    hidden = model.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state[:, :-1]
    targets = labels[:, 1:]
    asked = targets != IGNORED
    head = model.get_output_embeddings()
    tokens = max(1, LOGITS // head.weight.shape[0])
    predicted = torch.cat([head(states).argmax(-1) for states in hidden[asked].split(tokens)])
    right = torch.zeros_like(asked)
    right[asked] = predicted == targets[asked]
    return torch.stack([right.sum(-1), asked.sum(-1)], -1)


def accuracy_at(model: Any, task: Task, length: int, sequences: int, seed: int) -> dict[str, Any]:
    data = TaskSequences(task, length, sequences, 2 * seed + TESTING)
    at_once = sequences_at_once(model, length)
    rows = torch.arange(sequences)[:, None]

    def run(numbers: Tensor) -> Tensor:
        batch = collate([data[int(number)] for number in numbers[:, 0]])
        return right_answers(model, batch["input_ids"], batch["labels"])

    right, asked = in_batches(rows, at_once, run, length).unbind(-1)
    return {
        "sequences": sequences,
        "answers": int(asked.sum()),
        "accuracy": (right.sum() / asked.sum()).item(),
        "exact": (right == asked).double().mean().item(),
    }
