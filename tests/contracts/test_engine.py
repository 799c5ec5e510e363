"""What the originals get wrong, where it is the engine's part to get it right, sentence by sentence."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from small import CONTEXT, Ask, Ear, asks, finish, load_small, start

from kvilt.config import EngineConfig
from kvilt.engine.engine import Engine
from kvilt.engine.request import Request
from kvilt.errors import ContextOverflow
from kvilt.executor.protocol import Executor
from kvilt.sampling.params import SamplingParams

LONG = Ask(tuple(i * 7 % 61 for i in range(70)), SamplingParams(max_tokens=10))


@pytest.fixture(scope="module")
def executor(tmp_path_factory: pytest.TempPathFactory) -> Executor:
    return load_small(tmp_path_factory.mktemp("small"), 40, backend="native")


@pytest.fixture
def engine(executor: Executor) -> Iterator[Engine]:
    executor.prefixes.clear()
    yield Engine(executor, EngineConfig(step_tokens=32, max_rows=8))
    assert executor.pool.usage().used == 0


@pytest.mark.parametrize("stop", range(0, 14, 2))
def test_abort(executor: Executor, engine: Engine, stop: int) -> None:
    """ "Abort frees KV within one step, leaves every other sequence bit-identical, and the same cache continues
    correctly: abort at every step index and compare with a fresh run." Every index: tests/engine/test_engine.py."""
    neighbour, expected = asks(1, seed=4)[0], LONG.alone(executor)
    doomed, beside = start(engine, LONG, id="doomed", keep_kv=True), start(engine, neighbour)
    for _ in range(stop):
        engine.step()
    engine.abort("doomed")
    engine.drain_inbox()
    (ended,) = doomed.ends
    assert ended is not None
    assert ended.kv is not None
    with ended.kv as kv, executor.create_kv_cache() as fresh:
        said = [*LONG.prompt, *doomed.tokens[0]]
        if kv.num_entries:
            executor.prefill(said[: kv.num_entries], fresh)
        rest = said[kv.num_entries :]
        assert torch.equal(executor.step(rest, kv), executor.step(rest, fresh))
    finish(engine)
    assert beside.tokens[0] == neighbour.alone(executor)
    assert doomed.tokens[0] == expected[: len(doomed.tokens[0])]


def test_tenants(engine: Engine) -> None:
    """ "The prefix key includes adapter content, scale and salt." Adapters: tests/kv/test_prefix.py."""
    cached = []
    for tenant in ("a", "b", "a"):
        ear = start(engine, LONG, tenant=tenant)
        finish(engine)
        assert ear.ends[0] is not None
        cached.append(ear.ends[0].cached)
    assert cached == [0, 0, 64]


def test_mixture(executor: Executor, engine: Engine) -> None:
    """ "Prefix hits, prefill and decode mix in one forward." """
    first = start(engine, Ask(LONG.prompt, SamplingParams(max_tokens=30)))
    finish(engine)
    decoding = start(engine, asks(1, seed=4)[0])
    while not decoding.tokens[0]:
        engine.step()
    hit, fresh = start(engine, LONG), start(engine, Ask((9, 8, 7), SamplingParams(max_tokens=4)))
    steps: list[list[int]] = []
    honest = executor.run
    vars(executor)["run"] = lambda batch: steps.append([len(row.positions) for row in batch.rows]) or honest(batch)
    try:
        finish(engine)
    finally:
        del vars(executor)["run"]
    assert steps[0] == [1, 6, 3]
    assert hit.tokens[0] == LONG.alone(executor) == first.tokens[0][:10]
    assert fresh.reasons == ["length"]


def test_slow_client(executor: Executor, engine: Engine) -> None:
    """ "A slow client never stalls the step loop." Real readers: tests/engine/test_async.py."""
    slow = start(engine, Ask(LONG.prompt, SamplingParams(max_tokens=40)), id="slow")
    engine.step()
    engine.hold("slow")
    quick = start(engine, LONG)
    finish(engine)
    assert (quick.tokens[0], slow.over) == (LONG.alone(executor), False)
    engine.resume("slow")
    finish(engine)
    assert slow.reasons == ["length"]


def test_context_limit(engine: Engine) -> None:
    """ "Reaching the context limit is a clean finish (`length`), an over-long prompt a clear 400 before any work." """
    ear = start(engine, Ask(tuple([5] * CONTEXT), SamplingParams()))
    finish(engine)
    assert (ear.reasons, len(ear.tokens[0])) == (["length"], 1)
    with pytest.raises(ContextOverflow, match=f"room for {CONTEXT + 1} tokens is needed"):
        engine.prepare(Request([5] * (CONTEXT + 1), SamplingParams()), Ear())
    assert not engine.ready
