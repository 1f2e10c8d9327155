"""A run from its data to the saved model."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from training_runs import Run, running
from transformers import AutoModelForCausalLM, AutoTokenizer

import softplus_attention.huggingface  # noqa: F401  registers the model with the Auto classes
from softplus_attention.cli import main
from softplus_attention.data import prepare
from softplus_attention.huggingface import SoftplusGPTForCausalLM
from softplus_attention.power import PowerByLength
from softplus_attention.training import TrainConfig
from softplus_attention.training import run as runs
from softplus_attention.training.data import RepeatedDataset, collate
from softplus_attention.training.metrics import flops_per_token


class Numbers:
    """7 sequences that contain epoch and index, in a different order each epoch."""

    epoch = 0

    def __len__(self) -> int:
        return 7

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        value = torch.full((3,), 100 * self.epoch + (number + 3 * self.epoch) % 7)
        return {"input_ids": value, "labels": value}


def test_repeated_data_from_any_position() -> None:
    whole = [int(RepeatedDataset(Numbers(), 20)[n]["input_ids"][0]) for n in range(20)]
    assert sorted(whole[:7]) == list(range(7))
    assert sorted(whole[7:14]) == [100 + n for n in range(7)]
    later = RepeatedDataset(Numbers(), 20)
    assert [int(later[n]["input_ids"][0]) for n in range(11, 20)] == whole[11:]
    assert collate([later[12]])["labels"].tolist() == [[-100, whole[12], whole[12]]]


def test_flops_of_gpt2_small() -> None:
    assert flops_per_token(124_000_000, 768, [1024] * 12) == 6 * 124_000_000 + 12 * 12 * 768 * 1024


class TestRun:
    def test_logs_and_saved_model(self, run: Run, data: Path) -> None:
        run.finish(
            evaluate_every=8, power_growth=4, schedule="wsd", optimizer="muon", peak_tflops=0.1, document_mask=True
        )
        entries = [entry for entry in run.entries() if "loss" in entry]
        assert [entry["power"] for entry in entries] == [3] * 6 + [7] * 6 + [15] * 12
        assert [entry["tokens"] for entry in entries] == [8 * 24 * step for step in range(1, 25)]
        assert all(entry["tokens_per_second"] > 0 and 0 < entry["mfu"] < 1 for entry in entries)
        assert [entry["step"] for entry in run.entries() if "eval_loss" in entry] == [8, 16, 24]
        rates = [entry["learning_rate"] for entry in entries]
        assert rates[5] == rates[15] == 0.01
        assert rates[-1] < 0.005
        assert "left" in run.words()
        assert "MFU" in run.words()

        model = AutoModelForCausalLM.from_pretrained(run.output / "model")
        tokenizer = AutoTokenizer.from_pretrained(run.output / "model")
        assert model.config.power == {"base": 15, "slope": 4.0, "n0": 24}
        assert model.config.use_cache
        assert model.generation_config.use_cache
        ids = tokenizer("abc def", return_tensors="pt").input_ids
        assert math.isfinite(model(ids, labels=ids).loss.item())
        assert model.generate(ids, max_new_tokens=4, do_sample=False).shape[1] == ids.shape[1] + 4

        record = json.loads((run.output / "run.json").read_text())
        assert record["config"]["power"] == "3,7@0.25,15@0.5"
        (start,) = record["starts"]
        assert start["versions"]["torch"] == torch.__version__
        assert start["commit"]
        assert run.checkpoints() == [16, 20, 24]

    def test_saved_model_has_power_and_global_layers(self, run: Run) -> None:
        run.finish(power="log:2", global_every=2, window=6, local_attention="softmax", steps=4)
        model = AutoModelForCausalLM.from_pretrained(run.output / "model")
        local, everywhere = (layer.self_attn.attention.spec for layer in model.model.layers)
        assert (local.positive, local.window, local.positions) == ("exp", 6, "rope")
        assert (everywhere.window, everywhere.positions) == (None, "none")
        assert everywhere.sharpening == PowerByLength(1, 2, math.exp(0.5))

    def test_first_loss_matches_the_model(self, run: Run, data: Path) -> None:
        """The loss of a model built with the same seed, on the same sequences."""
        run.finish(steps=1, power="3")
        config = TrainConfig(**{**run.settings, "data": str(data), "output": str(run.output), "steps": 1, "power": "3"})
        folder = runs.Folder(data)
        torch.manual_seed(0)
        model = SoftplusGPTForCausalLM(runs.model_config(config, folder.index.vocabulary_size, 256))
        sequences = folder.sequences("train", 24, seed=0, document_mask=False)
        ids = torch.stack([sequences[n]["input_ids"] for n in range(8)])
        assert run.losses()[1] == pytest.approx(model(input_ids=ids, labels=ids).loss.item(), rel=1e-6)

    def test_missing_tokenizer_is_named_first(self, run: Run, data: Path, tmp_path: Path) -> None:
        shutil.copytree(data, tmp_path / "without")
        (tmp_path / "without" / "tokenizer.json").unlink()
        assert "tokenizer.json is missing: restore it from a copy" in run.fail(2, data=tmp_path / "without")
        assert not run.output.exists()

    def test_without_a_validation_split(self, run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        (tmp_path / "a.jsonl").write_text('{"text": "one two three"}\n' * 9)
        prepare([tmp_path / "a.jsonl"], tmp_path / "no-validation", tokenizer="bytes", validation_fraction=0, workers=1)
        assert main(["train", *run.arguments([], data=tmp_path / "no-validation", evaluate_every=5)]) == 2
        reason = "no-validation has no validation split. Pass --evaluate-every 0, or prepare again with"
        assert reason in capsys.readouterr().err

    def test_float16_needs_a_gpu(self, run: Run) -> None:
        assert "fp16 needs a GPU. Pass `--precision` bf16 or fp32" in run.fail(2, precision="fp16", device="cpu")

    @pytest.mark.slow
    def test_compiled_ramp(self, run: Run) -> None:
        settings: dict[str, Any] = {"power": "ramp:3,15", "steps": 13, "loss": "chunked"}
        run.finish(**settings)
        losses = run.losses()
        with running(run.output.with_name("compiled"), **run.settings) as compiled:
            compiled.start(compile=True, **settings)
            assert compiled.wait(900) == 0, compiled.words()
            assert [entry["power"] for entry in compiled.entries() if "loss" in entry] == list(range(3, 16))
            assert compiled.losses() == pytest.approx(losses, abs=1e-3)

    @pytest.mark.slow
    @pytest.mark.parametrize(
        "changes",
        [
            {"attention": "softmax", "power": None},
            {"attention": "ssmax", "power": None, "precision": "bf16"},
            {"power": "learned"},
            {"power": "learned-log", "document_mask": True},
            {"gradient_checkpointing": True},
            {"workers": 2, "document_mask": True},
            {"attention": "softmax-window", "power": None, "window": 8},
        ],
        ids=str,
    )
    def test_other_settings_run(self, run: Run, changes: dict[str, Any]) -> None:
        run.finish(**changes)
        losses = run.losses()
        assert losses[24] < losses[1] - 1


WITHOUT_OPTIONAL = """
import sys
for name in ("datasets", "pyarrow", "pandas", "zstandard", "matplotlib", "scipy", "sklearn", "entmax", "pyoperon"):
    sys.modules[name] = None
from softplus_attention.cli import main
sys.exit(main(["train", *sys.argv[1:]]))
"""


@pytest.mark.slow
def test_train_needs_few_packages(run: Run) -> None:
    result = subprocess.run(
        [sys.executable, "-c", WITHOUT_OPTIONAL, *run.arguments([], steps=2)], capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    assert (run.output / "model" / "tokenizer.json").exists()


@pytest.mark.slow
def test_benchmark_runs(tmp_path: Path) -> None:
    output = tmp_path / "deep" / "training.json"
    script = Path(__file__).parents[2] / "benchmarks" / "training.py"
    command = [sys.executable, str(script), "--quick", "--output", str(output), "--commit", "abc"]
    table = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    data = json.loads(output.read_text())
    assert data["commit"] == "abc"
    assert [row["attention"] for row in data["rows"]] == ["softmax", "lssar"]
    for row in data["rows"]:
        assert row["tokens_per_second"] == pytest.approx(row["tokens_per_step"] / row["step_ms"] * 1e3)
        assert f"{row['tokens_per_second']:,.0f}" in table
