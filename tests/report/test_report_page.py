"""The report's page in Chromium: no console messages, figures drawn, explorer read by pointer and keys."""

from __future__ import annotations

import csv
import os
import re
import warnings

import browser as chromium_browser
import pytest
import report_results

from softplus_attention.cli import main

REQUIRED = "SOFTPLUS_ATTENTION_NEEDS_CHROMIUM"
HAS_CHROMIUM = bool(chromium_browser.CHROMIUM and chromium_browser.DRIVER)
MISSING = "page tests SKIPPED: Chromium and ChromeDriver are missing (apt-get install chromium chromium-driver)"
if not HAS_CHROMIUM:
    warnings.warn(MISSING, stacklevel=1)

in_chromium = pytest.mark.skipif(not HAS_CHROMIUM, reason=MISSING)
FIGURES = "return document.querySelectorAll('.plot svg[role=img]').length"


def test_chromium_is_installed_in_ci():
    """CI sets the variable, so that page tests are not skipped there."""
    if os.environ.get(REQUIRED):
        assert HAS_CHROMIUM, MISSING


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    shown = ("lengths", "passkey", "inside", "maps", "bench")
    files = {name: data for name, data in report_results.everything().items() if name.startswith(shown)}
    report_results.write(folder, files)
    (folder / "broken.json").write_text("{")
    assert main(["report", str(folder)]) == 0
    return folder / "report.html"


@pytest.fixture(scope="module")
def browser():
    with chromium_browser.chromium() as found:
        yield found


def open_on_phone(browser, folder):
    assert main(["report", str(folder)]) == 0
    browser.look(width=390, height=844, phone=True)
    browser.open(folder / "report.html")


@pytest.fixture
def page(browser, report):
    browser.look(width=1280, height=900)
    browser.open(report)
    browser.wait(FIGURES)
    yield browser
    assert browser.console() == []
    assert browser.run("return window.hacked") is None


def test_every_figure_has_its_files(report):
    files = report.parent / "report-files"
    names = {path.stem for path in files.glob("*.csv")}
    links = re.findall(r'href="report-files/([\w-]+)\.(png|svg|csv)"', report.read_text())
    assert {name for name, _ in links} == names
    for name, kind in links:
        assert (files / f"{name}.{kind}").stat().st_size > 20
    with next(files.glob("*-loss-by-length.csv")).open() as handle:
        head, *rows = csv.reader(handle)
    column = head.index("sharp")
    assert [row[0] for row in rows] == ["128", "256", "512", "1024"]
    assert [float(row[column]) for row in rows] == [1.8, 1.8, 1.8, 1.8]
    svg = next(files.glob("*-attention-maps-script*.svg")).read_text()
    assert "<img" not in svg


def test_second_report_redraws_only_missing_figures(report):
    pictures = {path: path.stat().st_mtime_ns for path in report.parent.rglob("*.svg")}
    assert len(pictures) > 15
    one = sorted(pictures)[3]
    one.unlink()
    assert main(["report", str(report.parent)]) == 0
    again = {path: path.stat().st_mtime_ns for path in report.parent.rglob("*.svg")}
    assert {path for path in pictures if again[path] != pictures[path]} == {one}


def test_png_on_request(tmp_path):
    files = report_results.everything()
    report_results.write(tmp_path, {name: files[name] for name in files if name.startswith("lengths")})
    folder = tmp_path / "report-files"
    assert main(["report", str(tmp_path)]) == 0
    assert not list(folder.glob("*.png"))
    assert main(["report", str(tmp_path), "--png"]) == 0
    pictures = sorted(path.stem for path in folder.glob("*.png"))
    assert pictures == sorted(path.stem for path in folder.glob("*.svg"))
    assert f"report-files/{pictures[0]}.png" in (tmp_path / "report.html").read_text()


@in_chromium
@pytest.mark.parametrize("look", ["light", "dark", "phone"])
def test_figures_are_drawn(browser, report, look, tmp_path):
    sizes = {"phone": {"width": 390, "height": 844, "phone": True}}
    browser.look(**sizes.get(look, {"width": 1280, "height": 900, "dark": look == "dark"}))
    browser.open(report)
    browser.wait(f"{FIGURES} === document.querySelectorAll('.plot').length")
    assert browser.run("return document.querySelectorAll('.plot .series path.line').length") > 20
    assert browser.run("return document.querySelectorAll('.plot rect.cell').length") > 20
    assert browser.run("return document.querySelectorAll('.panel canvas.map').length") == 2
    # scrollWidth, because a phone's innerWidth grows with overflowing content.
    assert browser.run("return document.documentElement.scrollWidth") <= (390 if look == "phone" else 1280)
    assert browser.run("return [...document.querySelectorAll('img')].every(image => image.src.startsWith('data:'))")
    paper = browser.run("return getComputedStyle(document.body).backgroundColor")
    assert paper == ("rgb(13, 17, 23)" if look == "dark" else "rgb(255, 255, 255)")
    assert browser.console() == []
    assert browser.run("return window.hacked") is None
    assert browser.screenshot(tmp_path / "page.png").stat().st_size > 10_000


MAP = "return document.querySelector('.panel:nth-child({}) canvas.map').toDataURL()"
READING = "return document.querySelector('.panel:nth-child({}) .reading').textContent"


@in_chromium
def test_explorer_changes_its_map(page):
    before = [page.run(MAP.format(panel)) for panel in (1, 2)]
    page.choose(".panel:nth-child(1) label:nth-child(3) select", "1")
    after = [page.run(MAP.format(panel)) for panel in (1, 2)]
    assert all(one != other for one, other in zip(before, after, strict=True))  # the second follows the first
    page.choose(".panel:nth-child(1) label:nth-child(2) select", "2")
    assert page.run(MAP.format(1)) != after[0]
    page.click(".panel:nth-child(1) .thumbs button:nth-child(1)")
    assert page.run(MAP.format(1)) == before[0]
    page.choose(".panel:nth-child(1) label:nth-child(1) select", "1")
    assert page.run(MAP.format(1)) == before[1]


@in_chromium
def test_explorer_shows_weights(page):
    """Pointer and arrow keys show the file's numbers in both panels at once."""
    selector = ".panel:nth-child(1) canvas.map"
    page.run("document.querySelector('.explorer').scrollIntoView()")
    side = page.run(f"return document.querySelector('{selector}').clientWidth")
    cell, size = side / len(report_results.TOKENS), len(report_results.TOKENS)
    page.hover(selector, round((2.5 - size / 2) * cell), round((5.5 - size / 2) * cell))
    for panel, sharp in ((1, False), (2, True)):
        reading = page.run(READING.format(panel))
        assert reading.startswith("Query 5 “␣years”, key 2 “␣Ishmael”: ")
        weight = report_results.weights(0, 0, sharp)[5][2]
        assert reading.endswith("exactly 0") if weight == 0 else float(reading.split()[-1]) == weight
    page.press(selector, "down", "right", "right")
    assert page.run(READING.format(2)).startswith(f"Query 6 “␣ago”, key 4 “{report_results.HOSTILE_TOKEN[:4]}␣onload")


@in_chromium
def test_explorer_with_different_texts(browser, tmp_path):
    """Two models with the same text are shown first; for another text there is a warning, and cells do not follow."""
    tokens = [f"{number}" for number in range(len(report_results.TOKENS))]
    other = report_results.maps(True) | {"text": "Something else entirely", "tokens": tokens}
    found = {"a": report_results.maps(False), "b": other, "c": report_results.maps(True)}
    report_results.write_results(tmp_path, "maps", **{f"{name} with a long name": m for name, m in found.items()})
    open_on_phone(browser, tmp_path)
    warning = "return document.querySelector('.explorer .warning').{}"
    chosen = "return [...document.querySelectorAll('.panel label:nth-child(1) select')].map(box => box.value)"
    assert browser.run(chosen) == ["0", "2"]
    assert browser.run(warning.format("hidden")) is True
    browser.choose(".panel:nth-child(2) label:nth-child(1) select", "1")
    assert browser.run(warning.format("hidden")) is False
    assert "different texts" in browser.run(warning.format("textContent"))
    assert "“Something else entirely”" in browser.run(warning.format("textContent"))
    before = browser.run(READING.format(2))
    browser.press(".panel:nth-child(1) canvas.map", "right", "right")
    assert "key 2 " in browser.run(READING.format(1))
    assert browser.run(READING.format(2)) == before
    browser.choose(".panel:nth-child(2) label:nth-child(1) select", "2")
    browser.press(".panel:nth-child(1) canvas.map", "right")
    assert "key 3 " in browser.run(READING.format(2))
    assert browser.run("return document.documentElement.scrollWidth") == 390
    assert browser.console() == []


@in_chromium
def test_small_percentages_are_shown(page):
    """A sink of 0.036% is shown in its cell and by the pointer."""
    titles = "[...document.querySelectorAll('figure.heats h3')]"
    maps = f"{titles}.find(t => t.textContent === 'Weight on the first token, by head').closest('figure')"
    figure = f"[...{maps}.querySelectorAll('h4')].find(t => t.textContent === 'mix').parentElement"
    texts = f"return [...{figure}.querySelectorAll('svg text.number')].map(text => text.textContent)"
    assert page.run(texts) == ["0", "0", "0.036", "0.036", "0.072", "0.072"]
    assert page.run(f"return {figure}.querySelector('.ramp').textContent") == "0%30% fraction of the weight"
    name = page.run(f"return {figure}.querySelector('.plot').dataset.figure")
    page.press(f"[data-figure={name}] svg[role=img]", "down")
    assert page.run(f"return {figure}.querySelector('.reading').textContent").endswith(" 0.036%")


@in_chromium
@pytest.mark.parametrize(("heads", "shown"), [(6, True), (20, False)])
def test_numbers_fit_their_cells_on_a_phone(browser, heads, shown, tmp_path):
    """They shrink to fit, and disappear where they would be too small to read."""
    report_results.write_results(tmp_path, "inside", mix=report_results.mixed_inside(64, heads))
    open_on_phone(browser, tmp_path)
    browser.wait(FIGURES)
    texts = browser.run(
        "return [...document.querySelectorAll('svg text.number')].filter(text => text.textContent === '0.036')"
        ".map(text => [text.getBBox().width, text.previousElementSibling.getBBox().width])"
    )
    assert len(texts) == (heads if shown else 0)
    assert all(text <= cell for text, cell in texts)


@in_chromium
def test_charts_by_keys_and_legend(page):
    titles = "[...document.querySelectorAll('figure.lines h3')]"
    name = page.run(f"return {titles}.find(t => t.textContent === 'Loss by length').closest('figure').id")
    page.press(f"#{name} .plot svg[role=img]", "right", "right")
    reading = page.run(f"return document.querySelector('#{name} .reading').textContent")
    assert "256 (2x)" in reading
    assert f"{report_results.HOSTILE} 2.1" in reading
    assert "sharp 1.8" in reading
    lines = f"return document.querySelectorAll('#{name} .series').length"
    assert page.run(lines) == 2
    page.click(f"#{name} .legend li:nth-child(1) button")
    assert page.run(lines) == 1


@in_chromium
def test_theme_switch(page):
    def paper() -> str:
        return page.run("return getComputedStyle(document.body).backgroundColor")

    seen = [paper()]
    for _ in range(2):
        page.click("#theme")
        seen.append(paper())
    assert seen == ["rgb(255, 255, 255)", "rgb(255, 255, 255)", "rgb(13, 17, 23)"]
    assert page.run("return document.getElementById('theme').textContent") == "Theme: dark"
    page.click("#theme")
