"""``softplus-attention extend`` as a process: its output folder, resuming, and invalid input."""

from __future__ import annotations

import json
import os
import signal
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import mutations
import pytest
import torch
from commands import Process, refused, run, wait_until
from extend_cases import write_llama
from transformers import AutoModelForCausalLM, BertConfig, BertLMHeadModel, BloomConfig, T5Config

from softplus_attention.evaluation.models import configured_length
from softplus_attention.huggingface.extension.cache import ExtendedCache
from softplus_attention.huggingface.extension.settings import Extension

TEXT = "It was the best of times, it was the worst of times; we had nothing before us. " * 60
SMALL = ["--prompts", "2", "--documents", "1", "--measure", "100", "400"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("models")
    write_llama(place / "llama")
    (place / "text.txt").write_text(TEXT)
    return place


def test_writes_an_extended_model(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "long"
    args = ["--to", 2048, "--output", out, "--heads", 2, "--text", folder / "text.txt", *SMALL]
    done = run("extend", folder / "llama", *args)
    assert done.status == 0, done.text
    assert "2 key heads attend to all tokens" in done.text
    state = json.loads((out / "extend.json").read_text())
    assert state["complete"]
    assert set(state["measured"]) == {"original", "heads"}
    assert {*state["measured"]["heads"]["loss"]} == {"100", "400"}
    model = AutoModelForCausalLM.from_pretrained(out)
    extension = Extension.from_config(model.config)
    assert (extension.trained, extension.length, extension.window, extension.near) == (256, 2048, 64, 64)
    assert configured_length(model.config) == 256  # the training length in evaluations
    order = [tuple(head) for head in state["order"]]
    assert extension.far_heads == [sorted(h for layer, h in order[:2] if layer == number) for number in range(2)]
    found = model.generate(
        torch.arange(500)[None] % 256, max_new_tokens=3, do_sample=False, return_dict_in_generate=True
    )
    assert isinstance(found.past_key_values, ExtendedCache)
    card = (out / "README.md").read_text()
    assert "trained at 256 tokens and extended to 2,048" in card
    assert f"{state['measured']['heads']['loss']['400'][0]:.3f}" in card
    assert (out / "heads.png").is_file()
    again = run("extend", folder / "llama", *args)
    assert (again.status, again.text) == (0, f"already complete: {out}\n")
    assert "started with other options" in refused("extend", folder / "llama", *args, "--seed", 1)


def test_resumes_after_an_interrupt(folder: Path, tmp_path: Path) -> None:
    args = ["extend", folder / "llama", "--to", 512, "--heads", 1, "--text", folder / "text.txt"]
    args += ["--prompts", 40, "--measure", "none"]
    process = Process.start(*args, "--output", tmp_path / "stopped")
    state = tmp_path / "stopped" / "extend.json"
    deadline = time.monotonic() + 100
    while not (state.exists() and len(json.loads(state.read_text())["scores"]) > 1):
        assert process.is_running, process.text
        assert time.monotonic() < deadline
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGINT)
    assert process.wait() == 130
    before = json.loads(state.read_text())["scores"]
    assert 1 < len(before) < 40
    for name in ("stopped", "uninterrupted"):
        assert run(*args, "--output", tmp_path / name).status == 0
    ends = [json.loads((tmp_path / name / "extend.json").read_text()) for name in ("stopped", "uninterrupted")]
    assert ends[0]["scores"] == ends[1]["scores"]
    assert ends[0]["scores"][: len(before)] == before


@pytest.mark.parametrize(("method", "kind"), [("yarn", "yarn"), ("ntk", "dynamic"), ("selfextend", ""), ("window", "")])
def test_other_methods(method: str, kind: str, folder: Path, tmp_path: Path) -> None:
    args = ["--to", 1024, "--output", tmp_path / "out", "--method", method, "--measure", "none"]
    assert run("extend", folder / "llama", *args).status == 0
    config = AutoModelForCausalLM.from_pretrained(tmp_path / "out").config
    if kind:
        assert (config.model_type, config.rope_parameters["rope_type"]) == ("llama", kind)
    else:
        far = sum(map(len, Extension.from_config(config).far_heads))
        assert far == (4 if method == "selfextend" else 0)


def test_number_of_heads_from_a_budget(folder: Path, tmp_path: Path) -> None:
    args = ["--to", 4096, "--text", folder / "text.txt", "--prompts", 1, "--measure", "none"]
    few = refused("extend", folder / "llama", *args, "--output", tmp_path / "out", "--budget", "2%")
    assert "`--budget` must be at least 27% of the cache at 4096 tokens, for one far head, got 2%" in few
    # No result was saved, so the folder can be used again.
    clip = ("--far", "clip", "--near", 64)
    done = run("extend", folder / "llama", *args, "--output", tmp_path / "out", "--budget", "60%", *clip)
    assert "2 key heads attend to all tokens" in done.text
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    extension = Extension.from_config(model.config)
    assert (extension.far, extension.level, extension.log_n) == ("clip", True, "far")
    cache = ExtendedCache(model.config)
    with torch.no_grad():
        model(torch.zeros(1, 4000, dtype=torch.long), past_key_values=cache)
    assert 0.5 < cache.nbytes / (2 * 2 * 4000 * 8 * 2 * 4) < 0.62


def test_far_auto_takes_the_lowest_loss(folder: Path, tmp_path: Path) -> None:
    args = ["--to", 512, "--heads", 2, "--text", folder / "text.txt", "--prompts", 1, "--measure", "none"]
    args += ["--documents", 1]
    done = run("extend", folder / "llama", *args, "--far", "auto", "--fit", 2048, "--output", tmp_path / "auto")
    assert done.status == 0, done.text
    state = json.loads((tmp_path / "auto" / "extend.json").read_text())
    assert {*state["far_losses"]} == {"group", "clip", "lssar"}
    assert state["far"] == min(state["far_losses"], key=state["far_losses"].get)
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "auto").config.extension["far"] == state["far"]
    done = run("extend", folder / "llama", *args, "--far", "lssar", "--fit", 2048, "--output", tmp_path / "lssar")
    assert done.status == 0, done.text
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "lssar")
    powers = torch.cat([x.flatten() for name, x in model.named_parameters() if name.endswith("far_power")])
    assert len(powers) == 4  # two query heads of each of two key heads
    assert (powers != 0.6).all()


def test_tunes_for_minutes(folder: Path, tmp_path: Path) -> None:
    args = ["--to", 512, "--heads", 2, "--text", folder / "text.txt", "--prompts", 1, "--measure", 400]
    args += ["--documents", 1, "--minutes", 0.05, "--output", tmp_path / "out"]
    done = run("extend", folder / "llama", *args)
    assert done.status == 0, done.text
    assert "tuning for 0.05 minutes on sequences of 128 and 512 tokens. Ctrl-C stops" in done.text
    state = json.loads((tmp_path / "out" / "extend.json").read_text())
    assert state["tuned"]["steps"]["short"] > 0
    old, new = (AutoModelForCausalLM.from_pretrained(one) for one in (folder / "llama", tmp_path / "out"))
    moved = [name for name, x in new.state_dict().items() if (x != old.state_dict()[name]).any()]
    assert bool(moved) == state["tuned"]["kept"]
    assert all(".q_proj." in name or ".k_proj." in name for name in moved)
    assert "It was tuned with" in (tmp_path / "out" / "README.md").read_text()
    assert not (tmp_path / "out" / "tuning.pt").exists()


def replace_by_links(outside: Path, out: Path, state: Any) -> None:
    """Puts a link to a file in ``outside`` in place of every file that the command writes."""
    names = ("config.json", "model.safetensors", "README.md", "tokenizer.json", "heads.png", "extend.json")
    for name in names:
        (outside / name).write_text(json.dumps(state) if name == "extend.json" else "mine")
        (out / name).symlink_to(outside / name)
    (outside / ".unfinished").mkdir()
    (outside / ".unfinished" / "mine").touch()
    (out / ".unfinished").symlink_to(outside / ".unfinished")


INVALID_STATE: dict[str, Any] = {
    "scores": [{"mass": [[1.0]]}],
    "measured": {"heads": {"loss": {"100": []}}},
    "found": {"heads": {"needles": {"100": [{"found": 5}]}}},
    "models": {"\x1b[31mred": {}},
    "complete": "no",
    "tuned": {"steps": {"short": 1}},
}


@pytest.mark.parametrize("case", ["links", "layers", *INVALID_STATE])
def test_resumes_from_a_hostile_folder(case: str, folder: Path, tmp_path: Path) -> None:
    """Links are not followed, and an invalid state is a one-line error."""
    args = ["extend", folder / "llama", "--to", 512, "--heads", 1, "--text", folder / "text.txt"]
    args += ["--prompts", 1, "--measure", "none", "--output", tmp_path / "out"]
    assert run(*args).status == 0
    path, outside = tmp_path / "out" / "extend.json", tmp_path / "outside"
    state = json.loads(path.read_text()) | {"complete": False}
    outside.mkdir()
    if case == "links":
        for file in (tmp_path / "out").iterdir():
            file.unlink()
        replace_by_links(outside, tmp_path / "out", state)
        before = mutations.state_of(outside)
        assert run(*args).status == 0
        assert mutations.state_of(outside) == before
        assert not [found for found in (tmp_path / "out").iterdir() if found.is_symlink()]
        return
    if case == "layers":
        state["scores"] = [{name: rows[:1] for name, rows in one.items()} for one in state["scores"]]
    else:
        state["measured" if case in ("found", "models") else case] = INVALID_STATE[case]
    path.write_text(json.dumps(state))
    assert "`--output` must be a folder whose extend.json" in refused(*args)


def test_one_process_at_a_time(folder: Path, tmp_path: Path) -> None:
    args = ["extend", folder / "llama", "--to", 512, "--heads", 1, "--text", folder / "text.txt"]
    args += ["--prompts", 60, "--measure", "none", "--output", tmp_path / "out"]
    first = Process.start(*args)
    assert wait_until(lambda: (tmp_path / "out" / "extend.json").exists(), first)
    second = run(*args)
    assert second.status == 1
    assert "another process is writing" in second.errors[0]
    first.kill()


BAD: dict[str, tuple[list[str], str]] = {
    "shorter": (["--to", "200"], "`--to` must be above the trained length of 256 tokens, got 200"),
    "heads": (
        ["--to", "512", "--heads", "5"],
        "`--heads` must be at most 4, the number of key heads in the",
    ),
    "heads not a number": (["--to", "512", "--heads", "few"], "`--heads` must be a number, auto or all, got 'few'"),
    "budget": (
        ["--to", "512", "--budget", "0.2"],
        "`--budget` must be a percentage of the original's cache such as",
    ),
    "window": (["--to", "512", "--window", "300"], "`--window` must be below the trained length of 256 tokens"),
    "no fit": (["--to", "512", "--far", "lssar"], "`--fit` must be given with --far lssar: a number of tokens"),
    "fit": (["--to", "512", "--fit", "5000"], "`--fit` must be at least 2048 tokens, with --far lssar or auto"),
    "minutes": (["--to", "512", "--minutes", "-1"], "`--minutes` must be a number of minutes, or 0"),
    "minutes of other method": (["--to", "512", "--minutes", "1", "--method", "yarn"], "0 unless --method is heads"),
    "long measure": (
        ["--to", "512", "--text", "SHORT", "--measure", "400"],
        "`--measure` must be at most the 150 tokens of the longest held-out document, got 400",
    ),
    "measure": (["--to", "512", "--measure", "far"], "`--measure` must be lengths of at least 2 tokens, or none"),
    "text": (["--to", "512", "--text", "nowhere.txt"], "--text nowhere.txt: no such file"),
    "short text": (
        ["--to", "512", "--heads", "1", "--text", "SHORT", "--measure", "none"],
        "`text` must be a document of at least",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_options(case: str, folder: Path, tmp_path: Path) -> None:
    args, message = BAD[case]
    (tmp_path / "short.txt").write_text(TEXT[:300])
    args = [str(tmp_path / "short.txt") if word == "SHORT" else word for word in args]
    assert message in refused("extend", folder / "llama", "--output", tmp_path / "out", *args)


def test_unsupported_models(folder: Path, tmp_path: Path) -> None:
    def message(name: str) -> str:
        return refused("extend", tmp_path / name, "--to", 512, "--output", tmp_path / "out")

    small = {"hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1, "intermediate_size": 32}
    BertLMHeadModel(BertConfig(**small, vocab_size=99)).save_pretrained(tmp_path / "bert")
    assert "of the types llama, mistral, qwen2, qwen3, got" in message("bert")
    assert "which is of type bert" in message("bert")
    BloomConfig(hidden_size=32, n_head=2, n_layer=1).save_pretrained(tmp_path / "bloom")
    assert "which has ALiBi instead of rotary positions" in message("bloom")
    T5Config().save_pretrained(tmp_path / "t5")
    assert "an encoder-decoder model" in message("t5")
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "mine.txt").write_text("mine")
    taken = refused("extend", folder / "llama", "--to", 512, "--output", tmp_path / "taken")
    assert "`--output` must be a folder that does not exist yet, or one that this command has started" in taken
    assert "config.json" in refused("extend", tmp_path / "taken", "--to", 512, "--output", tmp_path / "out")


@pytest.mark.skipif(find_spec("gguf") is not None, reason="gguf is installed")
def test_gguf_without_its_package(tmp_path: Path) -> None:
    found = refused("extend", tmp_path / "x.gguf", "--to", 512, "--output", tmp_path / "out")
    assert "the package gguf is installed (pip install gguf)" in found
