"""Saves a trained model for distribution: weights are stored in bfloat16, half the size, and loaded in float32.

python experiments/ship.py MODEL DESTINATION
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

import softplus_attention.huggingface  # noqa: F401  registers the model
from softplus_attention.huggingface.loading import load_tokenizer


def main(source: str, destination: str) -> None:
    folder = Path(destination)
    AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16).save_pretrained(folder)
    load_tokenizer(source).save_pretrained(folder)
    path = folder / "config.json"
    config = json.loads(path.read_text()) | {"dtype": "float32"}
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    size = sum(file.stat().st_size for file in folder.iterdir())
    print(f"{folder}: {size / 1e6:.1f} MB")


if __name__ == "__main__":
    main(*sys.argv[1:])
