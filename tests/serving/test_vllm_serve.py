"""``vllm serve`` of the repository's checkpoint (trained at 256 bytes), queried through OpenAI's client."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import openai
import pytest
import torch
from serving_cases import log_probabilities
from transformers import AutoModelForCausalLM, AutoTokenizer

ROOT = Path(__file__).parents[2]
CHECKPOINT = ROOT / "checkpoints" / "bytes-2.7m"
TEXT = (
    "It was the first day of the year, and the old man sat by the window of his house and looked at the road that "
    "led down to the river. "
)
CHAT = "{% for message in messages %}{{ message['content'] }} {% endfor %}"


@dataclass
class Server:
    process: subprocess.Popen[bytes]
    client: openai.OpenAI
    log: Path

    def complete(self, prompt: str, **options: object) -> openai.types.Completion:
        usual = {"model": "bytes", "max_tokens": 24, "temperature": 0, "extra_body": {"ignore_eos": True}}
        return self.client.completions.create(prompt=prompt, **{**usual, **options})  # type: ignore[call-overload]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("server")
    (folder / "chat.jinja").write_text(CHAT)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [str(Path(sys.executable).with_name("vllm")), "serve", str(CHECKPOINT), "--served-model-name", "bytes"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--max-model-len", "4200", "--dtype", "float32"]
    command += ["--max-num-seqs", "8", "--chat-template", str(folder / "chat.jinja")]
    environment = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_LOGGING_LEVEL": "INFO"}
    log = folder / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, timeout=120)
    try:
        wait_until_ready(process, client, log)
        yield Server(process, client, log)
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()


def wait_until_ready(process: subprocess.Popen[bytes], client: openai.OpenAI, log: Path) -> None:
    for _ in range(300):
        assert process.poll() is None, log.read_text()[-4000:]
        try:
            client.models.list()
            return
        except openai.APIConnectionError:
            time.sleep(1)
    pytest.fail(log.read_text()[-4000:])


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference()


class Reference:
    """The same checkpoint in transformers."""

    def __init__(self) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT)
        self.model = AutoModelForCausalLM.from_pretrained(CHECKPOINT, dtype=torch.float32).eval()

    def greedy(self, text: str, tokens: int = 24) -> str:
        ids = self.tokenizer(text, return_tensors="pt").input_ids
        options = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False, "pad_token_id": 0}
        return self.tokenizer.decode(self.model.generate(ids, **options)[0, ids.shape[1] :])


def test_completion(server: Server, reference: Reference) -> None:
    (choice,) = server.complete(TEXT, logprobs=1).choices
    assert choice.text == reference.greedy(TEXT)
    ids = reference.tokenizer(TEXT + choice.text).input_ids
    expected = log_probabilities(reference.model, ids)[-25:-1].max(-1).values
    torch.testing.assert_close(torch.tensor(choice.logprobs.token_logprobs), expected, rtol=0, atol=1e-3)


def test_chat(server: Server, reference: Reference) -> None:
    messages = [{"role": "user", "content": "Who came to the door?"}]
    options = {"max_completion_tokens": 16, "temperature": 0, "extra_body": {"ignore_eos": True}}
    answer = server.client.chat.completions.create(model="bytes", messages=messages, **options)  # type: ignore[arg-type]
    assert answer.choices[0].message.content == reference.greedy("Who came to the door? ", 16)


def test_stream(server: Server) -> None:
    whole = server.complete(TEXT).choices[0].text
    pieces = [chunk.choices[0].text for chunk in server.complete(TEXT, stream=True)]
    assert "".join(pieces) == whole
    assert len(pieces) > 12


def test_eight_clients_at_once(server: Server, reference: Reference) -> None:
    prompts = [TEXT[7 * i :] for i in range(8)]
    with ThreadPoolExecutor(8) as clients:
        answers = list(clients.map(lambda text: server.complete(text).choices[0].text, prompts))
    assert answers == [reference.greedy(text) for text in prompts]


def test_sixteen_times_the_training_length(server: Server, reference: Reference) -> None:
    text = (TEXT * 40)[:4096]
    answer = server.complete(text)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 16 * 256
    assert answer.choices[0].text == reference.greedy(text)


def test_server_survives_bad_requests(server: Server) -> None:
    for bad in ({"max_tokens": -1}, {"prompt": "x" * 5000}, {"temperature": -2}):
        with pytest.raises(openai.BadRequestError):
            server.complete(**{"prompt": TEXT, **bad})  # type: ignore[arg-type]
    with pytest.raises(openai.NotFoundError):
        server.complete(TEXT, model="llama")
    assert server.complete(TEXT, max_tokens=1).choices[0].text


def test_sigterm(server: Server) -> None:
    """Last in this file, because it stops the server, which must leave no process behind."""
    group = children(server.process.pid)
    assert group
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(60) in (0, -signal.SIGTERM), server.log.read_text()[-4000:]
    for _ in range(100):
        if not any(Path(f"/proc/{pid}").exists() for pid in group):
            return
        time.sleep(0.1)
    pytest.fail(f"still running: {group}")


def children(parent: int) -> list[int]:
    found = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    return [int(pid) for pid in found] + [x for pid in found for x in children(int(pid))]
