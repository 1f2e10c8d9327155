"""q, k, v of a trained model, for benchmarks/attention.py --trained: trains a small byte-level GPT and saves the inputs
of the attention in its middle layer on a long text, in bfloat16, one file per head dimension.

python benchmarks/trained_inputs.py --output FOLDER [TEXT ...]     about a minute of training for each on a GPU

TEXT are files or folders of text, by default the text of the package. The last tenth is held out from training, and
the saved vectors come from it. A file holds q, k, v, each (B, H, T, D) after the rotary embedding, and "about", a
description of the model.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from softplus_attention.data.builtin import builtin_text
from softplus_attention.nn import SoftplusAttention

WARMUP = 100  # steps


def load(path: str) -> dict[str, Any]:
    """The tensors of a .pt or .safetensors file."""
    if path.endswith(".safetensors"):
        from safetensors.torch import load_file

        return load_file(path)
    return torch.load(path, map_location="cpu", weights_only=True)


class Block(nn.Module):
    def __init__(self, dim: int, head_dim: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(2))
        self.attention = SoftplusAttention(dim, dim // head_dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norms[0](x))
        return x + self.mlp(self.norms[1](x))


class Model(nn.Module):
    def __init__(self, dim: int, head_dim: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, dim)
        self.blocks = nn.ModuleList(Block(dim, head_dim) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, 256, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def read_text(sources: list[Path]) -> Tensor:
    files = [x for source in sources for x in (sorted(source.rglob("*")) if source.is_dir() else [source])]
    texts = [x.read_bytes() for x in files if x.is_file()]
    data = b"\n".join(texts if sources else [text.encode() for split in builtin_text() for text in split])
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).long()


def windows(text: Tensor, places: Tensor, length: int) -> Tensor:
    return text[places[:, None] + torch.arange(length, device=text.device)]


def compute_loss(model: Model, tokens: Tensor) -> Tensor:
    with torch.autocast(tokens.device.type, torch.bfloat16):
        logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())


def train(model: Model, text: Tensor, length: int, batch: int, seconds: float) -> tuple[int, float]:
    """The number of steps, and the mean loss of the last ten."""
    optimiser = torch.optim.AdamW(model.parameters(), lr=6e-4, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda step: min(1.0, (step + 1) / WARMUP))
    begun, losses = time.monotonic(), []
    while not losses or time.monotonic() - begun < seconds:
        places = torch.randint(len(text) - length, (batch,), device=text.device)
        loss = compute_loss(model, windows(text, places, length + 1))
        optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        schedule.step()
        losses.append(loss.item())
    return len(losses), sum(losses[-10:]) / len(losses[-10:])


@torch.no_grad()
def record(model: Model, tokens: Tensor) -> dict[str, Tensor]:
    """The inputs of the attention in the middle layer."""
    layer, found = model.blocks[len(model.blocks) // 2].attention, {}
    attend = layer.attention

    def recorded(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        found.update({"q": q, "k": k, "v": v})
        return attend(q, k, v, **options)

    layer.attention = recorded
    with torch.autocast(tokens.device.type, torch.bfloat16):
        model(tokens)
    layer.attention = attend
    return {name: x.to(torch.bfloat16).cpu().contiguous() for name, x in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("text", type=Path, nargs="*", help="files, or folders of files (default: the package's books)")
    add("--output", type=Path, required=True, help="the folder for trained-d64.pt and trained-d128.pt")
    add("--head-dims", default="64,128", help="one model and file for each (default %(default)s)")
    add("--seconds", type=float, default=60, help="of training for each model (default %(default)s)")
    add("--dim", type=int, default=512, help="the width of the model (default %(default)s)")
    add("--layers", type=int, default=8)
    add("--train-length", type=int, default=1024, help="bytes per sequence in training (default %(default)s)")
    add("--batch", type=int, default=32, help="sequences per step (default %(default)s)")
    add("--length", type=int, default=16384, help="T of the saved vectors (default %(default)s)")
    add("--sequences", type=int, default=2, help="B of the saved vectors (default %(default)s)")
    chosen = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    text = read_text(chosen.text).to(device)
    seen, unseen = text[: len(text) * 9 // 10], text[len(text) * 9 // 10 :]
    if len(seen) <= chosen.train_length or len(unseen) <= chosen.length:
        parser.error(f"{len(text):,} bytes of text are too few: a tenth must be longer than --length {chosen.length:,}")
    chosen.output.mkdir(parents=True, exist_ok=True)
    for head_dim in (int(x) for x in chosen.head_dims.split(",")):
        torch.manual_seed(0)
        model = Model(chosen.dim, head_dim, chosen.layers).to(device)
        steps, loss = train(model, seen, chosen.train_length, chosen.batch, chosen.seconds)
        places = torch.linspace(
            0, len(unseen) - chosen.length - 1, chosen.sequences, device=device, dtype=torch.float64
        ).long()
        tokens = windows(unseen, places, chosen.length + 1)
        with torch.no_grad():
            held_out = float(compute_loss(model, tokens[:, : chosen.train_length + 1]))
        about = f"lssar p=15, {chosen.layers} layers of {chosen.dim}, {steps} steps of {chosen.batch} x "
        about += f"{chosen.train_length} bytes; loss {loss:.3f}, held out {held_out:.3f}; layer {chosen.layers // 2}"
        path = chosen.output / f"trained-d{head_dim}.pt"
        torch.save({**record(model, tokens[:, :-1]), "about": about}, path)
        print(f"{path}: {about}", flush=True)


if __name__ == "__main__":
    main()
