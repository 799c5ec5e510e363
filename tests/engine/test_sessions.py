"""Sessions: the longest useful branch is found, tokens are those of a cold run, and nothing is kept too long."""

from __future__ import annotations

import errno
import json
import struct
from collections.abc import Callable, Iterator
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import pytest
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from session_agent import EVENTS, Agent
from session_world import World
from small import CONTEXT, load_hybrid, load_mixed, load_small
from tiny import VOCAB

from kvilt.config import EngineConfig
from kvilt.engine.sessions import sessions as module
from kvilt.engine.sessions.file import pack_session, unpack_session
from kvilt.engine.sessions.session import SessionOptions, session_id
from kvilt.engine.sessions.tree import MAX_TURNS, TurnTree
from kvilt.errors import BlobError, InputError, ParamError, SessionUnknown
from kvilt.executor.executor import ModelExecutor
from kvilt.executor.protocol import Executor
from kvilt.kv.file import write_whole
from kvilt.kv.pool import PagePool

TEXT = [i * 7 % 61 for i in range(300)]


@pytest.fixture(scope="module", params=["full", "window", "recurrent"])
def executor(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Executor:
    folder = tmp_path_factory.mktemp("small")
    if request.param == "window":
        return load_mixed(folder, (60, 40), backend="native")
    if request.param == "recurrent":
        return load_hybrid(folder, 60, 60, every=512, backend="native")
    return load_small(folder, 60, backend="native")


@pytest.fixture
def world(executor: Executor) -> Iterator[World]:
    executor.prefixes.clear()
    made = World(executor)
    yield made
    made.close()
    assert executor.pool.usage().used == 0


def test_the_next_turn_computes_its_new_tokens_alone(world: World) -> None:
    first = world.ask(TEXT[:100], "a")
    assert (first.computed, first.reused) == (100, 0)
    prompt = [*TEXT[:100], *first.tokens[:2], *TEXT[100:110]]  # the third token was drawn and not computed
    second = world.ask(prompt, "a")
    assert second.reused == 102 and second.computed == 10
    assert second.tokens == world.cold(prompt)
    (info,) = world.sessions.owned("")
    assert [(turn.id, turn.parent, turn.shared_tokens, turn.tokens) for turn in info.turns] == [
        ("t1", None, 0, 102),
        ("t2", "t1", 102, 114),
    ]
    assert all(turn.resident for turn in info.turns)


def test_a_fork_at_the_end_of_a_turn_computes_its_new_tokens_alone(world: World) -> None:
    first = world.ask(TEXT[:100], "a")
    common = [*TEXT[:100], *first.tokens[:2]]
    world.ask([*common, *TEXT[100:150]], "a")
    branch = [*common, *TEXT[200:210]]
    said = world.ask(branch, "a")
    assert said.computed == 10
    assert said.tokens == world.cold(branch)
    assert world.sessions.info("", "a").turns[2].shared_tokens == 102


def test_kv_that_gave_way_costs_computing_alone(world: World) -> None:
    prompt = [*TEXT[:100], 3]
    world.ask(TEXT[:100], "a")
    while world.handles.evict_one(True):
        pass
    world.executor.prefixes.clear()
    said = world.ask(prompt, "a")
    assert said.reused == 0 and said.tokens == world.cold(prompt)


def test_a_session_expires_and_says_so(world: World) -> None:
    world.ask(TEXT[:100], SessionOptions("a", ttl_s=5.0))
    world.now = 6.0
    with pytest.raises(SessionUnknown):
        world.sessions.info("", "a")
    assert len(world.handles) == 0
    world.executor.prefixes.clear()
    assert world.ask(TEXT[:110], "a").reason == "expired"


def test_each_use_extends_the_lifetime(world: World) -> None:
    for _ in range(4):
        world.ask(TEXT[:100], SessionOptions("a", ttl_s=5.0))
        world.now += 4.0
    assert world.sessions.info("", "a").expires_in_s == pytest.approx(1.0)


def test_a_session_that_is_done_gives_its_kv_back(world: World) -> None:
    world.ask(TEXT[:100], "a")
    world.ask(TEXT[:120], SessionOptions("a", done=True))
    assert len(world.handles) == 0
    assert [turn.resident for turn in world.sessions.info("", "a").turns] == [False, False]
    assert world.ask(TEXT[:130], "a").tokens == world.cold(TEXT[:130])


def test_a_session_that_will_return_is_evicted_after_others(world: World) -> None:
    options = SessionOptions("a", will_return=True)
    world.ask(TEXT[:64], options)
    world.ask(TEXT[:64], options)  # pinned from its second use on
    world.ask(TEXT[100:164], "b")
    assert world.handles.evict_one(False)
    assert world.sessions.info("", "a").turns[0].resident
    assert not world.sessions.info("", "b").turns[0].resident


def test_tenants_do_not_see_each_other(world: World) -> None:
    world.ask(TEXT[:100], "a", tenant="one")
    assert world.sessions.owned("two") == []
    for verb in (world.sessions.info, world.sessions.delete, world.exchange.export):
        with pytest.raises(SessionUnknown):
            verb("two", "a")  # type: ignore[operator]
    assert world.ask(TEXT[:110], "a", tenant="two").reused == 0


def test_fork_and_delete(world: World) -> None:
    first = world.ask(TEXT[:100], "a")
    after = [*TEXT[:100], *first.tokens[:2], 5]
    world.ask(after, "a")
    forked = world.sessions.fork("", "a", "b", "t1")
    assert [turn.id for turn in forked.turns] == ["t1"]
    whole = world.sessions.fork("", session_id("a"), "c")
    assert len(whole.turns) == 2
    world.sessions.delete("", "a")
    with pytest.raises(SessionUnknown):
        world.sessions.info("", "a")
    said = world.ask([*after, 6], "c")
    assert said.tokens == world.cold([*after, 6]) and said.computed <= 4
    with pytest.raises(ParamError, match="already"):
        world.sessions.fork("", "c", "b")
    with pytest.raises(InputError, match="no turn"):
        world.sessions.fork("", "c", "d", "t9")


def test_options_that_have_no_meaning_are_refused(world: World) -> None:
    for options in (
        SessionOptions(""),
        SessionOptions("x" * 257),
        SessionOptions("a", ttl_s=-1.0),
        SessionOptions("a", done=True, will_return=True),
    ):
        with pytest.raises(ParamError):
            world.ask(TEXT[:40], options)


def test_turns_and_sessions_are_bounded(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_SESSIONS", 3)
    for number in range(6):
        world.ask([number, *TEXT[:40]], f"s{number}")
    assert [info.name for info in world.sessions.owned("")] == ["s3", "s4", "s5"]
    tree = TurnTree()
    for number in range(MAX_TURNS + 1):
        tree.add([number, 1, 2])
    excess = tree.excess()
    assert excess is not None and excess.id == "t1"
    tree.remove(excess)
    assert len(tree) == MAX_TURNS and tree.excess() is None


def test_old_turns_give_their_handles_to_new_ones(executor: Executor) -> None:
    executor.prefixes.clear()
    world = World(executor, EngineConfig(step_tokens=64, max_rows=8, max_handles=2))
    for number in range(4):
        world.now = float(number)
        world.ask([number, *TEXT[:40]], "a")
    assert len(world.handles) == 2
    assert [turn.resident for turn in world.sessions.info("", "a").turns] == [False, False, True, True]
    world.close()


# Files.


def test_a_file_brings_turns_and_kv_to_another_process(world: World) -> None:
    first = world.ask(TEXT[:100], "a")
    data = world.exchange.export("", "a")
    world.restart()
    made = world.exchange.load("", data)
    assert (made.kv, made.session.name, made.session.tokens) == ("used", "a", 102)
    prompt = [*TEXT[:100], *first.tokens[:2], 9]
    said = world.ask(prompt, "a")
    assert said.reused == 102 and said.tokens == world.cold(prompt)
    world.restart()
    assert world.exchange.load("", data, "other", ttl_s=7.0).session.expires_in_s == 7.0


def test_a_file_without_kv_is_computed(world: World) -> None:
    world.ask(TEXT[:100], "a")
    data = world.exchange.export("", "a", kv=False)
    assert len(data) < 4000
    world.restart()
    assert world.exchange.load("", data).kv == "none"
    assert world.ask(TEXT[:110], "a").tokens == world.cold(TEXT[:110])


def test_imported_kv_never_enters_the_prefix_index(world: World) -> None:
    world.ask(TEXT[:100], "a")
    data = world.exchange.export("", "a")
    world.restart()
    world.exchange.load("", data)
    world.ask(TEXT[:110], "a")
    assert world.ask(TEXT[:110], "b").reused == 0


def test_kv_of_other_numerics_is_computed_again(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.ask(TEXT[:100], "a")
    pool, own = world.executor.pool, world.executor.pool.identity()
    monkeypatch.setattr(pool, "identity", lambda: replace(own, numerics="another machine"))
    data = world.exchange.export("", "a")
    monkeypatch.setattr(pool, "identity", lambda: own)
    world.restart()
    made = world.exchange.load("", data)
    assert made.kv == "recomputed" and "another machine" in made.why
    assert world.ask(TEXT[:110], "a").tokens == world.cold(TEXT[:110])


def _changed(data: bytes, change: Callable[[dict[str, object]], None]) -> bytes:
    """A file whose header was changed and whose checksum is right."""
    magic, version, size = struct.unpack_from("<8sIQ", data)
    fields = json.loads(data[20 : 20 + size])
    change(fields)
    header = json.dumps(fields).encode()
    whole = struct.pack("<8sIQ", magic, version, len(header)) + header + data[20 + size : -32]
    return whole + sha256(whole).digest()


def _first_turn(**changes: object) -> Callable[[dict[str, object]], None]:
    return lambda fields: fields["turns"][0].update(changes)  # type: ignore[index]


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (lambda fields: fields["identity"].update(model="other"), "identity.model"),
        (lambda fields: fields.pop("identity"), "identity"),
        (lambda fields: fields.update(name=""), "name"),
        (lambda fields: fields.update(turns=5), "turns"),
        (_first_turn(id=""), "turns.id"),
        (_first_turn(parent="t7"), "turns.parent"),
        (_first_turn(shared=3), "turns.shared"),
        (_first_turn(tokens=[-1]), "turns.tokens"),
        (_first_turn(tokens=[10**6]), "turns.tokens"),
        (_first_turn(tokens=[]), "turns.tokens"),
        (_first_turn(kv_bytes=5), "payload"),
        (_first_turn(maker=None), "turns"),
    ],
)
def test_a_file_in_doubt_is_refused_by_name(
    world: World, change: Callable[[dict[str, object]], None], field: str
) -> None:
    world.ask(TEXT[:50], "a")
    with pytest.raises(BlobError) as refused:
        world.exchange.load("", _changed(world.exchange.export("", "a"), change))
    assert refused.value.field == field


def test_damaged_short_foreign_and_newer_files_are_refused(world: World) -> None:
    world.ask(TEXT[:50], "a")
    data = world.exchange.export("", "a")
    newer = data[:8] + struct.pack("<I", 2) + data[12:]
    for bad, field in (
        (data[:30], "size"),
        (b"x" * 100, "magic"),
        (newer, "version"),
        (data[:-40] + data[-39:], "checksum"),
        (data[:12] + struct.pack("<Q", 1 << 40) + data[20:], "header"),
    ):
        with pytest.raises(BlobError) as refused:
            world.exchange.load("", bad)
        assert refused.value.field == field
    with pytest.raises(BlobError, match="newer"):
        world.exchange.load("", newer)


def test_kv_with_other_tokens_than_its_turn_is_not_used(world: World) -> None:
    world.ask(TEXT[:50], "a")
    file = unpack_session(world.exchange.export("", "a"))
    turn = file.tree.turns["t1"]
    turn.ids = turn.ids.copy()
    turn.ids[10] = (int(turn.ids[10]) + 1) % 61
    world.restart()
    made = world.exchange.load("", pack_session(file, world.exchange_text))
    assert made.kv == "recomputed" and "other tokens" in made.why


def test_a_full_disk_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_given: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    kept = tmp_path / "kept.kvs"
    kept.write_bytes(b"an earlier one")
    monkeypatch.setattr("os.write", full)
    for path in (tmp_path / "a.kvs", kept):
        with pytest.raises(OSError, match="No space"):
            write_whole(path, b"data")
    assert list(tmp_path.iterdir()) == [kept]
    assert kept.read_bytes() == b"an earlier one"


def other_pages(executor: ModelExecutor, page_tokens: int) -> ModelExecutor:
    """The same model over pages of another size."""
    old, layout = executor.pool, executor.layout
    groups = tuple(replace(one, shape=replace(one.shape, page_tokens=page_tokens)) for one in layout.groups)
    states = 0 if layout.recurrent is None else 60
    pool = PagePool(replace(layout, groups=groups), 120, old.ops, old.identity, token_limit=VOCAB, states=states)
    return ModelExecutor(executor._decoder, pool, CONTEXT)


def test_a_file_of_another_page_size_is_used(world: World) -> None:
    assert isinstance(world.executor, ModelExecutor)
    first = world.ask(TEXT[:100], "a")
    data = world.exchange.export("", "a")
    other = World(other_pages(world.executor, 16))
    assert other.exchange.load("", data).kv == "used"
    prompt = [*TEXT[:100], *first.tokens[:2], 9]
    said = other.ask(prompt, "a")
    assert said.reused == 102 and said.tokens == other.cold(prompt) == world.cold(prompt)
    other.close()


# Any tree of turns.


@settings(max_examples=examples(60))
@given(events=st.lists(EVENTS, min_size=1, max_size=10))
def test_any_tree_of_turns_says_what_a_cold_run_says(executor: Executor, events: list[tuple[str, int, int]]) -> None:
    executor.prefixes.clear()
    world = World(executor)
    agent = Agent(world)
    try:
        for event in events:
            agent.act(*event)
    finally:
        world.close()
    assert executor.pool.usage().used == 0
