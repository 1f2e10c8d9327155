"""Fits LSSAR far heads one by one: queries, keys and the power, to the original head's output on the same input."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from softplus_attention.functional import softplus_attention
from softplus_attention.huggingface.extension.modeling import HeadGroup, rotate
from softplus_attention.power import power_by_log
from softplus_attention.validation import fail


@dataclass(frozen=True)
class FitSettings:
    tokens: int = 15000
    length: int = 512  # tokens per sequence
    steps: int | None = None  # None: in proportion to the tokens
    batch: int = 4  # sequences per step
    rate: float = 2e-3
    power_rate: float = 2e-2
    seed: int = 0

    @property
    def count(self) -> int:
        return max(20, self.tokens * 160 // 15000) if self.steps is None else self.steps


@dataclass(frozen=True)
class FittedHead:
    """Relative squared errors of the output on held-out sequences, before and after the fit."""

    layer: int
    head: int
    before: float
    after: float


@contextmanager
def record_inputs(layers: Sequence[Any], kept: dict[int, list[Tensor]]) -> Iterator[None]:
    """Appends the hidden states that each layer's attention receives to ``kept[layer]``."""

    def keep(module: Any, args: Any, kwargs: Any) -> None:
        kept.setdefault(module.layer_idx, []).append(kwargs["hidden_states"] if kwargs else args[0])

    handles = [layer.self_attn.register_forward_pre_hook(keep, with_kwargs=True) for layer in layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def cut_sequences(documents: Sequence[Sequence[int]], settings: FitSettings) -> Tensor:
    """``settings.tokens`` tokens as (sequences, length), an equal number of sequences from each document."""
    length, count = settings.length, max(2, settings.tokens // settings.length)
    each = -(-count // len(documents))
    rows = [list(one[begin : begin + length]) for one in documents for begin in range(0, each * length, length)]
    rows = [row for row in rows if len(row) == length][:count]
    if len(rows) < 2:
        fail("text", f"documents with two sequences of {length} tokens, to fit heads to", f"{len(rows)}")
    return torch.tensor(rows)


def fit_far_heads(
    extended: Any,
    original: Any,
    documents: Sequence[Sequence[int]],
    settings: FitSettings,
    progress: Callable[[int, int], None] | None = None,
) -> list[FittedHead]:
    """Changes the queries, keys and powers of the far heads of ``extended`` in place; ``original`` is not changed."""
    rows = cut_sequences(documents, settings).to(original.device)
    chosen = [number for number, heads in enumerate(extended.model.extension.far_heads) if heads]
    kept: dict[int, list[Tensor]] = {}
    with torch.no_grad(), record_inputs([original.model.layers[number] for number in chosen], kept):
        for row in rows:
            original.model(row[None], use_cache=False)
    found: list[FittedHead] = []
    total = sum(map(len, extended.model.extension.far_heads))
    for number in chosen:
        inputs = torch.cat(kept.pop(number)).float()
        new, old = extended.model.layers[number].self_attn, original.model.layers[number].self_attn
        for projection in (new.q_proj, new.k_proj):
            projection.weight = nn.Parameter(projection.weight.detach().clone())
        group = next(group for group in new.groups if group.is_far)
        for place in range(len(group.heads)):
            fitted = fit_head(extended, original, new, old, group, place, inputs, settings)
            found.append(fitted)
            if progress is not None:
                progress(len(found), total)
    return found


def project(attention: Any, x: Tensor, weights: tuple[Tensor, Tensor], rows: tuple[slice, slice]) -> list[Tensor]:
    """q (B, G, T, D) and k (B, 1, T, D) of one key head before the rotation."""
    found = []
    for name, weight, part in zip(("q", "k"), weights, rows, strict=True):
        bias = getattr(attention, f"{name}_proj").bias
        y = nn.functional.linear(x, weight, None if bias is None else bias[part].float())
        y = y.unflatten(-1, (-1, attention.head_dim))
        norm = getattr(attention, f"{name}_norm", None)
        found.append((y if norm is None else norm(y).float()).transpose(1, 2))
    return found


@torch.no_grad()
def original_output(original: Any, attention: Any, x: Tensor, head: int) -> tuple[Tensor, Tensor]:
    """The output of one key head of the original (B, G, T, D), and its values (B, 1, T, D)."""
    width, group = attention.head_dim, attention.num_key_value_groups
    rows = slice(head * group * width, (head + 1) * group * width), slice(head * width, (head + 1) * width)
    weights = attention.q_proj.weight[rows[0]].float(), attention.k_proj.weight[rows[1]].float()
    q, k = project(attention, x, weights, rows)
    bias = attention.v_proj.bias
    v = nn.functional.linear(
        x, attention.v_proj.weight[rows[1]].float(), None if bias is None else bias[rows[1]].float()
    )
    table = original.model.rotary_emb(x, torch.arange(x.shape[1], device=x.device)[None])
    q, k, v = rotate(q, *table), rotate(k, *table), v[:, None]
    out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=attention.scaling, enable_gqa=True)
    return out, v


def fit_head(
    extended: Any,
    original: Any,
    new: Any,
    old: Any,
    group: HeadGroup,
    place: int,
    inputs: Tensor,
    settings: FitSettings,
) -> FittedHead:
    head, width, count = group.heads[place], new.head_dim, new.num_key_value_groups
    rows = slice(head * count * width, (head + 1) * count * width), slice(head * width, (head + 1) * width)
    powers = slice(place * count, (place + 1) * count)
    target, values = original_output(original, old, inputs, head)
    positions = torch.arange(inputs.shape[1], device=inputs.device)[None]
    table = extended.model.far_positions.yarn(inputs, positions)
    weights = [x.weight[part].detach().float().clone() for x, part in zip((new.q_proj, new.k_proj), rows, strict=True)]
    power = new.far_power[powers].detach().float().clone()
    for x in (*weights, power):
        x.requires_grad_(True)
    groups = [{"params": weights, "lr": settings.rate}, {"params": [power], "lr": settings.power_rate}]
    optimizer = torch.optim.Adam(groups)
    held = max(1, len(inputs) // 8)  # held-out sequences

    def error(part: Tensor | slice) -> Tensor:
        q, k = project(new, inputs[part], (weights[0], weights[1]), rows)
        q, k = rotate(q, *table), rotate(k, *table)
        by_row = power_by_log(power, positions[None] + 1)
        out = softplus_attention(q, k, values[part], is_causal=True, enable_gqa=True, power=by_row)
        return (out - target[part]).square().mean() / target[part].square().mean()

    with torch.no_grad():
        before = error(slice(-held, None)).item()
    generator = torch.Generator().manual_seed(settings.seed)
    for step in range(settings.count):
        for one, rate in zip(optimizer.param_groups, (settings.rate, settings.power_rate), strict=True):
            one["lr"] = rate * (1 - step / settings.count)
        picked = torch.randint(len(inputs) - held, (settings.batch,), generator=generator).to(inputs.device)
        optimizer.zero_grad()
        with torch.enable_grad():
            error(picked).backward()
        optimizer.step()
    with torch.no_grad():
        after = error(slice(-held, None)).item()
        for projection, part, weight in zip((new.q_proj, new.k_proj), rows, weights, strict=True):
            projection.weight[part] = weight.to(projection.weight.dtype)
        new.far_power[powers] = power.to(new.far_power.dtype)
    return FittedHead(new.layer_idx, head, before, after)
