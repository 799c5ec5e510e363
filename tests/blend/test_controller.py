"""The loading controller in a blended prompt: its ratio is what is computed again, and not the recipe's."""

from __future__ import annotations

from pathlib import Path

import pytest
from drive import blended, memory_store, tokens
from small import load_small

from kvilt.blend.chunk import ChunkCache
from kvilt.blend.controller import LoadMeter
from kvilt.blend.recipe import BlendPrompt, Recipe
from kvilt.executor.protocol import Executor

QUILT = BlendPrompt.of([tokens(10, 1), tokens(40, 2), tokens(60, 3), tokens(5, 4)], [False, True, True, False])


@pytest.fixture(scope="module")
def executor(tmp_path_factory: pytest.TempPathFactory) -> Executor:
    folder: Path = tmp_path_factory.mktemp("controller")
    return load_small(folder, 64, None, "native")


def recomputed(executor: Executor, recipe: Recipe) -> int:
    with memory_store() as store:
        chunks = ChunkCache(executor, store)
        blended(executor, chunks, QUILT, recipe)[1].close()  # from here on all of it is in memory
        _, kv, blending = blended(executor, chunks, QUILT, recipe)
        kv.close()
        return blending.report().recomputed


@pytest.mark.parametrize("strategy", ["head", "query", "deviation"])
def test_what_is_in_memory_is_repaired_to_the_floor(executor: Executor, strategy: str) -> None:
    """Nothing is left to load, so nothing can be computed meanwhile."""
    assert recomputed(executor, Recipe(0.9, strategy, check_layer=0, min_gain=0.0, load_floor=0.25)) == 25
    assert recomputed(executor, Recipe(0.9, strategy, check_layer=0, min_gain=0.0)) == 90


def test_while_layers_load_more_is_repaired(executor: Executor, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int, int, float]] = []

    def half(_: LoadMeter, *given: int | float) -> float:
        asked.append(given)  # type: ignore[arg-type]
        return 0.5

    monkeypatch.setattr(LoadMeter, "ratio", half)
    assert recomputed(executor, Recipe(0.1, "deviation", check_layer=0, min_gain=0.0, load_floor=0.1)) == 50
    layers = len(executor.spec.layers)
    assert asked[-1] == (layers, layers, len(QUILT.ids) - QUILT.exact, 0.1)
