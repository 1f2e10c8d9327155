"""benchmarks/decode.py as a command, with tiny models on a CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "decode.py"


def test_table_and_file(tmp_path: Path) -> None:
    output = tmp_path / "new" / "decode.json"
    options = ["--small", "--contexts", "32", "64", "--batches", "2", "--repeats", "2", "--output", str(output)]
    done = subprocess.run([sys.executable, str(SCRIPT), *options], capture_output=True, text=True, check=True)
    found = json.loads(output.read_text())
    assert [(x["model"], x["batch"], x["context"], x["way"]) for x in found["rows"]] == [
        (model, 2, context, "eager") for model in ("gpt", "llama") for context in (32, 64)
    ]
    for row in found["rows"]:
        assert row["softmax"] > 0
        assert abs(row["ratio"] - row["lssar"] / row["softmax"]) < 0.01
        assert f"lssar {row['lssar']:9.3f} ms  ratio {row['ratio']:.2f}" in done.stdout
    assert found["command"] == " ".join(["python", "benchmarks/decode.py", *options[:-1], output.name])
    assert found["versions"]["torch"]
