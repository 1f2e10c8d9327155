"""Attention over a sharded sequence against one process; ``main`` returns the errors.

    PYTHONPATH=src:tests/support torchrun --nproc-per-node 2 tests/support/sharded_attention.py cuda 2000

prints the bfloat16 errors of two processes that share a GPU, as fractions of the error that the yardstick allows.
"""

import os
import socket
import struct
import sys
import time
from unittest import mock

import torch
import torch.distributed as dist
from helpers import doubtful_rows, largest_error, run, unit_in_the_last_place
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental._context_parallel import (
    _context_parallel_shard,
    _ContextParallel,
    _HeadTailLoadBalancer,
)
from torch.distributed.tensor.parallel import parallelize_module

from softplus_attention import PowerByLength, softplus_attention, softplus_attention_decode, softplus_attention_varlen
from softplus_attention.attentions.catalog import ATTENTIONS, Attention, attention
from softplus_attention.distributed import (
    Gathering,
    bytes_of_a_layer,
    context_parallel,
    context_parallel_attention,
    softplus_attention_decode_sharded,
)

WIDTH = 16
CASES = [  # length, heads, key heads, window, documents, causal
    (64, 4, 4, None, None, True),
    (61, 12, 2, None, None, True),
    (61, 12, 1, 9, None, True),
    (67, 12, 2, None, [0, 1, 4, 30, 31, 67], True),
    (67, 12, 2, 12, [0, 20, 45, 67], True),
    (50, 12, 12, None, [0, 20, 50], False),
    (61, 12, 2, 4, None, True),  # row 8 sees four equal keys
    (5, 12, 2, None, None, True),
    (3, 12, 3, None, [0, 0, 1, 1, 3], True),  # fewer tokens than processes, empty documents
    (1, 12, 1, None, None, True),
]


def relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    error = (found - wanted).abs().max() / wanted.abs().max().clamp(min=1e-30)
    dist.all_reduce(error, dist.ReduceOp.MAX)
    return float(error)


def make_parameters(name: str, kind: str, heads: int, length: int) -> dict[str, torch.Tensor]:
    if kind == "per head":
        return {"power": torch.linspace(1.5, 15, heads, dtype=torch.float64)}
    if kind == "per log":
        return {"power_per_log": torch.linspace(0.3, 2, heads, dtype=torch.float64)}
    if kind == "per row":
        return {"power": torch.linspace(1.5, 9, heads * length, dtype=torch.float64).view(1, heads, length)}
    return {key: value.double() for key, value in attention(name).learned_parameters(heads).items()}


def compare(name: str, kind: str, mode: str, case: tuple) -> float:
    length, heads, kv_heads, window, bounds, causal = case
    torch.manual_seed(length + kv_heads)
    whole = [torch.randn(2, h, length, WIDTH, dtype=torch.float64) for h in (heads, kv_heads, kv_heads)]
    if length > 9:
        whole[1][:, :, 5:9] = whole[1][:, :, 5:6]
    grad = torch.randn(2, heads, length, WIDTH, dtype=torch.float64)
    learned = make_parameters(name, kind, heads, length)
    cu = torch.tensor(bounds or [0, length])
    starts = cu[torch.bucketize(torch.arange(length), cu, right=True) - 1].int()
    ends = cu[torch.bucketize(torch.arange(length), cu, right=True)].int()
    if causal:
        ends = torch.arange(1, length + 1).int()
        starts = starts if window is None else torch.maximum(starts, ends - window)

    chosen = attention(name)
    mine = [x.clone().requires_grad_() for x in (*whole, *learned.values())]
    own = dict(zip(learned, mine[3:], strict=True))
    rows = [x[None].expand(2, -1).contiguous() for x in (starts, ends)]
    one = chosen(*mine[:3], enable_gqa=True, key_start=rows[0], key_end=rows[1], parameters=own)
    wanted = [one, *torch.autograd.grad(one, mine, grad)]

    if bounds is None:
        record = context_parallel(length, mode=mode)
    elif length % 2:  # test both ways to pass documents
        record = context_parallel(cu_seqlens=cu, mode=mode)
    else:
        document = cu[torch.bucketize(torch.arange(length), cu, right=True) - 1]
        record = context_parallel(document_starts=document[None].expand(2, -1), mode=mode)
    local = [record.shard(x, 2).requires_grad_() for x in whole]
    for value in learned.values():
        local.append((record.shard(value, 2, 1.0) if value.dim() > 1 else value.clone()).requires_grad_())
    own = dict(zip(learned, local[3:], strict=True))
    out = context_parallel_attention(
        *local[:3], record, attention=name, parameters=own, is_causal=causal, window=window
    )
    found = [out, *torch.autograd.grad(out, local, record.shard(grad, 2))]
    errors = [relative(record.unshard(x, 2), y) for x, y in zip(found[:4], wanted[:4], strict=True)]
    for x, y in zip(found[4:], wanted[4:], strict=True):
        if x.dim() == 1:
            x = x.clone()
            dist.all_reduce(x)
        else:
            x = record.unshard(x, 2)
        errors.append(relative(x, y))
    return max(errors)


def decode_errors() -> dict[str, float]:
    torch.manual_seed(0)
    length, heads, kv_heads, new = 53, 8, 2, 3
    q = torch.randn(2, heads, new, WIDTH, dtype=torch.float64)
    k, v = (torch.randn(2, kv_heads, length, WIDTH, dtype=torch.float64) for _ in range(2))
    here = torch.arange(dist.get_rank(), length, dist.get_world_size())
    found = {}
    powers = {"number": 15, "none": None, "tensor": torch.linspace(1, 15, heads).double()}
    for window in (None, 20, 4):
        k[:, :, -6:] = k[:, :, -6:-5] if window == 4 else k[:, :, -6:]
        end = torch.arange(length - new + 1, length + 1)[None]
        start = torch.zeros_like(end) if window is None else end - window
        for name, power in powers.items():
            for offset in (True, False) if power is not None else (True,):
                options = {"power": power, "offset": offset}
                part = (k[:, :, here], v[:, :, here], here, start, end)
                got = softplus_attention_decode_sharded(q, *part, **options)
                seqlens = torch.full((2,), length, dtype=torch.int32)
                options |= {"window": window, "enable_gqa": True}
                wanted = softplus_attention_decode(q, k, v, seqlens, **options)
                found[f"window {window}, power {name}, offset {offset}"] = relative(got, wanted)
    # Keys in random order and uneven parts, or all keys on the first process. A sequence without keys gives 0.
    rank, world = dist.get_rank(), dist.get_world_size()
    order = torch.randperm(length)
    cuts = [0, *(length * (i + 1) ** 3 // world**3 for i in range(world))]
    parts = {"uneven parts": order[cuts[rank] : cuts[rank + 1]], "empty parts": order if rank == 0 else order[:0]}
    lengths = torch.tensor([length, length], dtype=torch.int32)
    end = torch.stack([end[0], torch.zeros_like(end[0])])
    keys = torch.nn.functional.normalize(k, dim=-1)
    for name, mine in parts.items():
        for normalized in (False, True):
            part = ((keys if normalized else k)[:, :, mine], v[:, :, mine], mine, torch.zeros_like(end), end)
            got = softplus_attention_decode_sharded(q, *part, power=PowerByLength(3, 2, 16), normalized_keys=normalized)
            wanted = softplus_attention_decode(q, k, v, lengths, enable_gqa=True, power=PowerByLength(3, 2, 16))
            assert not got[1].any()
            found[f"{name}, normalized {normalized}"] = relative(got[:1], wanted[:1])
    return found


def dtensor_errors() -> dict[str, float]:
    """The op with DTensors in every sharding against the op with plain tensors, with gradients."""
    world = dist.get_world_size()
    meshes = {"": init_device_mesh("cpu", (world,))}
    if world == 4:
        meshes["2x2 "] = init_device_mesh("cpu", (2, 2))
    batch, heads, length = 3, 12, 29
    found = {}
    lengths = torch.tensor([29, 17, 8], dtype=torch.int32)
    row = torch.arange(1, length + 1, dtype=torch.int32)
    ends = torch.minimum(row[None], lengths[:, None])
    mask = torch.rand(batch, 1, length, length, generator=torch.Generator().manual_seed(1)) < 0.7
    calls = {
        "causal": {"is_causal": True},
        "window": {"is_causal": True, "window": 5},
        "ranges": {"key_start": torch.zeros_like(ends), "key_end": ends},
        "mask": {"attn_mask": mask},
        "power per head": {"is_causal": True, "power": torch.linspace(1.5, 9, heads, dtype=torch.float64)},
        "power per row": {"is_causal": True, "power": torch.rand(batch, heads, length, dtype=torch.float64) * 5 + 1},
    }
    shardings = {
        "batch": [Shard(0)],
        "heads": [Shard(1)],
        "rows": [Shard(2)],
        "width": [Shard(3)],
        "none": [Replicate()],
    }
    for prefix, mesh in meshes.items():
        ways = (
            {f"{a}, {b}": [*shardings[a], *shardings[b]] for a in shardings for b in shardings} if prefix else shardings
        )
        for way, placements in ways.items():
            for name, options in calls.items():
                kv_heads = 1 if name == "window" else 6 if name == "mask" else 2
                torch.manual_seed(0)
                whole = [torch.randn(batch, h, length, WIDTH).double() for h in (heads, kv_heads, kv_heads)]
                grad = torch.randn(batch, heads, length, WIDTH, dtype=torch.float64)
                power = options.get("power")
                extra = [] if power is None else [power.clone().requires_grad_()]
                given = {**options, **({"power": extra[0]} if extra else {})}
                leaves = [x.clone().requires_grad_() for x in whole]
                one = softplus_attention(*leaves, enable_gqa=True, **given)
                wanted = [one, *torch.autograd.grad(one, [*leaves, *extra], grad)]
                plain = [x.detach().clone().requires_grad_() for x in extra]
                given = {**options, **({"power": plain[0]} if plain else {})}
                leaves = [distribute_tensor(x, mesh, placements).requires_grad_() for x in whole]
                out = softplus_attention(*leaves, enable_gqa=True, **given)
                found_all = [
                    out,
                    *torch.autograd.grad(out, [*leaves, *plain], distribute_tensor(grad, mesh, placements)),
                ]
                found_all = [getattr(x, "full_tensor", lambda x=x: x)() for x in found_all]
                errors = [relative(x, y) for x, y in zip(found_all, wanted, strict=True)]
                found[f"{prefix}{way}, {name}"] = max(errors)
    cu = torch.tensor([0, 9, 20, length], dtype=torch.int32)
    packed = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": 11, "max_seqlen_k": 11, "is_causal": True}
    torch.manual_seed(0)
    whole = [torch.randn(length, h, WIDTH).double() for h in (heads, 2, 2)]
    caches = [torch.randn(batch, h, t, WIDTH).double() for h, t in ((heads, 2), (2, length), (2, length))]
    for way, dim in (("rows", 0), ("heads", 1)):
        given = [distribute_tensor(x, meshes[""], [Shard(dim)]) for x in whole]
        out = softplus_attention_varlen(*given, **packed, enable_gqa=True)
        wanted = softplus_attention_varlen(*whole, **packed, enable_gqa=True)
        found[f"{way}, varlen"] = relative(out.full_tensor(), wanted)
    for way, dim in (("batch", 0), ("heads", 1), ("keys", 2)):
        given = [distribute_tensor(x, meshes[""], [Shard(dim)]) for x in caches]
        out = softplus_attention_decode(*given, lengths, enable_gqa=True, window=20)
        wanted = softplus_attention_decode(*caches, lengths, enable_gqa=True, window=20)
        found[f"{way}, decode"] = relative(out.full_tensor(), wanted)
    return found


def received() -> int:
    """Bytes received over this process's connections, as counted by the operating system."""
    total = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            with socket.socket(fileno=os.dup(int(name))) as one:
                info = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                total += struct.unpack_from("Q", info, 128)[0]  # tcpi_bytes_received
        except OSError:  # not a connection
            continue
    return total


def count_received() -> dict[str, list[float]]:
    """Bytes that a layer receives, forward and backward, as fractions of what the formula predicts."""
    heads, kv_heads, length = 12, 2, 3000
    found = {}

    def settled() -> int:
        dist.barrier()
        time.sleep(0.05)
        return received()

    for mode in ("gather", "ulysses"):
        record = context_parallel(length, mode=mode)
        q, k, v = (torch.randn(1, h, record.rows, WIDTH).requires_grad_() for h in (heads, kv_heads, kv_heads))
        before = settled()
        out = context_parallel_attention(q, k, v, record, window=16)
        forward = settled()
        out.sum().backward()
        predicted = bytes_of_a_layer(mode, record.processes, 1, record.rows, heads, kv_heads, WIDTH, 4)
        found[mode] = [(forward - before) / predicted["forward"], (settled() - forward) / predicted["backward"]]
    return found


def yardstick(device: str, width: int, length: int) -> dict[str, float]:
    """Error of bfloat16 over all processes against float64, as a fraction of what the bfloat16 reference allows."""
    found = {}
    torch.manual_seed(1)
    heads, world = 12, dist.get_world_size()
    q, k, v = (torch.randn(2, h, length, width).to(device, torch.bfloat16) for h in (heads, 2, 2))
    call = {"is_causal": True, "enable_gqa": True}
    clear = ~doubtful_rows(softplus_attention, q, k, **call)[..., None]
    grad = torch.randn(2, heads, length, width).to(device, torch.bfloat16) * clear
    power = torch.linspace(1.5, 15, heads, device=device)
    options = {"impl": "reference", "power": power, "grad_out": grad, **call}
    theirs = run(softplus_attention, q, k, v, **options)
    truth = run(softplus_attention, q, k, v, dtype=torch.float64, **options)
    for mode in ("gather", "ulysses"):
        record = context_parallel(length, mode=mode, device=device)
        mine = [record.shard(x, 2).requires_grad_() for x in (q, k, v)] + [power.clone().requires_grad_()]
        out = context_parallel_attention(*mine[:3], record, parameters={"power": mine[3]})
        gradients = torch.autograd.grad(out, mine, record.shard(grad, 2))
        ours = dict(zip(("dq", "dk", "dv"), gradients, strict=False)) | {"out": out.detach()}
        ours = {name: record.unshard(x, 2) for name, x in ours.items()} | {"dpower": gradients[3].clone()}
        dist.all_reduce(ours["dpower"])
        for name, exact in truth.items():
            given, wanted = (x * clear if name == "out" else x for x in (ours[name], exact))
            reference = theirs[name] * clear if name == "out" else theirs[name]
            budget = 2 * largest_error(reference, wanted) + unit_in_the_last_place(wanted, given.dtype)
            found[f"{mode} {name}, {world} processes"] = largest_error(given, wanted) / budget
    return found


def order_of_events() -> list[str]:
    """The order in which a layer starts and awaits transfers and computes each half of the heads."""
    events: list[str] = []

    def record_event(name: str, run):
        def call(*args, **kwargs):
            events.append(name)
            return run(*args, **kwargs)

        return call

    original = Attention.attend

    def attend(self, *args, **kwargs):
        events.append("attend")
        out = original(self, *args, **kwargs)
        out.register_hook(lambda _: events.append("attend back"))
        return out

    record = context_parallel(64)
    q, k, v = (torch.randn(1, h, record.rows, WIDTH).requires_grad_() for h in (4, 2, 2))
    with (
        mock.patch.object(Gathering, "begin", record_event("begin", Gathering.begin)),
        mock.patch.object(Gathering, "wait", record_event("wait", Gathering.wait)),
        mock.patch.object(Attention, "attend", attend),
    ):
        context_parallel_attention(q, k, v, record).sum().backward()
    return events


class Core(torch.nn.Module):
    def forward(self, query, key, value, start=None, end=None):
        kwargs = {"is_causal": True} if start is None else {"key_start": start, "key_end": end}
        return softplus_attention(query, key, value, enable_gqa=True, **kwargs)


def torch_plans() -> dict[str, object]:
    """A module with our op under the plans of torch's own context parallel."""
    world, rank = dist.get_world_size(), dist.get_rank()
    mesh, length = init_device_mesh("cpu", (world,)), 12 * world
    torch.manual_seed(0)
    whole = [torch.randn(2, h, length, WIDTH).double() for h in (4, 2, 2)]
    wanted = Core()(*whole)
    ends = torch.arange(1, length + 1, dtype=torch.int32).expand(2, -1).contiguous()
    found: dict[str, object] = {}
    kinds = _ContextParallel.AttentionType
    for balancer in (None, _HeadTailLoadBalancer(length, world, "cpu")):
        order = torch.arange(length) if balancer is None else balancer._generate_indices()[0].long()
        mine = _context_parallel_shard(mesh, [*whole, torch.zeros_like(ends), ends], [2] * 3 + [1] * 2, balancer)
        for kind in (kinds.FLEX, kinds.SDPA):
            core = parallelize_module(Core(), mesh, _ContextParallel(seq_dim=2, attention_type=kind))
            name = f"{kind.name}, {'in order' if balancer is None else 'balanced'}"
            if kind is kinds.FLEX and balancer is not None:
                continue  # keys come in the balancer's order, which the module would have to undo
            try:
                out = core(*mine, *()) if kind is kinds.FLEX else core(*mine[:3])
                out = out.to_local() if isinstance(out, DTensor) else out
                found[name] = relative(out, wanted[:, :, order.chunk(world)[rank]])
            except RuntimeError as error:
                found[name] = str(error)
    return found


def refusals() -> list[str]:
    found = []
    record = context_parallel(40, mode="ulysses")
    world = record.processes
    rows = torch.randn(1, world, record.rows, WIDTH)
    tries = [
        lambda: context_parallel_attention(*(torch.randn(1, world + 1, record.rows, WIDTH),) * 3, record),
        lambda: context_parallel_attention(*(rows[:, :, 1:],) * 3, record),
        lambda: context_parallel_attention(*(rows,) * 3, record, attention="softmax-alibi"),
        lambda: context_parallel(40, mode="ring"),
        lambda: context_parallel(40, cu_seqlens=torch.tensor([0, 40])),
        lambda: context_parallel(cu_seqlens=torch.tensor([0, 40, 30])),
        lambda: context_parallel(document_starts=torch.tensor([[0, 5, 5]])),
        lambda: record.shard(torch.zeros(3), 0),
    ]
    for attempt in tries:
        try:
            attempt()
            found.append("no error")
        except ValueError as error:
            found.append(str(error))
    return found


def main() -> dict[str, object]:
    torch.set_num_threads(1)
    found: dict[str, object] = {}
    world = dist.get_world_size()
    errors = {}
    for mode in ("gather", "ulysses"):
        for case in CASES:
            if mode == "ulysses" and case[1] % world:
                continue
            kinds = [("lssar", "per head"), ("lssar", "number")]
            if case is CASES[3]:
                kinds = [("lssar", "per head"), ("lssar", "per log"), ("lssar", "per row")]
                names = [name for name, spec in ATTENTIONS.items() if spec.window is None]
                kinds += [(name, "number") for name in names if (mode, name) != ("ulysses", "softmax-alibi")]
            for name, kind in kinds:
                errors[f"{mode} {name} {kind} {case}"] = compare(name, kind, mode, case)
    found["attention"] = errors
    found["yardstick"] = yardstick("cpu", width=32, length=150)
    found["decode"] = decode_errors()
    found["dtensor"] = dtensor_errors()
    found["plans"] = torch_plans()
    found["bytes"] = count_received()
    found["events"] = order_of_events()
    found["refused"] = refusals()
    return found


if __name__ == "__main__":
    dist.init_process_group("gloo")
    for size in (64, 128):
        fractions = yardstick(sys.argv[1], width=size, length=int(sys.argv[2]))
        if dist.get_rank() == 0:
            print(size, *(f"{name}: {value:.2f}" for name, value in fractions.items()), sep="\n  ")
    dist.destroy_process_group()
