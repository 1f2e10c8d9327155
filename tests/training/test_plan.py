"""``plan``: its constants match results/, and its predictions match calculations by hand."""

import json
from pathlib import Path

import pytest

from softplus_attention.cli import main
from softplus_attention.training.plan import MEASURED, MFU, SHAPES, Cluster, longest, memory_gb, plan, plans

RESULTS = Path(__file__).parents[2] / "results"
GPUS, LENGTHS = (1, 8, 64, 512), [32_768, 131_072, 524_288, 1_048_576]
NAMES = {"lssar": "lssar p=15", "lssar-learned": "lssar learned", "lssa": "lssa", "softmax-flash": "sdpa flash"}
NAMES |= {"softmax-cudnn": "sdpa cudnn"}


def test_constants_match_the_results() -> None:
    rows = json.loads((RESULTS / "attention-h200.json").read_text())["rows"]
    shape = {"section": "train", "batch": 2, "heads": 16, "length": 16384, "head_dim": 128}
    for name, contender in NAMES.items():
        wanted = shape | {"contender": contender}
        (row,) = [row for row in rows if all(row.get(key) == value for key, value in wanted.items())]
        assert MEASURED[name] == pytest.approx((row["forward_ms"], row["backward_ms"]), rel=0.01)
    measured = json.loads((RESULTS / "training-h200.json").read_text())["rows"][0]
    assert pytest.approx(measured["mfu"], abs=0.005) == MFU


def test_measured_shape_takes_measured_time() -> None:
    one = SHAPES["1b"]
    found = plan(one, 1, 16384, 1, "lssar", Cluster())
    forward, backward = MEASURED["lssar"]
    assert found.attention_s == pytest.approx(one.layers * (2 * forward + backward) / 2 / 1000)
    assert found.context_s == found.weights_s == 0


def test_sizes_and_bytes_by_hand() -> None:
    eight = SHAPES["8b"]
    assert eight.parameters == pytest.approx(8.03e9, rel=0.01)
    found = plan(eight, 8, 131_072, 8, "lssar", Cluster())
    # Keys and values of each layer in bfloat16, twice forward, and their gradients in float32: 7 of 8 parts of each.
    sent = 32 * 2 * 8 * 131_072 * 128 * (7 / 8) * (2 * 2 + 4)
    assert found.context_s == pytest.approx(sent / 300e9 / 2), "half of the transfer is hidden"
    few = plan(SHAPES["8b"], 16, 4096, 16, "lssar", Cluster())
    sent = 32 * 2 * 8 * 4096 * 128 * (15 / 16) * (2 * 2 + 4)
    assert found.attention_s > few.context_s > 0.9 * sent / 40e9, "little attention hides little"
    assert found.attention_s == pytest.approx(plan(eight, 8, 131_072, 1, "lssar", Cluster()).attention_s / 8)


def test_tables_in_docs_match() -> None:
    """All tables of docs/scale.md, and the sentence about the exchange of keys and values."""
    page = (Path(__file__).parents[2] / "docs" / "scale.md").read_text()
    for name in SHAPES:
        for gpus in GPUS:
            for length, found in plans(SHAPES[name], gpus, LENGTHS, "lssar", Cluster()):
                row = f"| {gpus} | {length:,} | does not fit | | | | |"
                if found is not None:
                    parts = f"{found.attention_s / found.step_s:.0%} | {found.context_s / found.step_s:.1%}"
                    row = f"| {gpus} | {length:,} | {found.context} | {found.memory_gb:.0f} | "
                    row += f"{found.tokens_per_second:,.0f} | {parts} |"
                assert row in page, row
    for gpus in GPUS:
        most = [longest(SHAPES[name], gpus, Cluster()) for name in ("8b", "1b")]
        row = f"| {gpus} | " + " | ".join(f"{one:,}" if one else "not even the weights" for one in most) + " |"
        assert row in page, row
    parts = [plan(SHAPES[name], 64, 131_072, 8, "lssar", Cluster()) for name in ("8b", "1b")]
    shares = [f"{one.context_s / one.step_s:.1%}" for one in parts]
    assert f"{shares[0]} of a step of the larger model and {shares[1]} of the smaller" in page


def test_more_gpus_hold_longer_sequences() -> None:
    eight, cluster = SHAPES["8b"], Cluster()
    lengths = [longest(eight, gpus, cluster) for gpus in (1, 8, 64, 512)]
    assert lengths[0] == 0
    assert lengths == sorted(set(lengths))
    for gpus, length in zip((8, 64, 512), lengths[1:], strict=True):
        room = cluster.usable * cluster.memory_gb
        assert memory_gb(eight, gpus, -(-length // gpus), length) <= room
        assert memory_gb(eight, gpus, -(-(length + 1024) // gpus), length + 1024) > room


def test_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--shape", "16,2048,16,8,8192,32000", "--gpus", "8", "--lengths", "65536"]) == 0
    output = capsys.readouterr().out
    assert "1.1 billion parameters" in output  # 16 x (12.6 + 50.3) million and two embeddings of 65.5
    assert "65,536" in output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shape", "7b"], "--shape"),
        (["--gpus", "8,x"], "whole numbers above 0"),
        (["--context-parallel", "3", "--gpus", "8"], "a divisor of the 8 GPUs"),
        (["--attention", "sigmoid"], "those with measured times"),
        (["--mfu", "0"], "above 0"),
    ],
)
def test_bad_input(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *arguments]) == 2
    assert message in capsys.readouterr().err
