"""``softplus-attention evaluate`` as a user runs it: tables, files, figures, errors, without matplotlib."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from evaluation_cases import saved_model

from softplus_attention.cli import main
from softplus_attention.utils.results import read

TEXT = "The quick brown fox jumps over the lazy dog. " * 20


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("place")
    saved_model(folder / "lssar" / "model")
    saved_model(folder / "softmax" / "model", attention="softmax")
    (folder / "text.txt").write_text(TEXT)
    return folder


@pytest.fixture
def run(place, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(place)

    def call(*args: str, output: Path = tmp_path) -> tuple[int, str, str]:
        status = main(["evaluate", *args, "--output", str(output)])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return call


def test_lengths(run, tmp_path):
    args = ("lengths", "lssar/model", "lssar/model+power=31", "softmax/model", "--text", "text.txt")
    status, out, _ = run(*args, "--lengths", "1,4,16,1024")
    assert status == 0
    names = ["lssar", "lssar+power=31", "softmax"]
    results = [read(tmp_path / f"lengths--{name}.json") for name in names]
    for result in results:
        assert [entry["length"] for entry in result["results"]["lengths"]] == [16, 64, 256]
        assert all(f"{entry['loss']:.4f}" in out for entry in result["results"]["lengths"])
    assert "at 16384: the longest document has 900 tokens" in out
    assert "3 texts of 256 tokens from 1 document of at least that length" in out
    with (tmp_path / "lengths.csv").open() as handle:
        rows = list(csv.DictReader(handle))
    assert [float(row["loss"]) for row in rows[:3]] == [e["loss"] for e in results[0]["results"]["lengths"]]
    assert (tmp_path / "lengths.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (tmp_path / "lengths.svg").read_text()
    assert (tmp_path / "lengths-positions.csv").exists()
    _, again, err = run(*args, "--lengths", "1,4,16,1024")
    assert err.count("found in") == 9
    assert again.splitlines()[:5] == out.splitlines()[:5]


def test_options_of_all_models(run, tmp_path):
    status, out, _ = run(
        "lengths", "lssar/model", "--text", "text.txt", "--lengths", "1,2", "--window", "8", "--no-control"
    )
    assert status == 0
    result = read(tmp_path / "lengths--lssar+window=8.json")
    assert result["model"]["options"] == {"window": "8"}
    assert "gain" not in out


def test_control_fraction(run, tmp_path):
    """Also by its deprecated name."""
    args = ("lengths", "lssar/model", "--text", "text.txt", "--lengths", "1,8")
    assert run(*args, "--control-share", "0.5")[0] == 0
    entry = read(tmp_path / "lengths--lssar.json")["results"]["lengths"][1]
    assert entry["control"]["first"] == entry["length"] // 2
    status, _, err = run(*args, "--control-fraction", "2")
    assert status == 2
    assert "`--control-fraction` must be a fraction of the sequence, from 0 to 1, got 2.0" in err


def test_passkey(run, tmp_path):
    args = ("--text", "text.txt", "--form", "compact", "--lengths", "4,8", "--depths", "0,1", "--trials", "2")
    status, out, _ = run("passkey", "lssar/model", *args, "--lengths", "64,32")
    assert status == 0
    assert "exact match" in out
    assert len(read(tmp_path / "passkey--lssar.json")["results"]["cells"]) == 4
    assert (tmp_path / "passkey.png").exists()


def test_passkey_data(run, tmp_path):
    status, out, _ = run("passkey-data", "--text", "text.txt", "--documents", "30", "--most-characters", "60")
    assert status == 0
    lines = (tmp_path / "passkey.jsonl").read_text().splitlines()
    assert len(lines) == 30
    written = sum(len(json.loads(line)["text"]) for line in lines)
    assert f"30 documents, {written} characters, {100 * written / (written + len(TEXT)):.1f}%" in out


def test_passkey_data_min_and_max_characters(run, tmp_path):
    """By their deprecated names."""
    args = ("--text", "text.txt", "--documents", "30", "--most-characters", "60", "--least-characters", "50")
    assert run("passkey-data", *args)[0] == 0
    lengths = {len(json.loads(line)["text"]) for line in (tmp_path / "passkey.jsonl").read_text().splitlines()}
    assert 50 <= min(lengths) < max(lengths) <= 60


def test_inside_and_maps(run, tmp_path):
    status, out, _ = run("inside", "lssar/model", "softmax/model", "--text", "text.txt", "--lengths", "1,4")
    assert status == 0
    assert "stage 1" in out
    assert (tmp_path / "inside.svg").exists()
    status, out, _ = run("maps", "lssar/model", "softmax/model", "--text", "Call me Ishmael.")
    assert status == 0
    assert "lssar: 4 maps of 2 layers, 16 cells of 1 tokens" in out
    assert (tmp_path / "maps.png").exists()


def test_synthetic(run, tmp_path):
    args = "--task flip-flop copy --lengths 1,4 --sequences 4 --device cpu --preset rotary --layers 1 --width 16"
    args += " --heads 1 --steps 4 --batch-size 4 --symbols 8"
    status, out, _ = run("synthetic", "lssar", "softmax", *args.split())
    assert status == 0
    for task in ("flip-flop", "copy"):
        for name in ("lssar", "softmax"):
            result = read(next(tmp_path.glob(f"synthetic--{task}+{name}--*.json")))
            assert [entry["times"] for entry in result["results"]["lengths"]] == [1, 4]
            assert f"{task} {name}" in out
    assert (tmp_path / "synthetic.png").exists()


def test_synthetic_with_local_and_global_layers(run, tmp_path):
    args = "--task copy --steps 2 --batch-size 2 --train-length 16 --lengths 1 --preset mixed --window 4 --width 32"
    assert run("synthetic", "softmax", *args.split(), "--optimizer", "adamw")[0] == 0
    result = read(next(tmp_path.glob("synthetic--copy+softmax--*.json")))
    config = result["model"]["config"]
    assert (config["window"], config["global_every"], config["hidden_size"]) == (4, 2, 32)
    assert result["settings"]["training"]["optimizer"] == "adamw"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["lengths", "nowhere/at/all", "--text", "text.txt"], "MODEL"),
        (["lengths", "./nowhere", "--text", "text.txt"], "`MODEL` must be a folder with config.json"),
        (
            ["lengths", "lssar/model", "--text", "none.txt"],
            "`--text` must be text files, folders, or builtin for the package's validation text, got 'none.txt', which "
            "does not exist",
        ),
        (
            ["lengths", "lssar/model", "--data", "none"],
            "none: no such folder. `--data` takes a folder written by `softplus-attention data prep",
        ),
        (["lengths", "lssar/model", "--text", "text.txt", "--lengths", "4096"], "the longest document has 900 tokens"),
        (["lengths", "lssar/model", "--text", "text.txt", "--lengths", "long"], "`--lengths` must be whole numbers"),
        (["lengths", "softmax/model", "--text", "text.txt", "--power", "3"], "must be left out for 'softmax'"),
        (["lengths", "lssar/model", "--text", "text.txt", "--train-length", "1"], "must be at least 2"),
        (["passkey", "lssar/model", "--form", "compact"], "hides the key in ordinary text"),
        (["passkey", "lssar/model", "--form", "poem"], "one of sentences, compact"),
        (["maps", "lssar/model", "--file", "none"], "--file none: no such file"),
        (["synthetic", "nothing"], "no attention is named 'nothing'"),
        (["synthetic", "lssar", "--task", "sort"], "`--task` must be one or more of recall, copy, flip-flop, got sort"),
        (["synthetic", "lssar", "--preset", "tpu"], "`--preset` must be one of mixed, rotary"),
        (["synthetic", "lssar", "--task", "copy", "--writes", "3"], "`--writes` must be left out for copy"),
    ],
)
def test_invalid_input(run, args, message, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    status, _, err = run(*args)
    assert status == 2
    assert message in err


def test_models_with_different_training_lengths(run, tmp_path):
    saved_model(tmp_path / "other", max_position_embeddings=32)
    args = ("lengths", "lssar/model", str(tmp_path / "other"), "--text", "text.txt", "--lengths", "16")
    status, _, err = run(*args)
    assert status == 2
    assert (
        "`--train-length` must be given if the models' configs disagree or have no length, got lssar: 16, other: 32"
        in err
    )
    assert run(*args, "--train-length", "16")[0] == 0


def test_stopped(run, monkeypatch):
    def stop(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("softplus_attention.evaluation.measures.lengths.measure_lengths", stop)
    status, _, err = run("lengths", "lssar/model", "--text", "text.txt")
    assert status == 130
    assert "stopped; run the same command again to continue" in err


WITHOUT_MATPLOTLIB = """
import sys
for name in ("matplotlib", "datasets", "pyarrow", "pandas", "scipy", "lm_eval"):
    sys.modules[name] = None
from softplus_attention.cli import main
sys.exit(main(sys.argv[1:]))
"""


def test_measure_without_matplotlib_draw_later(place, tmp_path):
    args = ["evaluate", "lengths", "lssar/model", "--text", "text.txt", "--lengths", "1,4", "--output", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_MATPLOTLIB, *args], cwd=place, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "no figures, because matplotlib is not installed" in done.stderr
    assert f"softplus-attention evaluate figures {tmp_path}" in done.stderr
    assert (tmp_path / "lengths.csv").exists()
    assert not (tmp_path / "lengths.png").exists()
    assert main(["evaluate", "figures", str(tmp_path)]) == 0
    assert (tmp_path / "lengths.png").exists()


def test_figures_without_results(tmp_path, capsys):
    assert main(["evaluate", "figures", str(tmp_path)]) == 2
    assert "a folder with results of `softplus-attention evaluate`" in capsys.readouterr().err


def test_figures_of_incomplete_results(place, run, tmp_path, capsys):
    assert run("lengths", "lssar/model", "--text", "text.txt", "--lengths", "1,4")[0] == 0
    path = tmp_path / "lengths--lssar.json"
    path.write_text(json.dumps(read(path) | {"results": {}}))
    (tmp_path / "lengths.csv").unlink()
    assert main(["evaluate", "figures", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert f"a complete result of `evaluate lengths`, got '{path}': KeyError('lengths')" in error
    assert not (tmp_path / "lengths.csv").exists()


@pytest.mark.slow
def test_resumes_after_kill(place, tmp_path):
    """After kill -9, the same command continues and ends with the same numbers."""
    args = ["lengths", "lssar/model", "--text", "text.txt", "--lengths", "16,32,64,128,256", "--device", "cpu"]
    command = [sys.executable, "-m", "softplus_attention.cli", "evaluate", *args, "--output"]
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    subprocess.run([*command, str(whole)], cwd=place, check=True, capture_output=True)
    expected = read(whole / "lengths--lssar.json")
    slowed = (
        "import sys, time; from softplus_attention.evaluation import lengths as m; from softplus_attention.cli "
        "import main; at = m.LengthEvaluator.at; m.LengthEvaluator.at = "
        "lambda *a: (time.sleep(0.5), at(*a))[1]; main(sys.argv[1:])"
    )
    running = subprocess.Popen([sys.executable, "-c", slowed, "evaluate", *args, "--output", str(cut)], cwd=place)
    deadline = time.monotonic() + 60
    while not (cut / "lengths--lssar.json").exists():
        assert running.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    running.kill()
    running.wait()
    before = read(cut / "lengths--lssar.json")
    assert not before["complete"]
    assert 1 <= len(before["results"]["lengths"]) < 5
    again = subprocess.run([*command, str(cut)], cwd=place, check=True, capture_output=True, text=True)
    assert again.stderr.count("found in") == len(before["results"]["lengths"])
    found = read(cut / "lengths--lssar.json")
    assert found["complete"]
    for one, other in zip(found["results"]["lengths"], expected["results"]["lengths"], strict=True):
        assert {**one, "seconds": 0} == {**other, "seconds": 0}
