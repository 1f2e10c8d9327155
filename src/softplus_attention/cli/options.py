"""The argument parser, and options that several commands share."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Sequence
from typing import Any

from softplus_attention.validation import did_you_mean, fail


class HelpFormatter(argparse.HelpFormatter):
    """Does not break URLs and lists of names at hyphens."""

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False, break_long_words=False)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return "\n".join(indent + line for line in self._split_lines(text, width - len(indent)))


class Parser(argparse.ArgumentParser):
    """Takes full option names, with - or _, and suggests the nearest name or choice for a wrong one."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{"formatter_class": HelpFormatter, **settings, "allow_abbrev": False})

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        known = [name for name in self._option_string_actions if name.startswith("--")]
        args = list(args or [])
        # Arguments after a subcommand's name belong to the subcommand's parser.
        own = len(args) if self._subparsers is None else 1
        return super().parse_known_args([*(self.normalize(x, known) for x in args[:own]), *args[own:]], namespace)

    def normalize(self, argument: str, known: list[str]) -> str:
        name, equals, value = argument.partition("=")
        if not name.startswith("--") or name == "--" or " " in name or name in known:
            return argument
        if name.replace("_", "-") in known:
            return name.replace("_", "-") + equals + value
        self.error(f"there is no option {name}{did_you_mean(name, known)}")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            choices = [str(choice) for choice in action.choices]
            text = f"{str(value)!r} is not one of {', '.join(choices)}{did_you_mean(str(value), choices)}"
            raise argparse.ArgumentError(action, text)


def add_loading_arguments(parser: argparse.ArgumentParser) -> None:
    """How `convert` and `generate` load a model."""
    parser.add_argument(
        "--dtype", choices=("auto", "float32", "bfloat16", "float16"), default="auto", help="default: as saved"
    )
    parser.add_argument("--device", help="for example cpu or cuda:0 (default: cuda if available)")
    add_trust(parser)


def add_trust(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--trust-remote-code",
        action="store_true",
        help="run Python code that comes with the model or its tokenizer; read it first",
    )


def parse_integers(
    option: str, text: str, expected: str = "whole numbers above 0, separated by commas", count: int | None = None
) -> list[int]:
    parts = text.split(",")
    if not all(part.strip().isdecimal() and int(part) > 0 for part in parts) or count not in (None, len(parts)):
        fail(option, expected, repr(text))
    return [int(part) for part in parts]
