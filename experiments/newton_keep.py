"""Copies the results of `softplus-attention newton` to the repository, with a smaller results.json.

    python experiments/newton_keep.py FOLDER DESTINATION [--trained-on FILE --trained-at COMMIT] [--note TEXT]

Drops four of five training losses, and the Pareto fronts of the controls with noise (the chosen laws are kept). FILE is
the results.json of the machine that trained, if it was another one.
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
        return {name: without_fronts(value) for name, value in control.items() if name != "front"}
    return [without_fronts(value) for value in control] if isinstance(control, list) else control


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path, help="output folder of the command")
    parser.add_argument("destination", type=Path, help="NAME.json; figures go to the folder NAME next to it")
    parser.add_argument("--trained-on", type=Path, help="results.json of the machine that trained")
    parser.add_argument("--trained-at", help="its commit, if it had no git")
    parser.add_argument("--note", help="a note for readers")
    options = parser.parse_args(arguments)
    found = kept(json.loads((options.folder / "results.json").read_text()))
    if options.trained_on:
        other = json.loads(options.trained_on.read_text())
        origin = {name: other[name] for name in ("machine", "versions", "commit", "command")}
        found["trained_on"] = origin | ({"commit": options.trained_at} if options.trained_at else {})
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
