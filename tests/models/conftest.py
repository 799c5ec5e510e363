"""Each family's random model, in transformers and in kvilt."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from families import FAMILIES, Pair, random_model, write_checkpoint

from kvilt.config import RunConfig
from kvilt.executor.load import load_executor


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    model = random_model(request.param)
    folder: Path = write_checkpoint(model, tmp_path_factory.mktemp(request.param))
    executor = load_executor(folder, RunConfig(kv_memory=1 << 24))
    yield Pair(model, executor)
    executor.close()
