"""docs/performance.md: tables and sentences are those of the files, and say what is met by the worst of the rows."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from page_cases import assert_rewritten, words
from study_cases import imported

NAMES = (
    "attention-run", "attention-d64", "attention-d128", "attention-host", "attention-compiled", "attention-decode",
    "attention-decoding", "attention-goals", "attention-met", "attention-trained-run", "attention-trained-d64",
    "attention-trained-d128", "attention-trained", "cpu-run", "cpu-time", "cpu-memory", "training-run",
    "training-times",
)  # fmt: skip
PAGE = "By hand.\n" + "\n".join(f"<!-- begin: {name} -->\nold\n<!-- end: {name} -->" for name in NAMES) + "\n"
D64 = """\
|  | T = 1024 | ratio | T = 4096 | ratio | step MiB, T = 1024 |
| --- | ---: | ---: | ---: | ---: | ---: |
| SDPA, FlashAttention-2 | 1 / 2 | 1.00 | 2 / 4 | 1.00 | 291 |
| SDPA, cuDNN | 0.4 / 1.4 | 0.60 | 0.8 / 2.8 | 0.60 | 291 |
| LSSAR, p = 15 | 1.5 / 3 | 1.50 | 3 / 6.9 | 1.65 | 255 |
| LSSAR, powers that heads learn | 2 / 4 | 2.00 | 4 / 8 | 2.00 | 255 |
| LSSAR, p = 15, no 1 subtracted | 0.5 / 4 | 1.50 | 1 / 8 | 1.50 | 255 |
| LSSAR, powers that heads learn, no 1 subtracted | 0.6 / 4 | 1.53 | 1.2 / 8 | 1.53 | 255 |
| LSSA | 0.5 / 2 | 0.83 | 1 / 4 | 0.83 | 255 |"""
DECODE = """\
|  | 1,024 | 32,768 |
| --- | ---: | ---: |
| SDPA, cuDNN | 0.01 (1.00) | 0.2 (1.00) |
| SDPA, FlashAttention-2 | 0.01 (1.00) | 0.2 (1.00) |
| FlexAttention, softmax | 0.04 (4.00) | 0.8 (4.00) |
| LSSAR, p = 15, cache of unit keys | 0.02 (2.00) | 0.17 (0.85) |
| LSSAR, p = 15, cache of raw keys | 0.03 (3.00) | 0.4 (2.00) |"""
COMPILED = """\
|  | T = 1024 | ratio | step MiB, T = 1024 |
| --- | ---: | ---: | ---: |
| FlexAttention, LSSAR in two passes, forward only | 10 | 10.00 |  |
| reference, compiled | 12 / 18 | 10.00 | 10,116 |"""


@pytest.fixture(scope="module")
def page() -> Iterator[ModuleType]:
    with imported("attention_page") as module:
        yield module


def step(
    name: str, d: int, length: int, times: tuple[float, float], mib: float, base: float, host: float
) -> dict[str, Any]:
    """A row as the benchmark derives it; the baseline takes base forward and twice that backward."""
    (forward, backward), total = times, sum(times)
    return {
        "section": "train", "status": "ok", "contender": name, "head_dim": d, "length": length, "batch": 4,
        "step_mib": mib, "forward_host_ms": host, "backward_host_ms": 2 * host,
        "forward_ms": forward, "backward_ms": backward, "total_ms": total, "ratio": total / base / 3,
        "forward_ratio": forward / base, "step_ratio": mib / 291,
    }  # fmt: skip


def decoded(name: str, length: int, ms: float, base: float) -> dict[str, Any]:
    words = {"section": "decode", "status": "ok", "contender": name, "head_dim": 128, "length": length}
    return {**words, "forward_ms": ms, "forward_ratio": ms / base}


def trained() -> list[dict[str, Any]]:
    rows = []
    for d in (64, 128):
        for length, base, backward in ((1024, 1.0, 3.0), (4096, 2.0, 6.9)):
            near = 0.5 if (d, length) == (64, 1024) else 0.1
            rows += [
                step("sdpa flash", d, length, (base, 2 * base), 291, base, 0.125 * base),
                step("sdpa cudnn", d, length, (0.4 * base, 1.4 * base), 291, base, 0.1),
                step("lssar p=15", d, length, (1.5 * base, backward), 255, base, 0.25 * base),
                step("lssar learned", d, length, (2 * base, 4 * base), 255, base, 0.3),
                step("lssar p=15 without offset", d, length, (0.5 * base, 4 * base), 255, base, near),
                step("lssar learned without offset", d, length, (0.6 * base, 4 * base), 255, base, near + 0.125),
                step("lssa", d, length, (0.5 * base, 2 * base), 255, base, 0.1),
            ]
    return rows


def of_a_model() -> list[dict[str, Any]]:
    """The same on a model's inputs, but for LSSAR's forward, which takes a twentieth longer."""
    rows = []
    for row in trained():
        if row["contender"].endswith("without offset"):
            continue
        share = 1.05 if row["contender"] == "lssar p=15" else 1.0
        words = {"section": "trained", "commit": "fedcba9876", "inputs": f"a model of {row['head_dim']}"}
        times = {"forward_ms": share * row["forward_ms"], "forward_ratio": share * row["forward_ratio"]}
        rows.append({**row, **words, **times})
    return rows


def benchmark() -> dict[str, Any]:
    rows = [{"section": "train", "status": "error", "contender": "adasplash-2", "head_dim": 64, "length": 1024}]
    rows += trained() + of_a_model()
    for length, base, times in ((1024, 0.01, (1, 1, 4, 2, 3)), (32768, 0.2, (1, 1, 4, 0.85, 2))):
        names = ("sdpa cudnn", "sdpa flash", "flex softmax", "lssar p=15 unit keys", "lssar p=15")
        rows += [decoded(name, length, base * x, base) for name, x in zip(names, times, strict=True)]
    compiled = {"section": "compile", "commit": "0123456789"}
    rows.append(step("reference compiled", 64, 1024, (12.0, 18.0), 10116, 1.0, 0.1) | compiled | {"batch": 3})
    flex = {"status": "ok", "contender": "flex lssar p=15", "head_dim": 64, "length": 1024}
    rows.append(flex | compiled | {"forward_ms": 10.0, "forward_ratio": 10.0})
    return {
        "command": "python benchmarks/attention.py --jobs 2 --commit abcdef --output somewhere.json",
        "commit": "abcdef0123", "inputs": "random", "machine": {"gpu": "a GPU", "driver": "1.2"},
        "versions": {"torch": "2.0", "triton": "3.0"}, "rows": rows,
        "settings": {"dtype": "bfloat16", "tokens": 4096, "repetitions": 5, "baseline": "sdpa flash"},
    }  # fmt: skip


CPU = {
    "command": "python benchmarks/cpu.py --output results/cpu.json", "commit": "fedcba9876",
    "machine": {"cpu": "a CPU", "cores": 4, "capability": "AVX2"}, "versions": {"torch": "2.1", "python": "3.12"},
    "shape": {"batch": 2, "heads": 3, "head_dim": 32, "dtype": "float32", "causal": True, "power": 15},
    "time": [
        {"threads": 1, "length": 64, "direction": "forward", "chunked_ms": 30, "sdpa_ms": 20, "ratio": 1.5},
        {"threads": 2, "length": 64, "direction": "forward+backward", "chunked_ms": 9, "sdpa_ms": 4, "ratio": 2.25},
    ],
    "memory": [
        {"implementation": "chunked", "length": 64, "direction": "forward", "bytes": 3 * 2**20},
        {"implementation": "sdpa", "length": 128, "direction": "forward+backward", "bytes": 5 * 2**20},
    ],
}  # fmt: skip
for timed in CPU["time"]:
    timed["repetitions"] = 7
MODEL = {
    "parameters": 124_000_000, "sequence_length": 1024, "micro_batch": 8, "peak_tflops": 989.0, "optimizer": "adamw",
    "loss_function": "chunked", "compile": True, "machine": {"gpu": "a GPU"}, "tokens_per_second": 1000.0,
    "peak_memory_gib": 2.5,
}  # fmt: skip
TRAINING = {
    "command": "python benchmarks/training.py --steps 3 --output x.json", "commit": "13579bdf00",
    "versions": {"torch": "2.0", "triton": "3.0"},
    "rows": [
        MODEL | {"attention": "softmax", "step_ms": 100, "mfu": 0.5, "mfu_causal": 0.45, "time_to_softmax": 1},
        MODEL | {"attention": "lssar", "step_ms": 125, "mfu": 0.4, "mfu_causal": 0.36, "time_to_softmax": 1.25},
    ],
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path, page: ModuleType) -> Path:
    for name, found in ((page.FILE, benchmark()), (page.CPU, CPU), (page.TRAINING, TRAINING)):
        (tmp_path / name).write_text(json.dumps(found))
    (tmp_path / "page.md").write_text(PAGE)
    return tmp_path


def change(folder: Path, page: ModuleType, contender: str, section: str = "train", **values: float) -> None:
    """All rows of a contender."""
    path = folder / page.FILE
    found = json.loads(path.read_text())
    for row in found["rows"]:
        if (row["section"], row["contender"]) == (section, contender):
            row.update(values)
    path.write_text(json.dumps(found))


def test_rewriting_and_checking(folder: Path, page: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    text = assert_rewritten(page, folder, capsys)
    for block in (D64, DECODE, COMPILED):
        assert f"\n{block}\n<!-- end" in text
    assert "adasplash" not in text


@pytest.mark.parametrize(
    "line",
    [
        "| LSSAR forward + backward, D = 128, T from 4096 | 1.65 | 1.65 | 1.3 | 0.95 | no |",
        "| the same at T = 1024, both D | 1.50 | 1.50 | 1.7 | 1.4 | yes |",
        "| LSSAR forward alone, D = 64, all T | 1.50 | 1.58 | 1.6 | 1.2 | yes |",
        "| LSSA forward, D = 64, all T | 0.50 | 0.50 | 0.85 | 0.7 | goal |",
        "| memory of a training step | 0.88 | 0.88 | 1.5 | 1.3 | goal |",
        "| decode from 32K keys, unit keys / the fastest SDPA | 0.85 |  | 1.2 | 0.9 | goal |",
        "| LSSAR forward + backward / compiled reference, T = 1024 | 0.11 |  | 0.2 | 0.1 | yes |",
    ],
)
def test_what_is_met(line: str, folder: Path, page: ModuleType) -> None:
    assert line in page.blocks_of(folder)["attention-goals"]


def test_a_file_that_is_missing(folder: Path, page: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / page.FILE).unlink()
    assert page.main(words(folder)) == 2
    assert "attention-h200.json is not there" in capsys.readouterr().err
    assert (folder / "page.md").read_text() == PAGE


def test_a_file_of_other_sections(folder: Path, page: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    path = folder / page.FILE
    found = json.loads(path.read_text())
    path.write_text(json.dumps(found | {"rows": [row for row in found["rows"] if row["section"] != "decode"]}))
    assert page.main(words(folder)) == 2
    assert "has no rows for sdpa cudnn of decode, sdpa flash of decode" in capsys.readouterr().err


SAID = {
    "attention-run": [
        "`python benchmarks/attention.py --jobs 2`, data in [results/attention-h200.json]",
        "a GPU, driver 1.2, torch 2.0, triton 3.0, commit abcdef0. bfloat16, causal, B·T = 4,096 tokens",
        "medians of 5 rounds",
        "Of other runs are `compile` at 0123456 and `trained` at fedcba9: `benchmarks/figures.py --fill`",
    ],
    "attention-host": [
        "For p = 15 it is 0.25 to 0.50 ms a forward and 0.50 to 1.00 a backward, where FlashAttention-2's are 0.12 to "
        "0.25 and 0.25 to 0.50; for powers that heads learn 0.30 and 0.60.",
        "takes the host 0.50 ms and the GPU 0.50, and 0.62 and 0.60 with powers that heads learn.",
    ],
    "attention-met": [
        'Seven of the ten limits ("at most") are met, and four goals ("goal": LSSA\'s forward at D = 128, LSSA\'s '
        "forward at D = 64, memory, decoding).",
        "Missed is the training step at D = 128, by 26.9% at T = 4096 (1.650).",
        "Missed is the training step at D = 64, by 3.1% at T = 4096 (1.650).",
        "Missed is LSSAR's forward at D = 128, by 15.4% at T = 4096 (1.500) and by 15.4% at T = 1024 (1.500).",
        "take 0.6 of FlashAttention-2's time.",
    ],
    "attention-trained-run": ["layer. D = 64: a model of 64. D = 128: a model of 128. Heads and sequences"],
    "attention-trained": [
        "takes 100 to 105% of what it takes with random vectors, and FlashAttention-2 100 to 100%;",
        "five of the eight that are about training hold for these ratios too; the training step at D = 128 misses its "
        "own by 26.9% at T = 4096 (1.650); ",
        "LSSAR's forward at D = 128 misses its own by 21.2% at T = 4096 (1.575) and by",
    ],
    "attention-decoding": ["Raw keys, whose norms are computed anew at every step, take 2.0 times SDPA's time there."],
    "cpu-run": [
        "`python benchmarks/cpu.py`, data in [results/cpu.json](../results/cpu.json): a CPU, 4 cores, AVX2, torch 2.1, "
        "Python 3.12, commit fedcba9. B = 2, H = 3, D = 32, float32, causal, p = 15; medians of 7 calls"
    ],
    "cpu-time": ["| 1 | 64 | forward | 30 | 20 | 1.50 |", "| 2 | 64 | forward + backward | 9 | 4 | 2.25 |"],
    "cpu-memory": ["| 64 | 3 |  |  |  |  |  |", "| 128 |  |  |  | 5 |  |  |"],
    "training-run": [
        "GPT-2 small (124M parameters) at 1024 tokens on one a GPU",
        "micro-batches of 8 sequences. `python benchmarks/training.py --steps 3`, commit 13579bd, torch 2.0",
        "over 989 TFLOP/s, the causal half not taken off; 45.0% and 36.0% with it off.",
    ],
    "training-times": ["| LSSAR, power 15 | 125.0 ms | 1,000 | 40.0% | 2.5 GiB | 1.25 |"],
}


@pytest.mark.parametrize("name", SAID)
def test_sentences_and_tables(name: str, folder: Path, page: ModuleType) -> None:
    text = page.blocks_of(folder)[name]
    for words_of_it in SAID[name]:
        assert words_of_it in text


def row_of(row: dict[str, Any]) -> tuple[str, str, int]:
    return row["section"], row["contender"], row["head_dim"]


def test_a_limit_that_is_met_somewhere(folder: Path, page: ModuleType) -> None:
    path = folder / page.FILE
    found = json.loads(path.read_text())
    ratios = iter((0.51, 0.84, 0.88))
    for row in [row for row in found["rows"] if row_of(row) == ("train", "lssa", 64)]:
        row["forward_ratio"] = next(ratios)
    found["rows"].append(found["rows"][0] | step("lssa", 64, 16384, (1.0, 1.0), 1, 1, 1) | {"forward_ratio": 0.867})
    path.write_text(json.dumps(found))
    text = page.blocks_of(folder)["attention-met"]
    assert "Missed is LSSA's forward at D = 64, by 2.0% at T = 16384 (0.867); at T = 1024 it is met (0.510); at" in text


def test_rows_of_other_runs(folder: Path, page: ModuleType) -> None:
    path = folder / page.FILE
    found = json.loads(path.read_text())
    for row in found["rows"]:
        if row["section"] == "decode" and row["length"] == 1024:
            row["commit"] = "fedcba9876"
    path.write_text(json.dumps(found))
    text = page.blocks_of(folder)["attention-run"]
    assert "Of other runs are `compile` at 0123456, `decode`, T = 1,024, at fedcba9 and `trained` at fedcba9:" in text


def test_every_limit_is_met(folder: Path, page: ModuleType) -> None:
    change(folder, page, "lssar p=15", ratio=1.29, forward_ratio=1.2)
    text = page.blocks_of(folder)["attention-met"]
    assert text.startswith('All ten limits ("at most") are met')
    assert "Missed" not in text
    assert "Within 2% of its limit, and two machines differ by as much: the training step at D = 128 (1.290)." in text


def test_a_goal_of_decoding_that_is_missed(folder: Path, page: ModuleType) -> None:
    assert "Decoding misses" not in page.blocks_of(folder)["attention-met"]
    change(folder, page, "lssar p=15 unit keys", "decode", forward_ratio=0.99)
    text = page.blocks_of(folder)["attention-met"]
    assert "Decoding misses its goal of 0.9 by 10.0% at 32,768 keys (0.990)." in text


@pytest.mark.parametrize(
    ("contender", "section", "values", "claim"),
    [
        ("lssar p=15 unit keys", "decode", {"forward_ratio": 1.03}, "takes no longer than softmax's"),
        ("lssar learned", "train", {"commit": "another"}, "the times of training are of one run"),
        ("lssar learned", "train", {"forward_host_ms": 9.0}, "no row of lssar learned waits for the host"),
        ("lssar p=15", "trained", {"forward_ms": 1.0}, "as long on a model's inputs as on random ones"),
        ("lssa", "train", {"ratio": 0.5}, "cuDNN is the fastest at D = 64, T = 1024"),
    ],
)
def test_a_claim_that_no_longer_holds(
    contender: str,
    section: str,
    values: dict[str, Any],
    claim: str,
    folder: Path,
    page: ModuleType,
    capsys: pytest.CaptureFixture[str],
) -> None:
    change(folder, page, contender, section, **values)
    assert page.main(words(folder)) == 2
    error = capsys.readouterr().err
    assert "the results do not bear what pages/attention_words.py says" in error
    assert claim in error
    assert (folder / "page.md").read_text() == PAGE


def test_models_that_were_not_trained_alike(folder: Path, page: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [TRAINING["rows"][0], TRAINING["rows"][1] | {"micro_batch": 16}]
    (folder / page.TRAINING).write_text(json.dumps(TRAINING | {"rows": rows}))
    assert page.main(words(folder)) == 2
    assert "pages/training_tables.py says: the_training_run: all models were trained alike" in capsys.readouterr().err


def test_rows_without_the_host(folder: Path, page: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    path = folder / page.FILE
    found = json.loads(path.read_text())
    for row in found["rows"]:
        row.pop("forward_host_ms", None)
    path.write_text(json.dumps(found))
    assert page.main(words(folder)) == 2
    assert "speaks of what is not there: forward_host_ms of lssar p=15 at D 64, T 1024" in capsys.readouterr().err
