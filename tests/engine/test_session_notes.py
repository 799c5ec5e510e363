"""Sessions and a restart: the same trees under the same names, for the same tenant, with KV from the store."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from session_agent import EVENTS, Agent
from session_world import World
from small import load_hybrid, load_mixed, load_small

from kvilt.engine.sessions import sessions as module
from kvilt.engine.sessions.session import SessionOptions
from kvilt.errors import SessionUnknown
from kvilt.executor.protocol import Executor

TEXT = [i * 7 % 61 for i in range(300)]


@pytest.fixture(scope="module", params=["full", "window", "recurrent"])
def executor(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Executor:
    folder = tmp_path_factory.mktemp("small")
    if request.param == "window":
        return load_mixed(folder, (60, 40), backend="native")
    if request.param == "recurrent":
        return load_hybrid(folder, 60, 60, every=64, backend="native")
    return load_small(folder, 60, backend="native")


@pytest.fixture
def world(executor: Executor, tmp_path: Path) -> Iterator[World]:
    executor.prefixes.clear()
    made = World(executor, folder=tmp_path / "store")
    yield made
    made.close()
    executor.prefixes.clear()


def notes(world: World) -> list[Path]:
    assert world.folder is not None
    return sorted((world.folder / "notes").glob("*.session"))


def test_a_session_survives_with_its_tree_and_kv_comes_from_the_store(world: World) -> None:
    first = world.ask(TEXT[:100], SessionOptions("a", ttl_s=50.0, exact=False))
    world.ask([*TEXT[:100], *first.tokens[:2], *TEXT[100:130]], "a")
    world.ask([*TEXT[:100], *first.tokens[:2], *TEXT[200:205]], "a")
    before = world.sessions.info("", "a")
    world.now += 10.0
    world.restart()
    after = world.sessions.info("", "a")
    assert [(t.id, t.parent, t.shared_tokens, t.tokens) for t in after.turns] == [
        (t.id, t.parent, t.shared_tokens, t.tokens) for t in before.turns
    ]
    assert not any(turn.resident for turn in after.turns)
    assert (after.name, after.exact, after.expires_in_s) == ("a", False, pytest.approx(40.0))
    prompt = [*TEXT[:100], *first.tokens[:2], *TEXT[100:140]]
    said = world.ask(prompt, "a")
    assert said.tokens == world.cold(prompt)
    assert said.reused >= 64  # whole pages, and for recurrent state a checkpoint
    assert world.sessions.info("", "a").turns[-1].resident


def test_each_tenant_finds_its_own_sessions_again(world: World) -> None:
    world.ask(TEXT[:40], "a", tenant="one")
    world.ask(TEXT[:40], "b", tenant="one/salt")
    world.restart()
    assert [info.name for info in world.sessions.owned("one")] == ["a"]
    assert [info.name for info in world.sessions.owned("one/salt")] == ["b"]
    assert world.sessions.owned("two") == world.sessions.owned("") == []
    assert world.ask(TEXT[:50], "a", tenant="one").tokens == world.cold(TEXT[:50])
    assert len(world.sessions.info("one", "a").turns) == 2


def test_no_note_says_who_or_what_in_clear(world: World) -> None:
    world.ask(TEXT[:40], "a", tenant="a-secret-key")
    world.restart()
    (note,) = notes(world)
    assert b"a-secret-key" not in note.read_bytes()


def test_what_was_deleted_or_has_expired_stays_away(world: World) -> None:
    world.ask(TEXT[:40], "deleted")
    world.ask(TEXT[:40], SessionOptions("expired", ttl_s=5.0))
    world.ask(TEXT[:40], "kept")
    world.sessions.delete("", "deleted")
    world.now += 6.0
    world.restart()
    assert [info.name for info in world.sessions.owned("")] == ["kept"]
    world.restart()
    assert len(notes(world)) == 1


def test_turns_leave_no_handles_behind(world: World) -> None:
    """They would count against the key's quota until they expire."""
    world.ask(TEXT[:40], "a")
    world.now += 1.0
    world.sessions.fork("", "a", "b")
    world.restart()
    assert len(world.handles) == 0
    assert [info.name for info in world.sessions.owned("")] == ["a", "b"]


def test_damaged_notes_are_forgotten(world: World) -> None:
    world.ask(TEXT[:40], "a")
    world.ask(TEXT[:40], "b")
    world.close()
    first, _ = notes(world)
    first.write_bytes(first.read_bytes()[:-40])
    world.start()
    assert len(world.sessions.owned("")) == 1


def test_a_restart_keeps_no_more_than_an_owner_may_have(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(4):
        world.now += 1.0
        world.ask([number, *TEXT[:40]], f"s{number}")
    monkeypatch.setattr(module, "MAX_SESSIONS", 2)
    world.restart()
    assert [info.name for info in world.sessions.owned("")] == ["s2", "s3"]
    with pytest.raises(SessionUnknown):
        world.sessions.info("", "s0")


@settings(max_examples=examples(15))
@given(events=st.lists(st.one_of(EVENTS, st.just(("restart", 0, 0))), min_size=2, max_size=8))
def test_any_tree_of_turns_survives_restarts(executor: Executor, events: list[tuple[str, int, int]]) -> None:
    executor.prefixes.clear()
    with tempfile.TemporaryDirectory() as folder:
        world = World(executor, folder=Path(folder))
        agent = Agent(world)
        try:
            for event in [*events, ("restart", 0, 0)]:
                agent.act(*event)
        finally:
            world.close()
            executor.prefixes.clear()
    assert executor.pool.usage().used == 0
