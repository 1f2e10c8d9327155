"""Stability of training at high learning rates and in float16 for several attentions: one JSON file per run.

    python experiments/stability.py DATA --output FOLDER [--arms NAME ...] [--rates X ...] [--precisions P ...]

DATA is a folder of `softplus-attention data prepare`. All runs have the same data, order, steps and size, AdamW and a
short warm-up. Finished runs are skipped.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from pathlib import Path
from typing import Any

import torch

from softplus_attention.data import TokenDataset
from softplus_attention.evaluation.capture import Call, capture_attention, run_decoder
from softplus_attention.huggingface import SoftplusGPTForCausalLM
from softplus_attention.reference import unit
from softplus_attention.report.stability import final_loss
from softplus_attention.training import TrainConfig, train
from softplus_attention.training.errors import RunStopped
from softplus_attention.training.metrics import METRICS
from softplus_attention.training.run_folder import RUN
from softplus_attention.utils import provenance

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results" / "stability"
SIZES: dict[str, dict[str, Any]] = {
    "smoke": {"layers": 2, "width": 32, "heads": 2, "sequence_length": 64, "steps": 4, "batch_size": 4},
    # On bytes, on a CPU: minutes per run.
    "0.8m": {"layers": 4, "width": 128, "heads": 2, "sequence_length": 128, "steps": 200, "batch_size": 32},
    "10m": {"layers": 6, "width": 384, "heads": 6, "sequence_length": 512, "steps": 400, "batch_size": 64},
}
RECIPE: dict[str, Any] = {
    "optimizer": "adamw", "warmup": 20, "final_learning_rate": 0.1, "compile": torch.cuda.is_available(),
    "loss": "chunked", "save_every": 100_000, "micro_batch_size": 64,
}  # fmt: skip
ARMS: dict[str, dict[str, Any]] = {
    "softmax": {"attention": "softmax"},
    "softmax-qknorm-logn": {"attention": "softmax-qknorm-logn"},
    "lssar-p3": {"attention": "lssar", "power": "3"},
    "lssar-p15": {"attention": "lssar", "power": "15"},
}
RATES = (1e-3, 3e-3, 1e-2, 3e-2)
PRECISIONS = ("bf16", "fp16")


def run(arm: str, rate: float, precision: str, name: str, options: argparse.Namespace) -> dict[str, Any]:
    folder = options.runs / name
    kwargs = {**RECIPE, **SIZES[options.size], **ARMS[arm], "learning_rate": rate, "precision": precision}
    kwargs["log_every"] = max(1, kwargs["steps"] // 40)
    config = TrainConfig(data=str(options.data), output=str(folder), seed=options.seed, **kwargs)
    began, stopped = time.monotonic(), None
    try:
        model = train(config)
    except RunStopped as error:
        stopped = str(error).partition(",")[0]
    logged = [json.loads(line) for line in (folder / METRICS).read_text().splitlines()]
    entries = [entry for entry in logged if "loss" in entry]
    return {
        "arm": arm,
        "size": options.size,
        "learning_rate": rate,
        "precision": precision,
        "seed": options.seed,
        "stopped": stopped,
        "losses": [[entry["step"], entry["loss"]] for entry in entries],
        "gradient_norms": [[entry["step"], entry.get("grad_norm")] for entry in entries],
        "largest_score": None if stopped else largest_score(str(model), options.data, config.sequence_length),
        "config": {name: value for name, value in config.as_dict().items() if name not in ("data", "output")},
        "data": json.loads((folder / RUN).read_text())["data"],
        "command": f"experiments/stability.py DATA --output FOLDER --size {options.size} --arms {arm} --rates {rate:g} "
        f"--precisions {precision} --seed {options.seed}",
        "commit": provenance.commit(),
        "versions": provenance.versions(),
        "machine": provenance.machine(),
        "seconds": round(time.monotonic() - began, 1),
    }


def largest_score(model: str, data: Path, length: int) -> float:
    """The largest absolute score before softmax or softplus, over all layers and heads, on a few training sequences."""
    tokens = TokenDataset.open(data, "train").document(0)[: 4 * length].astype("int64")
    rows = torch.from_numpy(tokens[: len(tokens) // length * length]).view(-1, length)
    if not len(rows):
        raise SystemExit(f"the first document of {data} is shorter than {length} tokens")
    loaded = SoftplusGPTForCausalLM.from_pretrained(model).eval()
    loaded = loaded.to("cuda" if torch.cuda.is_available() else "cpu")
    largest = 0.0

    def update(call: Call) -> None:
        nonlocal largest
        spec = call.attention.spec
        q, k = (unit(x.float()) if spec.qk_norm else x.float() for x in (call.q, call.k))
        scale = spec.score_scale(q.shape[-1]) * (math.log(length) if spec.log_n else 1.0)
        largest = max(largest, scale * (q @ k.mT).abs().max().item())

    with capture_attention(loaded, update):
        run_decoder(loaded, rows)
    return largest


def format_record(record: dict[str, Any]) -> str:
    if record["stopped"]:
        return str(record["stopped"])
    return f"loss {final_loss([loss for _, loss in record['losses']])}, largest score {record['largest_score']:.0f}"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("data", type=Path, help="folder of `softplus-attention data prepare`")
    parser.add_argument("--output", type=Path, default=RESULTS, help="results folder (default: results/stability)")
    parser.add_argument("--runs", type=Path, default=Path("stability-runs"), help="run folder (default: %(default)s)")
    parser.add_argument("--size", choices=SIZES, default="10m", help="default: %(default)s")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS), metavar="ARM", help=", ".join(ARMS))
    parser.add_argument("--rates", nargs="+", type=float, default=RATES, metavar="X", help="learning rates")
    parser.add_argument("--precisions", nargs="+", default=PRECISIONS, metavar="P", help="bf16, fp16, fp32")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    options = parser.parse_args(arguments)
    options.output.mkdir(parents=True, exist_ok=True)
    for arm in options.arms:
        for precision in options.precisions:
            for rate in options.rates:
                name = f"{options.size}-{arm}-{precision}-{rate:g}-seed{options.seed}"
                result = options.output / f"{name}.json"
                if result.exists():
                    print(f"{name}: already finished", flush=True)
                    continue
                record = run(arm, rate, precision, name, options)
                result.write_text(json.dumps(record, indent=1) + "\n")
                print(f"{name}: {format_record(record)}, {record['seconds']} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
