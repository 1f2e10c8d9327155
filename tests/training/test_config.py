"""``TrainConfig`` and the ``train`` command: power schedules, presets, config files, and invalid settings."""

from __future__ import annotations

import dataclasses
import json
import math
import pydoc
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo

import softplus_attention.huggingface  # noqa: F401  registers the model with the Auto classes
from softplus_attention.cli import main
from softplus_attention.huggingface import SoftplusGPTForCausalLM
from softplus_attention.training import PRESETS, TrainConfig, configured, power_schedule, train
from softplus_attention.training import run as runs
from softplus_attention.training.schedules import logarithmic_power

PLACES: dict[str, Any] = {"data": "data", "output": "output"}


class TestPowerSchedule:
    @pytest.mark.parametrize(
        ("text", "powers"),
        [
            ("15", [15] * 10),
            ("2.5", [2.5] * 10),
            ("3,7@0.1,15@0.3", [3, 7, 7, 15, 15, 15, 15, 15, 15, 15]),
            ("3,7@0.25", [3, 3, 3, 7, 7, 7, 7, 7, 7, 7]),
            ("ramp:1,10", [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]),
            ("ramp:3,6@0.5", [3, 4, 4, 5, 6, 6, 6, 6, 6, 6]),
            ("ramp:15,3", [15, 14, 12, 11, 10, 8, 7, 6, 4, 3]),
        ],
    )
    def test_power_of_each_step(self, text: str, powers: list[float]) -> None:
        schedule = power_schedule(text)
        assert schedule is not None
        assert [schedule.at(step, 10) for step in range(10)] == powers
        assert schedule.final(10) == powers[-1]
        assert schedule.distinct(10) == len(set(powers))
        assert all(isinstance(p, int) for p in powers if float(p).is_integer())

    def test_unrounded_ramp(self) -> None:
        schedule = power_schedule("ramp:3,15", rounded=False)
        assert schedule is not None
        assert schedule.at(1, 101) == pytest.approx(3.12)
        assert schedule.final(101) == 15

    def test_power_by_length_is_factor_times_log(self) -> None:
        assert power_schedule("log:1.5") is None
        power = logarithmic_power("log:1.5")
        assert power is not None
        counts = torch.tensor([1.0, 2.0, 10.0, 512.0, 32768.0], dtype=torch.float64)
        torch.testing.assert_close(power.at(counts), (1.5 * counts.log()).clamp(min=1))

    @pytest.mark.parametrize(
        "text",
        [
            *("", "x", "0.5", "3,7", "3@0.1", "3,7@0.5,9@0.2", "3,7@1", "ramp:3", "ramp:3,15@0", "ramp:0,3", "nan"),
            *("3,7@x", "log:", "log:0", "log:-1", "log:1,2", "log:nan"),
        ],
    )
    def test_invalid_schedules(self, text: str) -> None:
        with pytest.raises(ValueError, match="`power` must be"):
            power_schedule(text)


class TestConfiguration:
    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"attention": "lssarr"}, "did you mean 'lssar'"),
            ({"attention": "softmax", "power": "3"}, "'softmax' has no second stage, so it takes no power. Leave out"),
            ({"schedule": "linear"}, "`schedule` must be one of cosine, wsd"),
            (
                {"schedule": "wsd", "steps": 100, "warmup": 10, "decay": 91},
                "`decay` must be at most the 90 steps after the warm-up, got 91",
            ),
            ({"optimizer": "sgd"}, "`optimizer` must be one of adamw, muon"),
            ({"parallel": "zero"}, "`parallel` must be one of ddp, fsdp"),
            ({"loss": "fused"}, "`loss` must be one of plain, chunked, liger"),
            ({"precision": "fp8"}, "`precision` must be one of auto, bf16, fp16, fp32"),
            ({"precision": "fp16", "parallel": "fsdp"}, "fp16 cannot be combined with `parallel` fsdp"),
            ({"steps": 0}, "`steps` must be at least 1"),
            ({"steps": 1.5}, "`steps` must be of type int"),
            ({"warmup": math.inf}, "`warmup` must be at least 0 and below 1e.18, got inf"),
            ({"clip": math.nan}, "`clip` must be at least 0 and below 1e.18, got nan"),
            ({"weight_decay": math.nan}, "`weight_decay` must be at least 0 and below 1e.18"),
            ({"score_scale": -1.0}, "`score_scale` must be above 0 and finite"),
            ({"peak_tflops": -5.0}, "`peak_tflops` must be above 0 and finite"),
            ({"width": 512, "heads": 1}, "heads of 512 are too wide, the maximum is 256. Raise `heads`"),
            ({"compile": 1}, "`compile` must be of type bool"),
            ({"width": 100, "heads": 3}, "`width` must be a multiple of the 3 heads"),
            ({"power": "ramp:3,15", "power_rounding": False, "compile": True}, "Leave `power_rounding` on"),
            ({"power": "learned", "power_growth": 4.0}, "a learned power cannot grow"),
            ({"power": "log:1.5", "power_growth": 4.0}, "the power 'log:1.5' already grows with N"),
            ({"attention": "softmax", "power": "log:1.5"}, "has no second stage"),
            ({"learning_rate": 0.0}, "`learning_rate` must be above 0"),
        ],
    )
    def test_invalid_settings(self, changes: dict[str, Any], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            TrainConfig(**PLACES, **changes)

    def test_power_of_a_preset_is_for_lssar(self) -> None:
        assert configured(PLACES, preset="small").power == "learned-log"
        assert configured({**PLACES, "power": "3"}, preset="small").power == "3"
        for settings in ({"attention": "softmax"}, {"attention": "lssar-p3"}):
            config = configured({**PLACES, **settings}, preset="small")
            assert config.power is None
            assert config.global_every == 3
        assert configured(PLACES, preset="gpt2-small").power is None
        with pytest.raises(ValueError, match="a learned power cannot grow"):
            configured({**PLACES, "power_growth": 2.0}, preset="small")

    def test_layers_of_a_preset_can_be_disabled(self) -> None:
        mixed, plain = PLACES, {**PLACES, "global_every": 0}
        for settings, windows in ((mixed, [64, 64, None, 64]), (plain, [None] * 4)):
            config = configured(settings, preset="tiny")
            model = runs.model_config(config, 256, None)
            assert [model.attention_of_layer(layer).window(None) for layer in range(4)] == windows
            assert config.spans() == [window or 128 for window in windows]
        assert config.power is None
        assert not config.changes(configured({**plain, "window": 0}, preset="tiny").as_dict())

    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            ({"layers": 2}, r"`global_every` must be from 2 to 2 .*or 0 for none.*got 3"),
            ({"window": 0}, "`global_every` needs `window`, the number of tokens"),
            ({"window": -1}, "`window` must be at least 1, or 0 for no window, got -1"),
            ({"global_every": 0, "local_attention": "softmax"}, "`local_attention` needs `global_every`"),
        ],
    )
    def test_invalid_layers(self, settings: dict[str, Any], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            configured({**PLACES, **settings}, preset="tiny")

    @pytest.mark.parametrize("preset", PRESETS)
    def test_head_dimensions_of_presets(self, preset: str) -> None:
        config = configured(PLACES, preset=preset)
        assert config.width // config.heads == (128 if preset == "small" else 64)

    def test_sizes_of_presets(self) -> None:
        sizes = {}
        for preset in ("small", "gpt2-small"):
            config = configured(PLACES, preset=preset)
            with torch.device("meta"):
                model = SoftplusGPTForCausalLM(runs.model_config(config, 50257, 50256))
            sizes[preset] = sum(p.numel() for p in model.parameters())
        assert sizes["small"] == pytest.approx(51e6, rel=0.02)
        assert sizes["gpt2-small"] == pytest.approx(124e6, rel=0.01)
        assert config.steps == 18865
        assert config.batch_size * config.sequence_length == 2**19

    @pytest.mark.parametrize("suffix", [".json", ".yaml"])
    def test_options_over_file_over_preset(self, tmp_path: Path, suffix: str) -> None:
        file = tmp_path / f"run{suffix}"
        if suffix == ".json":
            file.write_text(json.dumps({"preset": "small", "learning-rate": 6e-4, "steps": 7, "power": 3, **PLACES}))
        else:
            file.write_text("preset: small\nlearning_rate: 6e-4\nsteps: 7\npower: 3\ndata: data\noutput: output\n")
        config = configured({"steps": 9}, file=file)
        assert (config.layers, config.learning_rate, config.steps, config.power) == (8, 6e-4, 9, "3")

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("lerning_rate: 1", "did you mean 'learning_rate'"),
            ("steps: many", "`steps` must be of type int"),
            ("preset: [tiny]", "'preset' must be text or a number, got a list"),
            ("- 1", "must contain `name: value` lines, got a list"),
            ("a: [", "is not YAML"),
            ("preset: huge", "there is no preset 'huge'"),
        ],
    )
    def test_invalid_files(self, tmp_path: Path, text: str, message: str) -> None:
        file = tmp_path / "run.yaml"
        file.write_text(text)
        with pytest.raises(ValueError, match=message):
            configured(PLACES, file=file)


class TestCommand:
    def test_help_shows_every_setting(self, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit):
            main(["train", "--help"])
        text = " ".join(capsys.readouterr().out.split())
        for name in TrainConfig.__dataclass_fields__:
            assert f"--{name.replace('_', '-')}" in text or f"--no-{name.replace('_', '-')}" in text
        for expected in ("torchrun", "gpt2-small", "3,7@0.1,15@0.3", "10% of the steps"):
            assert expected in text

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["--preset", "huge"], "there is no preset 'huge'; there are tiny, small, gpt2-small"),
            (["--data", "x"], "`--output` is missing"),
            (["--data", "x", "--output", "y", "--attention", "sofmax"], "did you mean 'softmax'"),
            (["--data", "x", "--output", "y", "--schedule", "step"], "`--schedule` must be one of"),
            (["--data", "x", "--output", "y", "--sequence-length", "1"], "`--sequence-length` must be at least 2"),
            (
                ["--data", "x", "--output", "y", "--global-every", "2", "--window", "0"],
                "`--global-every` needs `--window`, the number of tokens",
            ),
            (["--data", "x", "--output", "y"], "a folder written by `softplus-attention data prepare`"),
            (["--config", "nowhere.yaml"], "nowhere.yaml: no such file or directory"),
            (
                ["--data", "x", "--output", "y", "--clip", "nan"],
                "`--clip` must be at least 0 and below 1e+18, got nan",
            ),
        ],
    )
    def test_errors_are_one_line(
        self, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str, tmp_path: Path, monkeypatch: Any
    ) -> None:
        monkeypatch.chdir(tmp_path)
        assert main(["train", *arguments]) == 2
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1
        assert not list(tmp_path.iterdir())


def test_docstrings_list_the_settings() -> None:
    """Those of the class and of ``train`` have the help texts of the command line."""
    for documented in (TrainConfig, train):
        text = pydoc.plain(pydoc.render_doc(documented))
        for field in dataclasses.fields(TrainConfig):
            assert f"{field.name}: {field.metadata['help'][:20]}" in text
        assert "%%" not in text
