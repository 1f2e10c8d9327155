"""``evaluate synthetic``: a small model learns a task at a short length and is tested at up to 1000 times of it."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import set_seed

from softplus_attention.attentions.catalog import attention
from softplus_attention.evaluation.forms import form_of
from softplus_attention.evaluation.loss import LOGITS
from softplus_attention.evaluation.memory import TooLongError, in_batches, sequences_at_once
from softplus_attention.evaluation.models import Opened, Request
from softplus_attention.evaluation.synthetic import IGNORED, Task, TaskSequences
from softplus_attention.huggingface import SoftplusGPTForCausalLM
from softplus_attention.huggingface.loading import load_weights
from softplus_attention.huggingface.saving import save_trained
from softplus_attention.training import TrainConfig, checkpoints
from softplus_attention.training.data import collate
from softplus_attention.training.metrics import METRICS
from softplus_attention.training.run import model_config, trainer_of, training_arguments
from softplus_attention.training.run_folder import RunFolder
from softplus_attention.utils.files import write_whole
from softplus_attention.utils.progress import Progress
from softplus_attention.utils.results import ResultFile
from softplus_attention.utils.untrusted import read_json

# Streams that never meet: what is tested was not trained on.
TRAINING, TESTING = 0, 1
TRAINED = "manifest.json"
PRESETS: dict[str, dict[str, Any]] = {
    # A local layer and a global one without positions, powers learned as factors of log N: two minutes on one core.
    "mixed": {
        "layers": 2, "width": 64, "heads": 2, "steps": 1800, "batch_size": 32,
        "optimizer": "muon", "learning_rate": 1e-2, "window": 8, "global_every": 2, "power": "learned-log",
    },
    # Rotary positions in every layer, as in the paper: a minute on one core. Learns copy and flip-flop, not recall.
    "rotary": {"layers": 2, "width": 64, "heads": 2, "steps": 600, "batch_size": 64, "learning_rate": 2e-3},
}  # fmt: skip
MULTIPLES = "1,2,4,8,16,32,64"
RISING_POWER = "3,7@0.3,15@0.6"


def task_words(task: Task) -> dict[str, Any]:
    assert dataclasses.is_dataclass(task)
    return {"task": task.name, **dataclasses.asdict(task)}


def training_config(
    task: Task, name: str, length: int, folder: Path, settings: dict[str, Any], *, seed: int, device: str
) -> TrainConfig:
    """``settings`` are a preset's, some replaced; without a power there, one rises where the attention has any."""
    sharpened = attention(name).spec.second_stage == "relu_power"
    power = settings.get("power") or (RISING_POWER if sharpened else None)
    words = {**settings, "power": power if sharpened else None, "attention": name, "sequence_length": length}
    words |= {"micro_batch_size": settings["batch_size"], "weight_decay": 0.01, "warmup": 0.05, "keep": 1}
    words |= {"save_every": max(1, settings["steps"] // 4), "log_every": max(1, settings["steps"] // 20)}
    same = {**task_words(task), **{word: value for word, value in words.items() if word != "micro_batch_size"}}
    digest = hashlib.sha256(json.dumps([same, seed], sort_keys=True).encode()).hexdigest()[:8]
    output = folder / "synthetic-models" / f"{task.name}--{name}--{digest}"
    return TrainConfig(data="made on the fly", output=str(output), seed=seed, device=device, **words)


def trained_model(task: Task, config: TrainConfig) -> tuple[Path, dict[str, Any]]:
    """The folder of the model and what its training took. One that was stopped goes on, a finished one stands."""
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
    step = 0 if checkpoint is None else checkpoints.step_of(checkpoint)
    set_seed(config.seed)
    model = SoftplusGPTForCausalLM(model_config(config, task.vocabulary, None))
    total = config.steps * config.batch_size
    dataset = TaskSequences(task, config.sequence_length, total, 2 * config.seed + TRAINING)
    trainer = trainer_of(config, arguments, model, dataset)
    if checkpoint is not None:
        checkpoints.check_fits(checkpoint, trainer.model)
    run.rewind(checkpoint)
    started = time.perf_counter()
    trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    seconds = time.perf_counter() - started
    run.save(lambda place: save_trained(trainer.model, place))
    losses = [json.loads(line) for line in (run.path / METRICS).read_text().splitlines()]
    final = next((entry["loss"] for entry in reversed(losses) if "loss" in entry), None)
    found = {"length": config.sequence_length, "steps": config.steps, "final_loss": final, "seconds": round(seconds, 1)}
    found |= {"steps_in_that_time": config.steps - step}
    write_whole(record, json.dumps(found) + "\n")
    for leftover in checkpoints.checkpoints(run.path):
        shutil.rmtree(leftover)
    return found


@torch.inference_mode()
def right_answers(model: Any, ids: Tensor, labels: Tensor) -> Tensor:
    """(B, 2): the right answer tokens of each sequence, and all of them. Logits exist for answers alone."""
    ids, labels = ids.to(model.device), labels.to(model.device)
    hidden = model.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state[:, :-1]
    targets = labels[:, 1:]
    asked = targets != IGNORED
    head = model.get_output_embeddings()
    tokens = max(1, LOGITS // head.weight.shape[0])
    said = torch.cat([head(states).argmax(-1) for states in hidden[asked].split(tokens)])
    right = torch.zeros_like(asked)
    right[asked] = said == targets[asked]
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


def measure_synthetic(
    task: Task,
    config: TrainConfig,
    lengths: Sequence[int],
    folder: Path,
    *,
    sequences: int = 64,
    test_tokens: int = 1 << 18,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Each length is tested on at most ``sequences`` sequences and about ``test_tokens`` tokens, four at least."""
    progress = progress or Progress()
    source, training = trained_model(task, config)
    name = f"{task.name} {config.attention}" + (f" seed={config.seed}" if config.seed else "")
    model: Any = load_weights("MODEL", str(source), "auto")
    device = "cuda" if config.device != "cpu" and torch.cuda.is_available() else "cpu"
    opened = Opened(model.to(device).eval(), Request(str(source), name, {}), config.sequence_length)
    settings = {**task_words(task), "sequences": sequences, "test_tokens": test_tokens, "seed": config.seed}
    settings["training"] = {
        word: value for word, value in config.as_dict().items() if word not in ("output", "data", "device")
    }
    place = str(source.relative_to(folder)) if source.is_relative_to(folder) else str(source)
    empty = {"task": task.name, "training": {**training, "model": place}, "lengths": [], "skipped": []}
    # The end of the run's folder tells trainings apart, and so the files.
    variant = Path(config.output).name.rpartition("--")[2]
    file = ResultFile(folder, "synthetic", opened.description(), settings, opened.model.device, empty, variant)
    for length in lengths:
        title = f"{name}, {length} tokens"
        if file.has("lengths", length=length):
            progress.say(f"{title}: found in {file.path}")
            continue
        progress.update(title)
        started = time.perf_counter()
        try:
            task.check(length)
            count = min(sequences, max(4, test_tokens // length))
            found = accuracy_at(opened.model, task, length, count, config.seed)
        except (TooLongError, ValueError) as reason:
            progress.say(f"{title}: {reason}")
            file.results["skipped"].append({"length": length, "reason": str(reason)})
            continue
        entry = {"length": length, "times": length / config.sequence_length, **found}
        file.add("lengths", entry | {"seconds": round(time.perf_counter() - started, 2)}, ["length"])
    progress.clear()
    return file.save(complete=True)


def table_of(results: Sequence[dict[str, Any]]) -> str:
    lengths = sorted({entry["length"] for result in results for entry in result["results"]["lengths"]})
    width = max(24, *(len(result["model"]["name"]) + 2 for result in results))
    trained = results[0]["model"]["training_length"]
    lines = [f"{'answer tokens right, %':<{width}}" + "".join(f"{length:>8}" for length in lengths) + "  tokens"]
    lines.append(" " * width + "".join(f"{length / trained:>7.4g}x" for length in lengths))
    for result in results:
        found = {entry["length"]: f"{100 * entry['accuracy']:.1f}" for entry in result["results"]["lengths"]}
        lines.append(f"{result['model']['name']:<{width}}" + "".join(f"{found.get(n, '-'):>8}" for n in lengths))
    for result in results:
        for skip in result["results"]["skipped"]:
            lines.append(f"left out: {result['model']['name']} at {skip['length']}: {skip['reason']}")
    return "\n".join(lines)


def csv_rows(results: Sequence[dict[str, Any]]) -> tuple[list[str], list[list[Any]]]:
    words = ["length", "times", "sequences", "answers", "accuracy", "exact"]
    rows = [
        [form_of(result["results"]["task"], result["settings"]), result["model"]["attention"], result["variant"]]
        + [entry[word] for word in words]
        for result in results
        for entry in result["results"]["lengths"]
    ]
    # The digits of the file's name: trainings of one attention with other settings.
    return ["task", "attention", "training", *words], rows
