"""Converts a pretrained softmax model to LSSAR: swap the attention, fine-tune with a rising power, compare the losses.

    python examples/retrofit.py                      # a few minutes on two cores
    python examples/retrofit.py --steps 2000 --tune 600 --width 256 --batch 64 --output results/retrofit.json

The "pretrained" model is a small Llama that is first trained here with softmax on the built-in text (bytes), so that no
download is needed. All later steps apply to any model from the Hub.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path

import torch
import transformers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

from softplus_attention.data import builtin_text
from softplus_attention.evaluation.lengths import Texts, loss_by_length, texts_of
from softplus_attention.huggingface import set_power, use_attention
from softplus_attention.utils import provenance

LENGTH = 128
LENGTHS = [LENGTH * multiple for multiple in (1, 2, 4, 8, 16)]
POWERS = {0.0: 1, 0.2: 3, 0.4: 7, 0.6: 15}  # fraction of the fine-tuning -> power from there on


class Windows(torch.utils.data.Dataset):
    """Random windows of the text."""

    def __init__(self, text: Tensor, count: int, seed: int) -> None:
        self.text = text
        self.starts = torch.randint(len(text) - LENGTH, (count,), generator=torch.Generator().manual_seed(seed))

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        row = self.text[self.starts[number] : self.starts[number] + LENGTH].long()
        return {"input_ids": row, "labels": row}


class RisingPower(TrainerCallback):
    """Raises the power in steps, so that the model adapts to each."""

    def __init__(self, steps: int) -> None:
        self.powers = {math.floor(fraction * steps): power for fraction, power in POWERS.items()}

    def on_step_begin(self, args, state, control, model=None, **_):
        if state.global_step in self.powers:
            set_power(model, self.powers[state.global_step])


def train(
    model, text: Tensor, steps: int, options: argparse.Namespace, *, rate: float, seed: int, callbacks=()
) -> None:
    arguments = TrainingArguments(
        str(options.folder), max_steps=steps, per_device_train_batch_size=options.batch, learning_rate=rate,
        lr_scheduler_type="cosine", warmup_steps=0.05, weight_decay=0.1, adam_beta2=0.95, seed=seed, report_to="none",
        save_strategy="no", logging_steps=max(1, steps // 10), disable_tqdm=True, bf16=torch.cuda.is_available(),
    )  # fmt: skip
    Trainer(
        model, arguments, train_dataset=Windows(text, steps * options.batch, seed), callbacks=list(callbacks)
    ).train()


def measure(name: str, model, texts: Texts, rows: list[dict]) -> None:
    losses = loss_by_length(model.eval(), texts, LENGTHS).loss
    rows.append({"model": name, "loss": [round(loss, 4) for loss in losses]})
    print(f"{name:42}" + "".join(f"{loss:8.3f}" for loss in losses), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300, help="training steps of the softmax model")
    parser.add_argument("--tune", type=int, default=150, help="fine-tuning steps after the swap")
    parser.add_argument("--width", type=int, default=128, help="width of the model, a multiple of 64")
    parser.add_argument("--batch", type=int, default=32, help="sequences per step")
    parser.add_argument("--folder", type=Path, default=Path("retrofit"), help="folder for Trainer's files")
    parser.add_argument("--commit", help="commit to record (default: from git)")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    options = parser.parse_args()
    transformers.utils.logging.set_verbosity_error()

    train_text, validation = builtin_text()
    text = torch.frombuffer(bytearray("\n\n".join(train_text).encode()), dtype=torch.uint8)
    texts = texts_of((list(document.encode()) for document in validation), LENGTHS[-1], 32)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=options.width, intermediate_size=4 * options.width, num_hidden_layers=4,
        num_attention_heads=options.width // 64, max_position_embeddings=LENGTH, tie_word_embeddings=True,
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    rows: list[dict] = []
    train(model, text, options.steps, options, rate=2e-3, seed=0)
    print(f"{'validation loss (nats) at bytes':42}" + "".join(f"{n:8}" for n in LENGTHS))
    measure("softmax, as pretrained", model, texts, rows)
    pretrained = {name: weight.clone() for name, weight in model.state_dict().items()}

    # The control: the same further steps with softmax.
    train(model.train(), text, options.tune, options, rate=5e-4, seed=1)
    measure(f"softmax, {options.tune} more steps", model, texts, rows)

    model.load_state_dict(pretrained)
    for power in POWERS.values():
        use_attention(model, "lssar", power=power)
        measure(f"LSSAR swapped in, power {power}, not tuned", model, texts, rows)
    use_attention(model, "lssar", power=1)
    train(model.train(), text, options.tune, options, rate=5e-4, seed=1, callbacks=[RisingPower(options.tune)])
    measure(f"LSSAR, {options.tune} steps, power 1 to 15", model, texts, rows)

    if options.output:
        about = {"command": " ".join(["python", *sys.argv]), "commit": options.commit or provenance.commit()}
        about |= {"machine": provenance.machine(), "versions": provenance.versions(), "lengths": LENGTHS}
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps({**about, "texts": len(texts.rows), "rows": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
