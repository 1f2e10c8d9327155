"""The results of an experiment as one JSON file, and the printed table."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import numpy as np

from softplus_attention.physics.laws.exponents import NAMES
from softplus_attention.physics.laws.front import FACTOR
from softplus_attention.physics.stages import Folder, read_json
from softplus_attention.utils import provenance

PACKAGES = ("torch", "transformers", "accelerate", "numpy", "scipy", "pyoperon", "matplotlib")
RULES = {
    "within": f"the shortest expression on the Pareto front whose error is at most {FACTOR:g} times the lowest",
    "score": "the expression with the greatest fall of ln error per unit of length since the one before it",
}


def summary(folder: Folder, command: str, commit: str | None, seconds: float) -> dict[str, Any]:
    """The content of results.json; a report can show each section separately."""
    cells = [cell_summary(cell) for cell in folder.existing_cells() if (cell.folder / "tune.json").is_file()]
    return {
        "kind": "newton",
        "command": command,
        "commit": commit or provenance.commit(),
        "date": time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime()),
        "seconds_of_this_call": seconds,
        "seconds_by_stage": {
            "pretrain": sum(run["seconds"] for run in by_run(folder, "pretrain.json")),
            "tune": sum(cell["tune"]["seconds"] for cell in cells),
            "long": sum(run["seconds"] for run in by_run(folder, "long.json")),
            "laws": sum(cell.get("seconds", 0.0) for cell in cells),
        },
        "machine": provenance.machine(),
        "versions": provenance.versions(PACKAGES),
        "experiment": folder.experiment.to_json(),
        "selection_rules": RULES,
        "table": table(cells),
        "cells": cells,
        "controls": {file.stem: read_json(file) for file in sorted((folder.path / "controls").glob("seed*.json"))},
        "pretraining": by_run(folder, "pretrain.json"),
        "probes": by_run(folder, "probes.json"),
        "long": by_run(folder, "long.json"),
        "figures": [str(file.relative_to(folder.path)) for file in sorted((folder.path / "figures").glob("*.png"))],
    }


def by_run(folder: Folder, name: str) -> list[dict[str, Any]]:
    return [
        {"arm": arm, "seed": seed, **read_json(folder.run(arm, seed) / name)}
        for arm, seed in folder.existing_runs()
        if (folder.run(arm, seed) / name).is_file()
    ]


def cell_summary(cell: Any) -> dict[str, Any]:
    result = {"arm": cell.arm, "seed": cell.seed, "labels": cell.labels, "pretrained": cell.pretrained}
    result["tune"] = {key: value for key, value in read_json(cell.folder / "tune.json").items() if key != "losses"}
    if (cell.folder / "laws.json").is_file():
        result |= read_json(cell.folder / "laws.json")
    return result


def chosen_laws(cell: dict[str, Any], rule: str = "within") -> dict[str, list[str]]:
    """The law that operon finds in each sample, by the scale of the error."""
    return {
        scale: [sample["operon"]["chosen"][rule]["law"] if "operon" in sample else "none" for sample in samples]
        for scale, samples in cell.get("laws", {}).items()
    }


def spread(values: Iterable[float]) -> dict[str, float]:
    found = np.asarray(list(values), dtype=np.float64)
    return {"mean": float(found.mean()), "least": float(found.min()), "most": float(found.max())}


def table(cells: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row per arm, number of labels and pre-training; statistics over the seeds."""
    rows = []
    groups = {(cell["arm"], cell["labels"], cell["pretrained"]): None for cell in cells}
    for arm, labels, pretrained in groups:
        members = [c for c in cells if (c["arm"], c["labels"], c["pretrained"]) == (arm, labels, pretrained)]
        row: dict[str, Any] = {
            "arm": arm,
            "labels": labels,
            "pretrained": pretrained,
            "seeds": [cell["seed"] for cell in members],
        }
        inside = [cell["tune"]["quality"]["inside"] for cell in members]
        if all("r2_ln_force" in q for q in inside):
            row["r2_ln_force"] = spread(q["r2_ln_force"] for q in inside)
        row["r2_force"] = spread(q["r2_force"] for q in inside)
        fitted = [cell["exponents"]["inside"] for cell in members if "inside" in cell.get("exponents", {})]
        if fitted:
            row["exponents"] = {name: spread(f["exponents"][name] for f in fitted) for name in NAMES}
        with_laws = [cell for cell in members if "laws" in cell]
        if with_laws:
            row["laws"] = {
                rule: {
                    scale: [law for cell in with_laws for law in chosen_laws(cell, rule=rule)[scale]]
                    for scale in with_laws[0]["laws"]
                }
                for rule in RULES
            }
        for name in ("heavier", "wider"):
            found = [c["quality"][name] for c in members if name in c.get("quality", {})]
            if found and all("r2_ln_force" in q for q in found):
                row[f"r2_ln_force_{name}"] = spread(q["r2_ln_force"] for q in found)
        rows.append(row)
    return rows


def pretrained_force(long: dict[str, Any]) -> list[dict[str, float]]:
    """The force by length of a run's pre-trained model, from its "long" section."""
    return next((rows for name, rows in long["force"].items() if name.startswith("tuned")), [])


def count_laws(laws: list[str]) -> str:
    counted = sorted({law: laws.count(law) for law in laws}.items(), key=lambda item: -item[1])
    return "; ".join(law if len(laws) == 1 else f"{law} ({count}/{len(laws)})" for law, count in counted)


def format_summary(found: dict[str, Any]) -> str:
    columns = f"{'arm':<28}{'labels':>7}{'R^2 ln F':>10}{'m1':>8}{'m2':>8}{'r':>8}"
    lines = ["", f"{columns}  law (rule: within a tenth)"]
    for row in found["table"]:
        name = row["arm"] if row["pretrained"] else f"{row['arm']}, fresh"
        # "-" for stages that were not run.
        r2 = f"{row['r2_ln_force']['mean']:.4f}" if "mean" in row.get("r2_ln_force", {}) else "-"
        powers = [f"{row['exponents'][n]['mean']:.3f}" if "exponents" in row else "-" for n in NAMES]
        numbers = "".join(f"{power:>8}" for power in powers)
        chosen = row.get("laws", {}).get("within", {})
        law = " | ".join(f"{scale}: {count_laws(names)}" for scale, names in chosen.items())
        lines.append(f"{name:<28}{row['labels']:>7}{r2:>10}{numbers}  {law}")
    for seed, truth in found["controls"].items():
        laws = " | ".join(f"{scale}: {count_laws(names)}" for scale, names in chosen_laws(truth).items())
        lines.append(f"{'true F, ' + seed:<35}{1:>10.4f}{'':>24}  {laws}")
    for row in found["long"]:
        force = pretrained_force(row)
        text = ", ".join(f"{r['multiple']}x {r['r2']:.3f}" for r in force)
        rolled = ", ".join(f"{r['multiple']}x {r['median_ellipse_error']:.3g}" for r in row["roll_out"])
        lines.append(f"{row['arm']}, seed {row['seed']}: R^2 of the force by length {text}; ellipse error {rolled}")
    lines.append("fresh: without pre-training. Exponents of Newton's law: 1, 1, -2.")
    return "\n".join(lines)
