"""Visibility: masks, counts of visible keys, and windows."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from softplus_attention import validation
from softplus_attention.huggingface import SoftplusGPTConfig, SoftplusGPTForCausalLM
from softplus_attention.visibility import Visibility

CPU = torch.device("cpu")
RANGE = torch.tensor([[2]])
SHAPES = [(1, 1), (1, 7), (3, 7), (7, 7)]


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("window", [None, 1, 4, 7, 20])
@pytest.mark.parametrize(("t_q", "t_k"), SHAPES)
def test_known_count_holds_for_every_row(t_q: int, t_k: int, window: int | None, is_causal: bool) -> None:
    visibility = Visibility(t_q, t_k, CPU, is_causal, window if is_causal else None)
    known = visibility.known_count()
    assert (known is not None) == (not is_causal or t_q == 1)
    if known is not None:
        assert (visibility.dense().sum(-1) == known).all()
        assert (visibility.counts() == known).all()


def test_window_beyond_int32() -> None:
    lengths = torch.tensor([7, 3])
    documents = torch.tensor([0, 3, 7], dtype=torch.int32)
    for window in (2**31 - 1, 2**31, 2**40, sys.maxsize):
        wide = Visibility(5, 7, CPU, True, window)
        assert torch.equal(wide.dense(), Visibility(5, 7, CPU, True).dense())
        assert torch.equal(wide.counts(), Visibility(5, 7, CPU, True).counts())
        pair = (
            Visibility.from_documents(documents, documents, 7, 7, is_causal=True, window=x).dense()
            for x in (window, None)
        )
        assert torch.equal(*pair)
        assert torch.equal(*(Visibility.from_cache(lengths, None, 2, 9, window=x).dense() for x in (window, None)))


@pytest.mark.parametrize("name", ["key_start", "key_end", "query_key_index", "mask"])
def test_no_known_count_with_tensors(name: str) -> None:
    value: Any = torch.ones(1, 1, 1, 5, dtype=torch.bool) if name == "mask" else RANGE
    assert Visibility(1, 5, CPU, True, **{name: value}).known_count() is None


class CountOperations(TorchDispatchMode):
    """Counts operations, without those that only return their input or a view of it."""

    count = 0

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        result = function(*arguments, **(options or {}))
        first = arguments[0] if arguments else None
        is_view = False
        if isinstance(first, torch.Tensor) and isinstance(result, torch.Tensor):
            same = result.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
            is_view = same and result.dtype == first.dtype and "_." not in str(function)  # not in place
        self.count += not is_view
        return result


def test_learned_powers_add_few_operations_to_decode(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is a kernel launch on a GPU per layer and token; values of powers are validated on a CPU only."""
    monkeypatch.setattr(validation, "readable", lambda x, validate: False)
    counts = {}
    for power in (15, "learned-log"):
        size = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
        config = SoftplusGPTConfig(**size, bos_token_id=None, eos_token_id=None, attention="lssar", power=power)
        model = SoftplusGPTForCausalLM(config).eval()
        with torch.inference_mode():
            cache = model(torch.ones(1, 4, dtype=torch.long), use_cache=True).past_key_values
            with CountOperations() as operations:
                model(torch.ones(1, 1, dtype=torch.long), past_key_values=cache, use_cache=True)
        counts[power] = operations.count
    # Softplus of the parameter, times log N, at least 1.
    assert counts["learned-log"] <= counts[15] + 3, counts


@pytest.mark.parametrize("window", [3, 2**31 - 1, sys.maxsize])
def test_rows_before_the_first_key_see_nothing(window: int) -> None:
    visibility = Visibility(6, 3, CPU, True, window)
    assert torch.equal(visibility.counts(), torch.tensor([[[0, 0, 0, 1, 2, 3]]]))
    start, end = visibility.ranges()
    assert ((start >= 0) & (start <= end) & (end <= 3)).all()


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("ranges", [False, True])
def test_counts_of_a_mask_shared_by_all_rows(batch: int, window: int | None, ranges: bool) -> None:
    torch.manual_seed(0)
    given = {"key_start": torch.randint(0, 5, (2, 5)), "key_end": torch.randint(0, 9, (2, 5))} if ranges else {}
    for heads in (1, 3):
        mask = torch.rand(batch, heads, 1, 8) < 0.6
        visibility = Visibility(5, 8, CPU, True, window, mask=mask, **given)
        assert torch.equal(visibility.counts(), visibility.dense().sum(-1, dtype=torch.int32))
    every = Visibility(5, 8, CPU, True, window, mask=torch.ones(1, 1, 1, 1, dtype=torch.bool), **given)
    assert torch.equal(every.counts(), every.dense().sum(-1, dtype=torch.int32))
