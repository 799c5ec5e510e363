"""The same small model twice: in one process, and shared by two."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tiny import write_tiny

from kvilt.config import RunConfig
from kvilt.executor.executor import ModelExecutor
from kvilt.executor.load import load_executor


def load_ranks(folder: Path, ranks: int, **fields: object) -> ModelExecutor:
    """A small model in float32, shared by so many processes of one thread."""
    usual = {"kv_memory": 1 << 22, "threads": 1, "device": "cpu", "kv_dtype": "float32"}
    return load_executor(folder, RunConfig(**{**usual, "tensor_parallel": ranks, **fields}))  # type: ignore[arg-type]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("ranks"), max_position_embeddings=640)


@pytest.fixture(scope="module")
def one(folder: Path) -> Iterator[ModelExecutor]:
    made = load_ranks(folder, 1)
    yield made
    made.close()


@pytest.fixture(scope="module")
def two(folder: Path) -> Iterator[ModelExecutor]:
    made = load_ranks(folder, 2)
    yield made
    made.close()
