"""``softplus-attention train``: starts or continues a run from a preset, a config file and options."""

from __future__ import annotations

import argparse
import dataclasses
import re
import sys
import textwrap
import types
import warnings
from typing import Any

from softplus_attention.training import distributed
from softplus_attention.training.config import PRESETS, TrainConfig, configured, field_types
from softplus_attention.training.errors import RunStopped, RunWarning
from softplus_attention.utils.files import clean_text

DESCRIPTION = """\
Trains a GPT with any attention of the catalogue on a folder of tokens, in one process, or under torchrun on any number
of GPUs. To continue an interrupted run from its last complete checkpoint, run the same command again.
"""
EXAMPLES = """\
examples:
  softplus-attention train --preset tiny --data data/book --output runs/tiny
  softplus-attention train --preset small --data data/web --output runs/rising --power 3,7@0.1,15@0.3
  softplus-attention train --config run.yaml --attention softmax --output runs/softmax
  torchrun --nproc-per-node 8 -m softplus_attention.cli train --preset gpt2-small --data fineweb --output runs/paper

A config file (.json, .yaml) has the same names. Options override the file, and the file overrides the preset.

presets:
"""


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    indent = " " * 14
    presets = "".join(
        textwrap.fill(
            f"{name:<12}" + ", ".join(f"{setting} {value}" for setting, value in settings.items()),
            width=118, initial_indent="  ", subsequent_indent=indent, break_on_hyphens=False,
        ) + "\n"
        for name, settings in PRESETS.items()
    )  # fmt: skip
    parser = commands.add_parser(
        "train",
        usage="softplus-attention train [--preset NAME] [--config FILE] --data FOLDER --output FOLDER [OPTION ...]",
        help="train a GPT with any attention, or continue a run",
        description=DESCRIPTION,
        epilog=EXAMPLES + presets,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--preset", metavar="NAME", help=f"settings to start from: {', '.join(PRESETS)}")
    parser.add_argument("--config", metavar="FILE", help=".json or .yaml file of settings")
    parser.add_argument(
        "--allow-config-changes",
        action="store_true",
        help="continue a run even if its settings or data changed",
    )
    parser.add_argument("--accept-changes", action="store_true", dest="allow_config_changes", help=argparse.SUPPRESS)
    groups: dict[str, argparse._ArgumentGroup] = {}
    for field in dataclasses.fields(TrainConfig):
        name = field.metadata["group"]
        group = groups.get(name) or groups.setdefault(name, parser.add_argument_group(name))
        add_option(group, field)
    parser.set_defaults(run=run)


def add_option(group: argparse._ArgumentGroup, field: dataclasses.Field[Any]) -> None:
    """Adds no default to the namespace, so that values of the preset or the file are kept."""
    help_text = field.metadata["help"]
    if field.default is not dataclasses.MISSING and field.default is not None:
        help_text += f" (default: {field.default})"
    common: dict[str, Any] = {"default": argparse.SUPPRESS, "help": help_text}
    flag = flag_for(field.name)
    kinds = [kind for kind in field_types(field) if kind is not types.NoneType]
    if bool in kinds:
        group.add_argument(flag, action=argparse.BooleanOptionalAction, **common)
    else:
        group.add_argument(flag, type=kinds[0], metavar=kinds[0].__name__.upper(), **common)


def run(options: argparse.Namespace) -> int:
    try:
        return start_run(options)
    except ValueError as error:
        raise ValueError(name_options(str(error))) from error


def name_options(message: str) -> str:
    """Replaces names of settings (`sequence_length`) by those of options (`--sequence-length`)."""
    names = [field.name for field in dataclasses.fields(TrainConfig)] + ["preset", "config"]
    return re.sub(f"`({'|'.join(names)})`", lambda found: f"`{flag_for(found[1])}`", message)


def flag_for(setting: str) -> str:
    return f"--{setting.replace('_', '-')}"


def start_run(options: argparse.Namespace) -> int:
    given = vars(options)
    settings = {field.name: given[field.name] for field in dataclasses.fields(TrainConfig) if field.name in given}
    config = configured(settings, preset=options.preset, file=options.config)

    from softplus_attention.training.run import train

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            warnings.simplefilter("always", RunWarning)
            warnings.showwarning = show
            train(config, accept_changes=options.allow_config_changes)
    except RunStopped as stopped:  # raised on all ranks, reported by rank 0
        distributed.destroy_process_group()
        if distributed.is_rank0():
            raise
        return stopped.exit_status
    # Skipped after other errors: ranks may still be waiting for each other in a collective.
    distributed.destroy_process_group()
    return 0


def show(message: Warning | str, *_: Any, **__: Any) -> None:
    if distributed.is_rank0():
        print(f"warning: {clean_text(str(message))}", file=sys.stderr, flush=True)
