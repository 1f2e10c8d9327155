"""Context parallelism: exact attention over sequences that are sharded across processes.

A ``ContextParallel`` record is made once per batch, from its length and its documents. It says which tokens each
process holds and which keys each of them sees in the whole sequence, so N_i is that of the whole sequence. There are
two modes: "gather" gathers all keys and values on every process and calls the op unchanged; "ulysses" exchanges tokens
for heads, so that each process attends to whole sequences with a part of the heads. docs/scale.md has the costs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from softplus_attention import dispatch, reference
from softplus_attention import validation as check
from softplus_attention.attentions.catalog import Attention
from softplus_attention.attentions.catalog import attention as find_attention
from softplus_attention.attentions.spec import AttentionSpec
from softplus_attention.power import power_of_rows
from softplus_attention.visibility import Visibility, document_indices, window_start

Mode = Literal["gather", "ulysses"]
MODES = ("gather", "ulysses")
IGNORED = -100  # label of a token that is no target
MAX_BLOCK = 128  # tokens that are dealt together: a block of the kernels' rows
MIN_BLOCKS = 8  # of each process, if the sequence is long enough
TURNS = 2  # groups of heads gathered in turn: the second is in transfer while the first is attended to


@dataclass(frozen=True, eq=False)
class ContextParallel:
    """Which process holds which tokens of a sequence of ``length``, and what each row may see.

    ``positions`` (rows,) are the tokens of this process, -1 for padding; ``table`` (processes, rows) those of all.
    ``start`` and ``end`` (B or 1, length) are the bounds of each token's document in the whole sequence; ``place``
    (length,) is each token's index in the concatenation of all processes' rows.
    """

    length: int
    mode: Mode
    table: Tensor
    start: Tensor
    end: Tensor
    place: Tensor
    positions: Tensor
    group: Any

    @property
    def rows(self) -> int:
        return self.table.shape[1]

    @property
    def processes(self) -> int:
        return self.table.shape[0]

    def shard(self, x: Tensor, dim: int, padding: float = 0) -> Tensor:
        """This process's rows of a tensor that holds the whole sequence along ``dim``."""
        if x.shape[dim] != self.length:
            check.fail("x", f"a tensor of {self.length} tokens along dim {dim}", check.describe_tensor(x))
        local = x.index_select(dim, self.positions.clamp(min=0).to(x.device))
        real = (self.positions >= 0).to(x.device)
        shape = [1] * x.dim()
        shape[dim] = -1
        return torch.where(real.view(shape), local, padding)

    def unshard(self, x: Tensor, dim: int) -> Tensor:
        """The whole tensor on every process, in sequence order; gradients are summed over the processes."""
        if x.shape[dim] != self.rows:
            check.fail("x", f"the {self.rows} rows of this process along dim {dim}", check.describe_tensor(x))
        return self.in_order(self.gathering(x, dim), dim)

    def gathering(self, x: Tensor, dim: int) -> Gathering:
        return Gathering(x.movedim(dim, 0), self.group)

    def in_order(self, gathering: Gathering, dim: int) -> Tensor:
        gathered = gathering.end()
        return gathered.index_select(0, self.place.to(gathered.device)).movedim(0, dim)

    def visibility(self, rows: Tensor | None, is_causal: bool, window: int | None) -> Visibility:
        """What the rows at these positions see of the whole sequence; None is all rows in order."""
        check.check_causal(is_causal)
        check.check_window(window, is_causal)
        own = torch.arange(self.length, device=self.start.device) if rows is None else rows
        real, at = own >= 0, own.clamp(min=0)
        start, end = self.start[:, at], self.end[:, at]
        own = own.to(torch.int32)[None].expand_as(start)
        if is_causal:
            end = torch.minimum(end, own + 1)
            if window is not None:
                start = torch.maximum(start, window_start(own, window))
        start, end = torch.where(real, start, 0), torch.where(real, end, 0)  # padding rows see no key: N = 0
        return Visibility(
            own.shape[1],
            self.length,
            own.device,
            key_start=start,
            key_end=end,
            query_key_index=own,
            applied_window=window,
        )


def context_parallel(
    length: int | None = None,
    *,
    cu_seqlens: Tensor | None = None,
    document_starts: Tensor | None = None,
    group: dist.ProcessGroup | None = None,
    mode: Mode = "gather",
    device: torch.device | str | None = None,
) -> ContextParallel:
    """The record of a batch; every process of ``group`` makes it from the same arguments.

    Give exactly one of the first three arguments.

    Args:
        length: of the whole sequence, any number.
        cu_seqlens: int (documents + 1,), packed documents, the same in every row of the batch.
        document_starts: int (B, length), for each token the first token of its document: rows packed differently.
        group: the processes that share the sequence; None is all of them.
        mode: "gather" or "ulysses", which needs query heads divisible by the number of processes.

    With "gather" blocks of tokens are dealt out such that every process has the same amount of work, whatever the
    documents are; with "ulysses" each process holds a contiguous part of the sequence.
    """
    if mode not in MODES:
        check.fail("mode", f"one of {MODES}", repr(mode))
    if (length is not None) + (cu_seqlens is not None) + (document_starts is not None) != 1:
        raise ValueError("exactly one of `length`, `cu_seqlens` and `document_starts` must be given")
    if not dist.is_initialized():
        raise RuntimeError("context_parallel: no process group; start with torchrun and call init_process_group first")
    start, end = documents(length, cu_seqlens, document_starts, device)
    length, world = start.shape[1], dist.get_world_size(group)
    table = contiguous_table(length, world, start.device) if mode == "ulysses" else deal(start, world)
    real = table.flatten() >= 0
    place = torch.empty(length, dtype=torch.long, device=table.device)
    place[table.flatten()[real]] = torch.arange(table.numel(), device=table.device)[real]
    positions = table[dist.get_rank(group)]
    return ContextParallel(length, mode, table, start, end, place, positions, group)


def documents(
    length: int | None, cu_seqlens: Tensor | None, document_starts: Tensor | None, device: torch.device | str | None
) -> tuple[Tensor, Tensor]:
    """(start, end), int32 (B or 1, length): the bounds of each token's document."""
    if length is not None:
        if isinstance(length, bool) or not isinstance(length, int) or length < 1:
            check.fail("length", "an int >= 1", repr(length))
        start = torch.zeros(1, length, dtype=torch.int32, device=device)
        return start, start + length
    if cu_seqlens is not None:
        cu = cu_seqlens.to(device=device, dtype=torch.int32)
        if cu.dim() != 1 or cu.numel() < 2 or cu[0] != 0 or (cu.diff() < 0).any() or cu[-1] < 1:
            check.fail("cu_seqlens", "(documents + 1,), rising from 0 to the total", check.describe_tensor(cu_seqlens))
        document = document_indices(torch.arange(int(cu[-1]), dtype=torch.int32, device=cu.device), cu)
        return cu[document][None], cu[document + 1][None]
    assert document_starts is not None
    start = document_starts.to(device=device, dtype=torch.int32)
    own = torch.arange(start.shape[-1], device=start.device)
    if start.dim() != 2 or not start.numel() or (start > own).any() or (start < 0).any() or (start.diff() < 0).any():
        expected = "(B, length), for each token the index of the first token of its document"
        check.fail("document_starts", expected, check.describe_tensor(document_starts))
    # A document ends where the next token has another start.
    last = torch.ones_like(start, dtype=torch.bool)
    last[:, :-1] = start.diff() != 0
    ends = torch.where(last, own.to(torch.int32) + 1, start.shape[1])
    return start, ends.flip(1).cummin(1).values.flip(1)


def contiguous_table(length: int, world: int, device: torch.device) -> Tensor:
    rows = -(-length // world)
    table = torch.arange(rows * world, device=device).view(world, rows)
    return torch.where(table < length, table, -1)


def deal(start: Tensor, world: int) -> Tensor:
    """(processes, rows): blocks of tokens by decreasing work, dealt in alternating order, then sorted per process."""
    length, device = start.shape[1], start.device
    block = max(1, min(MAX_BLOCK, length // (MIN_BLOCKS * world)))
    rounds = -(-length // (block * world))
    rounds += rounds % 2 if rounds > 2 else 0  # pairs of rounds in opposite order balance
    work = torch.zeros(rounds * world * block, dtype=torch.long, device=device)
    work[:length] = (torch.arange(length, device=device) + 1 - start).sum(0)
    order = work.view(-1, block).sum(1).sort(descending=True, stable=True).indices.view(rounds, world)
    order[1::2] = order[1::2].flip(1)
    table = (order.T.sort(1).values[..., None] * block + torch.arange(block, device=device)).flatten(1)
    return torch.where(table < length, table, -1)


# ---- collectives


class Transfer:
    """A running collective: ``out`` must not be read before ``wait``. ``sent`` is kept alive until then."""

    def __init__(self, send: Callable[..., Any], out: Tensor, sent: Tensor, group: Any) -> None:
        self.out, self.sent = out, sent
        self.work = send(out, sent, group=group, async_op=True)

    def wait(self) -> Tensor:
        self.work.wait()
        return self.out


def all_gather(x: Tensor, group: Any) -> Transfer:
    """(n, ...) of each process -> (processes * n, ...)."""
    out = x.new_empty(dist.get_world_size(group) * x.shape[0], *x.shape[1:])
    return Transfer(getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor, out, x.contiguous(), group)


def reduce_scatter(x: Tensor, group: Any) -> Transfer:
    """(processes * n, ...) -> (n, ...), summed; half precision in float32."""
    exact = x.to(reference.compute_dtype(x.dtype)).contiguous()
    out = exact.new_empty(x.shape[0] // dist.get_world_size(group), *x.shape[1:])
    return Transfer(getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor, out, exact, group)


def all_to_all(x: Tensor, group: Any) -> Tensor:
    """(processes, ...): sends part i to process i and receives its part for this process."""
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    dist.all_to_all_single(out, x.contiguous(), group=group)
    return out


class Gathering:
    """An all-gather of rows (n, ...), as two nodes of the autograd graph.

    The forward starts the transfer in ``BeginGather`` and waits for it in ``EndGather``. The backward starts the
    reduce-scatter in ``EndGather`` and waits in ``BeginGather``. In both, computation in between hides the transfer.
    """

    def __init__(self, x: Tensor, group: Any) -> None:
        self.group = group
        self.transfer: Transfer | None = None
        self.gathered = BeginGather.apply(x, self)

    def end(self) -> Tensor:
        gathered, self.gathered = EndGather.apply(self.gathered, self), None
        return gathered

    def begin(self, send: Callable[[Tensor, Any], Transfer], x: Tensor) -> Tensor:
        self.transfer = send(x, self.group)
        return self.transfer.out

    def wait(self) -> Tensor:
        assert self.transfer is not None
        transfer, self.transfer = self.transfer, None
        return transfer.wait()


class BeginGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gathering: Gathering) -> Tensor:
        ctx.gathering, ctx.dtype = gathering, x.dtype
        return gathering.begin(all_gather, x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.gathering.wait().to(ctx.dtype), None


class EndGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gathering: Gathering) -> Tensor:
        ctx.gathering = gathering
        gathering.wait()
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        ctx.gathering.begin(reduce_scatter, gradients[0])
        return gradients[0], None  # a placeholder of the right shape: BeginGather returns the sum


class Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return all_to_all(x, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return all_to_all(gradients[0], ctx.group), None


# ---- attention


def context_parallel_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    record: ContextParallel,
    *,
    attention: str | AttentionSpec | Attention = "lssar",
    parameters: Mapping[str, Tensor] | None = None,
    is_causal: bool = True,
    window: int | None = None,
) -> Tensor:
    """Any attention of the catalogue over a sharded sequence: this process's rows of the exact result.

    q (B, H, rows, D), k and v (B, H_kv, rows, D) are shards by ``record.shard``. ``parameters`` are those of
    ``Attention``: a tensor (H,) is the same on every process, and its gradient is partial, to be summed over the group
    like that of any weight; a power per row is sharded like the rows. Padding rows give 0.
    """
    global _attended
    _attended += 1
    chosen = find_attention(attention)
    q, k, v = dispatch.autocast(q, k, v)
    check.check_qkv(q, k, v, layout="(B, H, rows, D)", enable_gqa=True, names=("q", "k", "v"))
    if q.shape[2] != record.rows or k.shape[2] != record.rows:
        check.fail("q, k, v", f"the {record.rows} rows that the record gives this process", check.describe_tensor(q))
    window = chosen.window(window)
    run = ulysses if record.mode == "ulysses" else gather
    return run(chosen, q, k, v, record, parameters or {}, is_causal, window)


def gather(
    chosen: Attention,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    record: ContextParallel,
    parameters: Mapping[str, Tensor],
    is_causal: bool,
    window: int | None,
) -> Tensor:
    turns = TURNS if k.shape[1] % TURNS == 0 and not has_slopes(chosen) else 1
    visibility = record.visibility(record.positions, is_causal, window)
    widths = [k.shape[-1], v.shape[-1]]
    gatherings = [record.gathering(both, 2) for both in torch.cat([k, v], -1).chunk(turns, 1)]
    outputs = []
    for turn, (queries, gathering) in enumerate(zip(q.chunk(turns, 1), gatherings, strict=True)):
        keys, values = record.in_order(gathering, 2).split(widths, -1)
        local = {name: slice_heads(value, turn, turns) for name, value in parameters.items()}
        outputs.append(chosen.attend(queries, keys, values, visibility, "auto", local, False))
    return outputs[0] if turns == 1 else torch.cat(outputs, 1)


def has_slopes(chosen: Attention) -> bool:
    """ALiBi slopes depend on a head's index among all heads."""
    return chosen.spec.positions == "alibi"


def slice_heads(value: Tensor, part: int, parts: int) -> Tensor:
    """One of ``parts`` equal groups of heads of a parameter (H,) or (B|1, H|1, rows)."""
    dim = 0 if value.dim() == 1 else 1
    return value if parts == 1 or value.shape[dim] == 1 else value.chunk(parts, dim)[part]


def ulysses(
    chosen: Attention,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    record: ContextParallel,
    parameters: Mapping[str, Tensor],
    is_causal: bool,
    window: int | None,
) -> Tensor:
    world, heads = record.processes, q.shape[1]
    if heads % world:
        what = f'mode="ulysses" needs query heads divisible by the {world} processes, got {heads}; use mode="gather"'
        raise ValueError(what)
    if has_slopes(chosen):
        raise ValueError(f'mode="ulysses" would give {chosen.name} the slopes of other heads; use mode="gather"')
    if k.shape[1] % world:
        k, v = (reference.expand_kv_heads(x, math.lcm(k.shape[1], world)) for x in (k, v))
    rank = dist.get_rank(record.group)
    local = {}
    for name, value in parameters.items():
        if value.dim() == 1:
            local[name] = slice_heads(value, rank, world)
        else:  # per row: exchanged like the queries
            local[name] = to_heads(value.expand(*q.shape[:3])[..., None], record)[..., 0]
    q, k, v = (to_heads(x, record) for x in (q, k, v))
    out = chosen.attend(q, k, v, record.visibility(None, is_causal, window), "auto", local, False)
    return to_rows(out, record)


def to_heads(x: Tensor, record: ContextParallel) -> Tensor:
    """(B, H, rows, D) -> (B, H / processes, length, D)."""
    batch, heads, rows, width = x.shape
    parts = x.view(batch, record.processes, heads // record.processes, rows, width).movedim(1, 0)
    whole = Exchange.apply(parts, record.group).permute(1, 2, 0, 3, 4).flatten(2, 3)
    return whole[:, :, : record.length]


def to_rows(x: Tensor, record: ContextParallel) -> Tensor:
    """(B, H / processes, length, D) -> (B, H, rows, D)."""
    x = torch.nn.functional.pad(x, (0, 0, 0, record.processes * record.rows - record.length))
    parts = x.unflatten(2, (record.processes, record.rows)).movedim(2, 0)
    return Exchange.apply(parts, record.group).transpose(0, 1).flatten(1, 2)


# ---- models

# Not ContextVars: the backward of gradient checkpointing recomputes layers in other threads.
_active: ContextParallel | None = None
_attended = 0  # calls of context_parallel_attention inside ``sharded``


@contextmanager
def sharded(record: ContextParallel) -> Iterator[ContextParallel]:
    """Inside, this package's attentions in models of transformers treat their rows as shards of the record.

    With gradient checkpointing the backward must run inside too. Inputs are sharded by ``record.shard``;
    ``position_ids`` are ``record.positions`` counted from the start of each document; masks follow from the record.
    """
    global _active, _attended
    before, _active, _attended = (_active, _attended), record, 0
    try:
        yield record
        check_attended(1)
    finally:
        _active, _attended = before


def check_attended(layers: int) -> None:
    """Inside ``sharded`` any other attention would silently treat the rows of one process as the whole sequence."""
    if _attended < layers:
        where = "at least one layer" if layers == 1 else f"each of {layers} layers"
        raise ValueError(
            f"context parallel needs an attention of softplus_attention in {where}, got {_attended}: any other sees "
            "only the tokens of one process. Load the model with attn_implementation='lssar' or another name of the "
            "catalogue"
        )


def shard_batch(
    inputs: Mapping[str, Any], group: dist.ProcessGroup | None = None, mode: Mode = "gather"
) -> tuple[ContextParallel, dict[str, Any]]:
    """The record of a causal language model's batch, and the model's inputs on this process, for use in ``sharded``.

    "input_ids" and "labels" (B, length) are the same on every process of the group; each 0 in "position_ids" starts a
    document. Labels are shifted here ("shift_labels"), since the next token may be on another process. With
    "num_items_in_batch" each process's loss is its share of the mean over the targets of all processes.
    """
    tokens = inputs["input_ids"]
    unsupported = sorted(set(inputs) - {"input_ids", "labels", "position_ids", "shift_labels"})
    if unsupported:
        raise ValueError(f"context parallel cannot shard {unsupported}: pass only input_ids, labels and position_ids")
    place = torch.arange(tokens.shape[1], device=tokens.device)
    position_ids = inputs.get("position_ids")
    if position_ids is None:
        record = context_parallel(tokens.shape[1], group=group, mode=mode, device=tokens.device)
        position_ids = place[None].expand_as(tokens)
    else:
        starts = torch.where(position_ids == 0, place, 0).cummax(1).values
        if not torch.equal(position_ids, place - starts):
            raise ValueError("context parallel needs position_ids that count from 0 in each document")
        record = context_parallel(document_starts=starts, group=group, mode=mode)
    shared = {"input_ids": record.shard(tokens, 1), "position_ids": record.shard(position_ids, 1)}
    labels = inputs.get("labels")
    if labels is not None:
        shifted = inputs.get("shift_labels")
        if shifted is None:
            shifted = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORED)
        shared |= {"labels": record.shard(labels, 1, IGNORED), "shift_labels": record.shard(shifted, 1, IGNORED)}
        shared["num_items_in_batch"] = (shifted != IGNORED).sum()
    return record, shared


def parallelize_heads(module: Any, mesh: Any) -> None:
    """Tensor parallelism of a ``SoftplusAttention``, in place: each process of ``mesh`` gets a part of the heads.

    The projections are sharded by torch's ``parallelize_module``, and so are the parameters learned per head. Input and
    output are replicated, as for a tensor-parallel MLP.
    """
    from torch.distributed.tensor import Shard, distribute_tensor
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    processes = mesh.size()
    for name in ("num_heads", "num_kv_heads"):
        if getattr(module, name) % processes:
            check.fail(name, f"a multiple of the {processes} processes", getattr(module, name))
    if processes > 1 and has_slopes(module.attention):
        check.fail("attention", "one without ALiBi, whose slopes depend on all heads", module.attention.name)
    plan = {name: ColwiseParallel() for name in ("q_proj", "k_proj", "v_proj")}
    parallelize_module(module, mesh, {**plan, "o_proj": RowwiseParallel()})
    for name, parameter in list(module.named_parameters(recurse=False)):
        part = distribute_tensor(parameter.data, mesh, [Shard(0)])
        module.register_parameter(name, torch.nn.Parameter(part, parameter.requires_grad))


def active() -> ContextParallel | None:
    return _active


# ---- decode


def softplus_attention_decode_sharded(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_positions: Tensor,
    start: Tensor,
    end: Tensor,
    *,
    group: dist.ProcessGroup | None = None,
    power: Any = 15,
    score_scale: float | None = None,
    offset: bool = True,
    normalized_keys: bool = False,
) -> Tensor:
    """Decode over a cache whose keys are sharded across processes; every process gets the result (B, H, T_q, D_v).

    q (B, H, T_q, D) is the same everywhere; k and v (B, H_kv, T_local, D) are this process's part of the cache, which
    may be empty, at the positions ``key_positions`` (T_local,) of the whole. Row i sees the keys from ``start`` to
    ``end``, both (B or 1, T_q); N_i is their difference. There are two collectives: one of the sums and the largest
    scores of stage 1, one of the weighted values and the sum of the weights.
    """
    check.check_qkv(q, k, v, layout="(B, H, T, D)", enable_gqa=True, names=("q", "k", "v"))
    if key_positions.shape != (k.shape[2],):
        expected = f"of shape ({k.shape[2]},), one position per key"
        check.fail("key_positions", expected, check.describe_tensor(key_positions))
    dtype, heads = reference.compute_dtype(q.dtype), q.shape[1]
    scale = math.log(q.shape[-1]) if score_scale is None else score_scale
    visible = ((key_positions >= start[..., None]) & (key_positions < end[..., None]))[:, None]
    counts = (end - start).clamp(min=0).to(dtype)[:, None]
    keys = reference.expand_kv_heads(k, heads).to(dtype)
    keys = keys if normalized_keys else reference.unit(keys)
    f = reference.softplus(reference.length_scaled_scores(reference.unit(q.to(dtype)), keys, counts, scale))
    f = torch.where(visible, f, 0)
    total = f.sum(-1, keepdim=True)
    largest = f.amax(-1, keepdim=True) if f.shape[-1] else torch.zeros_like(total)
    totals, maxima = all_gather(torch.cat([total, largest], -1)[None], group).wait().split(1, -1)
    total, largest = totals.sum(0), maxima.amax(0)
    weights = f
    if power is not None:
        per_key = counts[..., None] / torch.where(total == 0, 1, total)
        shift = reference.choose_offset(counts, offset)
        most = torch.relu(per_key * largest - shift)
        distinct = most > reference.EQUAL_SCORES
        x = torch.where(distinct, torch.relu(per_key * f - shift), 0) / torch.where(distinct, most, 1)
        p = power_of_rows(power, counts)
        weights = torch.where(distinct, torch.where(x > 0, torch.where(x > 0, x, 1) ** p, 0), f)
    weights = torch.where(visible, weights, 0)
    values = torch.where(reference.seen_by_some_row(visible), v, 0)
    local = reference.weighted_sum(weights, reference.expand_kv_heads(values, heads).to(dtype))
    both = torch.cat([local, weights.sum(-1, keepdim=True)], -1)
    dist.all_reduce(both, group=group)
    normaliser = both[..., -1:]
    return (both[..., :-1] / torch.where(normaliser == 0, 1, normaliser)).to(q.dtype)


def bytes_of_a_layer(
    mode: Mode, processes: int, batch: int, rows: int, heads: int, kv_heads: int, head_dim: int, element: int
) -> dict[str, int]:
    """Bytes that a process receives in one layer, "forward" and "backward", with ``rows`` rows per process."""
    others = processes - 1
    row = batch * rows * head_dim
    if mode == "gather":
        exact = max(element, 4)  # gradients are summed in float32
        return {"forward": 2 * kv_heads * row * element * others, "backward": 2 * kv_heads * row * exact * others}
    keys = kv_heads if kv_heads % processes == 0 else math.lcm(kv_heads, processes)
    part = (2 * heads + 2 * keys) * row * element * others // processes
    return {"forward": part, "backward": part}
