"""benchmarks/attention.py and its modules: the command, checks of contenders, inputs, tables and figures."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from softplus_attention import softplus_attention

ROOT = Path(__file__).parents[2]
SECTIONS = ["train", "trained", "lengths", "decode", "memory", "compile"]


def python(*arguments: str, path: str = "", cuda: bool = False) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(x for x in (path, str(ROOT / "src")) if x)}
    environment |= {"OMP_WAIT_POLICY": "passive"} | ({} if cuda else {"CUDA_VISIBLE_DEVICES": ""})
    command = [sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=900, cwd=ROOT, env=environment)


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess[str], Path]:
    folder = tmp_path_factory.mktemp("results")
    output, trained = folder / "new" / "attention.json", folder / "trained.pt"
    torch.save({**{x: torch.randn(2, 2, 100, 64) for x in "qkv"}, "about": "a small model"}, trained)
    options = ["--quick", "--repetitions", "1", "--jobs", "2", "--trained", str(trained), "--output", str(output)]
    return python("benchmarks/attention.py", *options), output


@pytest.fixture(scope="module")
def data(quick: tuple[subprocess.CompletedProcess[str], Path]) -> dict[str, Any]:
    return json.loads(quick[1].read_text())


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    yield importlib.import_module("attention")
    for name in ("attention", "contenders", "figures", "options", "trained_inputs"):
        sys.modules.pop(name, None)


@pytest.fixture
def inputs(benchmark: ModuleType) -> Any:
    cpu = {"device": "cpu", "dtype": torch.float32, "baseline": "sdpa math", "repetitions": 1}
    return benchmark.Inputs(benchmark.Settings(**{**benchmark.QUICK, **cpu}))


def part(name: str) -> ModuleType:
    """Another module of the benchmark; the fixture has put its folder on the path."""
    return importlib.import_module(name)


def measured(benchmark: ModuleType, inputs: Any, attend: Any, **options: Any) -> dict[str, Any]:
    """The row of one contender at one shape."""
    contender = benchmark.Contender("tried", attend, **{"truth": part("contenders").ours(15, "reference"), **options})
    (row,) = benchmark.measure_section("train", inputs, [contender], benchmark.fill_times, [(64, 64)])
    return row


def lssar(q: Tensor, k: Tensor, v: Tensor, power: int = 15) -> Tensor:
    return softplus_attention(q, k, v, power=power, is_causal=True)


class TestCommand:
    def test_succeeds(self, quick: tuple[subprocess.CompletedProcess[str], Path]) -> None:
        assert quick[0].returncode == 0, quick[0].stderr
        assert "compiled lssar p=15 D=64" in quick[0].stderr
        assert "train: lssar p=15 D=64 T=64" in quick[0].stderr

    @pytest.mark.parametrize(
        "name", ["command", "date", "commit", "machine", "versions", "settings", "seconds", "flops"]
    )
    def test_records_provenance(self, data: dict[str, Any], name: str) -> None:
        assert data[name]
        assert data["complete"] is True

    def test_names_machine_and_versions(self, data: dict[str, Any]) -> None:
        assert set(data["machine"]) == {"gpu", "driver", "system"}
        assert data["versions"]["torch"] == torch.__version__
        assert data["command"].startswith("python benchmarks/attention.py --quick")

    @pytest.mark.parametrize("section", [*SECTIONS, "million"])
    def test_has_rows_of_every_section(self, data: dict[str, Any], section: str) -> None:
        assert [row for row in data["rows"] if row["section"] == section]

    def test_measures_ours_and_the_baseline(self, data: dict[str, Any]) -> None:
        rows = {row["contender"]: row for row in data["rows"] if row["section"] == "train" and row["length"] == 64}
        for name in (
            "sdpa math",
            "lssar p=15",
            "lssar learned",
            "lssar learned without offset",
            "lssa",
            "reference p=15",
        ):
            assert rows[name]["status"] == "ok", rows[name]
            assert rows[name]["forward_ms"] > 0
            assert rows[name]["total_ms"] == rows[name]["forward_ms"] + rows[name]["backward_ms"]
            assert rows[name]["total_tflops"] > 0
        ratio = rows["lssar p=15"]["total_ms"] / rows["sdpa math"]["total_ms"]
        assert rows["lssar p=15"]["ratio"] == pytest.approx(ratio)

    def test_rows_name_their_inputs(self, data: dict[str, Any]) -> None:
        """The section trained uses inputs of the trained model up to their length; other sections random ones."""
        rows = [row for row in data["rows"] if row["section"] == "trained"]
        assert {row["inputs"] for row in rows} == {"a small model"}
        assert {row["length"] for row in rows} == {64}
        assert all(row["ratio"] > 0 for row in rows if row["status"] == "ok")
        assert not [row for row in data["rows"] if row["section"] != "trained" and "inputs" in row]

    def test_missing_package_is_an_error_row(self, data: dict[str, Any]) -> None:
        (row,) = [row for row in data["rows"] if row["contender"] == "adasplash-2"][:1]
        if row["status"] == "error":
            assert "adasplash" in row["error"]
            assert "forward_ms" not in row

    def test_decodes(self, data: dict[str, Any]) -> None:
        rows = [row for row in data["rows"] if row["section"] == "decode" and row["status"] == "ok"]
        assert {"lssar p=15", "lssar p=15 unit keys", "sdpa math"} <= {row["contender"] for row in rows}
        assert all(row["timing"] == "plain calls" and row["forward_ratio"] > 0 for row in rows)

    def test_prints_a_short_table(self, quick: tuple[subprocess.CompletedProcess[str], Path]) -> None:
        table = quick[0].stdout
        for name in ("sdpa math", "lssar p=15", "lssar p=3", "lssa", "adasplash-2", "flex softmax", "ratio"):
            assert name in table
        assert len(table) < 12000

    def test_stops_at_the_time_limit(self, tmp_path: Path) -> None:
        output = tmp_path / "attention.json"
        result = python("benchmarks/attention.py", "--quick", "--time-limit", "0", "--output", str(output))
        assert result.returncode == 0, result.stderr
        written = json.loads(output.read_text())
        assert written["complete"] is False
        assert len(written["rows"]) == 1
        assert "not complete" in result.stdout

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["--quick", "--sections", "train,speed"], "no section speed"),
            (["--quick", "--sections", "trained"], "needs --trained FILE"),
            ([], "only --quick runs on a CPU"),
        ],
    )
    def test_bad_arguments(self, arguments: list[str], message: str) -> None:
        result = python("benchmarks/attention.py", *arguments)
        assert result.returncode == 2
        assert message in result.stderr


@pytest.mark.gpu
def test_runs_on_cuda(tmp_path: Path) -> None:
    output = tmp_path / "attention.json"
    result = python("benchmarks/attention.py", "--quick", "--repetitions", "1", "--output", str(output), cuda=True)
    assert result.returncode == 0, result.stderr
    rows = json.loads(output.read_text())["rows"]
    assert not [row for row in rows if row["status"] == "wrong"]
    assert not [row for row in rows if row["status"] == "error" and row["contender"].startswith("lss")]
    assert all(row["step_mib"] > 0 for row in rows if row["section"] == "memory" and row["status"] == "ok")


class TestCheck:
    def test_correct_contender_is_timed(self, benchmark: ModuleType, inputs: Any) -> None:
        row = measured(benchmark, inputs, lssar)
        assert row["status"] == "ok", row["error"]
        assert row["forward_ms"] > 0

    @pytest.mark.parametrize(
        "attend",
        [
            pytest.param(lambda q, k, v: lssar(q, k, v, power=14), id="another power"),
            pytest.param(lambda q, k, v: lssar(q, k, v) * (1 + 1e-4), id="a little too large"),
            pytest.param(lambda q, k, v: lssar(q, k.detach() + 0 * k, v), id="right forward, wrong gradient"),
            pytest.param(lambda q, k, v: lssar(q, k, v) * float("nan"), id="NaN"),
        ],
    )
    def test_wrong_contender_is_not_timed(self, benchmark: ModuleType, inputs: Any, attend: Any) -> None:
        row = measured(benchmark, inputs, attend)
        assert row["status"] == "wrong"
        assert "allowed" in row["error"]
        assert not [name for name in row if name.endswith(("_ms", "_mib"))]
        printed = benchmark.table({**benchmark.header(inputs.settings), "rows": [row]})
        assert "| tried | wrong: T=" in printed

    def test_failing_contender_is_an_error_row(self, benchmark: ModuleType, inputs: Any) -> None:
        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            raise RuntimeError("out of luck\nand more lines")

        row = measured(benchmark, inputs, attend)
        assert (row["status"], row["error"]) == ("error", "RuntimeError: out of luck")

    def test_failing_backward_keeps_forward(self, benchmark: ModuleType, inputs: Any) -> None:
        row = measured(benchmark, inputs, lambda q, k, v: lssar(q, k, v).detach(), truth=None)
        assert row["status"] == "error"
        assert row["forward_ms"] > 0
        assert "backward_ms" not in row

    @pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
    def test_two_passes_of_flex_attention_are_lssar(self, benchmark: ModuleType, inputs: Any) -> None:
        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return part("contenders").two_passes(q, k, v, part("contenders").causal_blocks(q.shape[2], q.device), 15)

        q, k, v, _ = (x.detach() for x in inputs(2, 2, 37, 64))
        torch.testing.assert_close(attend(q, k, v), lssar(q, k, v), rtol=1e-4, atol=1e-5)


class TestInputs:
    @pytest.mark.parametrize("kind", ["pt", "safetensors"])
    def test_from_file(self, benchmark: ModuleType, inputs: Any, tmp_path: Path, kind: str) -> None:
        stored = {"q": torch.randn(2, 4, 50, 64), "k": torch.randn(2, 2, 50, 64), "v": torch.randn(2, 2, 50, 64)}
        if kind == "pt":
            torch.save({**stored, "about": "a model"}, tmp_path / "inputs.pt")
        else:
            pytest.importorskip("safetensors.torch").save_file(stored, tmp_path / "inputs.safetensors")
        given = benchmark.read_inputs(str(tmp_path / f"inputs.{kind}"), inputs.settings)
        q, k, v, grad = given(3, 6, 40, 64)
        assert {x.shape for x in (q, k, v, grad)} == {torch.Size((3, 6, 40, 64))}
        assert torch.equal(q[2, 5], stored["q"][0, 1, :40])
        assert torch.equal(k[1, 3], stored["k"][1, 1, :40])
        assert given.about == ("a model" if kind == "pt" else "inputs.safetensors")
        assert given.fits(64, 50)
        assert not given.fits(64, 51)
        assert not given.fits(128, 40)

    @pytest.mark.parametrize(
        ("shapes", "message"),
        [
            ([(2, 3)], "a dict of q, k, v"),
            ([], "a dict of q, k, v"),
            ([(1, 4, 128, 64), (1, 3, 128, 64), (1, 3, 128, 64)], "key heads that divide q's"),
            ([(1, 4, 128, 64), (1, 4, 100, 64), (1, 4, 100, 64)], "with equal T and D"),
        ],
    )
    def test_bad_file(
        self, benchmark: ModuleType, inputs: Any, tmp_path: Path, shapes: list[Any], message: str
    ) -> None:
        path = tmp_path / "inputs.pt"
        stored = {name: torch.randn(shape) for name, shape in zip("qkv", shapes, strict=False)}
        torch.save(stored or [torch.randn(2)], path)
        with pytest.raises(SystemExit, match=message):
            benchmark.read_inputs(str(path), inputs.settings)
        with pytest.raises(SystemExit, match="no such file"):
            benchmark.read_inputs(str(tmp_path / "other.pt"), inputs.settings)

    def test_no_matching_shape(self, tmp_path: Path) -> None:
        torch.save({x: torch.randn(1, 2, 128, 96) for x in "qkv"}, tmp_path / "inputs.pt")
        result = python("benchmarks/attention.py", "--quick", "--trained", str(tmp_path / "inputs.pt"))
        assert result.returncode == 1
        assert "fit none of the timed shapes" in result.stderr

    def test_two_models_of_one_head_dimension(self, benchmark: ModuleType, inputs: Any) -> None:
        """Each has ratios to its own baseline, and its own table."""
        data = {**benchmark.header(inputs.settings), "rows": []}
        for about, base in (("model A", 1.0), ("model B", 2.0)):
            for name, share in (("sdpa math", 1.0), ("lssa", 0.5)):
                row = {"section": "trained", "contender": name, "inputs": about, "status": "ok", "note": ""}
                row |= {"batch": 1, "heads": 1, "length": 64, "head_dim": 64}
                data["rows"].append(row | {"forward_ms": base * share, "backward_ms": base * share})
        benchmark.derive(data)
        assert [row["ratio"] for row in data["rows"]] == [1, 0.5, 1, 0.5]
        text = benchmark.table(data)
        for about, cell in (("model A", "| lssa | 1 (0.5) |"), ("model B", "| lssa | 2 (0.5) |")):
            assert cell in text.partition(about)[2]

    def test_trained_inputs(self, benchmark: ModuleType, inputs: Any, tmp_path: Path) -> None:
        """benchmarks/trained_inputs.py writes files that the benchmark reads."""
        arguments = ["--seconds", "0", "--dim", "128", "--layers", "2", "--length", "100", "--train-length", "32"]
        command = ["benchmarks/trained_inputs.py", "LICENSE", "docs", "--output", str(tmp_path), "--batch", "2"]
        result = python(*command, *arguments)
        assert result.returncode == 0, result.stderr
        for head_dim, heads in ((64, 2), (128, 1)):
            path = tmp_path / f"trained-d{head_dim}.pt"
            assert str(path) in result.stdout
            stored = torch.load(path, weights_only=True)
            assert "held out" in stored["about"]
            assert {stored[x].shape for x in "qkv"} == {torch.Size((2, heads, 100, head_dim))}
            assert {stored[x].dtype for x in "qkv"} == {torch.bfloat16}
            given = benchmark.read_inputs(str(path), inputs.settings)
            assert given.fits(head_dim, 100)
            q, k, v, _ = (x.detach() for x in given(2, 2, 100, head_dim))
            assert lssar(q, k, v).isfinite().all()

    def test_need_enough_text(self, tmp_path: Path) -> None:
        result = python("benchmarks/trained_inputs.py", "README.md", "--output", str(tmp_path))
        assert result.returncode == 2
        assert "too few" in result.stderr


def full_run(benchmark: ModuleType, inputs: Any) -> dict[str, Any]:
    """The largest results file: every shape of a full run, with made-up numbers."""
    settings = benchmark.Settings()
    common = {"batch": 8, "heads": 12, "status": "ok", "note": "B=4 for memory", "error": "", "timing": "cuda graph"}
    common |= {"inputs": "a model", "forward_ms": 123.456, "backward_ms": 234.567, "finite": True, "kv_heads": 8}
    common |= {"forward_mib": 12345.6, "kept_mib": 12345.6, "step_mib": 12345.6}
    names = {section: benchmark.contenders(settings) for section in ("train", "trained", "memory")}
    names |= {"lengths": names["train"][:3], "compile": benchmark.compiled_contenders()}
    names |= {"million": names["lengths"], "decode": benchmark.decode_contenders(settings)}
    shapes = dict.fromkeys(("train", "trained", "memory", "compile"), settings.shapes)
    shapes |= {"lengths": [(64, x) for x in settings.long_lengths], "million": [(64, settings.million)]}
    shapes |= {"decode": [(128, x) for x in settings.contexts]}
    rows = [
        {**common, "section": section, "contender": contender.name, "head_dim": head_dim, "length": length}
        for section, chosen in names.items()
        for head_dim, length in shapes[section]
        for contender in chosen
    ]
    rows[1] |= {"status": "error", "error": "RuntimeError: " + "long " * 60}
    data = {**benchmark.header(inputs.settings), "baseline": "sdpa flash", "complete": True, "rows": rows}
    benchmark.derive(data)
    return data


class TestReport:
    def test_table_of_a_full_run_is_not_truncated(self, benchmark: ModuleType, inputs: Any) -> None:
        text = benchmark.table(full_run(benchmark, inputs))
        assert len(text) < 12000
        assert "truncated;" not in text
        assert "D=128 T=16384" in text

    def test_ratios_are_per_sequence(self, benchmark: ModuleType, inputs: Any) -> None:
        data = full_run(benchmark, inputs)
        base, other = data["rows"][0], data["rows"][2]
        other |= {"batch": base["batch"] // 2}
        benchmark.derive(data)
        assert other["ratio"] == pytest.approx(2)
        flops = 2 * 8 * 12 * 64 * base["length"] ** 2
        assert base["forward_tflops"] == pytest.approx(flops / (base["forward_ms"] * 1e-3) / 1e12)

    def test_figures_need_matplotlib(
        self, quick: tuple[subprocess.CompletedProcess[str], Path], tmp_path: Path
    ) -> None:
        (tmp_path / "matplotlib.py").write_text("raise ImportError('none')")
        result = python("benchmarks/figures.py", str(quick[1]), path=str(tmp_path))
        assert result.returncode == 1
        assert "figures need matplotlib" in result.stderr

    def test_table_from_file(self, quick: tuple[subprocess.CompletedProcess[str], Path]) -> None:
        assert python("benchmarks/figures.py", str(quick[1]), "--table").stdout == quick[0].stdout

    def test_figures_are_drawn(self, benchmark: ModuleType, inputs: Any, tmp_path: Path) -> None:
        matplotlib = pytest.importorskip("matplotlib")
        matplotlib.use("Agg")
        from matplotlib import pyplot

        figures = importlib.import_module("figures")
        for figure in figures.FIGURES:
            paths = figures.draw(figure, full_run(benchmark, inputs), tmp_path, pyplot)
            assert [path.suffix for path in paths] == [".svg", ".png"]
            assert all(path.stat().st_size > 1000 for path in paths)

    def test_figures_show_every_head_dimension(self, benchmark: ModuleType, inputs: Any) -> None:
        figures, data = importlib.import_module("figures"), full_run(benchmark, inputs)
        time, *_ = figures.FIGURES
        shown = figures.panels(time, data)
        assert list(shown) == [64, 128]
        assert {row["section"] for row in shown[64]} == {"lengths"}
        assert {row["section"] for row in shown[128]} == {"train"}
        data["rows"] = [row for row in data["rows"] if row["section"] == "decode"]
        assert figures.panels(time, data) == {}

    def test_fill_from_an_earlier_run(self, data: dict[str, Any], tmp_path: Path) -> None:
        """Fills missing sections and shapes that lack a contender; the added rows keep their commit."""

        def shape(row: dict[str, Any]) -> tuple[Any, ...]:
            return row["section"], row.get("head_dim"), row.get("length")

        new, old = tmp_path / "new.json", tmp_path / "old.json"
        cut = next(row for row in data["rows"] if row["section"] == "train" and row["status"] == "ok")
        found = [row for row in data["rows"] if row is not cut and row["section"] != "decode"]
        new.write_text(json.dumps(data | {"commit": "new", "rows": found}))
        old.write_text(json.dumps(data | {"commit": "old", "date": "then"}))
        fill = ("benchmarks/figures.py", str(new), "--fill", str(old), "--sections")
        assert python(*fill, "train,decode,memory").returncode == 0
        rows = json.loads(new.read_text())["rows"]
        assert len(rows) == len(data["rows"])
        for row in rows:
            older = row["section"] == "decode" or shape(row) == shape(cut)
            assert row.get("commit") == ("old" if older else None)
        assert {row.get("commit") for row in rows if row["section"] == "memory"} == {None}
        result = python(*fill, "nothing")
        assert result.returncode == 2
        assert "the earlier results have no rows of nothing" in result.stderr
        assert "must be given together" in python(*fill[:-1]).stderr
        old.write_text(json.dumps(data | {"versions": {"torch": "0.1"}}))
        assert "differ in versions: {'torch': '0.1'}, not" in python(*fill, "decode").stderr

    def test_figures_of_the_docs(self, tmp_path: Path) -> None:
        """The command of docs/performance.md."""
        pytest.importorskip("matplotlib")
        result = python("benchmarks/figures.py", "results/attention-h200.json", "--output", str(tmp_path))
        assert result.returncode == 0, result.stderr
        for drawn in ("attention-time", "attention-tflops", "attention-memory", "decode-time"):
            assert (tmp_path / f"{drawn}.svg").stat().st_size > 1000


def test_options_keep_rows_after_an_error(benchmark: ModuleType, tmp_path: Path) -> None:
    """With command, versions and commit."""
    options, figures = importlib.import_module("options"), importlib.import_module("figures")

    def measure(option: Any, kind: str, head_dim: int) -> dict[str, Any]:
        if kind == "broken":
            raise RuntimeError("no more memory")
        return {"option": str(option), "kernels": kind, "head_dim": head_dim, "forward_ms": 1.5, "error": ""}

    cases = [(options.OPTIONS[0], kind, 64) for kind in ("hopper", "plain", "broken")]
    output = tmp_path / "new" / "options.json"
    with pytest.raises(RuntimeError, match="no more memory"):
        options.record(cases, measure, output, figures.made_by("benchmarks/options.py", "cpu", "0123abc"))
    found = json.loads(output.read_text())
    assert [row["kernels"] for row in found["rows"]] == ["hopper", "plain"]
    assert (found["commit"], found["tokens"]) == ("0123abc", options.TOKENS)
    assert "benchmarks/options.py" in found["command"]
    assert found["versions"]["torch"] == torch.__version__


def test_options_match_the_reference(benchmark: ModuleType, inputs: Any) -> None:
    """Windows, packed documents and learned powers of benchmarks/options.py, on the CPU path."""
    options = importlib.import_module("options")
    clear = torch.ones(1, 1, 96, 1, dtype=torch.bool)
    for option in options.OPTIONS:
        small = options.Option(96, option.power, option.window and 32, option.packed)
        q, k, v, grad = inputs(1, 2, 96, 64)
        ours, truth = (options.softplus(small, impl) for impl in ("chunked", "reference"))
        assert options.disagreement(ours, truth, (q, k, v), grad, True, clear) == "", option
        alone = softplus_attention(q, k, v, power=1, is_causal=True, impl="reference")
        if option.power == "1" or option.packed or option.window:
            same = torch.equal(options.softplus(small, "reference")(q, k, v), alone)
            assert same == (option.power == "1" and not option.packed and not option.window), option
    bounds, starts, longest = options.documents(32768, torch.device("cpu"))
    assert (bounds[0], bounds[-1], longest) == (0, 32768, int(bounds.diff().max()))
    assert 16 <= int(bounds.diff()[:-1].min()) <= longest <= 4096
    assert torch.equal(starts.unique(), bounds[:-1])


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests the error without a GPU")
def test_options_need_a_gpu() -> None:
    result = python("benchmarks/options.py")
    assert result.returncode == 1
    assert "needs a GPU of compute capability 9.0" in result.stderr


def test_one_step_for_a_profiler() -> None:
    result = python("benchmarks/one_step.py", "--device", "cpu", "--tokens", "32", "--heads", "2", "--power", "3")
    assert result.returncode == 0, result.stderr
    norms = dict(zip(("dq", "dk", "dv"), result.stdout.split()[1::2], strict=True))
    assert all(float(norm) > 0 for norm in norms.values()), norms
