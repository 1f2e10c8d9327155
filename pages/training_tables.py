"""The part of docs/performance.md that speaks of results/training-h200.json, which benchmarks/training.py writes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from attention_rows import command_of
from claims import holds, listed
from page_blocks import table_of

FILE = "training-h200.json"
NAMES = {"softmax": "softmax (SDPA)", "lssar": "LSSAR, power 15"}


def the_training_run(results: dict[str, Any]) -> str:
    rows, versions = results["rows"], results["versions"]
    words = ("parameters", "sequence_length", "micro_batch", "peak_tflops", "machine", "optimizer", "loss_function")
    first = rows[0]
    holds(all(row[word] == first[word] for row in rows for word in words), "all models were trained alike")
    holds(first["optimizer"] == "adamw" and first["loss_function"] == "chunked", "they were trained as the words say")
    holds(all(row["compile"] for row in rows), "all models were compiled")
    causal = listed(f"{100 * row['mfu_causal']:.1f}%" for row in rows)
    return (
        f"GPT-2 small ({first['parameters'] / 1e6:.0f}M parameters) at {first['sequence_length']} tokens on one "
        f"{first['machine']['gpu']}: bfloat16, torch.compile, fused AdamW, the loss in chunks of tokens, micro-batches "
        f"of {first['micro_batch']} sequences. `{command_of(results)}`, commit {results['commit'][:7]}, torch "
        f"{versions['torch']}, triton {versions['triton']}, [results/{FILE}](../results/{FILE}). MFU is tokens/s times "
        f"(6 N + 12 L W T) over {first['peak_tflops']:.0f} TFLOP/s, the causal half not taken off; {causal} with it "
        "off."
    )


def training_table(results: dict[str, Any]) -> str:
    cells: dict[str, Callable[[dict[str, Any]], str]] = {
        "attention": lambda row: NAMES[row["attention"]],
        "step": lambda row: f"{row['step_ms']:.1f} ms",
        "tokens/s": lambda row: f"{row['tokens_per_second']:,.0f}",
        "MFU": lambda row: f"{100 * row['mfu']:.1f}%",
        "memory": lambda row: f"{row['peak_memory_gib']:.1f} GiB",
        "times softmax's": lambda row: f"{row['time_to_softmax']:.2f}",
    }
    return table_of(results["rows"], cells)
