"""Compares methods that extend the context: loss of fixed tokens by context length, needles, cache and speed.

    python experiments/extend/measure.py --model DIR --text DIR --ranking FILE --output DIR \
        --methods original yarn:factor=4 heads:heads=12 --lengths 2048 8192 16384

``--text`` is a folder of files KIND--NAME.txt. Each document is cut to the longest of ``--lengths`` that it has. The
loss is that of its last 1,024 tokens; needles are hidden in the same documents. Each result is saved in
``--output``/measure.json; run the same command to resume. Methods: softplus_attention.extend.methods.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from softplus_attention.data.builtin import builtin_text
from softplus_attention.extend.measuring import TARGETS, ask, context_losses, time_decode
from softplus_attention.extend.methods import apply_method, parse_method
from softplus_attention.extend.needles import FORMS, make_haystack
from softplus_attention.extend.ranking import Ranking
from softplus_attention.utils import provenance
from softplus_attention.utils.files import write_json


def main() -> None:
    options = parse()
    begun = time.monotonic()
    device = torch.device(options.device)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=getattr(torch, options.dtype)).to(device).eval()
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    ranking = Ranking(json.loads(options.ranking.read_text())["scores"]) if options.ranking else None
    lengths = sorted(options.lengths)

    def encode(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    documents = read_documents(options.text, encode, lengths, options.documents)
    path = options.output / "measure.json"
    options.output.mkdir(parents=True, exist_ok=True)
    found = json.loads(path.read_text()) if path.exists() else {"methods": {}}
    found |= {
        "command": provenance.command("experiments/extend/measure.py"),
        "commit": provenance.commit(),
        "machine": provenance.machine(device),
        "versions": provenance.versions(),
        "dtype": options.dtype,
        "documents": [{"name": name, "kind": kind, "tokens": len(ids)} for name, kind, ids in documents],
        "targets": TARGETS,
        "needles": options.needles,
    }
    print(f"{len(documents)} documents, {time.monotonic() - begun:.0f} s to load", flush=True)
    for name in options.methods:
        method = parse_method(name)
        own = found["methods"].setdefault(name, {"loss": {}, "needles": {}, "cache_bytes": {}, "seconds": {}})
        to_fit: list[list[int]] = []
        if method.far == "lssar":  # fitted on the package's own text, which is not measured on
            works = [text for text in builtin_text()[0] if len(text) > 100_000]
            to_fit = [encode(text[20_000 : 20_000 + 8 * method.fit // len(works) + 4096]) for text in works]
        changed = apply_method(model, method, ranking, to_fit)
        for length in lengths:
            for kind, work in (("loss", losses), ("needles", needles), ("speed", speed)):
                asked = {"loss": options.loss, "needles": options.haystacks > 0, "speed": length in options.speed}
                if not asked[kind] or str(length) in own.setdefault(kind, {}):
                    continue
                if options.time_limit and time.monotonic() - begun > options.time_limit:
                    print(f"stopped at --time-limit {options.time_limit} s; run the same command to resume", flush=True)
                    table(found, lengths)
                    return
                started = time.monotonic()
                try:
                    work(changed, documents, length, lengths, own, options, encode)
                except torch.OutOfMemoryError as error:
                    own[kind][str(length)] = []
                    print(f"{name} {kind} {length}: {str(error).splitlines()[0]}", flush=True)
                own["seconds"][f"{kind} {length}"] = round(time.monotonic() - started, 2)
                write_json(path, found)
        print(line(name, own, lengths), f" {sum(own['seconds'].values()):.0f} s", flush=True)
    table(found, lengths)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder of a pretrained model")
    parser.add_argument("--text", required=True, type=Path, help="folder of held-out documents")
    parser.add_argument("--ranking", type=Path, help="head ranking, written by experiments/extend/rank.py")
    parser.add_argument("--methods", required=True, nargs="+")
    parser.add_argument("--lengths", required=True, nargs="+", type=int)
    parser.add_argument("--documents", type=int, help="largest number of documents (default: all)")
    parser.add_argument("--haystacks", type=int, default=12, help="number of haystacks at each length")
    parser.add_argument("--needles", type=int, default=2, help="needles per haystack; each has a question")
    parser.add_argument("--loss", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument(
        "--speed", nargs="*", type=int, default=[], help="those of --lengths at which to time prefill and decode"
    )
    parser.add_argument("--output", required=True, type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument(
        "--batch-tokens",
        type=int,
        default=0,
        help="tokens per batch for losses (default: 131,072 on a GPU, one row on a CPU)",
    )
    parser.add_argument("--time-limit", type=float, default=0, help="seconds")
    return parser.parse_args()


def read_documents(folder: Path, encode: Any, lengths: list[int], most: int | None) -> list[tuple[str, str, list[int]]]:
    """(name, kind, tokens) of each document, cut to the longest of ``lengths`` that it has, longest first."""
    found = []
    for path in sorted(folder.glob("*.txt")):
        ids = encode(path.read_text(encoding="utf-8")[: 8 * lengths[-1]])
        if own := [length for length in lengths if length <= len(ids)]:
            found.append((path.stem, path.stem.partition("--")[0], ids[: own[-1]]))
    found.sort(key=lambda one: (-len(one[2]), one[0]))
    return found[:most]


def losses(model: Any, documents: Any, length: int, lengths: list[int], own: Any, options: Any, encode: Any) -> None:
    rows = [ids for _, _, ids in documents if len(ids) >= length]
    most = options.batch_tokens or (131072 if model.device.type == "cuda" else 1)
    batch = max(1, most // length)
    found: list[float] = []
    for begin in range(0, len(rows), batch):
        found += context_losses(model, rows[begin : begin + batch], length)
    own["loss"][str(length)] = [round(x, 5) for x in found]


def needles(model: Any, documents: Any, length: int, lengths: list[int], own: Any, options: Any, encode: Any) -> None:
    rows = [ids for _, _, ids in documents if len(ids) >= length]
    total = options.haystacks * options.needles
    answers = []
    for number in range(options.haystacks):
        depths = [(number + step * options.haystacks + 0.5) / total for step in range(options.needles)]
        form = list(FORMS)[number % len(FORMS)]
        haystack = make_haystack(encode, rows[number % len(rows)], length, form, depths, number)
        found, size = ask(model, haystack, options.needles if model.device.type == "cuda" else 1)
        answers.append({"form": form, "depths": [round(depth, 3) for depth in depths], "found": found})
        own["cache_bytes"][str(length)] = size
    own["needles"][str(length)] = answers


def speed(model: Any, documents: Any, length: int, lengths: list[int], own: Any, options: Any, encode: Any) -> None:
    ids = documents[0][2][:length]
    if on_gpu := model.device.type == "cuda":
        time_decode(model, ids, 4)
        torch.cuda.reset_peak_memory_stats()
    prefill, decode = time_decode(model, ids, 32)
    own["speed"][str(length)] = {"prefill_seconds": round(prefill, 4), "tokens_per_second": round(decode, 2)}
    if on_gpu:
        own["speed"][str(length)]["peak_bytes"] = torch.cuda.max_memory_allocated()


def line(name: str, own: dict[str, Any], lengths: list[int]) -> str:
    loss, asked = [], []
    for length in map(str, lengths):
        values = own["loss"].get(length) or [float("nan")]
        loss.append(f"{sum(values) / len(values):6.3f}")
        hits = [hit for one in own["needles"].get(length, []) for hit in one["found"]]
        asked.append(f"{100 * sum(hits) / len(hits):3.0f}" if hits else "  -")
    size = own["cache_bytes"].get(str(lengths[-1]))
    return f"{name:44s} {' '.join(loss)} | {' '.join(asked)} | {'' if size is None else f'{size / 2**20:.0f} MiB'}"


def table(found: dict[str, Any], lengths: list[int]) -> None:
    print(f"\nmean loss at {lengths} | needles found, % | cache at the last")
    for name, own in found["methods"].items():
        print(line(name, own, lengths))


if __name__ == "__main__":
    main()
