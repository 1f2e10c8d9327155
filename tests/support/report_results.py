"""Invented result files in the formats of docs/evaluation.md, for the report's tests; no model was measured."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from softplus_attention.charts.model import text_rows
from softplus_attention.report import build
from softplus_attention.report.discovery import find_results
from softplus_attention.utils.files import csv_text

HOSTILE = "</script><img src=x onerror=\"window.hacked='name'\"> $x_{ \u202e=1+1"
HOSTILE_TOKEN = "<svg onload=window.hacked='token'>"
LENGTHS = [128, 256, 512, 1024]
TOKENS = ["Call", " me", " Ishmael", ".\n", HOSTILE_TOKEN, " years", " ago", "\t"]


def frame(measure: str, name: str, results: Any) -> dict[str, Any]:
    """A complete result file."""
    model = {"name": name, "source": "invented", "attention": "lssar", "training_length": 128}
    made = {"command": f"invented for a test, {name}", "versions": {"torch": "0"}, "machine": {"device": "none"}}
    data = {"format": "softplus-attention result", "version": 1, "measure": measure, "complete": True}
    data |= {"model": model | {"config": {"hidden_size": name}}, "settings": {"data": "invented"}, "made": made}
    return data | {"results": results}


def lengths(rise: float) -> dict[str, Any]:
    rows = []
    for place, length in enumerate(LENGTHS):
        control = {"window": 128, "full": 1.7, "short": 1.75, "gain": 0.05, "standard_error": 0.004}
        positions = [{"first": 1, "end": 128, "loss": 1.9}, {"first": 128, "end": 256, "loss": None}]
        row = {"length": length, "times": length / 128, "loss": 1.8 + rise * place, "standard_error": 0.02}
        rows.append({**row, "positions": positions, "control": control if place else None})
    used = {"documents": 7, "sequences": 24, "longest": 1024}
    return {"used": used, "skipped": [{"length": 4096, "reason": "no document is so long"}], "lengths": rows}


def passkey(accuracy: float) -> dict[str, Any]:
    counts = {"trials": 10, "correct": 10 * accuracy}
    cells = [
        {"length": n, "times": n / 128, "depth": depth, "accuracy": accuracy if depth else None, **counts}
        for n in LENGTHS
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


def mixed_inside(window: int, count: int = 2) -> dict[str, Any]:
    """Two local layers and a global one; beyond 128, log N lowers stage 1's entropy by 1 nat."""
    rows = []
    for n in LENGTHS:
        heads = []
        for layer in range(3):
            keys = n if layer == 2 else min(n, window)
            stage1 = {"stage1_entropy": 0.5 * math.log(keys), "stage1_entropy_frozen": 0.5 * math.log(keys) + (n > 128)}
            own = {"entropy": 0.25 * math.log(keys), "sink": 0.00036 * layer, "effective_keys": 2.0, "zeros": 0.5}
            heads += [{"layer": layer, "head": h, "log_keys": math.log(keys), **stage1, **own} for h in range(count)]
        log_keys = sum(head["log_keys"] for head in heads) / len(heads)
        rows.append({"length": n, "log_keys": log_keys, "heads": heads})
    return {"skipped": [], "lengths": rows}


def study() -> dict[str, Any]:
    def row(length: int, loss: float) -> dict[str, Any]:
        control = {"gain": 0.05, "standard_error": 0.004} if length > 32 else None
        return {"length": length, "loss": loss, "standard_error": 0.1, "control": control}

    inside_rows = [
        {"length": 32, "log_keys": 3.0, "stage1_entropy": 2.4, "stage1_entropy_frozen": 2.4, "entropy": 1.0,
         "sink": 0.25, "effective_keys": 3.5, "zeros": 0.6, "empty_tiles": 0.0},
        {"length": 512, "log_keys": 5.5, "stage1_entropy": 4.125, "stage1_entropy_frozen": 5.0, "entropy": 1.25,
         "sink": 0.00036, "effective_keys": 4.5, "zeros": 0.7, "empty_tiles": 0.1},
    ]  # fmt: skip
    evaluation = {
        "lengths": {"lengths": [row(32, 2.5), row(512, 2.6)]},
        "passkey": [
            {"length": n, "depth": depth, "trials": 8, "correct": 7} for n in (32, 512) for depth in (0.1, 0.5)
        ],
        "inside": inside_rows,
        "variants": {"power=31": {"lengths": [row(32, 2.75), row(512, 2.875)]}},
    }
    config = {"sequence_length": 32, "global_every": None}
    run = {"arm": "lssar-p3", "size": "10m", "seed": 3, "config": config, "command": "runs/study.py"}
    return {**run, "evaluation": evaluation}


def weights(layer: int, head: int, sharp: bool) -> list[list[float]]:
    """Weights with row sums of 1; the sharp model has exact zeros."""
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
    failed = {**rows[0], "contender": "other", "status": "error", "error": "no"}
    return {"command": "invented", "machine": {"gpu": "none"}, "rows": [*rows, failed]}


def demo() -> dict[str, Any]:
    losses = {"softmax": [2.0, 2.5], "LSSAR": [2.0, 2.0]}
    return {"command": "invented", "lengths": [64, 128], "texts": 2, "documents": 1, "settings": {}, "loss": losses}


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
    return {"config": {"attention": "lssar"}, "starts": [{"command": "invented"}], "finished": True}


def results(name: str, sharp: bool) -> dict[str, dict[str, Any]]:
    """Results of every measure for one model, by file name."""
    size = 0.0 if sharp else 0.3
    content = {
        "lengths": lengths(size), "passkey": passkey(1 - size), "synthetic": synthetic(), "inside": inside(size),
        "maps": maps(sharp), "downstream": downstream(),
    }  # fmt: skip
    return {f"{kind}--{'b' if sharp else 'a'}.json": frame(kind, name, found) for kind, found in content.items()}


def stability(rate: float, losses: list[Any], score: float | None, stopped: str | None = None) -> dict[str, Any]:
    steps = [[number, loss] for number, loss in enumerate(losses)]
    run = {"arm": "softmax", "size": "10m", "precision": "fp16", "learning_rate": rate, "losses": steps, "seed": 0}
    return {**run, "largest_score": score, "stopped": stopped, "config": {"layers": 6}, "command": "runs/stability.py"}


def everything() -> dict[str, dict[str, Any]]:
    """Files of every kind that a report shows, of two models, one with a hostile name."""
    more = {
        "bench.json": speed(), "demo/results.json": demo(), "newton/cpu.json": newton(), "run/run.json": training(),
        "stability/a.json": stability(0.01, [9, 4, 3], 20.0),
        "study/10m-lssar-p3-seed3.json": study(), "inside--mix.json": frame("inside", "mix", mixed_inside(64)),
    }  # fmt: skip
    return {**results(HOSTILE, sharp=False), **results("sharp", sharp=True), **more}


def write(folder: Path, files: dict[str, dict[str, Any]]) -> None:
    for name, data in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(data))


def write_results(folder: Path, measure: str, **results: Any) -> None:
    """Write results of one measure for the named models."""
    write(folder, {f"{measure}--{name}.json": frame(measure, name, found) for name, found in results.items()})


def render_html(folder: Path) -> tuple[str, list[tuple[str, str]]]:
    """The page without figure files, and the problems found."""
    found = find_results(folder)
    return build.render_html(found, build.all_sections(found), {}, "files"), found.problems


def blocks_in(folder: Path) -> list[Any]:
    return [block for section in build.all_sections(find_results(folder)) for block in section.blocks]


def figures_in(folder: Path) -> dict[str, Any]:
    """Charts and tables by title; there must be no problems."""
    found = find_results(folder)
    sections = build.all_sections(found)
    assert found.problems == []
    return {figure.title: figure for section in sections for figure in section.figures()}


def csv_of(figure: Any) -> str:
    head, rows = figure.table()
    return csv_text(head, text_rows(rows))
