"""Predicts time and memory of training on many GPUs, from times measured on one H200 and communication volume.

docs/scale.md has the assumptions.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

from softplus_attention.distributed import TURNS, bytes_of_a_layer
from softplus_attention.validation import fail

# Forward and backward in ms for B 2, H 16, D 128, T 16,384, causal, bfloat16: results/attention-h200.json.
MEASURED = {
    "lssar": (7.73, 20.6),
    "lssar-learned": (8.88, 22.6),
    "lssa": (4.54, 19.3),
    "softmax-flash": (6.59, 17.3),
    "softmax-cudnn": (3.86, 10.5),
}
MEASURED_WORK = 2 * 16 * 16384**2 * 128
# Of a whole training step of GPT-2 small, measured on one H200: results/training-h200.json.
MFU = 0.38


@dataclass(frozen=True)
class Shape:
    """A decoder with gated MLPs, like Llama."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    mlp: int
    vocabulary: int

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    @property
    def layer_parameters(self) -> int:
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return attention + 3 * self.hidden * self.mlp

    @property
    def parameters(self) -> int:
        return self.layers * self.layer_parameters + 2 * self.vocabulary * self.hidden


SHAPES = {
    "1b": Shape(layers=16, hidden=2048, heads=16, kv_heads=8, mlp=8192, vocabulary=128_256),
    "8b": Shape(layers=32, hidden=4096, heads=32, kv_heads=8, mlp=14_336, vocabulary=128_256),
}


@dataclass(frozen=True)
class Cluster:
    """The hardware; the defaults are machines of eight H200s."""

    peak_tflops: float = 989.0
    memory_gb: float = 141.0
    usable: float = 0.9
    per_machine: int = 8
    nvlink_gb: float = 300.0  # received by a GPU per second, in collectives
    network_gb: float = 40.0  # the same between machines, with 400 Gb/s InfiniBand per GPU
    mfu: float = MFU

    def __post_init__(self) -> None:
        for field in fields(self):
            if not getattr(self, field.name) > 0:
                fail(field.name, "a number above 0", getattr(self, field.name))

    def bandwidth(self, processes: int) -> float:
        return 1e9 * (self.nvlink_gb if processes <= self.per_machine else self.network_gb)


@dataclass(frozen=True)
class Plan:
    """Each sequence on ``context`` of ``gpus`` GPUs, weights sharded over all (FSDP2), blocks recomputed."""

    gpus: int
    context: int
    length: int
    memory_gb: float
    products_s: float
    attention_s: float
    context_s: float  # gathering keys and values and scattering their gradients, as far as attention does not hide it
    weights_s: float  # gathering and scattering weights, overlapped with the computation

    @property
    def step_s(self) -> float:
        return max(self.products_s + self.attention_s + self.context_s, self.weights_s)

    @property
    def tokens_per_second(self) -> float:
        return self.gpus / self.context * self.length / self.step_s


def plan(shape: Shape, gpus: int, length: int, context: int, attention: str, cluster: Cluster) -> Plan:
    rows = -(-length // context)
    forward, backward = (1e-3 * ms for ms in MEASURED[attention])
    # Recomputed blocks run forward twice; each process computes its share of the query-key pairs.
    share = shape.heads * length**2 * shape.head_dim / MEASURED_WORK / context
    attention_s = shape.layers * share * (2 * forward + backward)
    products = 8 * (shape.parameters - shape.vocabulary * shape.hidden) * rows
    products_s = products / (cluster.mfu * cluster.peak_tflops * 1e12)
    sent = bytes_of_a_layer("gather", context, 1, rows, shape.heads, shape.kv_heads, shape.head_dim, 2)
    turns = TURNS if shape.kv_heads % TURNS == 0 else 1
    per_layer = [
        times * exposed(sent[way] / cluster.bandwidth(context), share * measured, turns)
        for times, way, measured in ((2, "forward", forward), (1, "backward", backward))
    ]
    context_s = shape.layers * sum(per_layer)
    others = (gpus - 1) / gpus
    weights_s = others * shape.parameters * (2 + 2 + 4) / cluster.bandwidth(gpus)
    return Plan(
        gpus, context, length, memory_gb(shape, gpus, rows, length), products_s, attention_s, context_s, weights_s
    )


def exposed(transfer_s: float, attention_s: float, turns: int) -> float:
    """The exposed time of a transfer in ``turns`` parts, each overlapped with the attention of the previous part."""
    last = transfer_s / turns
    return last + max(0.0, (transfer_s - last) - attention_s * (turns - 1) / turns)


def memory_gb(shape: Shape, gpus: int, rows: int, length: int) -> float:
    """Peak memory of a GPU, as the sum of its parts."""
    state = 16 * shape.parameters / gpus  # float32 weights, gradients and AdamW's two moments
    gathered = 2 * 2 * max(shape.layer_parameters, shape.vocabulary * shape.hidden)  # this and the next layer
    kept = 2 * shape.layers * rows * shape.hidden  # the inputs of each block
    width = shape.head_dim * (2 * shape.heads + 2 * shape.kv_heads)
    block = 2 * rows * (4 * shape.hidden + 2 * width + 4 * shape.mlp)  # activations of the recomputed block
    keys = 2 * length * shape.kv_heads * shape.head_dim * (2 + 1 + 4)  # gathered, half in transfer, and their gradients
    logits = 3 * 4 * min(rows, 4096) * shape.vocabulary
    return (state + gathered + kept + block + keys + logits) / 1e9


def plans(
    shape: Shape, gpus: int, lengths: list[int], attention: str, cluster: Cluster, context: int | None = None
) -> Iterator[tuple[int, Plan | None]]:
    """The fastest plan for each length; None where nothing fits."""
    if attention not in MEASURED:
        fail("attention", f"one of {', '.join(MEASURED)} (those with measured times)", repr(attention))
    for length in lengths:
        choices = [2**i for i in range(int(math.log2(gpus)) + 1)] if context is None else [context]
        found = [plan(shape, gpus, length, one, attention, cluster) for one in choices if one <= gpus]
        fitting = [one for one in found if one.memory_gb <= cluster.usable * cluster.memory_gb]
        yield length, max(fitting, key=lambda one: one.tokens_per_second, default=None)


def longest(shape: Shape, gpus: int, cluster: Cluster) -> int:
    """The longest sequence that fits on all GPUs together, in multiples of 1,024."""
    low, high = 0, 2**20

    def fits(thousands: int) -> bool:
        length = 1024 * thousands
        return memory_gb(shape, gpus, -(-length // gpus), length) <= cluster.usable * cluster.memory_gb

    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return 1024 * low


def changed(cluster: Cluster, **overrides: float | None) -> Cluster:
    return replace(cluster, **{name: value for name, value in overrides.items() if value is not None})  # type: ignore[arg-type]
