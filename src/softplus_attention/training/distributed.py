"""Multiple processes: ranks, collectives of Python objects, FSDP2 and tensor parallelism."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

PARALLEL = ("ddp", "fsdp")


def start(device: str) -> None:
    """Creates the process group if torchrun started several processes."""
    if world_size() > 1 and not dist.is_initialized():
        from accelerate import PartialState

        kwargs: dict[str, Any] = {"backend": "gloo"} if device == "cpu" else {}
        PartialState(cpu=device == "cpu", timeout=timedelta(minutes=30), **kwargs, **store_of_this_attempt())


def store_of_this_attempt() -> dict[str, Any]:
    """A separate store for each restart by torchrun.

    torchrun reuses its store, in which the new processes would find the addresses of the old ones. Skipped on several
    machines, which may count restarts differently.
    """
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    is_shared = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if attempt == "0" or not is_shared or os.environ["LOCAL_WORLD_SIZE"] != os.environ["WORLD_SIZE"]:
        return {}
    untyped: Any = dist
    store = untyped.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    return {"store": untyped.PrefixStore(f"attempt {attempt}", store), "rank": rank(), "world_size": world_size()}


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))


def everybody() -> Any:
    """The group of all processes; None for a single process."""
    return dist.group.WORLD if dist.is_initialized() and world_size() > 1 else None


def is_rank0() -> bool:
    return rank() == 0


def all_gather_objects(value: Any) -> list[Any]:
    """The values of all processes, on every process."""
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * world_size()
    dist.all_gather_object(values, value)
    return values


def broadcast_from_rank0(make: Callable[[], Any]) -> Any:
    """Runs ``make`` on rank 0 and returns its result on every process; its error is raised on all."""
    if not dist.is_initialized():
        return make()
    message: list[Any] = [None, None]  # result, error
    if is_rank0():
        try:
            message[0] = make()
        except Exception as error:
            message[1] = error
    dist.broadcast_object_list(message, src=0)
    if message[1] is not None:
        raise message[1]
    return message[0]


def run_on_rank0(make: Callable[[], Any]) -> Any:
    """Runs ``make`` on rank 0 and returns its result there, None elsewhere; its error is raised on all."""
    result: list[Any] = []
    broadcast_from_rank0(lambda: result.append(make()))
    return result[0] if result else None


def wait_for_all() -> None:
    """A barrier, so that no process reads files that rank 0 is still writing."""
    if dist.is_initialized():
        dist.barrier()


def build_mesh(device: torch.device, context: int, tensor: int) -> Any:
    """A mesh in which neighbouring ranks share heads, then sequences; "data" is all dimensions but "tensor"."""
    from torch.distributed.device_mesh import init_device_mesh

    names = ("replicas", "context", "tensor")
    mesh = init_device_mesh(device.type, (world_size() // (context * tensor), context, tensor), mesh_dim_names=names)
    mesh["replicas", "context"]._flatten("data")
    return mesh


def shard_heads(model: Any, mesh: Any) -> None:
    """Tensor parallelism by the model's own plan."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    styles: dict[str, Callable[[], Any]] = {
        "colwise": ColwiseParallel,
        "rowwise": RowwiseParallel,
        "embedding_rowwise": lambda: RowwiseParallel(input_layouts=Replicate()),
        "colwise_gather_output": lambda: ColwiseParallel(output_layouts=Replicate()),
    }
    for pattern, style in model.tp_plan.items():
        for name in matching_names(model, pattern):
            holder, _, last = name.rpartition(".")
            place = getattr(model.get_submodule(holder), last)
            if isinstance(place, nn.Module):
                parallelize_module(place, mesh, styles[style]())
            else:
                part = nn.Parameter(distribute_tensor(place.data, mesh, [Shard(0)]))
                setattr(model.get_submodule(holder), last, part)
    model.tie_weights()


def matching_names(model: nn.Module, pattern: str) -> list[str]:
    """The modules and parameters that match a pattern of the plan; "*" is a layer index."""
    names = [name for name, _ in (*model.named_modules(), *model.named_parameters())]
    return [name for name in names if re.fullmatch(re.escape(pattern).replace(r"\*", r"\d+"), name)]


def gradient_norm(parameters: list[nn.Parameter]) -> torch.Tensor:
    """The gradient norm of parameters with different placements, which torch's own function rejects."""
    # torch warns about two all-reduces, of one number each.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    norms = [torch.linalg.vector_norm(p.grad) for p in parameters if p.grad is not None]
    whole = [norm.full_tensor() if hasattr(norm, "full_tensor") else norm for norm in norms]
    return torch.linalg.vector_norm(torch.stack(whole))


def shard(model: nn.Module, mesh: Any, bf16: bool) -> None:
    """FSDP2 by torch's ``fully_shard``, layer by layer. Afterwards the parameters are DTensors.

    The model is sharded before Trainer sees it, because Trainer with FSDP silently runs DDP on a CPU.
    """
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if bf16 else None, reduce_dtype=torch.float32 if bf16 else None
    )
    for layer in model.get_submodule("model.layers").children():
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    assert isinstance(model, FSDPModule)

    @contextmanager
    def no_sync() -> Iterator[None]:
        model.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            model.set_requires_gradient_sync(True)

    # accelerate calls this during gradient accumulation.
    model.no_sync = no_sync  # type: ignore[assignment]


def is_sharded(model: nn.Module) -> bool:
    from torch.distributed.tensor import DTensor

    return any(isinstance(p, DTensor) for p in model.parameters())


def reshard(model: nn.Module) -> None:
    """Frees the outermost weights, which FSDP2 keeps gathered after a forward without a backward pass."""
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def full_state_dict(model: nn.Module) -> dict[str, torch.Tensor]:
    """The model's ``state_dict`` with full tensors on the CPU; every process must call it."""
    from torch.distributed.tensor import DTensor

    reshard(model)
    whole = {}
    for name, value in model.state_dict().items():
        value = value.full_tensor() if isinstance(value, DTensor) else value
        whole[name] = value.detach().cpu()
    return whole


def destroy_process_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
