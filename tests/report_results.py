"""Made-up result files in the formats of docs/evaluation.md, for the report's tests: no model stands behind them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

HOSTILE = "</script><img src=x onerror=\"window.hacked='name'\"> $x_{ \u202e=1+1"
HOSTILE_TOKEN = "<svg onload=window.hacked='token'>"
LENGTHS = [128, 256, 512, 1024]
TOKENS = ["Call", " me", " Ishmael", ".\n", HOSTILE_TOKEN, " years", " ago", "\t"]


def frame(measure: str, name: str, results: Any) -> dict[str, Any]:
    return {
        "format": "softplus-attention result",
        "version": 1,
        "measure": measure,
        "complete": True,
        "model": {"name": name, "source": "made up", "training_length": 128, "config": {"hidden_size": name}},
        "settings": {"data": "made up"},
        "made": {"command": f"made up for a test, {name}", "versions": {"torch": "0"}, "machine": {"device": "none"}},
        "results": results,
    }


def lengths(rise: float) -> dict[str, Any]:
    rows = []
    for place, length in enumerate(LENGTHS):
        control = {"window": 128, "full": 1.7, "short": 1.75, "gain": 0.05, "standard_error": 0.004}
        positions = [{"first": 1, "end": 128, "loss": 1.9}, {"first": 128, "end": 256, "loss": None}]
        row = {"length": length, "loss": 1.8 + rise * place, "standard_error": 0.02, "positions": positions}
        rows.append({**row, "control": control if place else None})
    used = {"documents": 7, "sequences": 24, "longest": 1024}
    return {"used": used, "skipped": [{"length": 4096, "reason": "no document is so long"}], "lengths": rows}


def passkey(accuracy: float) -> dict[str, Any]:
    cells = [
        {"length": length, "depth": depth, "accuracy": accuracy if depth else None}
        for length in LENGTHS
        for depth in (0.0, 0.5, 1.0)
    ]
    return {"skipped": [], "cells": cells}


def synthetic() -> dict[str, Any]:
    rows = [{"length": 64 * 4**k, "accuracy": 1 - 0.1 * k, "exact": None if k else 0.5} for k in range(3)]
    return {"task": "recall", "training": {"length": 64}, "skipped": [], "lengths": rows}


def inside(sink: float) -> dict[str, Any]:
    def head(layer: int, number: int, length: int) -> dict[str, Any]:
        own = {"entropy": 2.5 + 0.1 * number, "sink": sink, "effective_keys": 12.0, "zeros": 0.5, "empty_tiles": 0.1}
        stage1 = {"stage1_entropy": math.log(length), "stage1_entropy_frozen": None}
        return {"layer": layer, "head": number, **stage1, **own}

    rows = [
        {"length": n, "log_keys": math.log(n), "heads": [head(a, h, n) for a in range(3) for h in range(2)]}
        for n in LENGTHS
    ]
    return {"skipped": [], "lengths": rows}


def weights(layer: int, head: int, sharp: bool) -> list[list[float]]:
    """Rows that add up to 1; the sharp model has exact zeros."""
    rows = []
    for query in range(len(TOKENS)):
        raw = [math.exp(-abs(query - key - layer) * (1 + head)) + (0.0 if sharp else 0.1) for key in range(query + 1)]
        if sharp:
            raw = [max(0.0, value - 0.2) for value in raw]
        total = sum(raw) or 1.0
        rows.append([float(f"{value / total:.4g}") for value in raw])
    return rows


def maps(sharp: bool) -> dict[str, Any]:
    entries = [{"layer": a, "head": h, "weights": weights(a, h, sharp)} for a in range(3) for h in range(2)]
    return {"text": "".join(TOKENS), "tokens": TOKENS, "tokens_per_cell": 1, "size": len(TOKENS), "maps": entries}


def downstream() -> dict[str, Any]:
    return {"tasks": [{"task": "arc_easy", "metric": "acc", "value": 0.25, "standard_error": 0.02, "samples": 100}]}


def speed() -> dict[str, Any]:
    rows = [
        {"section": "train", "head_dim": 64, "length": n, "contender": c, "status": "ok", "total_ms": n / 1e3 * k}
        for n in (1024, 4096)
        for k, c in enumerate(("sdpa flash", "lssar p=15"), 1)
    ]
    failed = {
        "section": "train",
        "head_dim": 64,
        "length": 1024,
        "contender": "other",
        "status": "error",
        "error": "no",
    }
    return {"command": "made up", "machine": {"gpu": "none"}, "rows": [*rows, failed]}


def demo() -> dict[str, Any]:
    losses = {"softmax": [2.0, 2.5], "LSSAR": [2.0, 2.0]}
    return {"command": "made up", "lengths": [64, 128], "texts": 2, "documents": 1, "settings": {}, "loss": losses}


def newton() -> dict[str, Any]:
    powers = {
        name: {"mean": value, "least": value, "most": value} for name, value in zip("mnr", (1, 1, -2), strict=True)
    }
    laws = {"within": {"ln_force": ["m1 m2 / r^2"]}}
    row = {"arm": "lssar", "labels": 10, "pretrained": True, "r2_ln_force": {"mean": 0.98}, "exponents": powers}
    force = {"tuned-10": [{"multiple": 1, "r2": 0.9}, {"multiple": 2, "r2": 0.8}]}
    run = {"arm": "lssar", "seed": 0, "force": force}
    return {"kind": "newton", "table": [{**row, "laws": laws}], "long": [run], "figures": ["../../etc/passwd", "a.png"]}


def training() -> dict[str, Any]:
    return {"config": {"attention": "lssar"}, "sessions": [{"command": "made up"}], "finished": True}


def results(name: str, sharp: bool) -> dict[str, dict[str, Any]]:
    """Every measure of one model, by file name."""
    size = 0.0 if sharp else 0.3
    content = {
        "lengths": lengths(size), "passkey": passkey(1 - size), "synthetic": synthetic(), "inside": inside(size),
        "maps": maps(sharp), "downstream": downstream(),
    }  # fmt: skip
    return {f"{kind}--{'b' if sharp else 'a'}.json": frame(kind, name, found) for kind, found in content.items()}


def everything() -> dict[str, dict[str, Any]]:
    """Files of every kind that a report shows, two models among them, one with a hostile name."""
    more = {"bench.json": speed(), "demo/results.json": demo(), "newton/cpu.json": newton(), "run/run.json": training()}
    return {**results(HOSTILE, sharp=False), **results("sharp", sharp=True), **more}


def write(folder: Path, files: dict[str, dict[str, Any]]) -> None:
    for name, data in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(data))
