"""``softplus-attention build``: compiles the C++ kernels for this machine's CPU."""

from __future__ import annotations

import argparse
import sys
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from argparse import _SubParsersAction


def add_command(commands: _SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "build",
        help="compile the optional C++ kernels for this CPU",
        description="Compiles the C++ kernels of the CPU path for this machine, once per version of this package and "
        "of torch, into $XDG_CACHE_HOME or ~/.cache. Every later call on CPU tensors uses them; without them PyTorch's "
        "operations compute the same, slower. SOFTPLUS_ATTENTION_CPU=torch leaves them out. Needs a C++ compiler "
        "(g++ or clang++ with OpenMP; $CXX names another).",
    )
    parser.add_argument("--remove", action="store_true", help="remove what was built, of every version")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    from softplus_attention.kernels.cpu import native
    from softplus_attention.kernels.cpu.native.build import BuildError, build, compiler, library_path, remove

    if options.remove:
        removed = remove()
        print("\n".join(f"removed {path}" for path in removed) or "nothing was built")
        return 0
    path = library_path()
    try:
        if path.exists():
            print(f"built already: {path}")
        else:
            print(f"compiling with {compiler()}", flush=True)
            start = time.perf_counter()
            path = build()
            print(f"built in {time.perf_counter() - start:.0f} s: {path}")
        print(f"loaded: {native.find('native').reason}")
    except (BuildError, RuntimeError) as error:
        print(f"softplus-attention: the C++ kernels were not built: {error}", file=sys.stderr)
        return 1
    return 0
