"""Each family's random model, in transformers and in kvilt."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from backends import CPU_BACKENDS
from families import FAMILIES, SLOW, VARIANTS, Pair, random_model, write_checkpoint
from model_results import Shows

from kvilt.config import RunConfig
from kvilt.executor.load import load_executor

PAIRS = [
    pytest.param(
        (family, backend),
        marks=[pytest.mark.slow] if family in SLOW or (family in VARIANTS and backend != "native") else [],
        id=f"{family}-{backend}",
    )
    for family in sorted(FAMILIES)
    for backend in CPU_BACKENDS
]


@pytest.fixture(scope="module", params=PAIRS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    family, backend = request.param
    model = random_model(family)
    folder: Path = write_checkpoint(model, tmp_path_factory.mktemp(family))
    executor = load_executor(folder, RunConfig(kv_memory=1 << 24, backend=backend, threads=1, kv_dtype="float32"))
    yield Pair(model, executor, f"{family} {backend}")
    executor.close()


@pytest.fixture(autouse=True)
def shown(request: pytest.FixtureRequest, shows: Shows) -> None:
    """A test of a pair shows parity."""
    if "pair" in request.fixturenames:
        pair = request.getfixturevalue("pair")
        if isinstance(pair, Pair):  # and none of a test's own
            shows("parity", type(pair.oracle).__name__, pair.name)
