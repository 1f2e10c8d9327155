"""Throughput, MFU and time left; metrics.jsonl, TensorBoard and the progress bar."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from softplus_attention.training.errors import RunStopped
from softplus_attention.utils.files import append_line, is_disk_full, write_whole
from softplus_attention.utils.progress import Progress
from softplus_attention.utils.untrusted import MIB, read_text

METRICS = "metrics.jsonl"
LIMIT = 1024 * MIB
# Dense bfloat16 TFLOP/s from the data sheets; the first name contained in the device name is used.
PEAKS = (
    ("B200", 2250), ("GH200", 989), ("H200", 989), ("H100 PCIe", 756), ("H100 NVL", 835), ("H100", 989), ("H800", 989),
    ("A100", 312), ("A800", 312), ("L40S", 362), ("L40", 181), ("L4", 121), ("A10G", 70), ("A10", 125),
    ("RTX 5090", 210), ("RTX 4090", 165), ("RTX 3090", 71), ("MI300X", 1307),
)  # fmt: skip


def peak_tflops(device: torch.device) -> float | None:
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((float(peak) for part, peak in PEAKS if part in name), None)


def flops_per_token(parameters: int, width: int, spans: Sequence[int]) -> int:
    """6 N + 12 W T per layer, as in PaLM: forward and backward of N weights (tied ones once) and of attention.

    W is the width of all heads, T the number of tokens a layer sees (``spans``). The masked half of causal attention
    is not subtracted.
    """
    return 6 * parameters + 12 * width * sum(spans)


class Throughput:
    """Tokens per second since the last call, excluding validation and checkpoints."""

    def __init__(self, tokens_per_step: int, flops: int, processes: int, peak: float | None) -> None:
        self.tokens_per_step, self.flops = tokens_per_step, flops
        self.available_flops = None if peak is None else peak * 1e12 * processes
        self.restart(0)

    def restart(self, step: int) -> None:
        self.step, self.since, self.paused = step, time.perf_counter(), 0.0

    def since_last(self, step: int) -> dict[str, float]:
        seconds = time.perf_counter() - self.since - self.paused
        steps = step - self.step
        self.restart(step)
        if steps <= 0 or seconds <= 0:
            return {}
        speed = steps * self.tokens_per_step / seconds
        found = {"tokens_per_second": speed, "step_seconds": seconds / steps}
        if self.available_flops is not None:
            found["mfu"] = speed * self.flops / self.available_flops
        return found


def keep_until(run: Path, step: int) -> None:
    """Removes log entries after ``step`` and incomplete lines, since a resumed run logs these steps again."""
    path = run / METRICS
    if not path.exists():
        return
    kept = []
    for line in read_text(path, LIMIT).splitlines():
        try:
            entry = json.loads(line)
            if entry.get("step", 0) <= step:
                kept.append(line + "\n")
        except (ValueError, TypeError, AttributeError, RecursionError):
            continue
    write_whole(path, "".join(kept))


def check_reporter(reporter: str | None) -> None:
    """Raises if the package is missing, before anything is written."""
    if reporter not in (None, "none") and find_spec(str(reporter)) is None:
        raise ValueError(f"{reporter} is not installed. Run `pip install {reporter}`, or pass --report-to none")


class MetricsWriter(TrainerCallback):
    """Writes metrics.jsonl and TensorBoard; a resumed run purges the entries that it logs again.

    Other reporters use Trainer's own callbacks.
    """

    def __init__(self, run: Path, reporter: str | None) -> None:
        self.run, self.path, self.reporter = run, run / METRICS, reporter
        self.board: Any = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any
    ) -> None:
        if self.reporter in (None, "tensorboard"):
            self.board = tensorboard(self.run, state.global_step + 1)

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any) -> None:
        logs = others["logs"]
        entry = {"step": state.global_step, **{name: as_json(value) for name, value in logs.items()}}
        try:
            append_line(self.path, json.dumps(entry))
        except OSError as error:
            if not is_disk_full(error):
                raise
            raise RunStopped(
                f"{self.path} cannot be written: there is no room left on the disk. Make room there and run the same "
                "command again: it continues from the last checkpoint"
            ) from None
        for name, value in logs.items():
            if self.board is not None and isinstance(value, int | float):
                self.board.add_scalar(name, value, state.global_step)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any
    ) -> None:
        if self.board is not None:
            self.board.close()


def as_json(value: Any) -> Any:
    """NaN and infinity as text, since JSON has neither."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def tensorboard(run: Path, from_step: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    folder = run / "tensorboard"
    if folder.is_symlink():
        folder.unlink()
    return SummaryWriter(folder, purge_step=from_step)


class ProgressCallback(TrainerCallback):
    """A bar in a terminal; elsewhere a line per log entry, at most one every ``seconds``."""

    def __init__(self, steps: int, title: str = "", seconds: float = 0) -> None:
        self.steps, self.title, self.seconds = steps, title, seconds

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any
    ) -> None:
        self.progress = Progress(
            self.title, total=self.steps, initial=state.global_step, unit="step", seconds=self.seconds
        )

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any) -> None:
        if self.progress.has_bar:
            self.progress.update(done=state.global_step)

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any) -> None:
        self.progress.update(format_metrics(others["logs"]), done=state.global_step)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any
    ) -> None:
        self.progress.clear()


def format_metrics(logs: dict[str, Any]) -> str:
    parts = []
    if "loss" in logs:
        parts.append(f"loss {logs['loss']:.4f}")
    if "eval_loss" in logs:
        parts.append(f"validation loss {logs['eval_loss']:.4f}")
    if "power" in logs:
        parts.append(f"power {logs['power']:g}")
    if "tokens_per_second" in logs:
        parts.append(f"{logs['tokens_per_second']:,.0f} tokens/s")
    if "mfu" in logs:
        parts.append(f"MFU {logs['mfu']:.1%}")
    return "  ".join(parts)
