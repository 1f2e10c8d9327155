"""Scores every key head by each measure of softplus_attention.extend.ranking, on the package's own text.

python experiments/extend/rank.py --model DIR --output ranking.json [--prompts 8 --length 1536 --window 256]
"""

from __future__ import annotations

import argparse
import time
from dataclasses import asdict
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from softplus_attention.data.builtin import builtin_text
from softplus_attention.extend.ranking import BEST_OF, RankingSettings, rank_heads
from softplus_attention.utils import provenance
from softplus_attention.utils.files import write_json


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--output", required=True, type=Path)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--length", type=int, default=1536)
    parser.add_argument("--window", type=int, default=256)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="bfloat16")
    options = parser.parse_args()
    device = torch.device(options.device)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=getattr(torch, options.dtype)).to(device).eval()
    tokenizer = AutoTokenizer.from_pretrained(options.model)

    def encode(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    works = [text for text in builtin_text()[0] if len(text) > 100_000]
    documents = [encode(text[20_000 : 20_000 + 8 * options.length]) for text in works]
    settings = RankingSettings(prompts=options.prompts, length=options.length, window=options.window, seed=options.seed)
    begun = time.monotonic()
    ranking = rank_heads(model, encode, documents, settings)
    seconds = time.monotonic() - begun
    report = {
        "command": provenance.command("experiments/extend/rank.py"),
        "commit": provenance.commit(),
        "machine": provenance.machine(device),
        "settings": asdict(settings),
        "seconds": round(seconds, 1),
        "scores": {name: [[round(x, 6) for x in row] for row in rows] for name, rows in ranking.scores.items()},
    }
    write_json(options.output, report)
    print(f"{seconds:.0f} s")
    for by in (*BEST_OF, "beyond", "best"):
        print(f"{by:8s}", " ".join(f"{layer}.{head}" for layer, head in ranking.order(by)[:24]))


if __name__ == "__main__":
    main()
