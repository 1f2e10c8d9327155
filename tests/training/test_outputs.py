"""Outputs of a run: model folder, model card, reporters. Also the example configs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml
from training_runs import Run

from softplus_attention.cli import main
from softplus_attention.training import TrainConfig, configured
from softplus_attention.training.model_card import model_card

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("train-*.yaml"))


class TestModelFolder:
    def test_card_describes_and_loads_the_model(self, run: Run) -> None:
        """The code in the card loads the model in a fresh process."""
        run.finish(steps=4, evaluate_every=2, power="3,15@0.5", global_every=2, window=6)
        folder = run.output / "model"
        card = (folder / "README.md").read_text()
        losses = [entry["loss"] for entry in run.entries() if "loss" in entry]
        validation = [entry["eval_loss"] for entry in run.entries() if "eval_loss" in entry]
        for row in (
            "| attention | `lssar` |",
            "| power | 15, raised in training: `3,15@0.5` |",
            "| layers | every second sees all tokens and has no rotary positions; the others see the last 6 tokens |",
            "| training length | 24 tokens |",
            "| trained for | 4 steps of 8 sequences, 768 tokens in all |",
            f"| training loss | {losses[-1]:.4f} at step 4 |",
            f"| validation loss | {validation[-1]:.4f} at step 4 |",
        ):
            assert row in card
        head = yaml.safe_load(card.split("---")[1])
        assert head["library_name"] == "transformers"
        (code,) = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
        code += "\nids = tokenizer('abc', return_tensors='pt').input_ids\nprint(model(ids).logits.shape[-1])"
        environment = {**os.environ, "HF_HOME": str(run.output / "cache"), "HF_HUB_OFFLINE": "1"}
        command = [sys.executable, "-c", code]
        found = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
        assert found.returncode == 0, found.stderr
        assert int(found.stdout) >= 256

    @pytest.mark.parametrize(
        ("settings", "power", "row"),
        [
            ({"attention": "softmax"}, None, "none: this attention has no second stage"),
            ({}, None, "15"),
            ({"power": "7"}, 7, "7"),
            ({"power": "learned"}, "learned", "learned, one for each head and layer"),
            ({"power": "learned-log"}, "learned-log", "a factor of log N, learned for each head and layer"),
            (
                {"power_growth": 4.0},
                {"base": 15, "slope": 4.0, "n0": 128},
                "15 + 4 log(max(N, 128) / 128) for a row that sees N keys",
            ),
        ],
        ids=str,
    )
    def test_card_names_the_power(self, settings: dict[str, Any], power: Any, row: str) -> None:
        from softplus_attention.huggingface import SoftplusGPTConfig, SoftplusGPTForCausalLM

        config = TrainConfig(data="data", output="run", **settings)
        small = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
        small |= {"bos_token_id": 0, "eos_token_id": 0, "attention": config.attention, "power": power}
        card = model_card("run", SoftplusGPTForCausalLM(SoftplusGPTConfig(**small)), config, [], "abc", None)
        assert f"| power | {row} |" in card
        assert "| training loss | not measured |" in card
        assert "AutoTokenizer.from_pretrained" not in card


class TestReportTo:
    @pytest.mark.parametrize("reporter", ["tensorboard", "wandb", "trackio"])
    def test_receives_the_values(self, run: Run, reporter: str, monkeypatch: pytest.MonkeyPatch) -> None:
        pytest.importorskip(reporter)
        home = run.output.with_name("home")
        for name, value in {"WANDB_MODE": "offline", "WANDB_DIR": home, "TRACKIO_DIR": home}.items():
            monkeypatch.setenv(name, str(value))
        home.mkdir()
        arguments = run.arguments([], report_to=reporter, steps=2)
        command = [sys.executable, "-m", "softplus_attention", "train", *arguments]
        found = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert found.returncode == 0, found.stderr
        place = run.output / "tensorboard" if reporter == "tensorboard" else home
        assert [path for path in place.rglob("*") if path.is_file()]

    @pytest.mark.parametrize("reporter", ["wandb", "trackio", "tensorboard"])
    def test_missing_package_is_named_first(
        self, run: Run, reporter: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setattr(
            "softplus_attention.training.metrics.find_spec", lambda name: None if name == reporter else find_spec(name)
        )
        assert main(["train", *run.arguments([], report_to=reporter)]) == 2
        error = capsys.readouterr().err
        assert error == (
            f"softplus-attention: {reporter} is not installed. Run `pip install {reporter}`, or pass --report-to none\n"
        )
        assert not run.output.exists()

    def test_none_writes_metrics_only(self, run: Run) -> None:
        run.finish(steps=1, report_to="none")
        assert run.entries()
        assert not (run.output / "tensorboard").exists()

    def test_unknown_reporter(self) -> None:
        with pytest.raises(ValueError, match="`report_to` must be one of tensorboard, wandb, trackio, none, got 'x'"):
            TrainConfig(data="data", output="run", report_to="x")


SMALL = {"layers": 2, "width": 32, "heads": 2, "sequence_length": 24, "steps": 2, "batch_size": 4, "warmup": 0}
SMALL |= {"micro_batch_size": 4, "log_every": 1, "evaluate_every": 2, "workers": 0, "device": "cpu"}


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_configs_start(path: Path, run: Run, data: Path) -> None:
    config = configured(file=path)
    assert config.steps >= 400
    settings = {**SMALL, "data": data}
    if config.global_every:
        settings |= {"window": 8, "global_every": 2}
    run.settings = settings
    run.finish("--config", str(path), "--no-compile")
    assert sorted(run.losses()) == [1, 2]
    assert (run.output / "model" / "README.md").exists()


def test_long_context_example_is_the_recipe() -> None:
    from softplus_attention.recipes import long_context_config
    from softplus_attention.training.run import model_config

    config = configured(file=ROOT / "examples" / "train-long-context.yaml")
    built, recipe = model_config(config, 50257, 50256).to_dict(), long_context_config("124M").to_dict()
    assert built == recipe
