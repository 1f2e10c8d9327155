"""The shipped model: its size, its loss, and the README's commands on it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from softplus_attention.cli import main
from softplus_attention.huggingface.loading import load_model

FOLDER = Path(__file__).parents[2] / "checkpoints" / "bytes-2.7m"
MAX_BYTES = 15e6


def test_size_and_config() -> None:
    assert sum(file.stat().st_size for file in FOLDER.iterdir()) < MAX_BYTES
    model = load_model(str(FOLDER))
    config = model.config
    assert (config.attention, config.power, config.global_every, config.window) == ("lssar", "learned-log", 3, 128)
    assert {str(parameter.dtype) for parameter in model.parameters()} == {"torch.float32"}


@pytest.fixture(scope="module")
def evaluation(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The README's commands: losses on held-back text at 1 and 16 times the training length, and a report."""
    folder = tmp_path_factory.mktemp("checkpoint")
    data, output = str(folder / "data"), str(folder / "evaluation")
    prepare = ["data", "prepare", "builtin", "--tokenizer", "bytes", "--validation-fraction", "0.1", "--output", data]
    assert main(prepare) == 0
    lengths = ["evaluate", "lengths", str(FOLDER), "--data", data, "--lengths", "1,16", "--sequences", "2"]
    assert main([*lengths, "--output", output]) == 0
    assert main(["report", output]) == 0
    return folder / "evaluation"


def test_loss_falls_with_length(evaluation: Path) -> None:
    (file,) = evaluation.glob("lengths--*.json")
    short, long = (entry["loss"] for entry in json.loads(file.read_text())["results"]["lengths"])
    assert long < short - 0.01
    assert short < 1.6, "nats per byte of unseen text"


def test_report(evaluation: Path) -> None:
    assert "bytes-2.7m" in (evaluation / "report.html").read_text()


def test_generated_text_is_english(capfd: pytest.CaptureFixture[str]) -> None:
    """A wrongly loaded model would write no common words."""
    options = ["--max-new-tokens", "200", "--device", "cpu"]
    assert main(["generate", "--model", str(FOLDER), "--prompt", "It was the ", *options]) == 0
    written = capfd.readouterr().out.split()
    common = {"the", "and", "of", "to", "a", "in", "that", "he", "was", "it", "his", "with", "for", "I", "not", "is"}
    assert len(written) > 20
    assert sum(word in common for word in written) > len(written) // 6
