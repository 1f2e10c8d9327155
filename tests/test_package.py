"""The installed package: a light import, one version, types, and the import order of its rooms."""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import importlib.resources
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import softplus_attention

ROOT = Path(__file__).parents[1]


def python(*arguments: str, timeout: float = 120) -> str:
    result = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=timeout, cwd=ROOT)
    assert result.returncode == 0, result.stderr
    return result.stdout


IMPORT = """
import json, sys, time
start = time.process_time()
import torch
middle, before = time.process_time(), set(sys.modules)
import softplus_attention
share = (time.process_time() - middle) / (middle - start)
print(json.dumps({"share": share, "new": sorted(set(sys.modules) - before), "cuda": torch.cuda.is_initialized()}))
"""


@pytest.fixture(scope="module")
def imported() -> dict[str, Any]:
    return json.loads(python("-c", IMPORT))


def test_the_module_is_the_command() -> None:
    usage = python("-m", "softplus_attention", "--help")
    assert usage.startswith("usage: softplus-attention ")


# Each imports only those before it (CONTRIBUTING.md).
ROOMS = (
    "validation", "power", "visibility", "utils", "reference", "kernels", "dispatch", "functional", "paged",
    "attentions", "baselines", "catalog", "distributed", "nn", "huggingface", "recipes", "serving", "charts", "data",
    "training", "evaluation", "extend", "physics", "report", "cli", "__main__",
)  # fmt: skip


def rooms_in(source: str) -> set[str]:
    """The rooms of the package that a file imports, at module level or inside functions."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "softplus_attention":
            inner = (node.module or "").split(".")[1:2]
            found |= set(inner or [name.name for name in node.names])
        if isinstance(node, ast.Import):
            found |= {name.name.split(".")[1] for name in node.names if name.name.startswith("softplus_attention.")}
    return found - {"__version__"}


def test_rooms_import_only_earlier_rooms() -> None:
    package, upward = ROOT / "src" / "softplus_attention", []
    for path in package.rglob("*.py"):
        room = path.relative_to(package).parts[0].removesuffix(".py")
        if room != "__init__":
            above = ROOMS[: ROOMS.index(room) + 1]
            upward += [f"{path.relative_to(package)}: {other}" for other in rooms_in(path.read_text()) - {*above}]
    assert upward == []
    assert rooms_in("def f():\n    from softplus_attention import nn\n    import softplus_attention.report.build") == {
        "nn",
        "report",
    }


def test_tests_have_the_rooms_of_the_package() -> None:
    other_folders = {"benchmarks", "docs", "examples", "experiments", "first_hour", "support"}
    folders = {path.relative_to(ROOT / "tests").parts[0] for path in (ROOT / "tests").glob("*/*.py")}
    assert folders - other_folders <= set(ROOMS)


def test_names_of_tests_are_short() -> None:
    names = {
        name for path in (ROOT / "tests").rglob("*.py") for name in re.findall(r"def (test_\w+)", path.read_text())
    }
    assert [name for name in sorted(names) if len(name) > 50] == []


class TestImport:
    def test_imports_only_torch(self, imported: dict[str, Any]) -> None:
        """Apart from this package and the standard library."""
        ours = {"softplus_attention"}
        foreign = {name.partition(".")[0] for name in imported["new"]} - ours - set(sys.stdlib_module_names) - {"torch"}
        assert not foreign
        assert "softplus_attention.functional" in imported["new"]

    @pytest.mark.parametrize("name", ["triton", "transformers", "numpy", "matplotlib", "entmax"])
    def test_does_not_import(self, imported: dict[str, Any], name: str) -> None:
        assert not [module for module in imported["new"] if module.partition(".")[0] == name]

    def test_does_not_initialise_cuda(self, imported: dict[str, Any]) -> None:
        assert not imported["cuda"]

    def test_takes_less_than_a_tenth_of_torch(self, imported: dict[str, Any]) -> None:
        """A thirtieth, measured; the first import of new files also compiles them."""
        assert min(imported["share"], json.loads(python("-c", IMPORT))["share"]) < 0.1

    def test_a_call_on_a_cpu_needs_no_triton(self) -> None:
        code = (
            "import sys, torch; sys.modules['triton'] = sys.modules['transformers'] = None\n"
            "from softplus_attention import softplus_attention\n"
            "x = torch.randn(1, 1, 8, 16, requires_grad=True)\n"
            "softplus_attention(x, x, x, is_causal=True).sum().backward()\n"
            "print(x.grad.isfinite().all().item())"
        )
        assert python("-c", code).strip() == "True"


def test_one_version() -> None:
    assert importlib.metadata.version("softplus-attention") == softplus_attention.__version__
    declared = re.findall(r"^version\s*=", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert not declared, "the version is defined only in the package"


def test_is_typed() -> None:
    assert importlib.resources.files("softplus_attention").joinpath("py.typed").is_file()


IMPORTS = {
    "function": "from softplus_attention import softplus_attention",
    "huggingface": "import softplus_attention.huggingface",
    "package": "import softplus_attention",
    "training": "from softplus_attention.huggingface import use_attention",
}


def test_callable_after_each_order_of_imports() -> None:
    """In a notebook: whichever import ran last, the name is callable and has the same meaning.

    Each order starts in a fork of a process that has not imported this package.
    """
    call = "softplus_attention(x, x, x, is_causal=True)"
    script = [
        "import inspect, os, torch",
        "from transformers import AutoModelForCausalLM, GenerationMixin, PreTrainedModel",
        "x = torch.arange(64.).view(1, 1, 4, 16)",
    ]
    for first in IMPORTS:
        cells = [IMPORTS["function"], f"want, signature = {call}, inspect.signature(softplus_attention)"]
        for second in IMPORTS:
            cells += [IMPORTS[first], IMPORTS[second], f"assert {call}.equal(want)"]
            cells += ["assert inspect.signature(softplus_attention) == signature"]
        fresh = [IMPORTS[first], *cells, "print('fine', flush=True)", "os._exit(0)"]
        script += ["if os.fork() == 0:", *(f"    {line}" for line in fresh), "else:", "    assert os.wait()[1] == 0"]
    assert python("-c", "\n".join(script)).split() == ["fine"] * len(IMPORTS)


@pytest.mark.parametrize("room", ["", ".catalog", ".data", ".huggingface", ".nn", ".recipes", ".training"])
def test_dir_shows_what_is_public(room: str) -> None:
    """Names that load lazily are listed before their first use, for completion."""
    listed = python("-c", f"import softplus_attention{room} as room; print(*dir(room)); print(*room.__all__)")
    seen, public = (line.split() for line in listed.splitlines())
    assert public
    assert set(public) <= set(seen)
    assert not {"annotations", "inspect", "sys", "torch", "transformers"} & set(seen)
    package = importlib.import_module(f"softplus_attention{room}")
    assert all(getattr(package, name) is not None for name in public)
