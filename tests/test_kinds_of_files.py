"""Files that strangers may have made are opened by ``utils.untrusted`` and written by ``utils.files``, nowhere else."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import softplus_attention

SOURCE = Path(softplus_attention.__file__).parent
OWN = ("utils/files.py", "utils/untrusted.py")

# What opens or writes a file, by the last part of the name that is called.
CALLS = {
    "open", "fdopen", "read_text", "read_bytes", "write_text", "write_bytes", "memmap", "open_memmap", "fromfile",
    "tofile", "loadtxt", "savetxt", "copyfile", "copy2", "copytree", "symlink_to", "hardlink_to",
}  # fmt: skip
LIBRARIES = {  # the functions of these that do so
    "json": {"load", "dump"},
    "np": {"load", "save", "savez", "savez_compressed"},
    "numpy": {"load", "save", "savez", "savez_compressed"},
    "torch": {"load"},
    "pickle": {"load", "loads", "Unpickler"},
    "yaml": {"load", "safe_load"},
    "zipfile": {"ZipFile"},
    "safetensors": {"safe_open"},
}
ALLOWED = {
    ("cli/__init__.py", "os.open(os.devnull, os.O_WRONLY)"): "no file",
    ("data/token_files.py", "np.fromfile(self.path, '<i4', HEADER)"): "a source of the user's, known to be regular",
    ("data/token_files.py", "np.memmap(self.path, dtype, 'r', HEADER_BYTES, (count,))"): "the same",
    ("data/token_files.py", "np.memmap(self.path, dtype, 'r')"): "the same",
    ("evaluation/memory.py", "Path('/proc/meminfo').read_text()"): "the system's",
    ("evaluation/memory.py", "(folder / 'memory.max').read_text()"): "the system's",
    ("evaluation/memory.py", "(folder / 'memory.current').read_text()"): "the system's",
    ("evaluation/memory.py", "(folder / 'memory.stat').read_text()"): "the system's",
    ("utils/provenance.py", "open('/proc/cpuinfo')"): "the system's",
    ("evaluation/harness/public_sets.py", "zipfile.ZipFile(wheel)"): "of a SHA-256 that is known",
    ("huggingface/loading.py", "safe_open(path, 'pt')"): "known to be regular; a format without objects",
    ("report/newton.py", "Image.open(BytesIO(png), formats=['PNG'])"): "bytes that were read before",
    ("training/checkpoints.py", "os.open(path, os.O_RDONLY)"): "waits for the disk, reads nothing",
    ("training/config.py", "yaml.load(text, Loader=Loader)"): "a text, by a safe loader",
    ("training/trainer.py", "torch.load(folder / SCHEDULER, weights_only=True)"): "listed in a manifest, tensors only",
}
# Calls that must stand nowhere, and modules that one file alone imports.
NEVER = (("allow_pickle", True), ("weights_only", False), ("trust_remote_code", True))
IMPORTERS = {"pickle": {"training/checkpoint_metadata.py", "huggingface/loading.py"}}


def calls_in(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.Call):
            continue
        text = ast.unparse(node)
        if isinstance(node.func, ast.Attribute):
            holder = ast.unparse(node.func.value)
            is_ours = holder in ("untrusted", "TokenDataset") or "resources.files" in holder or "files(__" in holder
            named = node.func.attr in CALLS or node.func.attr in LIBRARIES.get(holder, ())
        else:
            name = getattr(node.func, "id", "")
            is_ours = name in ("read_text", "read_bytes")  # imported, as is tested below
            named = name in CALLS or name == "safe_open"
        if named and not is_ours:
            yield text


@pytest.fixture(scope="module")
def sources() -> dict[str, Path]:
    found = {path.relative_to(SOURCE).as_posix(): path for path in sorted(SOURCE.rglob("*.py"))}
    assert len(found) > 100
    return {name: path for name, path in found.items() if name not in OWN}


def test_files_are_opened_in_two_modules(sources: dict[str, Path]) -> None:
    found = {(name, call) for name, path in sources.items() for call in calls_in(path)}
    assert sorted(found - set(ALLOWED)) == [], "read it with utils.untrusted, or write it with utils.files"
    assert sorted(set(ALLOWED) - found) == [], "allowed, and not there any more"


def test_readers_come_from_untrusted(sources: dict[str, Path]) -> None:
    for name, path in sources.items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                assert node.name not in ("read_text", "read_bytes"), f"{name}: {node.name}"
            if isinstance(node, ast.ImportFrom) and {"read_text", "read_bytes"} & {alias.name for alias in node.names}:
                assert node.module == "softplus_attention.utils.untrusted", name


def test_no_reader_of_objects(sources: dict[str, Path]) -> None:
    for name, path in sources.items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import | ast.ImportFrom):
                modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module]
                assert all(name in IMPORTERS.get(module or "", [name]) for module in modules), (name, modules)
            if isinstance(node, ast.Call):
                assert getattr(node.func, "id", "") not in ("eval", "exec"), (name, ast.unparse(node))
                assert getattr(node.func, "attr", "") != "read_metadata", (name, ast.unparse(node))
            if isinstance(node, ast.keyword) and isinstance(node.value, ast.Constant):
                assert (node.arg, node.value.value) not in NEVER, (name, ast.unparse(node))


def test_torch_loads_tensors_only(sources: dict[str, Path]) -> None:
    for name, path in sources.items():
        for call in calls_in(path):
            assert not call.startswith("torch.load(") or "weights_only=True" in call, name
