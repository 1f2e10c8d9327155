"""The measures as functions: the same numbers as the commands, tables, plots, help() and dir()."""

from __future__ import annotations

import inspect

import pytest
from evaluation_cases import saved_model

from softplus_attention import charts, evaluation
from softplus_attention.cli import main
from softplus_attention.evaluation import evaluate
from softplus_attention.huggingface import SoftplusGPTForCausalLM
from softplus_attention.huggingface.loading import load_tokenizer
from softplus_attention.report import report
from softplus_attention.utils.results import read

TEXT = "The quick brown fox jumps over the lazy dog. " * 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return saved_model(tmp_path_factory.mktemp("models") / "lssar")


def test_lengths_of_a_folder_and_in_memory(folder, tmp_path):
    """The command, a folder and a model in memory give the same numbers."""
    (tmp_path / "text.txt").write_text(TEXT)
    args = ["evaluate", "lengths", str(folder), "--text", str(tmp_path / "text.txt"), "--lengths", "16,64"]
    assert main([*args, "--output", str(tmp_path / "out"), "--device", "cpu"]) == 0
    expected = read(tmp_path / "out" / "lengths--lssar.json")["results"]["lengths"]
    model = SoftplusGPTForCausalLM.from_pretrained(folder)
    tokenizer = load_tokenizer(str(folder))
    calls = [
        evaluate.lengths(folder, [TEXT], [16, 64], device="cpu"),
        evaluate.lengths(model, TEXT, [16, 64], tokenizer=tokenizer, training_length=16),
    ]
    for found in calls:
        entries = found.results[0]["results"]["lengths"]
        assert [{**entry, "seconds": 0} for entry in entries] == [{**entry, "seconds": 0} for entry in expected]
    assert f"{expected[1]['loss']:.4f}" in calls[0].table()
    assert repr(calls[0]) == calls[0].table()
    assert f"<td>{expected[1]['loss']:.3f}</td>" in calls[0]._repr_html_()
    assert calls[0].plot().axes[0].get_ylabel() == "mean loss (nats)"
    both = calls[0] + evaluate.lengths(f"b={folder}+power=3", TEXT, [16, 64], device="cpu")
    assert both.table().count("\n") > calls[0].table().count("\n")


def test_all_measures_and_report(folder, tmp_path):
    found = [
        evaluate.lengths(folder, TEXT, device="cpu", control=False),
        evaluate.passkey(folder, [640], [0.5], trials=2, device="cpu"),
        evaluate.inside(folder, TEXT, [16, 64], device="cpu"),
        evaluate.maps(folder, "Call me Ishmael.", device="cpu"),
    ]
    assert [len(result.results) for result in found] == [1] * 4
    assert [entry["times"] for entry in found[0].results[0]["results"]["lengths"]] == [1, 2, 4, 8, 16]
    for result in found:
        assert "<" in result._repr_html_()
        result.save(tmp_path / "all")
    written = report(tmp_path / "all")
    assert written.page == tmp_path / "all" / "report.html"
    assert len(written.found.results) == 4
    assert written.verdicts[0].startswith("lssar: holds to ")
    assert written.verdicts[0] in written._repr_html_()


def test_folder_saves_the_result(folder, tmp_path):
    for _ in "ab":
        evaluate.lengths(folder, TEXT, [16], device="cpu", folder=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["lengths--lssar.json"]


def test_results_of_different_measures_do_not_add(folder):
    one, other = evaluate.Evaluation("lengths", []), evaluate.Evaluation("maps", [])
    with pytest.raises(ValueError, match="`other` must be a result of lengths, got one of maps"):
        one + other


def test_texts_too_short(folder):
    with pytest.raises(ValueError, match=r"`texts` are too short: the longest has \d+ tokens, less than \d+ tokens"):
        evaluate.lengths(folder, "a", device="cpu")


def test_docstrings_name_every_argument():
    for function in (evaluate.lengths, evaluate.passkey, evaluate.inside, evaluate.maps, report):
        described = inspect.getdoc(function)
        for name in inspect.signature(function).parameters:
            assert name in described, f"{function.__name__}: {name}"


@pytest.mark.parametrize("package", [evaluation, charts])
def test_dir_lists_public_names(package):
    assert dir(package) == sorted(package.__all__)
    assert all(getattr(package, name) is not None for name in package.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = package.nothing
