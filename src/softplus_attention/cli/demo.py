"""``softplus-attention demo``: trains three small models on short text and evaluates them on long text."""

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
    from softplus_attention.evaluation.lengths import LengthCurve, Texts

# The only differences between the models. The power of LSSAR rises during training: with 15 from the start it learns
# more slowly (docs/method.md).
ARMS: dict[str, dict[str, Any]] = {
    "softmax": {"attention": "softmax"},
    "softmax + QK-norm + log N": {"attention": "softmax-qknorm-logn"},
    "LSSAR": {"attention": "lssar", "power": "3,7@0.3,15@0.6"},
}
MULTIPLES = (1, 2, 4, 8, 16)
# In a search over 330 steps LSSAR reached 1.70 nats at 1x with Muon at 1e-2, and 1.91 with AdamW at 3e-3.
TRAINING: dict[str, Any] = {
    "layers": 4, "width": 128, "heads": 2, "sequence_length": 128, "batch_size": 32, "micro_batch_size": 32,
    "optimizer": "muon", "learning_rate": 1e-2, "weight_decay": 0.0, "schedule": "wsd", "decay": 0.5,
    "final_learning_rate": 0.05, "warmup": 0.12, "save_every": 100, "keep": 1, "log_every": 10,
}  # fmt: skip


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "demo",
        help="train three small models on short text and evaluate them on long text (minutes on two cores)",
        description="Trains three small byte-level GPTs on the text of the package: with softmax, with softmax + "
        "QK-norm + log N, and with LSSAR (same size, heads, steps and seed). Then measures each at 1 to 16 times the "
        "training length, and writes a table, a figure and an HTML page. Run the same command again to continue.",
    )
    add = parser.add_argument
    add("--output", type=Path, metavar="FOLDER", default=Path("demo"), help="folder for all files (default: demo)")
    add("--steps", type=int, metavar="N", default=240, help="training steps of each model (default: %(default)s)")
    add("--seed", type=int, metavar="N", default=0, help="seed of weights and data (default: %(default)s)")
    add("--texts", type=int, metavar="N", default=24, help="number of validation texts (default: %(default)s)")
    add("--device", default="auto", help="auto, cpu or cuda (default: %(default)s)")
    add("--overwrite", action="store_true", help="first delete an earlier demo in --output")
    add("--again", dest="overwrite", action="store_true", help=argparse.SUPPRESS)
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

    print(f"1/3  preparing text: old books in the public domain, as bytes -> {folder / 'data'}", flush=True)
    texts = prepare_text(folder, options.texts)
    print(f"2/3  training {len(ARMS)} models of 0.8M parameters on {TRAINING['sequence_length']} bytes", flush=True)
    models = {name: train_arm(name, folder, options) for name in ARMS}
    print(f"3/3  validation loss on {len(texts.rows)} texts of {texts.longest} bytes, cut to each length", flush=True)
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
    """Deletes only what a demo wrote: the folder may contain files of the user's with the same names."""
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
    """Raises an error for a folder that contains files but no demo."""
    names = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    ours = [text_path(folder), folder / "results.json", *(folder / "runs" / arm["attention"] for arm in ARMS.values())]
    if names and not any(path.exists() for path in ours):
        reason = f"{folder} contains unrelated files ({names[0]})"
        raise ValueError(f"{reason}. `--output` must be a new or empty folder, or one written by this command")


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
    if not is_demo_data(folder):  # data prepared under another path to this folder are reused
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
            f"{folder} contains a demo with other settings: use these to continue it, choose another --output, or use "
            "--overwrite to start over"
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
    # Time of this call only; models finished by an earlier call add nothing.
    results |= {"seconds": round(seconds, 1), "settings": settings, "loss": losses, "standard_error": errors}
    write_json(folder / "results.json", results)
    rounded = ([name, *(f"{loss:.5f}" for loss in row)] for name, row in losses.items())
    table = write_csv(folder / "loss-by-length.csv", ["attention", *map(str, lengths)], rounded)
    title = f"Small models trained on {lengths[0]} bytes, evaluated on up to {lengths[-1]}"
    pictures = draw(demo_chart(results, title, SeriesStyles()), folder / "loss-by-length")
    page = write_report(folder, folder / "index.html").page
    return [page, *pictures, table, folder / "results.json"]
