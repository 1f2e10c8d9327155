"""Tuning on a tiny model: which weights change, that the loss falls, and resuming a stopped run."""

from __future__ import annotations

import copy
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from extend_cases import tiny_model

from softplus_attention.extend import tuning
from softplus_attention.extend.tuning import Tuner, TuneSettings, describe_tuning
from softplus_attention.huggingface.extension.modeling import extended
from softplus_attention.huggingface.extension.settings import Extension

SETTINGS = TuneSettings(minutes=1, short=64, long=128, trained=64, rate=3e-3)


@pytest.fixture
def original() -> Any:
    return tiny_model(vocab_size=50, max_position_embeddings=64).float()


def documents(seed: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(50, (200,), generator=generator).tolist() for _ in range(2)]


def extension(far: str = "group") -> Extension:
    return Extension(trained=64, length=256, far_heads=[[1], []], window=16, near=16, far=far)


@pytest.mark.parametrize(("far", "parts"), [("group", "far"), ("lssar", "far"), ("group", "all")])
def test_changes_only_tuned_weights(far: str, parts: str, original: Any) -> None:
    before = copy.deepcopy(original.state_dict())
    model = extended(original, extension(far))
    untuned = copy.deepcopy(model.state_dict())
    tuner = Tuner(model, original, TuneSettings(1, 64, 128, 64, parts, 3e-3))
    for kind in tuning.KINDS:
        tuner.step(kind, documents(0))
    assert all(torch.equal(x, before[name]) for name, x in original.state_dict().items())
    moved = {name for name, x in model.state_dict().items() if not torch.equal(x, untuned[name])}
    attention = "model.layers.0.self_attn"
    wanted = {f"{attention}.q_proj.weight", f"{attention}.k_proj.weight"}
    if far == "lssar":
        wanted.add(f"{attention}.far_power")
    assert moved == (wanted if parts == "far" else {*untuned})
    if parts == "far":
        weight, old = model.state_dict()[f"{attention}.k_proj.weight"], untuned[f"{attention}.k_proj.weight"]
        assert torch.equal(weight[:8], old[:8])  # the windowed head
        assert not (weight[8:] == old[8:]).any()


def test_distils_the_original(original: Any) -> None:
    """LSSAR in all heads, not fitted, starts far from the original."""
    model = extended(original, replace(extension("lssar"), far_heads=[[0, 1], [0, 1]]))
    tuner = Tuner(model, original, replace(SETTINGS, parts="all"))
    before = tuner.held_out_losses(documents(1))["short"]
    for _ in range(30):
        tuner.step("short", documents(0))
    assert tuner.held_out_losses(documents(1))["short"] < 0.75 * before


def test_resumes_after_an_interrupt(original: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def make_tuner(stop_at: int | None) -> Tuner:
        # The rate falls with the time spent; these seconds are negligible in a thousand minutes.
        tuner = Tuner(extended(original, extension()), original, replace(SETTINGS, minutes=1000))
        step = tuner.step

        def limited(kind: str, texts: Any) -> None:
            if stop_at is not None and sum(tuner.steps.values()) == stop_at:
                raise KeyboardInterrupt
            step(kind, texts)

        monkeypatch.setattr(tuner, "step", limited)
        left = iter(["short", "long"] * 3)
        monkeypatch.setattr(tuner, "next_kind", lambda: next(left, None) if sum(tuner.steps.values()) < 6 else None)
        return tuner

    path = tmp_path / "tuning.pt"
    with pytest.raises(KeyboardInterrupt):
        make_tuner(2).run(documents(0), documents(1), path)
    ends = [make_tuner(None), make_tuner(None)]
    found = [
        tuner.run(documents(0), documents(1), place)
        for tuner, place in zip(ends, (path, tmp_path / "none"), strict=True)
    ]
    assert found[0]["steps"] == found[1]["steps"] == {"short": 3, "long": 3}
    assert found[0]["before"] == found[1]["before"]
    for one, other in zip(ends[0].masters, ends[1].masters, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    assert "3 short and 3 long steps" in describe_tuning(found[0])


@pytest.mark.parametrize("case", ["cut", "link", "shapes", "fifo"])
def test_hostile_saved_state(original: Any, case: str, tmp_path: Path) -> None:
    """An unreadable state is a one-line error, and a link is replaced, not followed."""
    path = tmp_path / "tuning.pt"
    tuner = Tuner(extended(original, extension()), original, SETTINGS)
    (tmp_path / "mine").write_text("mine")
    if case == "link":
        path.symlink_to(tmp_path / "mine")
    tuner.save(path, {"short": 1.0, "long": 1.0})
    assert (tmp_path / "mine").read_text() == "mine"
    assert tuner.load(path) == {"short": 1.0, "long": 1.0}
    if case == "cut":
        path.write_bytes(path.read_bytes()[:-100])
    elif case == "shapes":
        tuner.masters = [x[:1] for x in tuner.masters]
        tuner.save(path, {"short": 1.0, "long": 1.0})
    elif case == "fifo":
        path.unlink()
        os.mkfifo(path)
    else:
        return
    with pytest.raises(ValueError, match=r"tuning\.pt is not a saved tuning state .*: delete it"):
        Tuner(extended(original, extension()), original, SETTINGS).load(path)


def test_keeps_untuned_weights_if_not_better(original: Any, tmp_path: Path) -> None:
    model = extended(original, extension())
    untuned = copy.deepcopy(model.state_dict())
    tuner = Tuner(model, original, TuneSettings(0.02, 64, 128, 64, "all", rate=10.0))
    found = tuner.run(documents(0), documents(1), tmp_path / "tuning.pt")
    assert not found["kept"]
    assert sum(found["steps"].values()) > 0
    assert all(torch.equal(x, untuned[name]) for name, x in model.state_dict().items())
    assert describe_tuning(found).endswith("the untuned weights are kept")


def test_steps_fit_into_the_time(original: Any) -> None:
    tuner = Tuner(extended(original, extension()), original, SETTINGS)
    assert tuner.next_kind() == "short"
    tuner.steps["short"], tuner.spent["short"] = 1, 25.0
    assert tuner.next_kind() == "short"  # a long step would take 50 of the 35 seconds left
    tuner.spent["short"] = 5.0
    assert tuner.next_kind() == "long"
    tuner.steps["long"], tuner.spent["long"] = 1, 50.0
    assert tuner.next_kind() == "short"
    tuner.spent["long"] = 54.0
    assert tuner.next_kind() is None
