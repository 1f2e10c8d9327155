"""The demo with small models: its losses, its files, and a second run."""

from __future__ import annotations

import csv
import json
import re
from html.parser import HTMLParser

import pytest

from softplus_attention.cli import demo, main


class Tags(HTMLParser):
    """Collects the tags of a page, and checks that each is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag, attrs):
        self.seen.append(tag)
        if tag not in ("meta", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


@pytest.fixture
def small(monkeypatch):
    """Models of one layer trained at 64 bytes: seconds instead of minutes."""
    size = {"layers": 1, "width": 64, "heads": 1, "sequence_length": 64, "batch_size": 16, "micro_batch_size": 16}
    monkeypatch.setattr(demo, "TRAINING", {**demo.TRAINING, **size, "save_every": 1000})


def test_end_to_end(small, tmp_path, capsys, monkeypatch):
    arguments = ["demo", "--output", str(tmp_path / "d"), "--steps", "300", "--texts", "8", "--device", "cpu"]
    assert main(arguments) == 0
    out = capsys.readouterr().out
    losses = json.loads((tmp_path / "d" / "results.json").read_text())
    assert losses["lengths"] == [64, 128, 256, 512, 1024]
    for name, row in losses["loss"].items():
        printed = re.search(re.escape(name) + r" +([\d. ]+)\n", out)
        assert [float(x) for x in printed[1].split()] == [round(x, 3) for x in row]
        assert all(1 < x < 6 for x in row)
    # With seeds 0 and 1, softmax had 2.65 and 2.51 at 16x; LSSAR 2.15 and 2.12 at 16x, 2.15 and 2.13 at 1x.
    check_losses(losses["loss"])
    with (tmp_path / "d" / "loss-by-length.csv").open() as handle:
        table = list(csv.reader(handle))
    assert table[0] == ["attention", "64", "128", "256", "512", "1024"]
    assert [row[0] for row in table[1:]] == list(demo.ARMS)

    page = (tmp_path / "d" / "index.html").read_text()
    tags = Tags()
    tags.feed(page)
    assert tags.open == []
    assert {"table", "figure", "h1"} <= set(tags.seen)
    for title in ("Demo: loss by length (results.json)", "Training loss by step"):
        assert title in page
    assert set(re.findall(r"https?://[\w./]+", page)) == {"http://www.w3.org/2000/svg"}
    for line in out.split("Look at:")[1].split():
        assert (tmp_path / "d" / line.split("/")[-1]).stat().st_size > 100

    # A second run, with another path to the folder, trains nothing and gives the same numbers.
    monkeypatch.chdir(tmp_path)
    assert main([*arguments, "--output", "d"]) == 0
    again = json.loads((tmp_path / "d" / "results.json").read_text())
    assert again["loss"] == losses["loss"]

    # The error for other settings names the options of the demo, not those of train.
    arguments[arguments.index("300")] = "301"
    assert main(arguments) == 1
    error = capsys.readouterr().err
    assert "--overwrite to start over" in error
    assert "--allow-config-changes" not in error

    # --overwrite removes only files of a demo.
    mine = [tmp_path / "d" / name for name in ("data.csv", "runs/mine.txt", "runs/softmax-mine/run.txt", "text/a.txt")]
    for path in mine:
        path.parent.mkdir(exist_ok=True)
        path.write_text("mine")
    demo.clear(tmp_path / "d")
    assert all(path.read_text() == "mine" for path in mine)
    assert not (tmp_path / "d" / "data").exists()
    assert {path.name for path in (tmp_path / "d" / "runs").iterdir()} == {"mine.txt", "softmax-mine"}
    (tmp_path / "d" / "data").mkdir()
    (tmp_path / "d" / "data" / "thesis.csv").write_text("mine")
    demo.clear(tmp_path / "d")
    assert (tmp_path / "d" / "data" / "thesis.csv").read_text() == "mine"


def test_bad_options(tmp_path, capsys):
    assert main(["demo", "--output", str(tmp_path / "d"), "--steps", "3"]) == 2
    assert "`--steps` must be at least 10, got 3" in capsys.readouterr().err
    assert not (tmp_path / "d").exists()


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_full_demo(seed, tmp_path):
    assert main(["demo", "--output", str(tmp_path / "d"), "--seed", str(seed), "--device", "cpu"]) == 0
    check_losses(json.loads((tmp_path / "d" / "results.json").read_text())["loss"])


def check_losses(loss):
    """LSSAR at 16x is below softmax, and within 0.15 of its own loss at 1x."""
    ours, softmax = loss["LSSAR"], loss["softmax"]
    assert ours[-1] < softmax[-1] - 0.2
    assert ours[-1] < ours[0] + 0.15


@pytest.mark.parametrize("command", [["demo"], ["evaluate", "lengths", "nowhere", "--text", "builtin"]])
def test_folder_with_other_files_is_an_error(command, tmp_path, capsys):
    (tmp_path / "letter.txt").write_text("mine")
    assert main([*command, "--output", str(tmp_path)]) == 2
    assert f"{tmp_path} contains unrelated files (letter.txt)" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["letter.txt"]
