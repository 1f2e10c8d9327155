"""Tests inside the serving environment (``make test-serving``); elsewhere they are not collected."""

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
    """A folder with a model as we train them: local layers with RoPE, global ones without, learned factors, GQA."""
    from serving_cases import save_gpt

    return save_gpt(tmp_path_factory.mktemp("recipe"), power="learned-log", window=32, global_every=2)


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The batches that our layers are given from here on."""
    from softplus_attention.serving.vllm.backend import PagedBatchBuilder

    build, seen = PagedBatchBuilder.build, []

    def build_and_note(self: Any, *options: Any, **named: Any) -> Any:
        batch = build(self, *options, **named)
        tensors = {name: value.clone() for name, value in vars(batch).items() if isinstance(value, torch.Tensor)}
        seen.append(dataclasses.replace(batch, **tensors))  # the engine writes the next batch into the same memory
        return batch

    monkeypatch.setattr(PagedBatchBuilder, "build", build_and_note)
    return seen
