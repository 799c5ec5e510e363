"""Pages that leave the device for host memory, evicted or preempted, and come back: no token changes."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from gpu_models import VOCAB, write_model
from small import Ask, run, start

from kvilt.config import EngineConfig, RunConfig
from kvilt.engine.counters import RESTORED
from kvilt.engine.engine import Engine
from kvilt.executor.executor import ModelExecutor
from kvilt.executor.load import load_executor
from kvilt.sampling.params import SamplingParams
from kvilt.store.store import Store
from kvilt.store.tier import Budget


@pytest.fixture(scope="module")
def cramped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModelExecutor]:
    """A pool of about 30 pages of 32 tokens."""
    folder: Path = write_model(tmp_path_factory.mktemp("swap"))
    page_bytes = 3 * 2 * 32 * 2 * 32 * 4
    made = load_executor(folder, RunConfig(device="cuda", backend="triton/float32", kv_memory=30 * page_bytes))
    yield made
    made.close()


def answers(executor: ModelExecutor, store: Store | None, rounds: int) -> tuple[list[list[list[int]]], float]:
    """What ten prompts of up to ten pages say, again and again, and how many tokens the store gave back."""
    dice = random.Random(4)
    prompts = [tuple(dice.randrange(VOCAB) for _ in range(dice.randrange(150, 320))) for _ in range(10)]
    executor.prefixes.clear()
    engine = Engine(executor, EngineConfig(), store=store)
    said = []
    for _ in range(rounds):
        ears = [start(engine, Ask(one, SamplingParams(max_tokens=40, temperature=0.0))) for one in prompts]
        run(engine, lambda ears=ears: all(ear.over for ear in ears))  # type: ignore[misc]  # some wait for the store
        assert all(ear.reasons == ["length"] for ear in ears), [ear.error for ear in ears]
        said += [ear.tokens for ear in ears]
    series = engine.metrics.snapshot()[RESTORED.name]["series"]
    return said, sum(one["value"] for one in series)


def test_swapped_pages_change_no_token(cramped: ModelExecutor) -> None:
    expected, none = answers(cramped, None, 2)
    with Store(Budget(1 << 28)) as store:
        found, restored = answers(cramped, store, 2)
        assert store.usage()["memory"].records > 0
    assert none == 0
    assert restored > 0
    assert found == expected
