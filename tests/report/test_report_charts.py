"""Charts, tables and notes of the report: titles, series, captions and numbers for given results."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest
import report_results
from report_results import blocks_in, csv_of, figures_in, frame, render_html, write_results

from softplus_attention.charts.draw import picture
from softplus_attention.charts.model import LineChart, Series, aligned_rows, percent_words, text_rows
from softplus_attention.evaluation.measures.loaded import LoadedResult, tell_apart
from softplus_attention.report import build
from softplus_attention.report.discovery import find_results

REPOSITORY = Path(__file__).parents[2]


def test_stability(tmp_path):
    runs = [
        report_results.stability(0.03, [5, "nan"], None, "stopped"),
        report_results.stability(0.001, [9, 5, 4, 3, 2, 1], 20.0),
        report_results.stability(0.01, [9, "inf"], 700.0),
    ]
    report_results.write(tmp_path, {f"{number}.json": run for number, run in enumerate(runs)})
    page, _ = render_html(tmp_path)
    figures = json.loads(re.search(r'id="report-data">(.*?)</script>', page, re.S)[1])["figures"].values()
    loss, score = (next(f for f in figures if title in f["title"]) for title in ("Loss by", "Largest score"))
    assert (loss["series"][0]["x"], loss["series"][0]["y"]) == ([0.001, 0.01, 0.03], [3, None, None])
    assert score["series"][0]["y"] == [20, 700, None]


def test_log_axes_have_plain_numbers(tmp_path):
    runs = {f"{rate}.json": report_results.stability(rate, [3], score) for rate, score in ((0.001, 5.0), (0.1, 5000.0))}
    report_results.write(tmp_path, runs)
    build.write_report(tmp_path, tmp_path / "page.html")
    (drawing,) = (tmp_path / "page-files").glob("*largest-score*.svg")
    assert "mathdefault" not in drawing.read_text()
    assert ">1000</text>" in drawing.read_text()


def test_csv_has_numbers_and_no_formulas():
    chart = LineChart("t", "x", "y", [Series("=cmd()", [1, 2], [0.5, None], [0.1, None]), Series("b", [2], [-3.25])])
    text = csv_of(chart)
    assert text == "x,'=cmd(),'=cmd(): standard error,b\n1,0.5,0.1,\n2,,,-3.25\n"


def test_study_run(tmp_path):
    row = {"length": 64, "loss": 2.5, "standard_error": 0.1, "control": {"gain": 0.25, "standard_error": 0.01}}
    run = {"arm": "lssar-p3", "size": "10m", "seed": 3, "config": {"sequence_length": 32}, "command": "runs/study.py"}
    run["evaluation"] = {"lengths": {"lengths": [{**row, "length": 32, "control": None}, row]}}
    (tmp_path / "10m-lssar-p3-seed3.json").write_text(json.dumps(run))
    page, problems = render_html(tmp_path)
    assert problems == []
    assert "Study, 10m: gain from far context, rotary positions in every layer" in page
    assert "mix of layers" not in page
    assert "lssar-p3, seed 3" in page
    assert "0.25" in page
    row["loss"] = "low"
    (tmp_path / "10m-lssar-p3-seed3.json").write_text(json.dumps(run))
    (tmp_path / "other.json").write_text(json.dumps({**run, "seed": 4, "evaluation": {"lengths": {"lengths": []}}}))
    _, problems = render_html(tmp_path)
    assert problems == [("10m-lssar-p3-seed3.json", 'a result of kind study, but `loss` must be a number, got "low"')]


def test_study_charts_by_kind_of_layers(tmp_path):
    """Each kind has its own chart, and no two lines of a chart look the same."""
    row = {"length": 32, "loss": 2.5, "standard_error": 0.1, "control": None}
    for kind, count in {None: 10, 3: 12}.items():
        config = {"sequence_length": 32, "global_every": kind}
        run = {"arm": f"every {kind}", "size": "10m", "config": config, "command": "runs/study.py"}
        run["evaluation"] = {"lengths": {"lengths": [row]}}
        for seed in range(count):
            (tmp_path / f"{kind}-{seed}.json").write_text(json.dumps({**run, "seed": seed}))
    _, section = build.all_sections(find_results(tmp_path))
    charts = {chart.title: chart.series for chart in section.figures()}
    rotary, mix = ({f"every {kind}, seed {seed}" for seed in range(count)} for kind, count in ((None, 10), (3, 12)))
    assert {title: {series.name for series in lines} for title, lines in charts.items()} == {
        "Study, 10m: loss by length, rotary positions in every layer": rotary,
        "Study, 10m: gain from far context, rotary positions in every layer": rotary,
        "Study, 10m: loss by length, mix of layers": mix,
        "Study, 10m: gain from far context, mix of layers": mix,
    }
    for lines in charts.values():
        assert len({(series.look % 8, series.look // 8 % 2) for series in lines}) == len(lines)


PERCENTAGES = {0.00036: "0.036", 1.2e-6: "0.00012", 4.6e-8: "5e-6", 0.0098: "0.98", 0.034: "3.4", 0.5: "50"}


@pytest.mark.parametrize(("share", "percent"), [*PERCENTAGES.items(), (0.0, "0"), (1.0, "100")])
def test_small_percentages_keep_their_digits(share, percent):
    assert percent_words(share) == percent


def test_heat_map_scale_ends_at_the_maximum(tmp_path):
    """A sink of 0.072% is in the cells, on the page's scale and on that of the PNG."""
    write_results(tmp_path, "inside", mix=report_results.mixed_inside(64))
    maps = figures_in(tmp_path)["Weight on the first token, by head"]
    assert [(name, chart.low, chart.high) for name, chart in maps.maps] == [("mix", 0, 0.00072)]
    canvas = picture([maps])
    cells = [text.get_text() for text in canvas.axes[0].texts]
    assert cells == ["0", "0", "0.036", "0.036", "0.072", "0.072"]
    assert [tick.get_text() for tick in canvas.axes[1].get_yticklabels()] == ["0%", "0.036%", "0.072%"]


def test_heat_map_of_zeros_ends_at_1(tmp_path):
    write_results(tmp_path, "inside", none=report_results.inside(0.0))
    chart = dict(figures_in(tmp_path)["Weight on the first token, by head"].maps)["none"]
    assert (chart.low, chart.high) == (0, 1)


def test_heat_maps_share_one_scale(tmp_path):
    """The maps of all models are side by side in one figure, and their numbers are in the CSV."""
    write_results(tmp_path, "inside", a=report_results.inside(0.1), b=report_results.inside(0.4))
    maps = figures_in(tmp_path)["Weight on the first token, by head"]
    assert [(name, chart.high) for name, chart in maps.maps] == [("a", 0.4), ("b", 0.4)]
    canvas = picture([maps])
    panels = [axes for axes in canvas.axes if axes.images]
    assert [axes.get_title() for axes in panels] == ["a", "b"]
    assert len(canvas.axes) == 3  # and one scale
    assert {row[0] for row in maps.table()[1]} == {"a", "b"}
    page, _ = render_html(tmp_path)
    assert "<h4>a</h4>" in page


def test_equal_weights_lines(tmp_path):
    """One named line per distinct log N; local layers are in separate charts."""
    window = report_results.mixed_inside(64)
    for row in window["lengths"]:
        row["heads"] = [head for head in row["heads"] if head["layer"] < 2]
    full = report_results.inside(0.1)
    write_results(tmp_path, "inside", full=full, same=full, mix=report_results.mixed_inside(64), window=window)
    charts = figures_in(tmp_path)
    chart = charts["Entropy of stage 1, by length, global layers"]
    lines = {series.name: series for series in chart.series if series.reference}
    assert set(lines) == {
        "equal weights (log N): full; mix, global layers; same",
        "equal weights (log N): window",
    }
    global_, local = lines.values()
    assert global_.y == [math.log(n) for n in report_results.LENGTHS]
    assert local.y == [math.log(64)] * 4
    assert global_.look != local.look
    drawn = {series.name: series.y for series in chart.series}
    assert drawn["mix, global layers"] == [0.5 * math.log(n) for n in report_results.LENGTHS]
    local = {series.name: series.y for series in charts["Entropy of stage 1, by length, local layers"].series}
    assert local["mix, local layers"] == [0.5 * math.log(64)] * 4
    assert local["equal weights (log N)"] == pytest.approx([math.log(64)] * 4)
    assert [series.name for series in charts["Weight on the first token, by length, local layers"].series] == [
        "mix, local layers"
    ]


def test_files_without_log_keys_per_head(tmp_path):
    """Files of earlier versions have log N for all layers together."""
    write_results(tmp_path, "inside", old=report_results.inside(0.1))
    charts = figures_in(tmp_path)
    assert "Entropy of stage 1, by length, local layers" not in charts
    names = [series.name for series in charts["Entropy of stage 1, by length"].series]
    assert names == ["old", "equal weights (log N)"]


def test_log_n_against_fixed_log_n(tmp_path):
    write_results(tmp_path, "inside", mix=report_results.mixed_inside(64), plain=report_results.inside(0.1))
    charts = figures_in(tmp_path)
    shares = {series.name: series.y for series in charts["Entropy of stage 1 / log N, by length, global layers"].series}
    assert shares["mix, global layers"] == pytest.approx([0.5] * 4)
    expected = [0.5, *(0.5 + 1 / math.log(n) for n in report_results.LENGTHS[1:])]
    assert shares["mix, global layers, log N fixed"] == pytest.approx(expected)
    assert "plain, log N fixed" not in shares
    table = next(chart for title, chart in charts.items() if title.startswith("Growth of stage 1's entropy"))
    rows = {row[0]: row[1:] for row in table.body}
    assert rows["mix, global layers"] == [128, 1024, "+2.08", "+1.04", "+2.04", "0.50 to 0.50", "0.50 to 0.64"]
    assert rows["mix, local layers"][2:4] == ["+0.00", "+0.00"]
    assert rows["plain"][2:] == ["+2.08", "+2.08", "", "1.00 to 1.00", ""]
    by_layer = dict(charts["Entropy of stage 1 / log N, log N fixed"].maps)["mix"]
    assert by_layer.rows == ["0", "1", "2"]
    assert [line[-1] for line in by_layer.values] == pytest.approx(
        [0.5 + 1 / math.log(64), 0.5 + 1 / math.log(64), 0.5 + 1 / math.log(1024)]
    )
    assert dict(charts["Entropy of stage 1, by head"].maps)["mix"].values[2] == pytest.approx(
        [0.5 * math.log(1024)] * 2
    )


def test_note_about_different_settings(tmp_path):
    """The compared attention and settings without effect need no note; the number of steps does."""

    def write(**changed: object) -> list[str]:
        for name, attention in (("a", "lssar"), ("b", "softmax")):
            result = frame("synthetic", name, report_results.synthetic())
            training = {"attention": attention, "power": "3" if name == "a" else None, "steps": 600, "log_every": 30}
            result["settings"]["training"] = {**training, **(changed if name == "b" else {})}
            report_results.write(tmp_path, {f"synthetic--{name}.json": result})
        return [block for block in blocks_in(tmp_path) if isinstance(block, str)]

    assert write(log_every=10) == []
    assert write(steps=300) == ["Measured with different settings (training: steps): compare with care."]


def test_synthetic_results_differ_only_in_attention():
    notes = [block for block in blocks_in(REPOSITORY / "results" / "synthetic") if isinstance(block, str)]
    assert notes == []


def test_number_of_texts_in_captions(tmp_path):
    def caption(*sequences: int) -> str:
        for place, count in enumerate(sequences):
            found = report_results.lengths(0)
            found["used"]["sequences"] = count
            write_results(tmp_path, "lengths", **{f"m{place}": found})
        return figures_in(tmp_path)["Loss by length"].caption

    assert caption(24, 24).endswith("all positions. 24 sequences of 1024 tokens from 7 documents.")
    assert "m0: 24 sequences of 1024 tokens from 7 documents. m1: 3 sequences of 1024" in caption(24, 3)


def test_row_sums_of_maps(tmp_path):
    """The page says that rows sum to 1 only for models that normalise."""
    loose = report_results.maps(False)
    for entry in loose["maps"]:
        entry["weights"] = [[3 * weight for weight in row] for row in entry["weights"]]
        entry["weights"][0] = [0.25]
    write_results(tmp_path, "maps", a=report_results.maps(False), sigmoid=loose)
    page, _ = render_html(tmp_path)
    assert "Rows sum to 1 in a. Rows sum to between 0.25 and 3 in sigmoid." in page
    assert "at most 1" not in page


def test_all_charts_of_a_study_run(tmp_path):
    report_results.write(tmp_path, {"run.json": report_results.study()})
    charts = figures_in(tmp_path)
    changed = charts["Study, 10m: lssar-p3, seed 3, changed at inference"]
    assert {series.name: series.y for series in changed.series} == {"as trained": [2.5, 2.6], "power=31": [2.75, 2.875]}
    table = charts["Study, 10m: changed at inference, rotary positions in every layer"]
    assert aligned_rows(table.body)[1] == ["lssar-p3, seed 3", "power=31", "2.750", "2.875", "0.050 ± 0.004"]
    keys = dict(charts["Study, 10m: passkeys by depth, rotary positions in every layer"].maps)["lssar-p3, seed 3"]
    assert keys.rows == ["10%", "50%"]
    assert keys.columns == ["32\n1x", "512\n16x"]
    assert keys.values == [[0.875, 0.875]] * 2
    inside = charts["Study, 10m: inside the attention, rotary positions in every layer"]
    row = dict(zip(inside.head, text_rows(inside.body)[1], strict=True))
    assert (row["length"], row["final"], row["first token, %"]) == ("512", "1.25", "0.036")
    title = "growth of stage 1's entropy, with log N and with log N fixed, rotary positions in every layer"
    steady = charts[f"Study, 10m: {title}"].body[0]
    assert steady[3:] == ["+2.50", "+1.73", "+2.60", "0.80 to 0.75", "0.80 to 0.91"]


@pytest.mark.parametrize(
    ("cells", "expected"),
    [
        ([1.5, 10.25, None], ["1.50", "10.25", ""]),
        ([2.5, 2.6123, 3], ["2.500", "2.612", "3.000"]),
        ([(0.05, 0.0041), (0.1234, 0.02)], ["0.050 ± 0.004", "0.123 ± 0.020"]),
        ([0.25, 150000.5], ["0.25", "150000"]),
        ([1, 20, "-"], ["1", "20", "-"]),
    ],
)
def test_columns_have_equal_decimals(cells, expected):
    assert [row[0] for row in aligned_rows([[cell] for cell in cells])] == expected


def lengths_result(losses: list[list[float]], gain: float | None = None) -> dict:
    """A result with these losses by length and text, for a model trained at 128."""
    rows = []
    for place, texts in enumerate(losses):
        row = {"length": 128 * 4**place, "loss": sum(texts) / len(texts), "by_text": texts, "standard_error": 0.5}
        control = {"window": 128, "full": 1, "short": 1, "gain": gain, "standard_error": 0.003}
        rows.append({**row, "control": control if place and gain else None})
    return {"lengths": rows, "skipped": []}


def test_verdicts_and_table_of_models(tmp_path):
    """A rise within two paired standard errors does not count; the spread over texts does not matter."""
    found = {
        "steady": lengths_result([[2.0, 3.0], [2.06, 3.02], [2.004, 3.0]], 0.012),
        "lost": lengths_result([[2.0, 3.0], [2.0, 3.0], [2.5, 3.52]], -0.4),
    }
    frames = {f"lengths--{n}.json": frame("lengths", n, results) for n, results in found.items()}
    frames["lengths--steady.json"]["model"]["parameters"] = 812160
    report_results.write(tmp_path, frames)
    notes = [block for block in blocks_in(tmp_path) if isinstance(block, str)]
    assert notes[:2] == [
        "lost: holds to 4x, loses 0.51 nats at 16x; context beyond 1x worth -0.400 ± 0.003 nats at 16x.",
        "steady: holds to 16x; context beyond 1x worth 0.012 ± 0.003 nats at 16x.",
    ]
    table = figures_in(tmp_path)["Models"]
    steady = dict(zip(table.head, text_rows(table.body)[1], strict=True))
    assert (steady["parameters"], steady["longest"], steady["loss at longest"]) == ("0.812M", "16x", "2.502")


def test_names_of_one_model_on_two_texts():
    """Names get the texts, and other settings that differ."""
    base = [{"text": {"text": ["x/book.txt", "notes.md"], "fingerprint": "1"}}, {"text": {"text": ["x/book.txt"]}}]
    settings = [*base, {**base[1], "power": "31"}]
    found = tell_apart([LoadedResult("a", 128, True, one, {}, None) for one in settings])
    assert [one.name for one in found] == ["a (book.txt, notes.md)", "a (book.txt)", "a (book.txt, power '31')"]


def test_paired_differences(tmp_path):
    """The standard error of a difference is that of the differences over texts."""
    a, b = ([[2.0, 3.0, 7.0], [2.0, 3.0, 7.0]], [[2.1, 3.1, 7.1], [2.1, 3.2, 7.3]])
    frames = {f"lengths--{n}.json": frame("lengths", n, lengths_result(x)) for n, x in zip("ab", (a, b), strict=True)}
    report_results.write(tmp_path, frames)
    (series,) = figures_in(tmp_path)["Loss minus that of a"].series
    assert (series.name, series.x) == ("b", [128, 512])
    assert series.y == pytest.approx([0.1, 0.2])
    assert series.error == pytest.approx([0, 0.1 / 3**0.5], abs=1e-9)
    frames["lengths--b.json"]["settings"] = {"data": "other"}
    report_results.write(tmp_path, frames)
    assert "Loss minus that of a" not in figures_in(tmp_path)


def test_one_model_on_two_texts_has_two_charts(tmp_path):
    for place, text in enumerate(("moby.txt", "walden.txt", "walden.txt")):
        result = frame("lengths", "m", lengths_result([[2.0 + place], [2.5]]))
        result["settings"] = {"data": {"text": [f"books/{text}"], "fingerprint": f"{place}"}, "sequences": place}
        report_results.write(tmp_path, {f"lengths--m--{place}.json": result})
    charts = figures_in(tmp_path)
    assert [line.y[0] for line in charts["Loss by length (moby.txt)"].series] == [2.0]
    both = charts["Loss by length (walden.txt)"].series
    assert [(line.name, line.y[0]) for line in both] == [("m (sequences 1)", 3.0), ("m (sequences 2)", 4.0)]
