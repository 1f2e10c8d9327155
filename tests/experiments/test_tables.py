"""The tables of README and docs: up to date, written between their markers, and correct."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from experiments.study.records import read_study
from tools import update_tables
from tools.tables import benchmarks, readme, stability, synthetic
from tools.tables.markdown import TableError

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "results"


def test_tables_are_up_to_date() -> None:
    """`make pages` writes them."""
    assert update_tables.main(["--check"]) == 0


def test_stale_table_is_found_and_rewritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in (Path("README.md"), *(page.relative_to(ROOT) for page in (ROOT / "docs").rglob("*.md"))):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, tmp_path / path)
    (tmp_path / "results").symlink_to(RESULTS)
    page = tmp_path / "docs" / "performance.md"
    page.write_text(page.read_text().replace("<!-- begin: cpu-time -->\n", "<!-- begin: cpu-time -->\nold\n"))
    root = ["--root", str(tmp_path)]
    assert update_tables.main([*root, "--check"]) == 1
    assert capsys.readouterr().err == "docs/performance.md is out of date: run `make pages`\n"
    assert "\nold\n" in page.read_text()
    assert update_tables.main(root) == 0
    assert page.read_text() == (ROOT / "docs" / "performance.md").read_text()
    assert update_tables.main([*root, "--check"]) == 0
    page.write_text(page.read_text().replace("end: cpu-time", "end: cpu-tim"))
    assert update_tables.main(root) == 2
    assert "is not one of a pair" in capsys.readouterr().err


PAGE = "By hand.\n<!-- begin: a -->\nold\n<!-- end: a -->\nMore.\n<!-- begin: b -->\n<!-- end: b -->\n"


def test_rewrite_keeps_prose() -> None:
    written = update_tables.rewrite({Path("page.md"): PAGE, Path("other.md"): "Prose.\n"}, {"a": "| 1 |", "b": "| 2 |"})
    filled = "By hand.\n<!-- begin: a -->\n| 1 |\n<!-- end: a -->\nMore.\n<!-- begin: b -->\n| 2 |\n<!-- end: b -->\n"
    assert written == {Path("page.md"): filled, Path("other.md"): "Prose.\n"}


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("<!-- begin: a -->", "", "<!-- end: a --> is not one of a pair"),
        ("<!-- end: b -->", "", "<!-- begin: b --> is not one of a pair"),
        (": b -->", ": c -->", "no table is called 'c'"),
        (": b -->", ": a -->", "table 'a' is also in page.md"),
        ("<!-- begin: b -->\n<!-- end: b -->\n", "", "no page has <!-- begin: b -->"),
    ],
)
def test_bad_markers(old: str, new: str, message: str) -> None:
    with pytest.raises(TableError, match=message):
        update_tables.rewrite({Path("page.md"): PAGE.replace(old, new)}, {"a": "1", "b": "2"})


def set_loss(folder: Path, run: str, loss: float) -> None:
    """Sets the loss at the training length."""
    path = folder / f"{run}.json"
    content = json.loads(path.read_text())
    content["evaluation"]["lengths"]["lengths"][0]["loss"] = loss
    path.write_text(json.dumps(content))


def test_readme_losses_are_means_over_seeds(tmp_path: Path) -> None:
    study = shutil.copytree(RESULTS / "study", tmp_path / "study")
    for seed, loss in ((0, 2.0), (1, 3.0)):
        set_loss(study, f"10m-again-{readme.OURS_WIDE}-seed{seed}", loss)
    assert "| LSSAR, learned power | 2.500 |" in readme.losses_table(read_study(study))
    for path in study.glob("10m-again-lssar-p15-*"):
        path.unlink()
    with pytest.raises(TableError, match="lssar-p15 at 10m-again was not measured"):
        readme.losses_table(read_study(study))


def attention_rows() -> list[dict[str, Any]]:
    return benchmarks.read_attention(RESULTS)


def test_readme_speed_is_a_range_over_lengths() -> None:
    rows, ratios = attention_rows(), iter((0.5, 0.75, 0.625))
    for row in benchmarks.select(rows, "lssar p=15", head_dim=64):
        row["forward_ratio"] = next(ratios)
    training = [{"attention": "lssar", "time_to_softmax": 1.25}]
    table = readme.speed_table(rows, training)
    assert "| LSSAR, forward | 0.50 to 0.75 |" in table
    assert table.endswith("| 1.25 |  |")
    with pytest.raises(TableError, match="no row of lssar"):
        readme.speed_table(rows, [])


@pytest.mark.parametrize(("highest", "met"), [(0.95, "goal"), (1.2, "yes"), (1.31, "no")])
def test_goal_is_judged_by_the_worst_row(highest: float, met: str) -> None:
    rows = attention_rows()
    for row in benchmarks.select(rows, "lssar p=15", head_dim=128, least=4096):
        row["ratio"] = 0.9
    row["ratio"] = highest
    line = next(line for line in benchmarks.goals_table(rows).splitlines() if "D = 128, T from 4096" in line)
    assert line.split(" | ")[1] == f"0.90 to {highest:.2f}"
    assert line.endswith(f"| {met} |")


def test_failed_rows_are_ignored() -> None:
    assert all(row["status"] == "ok" for row in attention_rows())
    with pytest.raises(TableError, match="no row of adasplash-2 in the section train"):
        benchmarks.select(attention_rows(), "adasplash-2")


def test_times_by_length() -> None:
    row = {"section": "train", "contender": "lssa", "head_dim": 64, "forward_ms": 0.5, "backward_ms": 123.4, "ratio": 2}
    row["forward_ratio"] = 1.5
    rows = [row | {"length": 1024, "step_mib": 255.4}, row | {"length": 4096, "contender": "sdpa flash"}]
    assert benchmarks.by_length(rows, "train").splitlines() == [
        "|  | T = 1024 | ratio | T = 4096 | ratio | step MiB, T = 1024 |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
        "| SDPA, FlashAttention-2 |  |  | 0.5 / 123 | 2.00 |  |",
        "| LSSA | 0.5 / 123 | 2.00 |  |  | 255 |",
    ]


def test_missing_cpu_memory_is_empty() -> None:
    rows = [
        {"implementation": "native", "length": 64, "direction": "forward", "bytes": 3 * 2**20},
        {"implementation": "sdpa", "length": 128, "direction": "forward+backward", "bytes": 5 * 2**20},
    ]
    table = benchmarks.cpu_memory_table(rows)
    assert "| 64 | 3.0 |  |  |  |  |  |  |  |\n| 128 |  |  |  |  |  | 5.0 |  |  |" in table


def test_token_table() -> None:
    place = {"model": "gpt", "batch": 8, "context": 1024, "ratio": 0.5}
    rows = [place | {"way": way, "softmax": 2.0, "lssar": 1.0} for way in ("eager", "graph")]
    assert "| gpt | 8 | 1,024 | 2.00 | 1.00 | 0.50 | 2.00 | 1.00 | 0.50 |" in benchmarks.token_table(rows)


def stability_record(
    arm: str, rate: float, losses: list[Any], score: float | None, stopped: str | None
) -> dict[str, Any]:
    return {
        "arm": arm, "size": "10m", "learning_rate": rate, "precision": "fp16", "seed": 0, "stopped": stopped,
        "losses": [[step, loss] for step, loss in enumerate(losses)], "largest_score": score,
        "config": {"layers": 6, "width": 384, "heads": 6, "steps": 400, "batch_size": 64, "sequence_length": 512},
        "machine": {"cpu": "a CPU", "gpu": "a GPU"}, "versions": {"torch": "2.0"}, "commit": "0123456789",
    }  # fmt: skip


def test_stability(tmp_path: Path) -> None:
    with pytest.raises(TableError, match="has no runs"):
        stability.make_tables(tmp_path)
    (tmp_path / "stability").mkdir()
    runs = [
        stability_record("softmax", 0.001, [9, 9, 5, 4, 3, 2, 1], 123.4, None),
        stability_record("softmax", 0.01, [9, "nan"], None, "the loss became NaN"),
        stability_record("lssar-p3", 0.01, [6, 6], 24.7, None),
    ]
    for number, content in enumerate(runs):
        (tmp_path / "stability" / f"{number}.json").write_text(json.dumps(content))
    assert stability.make_tables(tmp_path)["stability"].splitlines() == [
        "| **10m, fp16** | 0.001 | 0.01 |",
        "| --- | ---: | ---: |",
        "| `softmax` | 3.000 (123) | stopped: not finite |",
        "| `lssar-p3` | - | 6.000 (25) |",
        "",
        "6 layers, width 384, 6 heads, 400 steps of 64 sequences of 512 tokens, seed 0; a GPU, torch 2.0, 0123456.",
    ]
    (tmp_path / "stability" / "9.json").write_text(json.dumps(stability_record("relu", 0.01, [6, 6], 24.7, None)))
    with pytest.raises(TableError, match="has runs of relu, which the table does not list"):
        stability.make_tables(tmp_path)


def synthetic_result(attention: str, settings: dict[str, Any], *lengths: tuple[float, float, int]) -> dict[str, Any]:
    return {
        "complete": True,
        "model": {"name": attention, "attention": attention},
        "settings": settings,
        "results": {"lengths": [{"times": times, "accuracy": share, "answers": n} for times, share, n in lengths]},
    }


SYNTHETIC = {
    "recall+softmax--1": synthetic_result("softmax", {"task": "recall", "pairs": 8}, (1, 0.995, 400), (8, 0.5, 400)),
    "recall+lssar--2": synthetic_result("lssar", {"task": "recall", "pairs": 0}, (1, 1.0, 64)),
    "copy+lssar--3": synthetic_result("lssar", {"task": "copy"}, (1, 1.0, 32), (64, 0.125, 2048)),
}


@pytest.fixture
def synthetic_results(tmp_path: Path) -> Path:
    (tmp_path / "synthetic").mkdir()
    for name, found in SYNTHETIC.items():
        (tmp_path / "synthetic" / f"synthetic--{name}.json").write_text(json.dumps(found))
    return tmp_path


def test_synthetic(synthetic_results: Path) -> None:
    assert synthetic.make_tables(synthetic_results)["synthetic"].splitlines() == [
        "| answers right, % | attention | 1x | 8x | 64x | answers at the longest |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
        "| copy | `lssar` | 100.0 | - | 12.5 | 2,048 |",
        "| recall, 8 pairs | `softmax` | 99.5 | 50.0 | - | 400 |",
        "| recall, as many pairs as fit | `lssar` | 100.0 | - | - | 64 |",
    ]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"complete": False}, "incomplete results: lssar"),
        ({"model": {"name": "x", "attention": "relu"}}, "the table does not list the attention 'relu'"),
    ],
)
def test_bad_synthetic_results(change: dict[str, Any], message: str, synthetic_results: Path) -> None:
    path = synthetic_results / "synthetic" / "synthetic--copy+lssar--3.json"
    path.write_text(json.dumps(SYNTHETIC["copy+lssar--3"] | change))
    with pytest.raises(TableError, match=message):
        synthetic.make_tables(synthetic_results)


def test_no_synthetic_results(tmp_path: Path) -> None:
    with pytest.raises(TableError, match="has no results of `softplus-attention evaluate synthetic`"):
        synthetic.make_tables(tmp_path)
