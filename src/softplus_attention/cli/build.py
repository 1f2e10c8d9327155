"""``softplus-attention build``: compiles the C++ kernels for the CPU of this machine."""

from __future__ import annotations

import argparse
import sys
import time


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "build",
        help="compile the optional C++ kernels for this CPU",
        description="Compiles the C++ kernels of the CPU path into $XDG_CACHE_HOME or ~/.cache. Run it once for each "
        "version of this package and of torch. Later calls on CPU tensors then use the kernels; otherwise PyTorch "
        "operations compute the same result more slowly. SOFTPLUS_ATTENTION_CPU=torch disables the kernels. Needs a "
        "C++ compiler with OpenMP: g++, clang++, or the one in $CXX.",
    )
    parser.add_argument("--remove", action="store_true", help="remove the compiled kernels of all versions")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    from softplus_attention.kernels.cpu import native
    from softplus_attention.kernels.cpu.native.build import BuildError, build, compiler, library_path, remove

    if options.remove:
        removed = remove()
        print("\n".join(f"removed {path}" for path in removed) or "there are no compiled kernels")
        return 0
    path = library_path()
    try:
        if path.exists():
            print(f"already built: {path}")
        else:
            print(f"compiling with {compiler()}", flush=True)
            start = time.perf_counter()
            path = build()
            print(f"built in {time.perf_counter() - start:.0f} s: {path}")
        print(f"loaded: {native.find('native').reason}")
    except (BuildError, RuntimeError) as error:
        print(f"softplus-attention: building the C++ kernels failed: {error}", file=sys.stderr)
        return 1
    return 0
