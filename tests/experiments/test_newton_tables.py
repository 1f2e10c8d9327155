"""The tables of the orbit experiment, and the files kept in the repository."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from experiments import newton_keep
from tools.tables import newton
from tools.tables.markdown import TableError

LAW, OTHER = "m1 m2 / r^2", "m1 / r"


def laws(within: str, score: str, enumerated: str | None = None) -> dict[str, Any]:
    sample = {"operon": {"chosen": {"within": {"law": within}, "score": {"law": score}}}}
    if enumerated is not None:
        sample["enumerator"] = {"chosen": {"within": {"law": enumerated}, "score": {"law": enumerated}}}
    return {"ln_force": [sample]}


def cell(arm: str, seed: int, pretrained: bool, r2: float, m1: float, law: str) -> dict[str, Any]:
    quality = {"r2_ln_force": r2, "r2_force": r2 - 0.1}
    return {
        "arm": arm,
        "seed": seed,
        "labels": 50,
        "pretrained": pretrained,
        "tune": {"quality": {"inside": quality}},
        "quality": {"inside": quality, "heavier": {"r2_ln_force": 0.5}, "wider": {"r2_ln_force": 0.25}},
        "exponents": {"inside": {"exponents": {"m1": m1, "m2": 1.0, "r": -2.0}}},
        "laws": laws(law, OTHER, LAW),
        "control_with_noise": {"noise": 0.1 * (seed + 1), "laws": laws(LAW, OTHER)},
    }


def run(arm: str, seed: int) -> dict[str, Any]:
    force = [{"multiple": 1, "r2": 0.9 + 0.02 * seed}, {"multiple": 2, "r2": 0.5}]
    return {
        "arm": arm,
        "seed": seed,
        "next_place": [{"multiple": 1, "error": 0.001}, {"multiple": 2, "error": 0.003 + 0.002 * seed}],
        "roll_out": [{"multiple": 2, "median_ellipse_error": 123.0}],
        "force": {"tuned-50": force, "untrained-50": [{"multiple": 1, "r2": 0.1}, {"multiple": 2, "r2": -1.0}]},
    }


FOUND: dict[str, Any] = {
    "cells": [
        cell("lssar", 0, False, 0.3, 0.5, OTHER),
        cell("lssar", 0, True, 0.8, 0.9, LAW),
        cell("lssar", 1, True, 0.9, 1.0, OTHER),
    ],
    "controls": {"seed0": {"noise": 0.0, "laws": laws(LAW, LAW)}},
    "experiment": {"multiples": [1, 2]},
    "long": [run("lssar", 0), run("lssar", 1)],
    "probes": [
        {"arm": "lssar", "seed": 0, "r2": {"force vector": [0.1, 0.6, 0.2]}},
        {"arm": "lssar", "seed": 1, "r2": {"force vector": [0.1, 0.2, 0.5]}},
    ],
}
EXPECTED = {
    "force": """\
| `lssar` | 50 | 0.850 (0.800 to 0.900) | 0.95 (0.90 to 1.00) | 1.00 (1.00 to 1.00) | -2.00 (-2.00 to -2.00) | 0.750 \
| 0.50 / 0.25 | 1 of 2, 2 of 2 |
| `lssar`, no pre-training | 50 | 0.300 | 0.50 | 1.00 | -2.00 | 0.200 | 0.50 / 0.25 | 0 of 1, 1 of 1 |""",
    "controls": """\
| true F | 0.00 | 1 of 1 | 1 of 1 |
| true F with the noise of each model of 50 labelled systems | 0.10 to 0.20 | 3 of 3 | 0 of 3 |
| predictions of the models of 50 labelled systems | - | 1 of 3 | 0 of 3 |""",
    "length": """\
| error of the next position, AU: `lssar` | 0.001 (0.001 to 0.001) | 0.004 (0.003 to 0.005) |
| roll-out, distance from the ellipse: `lssar` | - | 1.2e+02 (1.2e+02 to 1.2e+02) |
| R^2 of the force: `lssar` | 0.91 (0.90 to 0.92) | 0.50 (0.50 to 0.50) |
| R^2 of the force, no pre-training: `lssar` | 0.10 (0.10 to 0.10) | -1.00 (-1.00 to -1.00) |""",
    "probes": "| `lssar` | 0.400 (1) |",
}


FAITHFUL: dict[str, Any] = {
    "pretraining": [{"arm": "softmax", "seed": 0, "loss": 11.784}],
    "cells": [
        {
            "arm": "softmax",
            "seed": 0,
            "labels": 9000,
            "pretrained": pretrained,
            "quality": {"inside": {"r2_force": 0.25, "r2_ln_force": -0.5, "points": 400, "not_positive": 90}},
            "exponents": {"inside": {"exponents": {"m1": 0.125, "m2": 1.0, "r": -2.0}}},
            "laws": {"force": laws(LAW, OTHER, LAW)["ln_force"] + laws(OTHER, LAW, LAW)["ln_force"]},
        }
        for pretrained in (False, True)
    ],
    "controls": {"seed0": {"laws": {"force": laws(LAW, LAW, OTHER)["ln_force"]}}},
}
EXPECTED_FAITHFUL = """\
| `softmax` | 11.78 | 0.25 | -0.50 | 22 | 0.12 | 1.00 | -2.00 | 1 of 2 | 2 of 2 |
| `softmax`, no pre-training | - | 0.25 | -0.50 | 22 | 0.12 | 1.00 | -2.00 | 1 of 2 | 2 of 2 |
| true F | - | - | - | - | - | - | - | 1 of 1 | 0 of 1 |"""


@pytest.mark.parametrize("kind", EXPECTED)
def test_table(kind: str) -> None:
    rows = newton.KINDS[kind](FOUND).splitlines()[2:]
    assert "\n".join(rows) == EXPECTED[kind]


def test_faithful_table() -> None:
    assert newton.faithful_table(FAITHFUL).endswith(EXPECTED_FAITHFUL)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "h200.json cannot be read: No such file"),
        ("{", "h200.json is damaged"),
        ('{"cells": []}', "h200.json is not the results.json of softplus-attention newton"),
    ],
)
def test_bad_files(content: str | None, message: str, tmp_path: Path) -> None:
    (tmp_path / "newton").mkdir()
    for name in newton.FILES:
        (tmp_path / "newton" / f"{name}.json").write_text(json.dumps(FAITHFUL if "faithful" in name else FOUND))
    assert "| 0.850 (0.800 to 0.900) |" in newton.make_tables(tmp_path)["h200-force"]
    path = tmp_path / "newton" / "h200.json"
    path.unlink() if content is None else path.write_text(content)
    with pytest.raises(TableError, match=message):
        newton.make_tables(tmp_path)


def test_kept_results(tmp_path: Path) -> None:
    front = {"front": [{"length": 1}], "chosen": {"within": {"law": LAW}}}
    found = {
        "cells": [{"arm": "lssar", "laws": {"force": [{"operon": front}]}, "control_with_noise": {"laws": [front]}}],
        "pretraining": [{"arm": "lssar", "losses": [[step, 1.0] for step in range(11)]}],
        "machine": "here",
    }
    (tmp_path / "figures").mkdir()
    (tmp_path / "figures" / "orbits.png").write_bytes(b"a picture")
    (tmp_path / "results.json").write_text(json.dumps(found))
    other = {"machine": "there", "versions": {}, "commit": "old", "command": "newton"}
    (tmp_path / "there.json").write_text(json.dumps(other))
    destination = tmp_path / "kept" / "h200.json"
    arguments = [str(tmp_path), str(destination), "--trained-on", str(tmp_path / "there.json"), "--trained-at", "new"]
    assert newton_keep.main([*arguments, "--note", "shared"]) == 0
    kept = json.loads(destination.read_text())
    assert kept["cells"][0]["control_with_noise"] == {"laws": [{"chosen": {"within": {"law": LAW}}}]}
    assert kept["cells"][0]["laws"] == found["cells"][0]["laws"]
    assert kept["pretraining"][0]["losses"] == [[0, 1.0], [5, 1.0], [10, 1.0]]
    assert kept["trained_on"] == {**other, "commit": "new"}
    assert (kept["machine"], kept["note"]) == ("here", "shared")
    assert (tmp_path / "kept" / "h200" / "orbits.png").read_bytes() == b"a picture"
