"""Sequences, and the models that read them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from softplus_attention.physics.configuration_orbit_gpt import OrbitGPTConfig
from softplus_attention.physics.distributions import distribution
from softplus_attention.physics.measure import roll_out
from softplus_attention.physics.modeling_orbit_gpt import (
    OrbitGPTForForce,
    OrbitGPTForTrajectories,
    check_checkpoint,
)
from softplus_attention.physics.orbits import OrbitalSystems, simulate
from softplus_attention.physics.presets import preset
from softplus_attention.physics.sequences import (
    PLANET,
    STAR,
    TIME_STEP,
    Batch,
    SequenceForm,
    detokenise,
    force_targets,
    labelled_batch,
    mixed_batch,
    roles,
    sequences,
    tokenise,
)
from softplus_attention.physics.training import partial_choice, to_tensors

TIMES = distribution("identifiable").time_steps


def draw(name: str = "identifiable", count: int = 3, planets: int = 1) -> OrbitalSystems:
    return distribution(name).sample(count, np.random.default_rng(1), planets)


def make_batch(systems: OrbitalSystems, form: SequenceForm) -> Batch:
    return sequences(systems, form, np.random.default_rng(0), TIMES)[0]


def small(**changes: object) -> OrbitGPTConfig:
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "displacement": 0.2}
    return OrbitGPTConfig(**(sizes | changes))  # type: ignore[arg-type]


def test_roles_follow_the_layout() -> None:
    assert roles(8, 1).tolist() == [TIME_STEP, PLANET, STAR, PLANET, STAR, PLANET, STAR, PLANET]
    assert roles(8, 3).tolist() == [TIME_STEP, PLANET, PLANET, PLANET, STAR, PLANET, PLANET, PLANET]


def test_tokens_invert_within_half_a_bin() -> None:
    places = np.linspace(-49.9, 49.9, 1001)
    tokens = tokenise(places, 7000, 50.0)
    assert tokens.min() >= 0
    assert tokens.max() < 7000
    assert np.abs(detokenise(tokens, 7000, 50.0) - places).max() <= 50 / 7000 + 1e-12
    assert tokenise(np.array([-99.0, 99.0]), 7000, 50.0).tolist() == [0, 6999]


@pytest.mark.parametrize("planets", [1, 4])
def test_tokens_are_time_step_then_bodies(planets: int) -> None:
    systems = draw("published-code", planets=planets)
    form = SequenceForm("tokens", positions=30, extent=50.0, bins=7000)
    times = distribution("published-code").time_steps
    batch, places = sequences(systems, form, np.random.default_rng(0), times)
    which = [times.index(step) for step in systems.time_step]
    assert batch["coordinates"][:, 0, 0].tolist() == [7000 + i for i in which]
    flat = tokenise(places.reshape(3, -1, 2)[:, :29], 7000, 50.0)
    np.testing.assert_array_equal(batch["coordinates"][:, 1:], flat)
    np.testing.assert_array_equal(batch["targets"][:, :-1], flat)
    assert (batch["targets"][:, -1] == -100).all()


def test_noise_is_on_inputs_only() -> None:
    clean = make_batch(draw(), SequenceForm(positions=21))
    noisy = make_batch(draw(), SequenceForm(positions=21, context_noise=0.1))
    np.testing.assert_array_equal(clean["targets"], noisy["targets"])
    noise = (noisy["coordinates"] - clean["coordinates"])[:, 1:]
    assert 0.05 < noise.std() < 0.2
    np.testing.assert_array_equal(clean["coordinates"][:, 0], noisy["coordinates"][:, 0])


def test_mixed_batches_have_all_planet_counts() -> None:
    form = SequenceForm("tokens", positions=40, extent=50.0, bins=128)
    batch = mixed_batch(distribution("published-code"), form, 64, 10, np.random.default_rng(0))
    assert set(batch["bodies"].tolist()) == set(range(2, 12))
    assert all(len(values) == 64 for values in batch.values())


@pytest.mark.parametrize("target", ["ln_force", "force", "vector"])
def test_labels_are_at_planet_positions(target: str) -> None:
    systems = draw()
    batch = labelled_batch(systems, SequenceForm(positions=9), target, np.random.default_rng(0), TIMES)
    labelled = ~np.isnan(batch["forces"]).any(-1)
    assert labelled.tolist() == [[False, True] * 4 + [False]] * 3
    expected = force_targets(systems, simulate(systems, 4).positions, target)
    np.testing.assert_allclose(batch["forces"][:, 1::2], expected, rtol=1e-6)


def test_partly_labelled_systems() -> None:
    chosen = partial_choice(preset("faithful"), 0, 20, 30)
    assert (chosen.sum(1) == 2).all()
    form, rng = SequenceForm(positions=21), np.random.default_rng(0)
    batch = labelled_batch(draw(), form, "force", rng, TIMES, lambda systems, steps: chosen[:systems, :steps])
    assert np.isfinite(batch["forces"]).sum() == chosen[:3, :10].sum()


def test_bad_labels() -> None:
    form, rng = SequenceForm(positions=9), np.random.default_rng(0)
    with pytest.raises(ValueError, match="`labels` must be at least one labelled system"):
        labelled_batch(draw()[:0], form, "force", rng, TIMES)
    with pytest.raises(ValueError, match="`labels` must be at least one label"):
        labelled_batch(draw(), form, "force", rng, TIMES, lambda s, k: np.zeros((s, k), dtype=bool))
    with pytest.raises(ValueError, match="`target` must be one of"):
        labelled_batch(draw(), form, "energy", rng, TIMES)
    with pytest.raises(ValueError, match="one planet"):
        labelled_batch(draw(planets=2), form, "force", rng, TIMES)
    with pytest.raises(ValueError, match="`labels` must be at least 1"):
        preset("cpu", labels=(0,))
    with pytest.raises(ValueError, match="`labels` must be at least one"):
        preset("cpu", labels=())


@pytest.mark.parametrize("attention", ["softmax", "lssar", "softmax-qknorm-logn"])
@pytest.mark.parametrize("differences", [False, True])
def test_models_are_causal(attention: str, differences: bool) -> None:
    torch.manual_seed(0)
    model = OrbitGPTForTrajectories(small(attention=attention, differences=differences, octaves=2)).eval()
    batch = to_tensors(make_batch(draw(), SequenceForm(positions=21)))
    moved = {**batch, "coordinates": batch["coordinates"].clone()}
    moved["coordinates"][:, 12:] += 1
    with torch.no_grad():
        before, after = model(**batch).predictions, model(**moved).predictions
    torch.testing.assert_close(before[:, :12], after[:, :12])
    assert (before[:, 12:] - after[:, 12:]).abs().min() > 0


@pytest.mark.parametrize("changes", [{}, {"differences": True}, {"form": "tokens", "bins": 64, "extent": 6.0}])
def test_roll_out_with_cache_matches_without(changes: dict[str, object]) -> None:
    torch.manual_seed(0)
    config = small(attention="lssar", initializer_range=0.2, **changes)
    model = OrbitGPTForTrajectories(config).eval()
    model_settings = {"form": config.form, "bins": config.bins, "differences": config.differences}
    experiment = preset("smoke", positions=13, first_step=4, **model_settings)
    systems = draw(count=2)
    predicted = roll_out(model, experiment, systems, 9, 0)
    np.testing.assert_allclose(predicted[:, :6], simulate(systems, 6).positions, atol=1e-6)
    # The same without a cache.
    batch = to_tensors(make_batch(systems, experiment.clean_form))
    coordinates = batch["coordinates"]
    for body in range(6):
        kinds = torch.from_numpy(roles(coordinates.shape[1], 1)).expand(2, -1)
        with torch.no_grad():
            last = model(coordinates, kinds, batch["bodies"]).predictions[:, -1:]
        if config.form == "tokens":
            last = last.argmax(-1)
            place = detokenise(last.numpy(), 64, 6.0)
        else:
            place = last.numpy()
        np.testing.assert_allclose(predicted.reshape(2, -1, 2)[:, 12 + body], place[:, 0], atol=1e-4)
        coordinates = torch.cat([coordinates, last], 1)


def test_published_model_size() -> None:
    config = preset("paper").config("softmax", 1.0)
    with torch.device("meta"):
        model = OrbitGPTForTrajectories(config)
    count = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert abs(count / 1e6 - 108.5) < 0.3


def test_wrong_form_or_checkpoint(tmp_path: Path) -> None:
    model = OrbitGPTForTrajectories(small(form="tokens", bins=64))
    model.save_pretrained(tmp_path / "tokens")
    with pytest.raises(ValueError, match="`checkpoint` must be of form 'continuous', like the sequences, got 'tokens'"):
        check_checkpoint(tmp_path / "tokens", "continuous")
    assert check_checkpoint(tmp_path / "tokens", "tokens").bins == 64
    with pytest.raises(ValueError, match=r"`checkpoint` must be a folder with a config\.json"):
        check_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(ValueError, match="`checkpoint` must be an OrbitGPT"):
        check_checkpoint(tmp_path)
    with pytest.raises(TypeError, match="`coordinates` must be token ids"):
        model(torch.zeros(1, 4, 2), torch.zeros(1, 4, dtype=torch.long))
    with pytest.raises(TypeError, match="`coordinates` must be floats"):
        OrbitGPTForTrajectories(small())(torch.zeros(1, 4, 2, dtype=torch.long), torch.zeros(1, 4, dtype=torch.long))
    with pytest.raises(ValueError, match="at most 8 positions"):
        OrbitGPTForTrajectories(small(learned_positions=8))(
            torch.zeros(1, 9, 2), torch.zeros(1, 9, dtype=torch.long), torch.tensor([2])
        )
    with pytest.raises(ValueError, match="`target` must be one of"):
        OrbitGPTForForce(small())


def test_force_model_starts_from_orbit_model(tmp_path: Path) -> None:
    model = OrbitGPTForTrajectories(small(attention="lssar-p3"))
    model.save_pretrained(tmp_path)
    tuned = OrbitGPTForForce.from_pretrained(tmp_path, target="vector", target_scale=3.0)
    for name, values in model.orbit.state_dict().items():
        torch.testing.assert_close(tuned.orbit.state_dict()[name], values)
    tuned.save_pretrained(tmp_path / "force")
    again = OrbitGPTForForce.from_pretrained(tmp_path / "force")
    assert (again.config.target, again.config.target_scale, again.config.attention) == ("vector", 3.0, "lssar-p3")
