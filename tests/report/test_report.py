"""The report without a browser: what it reads, what it refuses, and that no text from a file becomes markup."""

from __future__ import annotations

import base64
import copy
import json
import math
import re
from array import array
from html.parser import HTMLParser
from pathlib import Path

import pytest
import report_results
from hypothesis import given, settings
from hypothesis import strategies as st

from softplus_attention.charts.draw import picture
from softplus_attention.charts.model import LineChart, Series, aligned_rows, percent_words, text_rows
from softplus_attention.cli import main
from softplus_attention.evaluation.measures.loaded import LoadedResult, tell_apart
from softplus_attention.report import build
from softplus_attention.report import page as html_page
from softplus_attention.report.discovery import find_results
from softplus_attention.utils.files import csv_text

REPOSITORY = Path(__file__).parents[2]


def render_html(folder: Path) -> tuple[str, list[tuple[str, str]]]:
    """The page without the figures' files, and the problems that were found."""
    found = find_results(folder)
    sections = build.all_sections(found)
    return build.render_html(found, sections, {}, "files"), found.problems


def csv_of(figure: object) -> str:
    head, rows = figure.table()
    return csv_text(head, text_rows(rows))


class Elements(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[str] = []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [name for name, _ in attrs]


@pytest.fixture
def everything(tmp_path):
    report_results.write(tmp_path, report_results.everything())
    return tmp_path


def test_every_kind_is_shown(everything):
    page, problems = render_html(everything)
    assert problems == []
    for title in (
        "Loss by length", "What the context beyond the window is worth", "Passkeys found, by depth",
        "Summary", "Models", "Downstream tasks",
        "recall: answer tokens right", "Weight on the first token, by layer", "Entropy of stage 1, by length",
        "Attention explorer", "Newton from orbits: newton/cpu.json", "Runs and settings",
        "forward + backward: train, head dimension 64",
    ):  # fmt: skip
        assert title in page
    assert "not measured: 4096: no document is so long" in page
    assert "0.25\u00a0±\u00a00.02" in page
    assert "root:x:" not in page  # a result that names /etc/passwd as its figure


def test_text_from_files_stays_text(everything):
    (everything / f"{report_results.HOSTILE[:7].replace('/', '')}.json").write_text('{"<b>": ')
    page, _ = render_html(everything)
    elements = Elements()
    elements.feed(page)
    assert not {"img", "svg"} & set(elements.tags)
    assert not [name for name in elements.attributes if name.startswith("on") or name == "style"]
    assert elements.tags.count("script") == 2
    data = re.search(r'<script type="application/json" id="report-data">(.*?)</script>', page, re.S)[1]
    assert "<" not in data
    figures = json.loads(data)["figures"].values()
    names = {series["name"] for figure in figures for series in figure.get("series", [])}
    assert report_results.HOSTILE in names


def test_nothing_is_loaded(everything):
    page, _ = render_html(everything)
    assert set(re.findall(r"https?://[\w./]+", page)) == {"http://www.w3.org/2000/svg"}
    policy = re.search(r'Content-Security-Policy" content="(.*?)"', page)[1]
    assert policy.startswith("default-src 'none'")
    assert "unsafe" not in policy
    assert "innerHTML" not in page


def test_a_training_run(tmp_path):
    """One that `train` wrote, once finished and once with a log that was cut and repeats a step."""
    words = ["--preset", "tiny", "--layers", "1", "--width", "16", "--heads", "1", "--global-every", "0"]
    words += [
        "--steps",
        "4",
        "--batch-size",
        "2",
        "--sequence-length",
        "16",
        "--log-every",
        "1",
        "--evaluate-every",
        "2",
    ]
    (tmp_path / "text.txt").write_text(" ".join(f"some words, number {n}, and others." for n in range(400)))
    text = ["data", "prepare", str(tmp_path / "text.txt"), "--tokenizer", "bytes", "--separator", "others."]
    assert main([*text, "--validation-fraction", "0.2", "--output", str(tmp_path / "data")]) == 0
    assert main(["train", "--data", str(tmp_path / "data"), "--output", str(tmp_path / "runs" / "one"), *words]) == 0
    other = tmp_path / "runs" / "two"
    other.mkdir()
    (other / "run.json").write_text((tmp_path / "runs" / "one" / "run.json").read_text())
    (other / "metrics.jsonl").write_text(
        '{"step": 1, "loss": 5.0}\n{"step": 2, "loss": 9.0}\n{"step": 2, "loss": 4.0}\n'
    )
    page, problems = render_html(tmp_path / "runs")
    assert problems == []
    assert "Training loss by step" in page
    charts = {block.title: block for block in blocks_of(tmp_path / "runs")}
    first, second = charts["Training loss by step"].series
    assert [first.name, second.name] == ["one (lssar)", "two (lssar)"]
    assert first.x == [1, 2, 3, 4]
    assert (second.x, second.y) == ([1, 2], [5.0, 4.0])
    assert charts["Validation loss by step"].series[0].x == [2, 4]
    (other / "metrics.jsonl").write_text("{")
    assert "metrics.jsonl: not JSON" in dict(render_html(tmp_path / "runs")[1])["two/run.json"]


def test_stability(tmp_path):
    runs = [
        report_results.stability(0.03, [5, "nan"], None, "stopped"),
        report_results.stability(0.001, [9, 5, 4, 3, 2, 1], 20.0),
        report_results.stability(0.01, [9, "inf"], 700.0),
    ]
    report_results.write(tmp_path, {f"{number}.json": run for number, run in enumerate(runs)})
    page, _ = render_html(tmp_path)
    figures = json.loads(re.search(r'id="report-data">(.*?)</script>', page, re.S)[1])["figures"].values()
    loss, score = (next(f for f in figures if word in f["title"]) for word in ("Loss by", "Largest score"))
    assert (loss["series"][0]["x"], loss["series"][0]["y"]) == ([0.001, 0.01, 0.03], [3, None, None])
    assert score["series"][0]["y"] == [20, 700, None]


def test_logarithmic_axes_have_plain_numbers(tmp_path):
    runs = {f"{rate}.json": report_results.stability(rate, [3], score) for rate, score in ((0.001, 5.0), (0.1, 5000.0))}
    report_results.write(tmp_path, runs)
    build.write_report(tmp_path, tmp_path / "page.html")
    (drawing,) = (tmp_path / "page-files").glob("*largest-score*.svg")
    assert "mathdefault" not in drawing.read_text()
    assert ">1000</text>" in drawing.read_text()


BROKEN = {
    "cut.json": '{"format": "softplus-attention result", "vers',
    "list.json": "[1, 2]",
    "deep.json": '{"a":' * 100_000,
    "bytes.json": b"\xff\xfe\x00",
    "digits.json": '{"a": ' + "9" * 5000 + "}",
    "newer.json": '{"format": "softplus-attention result", "version": 2, "measure": "lengths"}',
    "unknown.json": '{"format": "softplus-attention result", "version": 1, "measure": "\\u001b[31m"}',
    "stranger.json": '{"hello": "world"}',
}


def test_broken_files_are_named(tmp_path):
    report_results.write(tmp_path, {"lengths--a.json": report_results.frame("lengths", "a", report_results.lengths(0))})
    wrong = report_results.frame("maps", "m", report_results.maps(True))
    wrong["results"]["maps"][0]["weights"][1] = [0.5]
    report_results.write(tmp_path, {"maps--m.json": wrong})
    for name, text in BROKEN.items():
        (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"hidden_size": 3}')
    page, problems = render_html(tmp_path)
    words = dict(problems)
    assert set(words) == {*BROKEN, "maps--m.json"}
    assert words["maps--m.json"] == "a result of kind maps, but row 1 of `weights` must have 2 numbers"
    assert "version 2" in words["newer.json"]
    assert "\x1b" not in words["unknown.json"]
    for name in words:
        assert f"<code>{name}</code>" in page
    assert "1 JSON files of checkpoints" in page


def test_problems_are_said_on_stderr(tmp_path, capsys):
    one = report_results.frame("downstream", "a", report_results.downstream())
    report_results.write(tmp_path, {"downstream--a.json": one})
    (tmp_path / "broken.json").write_text("{")
    assert main(["report", str(tmp_path), "--output", str(tmp_path / "out.html")]) == 0
    captured = capsys.readouterr()
    assert "not shown: broken.json: not JSON" in captured.err
    assert "1 result file, 2 figures and tables" in captured.out
    assert (tmp_path / "out-files" / "02-downstream-tasks.csv").read_text().startswith("task,metric,samples,chance,a\n")


@pytest.mark.parametrize(("make", "words"), [(False, "a folder with results"), (True, "at least one result file")])
def test_nothing_to_show(make, words, tmp_path, capsys):
    folder = tmp_path / "none"
    if make:
        folder.mkdir()
        (folder / "a.json").write_text("{}")
    assert main(["report", str(folder)]) == 2
    assert words in capsys.readouterr().err
    assert not (folder / "report.html").exists()


def places(data: object, path: tuple[object, ...] = ()) -> list[tuple[object, ...]]:
    """The way to every value of a JSON tree."""
    found = [path] if path else []
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, value in items:
        found += places(value, (*path, key))
    return found


KINDS = report_results.everything()
JUNK = st.sampled_from(
    [None, True, -1, 0, 1.5, 1e999, float("nan"), 10**400, "", "<b>\ud800\x00", [], [[]], {}, {"a": 1}]
)


@settings(max_examples=150)
@given(data=st.data())
def test_no_damage_crashes_it(data, tmp_path):
    """Any value of any result replaced by junk: the file is shown or named, and the page is written."""
    name = data.draw(st.sampled_from(sorted(KINDS)))
    damaged = copy.deepcopy(KINDS[name])
    *way, last = data.draw(st.sampled_from(places(damaged)))
    place = damaged
    for key in way:
        place = place[key]
    place[last] = data.draw(JUNK)
    for old in tmp_path.rglob("*.json"):
        old.unlink()
    report_results.write(tmp_path, {name: damaged})
    found = find_results(tmp_path)
    sections = build.all_sections(found)
    build.render_html(found, sections, {}, "files").encode()
    for section in sections:
        for figure in section.figures():
            csv_of(figure).encode()
    assert len(found.results) + len({path for path, _ in found.problems}) + found.working_files == 1


def test_packed_weights_are_exact():
    rows = report_results.weights(1, 0, sharp=True)
    packed = html_page.packed([*rows[:-1], [*rows[-1][:-1], 1e-50]])
    words = array("f", base64.b64decode(packed["weights"]))
    flat = [weight for row in rows for weight in row][:-1]
    assert len(words) == len(flat) + 1
    assert [float(f"{word:.4g}") for word in words[:-1]] == flat
    assert 0 < words[-1] < 1e-40
    assert packed["largest"] == max(flat)


def test_csv_holds_the_numbers_and_no_formulas():
    chart = LineChart("t", "x", "y", [Series("=cmd()", [1, 2], [0.5, None], [0.1, None]), Series("b", [2], [-3.25])])
    text = csv_of(chart)
    assert text == "x,'=cmd(),'=cmd(): standard error,b\n1,0.5,0.1,\n2,,,-3.25\n"


def test_results_of_this_repository_are_shown():
    page, problems = render_html(REPOSITORY / "results")
    assert problems == []
    assert len(page.encode()) < 2e6
    assert "NVIDIA H200" in page
    for kind in ("rotary positions in every layer", "mix of layers"):
        assert f"Study, 30M, text A: loss by length, {kind}" in page


def test_a_run_of_the_study(tmp_path):
    row = {"length": 64, "loss": 2.5, "standard_error": 0.1, "control": {"gain": 0.25, "standard_error": 0.01}}
    run = {"arm": "lssar-p3", "size": "10m", "seed": 3, "config": {"sequence_length": 32}, "command": "runs/study.py"}
    run["evaluation"] = {"lengths": {"lengths": [{**row, "length": 32, "control": None}, row]}}
    (tmp_path / "10m-lssar-p3-seed3.json").write_text(json.dumps(run))
    page, problems = render_html(tmp_path)
    assert problems == []
    assert "Study, 10m: what the far context is worth, rotary positions in every layer" in page
    assert "mix of layers" not in page
    assert "lssar-p3, seed 3" in page
    assert "0.25" in page
    row["loss"] = "low"
    (tmp_path / "10m-lssar-p3-seed3.json").write_text(json.dumps(run))
    (tmp_path / "other.json").write_text(json.dumps({**run, "seed": 4, "evaluation": {"lengths": {"lengths": []}}}))
    _, problems = render_html(tmp_path)
    assert problems == [("10m-lssar-p3-seed3.json", 'a result of kind study, but `loss` must be a number, got "low"')]


def test_kinds_of_the_study_are_apart(tmp_path):
    """A chart of its own for each, and no two lines of a chart look the same."""
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
        "Study, 10m: what the far context is worth, rotary positions in every layer": rotary,
        "Study, 10m: loss by length, mix of layers": mix,
        "Study, 10m: what the far context is worth, mix of layers": mix,
    }
    for lines in charts.values():
        assert len({(series.look % 8, series.look // 8 % 2) for series in lines}) == len(lines)


def figures_of(folder: Path) -> dict[str, object]:
    """By title."""
    found = find_results(folder)
    sections = build.all_sections(found)
    assert found.problems == []
    return {figure.title: figure for section in sections for figure in section.figures()}


def blocks_of(folder: Path) -> list[object]:
    return [block for section in build.all_sections(find_results(folder)) for block in section.blocks]


def write_inside(folder: Path, **models: dict) -> None:
    frames = {f"inside--{n}.json": report_results.frame("inside", n, found) for n, found in models.items()}
    report_results.write(folder, frames)


@pytest.mark.parametrize(
    ("share", "words"),
    [
        (0.00036, "0.036"),
        (0.0000012, "0.00012"),
        (4.6e-8, "5e-6"),
        (0.0098, "0.98"),
        (0.034, "3.4"),
        (0.5, "50"),
        (0.0, "0"),
        (1.0, "100"),
    ],
)
def test_small_shares_keep_their_digits(share, words):
    assert percent_words(share) == words


def test_the_scale_of_a_heat_map_says_its_end(tmp_path):
    """A sink of 0.072%: in the cells, on the scale and on that of the PNG."""
    write_inside(tmp_path, mix=report_results.mixed_inside(64))
    maps = figures_of(tmp_path)["Weight on the first token, by head"]
    assert [(name, chart.low, chart.high) for name, chart in maps.maps] == [("mix", 0, 0.00072)]
    canvas = picture([maps])
    cells = [text.get_text() for text in canvas.axes[0].texts]
    assert cells == ["0", "0", "0.036", "0.036", "0.072", "0.072"]
    assert [tick.get_text() for tick in canvas.axes[1].get_yticklabels()] == ["0%", "0.036%", "0.072%"]


def test_a_heat_map_of_zeros_has_no_invented_end(tmp_path):
    write_inside(tmp_path, none=report_results.inside(0.0))
    chart = dict(figures_of(tmp_path)["Weight on the first token, by head"].maps)["none"]
    assert (chart.low, chart.high) == (0, 1)


def test_heat_maps_lie_side_by_side_on_one_scale(tmp_path):
    """Of all models in one figure, each with its numbers in the CSV."""
    write_inside(tmp_path, a=report_results.inside(0.1), b=report_results.inside(0.4))
    maps = figures_of(tmp_path)["Weight on the first token, by head"]
    assert [(name, chart.high) for name, chart in maps.maps] == [("a", 0.4), ("b", 0.4)]
    canvas = picture([maps])
    panels = [axes for axes in canvas.axes if axes.images]
    assert [axes.get_title() for axes in panels] == ["a", "b"]
    assert len(canvas.axes) == 3  # and one scale
    assert {row[0] for row in maps.table()[1]} == {"a", "b"}
    page, _ = render_html(tmp_path)
    assert "<h4>a</h4>" in page


def test_equal_weights_are_those_of_each_model(tmp_path):
    """One line per distinct log N, named; layers that see less are in charts of their own."""
    window = report_results.mixed_inside(64)
    for row in window["lengths"]:
        row["heads"] = [head for head in row["heads"] if head["layer"] < 2]
    full = report_results.inside(0.1)
    write_inside(tmp_path, full=full, same=full, mix=report_results.mixed_inside(64), window=window)
    charts = figures_of(tmp_path)
    chart = charts["Entropy of stage 1, by length, global layers"]
    lines = {series.name: series for series in chart.series if series.reference}
    assert set(lines) == {
        "equal weights (log N): full; mix, global layers; same",
        "equal weights (log N): window",
    }
    everything, narrow = lines.values()
    assert everything.y == [math.log(n) for n in report_results.LENGTHS]
    assert narrow.y == [math.log(64)] * 4
    assert everything.look != narrow.look
    drawn = {series.name: series.y for series in chart.series}
    assert drawn["mix, global layers"] == [0.5 * math.log(n) for n in report_results.LENGTHS]
    local = {series.name: series.y for series in charts["Entropy of stage 1, by length, local layers"].series}
    assert local["mix, local layers"] == [0.5 * math.log(64)] * 4
    assert local["equal weights (log N)"] == pytest.approx([math.log(64)] * 4)
    assert [series.name for series in charts["Weight on the first token, by length, local layers"].series] == [
        "mix, local layers"
    ]


def test_files_without_the_keys_of_each_head(tmp_path):
    """As earlier versions wrote them: all layers together, with the log N of the whole."""
    write_inside(tmp_path, old=report_results.inside(0.1))
    charts = figures_of(tmp_path)
    assert "Entropy of stage 1, by length, local layers" not in charts
    names = [series.name for series in charts["Entropy of stage 1, by length"].series]
    assert names == ["old", "equal weights (log N)"]


def test_log_n_against_log_n_held(tmp_path):
    write_inside(tmp_path, mix=report_results.mixed_inside(64), plain=report_results.inside(0.1))
    charts = figures_of(tmp_path)
    shares = {series.name: series.y for series in charts["Entropy of stage 1 / log N, by length, global layers"].series}
    assert shares["mix, global layers"] == pytest.approx([0.5] * 4)
    expected = [0.5, *(0.5 + 1 / math.log(n) for n in report_results.LENGTHS[1:])]
    assert shares["mix, global layers, log N held"] == pytest.approx(expected)
    assert "plain, log N held" not in shares
    table = next(chart for title, chart in charts.items() if title.startswith("How much stage 1's entropy grows"))
    rows = {row[0]: row[1:] for row in table.body}
    assert rows["mix, global layers"] == [128, 1024, "+2.08", "+1.04", "+2.04", "0.50 to 0.50", "0.50 to 0.64"]
    assert rows["mix, local layers"][2:4] == ["+0.00", "+0.00"]
    assert rows["plain"][2:] == ["+2.08", "+2.08", "", "1.00 to 1.00", ""]
    by_layer = dict(charts["Entropy of stage 1 / log N, log N held"].maps)["mix"]
    assert by_layer.rows == ["0", "1", "2"]
    assert [line[-1] for line in by_layer.values] == pytest.approx(
        [0.5 + 1 / math.log(64), 0.5 + 1 / math.log(64), 0.5 + 1 / math.log(1024)]
    )
    assert dict(charts["Entropy of stage 1, by head"].maps)["mix"].values[2] == pytest.approx(
        [0.5 * math.log(1024)] * 2
    )


def test_settings_that_matter(tmp_path):
    """The attention is what is compared; the steps are not."""

    def write(**changed: object) -> list[str]:
        for name, attention in (("a", "lssar"), ("b", "softmax")):
            result = report_results.frame("synthetic", name, report_results.synthetic())
            training = {"attention": attention, "power": "3" if name == "a" else None, "steps": 600, "log_every": 30}
            result["settings"]["training"] = {**training, **(changed if name == "b" else {})}
            report_results.write(tmp_path, {f"synthetic--{name}.json": result})
        return [block for block in blocks_of(tmp_path) if isinstance(block, str)]

    assert write(log_every=10) == []
    assert write(steps=300) == ["Measured with different settings (training: steps): compare with care."]


def test_synthetic_results_differ_only_in_attention():
    notes = [block for block in blocks_of(REPOSITORY / "results" / "synthetic") if isinstance(block, str)]
    assert notes == []


def test_texts_are_counted_for_each_model(tmp_path):
    def caption(*sequences: int) -> str:
        for place, count in enumerate(sequences):
            found = report_results.lengths(0)
            found["used"]["sequences"] = count
            report_results.write(
                tmp_path, {f"lengths--{place}.json": report_results.frame("lengths", f"m{place}", found)}
            )
        return figures_of(tmp_path)["Loss by length"].caption

    assert caption(24, 24).endswith("all positions. 24 sequences of 1024 tokens from 7 documents.")
    words = caption(24, 3)
    assert "m0: 24 sequences of 1024 tokens from 7 documents. m1: 3 sequences of 1024" in words


def test_what_rows_add_up_to(tmp_path):
    """1 is said of those that normalise alone."""
    loose = report_results.maps(False)
    for entry in loose["maps"]:
        entry["weights"] = [[3 * weight for weight in row] for row in entry["weights"]]
        entry["weights"][0] = [0.25]
    for name, found in (("a", report_results.maps(False)), ("sigmoid", loose)):
        report_results.write(tmp_path, {f"maps--{name}.json": report_results.frame("maps", name, found)})
    page, _ = render_html(tmp_path)
    assert (
        "The weights of a row add up to 1 in a. The weights of a row add up to between 0.25 and 3 in sigmoid." in page
    )
    assert "at most 1" not in page


def test_the_whole_study_is_shown(tmp_path):
    report_results.write(tmp_path, {"run.json": report_results.study()})
    charts = figures_of(tmp_path)
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
    title = "how much stage 1's entropy grows, with log N and with log N held, rotary positions in every layer"
    steady = charts[f"Study, 10m: {title}"].body[0]
    assert steady[3:] == ["+2.50", "+1.73", "+2.60", "0.80 to 0.75", "0.80 to 0.91"]


def luminance(colour: str) -> float:
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("theme", [0, 1, 2], ids=["light", "dark by the system", "dark by choice"])
def test_colours_stand_out(theme):
    """WCAG's contrasts: 4.5 for text, 3 for lines of a figure."""
    style = html_page.asset("report.css")
    block = [part for part in style.split("}") if "--paper:" in part][theme]
    colours = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", block))
    paper = luminance(colours["paper"])
    for name, least in {"ink": 4.5, "faint": 4.5, "link": 4.5, **{f"s{k}": 3 for k in range(8)}}.items():
        light, dark = sorted([luminance(colours[name]), paper], reverse=True)
        assert (light + 0.05) / (dark + 0.05) >= least, name


def test_only_what_a_report_wrote_is_removed(everything):
    folder = everything / "page-files"
    build.write_report(everything, everything / "page.html")
    mine = [folder / "2025-01-30-temperatures.csv", folder / "01-notes.png"]
    for path in mine:
        path.write_text("mine")
    before = {path.name for path in folder.iterdir()}
    # An older report had figures and tables that this one does not have.
    drawn = json.loads((folder / build.DRAWN).read_text())
    (folder / build.DRAWN).write_text(json.dumps({**drawn, "98-gone": "x", "../outside": "x"}))
    for name in ("98-gone.png", "98-gone.csv", "../outside.csv"):
        (folder / name).write_text("old")
    build.write_report(everything, everything / "page.html")
    assert {path.name for path in folder.iterdir()} == before
    assert [path.read_text() for path in mine] == ["mine", "mine"]
    assert (everything / "outside.csv").exists()


def test_a_file_that_is_no_report_is_not_replaced(everything, capsys):
    notes = everything / "notes.md"
    notes.write_text("mine")
    assert main(["report", str(everything), "--output", str(notes)]) == 2
    assert "`--output` must be a new file, or a report to replace" in capsys.readouterr().err
    assert notes.read_text() == "mine"
    for _ in range(2):
        assert main(["report", str(everything), "--output", str(everything / "page.html")]) == 0


def test_figures_go_to_no_folder_of_others(everything, capsys):
    (everything / "page-files").mkdir()
    (everything / "page-files" / "letter.txt").write_text("mine")
    assert main(["report", str(everything), "--output", str(everything / "page.html")]) == 2
    assert "new or of a report" in capsys.readouterr().err
    assert not (everything / "page.html").exists()


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
def test_a_column_has_as_many_decimals(cells, expected):
    assert [row[0] for row in aligned_rows([[cell] for cell in cells])] == expected


def lengths_of(losses: list[list[float]], gain: float | None = None) -> dict:
    """Of losses by length and text, trained at 128."""
    rows = []
    for place, texts in enumerate(losses):
        control = (
            {"window": 128, "full": 1, "short": 1, "gain": gain, "standard_error": 0.003} if place and gain else None
        )
        mean = sum(texts) / len(texts)
        rows.append(
            {"length": 128 * 4**place, "loss": mean, "by_text": texts, "standard_error": 0.5, "control": control}
        )
    return {"lengths": rows, "skipped": []}


def test_verdicts_and_the_table_of_models(tmp_path):
    """A rise that is within two errors of the same texts is none; spread over texts is no error of it."""
    found = {
        "steady": lengths_of([[2.0, 3.0], [2.06, 3.02], [2.004, 3.0]], 0.012),
        "lost": lengths_of([[2.0, 3.0], [2.0, 3.0], [2.5, 3.52]], -0.4),
    }
    frames = {f"lengths--{n}.json": report_results.frame("lengths", n, results) for n, results in found.items()}
    frames["lengths--steady.json"]["model"]["parameters"] = 812160
    report_results.write(tmp_path, frames)
    notes = [block for block in blocks_of(tmp_path) if isinstance(block, str)]
    assert notes[:2] == [
        "lost: holds to 4x, loses 0.51 nats at 16x; context beyond 1x worth -0.400 ± 0.003 nats at 16x.",
        "steady: holds to 16x; context beyond 1x worth 0.012 ± 0.003 nats at 16x.",
    ]
    table = figures_of(tmp_path)["Models"]
    steady = dict(zip(table.head, text_rows(table.body)[1], strict=True))
    assert (steady["parameters"], steady["longest"], steady["loss there"]) == ("0.812M", "16x", "2.502")


def test_one_model_on_two_texts_is_told_apart():
    """By the names of the texts, and by what else differs."""
    of = [{"text": {"text": ["x/book.txt", "notes.md"], "fingerprint": "1"}}, {"text": {"text": ["x/book.txt"]}}]
    settings = [of[0], of[1], {**of[1], "power": "31"}]
    found = tell_apart([LoadedResult("a", 128, True, one, {}, None) for one in settings])
    assert [one.name for one in found] == ["a (book.txt, notes.md)", "a (book.txt)", "a (book.txt, power '31')"]


def test_models_on_the_same_texts_are_paired(tmp_path):
    """The error of a difference is that over texts of the differences."""
    a, b = ([[2.0, 3.0, 7.0], [2.0, 3.0, 7.0]], [[2.1, 3.1, 7.1], [2.1, 3.2, 7.3]])
    frames = {
        f"lengths--{n}.json": report_results.frame("lengths", n, lengths_of(x))
        for n, x in zip("ab", (a, b), strict=True)
    }
    report_results.write(tmp_path, frames)
    (series,) = figures_of(tmp_path)["Loss less that of a"].series
    assert (series.name, series.x) == ("b", [128, 512])
    assert series.y == pytest.approx([0.1, 0.2])
    assert series.error == pytest.approx([0, 0.1 / 3**0.5], abs=1e-9)
    frames["lengths--b.json"]["settings"] = {"data": "other"}
    report_results.write(tmp_path, frames)
    assert "Loss less that of a" not in figures_of(tmp_path)


def test_two_texts_of_one_model_are_both_shown(tmp_path):
    for place, text in enumerate(("moby.txt", "walden.txt", "walden.txt")):
        frame = report_results.frame("lengths", "m", lengths_of([[2.0 + place], [2.5]]))
        frame["settings"] = {"data": {"text": [f"books/{text}"], "fingerprint": f"{place}"}, "sequences": place}
        report_results.write(tmp_path, {f"lengths--m--{place}.json": frame})
    charts = figures_of(tmp_path)
    assert [line.y[0] for line in charts["Loss by length (moby.txt)"].series] == [2.0]
    both = charts["Loss by length (walden.txt)"].series
    assert [(line.name, line.y[0]) for line in both] == [("m (sequences 1)", 3.0), ("m (sequences 2)", 4.0)]


def test_a_place_that_cannot_be_written_is_named(everything, capsys):
    (everything / "file").write_text("")
    assert main(["report", str(everything), "--output", str(everything / "file" / "page.html")]) == 1
    error = capsys.readouterr().err
    assert "Not a directory (--output " in error
    assert "Traceback" not in error
