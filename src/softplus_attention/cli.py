"""The command line: ``softplus-attention demo | info``. Each command imports what it needs when it runs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="softplus-attention", description="Attention that trains short and runs long (LSSA and LSSAR)."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    from softplus_attention import demo, info

    demo.add_command(commands)
    info.add_command(commands)
    options = parser.parse_args(arguments)
    try:
        return options.run(options)
    except ValueError as error:
        print(f"softplus-attention: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
