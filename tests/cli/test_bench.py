"""``softplus-attention bench``: its tables, the file that `report` reads, and skipped sections."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from softplus_attention.cli import main
from softplus_attention.utils.timing import alternate, medians, peak_bytes

CPU = torch.device("cpu")
SMALL = ["--lengths", "32,64", "--heads", "2", "--head-dim", "16", "--repetitions", "2", "--seconds", "300"]


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bench") / "bench"
    assert main(["bench", *SMALL, "--output", str(folder)]) == 0
    return folder


@pytest.fixture(scope="module")
def data(bench: Path) -> dict[str, Any]:
    return json.loads((bench / "bench.json").read_text())


def test_measures_all_sections(bench: Path, data: dict[str, Any]) -> None:
    good = {(row["section"], row["length"], row["contender"]) for row in data["rows"] if row["status"] == "ok"}
    ours = {"sdpa", "sdpa flash", "sdpa math", "lssar p=15", "lssar learned", "lssa"}
    assert {who for section, length, who in good if (section, length) == ("op", 64)} == ours
    assert {who for section, _, who in good if section == "decode"} == ours - {"lssar learned", "lssa"}
    assert {who for section, _, who in good if section == "model"} == {"sdpa", "lssar learned"}
    for row in data["rows"]:
        if row["status"] == "ok":
            wanted = {"op": {"forward_ms", "step_ms", "forward_mib", "step_mib"}, "decode": {"forward_ms"}}
            wanted["model"] = {"step_ms", "step_mib"}
            assert all(row[name] > 0 for name in wanted[row["section"]])
    assert (bench / "bench.png").read_bytes().startswith(b"\x89PNG")


def test_unavailable_backends_are_listed(data: dict[str, Any]) -> None:
    failed = {row["contender"]: row["error"] for row in data["rows"] if row["status"] == "error"}
    assert failed.keys() == {"sdpa cudnn", "sdpa efficient"}
    assert all("does not support these inputs here" in reason for reason in failed.values())


def test_report_shows_it(bench: Path, tmp_path: Path) -> None:
    assert main(["report", str(bench), "--output", str(tmp_path / "page.html")]) == 0
    assert "lssar learned" in (tmp_path / "page.html").read_text()


def test_table_has_ratios(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["bench", "--sections", "op", *SMALL, "--output", str(tmp_path / "bench")])
    lines = capsys.readouterr().out.splitlines()
    rows = json.loads((tmp_path / "bench" / "bench.json").read_text())["rows"]
    times = {row["contender"]: row["step_ms"] for row in rows if row["status"] == "ok" and row["length"] == 64}
    (line,) = (line for line in lines if "lssar p=15" in line and "x 64" in line)
    assert f"({times['lssar p=15'] / times['sdpa']:.2f})" in line


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--sections", "op,training"], "'training' is not one of op, decode, model"),
        (["--head-dim", "512"], "--head-dim 512 is too large: the op takes up to 256"),
        (["--lengths", "0"], "`--lengths` must be whole numbers above 0"),
        (["--heads", "0"], "'0' is not 1 or more"),
        (["--output", "others"], "others contains unrelated files (thesis.tex)"),
    ],
)
def test_bad_input(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "others").mkdir()
    (tmp_path / "others" / "thesis.tex").write_text("")
    try:
        status = main(["bench", *arguments])
    except SystemExit as error:
        status = int(str(error.code))
    assert status == 2
    assert message in capsys.readouterr().err


def test_model_without_transformers(monkeypatch: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "transformers"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(
        "softplus_attention.cli.bench.find_spec", lambda name: None if name == "transformers" else object()
    )
    assert main(["bench", "--sections", "op,model", *SMALL, "--output", str(tmp_path / "bench")]) == 0
    assert "the section model is skipped: transformers is not installed" in capsys.readouterr().err


def test_peak_bytes_counts_freed_memory() -> None:
    """A temporary megabyte and a result of 4 kB."""

    def work() -> torch.Tensor:
        return torch.empty(2**18).fill_(1.0)[:1024].clone()

    assert 2**20 <= peak_bytes(work, CPU) <= 2**20 + 2**14


def test_alternate_stops_after_seconds() -> None:
    calls: list[str] = []
    works = {name: lambda name=name: calls.append(name) for name in "ab"}
    assert {name: len(x) for name, x in alternate(works, CPU, 3).items()} == {"a": 3, "b": 3}
    assert calls == list("ababab")
    assert {name: len(x) for name, x in alternate(works, CPU, 3, seconds=0).items()} == {"a": 1, "b": 1}
    assert medians({"a": [1.0, 5.0, 2.0]}) == {"a": 2.0}
