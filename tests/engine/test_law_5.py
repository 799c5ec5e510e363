"""A row does not see its neighbours, end to end: whatever else the engine does, a request says what it says alone."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from small import CONTEXT, Ask, asks, load_small, start

from kvilt.config import EngineConfig
from kvilt.engine.counters import PREEMPTIONS, PREFIX_HITS
from kvilt.engine.engine import Engine
from kvilt.executor.protocol import Executor

SEEDS = range(24)
REACHES = {"full": None, "window": 40}


@pytest.fixture(scope="module", params=REACHES)
def executor(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Executor:
    """Pages for about six of the requests at a time. The promise of equal bits is the native backend's."""
    made = load_small(tmp_path_factory.mktemp("small"), 30, REACHES[request.param], "native")
    assert made.max_context == CONTEXT
    return made


@pytest.fixture(scope="module", params=[0.0, 0.8], ids=["greedy", "seeded"])
def crowd(request: pytest.FixtureRequest, executor: Executor) -> list[tuple[Ask, list[int]]]:
    """32 requests, each with what it says alone."""
    return [(ask, ask.alone(executor)) for ask in asks(32, seed=1, temperature=request.param)]


@pytest.fixture(scope="module")
def tally() -> Counter[str]:
    """What happened on all days together."""
    return Counter()


@contextmanager
def fewer_pages(executor: Executor, pages: int) -> Iterator[None]:
    """Somebody else holds some of the pool."""
    taken = executor.pool.take([pages] * len(executor.layout.groups))
    try:
        yield
    finally:
        for group, each in enumerate(taken):
            executor.pool.drop(group, each)


@pytest.mark.parametrize("seed", SEEDS)
def test_every_survivor_says_what_it_says_alone(
    executor: Executor, crowd: list[tuple[Ask, list[int]]], seed: int, tally: Counter[str]
) -> None:
    dice = random.Random(seed)
    executor.prefixes.clear()
    config = EngineConfig(
        step_tokens=dice.choice([16, 33, 64, 200]), max_rows=dice.choice([4, 9, 16]), overlap=seed % 2 == 0
    )
    engine, ears = Engine(executor, config), {}
    order = dice.sample(range(len(crowd)), len(crowd))
    doomed = set(dice.sample(order, len(crowd) * 3 // 10))
    with fewer_pages(executor, dice.choice([0, 10, 14, 18])):
        while order or engine.ready:
            for at in [order.pop() for _ in range(min(len(order), dice.choice([0, 1, 2, 8])))]:
                ears[at] = start(engine, crowd[at][0], id=str(at), priority=dice.choice([0, 0, 1]))
            for at in sorted(doomed & ears.keys()):
                if dice.random() < 0.05:
                    engine.abort(str(at))
            engine.step()
    for at, ear in ears.items():
        (reason,), (said,), expected = ear.reasons, ear.tokens, crowd[at][1]
        if reason == "cancelled":
            assert said == expected[: len(said)]
        else:
            assert (reason, said) == ("length", expected), f"request {at}"
    assert len(ears) == len(crowd)
    assert executor.pool.usage().used == 0
    tally["days"] += 1
    tally["cancelled"] += sum(ear.reasons == ["cancelled"] for ear in ears.values())
    for metric in (PREEMPTIONS, PREFIX_HITS):
        tally[metric.name] += int(sum(point["value"] for point in engine.metrics.snapshot()[metric.name]["series"]))


def test_those_days_were_eventful(tally: Counter[str]) -> None:
    """Without this the test above might prove less than it says. Days may be shared out among several processes."""
    if tally["days"] >= 10:
        assert min(tally["cancelled"], tally[PREEMPTIONS.name], tally[PREFIX_HITS.name]) > tally["days"]
