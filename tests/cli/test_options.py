"""Names of commands and options: whole, with - or _, and the nearest right one where they are wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from softplus_attention.cli import main
from softplus_attention.training import configured


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("evalute lengths", "'evalute' is not one of demo, data"),
        ("evalute lengths", "did you mean 'evaluate'?"),
        ("evaluate lenghts", "did you mean 'lengths'?"),
        ("--verson", "there is no option --verson; did you mean '--version'?"),
        ("train --step 10", "there is no option --step; did you mean '--steps'?"),
        ("train --evaluate-evry=5", "there is no option --evaluate-evry; did you mean '--evaluate-every'?"),
        ("train --preset samll --data x --output y", "there is no preset 'samll'; did you mean 'small'?"),
        ("train --attention lssr --data x --output y", "no attention is named 'lssr'; did you mean 'lssar'?"),
        ("data prepare book.txt --tokeniser bytes", "there is no option --tokeniser; did you mean '--tokenizer'?"),
    ],
)
def test_a_wrong_name_gets_the_nearest(line: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        status = main(line.split())
    except SystemExit as stop:
        status = int(stop.code or 0)
    error = capsys.readouterr().err
    assert status == 2
    assert words in error


def test_underscores_are_hyphens(capsys: pytest.CaptureFixture[str]) -> None:
    line = "train --data x --output y --evaluate_every=0 --sequence_length 1"
    assert main(line.split()) == 2
    assert "sequence-length" in capsys.readouterr().err


def test_values_are_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Only names are changed: a value may hold anything."""
    assert main(["report", f"{tmp_path}/a_b", "--output", f"{tmp_path}/c_d"]) != 0
    assert "a_b" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("run.json", '{"steps": 5, "steps": 6}'),
        ("run.yaml", "steps: 5\nsteps: 6\n"),
        ("run.yaml", "batch-size: 5\nbatch_size: 6\n"),
    ],
)
def test_a_key_given_twice_is_an_error(name: str, text: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match="is given twice"):
        configured({"data": "x", "output": "y"}, file=tmp_path / name)


def test_values_get_the_nearest_right_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words, right in (
        (["evaluate", "passkey", "x", "--form", "compct", "--text", "y"], "compact"),
        (["train", "--data", "x", "--output", str(tmp_path / "y"), "--optimizer", "adamm"], "adamw"),
        (["evaluate", "synthetic", "lssa", "--preset", "rotry", "--output", str(tmp_path / "z")], "rotary"),
    ):
        assert main(words) == 2
        assert f"did you mean '{right}'?" in capsys.readouterr().err
