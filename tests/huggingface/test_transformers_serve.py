"""``transformers serve`` of a folder that we saved, in a separate process, answers with our attention."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_models import byte_tokenizer
from transformers import AutoModelForCausalLM, LlamaConfig

from softplus_attention.huggingface import SoftplusGPTConfig, SoftplusGPTForCausalLM
from softplus_attention.huggingface.saving import save_trained

pytestmark = pytest.mark.slow
SIZE = {"vocab_size": 257, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96}
IDS = {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": None, "initializer_range": 0.3}
PROMPT = "Hello there, how are you today?"


def save(folder: Path, family: str) -> str:
    """Save a model; returns its greedy continuation of the prompt."""
    torch.manual_seed(0)
    if family == "llama":
        config = LlamaConfig(**SIZE, **IDS, num_key_value_heads=2)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="lssar")
    else:
        model = SoftplusGPTForCausalLM(SoftplusGPTConfig(**SIZE, **IDS, window=8, global_every=2))
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    save_trained(model.eval(), folder, tokenizer)
    ids = torch.tensor([tokenizer(PROMPT)["input_ids"]])
    return tokenizer.decode(model.generate(ids, max_new_tokens=12, do_sample=False)[0, ids.shape[1] :])


def ask(url: str, data: dict[str, Any] | None = None) -> Any:
    body = None if data is None else json.dumps(data).encode()
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


@pytest.fixture
def server(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[tuple[str, str]]:
    for package in ("fastapi", "uvicorn", "openai"):
        pytest.importorskip(package, reason="pip install 'transformers[serving]'")
    family, options = request.param
    text = save(tmp_path / "model", family)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-c", "from transformers.cli.transformers import main; main()", "serve"]
    command += [str(tmp_path / "model"), "--host", "127.0.0.1", "--port", str(port), "--device", "cpu", *options]
    log = tmp_path / "log"
    with log.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    try:
        url = f"http://127.0.0.1:{port}"
        for _ in range(240):
            try:
                ask(f"{url}/health")
                break
            except OSError:
                assert process.poll() is None, log.read_text()
                time.sleep(0.5)
        yield url, text
    finally:
        process.terminate()
        process.wait(30)


TRUST = "--trust-remote-code"


@pytest.mark.parametrize(
    "server",
    [("llama", [TRUST]), ("llama", [TRUST, "--continuous-batching"]), ("gpt", [TRUST, "--continuous-batching"])],
    indirect=True,
    ids=["llama", "llama, continuous batching", "gpt, continuous batching"],
)
def test_serve_answers_with_our_attention(server: tuple[str, str], tmp_path: Path) -> None:
    url, text = server
    request = {"model": str(tmp_path / "model"), "max_tokens": 12, "temperature": 0}
    request["messages"] = [{"role": "user", "content": PROMPT}]
    answer = ask(f"{url}/v1/chat/completions", request)
    assert answer["choices"][0]["message"]["content"] == text
