"""Attention over a sequence that is sharded over several processes, in real processes over gloo."""

from functools import cache

import pytest
import torch
import torch.distributed as dist
from several import together

from softplus_attention.distributed import deal


@cache
def run(processes: int) -> dict:
    return together("sharded_attention", processes)


PROCESSES = [2, 3, pytest.param(4, marks=pytest.mark.slow)]


@pytest.mark.parametrize("processes", PROCESSES)
@pytest.mark.parametrize("part", ["attention", "decode", "dtensor"])
def test_matches_one_process(part: str, processes: int) -> None:
    errors = run(processes)[part]
    count = {"attention": 40, "decode": 19, "dtensor": 185 if processes == 4 else 35}[part]
    assert len(errors) == count or (part == "attention" and len(errors) > count)  # the catalogue may grow
    assert {name: error for name, error in errors.items() if not error < 1e-12} == {}


@pytest.mark.parametrize("processes", PROCESSES)
def test_received_bytes_match_the_formula(processes: int) -> None:
    """Counted by the operating system per connection. The all-reduce of gloo receives twice as much as NCCL's."""
    found = run(processes)["bytes"]
    assert found["gather"] == pytest.approx([1, 2], abs=0.01)
    assert found["ulysses"] == pytest.approx([1, 1], abs=0.01)


def test_transfers_overlap_attention() -> None:
    """Forward, the transfer of the second half of the heads overlaps; backward, that of the half computed first."""
    events = run(2)["events"]
    assert events[:6] == ["begin", "begin", "wait", "attend", "wait", "attend"]
    assert events[6:] == ["attend back", "begin", "attend back", "begin", "wait", "wait"]


@pytest.mark.parametrize("processes", PROCESSES)
def test_bfloat16_is_within_the_yardstick(processes: int) -> None:
    parts = run(processes)["yardstick"]
    assert len(parts) == 10
    assert {name: part for name, part in parts.items() if not part <= 1} == {}


@pytest.mark.parametrize("processes", PROCESSES)
def test_plans_of_torch(processes: int) -> None:
    """Exact, or an error: the order of a load balancer is not visible in the tensors."""
    found = run(processes)["plans"]
    assert found.pop("SDPA, balanced").startswith("softplus_attention: torch's context parallel has put the tokens")
    assert len(found) == 2
    assert max(found.values()) < 1e-12


def test_invalid_calls_raise() -> None:
    errors = run(2)["refused"]
    expected = ["divisible by the 2 processes", "rows that the record gives", "slopes of other heads", "one of"]
    expected += ["exactly one of", "rising from 0", "its document", "of 40 tokens"]
    for error, text in zip(errors, expected, strict=True):
        assert text in error


LENGTHS = {
    "one document": [131_072],
    "short documents": [1, 700, 2_000, 150, 9_000, 400] * 10,
    "long documents": [16_000, 3_000, 60_000, 9_000, 30_000],
}


@pytest.mark.parametrize("processes", [2, 8, 64])
@pytest.mark.parametrize("name", LENGTHS)
def test_work_is_balanced(name: str, processes: int) -> None:
    lengths = torch.tensor(LENGTHS[name])
    starts = torch.repeat_interleave(lengths.cumsum(0) - lengths, lengths)[None]
    table = deal(starts, processes)
    assert table.flatten()[table.flatten() >= 0].sort().values.equal(torch.arange(starts.shape[1]))
    work = torch.where(table >= 0, table + 1 - starts[0, table.clamp(min=0)], 0).sum(1)
    assert work.max() <= 1.03 * work.float().mean()
    assert table.shape[1] <= 1.1 * starts.shape[1] / processes + 128
    rising = torch.where(table >= 0, table, starts.shape[1])
    assert (rising.diff(dim=1) >= 0).all(), (
        "rows must be in order, so that kernels can skip keys that no row of a block sees"
    )


def test_without_processes_names_torchrun() -> None:
    from softplus_attention.distributed import context_parallel

    assert not dist.is_initialized()
    with pytest.raises(RuntimeError, match="torchrun"):
        context_parallel(64)
