"""A small model behind an engine, as most tests here want it; files with other wants define their own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from small import PAGES, load_small

from kvilt.config import EngineConfig
from kvilt.engine.engine import Engine
from kvilt.executor.protocol import Executor


@pytest.fixture(scope="module", params=["full", "window"])
def executor(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Executor:
    window = 40 if request.param == "window" else None
    return load_small(tmp_path_factory.mktemp("small"), PAGES, window, "native")


@pytest.fixture
def nothing_left(executor: Executor) -> Iterator[None]:
    """No page is in use when a test ends."""
    executor.prefixes.clear()
    yield
    assert executor.pool.usage().used == 0


@pytest.fixture
def engine(executor: Executor) -> Engine:
    return Engine(executor, EngineConfig(step_tokens=32, max_rows=8))
