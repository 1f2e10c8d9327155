"""How training goes at high learning rates and in float16, attention by attention: one JSON file per run, and a page.

    python runs/stability.py DATA --output FOLDER [--arms NAME ...] [--rates X ...] [--precisions P ...]
    python runs/stability.py --page          writes the table of docs/stability.md from results/stability

DATA is a folder of `softplus-attention data prepare`. Every run has the same data, order, steps and size, AdamW and a
short warm-up. What is finished is not done again.
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
from page_blocks import PageError, parts_of, rewritten, table

from softplus_attention import provenance
from softplus_attention.data import TokenDataset
from softplus_attention.evaluation.capture import Call, run_decoder, watching
from softplus_attention.huggingface import SoftplusGPTForCausalLM
from softplus_attention.reference import unit
from softplus_attention.report.stability import final_loss
from softplus_attention.training import TrainConfig, train
from softplus_attention.training.errors import RunStopped
from softplus_attention.training.metrics import METRICS
from softplus_attention.training.run_record import RUN

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results" / "stability"
SIZES: dict[str, dict[str, Any]] = {
    "smoke": {"layers": 2, "width": 32, "heads": 2, "sequence_length": 64, "steps": 4, "batch_size": 4},
    # On bytes, on a CPU: minutes a run.
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
    words = {**RECIPE, **SIZES[options.size], **ARMS[arm], "learning_rate": rate, "precision": precision}
    words["log_every"] = max(1, words["steps"] // 40)
    config = TrainConfig(data=str(options.data), output=str(folder), seed=options.seed, **words)
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
        "config": {word: value for word, value in config.as_dict().items() if word not in ("data", "output")},
        "data": json.loads((folder / RUN).read_text())["data"],
        "command": f"runs/stability.py DATA --output FOLDER --size {options.size} --arms {arm} --rates {rate:g} "
        f"--precisions {precision} --seed {options.seed}",
        "commit": provenance.commit(),
        "versions": provenance.versions(),
        "machine": provenance.machine(),
        "seconds": round(time.monotonic() - began, 1),
    }


def largest_score(model: str, data: Path, length: int) -> float:
    """Of all layers and heads on a few training sequences, before softmax or softplus, in absolute size."""
    tokens = TokenDataset.open(data, "train").document(0)[: 4 * length].astype("int64")
    rows = torch.from_numpy(tokens[: len(tokens) // length * length]).view(-1, length)
    if not len(rows):
        raise SystemExit(f"the first document of {data} is shorter than {length} tokens")
    loaded = SoftplusGPTForCausalLM.from_pretrained(model).eval()
    loaded = loaded.to("cuda" if torch.cuda.is_available() else "cpu")
    largest = 0.0

    def see(call: Call) -> None:
        nonlocal largest
        spec = call.attention.spec
        q, k = (unit(x.float()) if spec.qk_norm else x.float() for x in (call.q, call.k))
        scale = spec.score_scale(q.shape[-1]) * (math.log(length) if spec.log_n else 1.0)
        largest = max(largest, scale * (q @ k.mT).abs().max().item())

    with watching(loaded, see):
        run_decoder(loaded, rows)
    return largest


def cell(record: dict[str, Any] | None) -> str:
    if record is None:
        return "-"
    loss = None if record["stopped"] else final_loss([loss for _, loss in record["losses"]])
    return "stopped: not finite" if loss is None else f"{loss:.3f} ({record['largest_score']:.0f})"


def about(records: list[dict[str, Any]]) -> str:
    first, words = records[0], records[0]["config"]
    machine = first["machine"].get("gpu", first["machine"]["cpu"])
    commits = ", ".join(dict.fromkeys(record["commit"][:7] for record in records))
    model = f"{words['layers']} layers, width {words['width']}, {words['heads']} heads"
    steps = f"{words['steps']} steps of {words['batch_size']} sequences of {words['sequence_length']} tokens"
    return f"{model}, {steps}, seed {first['seed']}; {machine}, torch {first['versions']['torch']}, {commits}."


def page_block(results: Path) -> str:
    records = [json.loads(path.read_text()) for path in sorted(results.glob("*.json"))]
    if not records:
        return "No runs yet."
    lines = []
    kinds = dict.fromkeys((record["size"], record["precision"]) for record in records)
    for size, precision in kinds:
        chosen = [record for record in records if (record["size"], record["precision"]) == (size, precision)]
        mine = {(record["arm"], record["learning_rate"]): record for record in chosen}
        arms, rates = [arm for arm in ARMS if any(key[0] == arm for key in mine)], sorted({key[1] for key in mine})
        columns = [[f"`{arm}`" for arm in arms]]
        columns += [[cell(mine.get((arm, rate))) for arm in arms] for rate in rates]
        lines += table([f"**{size}, {precision}**", *(f"{rate:g}" for rate in rates)], columns)
        lines += [about(chosen), ""]
    return "\n".join(lines).strip()


def write_page(results: Path, page: Path, check: bool) -> int:
    try:
        text, places = parts_of(page, ["stability"])
    except PageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    text, changed = rewritten(text, places, {"stability": page_block(results)})
    if check:
        print(f"{page} is {'out of date' if changed else 'as its files are'}", file=sys.stderr)
        return 1 if changed else 0
    page.write_text(text)
    return 0


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("data", type=Path, nargs="?", help="folder of `softplus-attention data prepare`")
    parser.add_argument("--output", type=Path, default=RESULTS, help="for the results (default: results/stability)")
    parser.add_argument("--runs", type=Path, default=Path("stability-runs"), help="for models (default: %(default)s)")
    parser.add_argument("--size", choices=SIZES, default="10m", help="default: %(default)s")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS), metavar="ARM", help=", ".join(ARMS))
    parser.add_argument("--rates", nargs="+", type=float, default=RATES, metavar="X")
    parser.add_argument("--precisions", nargs="+", default=PRECISIONS, metavar="P", help="bf16, fp16, fp32")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--page", action="store_true", help="write the table of docs/stability.md and train nothing")
    parser.add_argument("--check", action="store_true", help="with --page: write nothing, exit status 1 where it would")
    options = parser.parse_args(arguments)
    if options.page:
        return write_page(options.output, ROOT / "docs" / "stability.md", options.check)
    if options.data is None:
        parser.error("DATA is missing")
    options.output.mkdir(parents=True, exist_ok=True)
    for arm in options.arms:
        for precision in options.precisions:
            for rate in options.rates:
                name = f"{options.size}-{arm}-{precision}-{rate:g}-seed{options.seed}"
                result = options.output / f"{name}.json"
                if result.exists():
                    print(f"{name}: found", flush=True)
                    continue
                record = run(arm, rate, precision, name, options)
                result.write_text(json.dumps(record, indent=1) + "\n")
                print(f"{name}: {cell(record)}, {record['seconds']} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
