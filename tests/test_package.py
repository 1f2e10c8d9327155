"""The package as installed: a light import, one version, types, examples and the benchmark's own command."""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.resources
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import softplus_attention

ROOT = Path(__file__).parents[1]


def python(*arguments: str, timeout: float = 120) -> str:
    result = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=timeout, cwd=ROOT)
    assert result.returncode == 0, result.stderr
    return result.stdout


IMPORT = """
import json, sys, time
import torch
before = set(sys.modules)
start = time.perf_counter()
import softplus_attention
seconds = time.perf_counter() - start
print(json.dumps({"seconds": seconds, "new": sorted(set(sys.modules) - before), "cuda": torch.cuda.is_initialized()}))
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
    "training", "evaluation", "physics", "report", "cli", "__main__",
)  # fmt: skip


def rooms_in(source: str) -> set[str]:
    """The rooms of the package that a file imports, at its top or inside a function."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "softplus_attention":
            inner = (node.module or "").split(".")[1:2]
            found |= set(inner or [name.name for name in node.names])
        if isinstance(node, ast.Import):
            found |= {name.name.split(".")[1] for name in node.names if name.name.startswith("softplus_attention.")}
    return found - {"__version__"}


def test_rooms_import_only_those_above_them() -> None:
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


BARE = """
import sys
for name in {names}:
    sys.modules[name] = None  # as if it were not installed
from softplus_attention.cli import main
sys.exit(main({arguments}))
"""
NOT_TORCH = ["numpy", "transformers", "huggingface_hub", "tokenizers", "accelerate", "safetensors", "matplotlib"]


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["info"], 0, "torch"),
        (["--version"], 0, softplus_attention.__version__),
        (["train", "--help"], 0, "--preset"),
        (["generate", "--help"], 0, "--prompt"),
        (["generate", "--model", "x", "--prompt", "y"], 2, "`generate` needs transformers: pip install -e '.[hug"),
        (["evaluate", "lengths", "x", "--text", "y"], 2, "`evaluate` needs "),
        (["data", "prepare", "builtin", "--output", "x", "--tokenizer", "bytes"], 2, "`data` needs "),
        (["demo"], 2, "`demo` needs transformers: pip install -e '.[hug"),
    ],
)
def test_with_torch_alone(arguments: list[str], status: int, words: str, tmp_path: Path) -> None:
    """What needs more says which extra has it."""
    code = BARE.format(names=NOT_TORCH, arguments=arguments)
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert found.returncode == status, found.stderr
    assert words in (found.stdout if status == 0 else found.stderr)
    assert "Traceback" not in found.stderr


@pytest.mark.parametrize(
    ("missing", "arguments", "words"),
    [
        ("matplotlib", ["demo"], "`demo` needs matplotlib: pip install -e '.[plots]'"),
        ("pyoperon", ["newton", "--preset", "cpu"], "`newton` needs pyoperon: pip install -e '.[physics]'"),
        (
            "entmax",
            [
                "train",
                "--preset",
                "tiny",
                "--data",
                "data",
                "--output",
                "run",
                "--attention",
                "entmax",
                "--evaluate-every",
                "0",
            ],
            "`train` needs entmax: pip install -e '.[baselines]'",
        ),
    ],
)
def test_one_package_is_missing(missing: str, arguments: list[str], words: str, tmp_path: Path) -> None:
    """Said at once, not after minutes of work."""
    if arguments[0] == "train":
        prepare = ["data", "prepare", "builtin", "--output", "data", "--tokenizer", "bytes"]
        subprocess.run([sys.executable, "-m", "softplus_attention", *prepare], check=True, cwd=tmp_path, timeout=120)
    code = BARE.format(names=[missing], arguments=arguments)
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert found.returncode == 2, found.stderr
    assert words in found.stderr
    assert "Traceback" not in found.stderr
    assert not (tmp_path / "demo" / "runs").exists()


class TestImport:
    def test_brings_torch_only(self, imported: dict[str, Any]) -> None:
        """Nothing but our own modules and the standard library."""
        ours = {"softplus_attention"}
        foreign = {name.partition(".")[0] for name in imported["new"]} - ours - set(sys.stdlib_module_names) - {"torch"}
        assert not foreign
        assert "softplus_attention.functional" in imported["new"]

    @pytest.mark.parametrize("name", ["triton", "transformers", "numpy", "matplotlib", "entmax"])
    def test_leaves_out(self, imported: dict[str, Any], name: str) -> None:
        assert not [module for module in imported["new"] if module.partition(".")[0] == name]

    def test_leaves_the_accelerator_alone(self, imported: dict[str, Any]) -> None:
        assert not imported["cuda"]

    def test_costs_less_than_half_a_second(self, imported: dict[str, Any]) -> None:
        assert imported["seconds"] < 0.5

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
    assert not declared, "the version is written in the package, once"


def test_is_typed() -> None:
    assert importlib.resources.files("softplus_attention").joinpath("py.typed").is_file()


IMPORTS = {
    "function": "from softplus_attention import softplus_attention",
    "huggingface": "import softplus_attention.huggingface",
    "package": "import softplus_attention",
    "training": "from softplus_attention.huggingface import use_attention",
}


@pytest.mark.parametrize("first", IMPORTS)
def test_callable_after_each_order_of_imports(first: str) -> None:
    """The cells of a notebook: whichever import ran last, the name can be called, and means the same."""
    cells = ["import inspect, torch", "x = torch.arange(64.).view(1, 1, 4, 16)", IMPORTS["function"]]
    cells += ["want, signature = softplus_attention(x, x, x, is_causal=True), inspect.signature(softplus_attention)"]
    for second in IMPORTS:
        cells += [IMPORTS[first], IMPORTS[second]]
        cells += ["assert softplus_attention(x, x, x, is_causal=True).equal(want)"]
        cells += ["assert inspect.signature(softplus_attention) == signature"]
    python("-c", "\n".join(cells))


def test_everything_public_is_there() -> None:
    for name in softplus_attention.__all__:
        assert getattr(softplus_attention, name) is not None


DOCUMENTS = [path for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))) if path.exists()]
BLOCK = re.compile(r"^( *)```python[^\n]*\n(.*?)^\1```", re.MULTILINE | re.DOTALL)


def blocks(path: Path) -> list[tuple[int, str]]:
    """(line, code) of each python block; blank lines in front keep the document's line numbers in tracebacks."""
    text = path.read_text()
    found = []
    for match in BLOCK.finditer(text):
        indent = len(match[1])
        line = text.count("\n", 0, match.start()) + 1
        code = "\n".join(row[indent:] for row in match[2].splitlines())
        found.append((line, "\n" * line + code))
    return found


def test_blocks_are_found_and_numbered(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("a\n```python\nx = 1\n```\n```sh\nls\n```\n- b\n  ```python\n  y = 2\n  ```\n")
    assert [(line, code.strip()) for line, code in blocks(page)] == [(2, "x = 1"), (9, "y = 2")]


@pytest.mark.parametrize("path", [p for p in DOCUMENTS if blocks(p)], ids=lambda p: str(p.relative_to(ROOT)))
def test_every_example_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert_examples_run(path)


@pytest.mark.parametrize("code", ["x = y", "x = 1\nassert x == 2"])
def test_an_example_that_does_not_run_is_noticed(code: str, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"```python\nz = 0\n```\n```python\n{code}\n```\n")
    with pytest.raises((NameError, AssertionError)):
        assert_examples_run(page)


def assert_examples_run(path: Path) -> None:
    """All of a page, one after the other; what they assert holds."""
    namespace: dict[str, Any] = {"__name__": "__example__"}
    for _, code in blocks(path):
        exec(compile(code, str(path), "exec"), namespace)


class TestBenchmark:
    def test_help(self) -> None:
        text = python("benchmarks/cpu.py", "--help")
        assert "--quick" in text
        assert "--output" in text

    def test_quick(self, tmp_path: Path) -> None:
        output = tmp_path / "deep" / "cpu.json"
        table = python("benchmarks/cpu.py", "--quick", "--output", str(output))
        data = json.loads(output.read_text())
        assert data["command"] == f"python benchmarks/cpu.py --quick --output {output.name}"
        for key in ("date", "commit", "machine", "versions"):
            assert data[key], key
        assert data["machine"]["cores"] >= 1
        assert data["versions"]["torch"] == torch.__version__
        assert data["versions"]["softplus_attention"] == softplus_attention.__version__
        for row in data["time"]:
            assert row["ratio"] == pytest.approx(row["chunked_ms"] / row["sdpa_ms"])
            assert f"{row['ratio']:.2f}" in table
        assert {row["direction"] for row in data["time"]} == {"forward", "forward+backward"}
        assert {row["threads"] for row in data["time"]} == {1, 2}
        assert {row["implementation"] for row in data["memory"]} == {"chunked", "sdpa", "reference"}
        assert all(row["bytes"] >= 0 for row in data["memory"])
