"""``softplus-attention train``: a preset, a config file and options become a run."""

from __future__ import annotations

import argparse
import dataclasses
import re
import sys
import types
import warnings
from typing import TYPE_CHECKING, Any

from softplus_attention.training import distributed
from softplus_attention.training.config import PRESETS, TrainConfig, configured, field_types
from softplus_attention.training.errors import RunStopped, RunWarning
from softplus_attention.utils.files import clean_text

if TYPE_CHECKING:
    from argparse import _SubParsersAction

DESCRIPTION = """\
Trains a GPT with any attention of the catalogue on a folder of tokens, and continues a run that was interrupted: the
same command again goes on from the last whole checkpoint. One process, or under torchrun on any number of GPUs.
"""
EXAMPLES = """\
examples:
  softplus-attention train --preset tiny --data data/book --output runs/tiny
  softplus-attention train --preset small --data data/web --output runs/rising --power 3,7@0.1,15@0.3
  softplus-attention train --config run.yaml --attention softmax --output runs/softmax
  torchrun --nproc-per-node 8 -m softplus_attention.cli train --preset gpt2-small --data fineweb --output runs/paper

A config file (.json, .yaml) holds the same names; options win over the file, the file over the preset. Presets:
"""


def add_command(commands: _SubParsersAction[argparse.ArgumentParser]) -> None:
    presets = "".join(
        f"  {name:<11} {', '.join(f'{setting} {value}' for setting, value in settings.items())}\n"
        for name, settings in PRESETS.items()
    )
    parser = commands.add_parser(
        "train",
        usage="softplus-attention train [--preset NAME] [--config FILE] --data FOLDER --output FOLDER [OPTION ...]",
        help="train a GPT with any attention; started again, it continues",
        description=DESCRIPTION,
        epilog=EXAMPLES + presets,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--preset", metavar="NAME", help=f"the settings to start from: {', '.join(PRESETS)}")
    parser.add_argument("--config", metavar="FILE", help=".json or .yaml file of settings")
    parser.add_argument(
        "--allow-config-changes",
        action="store_true",
        help="continue a run although its settings or its data changed",
    )
    parser.add_argument("--accept-changes", action="store_true", dest="allow_config_changes", help=argparse.SUPPRESS)
    groups: dict[str, argparse._ArgumentGroup] = {}
    for field in dataclasses.fields(TrainConfig):
        name = field.metadata["group"]
        group = groups.get(name) or groups.setdefault(name, parser.add_argument_group(name))
        add_option(group, field)
    parser.set_defaults(run=run)


def add_option(group: argparse._ArgumentGroup, field: dataclasses.Field[Any]) -> None:
    """Left out of the options where it is not given: the preset's or the file's value then stands."""
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
        return run_named_as_settings(options)
    except ValueError as error:
        raise ValueError(named_as_options(str(error))) from error


def named_as_options(message: str) -> str:
    """An error that speaks of `sequence_length`, as the configuration calls it, for somebody who wrote
    --sequence-length."""
    names = [field.name for field in dataclasses.fields(TrainConfig)] + ["preset", "config"]
    return re.sub(f"`({'|'.join(names)})`", lambda found: f"`{flag_for(found[1])}`", message)


def flag_for(setting: str) -> str:
    return f"--{setting.replace('_', '-')}"


def run_named_as_settings(options: argparse.Namespace) -> int:
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
    except RunStopped as stopped:  # on all processes: one says so
        distributed.destroy_process_group()
        if distributed.is_rank0():
            raise
        return stopped.exit_status
    # Not after other errors: the processes may wait for each other in the middle of something.
    distributed.destroy_process_group()
    return 0


def show(message: Warning | str, *_: Any, **__: Any) -> None:
    if distributed.is_rank0():
        print(f"warning: {clean_text(str(message))}", file=sys.stderr, flush=True)
