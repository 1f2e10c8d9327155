"""Models over a sequence that lies on several processes, and with their heads divided: real processes over gloo."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[1] / "support" / "sharded_models.py"


@pytest.fixture(scope="module", params=[2, pytest.param(3, marks=pytest.mark.slow)])
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(request.param)]
    command += [str(PROGRAM), str(tmp_path_factory.mktemp("models"))]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    run = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(run.stdout.splitlines()[-1]) | {"processes": request.param}


def test_gradients_of_a_sharded_sequence(found: dict) -> None:
    """Of every parameter, in float64; a learned power is float32 in its module, so its parts are rounded there."""
    assert len(found["sequences"]) == 16
    for name, error in found["sequences"].items():
        assert error < (1e-6 if "GPT" in name else 1e-12), name


def test_losses_of_sharded_sequences(found: dict) -> None:
    assert len(found["lengths"]) == 4
    for name, error in found["lengths"].items():
        assert error < 1e-6, name  # losses are float32


def test_divided_heads_give_the_same(found: dict) -> None:
    models = {name: one for name, one in found["heads"].items() if name != "refused"}
    assert len(models) == 3
    for name, one in models.items():
        assert one["logits"] < 1e-12, name
        assert one["gradients"] < 1e-11, name
        assert one["generated"], name
        assert one["share"] < 1.05 / found["processes"], name


def test_heads_that_cannot_be_divided(found: dict) -> None:
    assert "`tp_size` must be a divisor of `num_key_value_heads`, 1" in found["heads"]["refused"]


def test_no_cache_and_no_weights(found: dict) -> None:
    cache, weights = "use_cache=False", "output_attentions must be False"
    for said, words in zip(found["refused"], [cache, weights] * 2, strict=True):
        assert words in said
