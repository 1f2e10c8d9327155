"""Losses, Muon and compiled layers, compared with torch's own."""

from __future__ import annotations

import copy
import functools
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
from torch._dynamo.utils import counters

import softplus_attention.huggingface  # noqa: F401  registers the model with the Auto classes
from softplus_attention.huggingface import SoftplusGPTConfig, SoftplusGPTForCausalLM, set_power
from softplus_attention.training import TrainConfig, optimizers
from softplus_attention.training import run as runs
from softplus_attention.training.checkpoints import load_state, save_state
from softplus_attention.training.losses import linear_loss
from softplus_attention.training.optimizers import StackedMuon, build_optimizer, stacks

PLACES: dict[str, Any] = {"data": "data", "output": "output"}


@pytest.mark.parametrize("name", ["plain", "chunked"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_losses_match_the_model(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loss and gradients, with ignored labels, an external token count, and chunks that do not divide the tokens."""
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
    # They differ by one rounding of the products.
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
        options: dict[str, Any] = {"weight_decay": 0.1, "betas": (0.9, 0.95)}
        return model, build_optimizer("muon", model, learning_rate=1e-2, muon_learning_rate=2e-2, **options)

    def test_muon_updates_hidden_matrices_only(self) -> None:
        model, optimizer = self.build()
        stepped = {p: group for group in optimizer.param_groups for p in group["params"]}
        assert sum(len(group["params"]) for group in optimizer.param_groups) == len(stepped)
        for name, parameter in model.named_parameters():
            by_muon = "layers" in name and parameter.dim() == 2
            assert stepped[parameter]["stepped_by"] == ("muon" if by_muon else "adamw"), name
            assert stepped[parameter]["weight_decay"] == (0.1 if parameter.dim() == 2 else 0.0), name

    @pytest.fixture
    def bfloat16_iteration(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(optimizers, "iteration_dtype", lambda device: torch.bfloat16)

    @pytest.mark.usefixtures("bfloat16_iteration")
    def test_matches_torchs_two_optimizers(self) -> None:
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
    def test_float32_iteration_on_cpus(self, shape: tuple[int, int]) -> None:
        """Equal to torch's update within bfloat16 precision, and orthogonal to float32 precision."""
        gradient = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        ours, theirs = (torch.nn.Parameter(torch.zeros(shape)) for _ in range(2))
        ours.grad, theirs.grad = gradient.clone(), gradient.clone()
        options: dict[str, Any] = {"lr": 1.0, "weight_decay": 0.0}
        StackedMuon([{"params": [ours], **options}]).step()
        torch.optim.Muon([theirs], adjust_lr_fn="match_rms_adamw", **options).step()
        ours, theirs = ours.data, theirs.data
        assert float((ours - theirs).norm() / theirs.norm()) < 2e-2
        scale = -0.2 * math.sqrt(max(shape))
        left, _, right = torch.linalg.svd(gradient, full_matrices=False)
        sizes = left.T @ (ours / scale) @ right.T  # the update has the singular vectors of the gradient
        assert float((sizes - sizes.diag().diag()).abs().max()) < 1e-4
        assert float(sizes.diag().min()) > 0.5
        assert float(sizes.diag().max()) < 1.3

    @pytest.mark.usefixtures("bfloat16_iteration")
    @pytest.mark.parametrize(
        ("most_stacked", "expected"), [(2**26, [4, 3, 3, 3, 1, 1, 1]), (2500, [2, 2, 1, 1, 1, 3, 1, 1, 1, 1, 1, 1])]
    )
    def test_stacked_muon_is_bit_equal(
        self, monkeypatch: pytest.MonkeyPatch, most_stacked: int, expected: list[int]
    ) -> None:
        """No tolerance: on a CPU batched and single matrix products round alike."""
        monkeypatch.setattr(optimizers, "MAX_STACKED", most_stacked)
        chance = torch.Generator().manual_seed(0)
        shapes = [(32, 32)] * 4 + [(96, 32), (7, 5), (32, 96)] * 3 + [(1, 9), (9, 1), (64, 48)]
        first = [torch.randn(shape, generator=chance) for shape in shapes]
        ours, theirs = ([torch.nn.Parameter(x.clone()) for x in first] for _ in range(2))
        assert [len(stack) for stack in stacks(ours)] == expected
        options: dict[str, Any] = {"lr": 2e-2, "weight_decay": 0.1}
        stacked = StackedMuon([{"params": ours, **options}])
        torchs = torch.optim.Muon(theirs, adjust_lr_fn="match_rms_adamw", **options)
        for step in range(5):
            for number, (a, b) in enumerate(zip(ours, theirs, strict=True)):
                a.grad = torch.randn(a.shape, generator=chance)
                if number == step:
                    a.grad = None  # an unused parameter
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
    def test_single_process_checkpoint_no_warning(self, tmp_path: Path) -> None:
        model, optimizer = self.build()
        save_state(tmp_path, model, optimizer)
        twin, fresh = self.build()
        with torch.no_grad():
            for parameter in twin.parameters():
                parameter.zero_()
        load_state(tmp_path, twin, fresh)
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))

    def test_group_learning_rates_are_used(self) -> None:
        model, optimizer = self.build()
        optimizer.load_state_dict(optimizer.state_dict())
        for group in optimizer.param_groups:
            group["lr"] = 0.0
        before = [p.clone() for p in model.parameters()]
        ids = torch.randint(96, (2, 8))
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


# Restores the limits that `compile_model` raises; `monkeypatch` would delete the names.
@torch._dynamo.config.patch(recompile_limit=8, accumulated_recompile_limit=256, fail_on_recompile_limit_hit=False)
def test_equal_layers_share_compiled_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of graphs depends on the powers, not on the layers, and the loss is compiled only once."""
    # Code is shared in dynamo, so the eager backend is enough and takes seconds only.
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
    # With and without gradients: the loss, a layer in at most four graphs, and one more graph for each further power.
    assert counts[0] == counts[1] <= 2 * (1 + 4 + 2)
