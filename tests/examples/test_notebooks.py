"""The notebooks of examples/ run with small settings."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import nbformat
import pytest
import torch
from huggingface_models import byte_tokenizer
from nbclient import NotebookClient
from nbformat import NotebookNode
from transformers import AutoModelForCausalLM, LlamaConfig

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))
# Values of the cell tagged "parameters".
SMALL = {
    "three_attentions": {"STEPS": "4", "SEQUENCES": "2", "TRIALS": "1"},
    "huggingface": {"STEPS": "2", "SEQUENCES": "1"},
    "extend": {
        "MODEL": '"small"',
        "TO": "2048",
        "HEADS": '"1"',
        "MEASURE": '["100", "400"]',
        "PROMPTS": "2",
        "TEXT": '"text.txt"',
    },
}
PICTURES = {"three_attentions": 3, "huggingface": 1, "extend": 1}
LONG = {"three_attentions", "extend"}


def run(notebook: NotebookNode, folder: Path) -> None:
    NotebookClient(
        notebook, timeout=600, kernel_name="python3", resources={"metadata": {"path": str(folder)}}
    ).execute()


def save_small_llama(folder: Path) -> None:
    """Saves the model that is extended instead of one from the Hub, and a text for it."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 257, "max_position_embeddings": 256}
    ends = {"pad_token_id": 256, "bos_token_id": 256, "eos_token_id": 256}
    AutoModelForCausalLM.from_config(LlamaConfig(**sizes, **ends)).save_pretrained(folder / "small")
    byte_tokenizer().save_pretrained(folder / "small")
    (folder / "text.txt").write_text("It was the best of times, it was the worst of times; we had nothing. " * 60)


def make_small(notebook: NotebookNode, values: dict[str, str]) -> None:
    """Removes the install cell, and sets the parameters."""
    notebook.cells = [cell for cell in notebook.cells if "install" not in cell.metadata.get("tags", [])]
    (cell,) = (cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", []))
    for name, value in values.items():
        cell.source, count = re.subn(
            rf"^{name} = .+?(?=  #|$)",
            lambda _, name=name, value=value: f"{name} = {value}",
            cell.source,
            flags=re.MULTILINE,
        )
        assert count == 1, name


@pytest.mark.parametrize(
    "path", [pytest.param(p, id=p.stem, marks=[pytest.mark.slow] * (p.stem in LONG)) for p in NOTEBOOKS]
)
def test_notebook_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    notebook = nbformat.read(path, as_version=4)
    make_small(notebook, SMALL[path.stem])
    if path.stem == "extend":
        save_small_llama(tmp_path)
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
