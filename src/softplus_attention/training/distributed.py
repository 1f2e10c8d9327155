"""Several processes: ranks, collectives of Python objects, FSDP2 and tensor parallel."""

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
    """Creates the process group where torchrun started several processes."""
    if world_size() > 1 and not dist.is_initialized():
        from accelerate import PartialState

        words: dict[str, Any] = {"backend": "gloo"} if device == "cpu" else {}
        PartialState(cpu=device == "cpu", timeout=timedelta(minutes=30), **words, **store_of_this_attempt())


def store_of_this_attempt() -> dict[str, Any]:
    """torchrun keeps its store when it starts the processes of a machine again, and in it the addresses of those that
    are gone: they would be found there. Several machines may count their attempts differently."""
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
    """The group of all processes; None for one alone."""
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
    told: list[Any] = [None, None]
    if is_rank0():
        try:
            told[0] = make()
        except Exception as error:
            told[1] = error
    dist.broadcast_object_list(told, src=0)
    if told[1] is not None:
        raise told[1]
    return told[0]


def run_on_rank0(make: Callable[[], Any]) -> Any:
    """Runs ``make`` on rank 0 and returns its result there, None elsewhere; its error is raised on all."""
    made: list[Any] = []
    broadcast_from_rank0(lambda: made.append(make()))
    return made[0] if made else None


def wait_for_all() -> None:
    """A barrier: no process reads what rank 0 has not finished writing."""
    if dist.is_initialized():
        dist.barrier()


def build_mesh(device: torch.device, context: int, tensor: int) -> Any:
    """Processes beside each other share the heads, then the sequence; "data" is all that is not "tensor"."""
    from torch.distributed.device_mesh import init_device_mesh

    names = ("replicas", "context", "tensor")
    mesh = init_device_mesh(device.type, (world_size() // (context * tensor), context, tensor), mesh_dim_names=names)
    mesh["replicas", "context"]._flatten("data")
    return mesh


def divide_heads(model: Any, mesh: Any) -> None:
    """Tensor parallel: each module by the model's own plan."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    styles: dict[str, Callable[[], Any]] = {
        "colwise": ColwiseParallel,
        "rowwise": RowwiseParallel,
        "embedding_rowwise": lambda: RowwiseParallel(input_layouts=Replicate()),
        "colwise_gather_output": lambda: ColwiseParallel(output_layouts=Replicate()),
    }
    for pattern, style in model.tp_plan.items():
        for name in matching(model, pattern):
            holder, _, last = name.rpartition(".")
            place = getattr(model.get_submodule(holder), last)
            if isinstance(place, nn.Module):
                parallelize_module(place, mesh, styles[style]())
            else:
                part = nn.Parameter(distribute_tensor(place.data, mesh, [Shard(0)]))
                setattr(model.get_submodule(holder), last, part)
    model.tie_weights()


def matching(model: nn.Module, pattern: str) -> list[str]:
    """The modules and parameters that a line of a plan means; "*" is the number of a layer."""
    names = [name for name, _ in (*model.named_modules(), *model.named_parameters())]
    return [name for name in names if re.fullmatch(re.escape(pattern).replace(r"\*", r"\d+"), name)]


def norm_of_gradients(parameters: list[nn.Parameter]) -> torch.Tensor:
    """Of parameters that are divided in different ways, which torch's own function refuses."""
    # It warns of two all-reduces of one number each.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    norms = [torch.linalg.vector_norm(p.grad) for p in parameters if p.grad is not None]
    whole = [norm.full_tensor() if hasattr(norm, "full_tensor") else norm for norm in norms]
    return torch.linalg.vector_norm(torch.stack(whole))


def shard(model: nn.Module, mesh: Any, bf16: bool) -> None:
    """FSDP2 by torch's ``fully_shard``, each layer its own unit. The parameters are DTensors from here on.

    Trainer and accelerate asked for FSDP run DDP on a CPU and say nothing, so the model is sharded before they see it.
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

    # What accelerate looks for while gradients accumulate.
    model.no_sync = no_sync  # type: ignore[assignment]


def is_sharded(model: nn.Module) -> bool:
    from torch.distributed.tensor import DTensor

    return any(isinstance(p, DTensor) for p in model.parameters())


def reshard(model: nn.Module) -> None:
    """After a forward pass without a backward FSDP2 keeps the outermost weights gathered."""
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
