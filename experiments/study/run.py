"""Trains and measures the arms of the study one after the other: one JSON file per run (docs/results.md).

    python -m experiments.study.run DATA TEXT --output FOLDER [--group NAME | --arms NAME ...] [--seed N]

DATA is a folder of `softplus-attention data prepare`. TEXT is a file of long documents, or such a folder, of which the
validation split is used. All arms have the same data, order, steps and size. Finished runs are skipped, and interrupted
runs continue. Needs only torch and transformers.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from experiments.study.arms import (
    ARMS,
    FEW_MULTIPLES,
    FEWER_HEADS,
    GROUPS,
    MULTIPLES,
    RECIPE,
    SIZES,
    VARIANTS,
)
from softplus_attention.evaluation import layers
from softplus_attention.evaluation.layers import QUANTITIES, layer_groups
from softplus_attention.evaluation.measures.inside import measure_inside
from softplus_attention.evaluation.measures.lengths import measure_lengths
from softplus_attention.evaluation.measures.passkey import measure_passkey
from softplus_attention.evaluation.models import MIXED, LoadedModel, load_for_evaluation, parse_model_spec
from softplus_attention.evaluation.passkey import prompt_of
from softplus_attention.evaluation.texts import Documents, folder_documents, raw_texts, text_documents
from softplus_attention.huggingface.loading import load_tokenizer
from softplus_attention.huggingface.modeling_softplus_gpt import SoftplusGPTAttention
from softplus_attention.training import TrainConfig, train
from softplus_attention.training.metrics import METRICS
from softplus_attention.training.run_folder import RUN
from softplus_attention.utils import provenance


def main(arguments: list[str] | None = None) -> int:
    options = parsed(arguments)
    began = time.monotonic()
    tokenizer = load_tokenizer(options.tokenizer or str(options.data))
    documents = (
        folder_documents(options.text)
        if Path(options.text).is_dir()
        else text_documents(raw_texts([options.text]), [Path(options.text).name], tokenizer)
    )
    for arm in options.arms or GROUPS[options.group]:
        name = f"{options.size}-{arm}-seed{options.seed}"
        result = options.output / f"{name}.json"
        if result.exists():
            print(f"{name}: already finished", flush=True)
            continue
        if options.seconds and time.monotonic() - began > options.seconds:
            print(f"{name}: no time left", flush=True)
            return 3
        record = run(arm, name, options, documents, tokenizer)
        result.write_text(json.dumps(record, indent=1) + "\n")
        print(format_line(name, record), flush=True)
        gc.collect()
        torch.cuda.empty_cache()
    return 0


def parsed(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.study.run", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("data", type=Path, help="folder of `softplus-attention data prepare`")
    parser.add_argument("text", help="file of long documents to measure on, or a prepared folder")
    parser.add_argument("--output", type=Path, required=True, help="folder for runs and results")
    parser.add_argument("--size", choices=SIZES, default="10m", help="default: %(default)s")
    chosen = parser.add_mutually_exclusive_group()
    chosen.add_argument("--group", choices=GROUPS, default="headline", help="group of arms (default: %(default)s)")
    chosen.add_argument("--arms", nargs="+", choices=ARMS, metavar="ARM", help=", ".join(ARMS).replace("%", "%%"))
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    parser.add_argument("--steps", type=int, help="training steps (default: those of the size)")
    parser.add_argument("--tokenizer", help="default: the tokenizer of the data")
    parser.add_argument("--only-lengths", action="store_true", help="measure only the loss by length")
    parser.add_argument(
        "--multiples", type=int, nargs="+", default=MULTIPLES, metavar="N",
        help="lengths to measure, in multiples of the training length (default: all)",
    )  # fmt: skip
    parser.add_argument("--texts", type=int, default=24, help="maximum number of texts (default: %(default)s)")
    parser.add_argument("--trials", type=int, default=10, help="passkey trials per cell (default: %(default)s)")
    parser.add_argument("--seconds", type=float, help="start no arm after this time")
    parser.add_argument("--commit", help="commit to record (default: from git)")
    parser.add_argument(
        "--processes",
        type=int,
        default=1,
        help="processes that share the GPU; with more than 1, step times are not comparable",
    )
    return parser.parse_args(arguments)


def run(arm: str, name: str, options: argparse.Namespace, documents: Documents, tokenizer: Any) -> dict[str, Any]:
    folder = options.output / "runs" / name
    kwargs = {**RECIPE, **SIZES[options.size], **ARMS[arm], "seed": options.seed}
    if options.steps:
        kwargs |= {"steps": options.steps, "log_every": min(kwargs["log_every"], options.steps)}
    if kwargs.get("window") == "half":
        kwargs["window"] = kwargs["sequence_length"] // 2
    if kwargs["heads"] in FEWER_HEADS:
        kwargs["heads"] = fewer_heads(SIZES[options.size]["heads"], kwargs["heads"], arm, options.size)
    config = TrainConfig(data=str(options.data), output=str(folder), **kwargs)
    began = time.monotonic()
    model = train(config)
    trained = time.monotonic() - began
    logged = [json.loads(line) for line in (folder / METRICS).read_text().splitlines()]
    losses = [entry for entry in logged if "loss" in entry]
    record = {
        "arm": arm,
        "size": options.size,
        "seed": options.seed,
        "config": {name: value for name, value in config.as_dict().items() if name not in ("data", "output")},
        "tokens": config.steps * config.batch_size * config.sequence_length,
        "data": json.loads((folder / RUN).read_text())["data"],
        "training": {
            "seconds": round(trained, 1),
            "processes": options.processes,
            "step_seconds": sorted(entry["step_seconds"] for entry in losses)[len(losses) // 2],
            "losses": [[entry["step"], round(entry["loss"], 4)] for entry in losses],
        },
        "command": run_command(arm, options),
        "commit": options.commit or provenance.commit(),
        "versions": provenance.versions(),
        "machine": provenance.machine(),
    }
    measured = evaluation(arm, str(model), folder / "evaluation", config.sequence_length, options, documents, tokenizer)
    return record | {"evaluation": measured, "seconds": round(time.monotonic() - began, 1)}


def fewer_heads(heads: int, share: str, arm: str, size: str) -> int:
    fewer, left = divmod(heads, FEWER_HEADS[share])
    if left:
        raise SystemExit(f"--arms {arm}: a {share} of the {heads} heads of --size {size} is not a whole number")
    return fewer


def run_command(arm: str, options: argparse.Namespace) -> str:
    command = ["experiments/study/run.py", "--size", options.size, "--arms", arm, "--seed", options.seed]
    command += ["--steps", options.steps] if options.steps else []
    command += ["--only-lengths"] if options.only_lengths else []
    command += ["--multiples", *options.multiples] if tuple(options.multiples) != MULTIPLES else []
    return " ".join(map(str, command))


def evaluation(
    arm: str,
    model: str,
    folder: Path,
    length: int,
    options: argparse.Namespace,
    documents: Documents,
    tokenizer: Any,
) -> dict[str, Any]:
    def open_as(option: str | None = None) -> LoadedModel:
        return load_for_evaluation(
            parse_model_spec(model if option is None else f"{model}+{option}"), length, dtype=MIXED
        )

    def lengths(found: LoadedModel, multiples: Sequence[int]) -> dict[str, Any]:
        lengths = [multiple * length for multiple in multiples]
        return measure_lengths(found, documents, lengths, folder, sequences=options.texts)["results"]

    own = open_as()
    by_length = lengths(own, options.multiples)
    measured: dict[str, Any] = {
        "parameters": own.description()["parameters"],
        "far_control": far_control(by_length),
        "lengths": with_last_control(by_length),
        "learned": learned_by_layer(own.model),
        "passkey": [],
        "inside": [],
        "variants": {},
    }
    if options.only_lengths:
        return measured
    measured["passkey"] = passkey(own, length, folder, options, documents, tokenizer)
    measured["inside"] = inside(own, length, folder, documents)
    del own
    variants = [option.replace("=1x", f"={length}") for option in VARIANTS.get(arm, [])]
    return measured | {
        "variants": {option: with_last_control(lengths(open_as(option), FEW_MULTIPLES)) for option in variants}
    }


def far_control(results: dict[str, Any]) -> list[dict[str, Any]]:
    """The control over the last quarter of each text."""
    entries = [entry for entry in results["lengths"] if entry["control"]]
    return [
        {"length": entry["length"]} | {name: value for name, value in entry["control"].items() if name != "last"}
        for entry in entries
    ]


def with_last_control(results: dict[str, Any]) -> dict[str, Any]:
    """The results with the control over only the last half of a training length, which all runs of the study have."""

    def last(control: dict[str, Any] | None) -> dict[str, Any] | None:
        return None if control is None else {"window": control["window"], **control["last"]}

    return results | {"lengths": [entry | {"control": last(entry["control"])} for entry in results["lengths"]]}


def passkey(
    own: LoadedModel, length: int, folder: Path, options: argparse.Namespace, documents: Documents, tokenizer: Any
) -> list[dict[str, Any]]:
    multiples, depths = (1, 2, 4, 16, 64), [0.1, 0.5, 0.9]
    cells = measure_passkey(
        own, tokenizer, prompt_of("compact"), [length * multiple for multiple in multiples], depths, folder,
        documents=documents, trials=options.trials,
    )["results"]["cells"]  # fmt: skip
    return [{name: cell[name] for name in ("length", "depth", "trials", "correct")} for cell in cells]


def inside(own: LoadedModel, length: int, folder: Path, documents: Documents) -> list[dict[str, Any]]:
    entries = measure_inside(own, documents, [length, 16 * length], folder, sequences=2, blocks=4)["results"]["lengths"]
    return [
        {
            "length": entry["length"],
            "log_keys": entry["log_keys"],
            **{name: mean_over_heads(entry, name) for name in QUANTITIES},
            "groups": inside_by_group(entry, layer_groups(entries)),
        }
        for entry in entries
    ]


def mean_over_heads(entry: dict[str, Any], name: str) -> float | None:
    values = [head[name] for head in entry["heads"]]
    return None if None in values else sum(values) / len(values)


def inside_by_group(entry: dict[str, Any], groups: Sequence[layers.LayerGroup]) -> list[dict[str, Any]]:
    """Means over the global and over the local layers; empty if all layers see the same."""
    return [
        {"layers": group.label, "log_keys": layers.log_keys(entry, group)}
        | {name: layers.mean_over_heads(entry, group, name) for name in QUANTITIES}
        for group in groups
        if group.label
    ]


def learned_by_layer(model: Any) -> list[dict[str, list[float]]]:
    """Learned parameters of the attentions, a power or a scale per head; most attentions have none."""
    own = [module for module in model.modules() if isinstance(module, SoftplusGPTAttention)]
    return [
        {name: [round(number, 4) for number in value.tolist()] for name, value in layer.attention_parameters().items()}
        for layer in own
    ]


def format_line(name: str, record: dict[str, Any]) -> str:
    found = record["evaluation"]
    losses = " ".join(f"{entry['loss']:.3f}" for entry in found["lengths"]["lengths"])
    gain = found["lengths"]["lengths"][-1]["control"]
    keys: dict[int, list[int]] = {}
    for cell in found["passkey"]:
        right = keys.setdefault(cell["length"], [0, 0])
        right[0] += cell["correct"]
        right[1] += cell["trials"]
    passkey = " ".join(f"{100 * right // of}" for right, of in keys.values())
    variants = "; ".join(
        f"{option} " + " ".join(f"{entry['loss']:.3f}" for entry in variant["lengths"])
        for option, variant in found["variants"].items()
    )
    training = record["training"]
    return (
        f"{name}: {losses}; gain {gain['gain'] if gain else 0:+.3f}; passkey % {passkey}; {variants}; "
        f"{1000 * training['step_seconds']:.1f} ms per step, trained {training['seconds']} s of {record['seconds']} s"
    )


if __name__ == "__main__":
    sys.exit(main())
