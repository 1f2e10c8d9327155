"""The report without a browser: files it reads and rejects, escaping, and the files it writes."""

from __future__ import annotations

import base64
import copy
import json
import re
from array import array
from html.parser import HTMLParser
from pathlib import Path

import pytest
import report_results
from hypothesis import given, settings
from hypothesis import strategies as st
from report_results import blocks_in, csv_of, render_html, write_results

from softplus_attention.cli import main
from softplus_attention.report import build
from softplus_attention.report import page as html_page
from softplus_attention.report.discovery import find_results

REPOSITORY = Path(__file__).parents[2]


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


def test_every_kind_of_result_is_shown(everything):
    page, problems = render_html(everything)
    assert problems == []
    for title in (
        "Loss by length", "Gain from context beyond the training length", "Passkeys found, by depth",
        "Summary", "Models", "Downstream tasks",
        "recall: answer tokens right", "Weight on the first token, by layer", "Entropy of stage 1, by length",
        "Attention explorer", "Newton from orbits: newton/cpu.json", "Runs and settings",
        "forward + backward: train, head dimension 64",
    ):  # fmt: skip
        assert title in page
    assert "not measured: 4096: no document is so long" in page
    assert "0.25\u00a0±\u00a00.02" in page
    assert "root:x:" not in page  # one result names /etc/passwd as its figure


def test_text_from_files_is_escaped(everything):
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


def test_page_loads_nothing(everything):
    page, _ = render_html(everything)
    assert set(re.findall(r"https?://[\w./]+", page)) == {"http://www.w3.org/2000/svg"}
    policy = re.search(r'Content-Security-Policy" content="(.*?)"', page)[1]
    assert policy.startswith("default-src 'none'")
    assert "unsafe" not in policy
    assert "innerHTML" not in page


def test_a_training_run(tmp_path):
    """A finished run of `train`, and one whose log was truncated and repeats a step."""
    args = "--preset tiny --layers 1 --width 16 --heads 1 --global-every 0 --steps 4 --batch-size 2"
    args += " --sequence-length 16 --log-every 1 --evaluate-every 2"
    (tmp_path / "text.txt").write_text(" ".join(f"some words, number {n}, and others." for n in range(400)))
    text = ["data", "prepare", str(tmp_path / "text.txt"), "--tokenizer", "bytes", "--separator", "others."]
    data, one, other = tmp_path / "data", tmp_path / "runs" / "one", tmp_path / "runs" / "two"
    assert main([*text, "--validation-fraction", "0.2", "--output", str(data)]) == 0
    assert main(["train", "--data", str(data), "--output", str(one), *args.split()]) == 0
    other.mkdir()
    (other / "run.json").write_text((one / "run.json").read_text())
    (other / "metrics.jsonl").write_text(
        '{"step": 1, "loss": 5.0}\n{"step": 2, "loss": 9.0}\n{"step": 2, "loss": 4.0}\n'
    )
    page, problems = render_html(tmp_path / "runs")
    assert problems == []
    assert "Training loss by step" in page
    charts = {block.title: block for block in blocks_in(tmp_path / "runs")}
    first, second = charts["Training loss by step"].series
    assert [first.name, second.name] == ["one (lssar)", "two (lssar)"]
    assert first.x == [1, 2, 3, 4]
    assert (second.x, second.y) == ([1, 2], [5.0, 4.0])
    assert charts["Validation loss by step"].series[0].x == [2, 4]
    (other / "metrics.jsonl").write_text("{")
    assert "metrics.jsonl: not JSON" in dict(render_html(tmp_path / "runs")[1])["two/run.json"]


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
    wrong = report_results.maps(True)
    wrong["maps"][0]["weights"][1] = [0.5]
    write_results(tmp_path, "lengths", a=report_results.lengths(0))
    write_results(tmp_path, "maps", m=wrong)
    for name, text in BROKEN.items():
        (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"hidden_size": 3}')
    page, problems = render_html(tmp_path)
    reasons = dict(problems)
    assert set(reasons) == {*BROKEN, "maps--m.json"}
    assert reasons["maps--m.json"] == "a result of kind maps, but row 1 of `weights` must have 2 numbers"
    assert "version 2" in reasons["newer.json"]
    assert "\x1b" not in reasons["unknown.json"]
    for name in reasons:
        assert f"<code>{name}</code>" in page
    assert "1 JSON files of checkpoints" in page


def test_problems_are_printed_to_stderr(tmp_path, capsys):
    write_results(tmp_path, "downstream", a=report_results.downstream())
    (tmp_path / "broken.json").write_text("{")
    assert main(["report", str(tmp_path), "--output", str(tmp_path / "out.html")]) == 0
    captured = capsys.readouterr()
    assert "not shown: broken.json: not JSON" in captured.err
    assert "1 result file, 2 figures and tables" in captured.out
    assert (tmp_path / "out-files" / "02-downstream-tasks.csv").read_text().startswith("task,metric,samples,chance,a\n")


@pytest.mark.parametrize(("make", "error"), [(False, "a folder with results"), (True, "at least one result file")])
def test_nothing_to_show(make, error, tmp_path, capsys):
    folder = tmp_path / "none"
    if make:
        folder.mkdir()
        (folder / "a.json").write_text("{}")
    assert main(["report", str(folder)]) == 2
    assert error in capsys.readouterr().err
    assert not (folder / "report.html").exists()


def places(data: object, path: tuple[object, ...] = ()) -> list[tuple[object, ...]]:
    """The path to every value of a JSON tree."""
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
def test_damaged_results_do_not_crash(data, tmp_path):
    """With any value replaced by junk, the file is shown or named as a problem, and the page is written."""
    name = data.draw(st.sampled_from(sorted(KINDS)))
    damaged = copy.deepcopy(KINDS[name])
    *path, last = data.draw(st.sampled_from(places(damaged)))
    parent = damaged
    for key in path:
        parent = parent[key]
    parent[last] = data.draw(JUNK)
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
    decoded = array("f", base64.b64decode(packed["weights"]))
    flat = [weight for row in rows for weight in row][:-1]
    assert len(decoded) == len(flat) + 1
    assert [float(f"{value:.4g}") for value in decoded[:-1]] == flat
    assert 0 < decoded[-1] < 1e-40
    assert packed["largest"] == max(flat)


def test_results_of_this_repository_are_shown():
    page, problems = render_html(REPOSITORY / "results")
    assert problems == []
    assert len(page.encode()) < 2e6
    assert "NVIDIA H200" in page
    for kind in ("rotary positions in every layer", "mix of layers"):
        assert f"Study, 30M, text A: loss by length, {kind}" in page


def luminance(colour: str) -> float:
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("theme", [0, 1, 2], ids=["light", "dark by the system", "dark by choice"])
def test_colour_contrast(theme):
    """WCAG: 4.5 for text, 3 for lines."""
    style = html_page.asset("report.css")
    block = [part for part in style.split("}") if "--paper:" in part][theme]
    colours = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", block))
    paper = luminance(colours["paper"])
    for name, least in {"ink": 4.5, "faint": 4.5, "link": 4.5, **{f"s{k}": 3 for k in range(8)}}.items():
        light, dark = sorted([luminance(colours[name]), paper], reverse=True)
        assert (light + 0.05) / (dark + 0.05) >= least, name


def test_only_own_files_are_removed(everything):
    folder = everything / "page-files"
    build.write_report(everything, everything / "page.html")
    mine = [folder / "2025-01-30-temperatures.csv", folder / "01-notes.png"]
    for path in mine:
        path.write_text("mine")
    before = {path.name for path in folder.iterdir()}
    # An older report had figures and tables that this one no longer has.
    drawn = json.loads((folder / build.DRAWN).read_text())
    (folder / build.DRAWN).write_text(json.dumps({**drawn, "98-gone": "x", "../outside": "x"}))
    for name in ("98-gone.png", "98-gone.csv", "../outside.csv"):
        (folder / name).write_text("old")
    build.write_report(everything, everything / "page.html")
    assert {path.name for path in folder.iterdir()} == before
    assert [path.read_text() for path in mine] == ["mine", "mine"]
    assert (everything / "outside.csv").exists()


def test_other_files_are_not_replaced(everything, capsys):
    notes = everything / "notes.md"
    notes.write_text("mine")
    assert main(["report", str(everything), "--output", str(notes)]) == 2
    assert "`--output` must be a new file, or a report to replace" in capsys.readouterr().err
    assert notes.read_text() == "mine"
    for _ in range(2):
        assert main(["report", str(everything), "--output", str(everything / "page.html")]) == 0


def test_figure_folder_with_other_files(everything, capsys):
    (everything / "page-files").mkdir()
    (everything / "page-files" / "letter.txt").write_text("mine")
    assert main(["report", str(everything), "--output", str(everything / "page.html")]) == 2
    assert "new or written by a report" in capsys.readouterr().err
    assert not (everything / "page.html").exists()


def test_output_that_cannot_be_written(everything, capsys):
    (everything / "file").write_text("")
    assert main(["report", str(everything), "--output", str(everything / "file" / "page.html")]) == 1
    error = capsys.readouterr().err
    assert "Not a directory (--output " in error
    assert "Traceback" not in error


def test_results_with_nothing_to_show(tmp_path: Path) -> None:
    """A page that names the file, though no section is left."""
    results = report_results.lengths(0.1)
    results["lengths"][0] = None
    report_results.write(tmp_path, {"lengths--model.json": report_results.frame("lengths", "model", results)})
    written = build.write_report(tmp_path)
    assert "lengths--model.json" in written.page.read_text()
    assert (written.figures, written.verdicts) == (0, [])
