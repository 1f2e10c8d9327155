"""Training's parts: configuration, power schedules, losses, optimizers, and what a short run leaves behind."""

from __future__ import annotations

import copy
import functools
import json
import math
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
from torch._dynamo.utils import counters
from training_runs import TINY, Run, running, text_folder
from transformers import AutoModelForCausalLM, AutoTokenizer

import softplus_attention.huggingface  # noqa: F401  registers the model with the Auto classes
from softplus_attention.cli import main
from softplus_attention.huggingface import SoftplusGPTConfig, SoftplusGPTForCausalLM, set_power
from softplus_attention.power import PowerByLength
from softplus_attention.training import PRESETS, TrainConfig, configured, optimizers, power_schedule
from softplus_attention.training import run as runs
from softplus_attention.training.checkpoints import load_state, save_state
from softplus_attention.training.data import RepeatedDataset, collate
from softplus_attention.training.losses import linear_loss
from softplus_attention.training.metrics import flops_per_token
from softplus_attention.training.optimizers import StackedMuon, optimizer_of, stacks
from softplus_attention.training.schedules import logarithmic_power

PLACES: dict[str, Any] = {"data": "data", "output": "output"}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return text_folder(tmp_path_factory.mktemp("text"))


@pytest.fixture
def run(data: Path, tmp_path: Path) -> Iterator[Run]:
    with running(tmp_path / "run", **TINY, data=data) as run:
        yield run


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
    def test_the_power_of_each_step(self, text: str, powers: list[float]) -> None:
        schedule = power_schedule(text)
        assert schedule is not None
        assert [schedule.at(step, 10) for step in range(10)] == powers
        assert schedule.final(10) == powers[-1]
        assert schedule.distinct(10) == len(set(powers))
        assert all(isinstance(p, int) for p in powers if float(p).is_integer())

    def test_a_ramp_that_is_not_rounded(self) -> None:
        schedule = power_schedule("ramp:3,15", rounded=False)
        assert schedule is not None
        assert schedule.at(1, 101) == pytest.approx(3.12)
        assert schedule.final(101) == 15

    def test_a_power_by_length_is_the_factor_times_the_log(self) -> None:
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
    def test_others_are_refused_with_the_forms_there_are(self, text: str) -> None:
        with pytest.raises(ValueError, match="`power` must be"):
            power_schedule(text)


class TestConfiguration:
    @pytest.mark.parametrize(
        ("changes", "words"),
        [
            ({"attention": "lssarr"}, "did you mean 'lssar'"),
            ({"attention": "softmax", "power": "3"}, "has no second stage"),
            ({"schedule": "linear"}, "`schedule` must be one of cosine, wsd"),
            (
                {"schedule": "wsd", "steps": 100, "warmup": 10, "decay": 91},
                "`decay` must be at most the steps that the warm-up leaves, 90, got 91",
            ),
            ({"optimizer": "sgd"}, "`optimizer` must be one of adamw, muon"),
            ({"parallel": "zero"}, "`parallel` must be one of ddp, fsdp"),
            ({"loss": "fused"}, "`loss` must be one of plain, chunked, liger"),
            ({"precision": "fp8"}, "`precision` must be one of auto, bf16, fp16, fp32"),
            ({"precision": "fp16", "parallel": "fsdp"}, "`precision` must be bf16 or fp32 with --parallel fsdp"),
            ({"steps": 0}, "`steps` must be at least 1"),
            ({"steps": 1.5}, "`steps` must be of type int"),
            ({"warmup": math.inf}, "`warmup` must be at least 0, and finite, got inf"),
            ({"clip": math.nan}, "`clip` must be at least 0, and finite, got nan"),
            ({"weight_decay": math.nan}, "`weight_decay` must be at least 0, and finite"),
            ({"score_scale": -1.0}, "`score_scale` must be above 0 and finite"),
            ({"peak_tflops": -5.0}, "`peak_tflops` must be above 0 and finite"),
            ({"width": 512, "heads": 1}, "`heads` must be so many that each is at most 256 wide .`width` 512., got 1"),
            ({"compile": 1}, "`compile` must be of type bool"),
            ({"width": 100, "heads": 3}, "`width` must be a multiple of the 3 heads"),
            ({"power": "ramp:3,15", "power_rounding": False, "compile": True}, "`power_rounding` must be on"),
            ({"power": "learned", "power_growth": 4.0}, "`power_growth` must be left out"),
            ({"power": "log:1.5", "power_growth": 4.0}, "the power 'log:1.5' grows by itself"),
            ({"attention": "softmax", "power": "log:1.5"}, "has no second stage"),
            ({"learning_rate": 0.0}, "`learning_rate` must be above 0"),
        ],
    )
    def test_what_cannot_be(self, changes: dict[str, Any], words: str) -> None:
        with pytest.raises(ValueError, match=words):
            TrainConfig(**PLACES, **changes)

    def test_the_power_of_a_preset_is_for_lssar(self) -> None:
        assert configured(PLACES, preset="small").power == "learned-log"
        assert configured({**PLACES, "power": "3"}, preset="small").power == "3"
        for words in ({"attention": "softmax"}, {"attention": "lssar-p3"}):
            config = configured({**PLACES, **words}, preset="small")
            assert config.power is None
            assert config.global_every == 3
        assert configured(PLACES, preset="gpt2-small").power is None
        with pytest.raises(ValueError, match="`power_growth` must be left out where the power is learned"):
            configured({**PLACES, "power_growth": 2.0}, preset="small")

    def test_layers_of_a_preset_can_be_left_out(self) -> None:
        mixed, plain = ({**PLACES, **words} for words in ({}, {"global_every": 0}))
        for settings, windows in ((mixed, [64, 64, None, 64]), (plain, [None] * 4)):
            config = configured(settings, preset="tiny")
            model = runs.model_config(config, 256, None)
            assert [model.attention_of_layer(layer).window(None) for layer in range(4)] == windows
            assert config.spans() == [window or 128 for window in windows]
        assert config.power is None
        assert not config.changes(configured({**plain, "window": 0}, preset="tiny").as_dict())

    @pytest.mark.parametrize(
        ("words", "message"),
        [
            ({"layers": 2}, r"`global_every` must be from 2 to the 2 layers .*or 0 for none.*got 3"),
            ({"window": 0}, "`window` must be a number of tokens where `global_every` is given"),
            ({"window": -1}, "`window` must be at least 1, or 0 for everything, got -1"),
            ({"global_every": 0, "local_attention": "softmax"}, "`local_attention` must be left out without"),
        ],
    )
    def test_layers_that_cannot_be(self, words: dict[str, Any], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            configured({**PLACES, **words}, preset="tiny")

    @pytest.mark.parametrize("preset", PRESETS)
    def test_presets_are_whole(self, preset: str) -> None:
        config = configured(PLACES, preset=preset)
        assert config.width // config.heads == (128 if preset == "small" else 64)

    def test_gpt2_small_is_the_papers_and_small_has_50_million(self) -> None:
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
    def test_options_win_over_the_file_and_the_file_over_the_preset(self, tmp_path: Path, suffix: str) -> None:
        file = tmp_path / f"run{suffix}"
        if suffix == ".json":
            file.write_text(json.dumps({"preset": "small", "learning-rate": 6e-4, "steps": 7, "power": 3, **PLACES}))
        else:
            file.write_text("preset: small\nlearning_rate: 6e-4\nsteps: 7\npower: 3\ndata: data\noutput: output\n")
        config = configured({"steps": 9}, file=file)
        assert (config.layers, config.learning_rate, config.steps, config.power) == (8, 6e-4, 9, "3")

    @pytest.mark.parametrize(
        ("text", "words"),
        [
            ("lerning_rate: 1", "did you mean 'learning_rate'"),
            ("steps: many", "`steps` must be of type int"),
            ("preset: [tiny]", r"there is no preset \['tiny'\]"),
            ("- 1", "must be a file of option: value"),
            ("a: [", "is not YAML"),
            ("preset: huge", "there is no preset 'huge'"),
        ],
    )
    def test_a_file_that_cannot_be(self, tmp_path: Path, text: str, words: str) -> None:
        file = tmp_path / "run.yaml"
        file.write_text(text)
        with pytest.raises(ValueError, match=words):
            configured(PLACES, file=file)


class TestCommand:
    def test_help_shows_every_setting(self, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit):
            main(["train", "--help"])
        text = capsys.readouterr().out
        for name in TrainConfig.__dataclass_fields__:
            assert f"--{name.replace('_', '-')}" in text or f"--no-{name.replace('_', '-')}" in text
        for words in ("torchrun", "gpt2-small", "3,7@0.1,15@0.3", "10% of the steps"):
            assert words in text

    @pytest.mark.parametrize(
        ("arguments", "words"),
        [
            (["--preset", "huge"], "there is no preset 'huge'; there are tiny, small, gpt2-small"),
            (["--data", "x"], "`--output` is missing"),
            (["--data", "x", "--output", "y", "--attention", "sofmax"], "did you mean 'softmax'"),
            (["--data", "x", "--output", "y", "--schedule", "step"], "`--schedule` must be one of"),
            (["--data", "x", "--output", "y", "--sequence-length", "1"], "`--sequence-length` must be at least 2"),
            (
                ["--data", "x", "--output", "y", "--global-every", "2", "--window", "0"],
                "`--window` must be a number of tokens where `--global-every` is given",
            ),
            (["--data", "x", "--output", "y"], "a folder written by `softplus-attention data prepare`"),
            (["--config", "nowhere.yaml"], "nowhere.yaml"),
            (["--data", "x", "--output", "y", "--clip", "nan"], "`--clip` must be at least 0, and finite, got nan"),
        ],
    )
    def test_errors_are_one_sentence(
        self, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str, tmp_path: Path, monkeypatch: Any
    ) -> None:
        monkeypatch.chdir(tmp_path)
        assert main(["train", *arguments]) == 2
        error = capsys.readouterr().err
        assert words in error
        assert error.count("\n") == 1
        assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["plain", "chunked"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_losses_agree_with_the_models_own(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loss and every gradient, with ignored labels, a count from outside, and chunks that do not divide the tokens."""
    monkeypatch.setattr("softplus_attention.training.losses.CHUNK", 17)
    torch.manual_seed(0)
    config = SoftplusGPTConfig(
        vocab_size=96, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, bos_token_id=0, eos_token_id=0
    )
    model = SoftplusGPTForCausalLM(config)
    ids = torch.randint(96, (3, 23))
    labels = ids.masked_fill(torch.rand(ids.shape) < 0.2, -100)
    results = []
    for loss in (None, linear_loss(name)):
        model.linear_loss = loss
        model.zero_grad()
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            out = model(input_ids=ids, labels=labels, use_cache=False, num_items_in_batch=torch.tensor(50))
            mean = model(input_ids=ids, labels=labels, use_cache=False).loss
        out.loss.backward()
        with torch.no_grad(), torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            unseen = model(input_ids=ids, labels=labels, use_cache=False).loss
        results.append((out.loss, mean, unseen, {n: p.grad.clone() for n, p in model.named_parameters()}))
    assert out.logits is None
    (*expected, gradients), (*found, others) = results
    # One rounding of the products apart.
    tolerance = {"rtol": 1e-5, "atol": 1e-7} if dtype == torch.float32 else {"rtol": 1e-2, "atol": 2**-9}
    torch.testing.assert_close(found, expected, **tolerance)
    for path, gradient in gradients.items():
        scale = float(gradient.abs().max())
        bound = (1e-5 if dtype == torch.float32 else 2e-2) * scale
        assert float((others[path] - gradient).abs().max()) <= bound, path


class TestMuon:
    def build(self) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        config = SoftplusGPTConfig(
            vocab_size=96, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, bos_token_id=0, eos_token_id=0
        )
        model = SoftplusGPTForCausalLM(config)
        words: dict[str, Any] = {"weight_decay": 0.1, "betas": (0.9, 0.95)}
        return model, optimizer_of("muon", model, learning_rate=1e-2, muon_learning_rate=2e-2, **words)

    def test_every_parameter_once_and_hidden_matrices_by_muon(self) -> None:
        model, optimizer = self.build()
        stepped = {p: group for group in optimizer.param_groups for p in group["params"]}
        assert sum(len(group["params"]) for group in optimizer.param_groups) == len(stepped)
        for name, parameter in model.named_parameters():
            by_muon = "layers" in name and parameter.dim() == 2
            assert stepped[parameter]["stepped_by"] == ("muon" if by_muon else "adamw"), name
            assert stepped[parameter]["weight_decay"] == (0.1 if parameter.dim() == 2 else 0.0), name

    @pytest.fixture
    def as_torch_iterates(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(optimizers, "iteration_dtype", lambda device: torch.bfloat16)

    @pytest.mark.usefixtures("as_torch_iterates")
    def test_steps_as_torchs_two_do_and_continues_from_its_state(self) -> None:
        ids = torch.randint(96, (4, 16), generator=torch.Generator().manual_seed(1))

        def steps(model: Any, optimizers: list[torch.optim.Optimizer], count: int) -> None:
            for _ in range(count):
                model(input_ids=ids, labels=ids).loss.backward()
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()

        model, optimizer = self.build()
        steps(model, [optimizer], 2)
        halfway, state = {n: p.clone() for n, p in model.state_dict().items()}, optimizer.state_dict()
        state = json.loads(json.dumps(state["param_groups"])), {k: dict(v) for k, v in state["state"].items()}
        state = {
            "param_groups": state[0],
            "state": {k: {n: t.clone() for n, t in v.items()} for k, v in state[1].items()},
        }
        steps(model, [optimizer], 2)

        twin, fresh = self.build()
        twin.load_state_dict(halfway)
        fresh.load_state_dict(state)
        steps(twin, [fresh], 2)
        separate, own = self.build()
        groups = [[g for g in own.param_groups if g["stepped_by"] == name] for name in ("muon", "adamw")]
        hidden = list(groups[0][0]["params"])
        rest = [{"params": g["params"], "weight_decay": g["weight_decay"]} for g in groups[1]]
        two = [
            torch.optim.Muon(hidden, lr=2e-2, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(rest, lr=1e-2, betas=(0.9, 0.95)),
        ]
        steps(separate, two, 4)
        for (name, a), b, c in zip(model.named_parameters(), twin.parameters(), separate.parameters(), strict=True):
            assert torch.equal(a, b), name
            assert torch.equal(a, c), name

    @pytest.mark.parametrize("shape", [(48, 48), (32, 96), (96, 32)])
    def test_on_a_cpu_it_iterates_in_float32(self, shape: tuple[int, int]) -> None:
        """torch's update to the digits of bfloat16, and exact ones of it: a GPU's would be rounded to them."""
        gradient = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        ours, theirs = (torch.nn.Parameter(torch.zeros(shape)) for _ in range(2))
        ours.grad, theirs.grad = gradient.clone(), gradient.clone()
        words: dict[str, Any] = {"lr": 1.0, "weight_decay": 0.0}
        StackedMuon([{"params": [ours], **words}]).step()
        torch.optim.Muon([theirs], adjust_lr_fn="match_rms_adamw", **words).step()
        ours, theirs = ours.data, theirs.data
        assert float((ours - theirs).norm() / theirs.norm()) < 2e-2
        scale = -0.2 * math.sqrt(max(shape))
        left, _, right = torch.linalg.svd(gradient, full_matrices=False)
        sizes = left.T @ (ours / scale) @ right.T  # the update has the gradient's own directions
        assert float((sizes - sizes.diag().diag()).abs().max()) < 1e-4
        assert float(sizes.diag().min()) > 0.5
        assert float(sizes.diag().max()) < 1.3

    @pytest.mark.usefixtures("as_torch_iterates")
    @pytest.mark.parametrize(
        ("most_stacked", "expected"), [(2**26, [4, 3, 3, 3, 1, 1, 1]), (2500, [2, 2, 1, 1, 1, 3, 1, 1, 1, 1, 1, 1])]
    )
    def test_stacks_give_torchs_bits_and_take_its_state(
        self, monkeypatch: pytest.MonkeyPatch, most_stacked: int, expected: list[int]
    ) -> None:
        """On a CPU products of stacks and of single matrices round alike, so that nothing needs a tolerance."""
        monkeypatch.setattr(optimizers, "MOST_STACKED", most_stacked)
        chance = torch.Generator().manual_seed(0)
        shapes = [(32, 32)] * 4 + [(96, 32), (7, 5), (32, 96)] * 3 + [(1, 9), (9, 1), (64, 48)]
        first = [torch.randn(shape, generator=chance) for shape in shapes]
        ours, theirs = ([torch.nn.Parameter(x.clone()) for x in first] for _ in range(2))
        assert [len(stack) for stack in stacks(ours)] == expected
        words: dict[str, Any] = {"lr": 2e-2, "weight_decay": 0.1}
        stacked = StackedMuon([{"params": ours, **words}])
        torchs = torch.optim.Muon(theirs, adjust_lr_fn="match_rms_adamw", **words)
        for step in range(5):
            for number, (a, b) in enumerate(zip(ours, theirs, strict=True)):
                a.grad = torch.randn(a.shape, generator=chance)
                if number == step:
                    a.grad = None  # as of a part of the model that was not used
                b.grad = None if a.grad is None else a.grad.clone()
            if step == 3:
                stacked.load_state_dict(copy.deepcopy(torchs.state_dict()))
            stacked.step()
            torchs.step()
            for a, b in zip(ours, theirs, strict=True):
                assert torch.equal(a, b), (step, a.shape)
        assert stacked.state_dict()["param_groups"] == torchs.state_dict()["param_groups"]
        for a, b in zip(ours, theirs, strict=True):
            assert stacked.state[a].keys() == torchs.state[b].keys()
            assert torch.equal(stacked.state[a]["momentum_buffer"], torchs.state[b]["momentum_buffer"])

    @pytest.mark.filterwarnings("error")
    def test_a_checkpoint_of_one_process_is_no_news(self, tmp_path: Path) -> None:
        model, optimizer = self.build()
        save_state(tmp_path, model, optimizer)
        twin, fresh = self.build()
        with torch.no_grad():
            for parameter in twin.parameters():
                parameter.zero_()
        load_state(tmp_path, twin, fresh)
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))

    def test_a_learning_rate_set_from_outside_is_the_one_used(self) -> None:
        model, optimizer = self.build()
        optimizer.load_state_dict(optimizer.state_dict())
        for group in optimizer.param_groups:
            group["lr"] = 0.0
        before = [p.clone() for p in model.parameters()]
        ids = torch.randint(96, (2, 8))
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


# What `compile_model` raises; `monkeypatch` would remove the names afterwards.
@torch._dynamo.config.patch(recompile_limit=8, accumulated_recompile_limit=256, fail_on_recompile_limit_hit=False)
def test_equal_layers_share_compiled_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is compiled depends on the powers, not on the number of layers, and the loss is not compiled anew."""
    # Dynamo alone, which is what shares the code: the test takes seconds.
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    config = TrainConfig(**PLACES, layers=6, power="3,7@0.3,15@0.6", steps=9)
    ids = torch.randint(96, (4, 16), generator=torch.Generator().manual_seed(1))
    counts = []
    for layers in (2, 6):
        torch.compiler.reset()
        counters.clear()
        model = SoftplusGPTForCausalLM(
            SoftplusGPTConfig(
                vocab_size=96, hidden_size=32, num_hidden_layers=layers, num_attention_heads=2, use_cache=False,
                bos_token_id=0, eos_token_id=0,
            )
        )  # fmt: skip
        model.linear_loss = linear_loss("chunked")
        runs.compile_model(model, config)
        for power in (3, 7, 15):
            set_power(model, power)
            for _ in range(2):
                model(input_ids=ids, labels=ids).loss.backward()
            with torch.no_grad():
                model(input_ids=ids, labels=ids)
        counts.append(counters["stats"]["unique_graphs"])
    torch.compiler.reset()
    # With and without gradients: the loss, a layer in at most four pieces, and one of these for each further power.
    assert counts[0] == counts[1] <= 2 * (1 + 4 + 2)


class Numbers:
    """Sequences that name themselves: 7 of them, in another order each epoch."""

    epoch = 0

    def __len__(self) -> int:
        return 7

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        value = torch.full((3,), 100 * self.epoch + (number + 3 * self.epoch) % 7)
        return {"input_ids": value, "labels": value}


def test_endless_data_is_every_epoch_in_its_order_from_any_place() -> None:
    whole = [int(RepeatedDataset(Numbers(), 20)[n]["input_ids"][0]) for n in range(20)]
    assert sorted(whole[:7]) == list(range(7))
    assert sorted(whole[7:14]) == [100 + n for n in range(7)]
    later = RepeatedDataset(Numbers(), 20)
    assert [int(later[n]["input_ids"][0]) for n in range(11, 20)] == whole[11:]
    assert collate([later[12]])["labels"].tolist() == [[-100, whole[12], whole[12]]]


def test_flops_of_gpt2_small() -> None:
    assert flops_per_token(124_000_000, 768, [1024] * 12) == 6 * 124_000_000 + 12 * 12 * 768 * 1024


class TestRun:
    def test_logs_power_speed_and_leaves_a_model_for_auto_classes(self, run: Run, data: Path) -> None:
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

    def test_a_power_by_length_and_global_layers_are_the_saved_models(self, run: Run) -> None:
        run.finish(power="log:2", global_every=2, window=6, local_attention="softmax", steps=4)
        model = AutoModelForCausalLM.from_pretrained(run.output / "model")
        local, everywhere = (layer.self_attn.attention.spec for layer in model.model.layers)
        assert (local.positive, local.window, local.positions) == ("exp", 6, "rope")
        assert (everywhere.window, everywhere.positions) == (None, "none")
        assert everywhere.sharpening == PowerByLength(1, 2, math.exp(0.5))

    def test_the_loss_is_the_models(self, run: Run, data: Path) -> None:
        """The first step's, at the weights of the seed, beside a model built and sequences read by hand."""
        run.finish(steps=1, power="3")
        config = TrainConfig(**{**run.settings, "data": str(data), "output": str(run.output), "steps": 1, "power": "3"})
        folder = runs.Folder(data)
        torch.manual_seed(0)
        model = SoftplusGPTForCausalLM(runs.model_config(config, folder.index.vocabulary_size, 256))
        sequences = folder.sequences("train", 24, seed=0, document_mask=False)
        ids = torch.stack([sequences[n]["input_ids"] for n in range(8)])
        assert run.losses()[1] == pytest.approx(model(input_ids=ids, labels=ids).loss.item(), rel=1e-6)

    def test_a_tokenizer_that_is_gone_is_missed_at_the_start(self, run: Run, data: Path, tmp_path: Path) -> None:
        shutil.copytree(data, tmp_path / "without")
        (tmp_path / "without" / "tokenizer.json").unlink()
        run.start(data=tmp_path / "without")
        assert run.wait() == 2
        assert "tokenizer.json is missing: restore it from a copy" in run.words()
        assert not run.output.exists()

    def test_float16_is_for_gpus(self, run: Run) -> None:
        run.start(precision="fp16", device="cpu")
        assert run.wait() == 2
        assert "`--precision` must be bf16 or fp32 on a CPU, got 'fp16'" in run.words()

    @pytest.mark.slow
    def test_compiled_through_a_ramp_of_many_powers(self, run: Run) -> None:
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


ALONE = """
import sys
for name in ("datasets", "pyarrow", "pandas", "zstandard", "matplotlib", "scipy", "sklearn", "entmax", "pyoperon"):
    sys.modules[name] = None
from softplus_attention.cli import main
sys.exit(main(["train", *sys.argv[1:]]))
"""


@pytest.mark.slow
def test_train_needs_torch_transformers_accelerate_tokenizers_and_numpy_alone(run: Run) -> None:
    result = subprocess.run([sys.executable, "-c", ALONE, *run.arguments([], steps=2)], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert (run.output / "model" / "tokenizer.json").exists()


@pytest.mark.slow
def test_the_benchmark_runs_and_records_what_it_ran_on(tmp_path: Path) -> None:
    output = tmp_path / "deep" / "training.json"
    script = Path(__file__).parents[2] / "benchmarks" / "training.py"
    words = [sys.executable, str(script), "--quick", "--output", str(output), "--commit", "abc"]
    table = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    data = json.loads(output.read_text())
    assert data["commit"] == "abc"
    assert [row["attention"] for row in data["rows"]] == ["softmax", "lssar"]
    for row in data["rows"]:
        assert row["tokens_per_second"] == pytest.approx(row["tokens_per_step"] / row["step_ms"] * 1e3)
        assert f"{row['tokens_per_second']:,.0f}" in table
