"""``softplus-attention newton``: from simulated orbits to the law of force that symbolic regression finds."""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from pathlib import Path
from typing import Any

from softplus_attention.utils import DOCS
from softplus_attention.validation import check_installed, fail, fail_choice

PRESET_NAMES = ("smoke", "cpu", "gpu", "faithful", "paper")
STAGE_NAMES = ("pretrain", "probe", "tune", "long", "laws", "figures")
STAGE_PACKAGES = {"laws": ("scipy", "pyoperon"), "figures": ("matplotlib",)}  # in addition to those for training
DISTRIBUTION_NAMES = (
    "identifiable",
    "identifiable-heavier",
    "identifiable-wider",
    "published-code",
    "published-text",
)
# Options that override sizes of the preset, each at least 1, with their help.
NUMBERS = {
    "pretrain_updates": "optimizer steps of pre-training",
    "pretrain_batch": "systems per step and process in pre-training",
    "tune_updates": "optimizer steps of force tuning",
    "tune_batch": "labelled systems per step and process in force tuning",
    "test_systems": "systems on which the predicted force is tested",
    "positions": "positions of a sequence: the time step, then each body at every step; odd for roll-outs",
    "layers": "layers of the model",
    "width": "width of the hidden states, a multiple of --heads",
    "heads": "attention heads of a layer",
    "bins": "bins per coordinate, with --form tokens",
    "law_seconds": "maximum seconds of each restart of the symbolic regression",
    "law_restarts": "restarts of the symbolic regression, which share one front",
}
# Options whose setting keeps an older name in results files.
RENAMED = {"pretrain_updates": "pretrain_steps", "tune_updates": "tune_steps"}


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "newton",
        help="train a GPT on orbits, predict the force, and find its law by symbolic regression",
        description="Trains a GPT on simulated orbits, fine-tunes it to predict the force, and searches for the law of "
        "force by symbolic regression, with controls. Stages whose files exist under --output are skipped; the stages "
        f"laws and figures need only these files. {DOCS}/newton",
    )
    parser.add_argument(
        "--preset",
        choices=PRESET_NAMES,
        default="cpu",
        help="sizes and settings, which the options below override (default: %(default)s)",
    )
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="folder for all files (default: newton-PRESET)")
    parser.add_argument("--out", type=Path, dest="output", help=argparse.SUPPRESS)
    parser.add_argument(
        "--stages", default=",".join(STAGE_NAMES), metavar="STAGE,...", help="stages to run (default: %(default)s)"
    )
    parser.add_argument("--arms", metavar="NAME,...", help="attentions, or NAME-windowK for a window of K time steps")
    parser.add_argument("--seeds", metavar="N,...", help="seeds of weights and systems, one run each, such as 0,1,2")
    parser.add_argument("--labels", metavar="N,...", help="numbers of labelled systems, such as 50,200,2000")
    parser.add_argument(
        "--target", choices=("ln_force", "force", "vector"), help="regression target of the force model"
    )
    parser.add_argument(
        "--distribution", choices=DISTRIBUTION_NAMES, metavar="NAME", help=", ".join(DISTRIBUTION_NAMES)
    )
    parser.add_argument("--form", choices=("continuous", "tokens"), help="encoding of the coordinates")
    parser.add_argument("--context-noise", type=float, metavar="AU", help="noise on the input in pre-training")
    parser.add_argument("--differences", choices=("yes", "no"), help="also feed the displacement since the last step")
    parser.add_argument("--precision", choices=("fp32", "tf32", "bf16"), help="arithmetic in training")
    parser.add_argument(
        "--without-pretraining", choices=("yes", "no"), help="also run the control without pre-training"
    )
    for name, help_text in NUMBERS.items():
        parser.add_argument(option_name(name), dest=name, type=int, metavar="N", help=help_text)
        if name in RENAMED:
            parser.add_argument(f"--{name.replace('_', '-')}", dest=name, type=int, help=argparse.SUPPRESS)
    parser.add_argument("--device", help="cpu or cuda (default: cuda if available)")
    parser.add_argument(
        "--workers", type=int, metavar="N", help="processes that simulate orbits (default: 2 with a GPU, else 0)"
    )
    parser.add_argument("--compile", action="store_true", help="torch.compile the models")
    parser.add_argument(
        "--save-every",
        type=int,
        default=0,
        metavar="N",
        help="steps between checkpoints, from which the same command continues (default: none)",
    )
    parser.add_argument("--save-updates", type=int, dest="save_every", default=0, help=argparse.SUPPRESS)
    parser.add_argument("--commit", help="commit to record in the results (default: from git)")
    parser.set_defaults(run=run)


def option_name(name: str) -> str:
    return f"--{RENAMED.get(name, name).replace('_', '-')}"


def check_numbers(options: argparse.Namespace) -> None:
    for name, least in {**dict.fromkeys(NUMBERS, 1), "workers": 0, "save_every": 0}.items():
        value = getattr(options, name)
        if value is not None and value < least:
            fail(option_name(name), f"at least {least}", value)


def parse_list(name: str, text: str, kind: type[Any]) -> tuple[Any, ...]:
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts:
        fail(f"--{name}", "at least one, separated by commas", repr(text))
    try:
        return tuple(kind(part) for part in parts)
    except ValueError:
        fail(f"--{name}", "integers separated by commas", repr(text))


def read_changes(options: argparse.Namespace) -> dict[str, Any]:
    """The settings that the command line overrides."""
    changes: dict[str, Any] = {}
    for name, kind in (("arms", str), ("seeds", int), ("labels", int)):
        if getattr(options, name) is not None:
            changes[name] = parse_list(name, getattr(options, name), kind)
    for name in ("target", "distribution", "form", "context_noise", "precision", *NUMBERS):
        if getattr(options, name) is not None:
            changes[name] = getattr(options, name)
    for name in ("differences", "without_pretraining"):
        if getattr(options, name) is not None:
            changes[name] = getattr(options, name) == "yes"
    return changes


def run(options: argparse.Namespace) -> int:
    stages = parse_list("stages", options.stages, str)
    for stage in stages:
        if stage not in STAGE_NAMES:
            fail_choice("--stages", STAGE_NAMES, stage)
    check_numbers(options)
    check_installed(*(package for stage in stages for package in STAGE_PACKAGES.get(stage, ())))
    from softplus_attention.huggingface.loading import silence_transformers
    from softplus_attention.physics.presets import preset
    from softplus_attention.physics.stages import Folder, run_stages, write_json
    from softplus_attention.physics.summary import format_summary, summary
    from softplus_attention.physics.training import ComputeOptions
    from softplus_attention.training import distributed

    silence_transformers()  # force models load an orbit model with a new head on purpose
    experiment = preset(options.preset, **read_changes(options))
    compute = ComputeOptions.of(
        options.device, workers=options.workers, compile=options.compile, save_every=options.save_every
    )
    folder = Folder(options.output or Path(f"newton-{options.preset}"), experiment)
    begun = time.perf_counter()
    run_stages(folder, stages, compute)
    if distributed.is_rank0():
        command = shlex.join(["softplus-attention", *getattr(options, "arguments", sys.argv[1:])])
        found = summary(folder, command, options.commit, time.perf_counter() - begun)
        write_json(folder.path / "results.json", found)
        print(format_summary(found))
        print(f"{folder.path / 'results.json'}, {time.perf_counter() - begun:.0f} s")
    return 0
