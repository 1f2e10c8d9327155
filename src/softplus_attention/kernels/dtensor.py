"""DTensors: each process computes its batch entries, heads or rows, and torch redistributes the tensors for it.

Any implementation runs on the local shards. Rows keep their key ranges in the whole sequence, so N_i is unchanged.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from softplus_attention.power import Power, broadcast_power
from softplus_attention.visibility import Visibility

CONTEXT_PARALLEL = "torch.distributed.tensor.experimental._context_parallel._attention"


def is_dtensor(x: object) -> bool:
    return type(x) is not Tensor and hasattr(x, "device_mesh") and hasattr(x, "placements")


def attend_dtensors(
    attend: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, visibility: Visibility, power: Power
) -> Tensor:
    """``attend`` if q, k or v is a DTensor; plain tensors must be the same on every process.

    Each mesh dimension follows q's sharding: by batch or heads, with keys and values sharded in the same way; by rows,
    with keys and values gathered on every process and their gradients summed. Any other sharding is replicated.
    """
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    given: Any = next(x for x in (q, k, v) if is_dtensor(x))
    mesh = given.device_mesh
    replicated = [Replicate()] * mesh.ndim

    def as_dtensor(x: Any) -> Any:
        if not is_dtensor(x):
            return DTensor.from_local(x, mesh, replicated, run_check=False)
        if x.device_mesh != mesh:
            raise ValueError(f"softplus_attention: DTensors must be on one mesh, got {mesh} and {x.device_mesh}")
        return x

    wanted: list[Any] = []
    for size, placement in zip(mesh.shape, as_dtensor(q).placements, strict=True):
        dim = placement.dim if isinstance(placement, Shard) else None
        remainders = [x.shape[1] % (size * shard_count(wanted, mesh, 1)) for x in (q, k)]
        wanted.append(placement if dim in (0, 2) or (dim == 1 and not any(remainders)) else Replicate())
    if any(getattr(one, "dim", None) == 2 for one in wanted):
        refuse_load_balancing()
    by_rows = [isinstance(one, Shard) and one.dim == 2 for one in wanted]
    keys = [Replicate() if rows else one for one, rows in zip(wanted, by_rows, strict=True)]
    # Keys that all processes read have a partial gradient on each.
    key_gradients = [Partial() if rows else one for one, rows in zip(wanted, by_rows, strict=True)]
    shape, offset = compute_local_shape_and_global_offset(q.shape, mesh, wanted)
    local = [as_dtensor(q).redistribute(mesh, wanted).to_local()]
    for x in (k, v):
        local.append(as_dtensor(x).redistribute(mesh, keys).to_local(grad_placements=key_gradients))
    if isinstance(power, Tensor):
        power_gradients = [one if isinstance(one, Replicate) else Partial() for one in wanted]
        given = as_dtensor(power).redistribute(mesh, replicated).to_local(grad_placements=power_gradients)
        power = slice_shard(broadcast_power(given), shape, offset)
    seen = shard_visibility(visibility, shape, offset)
    keys_seen = (x[:, :, : seen.t_k] for x in local[1:])
    out = attend(local[0], *keys_seen, seen, power).contiguous()
    like = torch.empty(*q.shape[:3], v.shape[3], device="meta")
    return DTensor.from_local(out, mesh, wanted, run_check=False, shape=like.shape, stride=like.stride())


def refuse_load_balancing() -> None:
    """torch's context_parallel with a load balancer reorders the tokens, which the DTensors do not record."""
    module: Any = sys.modules.get(CONTEXT_PARALLEL)
    options = getattr(module, "_cp_options", None)
    mode = getattr(getattr(module, "_dispatch_mode", None), "name", "")
    if mode == "MODULE_WRAPPER" and getattr(options, "enable_load_balance", False):
        raise RuntimeError(
            "softplus_attention: torch's context parallel has put the tokens into another order; shard them with "
            "load_balancer=None, or use softplus_attention.distributed, which balances the load itself"
        )


def shard_count(placements: Sequence[Any], mesh: Any, dim: int) -> int:
    """The number of shards of ``dim`` by the placements on the first mesh dimensions."""
    return math.prod(n for n, one in zip(mesh.shape, placements, strict=False) if getattr(one, "dim", None) == dim)


def slice_shard(x: Tensor, shape: Sequence[int], offset: Sequence[int]) -> Tensor:
    """The local part of a tensor that broadcasts to (B, H, T_q, ...)."""
    first = 3 - x.dim() if x.dim() < 3 else 0
    for dim in range(min(x.dim(), 3 - first)):
        size, begin = shape[dim + first], offset[dim + first]
        if x.shape[dim] > 1:
            x = x.narrow(dim, begin, size)
    return x


def shard_visibility(visibility: Visibility, shape: Sequence[int], offset: Sequence[int]) -> Visibility:
    """What the rows of this process see."""
    seen = visibility
    if shape[2] != visibility.t_q:
        seen = visibility.rows(offset[2], offset[2] + shape[2])
    changes: dict[str, Any] = {}
    for name in ("key_start", "key_end", "query_key_index", "cache_seqlens", "cache_starts"):
        x = getattr(seen, name)
        if isinstance(x, Tensor) and x.shape[0] > 1:
            changes[name] = x[offset[0] : offset[0] + shape[0]]
    if seen.mask is not None:
        rows_cut = (shape[0], shape[1], seen.mask.shape[2])
        changes["mask"] = slice_shard(seen.mask, rows_cut, (offset[0], offset[1], 0))
    return replace(seen, **changes) if changes else seen
