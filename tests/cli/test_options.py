"""Names of commands, options and values: full names, - or _, and suggestions for wrong ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from softplus_attention.cli import main
from softplus_attention.training import configured
from softplus_attention.utils import DOCS


@pytest.mark.parametrize(
    ("line", "message"),
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
def test_wrong_name_gets_a_suggestion(line: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        status = main(line.split())
    except SystemExit as stop:
        status = int(stop.code or 0)
    error = capsys.readouterr().err
    assert status == 2
    assert message in error


def test_underscores_are_hyphens(capsys: pytest.CaptureFixture[str]) -> None:
    line = "train --data x --output y --evaluate_every=0 --sequence_length 1"
    assert main(line.split()) == 2
    assert "sequence-length" in capsys.readouterr().err


def test_values_are_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Only option names are normalised."""
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
def test_duplicate_key_is_an_error(name: str, text: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match="is given twice"):
        configured({"data": "x", "output": "y"}, file=tmp_path / name)


@pytest.mark.parametrize(
    ("line", "suggestion"),
    [
        ("evaluate passkey x --form compct --text y --output {}", "compact"),
        ("train --data x --output {} --optimizer adamm", "adamw"),
        ("evaluate synthetic lssa --preset rotry --output {}", "rotary"),
    ],
)
def test_wrong_value_gets_a_suggestion(
    line: str, suggestion: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(line.format(tmp_path / "out").split()) == 2
    assert f"did you mean '{suggestion}'?" in capsys.readouterr().err


def test_help_does_not_break_urls(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["newton", "--help"])
    assert f"{DOCS}/newton\n" in capsys.readouterr().out
