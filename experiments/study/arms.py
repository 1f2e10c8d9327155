"""What the study trains: sizes, recipe, arms, and the changes at inference that each arm is also measured with."""

from __future__ import annotations

from typing import Any

import torch

from softplus_attention import catalog

SIZES: dict[str, dict[str, Any]] = {
    # For tests: learns nothing.
    "smoke": {
        "layers": 3,
        "width": 32,
        "heads": 2,
        "sequence_length": 32,
        "steps": 4,
        "batch_size": 4,
        "log_every": 2,
    },
    # For a CPU and the text of the package: 0.8M parameters, two minutes per arm on one core.
    "books": {
        "layers": 4,
        "width": 128,
        "heads": 4,
        "sequence_length": 128,
        "steps": 240,
        "batch_size": 32,
        "micro_batch_size": 32,
        "workers": 0,
    },
    # On bytes: 4.7M parameters, for questions with many arms.
    "bytes": {"layers": 6, "width": 256, "heads": 4, "sequence_length": 256, "steps": 1000},
    # Parameters without the embedding: 10.6M, 25.2M, 85.0M; with GPT-2's vocabulary 30M, 51M, 124M.
    "10m": {"layers": 6, "width": 384, "heads": 6, "sequence_length": 512, "steps": 1500},
    "25m": {"layers": 8, "width": 512, "heads": 8, "sequence_length": 512, "steps": 1500},
    "85m": {"layers": 12, "width": 768, "heads": 12, "sequence_length": 1024, "steps": 1500},
}
# With longer passkey documents in the training data: is a passkey found at any length once the form is learned?
# Made by `passkey-data --documents 10000 --min-characters 1200 --max-characters 2000 --questions 3`.
SIZES |= {f"{size}-keys": SIZES[size] for size in ("10m", "25m")}
# On the text of 25m-keys, which can be reproduced: the most important arms of the headline group. Together with
# 25m-keys, sizes that differ in nothing else.
SIZES["10m-again"] = SIZES["10m"]
SIZES["85m-again"] = SIZES["85m"] | {"sequence_length": 512}
# A fourth such size, 302.0M parameters without the embedding and 354M with it: does the trend with size continue?
SIZES["300m-again"] = {"layers": 24, "width": 1024, "heads": 16, "sequence_length": 512, "steps": 1500}
RECIPE: dict[str, Any] = {
    "batch_size": 64, "micro_batch_size": 64, "optimizer": "muon", "muon_learning_rate": 5e-3, "learning_rate": 3e-3,
    "warmup": 0.05, "final_learning_rate": 0.05, "compile": torch.cuda.is_available(), "loss": "chunked", "workers": 4,
    "log_every": 50, "save_every": 100_000,
}  # fmt: skip
RISING = "3,7@0.1,15@0.3"
# Every third layer is global and has no positions; the others have a window of half the training length.
MIX: dict[str, Any] = {"global_every": 3, "window": "half"}
FEWER_HEADS = {"half": 2, "third": 3, "quarter": 4}
LOGN = "softmax-qknorm-logn"
HEADLINE: dict[str, dict[str, Any]] = {
    LOGN: {"attention": LOGN},
    "lssar-rising": {"attention": "lssar", "power": RISING},
    "lssar-p15": {"attention": "lssar", "power": "15"},
    "softmax": {"attention": "softmax"},
    f"{LOGN}-global3": {"attention": LOGN, **MIX},
    "lssar-global3-local-softmax": {"attention": "lssar", "power": RISING, "local_attention": LOGN, **MIX},
    "lssar-global3": {"attention": "lssar", "power": RISING, **MIX},
    "lssar-p3": {"attention": "lssar", "power": "3"},
    "lssa": {"attention": "lssa"},
    "ssmax": {"attention": "ssmax"},
    "sigmoid": {"attention": "sigmoid"},
    "relu": {"attention": "relu"},
}
# Recipes that should match softmax at the training length and beyond it.
RECIPES: dict[str, dict[str, Any]] = {
    "lssar-p2-global3": {"attention": "lssar", "power": "2", **MIX},
    "lssar-p3-global3": {"attention": "lssar", "power": "3", **MIX},
    "lssar-log-global3": {"attention": "lssar", "power": "log:0.6", **MIX},
    "lssar-learned-global3": {"attention": "lssar-p3", "power": "learned", **MIX},
    "lssar-learned-log-global3": {"attention": "lssar", "power": "learned-log", **MIX},
    "lssar-learned-log-global3-local-softmax": {
        "attention": "lssar",
        "power": "learned-log",
        "local_attention": LOGN,
        **MIX,
    },
    # LSSAR only in the global layers, and the best softmax in the others.
    "lssar-learned-log-global3-local-softmax-learned": {
        "attention": "lssar",
        "power": "learned-log",
        "local_attention": f"{LOGN}-learned",
        **MIX,
    },
    # The same with a lower initial scale of softmax, near its values after training.
    "lssar-learned-log-global3-local-softmax-learned-soft": {
        "attention": "lssar",
        "power": "learned-log",
        "local_attention": f"{LOGN}-learned-soft",
        **MIX,
    },
    # Without subtracting 1, which learns faster on bytes and on a small vocabulary (docs/dev/log.md).
    "lssar-without-offset-learned-log-global3": {"attention": "lssar-without-offset", "power": "learned-log", **MIX},
    # The effect of a learned scale on softmax.
    f"{LOGN}-learned-global3": {"attention": f"{LOGN}-learned", **MIX},
    # The same with a lower initial scale, near its values after training.
    f"{LOGN}-learned-soft-global3": {"attention": f"{LOGN}-learned-soft", **MIX},
    # Heads of 128 instead of 64: cosines of unrelated vectors are closer to 0.
    "lssar-learned-log-global3-wide": {"attention": "lssar", "power": "learned-log", "heads": "half", **MIX},
    f"{LOGN}-learned-global3-wide": {"attention": f"{LOGN}-learned", "heads": "half", **MIX},
    # LSSAR with such heads in the global layers, and softmax in the others.
    "lssar-learned-log-global3-local-softmax-learned-wide": {
        "attention": "lssar",
        "power": "learned-log",
        "local_attention": f"{LOGN}-learned",
        "heads": "half",
        **MIX,
    },
    # Heads of 192 and of 256: does the trend continue?
    "lssar-learned-log-global3-wide192": {"attention": "lssar", "power": "learned-log", "heads": "third", **MIX},
    f"{LOGN}-learned-global3-wide192": {"attention": f"{LOGN}-learned", "heads": "third", **MIX},
    "lssar-learned-log-global3-wide256": {"attention": "lssar", "power": "learned-log", "heads": "quarter", **MIX},
    f"{LOGN}-learned-global3-wide256": {"attention": f"{LOGN}-learned", "heads": "quarter", **MIX},
    "lssar-log": {"attention": "lssar", "power": "log:2"},
    "lssar-theta100": {"attention": "lssar", "power": RISING, "rope_theta": 100.0},
}
# The contribution of each part, with the paper's power from the first step on.
NO_PARTS = ("entmax", "by-length", "learned-soft")
ABLATIONS: dict[str, dict[str, Any]] = {
    name: {"attention": name} for name in catalog.ABLATIONS if not any(part in name for part in NO_PARTS)
}
BESIDE_ABLATIONS = ("lssar-p15", "lssar-p3", "lssa", "softmax", LOGN)
GROUPS = {
    "headline": HEADLINE,
    "recipes": RECIPES,
    "ablations": {arm: HEADLINE[arm] for arm in BESIDE_ABLATIONS} | ABLATIONS,
}
ARMS = HEADLINE | RECIPES | ABLATIONS
# Changes at inference that each arm is also measured with, at fewer lengths; 1x is the training length.
VARIANTS: dict[str, list[str]] = {
    "softmax": ["window=1x", "rope=dynamic:16", "rope=yarn:16"],
    LOGN: ["window=1x", "rope=yarn:16"],
    "lssar-rising": ["power=grow:15,2", "power=31"],
    "lssar-p15": ["power=grow:15,2", "power=31"],
    "lssar-global3-local-softmax": ["power=grow:15,2"],
    "lssar-global3": ["power=grow:15,2"],
    "lssa": ["reweight"],
    "lssar-p2-global3": ["power=grow:2,1"],
    "lssar-p3-global3": ["power=grow:3,1", "power=grow:3,2"],
}
MULTIPLES = (1, 2, 4, 8, 16, 32, 64)
FEW_MULTIPLES = (1, 16, 32, 64)
