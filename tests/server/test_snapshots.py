"""Snapshots for inspectors: few, however many ask, and never older than the question."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from itertools import pairwise
from typing import Any

import pytest

from kvilt.kv.owner import part_of
from kvilt.llm.offload import Lane, Offload
from kvilt.server.kv.state import EVERY_S, REST, ThrottledSnapshots


class Bench:
    """A clock that only sleeping and building move, and what was built when."""

    def __init__(self, took_s: float = 0.0) -> None:
        self.now_s = 100.0
        self.used_s = 0.0
        self.took_s = took_s
        self.built: list[tuple[str, float]] = []
        self.fails = False
        self.sleepers: list[float] = []
        self.snapshots = ThrottledSnapshots(self.build, lambda: self.now_s, self.sleep, lambda: self.used_s)

    async def sleep(self, rest_s: float) -> None:
        """Time passes only while all others sleep, to where the first of them wakes."""
        self.sleepers.append(until_s := self.now_s + rest_s)
        for _ in range(20):
            await asyncio.sleep(0)
        while self.now_s < until_s:
            if until_s == min(self.sleepers):
                self.now_s = until_s
            await asyncio.sleep(0)
        self.sleepers.remove(until_s)

    def build(self, tenant: str) -> bytes:
        if self.fails:
            raise RuntimeError("no snapshot")
        self.built.append((tenant, self.now_s))
        self.now_s += self.took_s
        self.used_s += self.took_s
        return f"{tenant} {len(self.built)}".encode()


@pytest.fixture(autouse=True)
def no_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    async def here(_offload: Offload, _lane: Lane, work: Callable[..., Any], *args: Any) -> Any:
        return work(*args)

    monkeypatch.setattr(Offload, "run", here)


def run(scene: Callable[[Bench], Coroutine[Any, Any, None]], took_s: float = 0.0) -> Bench:
    async def whole() -> Bench:
        bench = Bench(took_s)
        await asyncio.wait_for(scene(bench), 30)
        return bench

    return asyncio.run(whole())


def test_who_asks_at_a_time_shares_one_snapshot() -> None:
    async def scene(bench: Bench) -> None:
        answers = await asyncio.gather(*(bench.snapshots.get("a") for _ in range(100)))
        assert set(answers) == {b"a 1"}

    assert len(run(scene).built) == 1


def test_pollers_share_a_snapshot_every_half_second() -> None:
    """Eight that ask again and again, a hundred times together with few snapshots and none older than a question."""

    async def poll(bench: Bench) -> None:
        for _ in range(25):
            asked_s = bench.now_s
            answer = await bench.snapshots.get("a")
            assert bench.built[int(answer.split()[1]) - 1][1] >= asked_s

    async def scene(bench: Bench) -> None:
        await asyncio.gather(*(poll(bench) for _ in range(8)))

    times = [at_s for _, at_s in run(scene).built]
    assert len(times) <= 26, "200 polls"
    assert all(after - before >= EVERY_S for before, after in pairwise(times))


def test_making_them_takes_a_small_part_of_the_time_whoever_asks() -> None:
    async def scene(bench: Bench) -> None:
        await asyncio.gather(*(bench.snapshots.get(f"tenant-{n}") for n in range(50)))

    bench = run(scene, took_s=0.1)
    assert len(bench.built) == 50
    assert bench.used_s / (bench.now_s - 100.0) < 1 / REST
    assert len({tenant for tenant, _ in bench.built}) == 50


def test_salts_of_a_key_wait_for_each_other_and_not_for_other_keys() -> None:
    async def scene(bench: Bench) -> None:
        await asyncio.gather(*(bench.snapshots.get(part_of("a", str(n))) for n in range(5)), bench.snapshots.get("b"))

    built = dict(run(scene).built)
    mine = sorted(at_s for tenant, at_s in built.items() if tenant != "b")
    assert all(after - before >= EVERY_S for before, after in pairwise(mine))
    assert built["b"] < mine[-1]


def test_what_fails_is_told_to_all_and_the_next_one_is_made() -> None:
    async def scene(bench: Bench) -> None:
        bench.fails = True
        for answer in await asyncio.gather(*(bench.snapshots.get("a") for _ in range(3)), return_exceptions=True):
            assert isinstance(answer, RuntimeError)
        bench.fails = False
        assert await bench.snapshots.get("a") == b"a 1"

    run(scene)


def test_who_leaves_takes_nothing_from_those_who_wait() -> None:
    async def scene(bench: Bench) -> None:
        first, second = (asyncio.ensure_future(bench.snapshots.get("a")) for _ in range(2))
        await asyncio.sleep(0)
        first.cancel()
        assert await second == b"a 1"
        with pytest.raises(asyncio.CancelledError):
            await first

    run(scene)


def test_keys_that_asked_long_ago_are_forgotten() -> None:
    async def scene(bench: Bench) -> None:
        for n in range(300):
            await bench.snapshots.get(f"tenant-{n}")
            bench.now_s += EVERY_S

    assert len(run(scene).snapshots._due_s) < 100
