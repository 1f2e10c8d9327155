"""How many sequences fit into memory, estimated before they run: on a CPU the system kills a process that has none."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from softplus_attention.attentions.catalog import KNOWN
from softplus_attention.attentions.composed import MAX_WEIGHTS
from softplus_attention.evaluation.loss import LOGITS

# Fraction of the free memory to use: the estimate is rough, and other processes use the machine too.
SHARE = 0.6
DENSE_COPIES = 8
# Bytes per element of a boolean mask, its temporaries, and the float32 mask that torch converts it to.
MASK = 10


class TooLongError(ValueError):
    """A single sequence of this length does not fit into memory."""


def free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    return min((found for found in (system_memory(), container_memory()) if found is not None), default=1 << 32)


def system_memory() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable")), None)


def container_memory(folder: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Bytes that the container may still allocate; None without a limit."""
    try:
        limit = (folder / "memory.max").read_text().strip()
        used = int((folder / "memory.current").read_text())
        counts = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None
    # Inactive file pages are reclaimed when memory is needed.
    return None if limit == "max" else max(0, int(limit) - used + int(counts.get("inactive_file", 0)))


def sequence_bytes(model: Any, length: int) -> int:
    """Bytes that one sequence needs, without logits and model weights."""
    config = model.config
    element = next(model.parameters()).element_size()
    width = config.hidden_size
    inner = getattr(config, "intermediate_size", None) or getattr(config, "n_inner", None) or 4 * width
    # Residual stream, norm, q, k, v (float32 copies on a CPU), output, and the feed-forward layer's input and output.
    need = length * (10 * width * max(element, 4) + 2 * inner * element)
    return need + weights_bytes(config, length, model.device)


def weights_bytes(config: Any, length: int, device: torch.device) -> int:
    """Bytes of dense attention weights or masks, 0 for attentions that never store them."""
    name, heads = config._attn_implementation, getattr(config, "num_attention_heads", 0)  # 0: a state-space model
    if name == "eager":
        return DENSE_COPIES * heads * 4 * length * length
    spec = KNOWN.get(name)
    if spec is None:
        # transformers passes a sliding window to SDPA as a dense mask.
        return MASK * length * length if getattr(config, "sliding_window", None) else 0
    is_fused = spec.is_softplus_attention or (spec.is_softmax and spec.positions != "alibi")
    max_weights = MAX_WEIGHTS.get(device.type, MAX_WEIGHTS["cuda"])
    # Composed attentions compute the weights of a block of rows at a time.
    return 0 if is_fused else DENSE_COPIES * 4 * min(max_weights, heads * length * length)


def sequences_at_once(model: Any, length: int, max_tokens: int = 16384, group: Any = None) -> int:
    """Batch size of at least 1 and about ``max_tokens`` tokens at most; raises TooLongError if not even 1 fits.

    With a ``group`` of processes that share each sequence, the process with the least free memory decides.
    """
    processes = 1 if group is None else dist.get_world_size(group)
    rows = -(-length // processes)
    free = free_bytes(model.device)
    if model.device.type == "cpu":
        free //= int(os.environ.get("LOCAL_WORLD_SIZE", processes))  # processes of one machine share its memory
    need = sequence_bytes(model, rows)
    if processes > 1:  # gathered keys and values of one layer, before and after reordering
        need += 4 * length * model.config.hidden_size * next(model.parameters()).element_size()
    logits = 3 * LOGITS * 4 if model.device.type == "cuda" else 3 * 4 * min(LOGITS, rows * model.config.vocab_size)
    found = [(SHARE * (free - logits) / need, free)]
    if processes > 1:
        others: list[Any] = [None] * processes
        dist.all_gather_object(others, found[0], group=group)
        found = others
    fitting, free = min(found)
    if fitting < 1:
        where = "" if processes == 1 else f" on each of {processes} processes"
        raise TooLongError(
            f"one sequence of {length} tokens needs about {gigabytes(need + logits)}{where}, and {gigabytes(free)} are "
            "free"
        )
    return max(1, min(int(fitting), max_tokens // length))


def gigabytes(size: float) -> str:
    return f"{size / 1e9:.1f} GB"


def is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and "allocate memory" in str(error)


def in_batches(rows: Tensor, at_once: int, run: Callable[[Tensor], Tensor], length: int | None = None) -> Tensor:
    """``run`` on batches of ``at_once`` rows; a batch that runs out of memory is halved and tried again."""
    found: list[Tensor] = []
    done = 0
    while done < len(rows):
        try:
            found.append(run(rows[done : done + at_once]).cpu())
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            if at_once == 1:
                tokens = rows.shape[1] if length is None else length
                raise TooLongError(f"one sequence of {tokens} tokens does not fit into memory") from error
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            at_once //= 2
            continue
        done += at_once
    return torch.cat(found)
