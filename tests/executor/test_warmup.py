"""Steps before the first request: every size once, on caches of their own, and nothing of it stays or counts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import write_tiny

from kvilt import LLM
from kvilt.batch import Batch
from kvilt.config import EngineConfig, RunConfig
from kvilt.executor.executor import ModelExecutor
from kvilt.executor.load import load_executor
from kvilt.executor.warmup import prompt_steps, warm_up
from kvilt.text.tokenizer import from_gguf


@pytest.fixture(params=[None, 9], ids=["full", "window"])
def executor(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModelExecutor]:
    folder = write_tiny(tmp_path_factory.mktemp("warmup"), sliding_window=request.param)
    made = load_executor(folder, RunConfig(kv_memory=1 << 20, backend="native", threads=1))
    yield made
    made.close()


def spied(executor: ModelExecutor, monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Tokens of the rows of each step from now on."""
    seen: list[list[int]] = []
    forward = executor.forward

    def spy(batch: Batch) -> object:
        seen.append([stop - start for start, stop in zip(batch.starts, batch.starts[1:], strict=False)])
        return forward(batch)

    monkeypatch.setattr(executor, "forward", spy)
    return seen


def test_every_size_runs_once_and_nothing_stays(executor: ModelExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    seen, told = spied(executor, monkeypatch), []
    free, counted = executor.pool.free_pages(), executor.metrics.snapshot()
    warm_up(executor, 40, 6, lambda done, total: told.append((done, total)))
    assert [1] * 6 in seen
    assert {sum(lengths) for lengths in seen} >= {16, 24, 32}
    assert {sum(step) for step in seen if set(step) == {1}} >= {size.rows for size in executor.decode_sizes(6)}
    assert told == [(i + 1, len(told)) for i in range(len(told))]
    assert executor.pool.free_pages() == free
    assert executor.metrics.snapshot() == counted


def test_steps_that_the_pool_has_no_room_for_are_left_out(
    executor: ModelExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, free = spied(executor, monkeypatch), executor.pool.free_pages()
    with executor.create_kv_cache(min(free) - 1) as kv:
        kv.reserve(1)
        warm_up(executor, 4096, 64)
    assert all(len(lengths) == 1 for lengths in seen)
    assert executor.pool.free_pages() == free


def test_a_cpu_has_nothing_to_prepare(executor: ModelExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = spied(executor, monkeypatch)
    executor.warm_up(64, 8)
    assert not seen


@settings(max_examples=examples(50), deadline=None)
@given(st.integers(1, 9000), st.integers(1, 300), st.integers(1, 9000))
def test_no_step_is_larger_than_asked(step_tokens: int, max_rows: int, room: int) -> None:
    for lengths in prompt_steps(step_tokens, max_rows, room):
        assert sum(lengths) <= step_tokens
        assert len(lengths) <= max_rows
        assert all(1 <= length <= room for length in lengths)


def test_a_model_asks_for_the_sizes_of_its_steps(
    executor: ModelExecutor, smollm2_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[object, ...]] = []
    monkeypatch.setattr(executor, "warm_up", lambda *given: asked.append(given))
    LLM(executor, from_gguf(smollm2_path), config=EngineConfig(step_tokens=100, max_rows=7)).warm_up()
    assert asked == [(100, 7, None)]
