"""Tests for the serving environment (``make test-serving``); not collected elsewhere."""

from __future__ import annotations

import dataclasses
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

collect_ignore_glob = [] if find_spec("vllm") else ["test_*.py"]


@pytest.fixture(scope="session")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved model like those of the study: local layers with RoPE, global layers without, learned powers, GQA."""
    from serving_cases import save_gpt

    return save_gpt(tmp_path_factory.mktemp("recipe"), power="learned-log", window=32, global_every=2)


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The batches that our layers get from now on."""
    from softplus_attention.serving.vllm.backend import PagedBatchBuilder

    build, seen = PagedBatchBuilder.build, []

    def build_and_record(self: Any, *args: Any, **kwargs: Any) -> Any:
        batch = build(self, *args, **kwargs)
        tensors = {name: value.clone() for name, value in vars(batch).items() if isinstance(value, torch.Tensor)}
        seen.append(dataclasses.replace(batch, **tensors))  # the engine reuses the memory
        return batch

    monkeypatch.setattr(PagedBatchBuilder, "build", build_and_record)
    return seen
