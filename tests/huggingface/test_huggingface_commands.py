"""``softplus-attention convert`` and ``generate``, training with Trainer, and retrofitting a softmax model."""

from __future__ import annotations

import functools
import json
import os
import re
import signal
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from evaluation_cases import open_saved, saved_model
from huggingface_models import byte_tokenizer
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BertConfig,
    BertLMHeadModel,
    GPT2Config,
    LlamaConfig,
    LlamaForSequenceClassification,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from softplus_attention import PowerByLength
from softplus_attention.cli import main
from softplus_attention.huggingface import SoftplusGPTConfig, SoftplusGPTForCausalLM, set_power, use_attention
from softplus_attention.huggingface.attention import attention_from_config
from softplus_attention.huggingface.loading import check_is_causal

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
TEXT = "The quick brown fox jumps over the lazy dog, and the dog sleeps on. " * 40
POWERS = "`--power` must be a number >= 1, or log:FACTOR (FACTOR times the log of the number of keys)"
SEEDS = "`--seed` must be from -2**63 to 2**64 - 1"
PROMPT = ["--prompt", "a"]
BYTES = {"vocab_size": 257, "pad_token_id": 256, "bos_token_id": 256, "eos_token_id": 256}


def llama(**kwargs):
    torch.manual_seed(0)
    size = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128}
    return AutoModelForCausalLM.from_config(LlamaConfig(**size, **BYTES, max_position_embeddings=64), **kwargs)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    llama().save_pretrained(tmp_path / "llama")
    byte_tokenizer().save_pretrained(tmp_path / "llama")
    (tmp_path / "text.txt").write_text(TEXT)
    return tmp_path


class TestConvert:
    def test_swaps_measures_and_saves(self, saved, capsys):
        arguments = ["convert", str(saved / "llama"), "--output", str(saved / "new"), "--power", "3", "--length", "64"]
        assert main([*arguments, "--text", str(saved / "text.txt"), "--device", "cpu"]) == 0
        out = capsys.readouterr().out
        before, after = (float(x) for x in re.findall(r"(?:before|lssar) +([0-9.]+)", out))
        config = json.loads((saved / "new" / "config.json").read_text())
        assert config["attn_implementation"] == "lssar"
        assert config["softplus_attention"] == {"power": 3}

        tokens = torch.tensor(byte_tokenizer()(TEXT)["input_ids"])
        rows = tokens[: len(tokens) // 64 * 64].view(-1, 64)
        for folder, printed in (("llama", before), ("new", after)):
            with torch.no_grad():
                loss = AutoModelForCausalLM.from_pretrained(saved / folder)(rows, labels=rows).loss.item()
            assert printed == pytest.approx(loss, abs=1e-4)

    @pytest.mark.parametrize(
        ("model", "options", "message"),
        [
            ("llama", ["--output", "{}/llama"], "`--output` must be a folder that does not exist yet"),
            ("llama", ["--attention", "lsar"], "no attention is named 'lsar'"),
            ("none", [], "`model` must be a folder with config.json"),
            ("llama", ["--text", "{}/none"], "no such file or directory"),
            ("llama", ["--power", "0.1"], "`--power` must be a number >= 1"),
            ("llama", ["--power", "log:0"], POWERS + ", got 'log:0'"),
            ("llama", ["--attention", "ssmax"], "it has learned parameters"),
            ("llama", ["--device", "meta"], "`--device` must be one that torch can use here, cpu"),
            ("classifier", [], "1 missing weights for LlamaForCausalLM, such as lm_head.weight"),
        ],
    )
    def test_bad_input(self, saved, capsys, model, options, message):
        if model == "classifier":
            LlamaForSequenceClassification(llama().config).save_pretrained(saved / "classifier")
        options = [option.format(saved) for option in options]
        assert main(["convert", str(saved / model), "--output", str(saved / "new"), "--device", "cpu", *options]) == 2
        assert message in capsys.readouterr().err
        assert not (saved / "new").exists()

    def test_a_power_that_grows_with_the_length(self, saved):
        arguments = ["convert", str(saved / "llama"), "--output", str(saved / "new"), "--power", "log:0.6"]
        assert main([*arguments, "--device", "cpu"]) == 0
        config = AutoModelForCausalLM.from_pretrained(saved / "new").config
        assert attention_from_config(config, "lssar").spec.power == PowerByLength.log_n(0.6)


@pytest.mark.parametrize(
    "arguments", [["convert", "{}", "--output", "{}-new"], ["generate", "--model", "{}", "--prompt", "a"]]
)
def test_bidirectional_model_is_refused(arguments: list[str], saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """transformers loads BERT as a causal language model with only a warning."""
    folder = saved / "bert"
    config = BertConfig(
        vocab_size=256, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
        attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    BertLMHeadModel(config).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    assert main([*(word.format(folder) for word in arguments), "--device", "cpu"]) == 2
    assert "BertLMHeadModel is not causal: later tokens change earlier logits" in capsys.readouterr().err
    assert not Path(f"{folder}-new").exists()


@pytest.mark.parametrize(("leak", "refused"), [(0.0, False), (1e-6, False), (1e-3, True)])
def test_rounding_is_not_a_leak(leak: float, refused: bool) -> None:
    """Experts of a causal model round differently with another token: in Mixtral by 1e-7 to 1e-6 of the logits."""

    class Leaking(torch.nn.Embedding):
        def get_input_embeddings(self) -> torch.nn.Embedding:
            return self

        def forward(self, input_ids: torch.Tensor, use_cache: bool) -> SimpleNamespace:
            own = super().forward(input_ids)
            return SimpleNamespace(logits=own + leak * own[:, -1:])

    torch.manual_seed(0)
    expected = pytest.raises(ValueError, match="model: Leaking is not causal")
    with expected if refused else nullcontext():
        check_is_causal("model", Leaking(32, 32), torch.arange(4)[None])


def generate(model: Path, *options: str) -> int:
    return main(["generate", "--model", str(model), "--device", "cpu", *options])


class TestGenerate:
    def test_streams_and_reports(self, saved, capsys):
        options = ["--prompt", "The quick", "--max-new-tokens", "70", "--temperature", "0"]
        assert generate(saved / "llama", *options) == 0
        captured = capsys.readouterr()
        assert captured.out.startswith("The quick")
        assert re.search(r"70 new tokens after 9 of the prompt.*[0-9.]+ tokens/s; 1.2 times the training", captured.err)

    def test_a_real_process_with_a_prompt_file(self, saved):
        use_attention(llama(), "lssar").save_pretrained(saved / "ours")
        command = [sys.executable, "-m", "softplus_attention.cli", "generate", "--model", str(saved / "ours")]
        command += ["--tokenizer", str(saved / "llama"), "--prompt-file", str(saved / "text.txt"), "--power", "7"]
        done = subprocess.run(
            [*command, "--max-new-tokens", "5", "--device", "cpu"], capture_output=True, text=True, timeout=240
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith(TEXT)
        assert "times the training length of 64" in done.stderr

    @pytest.mark.parametrize("own", [15, "learned", "learned-log"])
    @pytest.mark.parametrize("power", ["3", "log:2"])
    def test_power_option_matches_evaluate(self, own, power, tmp_path, capsys):
        folder = saved_model(tmp_path, power=own)
        options = ["--prompt", "abcdefgh" * 4, "--temperature", "0", "--max-new-tokens", "12"]
        outputs = []
        for more in ([], ["--power", power]):
            assert generate(folder, *options, *more) == 0
            outputs.append(capsys.readouterr().out)
        changed, tokenizer = open_saved(f"{folder}+power={power}").model, AutoTokenizer.from_pretrained(folder)
        inputs = tokenizer("abcdefgh" * 4, return_tensors="pt", return_token_type_ids=False)
        expected = changed.generate(**inputs, max_new_tokens=12, do_sample=False)
        assert outputs[1].strip() == tokenizer.decode(expected[0], skip_special_tokens=True).strip()
        assert outputs[0] != outputs[1]

    def test_a_tokenizer_of_another_model(self, saved, capsys):
        config = GPT2Config(n_embd=32, n_layer=1, n_head=2, n_positions=16, **BYTES | {"vocab_size": 65})
        AutoModelForCausalLM.from_config(config).save_pretrained(saved / "few")
        assert generate(saved / "few", "--tokenizer", str(saved / "llama"), "--prompt", "az") == 2
        captured = capsys.readouterr()
        assert "the prompt has token 89, the model 65 tokens. Pass its own --tokenizer" in captured.err
        assert captured.out == ""

    def test_beyond_learned_positions(self, saved, capsys):
        config = GPT2Config(n_embd=32, n_layer=1, n_head=2, n_positions=16, **BYTES)
        AutoModelForCausalLM.from_config(config).save_pretrained(saved / "gpt2")
        assert generate(saved / "gpt2", "--tokenizer", str(saved / "llama"), "--prompt", "a" * 30) == 2
        assert "are more than this model has learned positions" in capsys.readouterr().err

    def test_truncated_weights(self, saved, capsys):
        weights = saved / "llama" / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:1000])
        assert generate(saved / "llama", "--prompt", "a") == 2
        assert "cut off or damaged" in capsys.readouterr().err

    @pytest.mark.parametrize("device", ["meta", "vulkan", "hpu", "opengl", "mps"])
    def test_unavailable_devices(self, device, saved, capsys):
        if device == "mps" and torch.backends.mps.is_available():
            pytest.skip("MPS is available")
        assert generate(saved / "llama", "--prompt", "a", "--device", device) == 2
        assert "`--device` must be one that torch can use here, cpu" in (err := capsys.readouterr().err)
        assert err.endswith(f"got {device!r}\n")

    @pytest.mark.parametrize("seed", [-(2**63), 2**64 - 1])
    def test_smallest_and_largest_seed(self, seed, saved, capsys):
        assert generate(saved / "llama", "--prompt", "a", "--max-new-tokens", "1", f"--seed={seed}") == 0
        assert capsys.readouterr().out.startswith("a")

    @pytest.mark.parametrize(
        ("model", "options", "message"),
        [
            ("llama", ["--prompt", ""], "the prompt is empty. Give --prompt at least one token"),
            ("llama", ["--prompt-file", "{}/empty"], "the prompt is empty. Give --prompt-file"),
            ("none", PROMPT, "`model` must be a folder with config.json"),
            ("run", PROMPT, "the model of this run is in {}/run/model"),
            ("run/checkpoint-4", PROMPT, "the model of this run is in {}/run/model"),
            ("llama", [*PROMPT, "--device", "cuda:99"], "`--device` must be available"),
            ("llama", [*PROMPT, "--max-new-tokens", "0"], "`--max-new-tokens` must be at least 1"),
            ("llama", [*PROMPT, f"--seed={-(2**63) - 1}"], SEEDS + ", got -9223372036854775809"),
            ("llama", [*PROMPT, f"--seed={2**64}"], SEEDS),
            ("llama", [*PROMPT, "--power", "3"], "whose power can be set"),
            ("llama", [*PROMPT, "--power", "log:many"], POWERS + ", got 'log:many'"),
            ("llama", [*PROMPT, "--power", "log:1000"], POWERS + ", got 'log:1000': "),
            ("llama", [*PROMPT, "--power", "learned"], POWERS + ", got 'learned'"),
            ("llama", [*PROMPT, "--power", "nan"], POWERS + ", got 'nan'"),
        ],
    )
    def test_bad_input(self, saved, capsys, model, options, message):
        (saved / "run" / "model").mkdir(parents=True)
        (saved / "run" / "checkpoint-4").mkdir()
        (saved / "run" / "model" / "config.json").write_text("{}")
        (saved / "empty").write_text("")
        assert generate(saved / model, *(option.format(saved) for option in options)) == 2
        assert message.format(saved) in capsys.readouterr().err


class Rows(torch.utils.data.Dataset):
    """Byte sequences from different places of the text."""

    def __init__(self, length: int = 64) -> None:
        self.tokens, self.length = torch.tensor(byte_tokenizer()(TEXT)["input_ids"]), length

    def __len__(self) -> int:
        return 256

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        start = i * 37 % (len(self.tokens) - self.length)
        row = self.tokens[start : start + self.length]
        return {"input_ids": row, "labels": row}


def trained(model, folder: Path, steps: int, *callbacks: TrainerCallback) -> list[float]:
    """The logged losses of a short run with transformers' Trainer."""
    options = {"per_device_train_batch_size": 8, "learning_rate": 3e-3, "logging_steps": 5, "report_to": "none"}
    more = {"use_cpu": True, "save_strategy": "no", "disable_tqdm": True, "seed": 0, "lr_scheduler_type": "constant"}
    arguments = TrainingArguments(str(folder), max_steps=steps, **options, **more)
    trainer = Trainer(model, arguments, train_dataset=Rows(), callbacks=list(callbacks))
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


class RisingPower(TrainerCallback):
    def __init__(self, model, powers: dict[int, int]) -> None:
        self.model, self.powers = model, powers

    def on_step_begin(self, args, state, control, **_):
        if state.global_step in self.powers:
            set_power(self.model, self.powers[state.global_step])


class TestTrainer:
    def test_lowers_the_loss(self, tmp_path):
        torch.manual_seed(0)
        size = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
        model = SoftplusGPTForCausalLM(SoftplusGPTConfig(**size, **BYTES, power=3))
        losses = trained(model, tmp_path, 30, RisingPower(model, {10: 7, 20: 15}))
        assert losses[-1] < 0.7 * losses[0]
        assert model.config.power == 15

    def test_retrofit(self, tmp_path):
        """Swapping LSSAR into a softmax model raises the loss; fine-tuning with a rising power nearly restores it."""
        model = llama()
        learned = trained(model, tmp_path / "a", 60)[-1]
        rows = torch.stack([Rows()[i]["input_ids"] for i in range(16)])

        def loss() -> float:
            with torch.no_grad():
                return model.eval()(rows, labels=rows).loss.item()

        before = loss()
        use_attention(model, "lssar", power=3)
        swapped = loss()
        trained(model.train(), tmp_path / "b", 60, RisingPower(model, {20: 7, 40: 15}))
        tuned = loss()
        assert swapped > before + 0.3
        assert tuned < before + 0.1
        assert learned < 2.0
        assert model.config.softplus_attention["power"] == 15


TRAIN = """
import json, os, sys, torch
sys.path[:0] = sys.argv[1].split(os.pathsep)
from test_huggingface_commands import BYTES, Rows
from transformers import Trainer, TrainingArguments
from softplus_attention.huggingface import SoftplusGPTConfig, SoftplusGPTForCausalLM
processes = int(os.environ.get("WORLD_SIZE", 1))
torch.manual_seed(0)
model = SoftplusGPTForCausalLM(SoftplusGPTConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, **BYTES))
arguments = TrainingArguments(sys.argv[2], max_steps=10, per_device_train_batch_size=8 // processes, logging_steps=1,
    learning_rate=3e-3, report_to="none", use_cpu=True, save_strategy="no", disable_tqdm=True, seed=0)
assert arguments.world_size == processes
trainer = Trainer(model, arguments, train_dataset=Rows())
trainer.train()
if trainer.is_world_process_zero():
    json.dump([e["loss"] for e in trainer.state.log_history if "loss" in e], open(sys.argv[2] + ".json", "w"))
"""


@pytest.mark.slow
def test_two_processes_give_the_losses_of_one(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    here = Path(__file__).parent
    tests = os.pathsep.join([str(here), str(here.parent / "support")])
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    for name, launcher in (("one", [sys.executable]), ("two", torchrun)):
        command = [*launcher, str(script), tests, str(tmp_path / name)]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
        assert done.returncode == 0, done.stderr
    one, two = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("one", "two"))
    assert len(one) == 10
    torch.testing.assert_close(torch.tensor(two), torch.tensor(one), atol=1e-4, rtol=0)
    assert one[-1] < one[0]


class TestInterruptedGenerate:
    @pytest.fixture
    def running(self, saved):
        command = [sys.executable, "-m", "softplus_attention", "generate", "--model", str(saved / "llama")]
        command += ["--prompt", "The quick", "--max-new-tokens", "5000", "--temperature", "1"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        # Background jobs of a shell ignore SIGINT, and their child processes inherit that.
        listening = functools.partial(signal.signal, signal.SIGINT, signal.default_int_handler)
        with subprocess.Popen(command, **pipes, env=environment, preexec_fn=listening) as process:
            assert process.stdout is not None
            assert process.stdout.read(5)
            yield process
            process.kill()

    def test_output_is_closed(self, running):
        running.stdout.close()
        running.stdout = None
        error = running.communicate(timeout=60)[1].decode()
        assert running.returncode == 141, error
        assert "Traceback" not in error

    def test_keyboard_interrupt(self, running):
        running.send_signal(signal.SIGINT)
        error = running.communicate(timeout=60)[1].decode()
        assert running.returncode == 130, error
        assert error.endswith("softplus-attention: stopped\n")
        assert "Traceback" not in error
