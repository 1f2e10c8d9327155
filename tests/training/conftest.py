"""Shared by the training tests: prepared data and an uninterrupted run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from training_runs import TINY, Run, running, text_folder


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return text_folder(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="session")
def uninterrupted(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return Run(tmp_path_factory.mktemp("runs") / "whole", {**TINY, "data": data}).finish()


@pytest.fixture
def run(data: Path, tmp_path: Path) -> Iterator[Run]:
    with running(tmp_path / "run", **TINY, data=data) as run:
        yield run
