"""Group layers by how many keys they see: a mean over local and global layers says little about either."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Number = float | None
# Quantities of each head, by their names in result files.
QUANTITIES = (
    "stage1_entropy",
    "stage1_entropy_frozen",
    "entropy",
    "sink",
    "effective_keys",
    "zeros",
    "empty_tiles",
    "mass",
)
# Layers see the same keys if their means of log N differ by less than this (rounding).
SAME_LOG_KEYS = 0.01
MAX_NAMES = 3


@dataclass(frozen=True)
class LayerGroup:
    label: str  # empty if all layers of the model see the same keys
    layers: frozenset[int]


def mean(values: Sequence[Number]) -> Number:
    present = [value for value in values if value is not None]
    return sum(present) / len(present) if present else None


def head_log_keys(row: Mapping[str, Any], head: Mapping[str, Any]) -> Number:
    """The head's own log N, or the mean over all layers in files that have no log N per head."""
    own: Number = head.get("log_keys")
    return own if own is not None else row.get("log_keys")


def heads_in(row: Mapping[str, Any], group: LayerGroup) -> list[Mapping[str, Any]]:
    return [head for head in row["heads"] if head["layer"] in group.layers]


def mean_over_heads(row: Mapping[str, Any], group: LayerGroup, name: str) -> Number:
    return mean([head.get(name) for head in heads_in(row, group)])


def log_keys(row: Mapping[str, Any], group: LayerGroup) -> Number:
    """The entropy of equal weights in these layers."""
    return mean([head_log_keys(row, head) for head in heads_in(row, group)])


def share_of_log_keys(row: Mapping[str, Any], group: LayerGroup, name: str) -> Number:
    """An entropy divided by the entropy of equal weights."""
    value, most = mean_over_heads(row, group, name), log_keys(row, group)
    return None if value is None or most is None or most <= 0 else value / most


def middle_half(
    rows: Sequence[Mapping[str, Any]], group: LayerGroup, name: str, is_share: bool = False
) -> tuple[list[Number], list[Number]]:
    """First and third quartile over heads, by length; ``is_share`` divides an entropy by that of equal weights."""
    ends: tuple[list[Number], list[Number]] = [], []
    for row in rows:
        most = log_keys(row, group) if is_share else 1.0
        heads = [head.get(name) for head in heads_in(row, group)]
        values = sorted(value / most for value in heads if value is not None and most)
        for end, share in zip(ends, (0.25, 0.75), strict=True):
            end.append(values[int(share * (len(values) - 1))] if values else None)
    return ends


def layer_groups(rows: Sequence[Mapping[str, Any]]) -> list[LayerGroup]:
    """Groups by visible keys at the longest length, the widest layers first."""
    if not rows:
        return []
    row = max(rows, key=lambda row: row["length"])
    layers = sorted({head["layer"] for head in row["heads"]})
    everywhere = frozenset(head["layer"] for row in rows for head in row["heads"])
    seen = {layer: log_keys(row, LayerGroup("", frozenset([layer]))) for layer in layers}
    if len(layers) < 2 or any(value is None for value in seen.values()):
        return [LayerGroup("", everywhere)]
    found: list[tuple[float, list[int]]] = []
    for layer in sorted(layers, key=lambda layer: -(seen[layer] or 0.0)):
        value = seen[layer] or 0.0
        if found and abs(found[-1][0] - value) < SAME_LOG_KEYS:
            found[-1][1].append(layer)
        else:
            found.append((value, [layer]))
    if len(found) == 1:
        return [LayerGroup("", everywhere)]
    # The rows are from the last half, so a global layer sees at least half of the length.
    is_global = row["length"] > 0 and found[0][0] >= math.log(row["length"] / 2)
    names = ["global layers" if is_global else "widest layers"]
    if len(found) == 2:
        names.append("local layers")
    else:
        names += [f"local layers of about {math.exp(min(value, 40.0)):.0f} keys" for value, _ in found[1:]]
    return [LayerGroup(name, frozenset(chosen)) for name, (_, chosen) in zip(names, found, strict=True)]


Curve = dict[float, float]


def equal_weights(curves: Sequence[tuple[str, Curve]]) -> list[tuple[str, Curve]]:
    """The distinct curves among (name, log N by length); each lists its names if there are several curves."""
    found: list[tuple[list[str], Curve]] = []
    for name, curve in curves:
        if not curve:
            continue
        for names, known in found:
            shared = set(known) & set(curve)
            if shared and all(abs(known[length] - curve[length]) < SAME_LOG_KEYS for length in shared):
                names.append(name)
                known.update(curve)
                break
        else:
            found.append(([name], dict(curve)))
    label = "equal weights (log N)"
    return [
        (label if len(found) == 1 else f"{label}: {join_names(names)}", dict(sorted(curve.items())))
        for names, curve in found
    ]


def join_names(names: Sequence[str]) -> str:
    distinct = list(dict.fromkeys(names))
    more = len(distinct) - MAX_NAMES
    return "; ".join(distinct[:MAX_NAMES]) + (f" and {more} more" if more > 0 else "")


def log_keys_curve(rows: Sequence[Mapping[str, Any]], group: LayerGroup) -> Curve:
    found = {row["length"]: log_keys(row, group) for row in rows}
    return {length: value for length, value in found.items() if value is not None}
