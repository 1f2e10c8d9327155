"""``softplus-attention demo``: three small models, trained short, read long."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from softplus_attention.utils import DOCS
from softplus_attention.utils.files import remove_folder, write_csv, write_json, write_whole
from softplus_attention.utils.progress import Progress
from softplus_attention.utils.untrusted import read_json
from softplus_attention.validation import check_installed, fail

if TYPE_CHECKING:
    from argparse import _SubParsersAction

    from softplus_attention.evaluation.lengths import LengthCurve, Texts

# What differs between the models is this and nothing else. The power rises while LSSAR trains: from the start at 15 it
# learns more slowly (docs/method.md).
ARMS: dict[str, dict[str, Any]] = {
    "softmax": {"attention": "softmax"},
    "softmax + QK-norm + log N": {"attention": "softmax-qknorm-logn"},
    "LSSAR": {"attention": "lssar", "power": "3,7@0.3,15@0.6"},
}
MULTIPLES = (1, 2, 4, 8, 16)
# In a search over 330 steps Muon at 1e-2 brought LSSAR to 1.70 nats at 1x, AdamW at 3e-3 to 1.91.
TRAINING: dict[str, Any] = {
    "layers": 4, "width": 128, "heads": 2, "sequence_length": 128, "batch_size": 32, "micro_batch_size": 32,
    "optimizer": "muon", "learning_rate": 1e-2, "weight_decay": 0.0, "schedule": "wsd", "decay": 0.5,
    "final_learning_rate": 0.05, "warmup": 0.12, "save_every": 100, "keep": 1, "log_every": 10,
}  # fmt: skip


def add_command(commands: _SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "demo",
        help="train three small models on short text and read long text with them (minutes on two cores)",
        description="Trains a small byte-level GPT with softmax, with softmax + QK-norm + log N, and with LSSAR (the "
        "same size, heads, steps and seed) on text that comes with the package, then measures each at 1 to 16 times "
        "the length it was trained at: a table, a figure and a page. Run again, it goes on where it was stopped.",
    )
    parser.add_argument(
        "--output", type=Path, default=Path("demo"), help="folder for everything (default: %(default)s)"
    )
    parser.add_argument("--steps", type=int, default=240, help="training steps of each model (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and data (default: %(default)s)")
    parser.add_argument("--texts", type=int, default=24, help="number of validation texts (default: %(default)s)")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda (default: %(default)s)")
    parser.add_argument("--overwrite", action="store_true", help="first delete an earlier demo in --output")
    parser.add_argument("--again", dest="overwrite", action="store_true", help=argparse.SUPPRESS)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    for name, least in (("steps", 10), ("texts", 1), ("seed", 0)):
        if getattr(options, name) < least:
            fail(f"--{name}", f"at least {least}", getattr(options, name))
    check_installed("transformers", "accelerate", "matplotlib")
    started = time.perf_counter()
    folder: Path = options.output
    if options.overwrite:
        clear(folder)
    check_is_demo(folder)
    folder.mkdir(parents=True, exist_ok=True)

    print(f"1/3  text: old works in the public domain, as bytes -> {folder / 'data'}", flush=True)
    texts = prepare_text(folder, options.texts)
    print(f"2/3  training {len(ARMS)} models of 0.8M parameters at {TRAINING['sequence_length']} bytes", flush=True)
    models = {name: train_arm(name, folder, options) for name in ARMS}
    print(f"3/3  validation loss, {len(texts.rows)} texts of {texts.longest} bytes cut to each length", flush=True)
    lengths = [TRAINING["sequence_length"] * multiple for multiple in MULTIPLES]
    curves = {name: evaluate_arm(name, path, texts, lengths) for name, path in models.items()}

    seconds = time.perf_counter() - started
    written = write(folder, curves, lengths, texts, options, seconds)
    print("\n" + text_table(curves, lengths))
    print(f"\n{conclusion(curves)}\n\n{seconds:.0f} seconds. Look at:")
    for path in written:
        print(f"  {path}")
    return 0


def clear(folder: Path) -> None:
    """Only what a demo wrote: the folder may be the user's own, and hold others by the same names."""
    for arm in ARMS.values():
        run = folder / "runs" / arm["attention"]
        if (run / "run.json").is_file():
            remove_folder(run)
    if is_demo_data(folder):
        remove_folder(folder / "data")
    text_path(folder).unlink(missing_ok=True)
    for name in ("runs", "text"):
        if (folder / name).is_dir() and not any((folder / name).iterdir()):
            (folder / name).rmdir()


def check_is_demo(folder: Path) -> None:
    """Refuses a folder that holds anything and nothing of a demo."""
    names = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    ours = [text_path(folder), folder / "results.json", *(folder / "runs" / arm["attention"] for arm in ARMS.values())]
    if names and not any(path.exists() for path in ours):
        reason = f"the folder {folder} holds something else ({names[0]})"
        raise ValueError(f"{reason}: `--output` takes a new folder, an empty one, or that of an earlier demo")


def is_demo_data(folder: Path) -> bool:
    """Whether ``folder`` / data was prepared from the text of a demo."""
    try:
        sources = read_json(folder / "data" / "index.json")["plan"]["sources"]
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return [Path(source).name for source in sources] == [text_path(folder).name]


def text_path(folder: Path) -> Path:
    return folder / "text" / "train.jsonl"


def prepare_text(folder: Path, texts: int) -> Texts:
    from softplus_attention.data import builtin_text, prepare
    from softplus_attention.evaluation.lengths import texts_of

    train, validation = builtin_text()
    source = text_path(folder)
    if not source.exists():
        source.parent.mkdir(parents=True, exist_ok=True)
        write_whole(source, "".join(json.dumps({"text": text}) + "\n" for text in train))
    if not is_demo_data(folder):  # by another path to the same folder it would be other data
        prepare([source], folder / "data", tokenizer="bytes", validation_fraction=0.0, workers=1)
    longest = TRAINING["sequence_length"] * MULTIPLES[-1]
    return texts_of((list(text.encode()) for text in validation), longest, texts)


def train_arm(name: str, folder: Path, options: argparse.Namespace) -> Path:
    from softplus_attention.training import TrainConfig, train
    from softplus_attention.training.errors import ConfigChanged, RunStopped

    kwargs = {**TRAINING, **ARMS[name], "steps": options.steps, "seed": options.seed, "device": options.device}
    output = folder / "runs" / ARMS[name]["attention"]
    print(f"     {name}", flush=True)
    config = TrainConfig(data=str(folder / "data"), output=str(output), **kwargs)
    try:
        return train(config)
    except ConfigChanged as error:
        raise RunStopped(
            f"{folder} holds a demo with other settings: put them back to go on, choose another --output, or say "
            "--overwrite to begin anew"
        ) from error


def evaluate_arm(name: str, path: Path, texts: Texts, lengths: list[int]) -> LengthCurve:
    from softplus_attention.evaluation.lengths import loss_by_length
    from softplus_attention.huggingface.loading import load_model

    total = len(lengths) * texts.rows.numel()
    with Progress(f"     {name}", total) as progress:
        return loss_by_length(
            load_model(str(path)), texts, lengths, progress=lambda done, _: progress.update(done=done)
        )


def text_table(curves: dict[str, LengthCurve], lengths: list[int]) -> str:
    head = f"{'validation loss (nats)':28}" + "".join(f"{n:>8}" for n in lengths) + "   bytes"
    times = " " * 28 + "".join(f"{n // lengths[0]:>7}x" for n in lengths)
    rows = [f"{name:28}" + "".join(f"{loss:8.3f}" for loss in curve.loss) for name, curve in curves.items()]
    return "\n".join([head, times, *rows])


def conclusion(curves: dict[str, LengthCurve]) -> str:
    """What the numbers say, whatever they are."""
    parts = []
    for name, curve in curves.items():
        change = curve.loss[-1] - curve.loss[0]
        parts.append(f"{name} {'rises' if change > 0 else 'falls'} by {abs(change):.2f}")
    best = min(curves, key=lambda name: curves[name].loss[-1])
    return (
        f"From 1x to {MULTIPLES[-1]}x {', '.join(parts)}. Lowest at {MULTIPLES[-1]}x: {best}.\n"
        "Small models with one recipe: at 30M to 354M parameters softmax + QK-norm + log N had the lower loss "
        f"({DOCS}/results)."
    )


def write(
    folder: Path,
    curves: dict[str, LengthCurve],
    lengths: list[int],
    texts: Texts,
    options: argparse.Namespace,
    seconds: float,
) -> list[Path]:
    from softplus_attention.charts.draw import draw
    from softplus_attention.charts.model import SeriesStyles
    from softplus_attention.report.build import write_report
    from softplus_attention.report.runs import demo_chart
    from softplus_attention.utils import provenance

    losses = {name: curve.loss for name, curve in curves.items()}
    versions = provenance.versions(("torch", "transformers"))
    settings = {**TRAINING, "steps": options.steps, "seed": options.seed, "arms": ARMS}
    about: dict[str, Any] = {"lengths": lengths, "texts": len(texts.rows), "documents": texts.documents}
    about |= {"commit": provenance.commit(), "versions": versions, "machine": provenance.machine()}
    errors = {name: curve.error for name, curve in curves.items()}
    command = f"softplus-attention demo --steps {options.steps} --seed {options.seed} --texts {options.texts}"
    results = {"command": command, **about}
    # Of this call: what an earlier one finished took none of them.
    results |= {"seconds": round(seconds, 1), "settings": settings, "loss": losses, "standard_error": errors}
    write_json(folder / "results.json", results)
    rounded = ([name, *(f"{loss:.5f}" for loss in row)] for name, row in losses.items())
    table = write_csv(folder / "loss-by-length.csv", ["attention", *map(str, lengths)], rounded)
    title = f"Trained on {lengths[0]} bytes, read at up to {lengths[-1]}: small models"
    pictures = draw(demo_chart(results, title, SeriesStyles()), folder / "loss-by-length")
    page = write_report(folder, folder / "index.html").page
    return [page, *pictures, table, folder / "results.json"]
