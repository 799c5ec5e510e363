"""Tests that need a CUDA device: `bench/on_gpu.sh` runs them, and a machine without one leaves them out."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from gpu_models import Models, write_model

from kvilt.config import RunConfig
from kvilt.executor.executor import ModelExecutor
from kvilt.executor.load import load_executor


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.gpu)


@pytest.fixture(scope="session", params=[None, 200], ids=["full", "window"])
def models(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Models]:
    folder = write_model(tmp_path_factory.mktemp("gpu"), sliding_window=request.param)

    def load(backend: str, device: str) -> ModelExecutor:
        return load_executor(folder, RunConfig(device=device, backend=backend, kv_memory=1 << 26))

    made = Models(folder, load("reference", "cpu"), load("triton/float32", "cuda"), load("triton", "cuda"))
    yield made
    for executor in (made.reference, made.exact, made.usual):
        executor.close()
