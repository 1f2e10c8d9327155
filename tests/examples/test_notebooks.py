"""The notebooks of examples/ run from the first cell to the last, with small settings."""

from __future__ import annotations

import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from nbformat import NotebookNode

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))
# In place of the cell that is tagged "parameters": the same names, as small as they can be.
SMALL = {
    "three_attentions": {"STEPS": "4", "SEQUENCES": "2", "TRIALS": "1"},
    "huggingface": {"STEPS": "2", "SEQUENCES": "1"},
}
PICTURES = {"three_attentions": 3, "huggingface": 1}
LONG = {"three_attentions"}


def run(notebook: NotebookNode, folder: Path) -> None:
    NotebookClient(
        notebook, timeout=600, kernel_name="python3", resources={"metadata": {"path": str(folder)}}
    ).execute()


def make_small(notebook: NotebookNode, values: dict[str, str]) -> None:
    """Without the cell that installs, and with other numbers."""
    notebook.cells = [cell for cell in notebook.cells if "install" not in cell.metadata.get("tags", [])]
    (cell,) = (cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", []))
    for name, value in values.items():
        cell.source, count = re.subn(rf"^{name} = \S+", f"{name} = {value}", cell.source, flags=re.MULTILINE)
        assert count == 1, name


@pytest.mark.parametrize(
    "path", [pytest.param(p, id=p.stem, marks=[pytest.mark.slow] * (p.stem in LONG)) for p in NOTEBOOKS]
)
def test_notebook_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    notebook = nbformat.read(path, as_version=4)
    make_small(notebook, SMALL[path.stem])
    run(notebook, tmp_path)
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert sum("image/png" in output.get("data", {}) for output in outputs) == PICTURES[path.stem]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_is_ready_for_colab(path: Path) -> None:
    """No outputs are stored, the badge opens this file, and the first code cell installs the package."""
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert not any(cell.outputs or cell.execution_count for cell in code)
    assert f"/blob/main/examples/{path.name})" in notebook.cells[0].source
    assert code[0].source.startswith('%pip install -q "softplus-attention[')
