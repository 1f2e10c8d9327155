"""Training speed: tokens per second, MFU and step time per attention, with the Trainer of `train`.

python benchmarks/training.py --output results/training.json    gpt2-small at 1024 tokens, softmax and lssar, on a GPU
python benchmarks/training.py --quick --output training.json    a tiny model on a CPU, to test the script

Tokens are synthetic. Each attention runs in its own process: warm-up steps, then measured steps, timed between points
at which the device is idle. Without --micro-batch the largest micro-batch that fits is found by halving
--most-sequences. MFU is tokens per second times (6 N + 12 L W T), divided by the peak of the device, for N parameters
and L layers of width W over T tokens. It counts the full attention matrix; `mfu_causal` counts the causal half.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from figures import write
from torch import Tensor
from transformers import TrainerCallback, set_seed
from transformers.utils import logging as transformers_logging

from softplus_attention.huggingface import SoftplusGPTForCausalLM
from softplus_attention.training import metrics
from softplus_attention.training.config import TrainConfig, configured
from softplus_attention.training.run import build_trainer, model_config, training_arguments
from softplus_attention.utils import provenance

VOCABULARY = 50257
QUICK = {"layers": 2, "width": 32, "heads": 2, "sequence_length": 64, "micro_batch_size": 4, "compile": False}


class Noise(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Random tokens, the same for every attention."""

    def __init__(self, total: int, length: int, vocabulary: int) -> None:
        self.total = total
        generator = torch.Generator().manual_seed(0)
        self.tokens = torch.randint(vocabulary, (64, length), generator=generator)

    def __len__(self) -> int:
        return self.total

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        ids = self.tokens[number % len(self.tokens)]
        labels = ids.clone()
        labels[0] = -100
        return {"input_ids": ids, "labels": labels}


class Clock(TrainerCallback):
    """Times three stretches of steps after the warm-up, with the device idle at their ends."""

    def __init__(self, warmup: int, steps: int, device: torch.device) -> None:
        self.warmup, self.steps, self.device = warmup, steps, device
        self.marks: list[float] = []

    def mark(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        self.marks.append(time.perf_counter())

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        done = state.global_step
        if done == self.warmup and self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        # Three stretches show the spread without synchronizing at every step.
        if done >= self.warmup and (done - self.warmup) % max(1, self.steps // 3) == 0:
            self.mark()


def measure(options: argparse.Namespace, attention: str) -> dict[str, Any]:
    """Measures one attention in this process."""
    transformers_logging.set_verbosity_error()
    micro = options.micro_batch
    with tempfile.TemporaryDirectory() as folder:
        changes: dict[str, Any] = {
            "data": "synthetic", "output": folder, "attention": attention, "steps": options.warmup + options.steps,
            "micro_batch_size": micro, "batch_size": micro * options.accumulate, "save_every": 10**9,
            "log_every": 10**9, "evaluate_every": 0, "loss": options.loss, "compile": options.compile,
            "optimizer": options.optimizer, "workers": 0, "warmup": 0, "device": "cpu" if options.quick else "auto",
        }  # fmt: skip
        if options.power and not attention.startswith("softmax"):
            changes["power"] = options.power
        config = configured(changes | (QUICK if options.quick else {}), preset=options.preset)
        config = dataclasses.replace(config, batch_size=config.micro_batch_size * options.accumulate)
        return timed(config, options)


def timed(config: TrainConfig, options: argparse.Namespace) -> dict[str, Any]:
    arguments = training_arguments(config)
    arguments.save_strategy = "no"
    set_seed(config.seed)
    vocabulary = 300 if options.quick else VOCABULARY
    model = SoftplusGPTForCausalLM(model_config(config, vocabulary, 0))
    count = sum(p.numel() for p in model.parameters())
    data = Noise(config.steps * config.batch_size, config.sequence_length, vocabulary)
    trainer = build_trainer(config, arguments, model, data)
    clock = Clock(options.warmup, options.steps, arguments.device)
    trainer.add_callback(clock)
    begun = time.perf_counter()
    result = trainer.train()
    tokens = config.batch_size * config.sequence_length
    stretch = max(1, options.steps // 3)
    seconds = [(b - a) / stretch for a, b in zip(clock.marks, clock.marks[1:], strict=False)]
    step = statistics.median(seconds)
    flops = metrics.flops_per_token(count, config.width, config.spans())
    causal = flops - 6 * config.width * sum(config.spans())
    peak = options.peak_tflops or metrics.peak_tflops(arguments.device)
    cuda = arguments.device.type == "cuda"
    return {
        "attention": config.attention, "parameters": count, "sequence_length": config.sequence_length,
        "micro_batch": config.micro_batch_size, "accumulate": options.accumulate, "tokens_per_step": tokens,
        "loss_function": config.loss, "optimizer": config.optimizer, "compile": config.compile,
        "step_ms": step * 1e3, "step_ms_of_each_third": [s * 1e3 for s in seconds], "tokens_per_second": tokens / step,
        "flops_per_token": flops, "peak_tflops": peak,
        "mfu": peak and tokens / step * flops / (peak * 1e12),
        "mfu_causal": peak and tokens / step * causal / (peak * 1e12),
        "peak_memory_gib": torch.cuda.max_memory_allocated() / 2**30 if cuda else None,
        "training_loss": result.training_loss, "seconds": time.perf_counter() - begun,
        "machine": provenance.machine(arguments.device),
    }  # fmt: skip


def measure_in_process(options: argparse.Namespace, attention: str, micro: int) -> dict[str, Any] | str:
    """The row, or the last line of the error."""
    command = [sys.executable, __file__, "--one", attention, "--micro-batch", str(micro)]
    command += ["--preset", options.preset, "--steps", str(options.steps), "--warmup", str(options.warmup)]
    command += ["--accumulate", str(options.accumulate), "--loss", options.loss, "--optimizer", options.optimizer]
    command += ["--compile" if options.compile else "--no-compile"]
    for name in ("power", "peak_tflops"):
        if getattr(options, name) is not None:
            command += [f"--{name.replace('_', '-')}", str(getattr(options, name))]
    command += ["--quick"] if options.quick else []
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode == 0:
        return json.loads(result.stdout.strip().splitlines()[-1])
    lines = [line for line in result.stderr.strip().splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line]
    return (errors or lines or ["no error message"])[-1]


def measure_largest(options: argparse.Namespace, attention: str) -> dict[str, Any]:
    """The row of the largest micro-batch that fits."""
    micro = options.micro_batch or options.most_sequences
    while True:
        row = measure_in_process(options, attention, micro)
        if isinstance(row, dict):
            return row
        if "OutOfMemory" not in row or options.micro_batch or micro == 1:
            return {"attention": attention, "micro_batch": micro, "error": row}
        print(f"{attention}: {micro} sequences do not fit", file=sys.stderr, flush=True)
        micro //= 2


def table(rows: list[dict[str, Any]]) -> str:
    lines = ["attention              batch   step ms    tokens/s     MFU   causal  GiB   to softmax"]
    softmax = [row for row in rows if row.get("attention") == "softmax" and "step_ms" in row]
    base = softmax[0]["step_ms"] / softmax[0]["tokens_per_step"] if softmax else None
    for row in rows:
        if "error" in row:
            lines.append(f"{row['attention']:<22} {row['micro_batch']:>5}   {row['error']}")
            continue
        ratio = row["step_ms"] / row["tokens_per_step"] / base if base else float("nan")
        row["time_to_softmax"] = ratio if base else None
        mfu, causal = (f"{row[name]:.1%}" if row[name] else "-" for name in ("mfu", "mfu_causal"))
        memory = f"{row['peak_memory_gib']:.0f}" if row["peak_memory_gib"] else "-"
        lines.append(
            f"{row['attention']:<22} {row['micro_batch']:>5} {row['step_ms']:>9.1f} {row['tokens_per_second']:>11,.0f}"
            f" {mfu:>7} {causal:>8} {memory:>4} {ratio:>9.2f}x"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--attentions", default="softmax,lssar", help="names of the catalogue (default: %(default)s)")
    parser.add_argument("--preset", default="gpt2-small", help="default: %(default)s")
    parser.add_argument("--power", help="for the attentions with a second stage (default: their own)")
    parser.add_argument("--micro-batch", type=int, help="sequences at a time (default: the largest number that fits)")
    parser.add_argument("--most-sequences", type=int, default=64, help="where the search starts (default: %(default)s)")
    parser.add_argument("--accumulate", type=int, default=1, help="micro-batches per step (default: %(default)s)")
    parser.add_argument("--warmup", type=int, default=10, help="steps before timing (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=30, help="timed steps, in three stretches (default: %(default)s)")
    parser.add_argument("--loss", default="chunked", help="plain, chunked or liger (default: %(default)s)")
    parser.add_argument("--optimizer", default="adamw", help="adamw or muon (default: %(default)s)")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--peak-tflops", type=float, help="of the device (default: known for common GPUs)")
    parser.add_argument("--quick", action="store_true", help="a tiny model on a CPU")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    parser.add_argument("--commit", help="commit to record (default: from git)")
    parser.add_argument("--one", metavar="ATTENTION", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(options, options.one)))
        return
    if options.quick:
        options.micro_batch, options.steps, options.warmup = QUICK["micro_batch_size"], 6, 2
    rows = []
    for attention in options.attentions.split(","):
        rows.append(measure_largest(options, attention))
        print(table(rows[-1:]).splitlines()[-1], file=sys.stderr, flush=True)
    print(table(rows))
    if options.output:
        data = {
            "command": provenance.command("benchmarks/training.py"),
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "commit": options.commit or provenance.commit(),
            "versions": provenance.versions(),
            "mfu": "tokens/s * (6 N + 12 L W T) / peak; mfu_causal: 6 N + 6 L W T",
            "rows": rows,
        }
        write(data, options.output)
    if all("error" in row for row in rows):
        sys.exit(1)


if __name__ == "__main__":
    main()
