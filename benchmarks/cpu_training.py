"""A whole training step on a CPU: LSSAR compared with softmax in the same model, and the time of each operator.

python benchmarks/cpu_training.py --output cpu_training.json      the demo's model at 512 tokens
python benchmarks/cpu_training.py --shape 30M --batch 2 --steps 4

The models follow the recommended recipe: two local layers to one global layer; LSSAR with learned factors of log N, or
softmax with QK-norm, log N and a learned scale; Muon. LSSAR runs with the C++ kernels and with PyTorch operations.
Steps alternate in one process, so that other load affects all models. Results are medians over steps, in wall time and
in processor time (which other load hardly changes), also for the profiled operators. Tokens are random.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function
from transformers import set_seed

from softplus_attention.huggingface import SoftplusGPTForCausalLM
from softplus_attention.kernels.cpu import native
from softplus_attention.recipes import ATTENTIONS, GLOBAL_EVERY
from softplus_attention.training.config import TrainConfig
from softplus_attention.training.losses import linear_loss
from softplus_attention.training.optimizers import build_optimizer
from softplus_attention.training.run import model_config
from softplus_attention.utils import provenance

# layers, width, heads, vocabulary
SHAPES = {"demo": (4, 128, 2, 256), "30M": (6, 384, 3, 50257), "124M": (12, 768, 6, 50257)}
SOFTMAX, LSSAR = ATTENTIONS.values()
# Name -> (settings, CPU kernels)
ARMS = {"softmax": (SOFTMAX, "torch"), "lssar": (LSSAR, "native"), "lssar, PyTorch's operations": (LSSAR, "torch")}
STAGES = ("forward", "backward", "optimizer")
ATTENTION = ("softplus_attention::", "aten::_scaled_dot_product_flash_attention_for_cpu")


class Arm:
    def __init__(self, name: str, shape: str, tokens: int, batch: int) -> None:
        layers, width, heads, vocabulary = SHAPES[shape]
        settings, self.kernels = ARMS[name]
        with tempfile.TemporaryDirectory() as folder:
            self.config = TrainConfig(
                data="random", output=folder, layers=layers, width=width, heads=heads, sequence_length=tokens,
                window=tokens // 2, global_every=GLOBAL_EVERY, optimizer="muon", learning_rate=3e-3,
                batch_size=batch, loss="chunked", device="cpu", **settings,
            )  # fmt: skip
        set_seed(0)
        self.name, self.model = name, SoftplusGPTForCausalLM(model_config(self.config, vocabulary, 0))
        self.model.linear_loss = linear_loss(self.config.loss)
        self.optimizer = build_optimizer(
            "muon", self.model, learning_rate=3e-3, muon_learning_rate=5e-3, weight_decay=0.1, betas=(0.9, 0.95)
        )
        self.ids = torch.randint(vocabulary, (batch, tokens), generator=torch.Generator().manual_seed(0))
        self.seconds: list[tuple[float, float]] = []  # wall and processor time of each step

    def step(self) -> None:
        with native.using(self.kernels):
            self.run_step()

    def run_step(self) -> None:
        begun = time.perf_counter(), time.process_time()
        with record_function("forward"):
            loss = self.model(input_ids=self.ids, labels=self.ids, use_cache=False).loss
        with record_function("backward"):
            loss.backward()
        with record_function("optimizer"):
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()
        self.seconds.append((time.perf_counter() - begun[0], time.process_time() - begun[1]))


def profiled(arm: Arm, steps: int) -> dict[str, Any]:
    """Milliseconds per step of its stages, of attention, and of the operators (self time)."""
    seen: dict[str, list[tuple[float, float, int]]] = {}
    for _ in range(steps):
        with profile(activities=[ProfilerActivity.CPU]) as found:
            arm.step()
        for event in found.key_averages():
            row = (event.self_cpu_time_total / 1e3, event.cpu_time_total / 1e3, event.count)
            seen.setdefault(event.key, []).append(row)
    own, whole, calls = ({name: statistics.median(r[i] for r in rows) for name, rows in seen.items()} for i in range(3))
    operators = [
        {"operator": name, "ms": own[name], "calls": calls[name]}
        for name in sorted(own, key=lambda name: -own[name])
        if name not in STAGES
    ]
    return {
        "stages": {name: whole[name] for name in STAGES},
        "attention_ms": sum(ms for name, ms in whole.items() if name.startswith(ATTENTION)),
        "operators": operators[:25],
    }


def table(rows: list[dict[str, Any]]) -> str:
    head = f"{'arm':<28} {'step ms':>8} {'processor ms':>13} {'tokens/s':>9} {'of softmax':>11} {'(processor)':>12}"
    lines = [head + f"{'attention ms':>14} {'forward':>8} {'backward':>9} {'optimizer':>10}"]
    for row in rows:
        wall, processor = (rows[0][name] / row[name] for name in ("step_ms", "processor_ms"))
        stages = "".join(f"{row['profile']['stages'][name]:>{len(name) + 2}.0f}" for name in STAGES)
        lines.append(
            f"{row['arm']:<28} {row['step_ms']:>8.0f} {row['processor_ms']:>13.0f} {row['tokens_per_second']:>9,.0f}"
            f" {wall:>11.2f} {processor:>12.2f} {row['profile']['attention_ms']:>13.0f} {stages}"
        )
    for row in rows:
        lines += ["", f"{row['arm']}: operators by self time"]
        for entry in row["profile"]["operators"][:14]:
            lines.append(f"  {entry['operator']:<52} {entry['ms']:>8.2f} ms {entry['calls']:>7.1f} calls")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="demo", help="size of the models (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=512, help="tokens per sequence (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=8, help="sequences per step (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=20, help="timed steps of each model (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="default: %(default)s")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    parser.add_argument("--commit", help="commit to record (default: from git)")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    arms = [Arm(name, options.shape, options.tokens, options.batch) for name in ARMS]
    for _ in range(options.steps + 1):
        for arm in arms:
            arm.step()
    rows = []
    for arm in arms:
        wall, processor = (statistics.median(seconds) for seconds in zip(*arm.seconds[1:], strict=True))
        rows.append(
            {
                "arm": arm.name,
                "attention": arm.config.attention,
                "parameters": sum(p.numel() for p in arm.model.parameters()),
                "step_ms": wall * 1e3,
                "processor_ms": processor * 1e3,
                "tokens_per_second": arm.ids.numel() / wall,
                "profile": profiled(arm, max(1, options.steps // 2)),
            }
        )
    print(table(rows))
    if options.output:
        data = {
            "command": provenance.command("benchmarks/cpu_training.py"),
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "commit": options.commit or provenance.commit(),
            "versions": provenance.versions(),
            "machine": provenance.machine(torch.device("cpu")),
            "shape": dict(zip(("layers", "width", "heads", "vocabulary"), SHAPES[options.shape], strict=True)),
            "settings": {name: getattr(options, name) for name in ("tokens", "batch", "steps", "threads")},
            "rows": rows,
        }
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(data, indent=1) + "\n")


if __name__ == "__main__":
    main()
