"""Attention over a sequence that lies on several processes, each test in real processes over gloo."""

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
def test_equal_to_one_process(processes: int) -> None:
    errors = run(processes)["attention"]
    assert len(errors) >= 40
    assert {name: error for name, error in errors.items() if not error < 1e-12} == {}


@pytest.mark.parametrize("processes", PROCESSES)
def test_decode_over_a_sharded_cache(processes: int) -> None:
    errors = run(processes)["decode"]
    assert len(errors) == 19
    assert {name: error for name, error in errors.items() if not error < 1e-12} == {}


@pytest.mark.parametrize("processes", PROCESSES)
def test_dtensors_in_every_sharding(processes: int) -> None:
    errors = run(processes)["dtensor"]
    assert len(errors) == (185 if processes == 4 else 35)
    assert {name: error for name, error in errors.items() if not error < 1e-12} == {}


@pytest.mark.parametrize("processes", PROCESSES)
def test_bytes_are_those_of_the_formula(processes: int) -> None:
    """By the kernel's count of each connection. gloo adds up by an all-reduce, which brings twice what NCCL's does."""
    found = run(processes)["bytes"]
    assert found["gather"] == pytest.approx([1, 2], abs=0.01)
    assert found["ulysses"] == pytest.approx([1, 1], abs=0.01)


def test_transfers_behind_attention() -> None:
    """Of the second half of the heads forward, of the last one backward."""
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
    """Exact, or refused: a load balancer leaves no trace in the tensors."""
    found = run(processes)["plans"]
    assert found.pop("SDPA, balanced").startswith("softplus_attention: torch's context parallel has put the tokens")
    assert len(found) == 2
    assert max(found.values()) < 1e-12


def test_what_cannot_be_shared_is_refused() -> None:
    refused = run(2)["refused"]
    expected = [
        "divisible by the 2 processes",
        "rows that the record gives",
        "slopes of other heads",
        "one of",
        "exactly one of",
    ]
    expected += ["rising from 0", "its document", "of 40 tokens"]
    for said, words in zip(refused, expected, strict=True):
        assert words in said


LENGTHS = {
    "one document": [131_072],
    "short documents": [1, 700, 2_000, 150, 9_000, 400] * 10,
    "long documents": [16_000, 3_000, 60_000, 9_000, 30_000],
}


@pytest.mark.parametrize("processes", [2, 8, 64])
@pytest.mark.parametrize("name", LENGTHS)
def test_work_is_dealt_evenly(name: str, processes: int) -> None:
    lengths = torch.tensor(LENGTHS[name])
    starts = torch.repeat_interleave(lengths.cumsum(0) - lengths, lengths)[None]
    table = deal(starts, processes)
    assert table.flatten()[table.flatten() >= 0].sort().values.equal(torch.arange(starts.shape[1]))
    work = torch.where(table >= 0, table + 1 - starts[0, table.clamp(min=0)], 0).sum(1)
    assert work.max() <= 1.03 * work.float().mean()
    assert table.shape[1] <= 1.1 * starts.shape[1] / processes + 128
    rising = torch.where(table >= 0, table, starts.shape[1])
    assert (rising.diff(dim=1) >= 0).all(), "rows in order, so that the kernels skip what no row of a block sees"


def test_without_processes_it_says_torchrun() -> None:
    from softplus_attention.distributed import context_parallel

    assert not dist.is_initialized()
    with pytest.raises(RuntimeError, match="torchrun"):
        context_parallel(64)
