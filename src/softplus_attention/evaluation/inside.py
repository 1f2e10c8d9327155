"""Statistics of attention weights: entropy, sink, effective keys, zeros and empty tiles, a block of rows at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from softplus_attention.evaluation.capture import Call, RowWeights, capture_attention, run_decoder
from softplus_attention.evaluation.layers import QUANTITIES

TILE = 64


def shares(weights: Tensor) -> Tensor:
    """Weights divided by their row sum; a row of zeros stays zero."""
    total = weights.sum(-1, keepdim=True)
    return weights / torch.where(total > 0, total, 1)


def entropy(weights: Tensor) -> Tensor:
    """Entropy of each row's shares, in nats."""
    return torch.special.entr(shares(weights.double())).sum(-1)


def effective_keys(weights: Tensor) -> Tensor:
    """1 / sum of squared shares: n for n equal weights, 0 for a row of zeros."""
    squares = shares(weights.double()).square().sum(-1)
    return torch.where(squares > 0, 1 / torch.where(squares > 0, squares, 1), 0)


def tiles(final: Tensor, visible: Tensor) -> tuple[Tensor, Tensor]:
    """(B, H, key tiles) booleans: whether the tile has a weight above 0, and whether it has a visible key."""
    extra = -final.shape[-1] % TILE
    weighted = F.pad(final > 0, (0, extra)).unflatten(-1, (-1, TILE)).any(-1).any(-2)
    seen = F.pad(visible, (0, extra)).unflatten(-1, (-1, TILE)).any(-1).any(-2)
    return weighted, seen.expand_as(weighted)


def quantities(rows: RowWeights) -> dict[str, Tensor]:
    """Each (B, H, rows), except "empty_tiles" with one number per block: (B, H, 1)."""
    visible = rows.visible.expand_as(rows.final)
    weighted, seen = tiles(rows.final, visible)
    empty = seen & ~weighted
    found = {
        "stage1_entropy": entropy(rows.stage1),
        "entropy": entropy(rows.final),
        "sink": shares(rows.final)[..., 0].double(),
        "effective_keys": effective_keys(rows.final),
        "mass": rows.final.double().sum(-1),
        "log_keys": visible.sum(-1).clamp(min=1).double().log(),
        "zeros": ((rows.final == 0) & visible).sum(-1).double() / visible.sum(-1).clamp(min=1),
        "empty_tiles": empty.sum(-1, keepdim=True).double() / seen.sum(-1, keepdim=True).clamp(min=1),
    }
    if rows.frozen is not None:
        found["stage1_entropy_frozen"] = entropy(rows.frozen)
    return found


def row_blocks(length: int, max_blocks: int) -> list[tuple[int, int]]:
    """Evenly spread blocks of rows from the last half of a sequence, aligned to tiles."""
    first = length // 2 // TILE * TILE if length >= 2 * TILE else length // 2
    blocks = [(begin, min(begin + TILE, length)) for begin in range(first, length, TILE)]
    if len(blocks) > max_blocks:
        chosen = torch.linspace(0, len(blocks) - 1, max_blocks).round().long().tolist()
        blocks = [blocks[index] for index in chosen]
    return blocks


@dataclass
class Inside:
    """Means over rows for every layer and head, accumulated call by call."""

    length: int
    blocks: Sequence[tuple[int, int]]
    frozen_length: int
    sums: dict[tuple[int, int], dict[str, list[float]]] = field(default_factory=dict)

    def add_call(self, call: Call) -> None:
        for heads in call.head_groups():
            for first, end in self.blocks:
                found = quantities(call.rows(first, end, heads, self.frozen_length))
                for name, values in found.items():
                    for place, head in enumerate(range(*heads.indices(call.heads))):
                        self.add(call.layer, head, name, values[:, place])

    def add(self, layer: int, head: int, name: str, values: Tensor) -> None:
        total = self.sums.setdefault((layer, head), {}).setdefault(name, [0.0, 0.0])
        total[0] += values.sum().item()
        total[1] += values.numel()

    @property
    def log_keys(self) -> float:
        """Mean of log N over rows, layers and heads: the entropy of equal weights."""
        totals = [totals["log_keys"] for totals in self.sums.values()]
        return sum(total for total, _ in totals) / sum(count for _, count in totals)

    def heads(self) -> list[dict[str, Any]]:
        found = []
        for (layer, head), totals in sorted(self.sums.items()):
            means = {name: totals[name][0] / totals[name][1] if name in totals else None for name in QUANTITIES}
            # Layers with a window see fewer keys, so their maximum entropy is smaller.
            own = {"log_keys": totals["log_keys"][0] / totals["log_keys"][1]}
            found.append({"layer": layer, "head": head, **own, **means})
        return found


def look_inside(model: Any, rows: Tensor, *, blocks: int = 8, frozen_length: int, at_once: int = 1) -> Inside:
    """Run ``rows`` (sequences, length) through the model and measure a few blocks of query rows of each sequence."""
    length = rows.shape[1]
    inside = Inside(length, row_blocks(length, blocks), frozen_length)
    for batch in rows.split(at_once):
        with capture_attention(model, inside.add_call):
            run_decoder(model, batch)
    return inside


def attention_maps(model: Any, ids: Tensor, size: int) -> tuple[int, list[dict[str, Any]]]:
    """(tokens per cell, maps) of one text (T,): final weights of each layer and head in at most ``size`` cells.

    A cell is the sum over its keys, averaged over its rows.
    """
    length = len(ids)
    per_cell = -(-length // size)
    cells = -(-length // per_cell)
    maps: list[dict[str, Any]] = []

    def add_maps(call: Call) -> None:
        for heads in call.head_groups():
            lines: list[Tensor] = []
            for cell in range(cells):
                first, end = cell * per_cell, min((cell + 1) * per_cell, length)
                final = call.rows(first, end, heads).final[0].mean(-2)
                padded = F.pad(final, (0, (cell + 1) * per_cell - final.shape[-1]))
                lines.append(padded.unflatten(-1, (cell + 1, per_cell)).sum(-1))
            for place, head in enumerate(range(*heads.indices(call.heads))):
                weights = [[float(f"{value:.4g}") for value in line[place].tolist()] for line in lines]
                maps.append({"layer": call.layer, "head": head, "weights": weights})

    with capture_attention(model, add_maps):
        run_decoder(model, ids[None])
    return per_cell, maps
