"""Sizes with the optimisation and the layers that go with them. Every setting can be replaced."""

from __future__ import annotations

from typing import Any

# Nothing else that was tried helps more at these sizes, for any attention: a tenth of a nat a byte (docs/dev/log.md).
MUON: dict[str, Any] = {"optimizer": "muon", "learning_rate": 3e-3, "final_learning_rate": 0.05}
# The best recipe of the study (docs/results.md): layers that look half the training length back, every third seeing
# everything and knowing no positions, make the loss fall with length, for LSSAR and for softmax; a sharpness that each
# head learns as a factor of log N brings LSSAR within a few thousandths of softmax. The power is used with LSSAR alone.
RECIPE: dict[str, Any] = {"global_every": 3, "power": "learned-log"}
PRESETS: dict[str, dict[str, Any]] = {
    # 0.8M parameters on bytes: minutes on two cores. Two heads of 64, since small heads extrapolate worse.
    "tiny": {
        "layers": 4, "width": 128, "heads": 2, "sequence_length": 128,
        "window": 64, **RECIPE, "steps": 400, "batch_size": 32, **MUON, "muon_learning_rate": 1e-2, "warmup": 0.05,
        "save_every": 100, "evaluate_every": 100,
    },
    # 51M parameters with GPT-2's vocabulary, 118M tokens: minutes on one GPU. Heads of 128, since with 30M, 51M and
    # 124M parameters they were better than heads of 64 at every length, for LSSAR and for softmax, and with 124M wider
    # ones no better still (docs/results.md).
    "small": {
        "layers": 8, "width": 512, "heads": 4, "sequence_length": 512,
        "window": 256, **RECIPE,
        "steps": 3600, "batch_size": 64, "micro_batch_size": 64, **MUON, "muon_learning_rate": 5e-3, "warmup": 200,
        "compile": True, "loss": "chunked", "workers": 2, "save_every": 600, "evaluate_every": 300,
    },
    # The paper as it is: GPT-2 small, RoPE in every layer, one power; 18,865 steps of 524,288 tokens of FineWeb-10B.
    "gpt2-small": {
        "layers": 12, "width": 768, "heads": 12, "sequence_length": 1024,
        "steps": 18865, "batch_size": 512, "micro_batch_size": 64,
        "learning_rate": 6e-4, "final_learning_rate": 0.0, "warmup": 700,
        "compile": True, "loss": "chunked", "workers": 4, "save_every": 500, "evaluate_every": 250,
    },
}  # fmt: skip
