"""``softplus-attention newton``: from simulated orbits to the law of gravitation, or to what is found in its place."""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from softplus_attention.validation import check_installed, fail

if TYPE_CHECKING:
    from argparse import _SubParsersAction

PRESET_NAMES = ("smoke", "cpu", "gpu", "faithful", "paper")
STAGE_NAMES = ("pretrain", "probe", "tune", "long", "laws", "figures")
NEEDED = {"laws": ("scipy", "pyoperon"), "figures": ("matplotlib",)}  # beside what trains
DISTRIBUTION_NAMES = (
    "identifiable",
    "identifiable-heavier",
    "identifiable-wider",
    "published-code",
    "published-text",
)
# Sizes that replace the preset's, and what they are. Each is at least 1.
NUMBERS = {
    "pretrain_updates": "optimizer steps of pre-training",
    "pretrain_batch": "systems per step and process in pre-training",
    "tune_updates": "optimizer steps of force tuning",
    "tune_batch": "labelled systems per step and process in force tuning",
    "test_systems": "systems on which the predicted force is tested",
    "positions": "positions of a sequence: the time step, then each body at every step; odd if roll-outs follow",
    "layers": "layers of the model",
    "width": "width of the hidden states, a multiple of --heads",
    "heads": "attention heads of a layer",
    "bins": "bins per coordinate, with --form tokens",
    "law_seconds": "maximum seconds of each restart of the symbolic regression",
    "law_restarts": "restarts of the symbolic regression, which share one front",
}

# What the options are called, where results files keep an older name.
RENAMED = {"pretrain_updates": "pretrain_steps", "tune_updates": "tune_steps"}


def add_command(commands: _SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "newton",
        help="train a GPT on orbits, predict the force, and find its law by symbolic regression",
        description="Trains a GPT on simulated orbits, tunes it to predict the force, and searches the law by "
        "symbolic regression, with controls. A stage whose files exist under --output is not run again; the stages "
        "laws and figures need only those files.",
    )
    parser.add_argument(
        "--preset",
        choices=PRESET_NAMES,
        default="cpu",
        help="sizes and settings; the options below override single settings (default: %(default)s)",
    )
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="folder for all files (default: newton-PRESET)")
    parser.add_argument("--out", type=Path, dest="output", help=argparse.SUPPRESS)
    parser.add_argument("--stages", default=",".join(STAGE_NAMES), help="some of %(default)s")
    parser.add_argument("--arms", help="attentions of the catalogue, or NAME-windowK for a window of K time steps")
    parser.add_argument("--seeds", help="seeds of weights and systems, one run for each, for example 0,1,2")
    parser.add_argument("--labels", help="numbers of labelled systems, for example 50,200,2000")
    parser.add_argument(
        "--target", choices=("ln_force", "force", "vector"), help="regression target of the force model"
    )
    parser.add_argument("--distribution", choices=DISTRIBUTION_NAMES, help="distribution of the systems")
    parser.add_argument("--form", choices=("continuous", "tokens"), help="how a model reads coordinates")
    parser.add_argument("--context-noise", type=float, help="noise on the input in pre-training, in AU")
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
        help="checkpoint every N steps, from which a call that was stopped continues (default: never)",
    )
    parser.add_argument("--save-updates", type=int, dest="save_every", default=0, help=argparse.SUPPRESS)
    parser.add_argument("--commit", help="the commit to name in the results")
    parser.set_defaults(run=run)


def option_name(name: str) -> str:
    return f"--{RENAMED.get(name, name).replace('_', '-')}"


def check_numbers(options: argparse.Namespace) -> None:
    for name, least in {**dict.fromkeys(NUMBERS, 1), "workers": 0, "save_every": 0}.items():
        value = getattr(options, name)
        if value is not None and value < least:
            fail(option_name(name), f"at least {least}", value)


def listed(name: str, text: str, kind: type[Any]) -> tuple[Any, ...]:
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts:
        fail(f"--{name}", "at least one, separated by commas", repr(text))
    try:
        return tuple(kind(part) for part in parts)
    except ValueError:
        fail(f"--{name}", f"{kind.__name__}s separated by commas", repr(text))


def read_changes(options: argparse.Namespace) -> dict[str, Any]:
    """What the command line says beside the preset."""
    changes: dict[str, Any] = {}
    for name, kind in (("arms", str), ("seeds", int), ("labels", int)):
        if getattr(options, name) is not None:
            changes[name] = listed(name, getattr(options, name), kind)
    for name in ("target", "distribution", "form", "context_noise", "precision", *NUMBERS):
        if getattr(options, name) is not None:
            changes[name] = getattr(options, name)
    for name in ("differences", "without_pretraining"):
        if getattr(options, name) is not None:
            changes[name] = getattr(options, name) == "yes"
    return changes


def run(options: argparse.Namespace) -> int:
    stages = listed("stages", options.stages, str)
    for stage in stages:
        if stage not in STAGE_NAMES:
            fail("--stages", f"some of {', '.join(STAGE_NAMES)}", repr(stage))
    check_numbers(options)
    check_installed(*(package for stage, needed in NEEDED.items() if stage in stages for package in needed))
    from softplus_attention.huggingface.loading import silence_transformers
    from softplus_attention.physics.presets import preset
    from softplus_attention.physics.stages import Folder, run_stages, write_json
    from softplus_attention.physics.summary import printed, summary
    from softplus_attention.physics.training import ComputeOptions
    from softplus_attention.training import distributed

    silence_transformers()  # loading a model for another head is what is done here on purpose
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
        print(printed(found))
        print(f"{folder.path / 'results.json'}, {time.perf_counter() - begun:.0f} s")
    return 0
