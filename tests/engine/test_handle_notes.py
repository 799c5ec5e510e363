"""Handles and a restart: the same ids name the same tokens, for the same tenant, until the same moment."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from effort import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from small import load_small

from kvilt.config import EngineConfig
from kvilt.engine.counters import ENGINE_METRICS, HANDLES
from kvilt.engine.handles.handles import Handles
from kvilt.errors import HandleExpired, HandleLimit, HandleUnknown, KviltError
from kvilt.executor.protocol import Executor
from kvilt.kv.cache import KVCache
from kvilt.metrics import Metrics
from kvilt.store.disk import Disk
from kvilt.store.files import FileSystem
from kvilt.store.notes import HandleNotes
from kvilt.store.store import Store, StoreLimits
from kvilt.store.tier import Budget

TEXT = [i * 5 % 61 for i in range(70)]
TENANT = "a-tenants-name"


class World:
    """Time, a folder, and processes that follow each other."""

    def __init__(self, folder: Path, executor: Executor) -> None:
        self.folder, self.executor = folder, executor
        self.today, self.up = time.time(), 7.0
        self.store = Store(None, [Disk(folder, Budget(1 << 24))], limits=StoreLimits(close_s=300))
        self.handles: Handles | None = None
        self.metrics = Metrics(ENGINE_METRICS)

    def start(self, model: str | None = None, **config: Any) -> Handles:
        """A process after the one before has ended."""
        self.end()
        self.up = 3.0  # a clock that counts from the start of a process says nothing to the next
        notes = self.store.notes(model or self.executor.pool.identity().model)
        chosen = EngineConfig(**{"max_handles": 4, "handle_ttl_s": 60, **config})
        self.handles = Handles(self.executor, chosen, self.metrics, lambda: self.up, notes, lambda: self.today)
        return self.handles

    def end(self) -> None:
        if self.handles is not None:
            self.handles.close()
            self.handles = None

    def wait(self, seconds: float) -> None:
        assert self.handles is not None
        self.handles.flush()  # nobody looks at one clock before and at the other after
        self.today += seconds
        self.up += seconds

    def kv(self, tokens: list[int]) -> KVCache:
        kv = self.executor.create_kv_cache()
        self.executor.prefill(tokens, kv)
        return kv

    def notes(self) -> list[Path]:
        return sorted((self.folder / "notes").iterdir())


@pytest.fixture(scope="module")
def executor(tmp_path_factory: pytest.TempPathFactory) -> Executor:
    return load_small(tmp_path_factory.mktemp("small"), 20, None, "native")


@pytest.fixture
def world(tmp_path: Path, executor: Executor) -> Iterator[World]:
    made = World(tmp_path, executor)
    yield made
    made.end()
    made.store.close()
    assert executor.pool.usage().used == 0


def test_a_handle_is_known_again_with_everything_but_its_kv(world: World) -> None:
    handles = world.start()
    made = handles.keep(TENANT, world.kv(TEXT), ttl_s=50)
    world.wait(10)
    handles = world.start()
    world.wait(5)
    found = handles.info(TENANT, made.id)
    assert (found.id, found.tokens, found.resident, found.pinned, found.maker) == (made.id, 70, False, False, "base")
    assert found.expires_in_s == pytest.approx(35)
    loan = handles.lend(TENANT, made.id)
    assert (list(loan.tokens), loan.kv) == (TEXT, None)
    handles.fill(TENANT, made.id, world.kv(TEXT))
    assert handles.info(TENANT, made.id).resident
    assert world.metrics.snapshot()[HANDLES.name]["series"][0]["value"] == 1


def test_others_know_as_little_of_it_as_before(world: World) -> None:
    made = world.start().keep(TENANT, world.kv(TEXT))
    handles = world.start()
    for verb in (handles.info, handles.lend, handles.delete, handles.fork):
        for tenant in ("b", ""):
            with pytest.raises(HandleUnknown):
                verb(tenant, made.id)
    assert handles.owned("b") == []
    assert TENANT.encode() not in world.notes()[0].read_bytes()
    with pytest.raises(HandleUnknown):
        world.start(model="other weights").info(TENANT, made.id)
    assert world.start().info(TENANT, made.id).tokens == 70


def test_a_handle_of_another_living_process_is_found_by_its_note(world: World) -> None:
    """As replicas have them that share a folder: where the home of a handle is gone, another one goes on."""
    first = world.start()
    notes = world.store.notes(world.executor.pool.identity().model)
    second = Handles(world.executor, EngineConfig(), None, lambda: world.up, notes, lambda: world.today)
    made = first.keep(TENANT, world.kv(TEXT), ttl_s=50)
    gone = first.keep(TENANT, world.kv(TEXT), ttl_s=50)
    first.delete(TENANT, gone.id)
    assert first.flush()
    loan = second.lend(TENANT, made.id)
    assert (list(loan.tokens), loan.kv) == (TEXT, None)
    assert second.info(TENANT, made.id).expires_in_s == pytest.approx(50)
    for tenant, name in ((TENANT, gone.id), ("b", made.id), (TENANT, "../" + made.id)):
        with pytest.raises(HandleUnknown):
            second.info(tenant, name)
    second.delete(TENANT, made.id)
    assert second.flush()
    assert world.notes() == []
    second.close()


def test_every_verb_is_heard_of_by_the_next_process(world: World) -> None:
    handles = world.start()
    cut, pinned, gone, forked = (handles.keep(TENANT, world.kv([n, *TEXT]), ttl_s=20) for n in range(4))
    handles.truncate(TENANT, cut.id, 33)
    handles.pin(TENANT, pinned.id, 500)
    handles.delete(TENANT, gone.id)
    twin = handles.fork(TENANT, forked.id, ttl_s=90)
    handles = world.start()
    assert list(handles.tokens(TENANT, cut.id)) == [0, *TEXT][:33]
    assert handles.info(TENANT, pinned.id).pinned
    assert handles.info(TENANT, pinned.id).expires_in_s == pytest.approx(500)
    assert handles.tokens(TENANT, twin.id) == handles.tokens(TENANT, forked.id)
    with pytest.raises(HandleUnknown):
        handles.info(TENANT, gone.id)
    world.wait(501)
    assert handles.owned(TENANT) == []
    world.end()
    assert world.notes() == []


def test_time_goes_on_between_two_processes(world: World) -> None:
    handles = world.start()
    made = handles.keep(TENANT, world.kv(TEXT), ttl_s=20)
    pinned = handles.keep(TENANT, world.kv(TEXT), ttl_s=50)
    handles.pin(TENANT, pinned.id, 15)
    world.end()
    world.today += 20
    handles = world.start()
    with pytest.raises(HandleExpired):
        handles.info(TENANT, made.id)
    with pytest.raises(HandleUnknown):
        handles.info("b", made.id)
    assert not handles.info(TENANT, pinned.id).pinned
    assert handles.info(TENANT, pinned.id).expires_in_s == pytest.approx(30)
    world.end()
    assert len(world.notes()) == 1


def test_a_tenant_still_has_no_more_than_it_may_have(world: World) -> None:
    handles = world.start()
    made = []
    for n in range(4):
        made.append(handles.keep(TENANT, world.kv([n])))
        world.wait(1)
    other = handles.keep("b", world.kv(TEXT))
    handles = world.start()
    with pytest.raises(HandleLimit, match="5 handles"):
        handles.keep(TENANT, world.kv(TEXT))
    handles = world.start(max_handles=2)
    assert [one.id for one in handles.owned(TENANT)] == [one.id for one in made[2:]], "the latest"
    assert [one.id for one in handles.owned("b")] == [other.id]
    with pytest.raises(HandleLimit, match="3 handles"):
        handles.check_room(TENANT, 1)
    assert len(world.start().owned(TENANT)) == 2


def test_a_delete_that_was_waited_for_survives_a_kill(world: World) -> None:
    handles = world.start()
    made = handles.keep(TENANT, world.kv(TEXT))
    assert handles.flush()
    assert len(world.notes()) == 1
    handles.delete(TENANT, made.id)
    assert handles.flush()
    assert world.notes() == []


def test_a_disk_that_does_not_answer_holds_up_no_verb(world: World) -> None:
    """Not even that of a step, which asks for pages."""

    class Stuck(FileSystem):
        gate, waits = threading.Event(), threading.Event()

        def sync(self, fd: int) -> None:
            self.waits.set()
            self.gate.wait()
            super().sync(fd)

    disk, model = Stuck(), world.executor.pool.identity().model
    notes = HandleNotes(world.folder, model, world.store.metrics, most_bytes=1 << 20, files=disk)
    handles = world.handles = Handles(world.executor, EngineConfig(), notes=notes)
    made = handles.keep(TENANT, world.kv(TEXT))
    disk.waits.wait()
    twin = handles.fork(TENANT, made.id)
    handles.pin(TENANT, made.id, 50)
    handles.truncate(TENANT, twin.id, 9)
    handles.delete(TENANT, made.id)
    assert handles.evict_one(True)
    assert not handles.flush(0.001)
    disk.gate.set()
    assert handles.flush()
    found = world.start()
    assert [(one.id, one.tokens) for one in found.owned(TENANT)] == [(twin.id, 9)]


def test_without_notes_there_is_nothing_to_wait_for(world: World) -> None:
    handles = Handles(world.executor)
    handles.keep(TENANT, world.kv(TEXT))
    assert handles.flush()
    handles.close()
    assert not (world.folder / "notes").exists()


def test_garbage_in_the_folder_costs_nothing_else(world: World) -> None:
    handles = world.start()
    lost, kept = (handles.keep(TENANT, world.kv(TEXT)) for _ in range(2))
    world.end()
    (path,) = [path for path in world.notes() if lost.id in path.name]
    path.write_bytes(path.read_bytes()[:-5])
    handles = world.start()
    assert [one.id for one in handles.owned(TENANT)] == [kept.id]
    series = world.store.metrics.snapshot()["kvilt_store_refused_total"]["series"]
    assert [(one["labels"], one["value"]) for one in series] == [({"tier": "notes", "reason": "seal"}, 1)]


Verb = Callable[[Handles, str, str], object]
VERBS: list[Verb] = [
    lambda handles, tenant, name: handles.fork(tenant, name, ttl_s=40),
    lambda handles, tenant, name: handles.truncate(tenant, name, 3),
    lambda handles, tenant, name: handles.pin(tenant, name, 30),
    lambda handles, tenant, name: handles.delete(tenant, name),
    lambda handles, tenant, name: handles.evict_one(True),
    lambda handles, tenant, name: handles.lend(tenant, name),
]


@settings(
    max_examples=examples(40),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 7), st.integers(0, 5), st.integers(0, 9)), max_size=25))
def test_a_restart_changes_nothing_that_anybody_can_see(
    tmp_path_factory: pytest.TempPathFactory, executor: Executor, days: list[tuple[str, int, int, int]]
) -> None:
    """Whatever was done before: every tenant's handles, their tokens, pins and ends are those of the process before."""
    world = World(tmp_path_factory.mktemp("world"), executor)
    handles, names = world.start(), ["none"]
    for tenant, verb, which, wait in days:
        world.wait(wait)
        try:
            if verb >= len(VERBS):
                names.append(handles.keep(tenant, world.kv(TEXT[: 3 + which]), ttl_s=25).id)
            else:
                done = VERBS[verb](handles, tenant, names[which % len(names)])
                if (kv := getattr(done, "kv", None)) is not None:
                    kv.close()
        except KviltError:
            pass

    def seen() -> dict[str, tuple[object, ...]]:
        assert world.handles is not None
        return {
            one.id: (tenant, list(world.handles.tokens(tenant, one.id)), one.pinned, round(one.expires_in_s, 3))
            for tenant in "ab"
            for one in world.handles.owned(tenant)
        }

    before = seen()
    world.start()
    assert seen() == before
    world.end()
    world.store.close()
