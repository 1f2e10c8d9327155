"""``softplus-attention newton`` from orbits to laws: the smoke preset, and the cpu preset as a slow test."""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from shared_folders import make_once

from softplus_attention.cli import main
from softplus_attention.cli.newton import NUMBERS, add_command, option_name
from softplus_attention.physics.distributions import DISTRIBUTIONS
from softplus_attention.physics.laws.front import NEWTON
from softplus_attention.physics.measure import predicted_forces, quality
from softplus_attention.physics.modeling_orbit_gpt import OrbitGPTForForce
from softplus_attention.physics.presets import PRESETS, preset
from softplus_attention.physics.stages import read_arrays
from softplus_attention.physics.summary import format_summary
from softplus_attention.training import RunStopped
from softplus_attention.training.run_folder import RunFolder


def newton(folder: Path, options: str = "", preset: str = "smoke") -> int:
    """The command's exit status."""
    return main(["newton", "--preset", preset, "--device", "cpu", "--output", str(folder), *options.split()])


@pytest.fixture(scope="module")
def short_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    def make(folder: Path) -> None:
        assert newton(folder) == 0

    return make_once(tmp_path_factory, "newton", make)


def results(folder: Path, name: str = "results.json") -> dict:
    return json.loads((folder / name).read_text())


def test_smoke_preset_from_orbits_to_laws(short_run: Path) -> None:
    found = results(short_run)
    tuned, fresh = found["table"]
    assert (tuned["pretrained"], fresh["pretrained"]) == (True, False)
    assert min(tuned["r2_ln_force"]["mean"], fresh["r2_ln_force"]["mean"]) > 0.8
    assert -2.3 < tuned["exponents"]["r"]["mean"] < -1.6
    truth = found["controls"]["seed0"]["laws"]["ln_force"][0]["operon"]
    assert truth["chosen"]["within"]["law"] == NEWTON
    noisy = found["cells"][0]["control_with_noise"]
    assert noisy["noise"] == pytest.approx(found["cells"][0]["quality"]["inside"]["ln_force_noise"])
    assert noisy["exponents"]["exponents"] == pytest.approx({"m1": 1, "m2": 1, "r": -2}, abs=0.1)


def test_lengths_probes_and_distributions(short_run: Path) -> None:
    found = results(short_run)
    long = found["long"][0]
    assert [row["multiple"] for row in long["next_place"]] == [1, 2, 4]
    assert [row["multiple"] for row in long["roll_out"]] == [2, 4]
    assert set(long["force"]) == {"tuned-256", "untrained-256"}
    probes = found["probes"][0]["r2"]
    assert {len(values) for values in probes.values()} == {3}
    # The embedding of one position cannot know the ellipse; layers after attention can.
    assert max(probes["ln semi-major axis"][1:]) > probes["ln semi-major axis"][0]
    assert set(found["cells"][0]["quality"]) == {"inside", "heavier", "wider"}


def test_figures_are_drawn(short_run: Path) -> None:
    names = {"orbits", "force_arrows", "said_against_true", "pareto_fronts", "length", "probes"}
    assert {Path(name).stem for name in results(short_run)["figures"]} == names
    for name in names:
        assert (short_run / "figures" / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_finished_stages_are_skipped(short_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = short_run / "arms" / "lssar" / "seed0" / "pretrained" / "model.safetensors"
    before = model.stat().st_mtime_ns
    assert newton(short_run, "--stages pretrain,probe,tune,long,laws") == 0
    assert model.stat().st_mtime_ns == before
    output = capsys.readouterr().out
    assert "pretrain lssar" not in output
    assert NEWTON in output


def test_other_arms_are_collected(short_run: Path, tmp_path: Path) -> None:
    shutil.copytree(short_run, tmp_path / "more")
    before = results(tmp_path / "more")
    options = "--arms softmax --stages pretrain"
    assert newton(tmp_path / "more", f"{options} --pretrain-steps 2") == 2  # another experiment
    assert newton(tmp_path / "more", options) == 0
    after = results(tmp_path / "more")
    assert after["cells"] == before["cells"]
    assert sorted(run["arm"] for run in after["pretraining"]) == ["lssar", "softmax"]


def test_long_stage_adds_later_cells(short_run: Path, tmp_path: Path) -> None:
    shutil.copytree(short_run, tmp_path / "later")
    run = tmp_path / "later" / "arms" / "lssar" / "seed0"
    whole = results(run, "long.json")
    part = {**whole, "force": {"tuned-256": whole["force"]["tuned-256"]}}
    (run / "long.json").write_text(json.dumps(part))
    assert newton(tmp_path / "later", "--stages long") == 0
    again = results(run, "long.json")
    assert set(again["force"]) == set(whole["force"])
    assert again["roll_out"] == whole["roll_out"]


@pytest.mark.parametrize("name", ["laws.json", "force.npz"])
def test_damaged_files_are_named(
    name: str, short_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(short_run, tmp_path / "cut")
    path = tmp_path / "cut" / "arms" / "lssar" / "seed0" / "tuned-256" / name
    path.write_text("{")
    if name == "force.npz":
        path.with_name("laws.json").unlink()
    assert newton(tmp_path / "cut", "--stages laws") == 2
    error = capsys.readouterr().err
    assert "`--output` must be a folder of undamaged files" in error
    assert str(path) in error


def test_stopped_training_reaches_the_same_weights(tmp_path: Path) -> None:
    """The run folder is locked during training, and its checkpoints are removed once the model is saved."""
    options = "--stages pretrain --pretrain-updates 30 --save-updates 5"  # the old names
    assert newton(tmp_path / "whole", options) == 0
    place = tmp_path / "stopped" / "arms" / "lssar" / "seed0"
    command = [sys.executable, "-m", "softplus_attention", "newton", "--preset", "smoke", "--device", "cpu"]
    command += ["--out", str(tmp_path / "stopped"), *options.split()]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        while not (place / "pretraining" / "checkpoint-5").exists():
            assert process.poll() is None, process.communicate()[1]
            time.sleep(0.002)
        with (
            pytest.raises(RunStopped, match="another process is training in"),
            RunFolder(place / "pretraining").locked(),
        ):
            pass
        process.send_signal(signal.SIGTERM)
        _, error = process.communicate(timeout=120)
    assert process.returncode == 143, error
    assert "stopped by SIGTERM" in error
    assert not (place / "pretrained").exists()
    assert newton(tmp_path / "stopped", options) == 0
    whole = tmp_path / "whole" / "arms" / "lssar" / "seed0"
    weights = [folder / "pretrained" / "model.safetensors" for folder in (place, whole)]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    assert results(place, "pretrain.json")["losses"] == results(whole, "pretrain.json")["losses"]
    starts = results(place / "pretraining", "run.json")["starts"]
    assert [start["from_step"] > 0 for start in starts] == [False, True]
    assert not list((place / "pretraining").glob("checkpoint-*"))


def test_arrays_hold_what_laws_need(short_run: Path) -> None:
    arrays = read_arrays(short_run / "arms" / "lssar" / "seed0" / "tuned-256" / "force.npz")
    true = 39.4784176044 * arrays["inside/m1"] * arrays["inside/m2"] / arrays["inside/r"] ** 2
    np.testing.assert_allclose(arrays["inside/true"], true, rtol=1e-5)
    assert len(arrays["inside/said"]) == len(true)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--stages simulate", "`--stages` must be one of pretrain"),
        ("--arms softmx", "no attention is named 'softmx'"),
        ("--arms softmax-window0", "`arms` must be windows of at least 1 time step"),
        ("--arms softmax-window2 --distribution published-code", "must be without a window in 'published-code'"),
        ("--positions 21", "`positions` must be more than 25: labels and tests start at step 12"),
        ("--positions 50", "`positions` must be odd"),
        ("--device cuda:1", "`--device` must be cpu or cuda"),
        ("--labels 0", "`labels` must be at least 1"),
        ("--labels ,", "`--labels` must be at least one"),
        ("--labels many", "`--labels` must be integers separated by commas"),
        ("--seeds 1,1", "`seeds` must be without duplicates"),
        ("--width 63", "`width` must be an even multiple of `heads`, 2 (rotary positions rotate pairs), got 63"),
        ("--width 66 --heads 22", "`width` must be an even multiple of `heads`, 22"),
        ("--width 63 --arms softmax-alibi", "`width` must be a multiple of `heads`, 2, got 63"),
        ("--bins 1", "`bins` must be at least 2"),
        ("--workers -1", "`--workers` must be at least 0, got -1"),
        ("--save-every -1", "`--save-every` must be at least 0, got -1"),
        ("--stages laws", "a folder with forces of the stage `tune`"),
        ("--stages tune", "`checkpoint` must be a folder with a config.json"),
        ("--context-noise -1", "`context_noise` must be a finite number, at least 0"),
        ("--context-noise nan", "`context_noise` must be a finite number, at least 0"),
    ],
)
def test_bad_options(options: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert newton(tmp_path, options) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("value", [0, -1])
def test_sizes_are_at_least_one(name: str, value: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    option = option_name(name)
    assert newton(tmp_path / "out", f"{option} {value}") == 2
    assert f"`{option}` must be at least 1, got {value}" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    with pytest.raises(ValueError, match=f"`{name}` must be at least|`positions` must be more than"):
        preset("smoke", **{name: value})


def newton_parser() -> argparse.ArgumentParser:
    parsers = argparse.ArgumentParser().add_subparsers()
    add_command(parsers)
    return parsers.choices["newton"]


def test_every_option_has_help() -> None:
    actions = {action.option_strings[-1]: action for action in newton_parser()._actions}
    old = {name for name, action in actions.items() if action.help == argparse.SUPPRESS}
    assert old == {"--out", "--pretrain-updates", "--tune-updates", "--save-updates"}
    assert [name for name, action in actions.items() if not action.help] == []
    assert set(actions["--distribution"].choices or ()) == set(DISTRIBUTIONS)
    assert set(actions["--preset"].choices or ()) == set(PRESETS)


def test_unknown_distribution(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["newton", "--preset", "smoke", "--distribution", "solar"])
    assert "--distribution: 'solar' is not one of " in capsys.readouterr().err
    with pytest.raises(ValueError, match="`distribution` must be one of"):
        preset("smoke", distribution="solar")


@pytest.mark.parametrize(
    ("preset", "options", "difference"),
    [
        ("smoke", "--form tokens", "its `form` is 'continuous', got form = 'tokens'"),
        ("cpu", "--stages laws", "its `preset` is 'smoke', got preset = 'cpu'"),
    ],
)
def test_folder_of_another_experiment(
    preset: str, options: str, difference: str, short_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert newton(short_run, options, preset) == 2
    assert f"`--output` must be a folder of the same experiment: {difference}" in capsys.readouterr().err


@pytest.mark.slow
def test_training_needs_few_packages(tmp_path: Path) -> None:
    code = f"""
import sys
for name in ("scipy", "pyoperon", "matplotlib"):
    sys.modules[name] = None
from softplus_attention.cli import main
sys.exit(main(["newton", "--preset", "smoke", "--device", "cpu", "--output", {str(tmp_path)!r}, "--pretrain-steps", "2",
    "--tune-steps", "2", "--test-systems", "16", "--stages", "pretrain,probe,tune,long"]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "arms" / "lssar" / "seed0" / "tuned-256" / "force.npz").is_file()


def test_faithful_preset_runs_small(tmp_path: Path) -> None:
    """7000 bins, learned positions, many planets, raw F, partly labelled test systems, the nearest points."""
    options = "--layers 1 --width 16 --heads 2 --positions 60 --pretrain-steps 2 --pretrain-batch 4 --tune-steps 2"
    options += " --precision fp32 --arms lssar --labels 8 --without-pretraining no --stages pretrain,probe,tune,long"
    assert newton(tmp_path, options, preset="faithful") == 0
    found = results(tmp_path)
    assert found["experiment"]["bins"] == 7000
    arrays = read_arrays(tmp_path / "arms" / "lssar" / "seed0" / "tuned-8" / "force.npz")
    # 1,000 systems of 30 steps, without the two labelled steps of each.
    assert len(arrays["inside/said"]) == 1000 * 28
    assert arrays["inside/state"].shape == (28000, 6)


@pytest.mark.parametrize("target", ["vector", "force", "ln_force"])
def test_forces_for_every_target(target: str) -> None:
    experiment = preset("smoke", target=target, test_systems=4, test_steps=3)
    config = experiment.config("softmax-window2", 0.2)
    assert config.window == 4
    config.target = target
    arrays = predicted_forces(OrbitGPTForForce(config), experiment, seed=0)
    assert arrays["inside/said"].shape == (12,)
    assert arrays["inside/step"].tolist() == [12, 18, 23] * 4
    assert ("r2_vector" in quality(arrays, "inside")) == (target == "vector")


@pytest.mark.slow
def test_cpu_preset_finds_newtons_law(tmp_path: Path) -> None:
    assert newton(tmp_path, preset="cpu") == 0
    found = results(tmp_path)
    for cell in found["cells"]:
        if not cell["pretrained"]:
            continue
        assert cell["quality"]["inside"]["r2_ln_force"] > 0.95
        assert cell["exponents"]["inside"]["exponents"] == pytest.approx({"m1": 1, "m2": 1, "r": -2}, abs=0.1)
        assert cell["laws"]["ln_force"][0]["operon"]["chosen"]["within"]["law"] == NEWTON
        assert cell["laws"]["ln_force"][0]["enumerator"]["chosen"]["within"]["law"] == NEWTON
        noisy = cell["control_with_noise"]["laws"]["ln_force"][0]["operon"]["chosen"]["within"]
        assert noisy["law"] == NEWTON
    truth = found["controls"]["seed0"]["laws"]["ln_force"][0]["operon"]["chosen"]["within"]
    assert truth["law"] == NEWTON
    assert {cell["pretrained"] for cell in found["cells"]} == {True, False}


def test_summary_of_missing_stages_has_dashes() -> None:
    row = {"arm": "lssar", "pretrained": True, "labels": 50, "r2_ln_force": {"mean": 0.5}}
    found = {"table": [row, {**row, "r2_ln_force": {}}], "controls": {}, "long": []}
    lines = format_summary(found).splitlines()[2:4]
    assert [line.split() for line in lines] == [
        ["lssar", "50", "0.5000", "-", "-", "-"],
        ["lssar", "50", "-", "-", "-", "-"],
    ]
