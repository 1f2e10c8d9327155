"""Parsers and checks of options that several commands take."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from softplus_attention.validation import did_you_mean


class Parser(argparse.ArgumentParser):
    """Options by their whole names, with - or _; a wrong name is answered with the nearest right one."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{**settings, "allow_abbrev": False})

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        known = [name for name in self._option_string_actions if name.startswith("--")]
        args = list(args or [])
        # What follows a command's name is the command's own.
        own = len(args) if self._subparsers is None else 1
        return super().parse_known_args([*(self.spelled(x, known) for x in args[:own]), *args[own:]], namespace)

    def spelled(self, argument: str, known: list[str]) -> str:
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


def add_trust(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--trust-remote-code",
        action="store_true",
        help="run Python code that comes with the model or its tokenizer; read it first",
    )
