"""Run by torchrun: attention over a sharded sequence on gloo against one process; prints one JSON line of errors."""

import json

import torch
import torch.distributed as dist

from softplus_attention import softplus_attention, softplus_attention_decode
from softplus_attention.attentions.catalog import attention
from softplus_attention.distributed import (
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
]
ATTENTIONS = ["lssar", "lssa", "softmax", "softmax-alibi", "ssmax"]
RECEIVED = 0


def relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    error = (found - wanted).abs().max() / wanted.abs().max().clamp(min=1e-30)
    dist.all_reduce(error, dist.ReduceOp.MAX)
    return float(error)


def parameters_of(name: str, kind: str, heads: int, length: int) -> dict[str, torch.Tensor]:
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
    learned = parameters_of(name, kind, heads, length)
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
    elif length % 2:
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
    # All keys on the first process: the others have none.
    mine = slice(None) if dist.get_rank() == 0 else slice(0, 0)
    got = softplus_attention_decode_sharded(
        q, k[:, :, mine], v[:, :, mine], torch.arange(length)[mine], torch.zeros_like(end), end
    )
    seqlens = torch.full((2,), length, dtype=torch.int32)
    found["empty parts"] = relative(got, softplus_attention_decode(q, k, v, seqlens, enable_gqa=True))
    return found


def dtensor_errors() -> dict[str, float]:
    """The op called with DTensors, in every sharding, against the op itself; with gradients."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

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
    return found


def count_received() -> dict[str, list[float]]:
    """Bytes that the collectives brought in from other processes, against the formula."""
    global RECEIVED
    world = dist.get_world_size()
    import softplus_attention.distributed as module

    gather, scatter, exchange = module.all_gather, module.reduce_scatter, module.all_to_all

    def counted(collective, share):
        def run(x, group):
            global RECEIVED
            out = collective(x, group)
            RECEIVED += share(x, out)
            return out

        return run

    size = lambda x: x.numel() * x.element_size()  # noqa: E731
    module.all_gather = counted(gather, lambda x, out: size(out) * (world - 1) // world)
    module.reduce_scatter = counted(scatter, lambda x, out: max(4, x.element_size()) * out.numel() * (world - 1))
    module.all_to_all = counted(exchange, lambda x, out: size(out) * (world - 1) // world)
    found = {}
    heads, kv_heads, length = 12, 2, 96
    for mode in ("gather", "ulysses"):
        record = context_parallel(length, mode=mode)
        q, k, v = (torch.randn(1, h, record.rows, WIDTH).requires_grad_() for h in (heads, kv_heads, kv_heads))
        RECEIVED = 0
        out = context_parallel_attention(q, k, v, record)
        forward, RECEIVED = RECEIVED, 0
        out.sum().backward()
        said = bytes_of_a_layer(mode, world, 1, record.rows, heads, kv_heads, WIDTH, 4)
        found[mode] = [forward / said["forward"], RECEIVED / said["backward"]]
    module.all_gather, module.reduce_scatter, module.all_to_all = gather, scatter, exchange
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
            found.append("nothing was refused")
        except ValueError as error:
            found.append(str(error))
    return found


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found: dict[str, object] = {"attention": {}}
    world = dist.get_world_size()
    for mode in ("gather", "ulysses"):
        for case in CASES:
            if mode == "ulysses" and case[1] % world:
                continue
            kinds = [("lssar", "per head"), ("lssar", "number")]
            if case is CASES[3]:
                kinds = [("lssar", "per head"), ("lssar", "per log"), ("lssar", "per row")]
                kinds += [(name, "number") for name in ATTENTIONS if (mode, name) != ("ulysses", "softmax-alibi")]
            for name, kind in kinds:
                found["attention"][f"{mode} {name} {kind} {case}"] = compare(name, kind, mode, case)
    found["decode"] = decode_errors()
    found["dtensor"] = dtensor_errors()
    found["bytes"] = count_received()
    found["refused"] = refusals()
    if dist.get_rank() == 0:
        print(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
