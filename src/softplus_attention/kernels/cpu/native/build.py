"""Builds the CPU kernels: one call of the C++ compiler per source, with the headers of the installed torch."""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

SOURCES = Path(__file__).parent
# Only those parts of -ffast-math that keep the semantics of NaN and infinity.
FLAGS = (
    "-O3", "-march=native", "-fopenmp", "-std=c++20", "-fPIC", "-fvisibility=hidden", "-fno-math-errno",
    "-fno-trapping-math", "-ffp-contract=fast", "-Wno-psabi",
)  # fmt: skip


class BuildError(Exception):
    """A one-line reason why the kernels cannot be built."""


def cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "softplus-attention" / "cpu"


def cpu_features() -> str:
    """Identifies what -march=native means on this machine."""
    try:
        with open("/proc/cpuinfo") as file:
            for line in file:  # stop at the first core
                if line.startswith(("flags", "Features")):
                    return line
    except OSError:
        pass
    return f"{platform.machine()} {platform.processor()}"


@functools.cache
def library_path() -> Path:
    """Path of the library for these sources, this torch and this CPU, built or not."""
    content = hashlib.sha256("\0".join([torch.__version__, cpu_features(), *FLAGS]).encode())
    for source in sorted([*SOURCES.glob("*.cpp"), *SOURCES.glob("*.h")]):
        content.update(source.name.encode() + source.read_bytes())
    return cache_folder() / content.hexdigest()[:20] / "native.so"


def compiler() -> str:
    named = os.environ.get("CXX")
    names = [named] if named else ["c++", "g++", "clang++"]
    found = next((path for name in names if (path := shutil.which(name))), None)
    if found is None:
        raise BuildError(f"no C++ compiler: {', '.join(names)} not found in PATH")
    return found


def build() -> Path:
    """Compiles the library and moves it to ``library_path`` atomically, so that several processes may build at once."""
    program, target = compiler(), library_path()
    torch_folder = Path(torch.__file__).parent
    include = [f"-I{torch_folder / 'include'}", f"-I{torch_folder / 'include/torch/csrc/api/include'}"]
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}"
    target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with tempfile.TemporaryDirectory(prefix="build-", dir=target.parent) as folder:
        objects = {source: f"{folder}/{source.stem}.o" for source in sorted(SOURCES.glob("*.cpp"))}
        with ThreadPoolExecutor(max(1, torch.get_num_threads())) as pool:
            compiling = [
                pool.submit(execute, [program, *FLAGS, abi, *include, "-c", str(source), "-o", compiled])
                for source, compiled in objects.items()
            ]
        for one in compiling:
            one.result()
        # Not linked to OpenMP: torch has loaded it, and a second copy would compete for the cores.
        library = f"{folder}/native.so"
        link = [f"-L{torch_folder / 'lib'}", f"-Wl,-rpath,{torch_folder / 'lib'}", "-lc10", "-ltorch_cpu", "-ltorch"]
        execute([program, "-shared", *objects.values(), *link, "-o", library])
        os.chmod(library, 0o755)  # regardless of the umask: a library that others can write to is not loaded
        os.replace(library, target)
    return target


def execute(command: list[str]) -> None:
    found = subprocess.run(command, capture_output=True, text=True, errors="replace")
    if found.returncode:
        lines = [line for line in found.stderr.splitlines() if "error" in line.lower()] or found.stderr.splitlines()
        reason = lines[0] if lines else f"status {found.returncode}"
        raise BuildError(f"{Path(command[0]).name} failed: {reason} (in: {shlex.join(command)})")


def remove() -> list[Path]:
    """Removes the libraries of all versions; returns their paths."""
    folder = cache_folder()
    found = sorted(folder.glob("*/native.so"))
    if found:
        shutil.rmtree(folder)
    return found
