"""Keeps the outcome of `softplus-attention newton` for the repository: its results.json, smaller.

    python experiments/newton_keep.py FOLDER DESTINATION [--trained-on FILE --trained-at COMMIT] [--note TEXT]

Left out are four of five entries of the losses in training, and the Pareto fronts of the controls with noise, of which
the chosen laws stay. FILE is the results.json of the machine that trained, where that was another one.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

KEPT_LOSSES = 5


def kept(found: dict[str, Any]) -> dict[str, Any]:
    control = "control_with_noise"
    return {
        **found,
        "cells": [{**cell, control: without_fronts(cell[control])} for cell in found["cells"]],
        "pretraining": [{**run, "losses": run["losses"][::KEPT_LOSSES]} for run in found["pretraining"]],
    }


def without_fronts(control: Any) -> Any:
    if isinstance(control, dict):
        return {word: without_fronts(value) for word, value in control.items() if word != "front"}
    return [without_fronts(value) for value in control] if isinstance(control, list) else control


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path, help="--output of the command")
    parser.add_argument("destination", type=Path, help="NAME.json; figures go to the folder NAME beside it")
    parser.add_argument("--trained-on", type=Path, help="results.json of the machine that trained")
    parser.add_argument("--trained-at", help="its commit, where git was not there to say")
    parser.add_argument("--note", help="what a reader has to know")
    options = parser.parse_args(arguments)
    found = kept(json.loads((options.folder / "results.json").read_text()))
    if options.trained_on:
        other = json.loads(options.trained_on.read_text())
        words = {word: other[word] for word in ("machine", "versions", "commit", "command")}
        found["trained_on"] = words | ({"commit": options.trained_at} if options.trained_at else {})
    if options.note:
        found["note"] = options.note
    options.destination.parent.mkdir(parents=True, exist_ok=True)
    options.destination.write_text(json.dumps(found, separators=(",", ":")) + "\n")
    figures = options.destination.with_suffix("")
    for figure in sorted((options.folder / "figures").glob("*.png")):
        figures.mkdir(exist_ok=True)
        shutil.copyfile(figure, figures / figure.name)
    print(f"{options.destination}: {options.destination.stat().st_size:,} bytes, {len(found['cells'])} cells")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
