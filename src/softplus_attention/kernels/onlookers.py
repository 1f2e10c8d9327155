"""Whether anything beside the caller has to see an op's call: a compiler, tracer, mode, profiler or tensor subclass.

Such a call goes through PyTorch's dispatcher; every other is spared the time that takes.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import profiler


def traced(*tensors: Tensor) -> bool:
    """Whether more than this call wants to know of the op: a compiler, tracer, mode, profiler, or a tensor's class."""
    return (
        torch.compiler.is_compiling()
        or profiler._is_profiler_enabled
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._get_tracing_state() is not None
        or not all(type(x) is Tensor or type(x) is torch.nn.Parameter for x in tensors)
    )


def traced_backward(grad: Tensor) -> bool:
    """The same of a backward, which has lives of its own: graphs of gradients, and gradients in batches."""
    return (
        torch.is_grad_enabled()
        or torch._C._are_functorch_transforms_active()
        or torch._C._functorch.is_legacy_batchedtensor(grad)
        or traced(grad)
    )
