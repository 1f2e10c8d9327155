"""The first hour of a new user: the wheel in a fresh environment, the README, their own text and model.

`make first-hour`. Only README and docs of the repository are used, as by a reader who copies from them.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
OWN_TEXT = "Chapter {0}. It was the {0}th day of rain, and the {0}th boat had left the harbour before the bell rang.\n"


@dataclass
class Home:
    """The user's folder, and an environment with the package installed as from PyPI."""

    folder: Path
    environment: Path

    def run(self, *command: str, status: int = 0, timeout: float = 300, folder: str = ".") -> str:
        """The command's stderr and stdout; checks the exit status and that there is no traceback."""
        (self.folder / folder).mkdir(exist_ok=True)
        keep = {name: os.environ[name] for name in ("PATH", "HOME", "OMP_NUM_THREADS") if name in os.environ}
        offline = {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_WAIT_POLICY": "passive"}
        program = self.environment / "bin" / command[0]
        done = subprocess.run(
            [str(program), *command[1:]], cwd=self.folder / folder, env=keep | offline, capture_output=True, text=True,
            timeout=timeout,
        )  # fmt: skip
        assert done.returncode == status, f"{command}: {done.stdout[-2000:]}\n{done.stderr[-4000:]}"
        assert "Traceback" not in done.stderr
        return done.stderr + done.stdout

    def python(self, code: str, folder: str = ".") -> str:
        return self.run("python", "-c", textwrap.dedent(code), folder=folder)

    def command(self, *arguments: str, status: int = 0) -> str:
        return self.run("softplus-attention", *arguments, status=status)

    def install(self, *packages: str) -> None:
        pip = [str(self.environment / "bin" / "python"), "-m", "pip", "install", "--quiet"]
        subprocess.run([*pip, "-c", str(ROOT / "constraints.txt"), *packages], check=True, timeout=1500)


def blocks(page: Path, after: str = "", before: str = "") -> list[str]:
    text = page.read_text()
    text = text[text.index(after) if after else 0 : text.index(before) if before else None]
    return [
        textwrap.dedent(code) for code in re.findall(r"^ *```py(?:thon)?\n(.*?)^ *```", text, re.DOTALL | re.MULTILINE)
    ]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    build = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder)]
    subprocess.run(build, check=True, cwd=ROOT, capture_output=True, timeout=300)
    (path,) = folder.iterdir()
    return path


@pytest.fixture(scope="module")
def torch_alone(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Home:
    """The environment after `pip install softplus-attention`."""
    folder = tmp_path_factory.mktemp("home")
    environment = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", str(environment)], check=True, timeout=300)
    home = Home(folder, environment)
    home.install("torch", str(wheel))
    return home


@pytest.fixture(scope="module")
def home(torch_alone: Home, wheel: Path) -> Home:
    torch_alone.install(f"{wheel}[huggingface,plots,baselines]", "peft", "trl", "torchao", "tensorboard")
    return torch_alone


@pytest.fixture(scope="module")
def data(home: Home) -> str:
    """A single text with Windows line endings, whose end becomes the validation split, without network access."""
    text = "".join(OWN_TEXT.format(number) for number in range(600))
    (home.folder / "mybook.txt").write_bytes(text.replace("\n", "\r\n").encode())
    output = home.command("data", "prepare", "mybook.txt", "--output", "data/mine")
    assert "validation" in output
    assert "CRLF" in output
    return "data/mine"


TRAIN = ["--preset", "tiny", "--steps", "30", "--evaluate-every", "15", "--layers", "3", "--width", "64",
         "--sequence-length", "64", "--batch-size", "8", "--save-every", "15"]  # fmt: skip


@pytest.fixture(scope="module")
def trained(home: Home, data: str) -> str:
    home.command("train", "--data", data, "--output", "runs/mine", *TRAIN)
    assert (home.folder / "runs/mine/model/README.md").exists()
    return "runs/mine/model"


class TestTorchAlone:
    def test_readme_op(self, torch_alone: Home) -> None:
        """The blocks between "Use" and "Hugging Face" need only torch."""
        code = blocks(ROOT / "README.md", after="## Use", before="## Hugging Face")
        assert code
        torch_alone.python("\n".join(code))
        assert "transformers" not in torch_alone.run("python", "-m", "pip", "list")

    def test_info_and_bench(self, torch_alone: Home) -> None:
        assert "impl='auto'" in torch_alone.command("info")
        output = torch_alone.command("bench", "--sections", "op,decode", "--lengths", "64", "--seconds", "4")
        assert "lssar p=15" in output

    @pytest.mark.parametrize("command", ["demo", "train --data x --output y", "generate --model x --prompt y"])
    def test_missing_extra_is_named(self, torch_alone: Home, command: str) -> None:
        """As a pip command that works without the repository."""
        output = torch_alone.command(*command.split(), status=2)
        assert "pip install 'softplus-attention[huggingface]'" in output


def test_readme_examples(home: Home) -> None:
    home.python("\n".join(blocks(ROOT / "README.md")), folder="examples")


@pytest.mark.parametrize("page", ["start", "op", "huggingface", "training", "evaluation", "attentions", "works-with"])
def test_examples_of_the_docs(home: Home, page: str) -> None:
    home.python("\n".join(blocks(ROOT / "docs" / f"{page}.md")), folder="examples")


def test_evaluate_and_report(home: Home, trained: str, data: str) -> None:
    home.command("evaluate", "lengths", trained, "--data", data, "--lengths", "1x,2x", "--sequences", "2")
    for folder in ("evaluation", "runs"):
        home.command("report", folder, "--output", f"{folder}.html")
        assert "mine" in (home.folder / f"{folder}.html").read_text()


def test_generate(home: Home, trained: str) -> None:
    output = home.command("generate", "--model", trained, "--prompt", "Chapter 7.", "--max-new-tokens", "8")
    assert "Chapter 7." in output


def test_loads_in_plain_transformers(home: Home, trained: str) -> None:
    """A process that does not import the package gets the same logits."""
    ids = [[5, 9, 33, 2, 70, 5, 9]]
    plain = f"""
        from transformers import AutoModelForCausalLM, AutoTokenizer
        import torch
        model = AutoModelForCausalLM.from_pretrained({trained!r}, trust_remote_code=True)
        assert AutoTokenizer.from_pretrained({trained!r})("Chapter 7.").input_ids
        print(model(torch.tensor({ids})).logits.double().sum().item())
    """
    ours = plain.replace("import torch\n", "import torch, softplus_attention.huggingface\n", 1).replace(
        ", trust_remote_code=True", ""
    )
    assert float(home.python(plain).split()[-1]) == pytest.approx(float(home.python(ours).split()[-1]), rel=1e-9)


def test_adapter_in_another_process(home: Home, trained: str) -> None:
    """A saved adapter gives the same logits when it is loaded on the same base model in another process."""
    ids = [[5, 9, 33, 2, 70, 5, 9]]
    save = f"""
        import torch
        from peft import LoraConfig, get_peft_model
        from transformers import AutoModelForCausalLM
        torch.manual_seed(0)
        base = AutoModelForCausalLM.from_pretrained({trained!r}, trust_remote_code=True)
        names = sorted({{name.rpartition(".")[2] for name, part in base.named_modules()
                         if isinstance(part, torch.nn.Linear) and name != "lm_head"}})
        model = get_peft_model(base, LoraConfig(target_modules=names, init_lora_weights=False))
        model.save_pretrained("adapter")
        print(model.eval()(torch.tensor({ids})).logits.double().sum().item())
    """
    load = f"""
        import torch
        from peft import PeftModel
        from transformers import AutoModelForCausalLM
        base = AutoModelForCausalLM.from_pretrained({trained!r}, trust_remote_code=True)
        model = PeftModel.from_pretrained(base, "adapter").eval()
        print(model(torch.tensor({ids})).logits.double().sum().item())
    """
    assert float(home.python(save).split()[-1]) == pytest.approx(float(home.python(load).split()[-1]), rel=1e-6)


CELLS = {
    "op": "from softplus_attention import softplus_attention",
    "package": "import softplus_attention",
    "huggingface": "import softplus_attention.huggingface",
    "name": "from softplus_attention.huggingface import use_attention",
}


@pytest.mark.parametrize("order", [("op", "huggingface"), ("huggingface", "op"), ("package", "name"), ("name", "op")])
def test_notebook_cells_in_each_order(home: Home, order: Sequence[str]) -> None:
    """Cells run again in any order: `softplus_attention` stays the function."""
    call = "softplus_attention(*(torch.randn(1, 1, 4, 8) for _ in range(3)), is_causal=True)"
    cells = ["import torch", *(CELLS[name] for name in order), CELLS["op"], call]
    cells += [cell for name in order for cell in (CELLS[name], "import softplus_attention", call)]
    home.python("\n".join(cells))


def test_runs_write_only_to_their_folders(home: Home, trained: str) -> None:
    assert json.loads((home.folder / trained / "config.json").read_text())["auto_map"]
    names = {path.name for path in home.folder.iterdir()}
    reports = {f"{folder}{kind}" for folder in ("evaluation", "runs") for kind in (".html", "-files")}
    assert names <= {"mybook.txt", "data", "runs", "evaluation", "bench", "adapter", "examples"} | reports
