"""Prompts that stay warm: what an engine computed is found by the next one, in a store that outlives both."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from lora_files import write_lora
from small import PAGES, Ask, Ear, asks, load_small, run, start
from stores import Shelfware, always, until
from tiny import write_tiny

from kvilt.batch import Adapted, Base
from kvilt.blend.chunk import ChunkCache
from kvilt.blend.recipe import BlendPrompt, Recipe
from kvilt.config import EngineConfig, RunConfig
from kvilt.engine.counters import RESTORED
from kvilt.engine.engine import Engine
from kvilt.engine.request import Request
from kvilt.errors import NumericsError, ParamError
from kvilt.executor.load import load_executor
from kvilt.executor.protocol import Executor
from kvilt.sampling.params import SamplingParams
from kvilt.store.disk import Disk
from kvilt.store.store import Store, StoreLimits
from kvilt.store.tier import Budget

PATIENT = StoreLimits(lookup_s=300, layer_s=300, close_s=300)
HASTY = StoreLimits(lookup_s=0.05, layer_s=0.05, close_s=5)
SIZE = 32
GREEDY = SamplingParams(max_tokens=6, temperature=0.0)
WARM = Ask(tuple((7 * i + i // 5) % 60 for i in range(150)), GREEDY)  # four pages and a half
OTHER = Ask(tuple((11 * i + i // 3) % 60 for i in range(150)), GREEDY)


def on_disk(folder: Path, limits: StoreLimits = PATIENT, total_bytes: int = 1 << 28) -> Store:
    return Store(None, [Disk(folder, Budget(total_bytes))], limits=limits)


def engine_over(executor: Executor, store: Store | None, **fields: object) -> Engine:
    return Engine(executor, EngineConfig(step_tokens=64, max_rows=8, **fields), store=store)  # type: ignore[arg-type]


def say(engine: Engine, ask: Ask, **fields: object) -> tuple[list[int], int]:
    """What a request says, and how many tokens of its prompt it did not compute."""
    ear = start(engine, ask, **fields)
    run(engine, lambda: ear.over)
    end = ear.ends[0]
    assert end is not None
    assert end.error is None
    assert end.cached + end.computed == len(ask.prompt)
    return ear.tokens[0], end.cached


def restart(executor: Executor) -> None:
    """As a new process has it: nothing is known."""
    executor.prefixes.clear()


def warmed(executor: Executor, store: Store, *asks: Ask, **fields: object) -> None:
    """An engine's whole life: it answers, and is closed."""
    restart(executor)
    engine = engine_over(executor, store)
    for ask in asks:
        assert say(engine, ask, **fields)[0] == ask.alone(executor)
    engine.close()
    assert store.flush(300)
    restart(executor)


def count(store: Store, name: str, **labels: str) -> float:
    series = store.metrics.snapshot()[f"kvilt_store_{name}"]["series"]
    return sum(one["value"] for one in series if labels.items() <= one["labels"].items())


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Executor:
    return load_small(tmp_path_factory.mktemp("full"), PAGES, None, "native")


@pytest.fixture(autouse=True)
def nothing_left(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    for name in {"executor", "full"} & set(request.fixturenames):
        one = request.getfixturevalue(name)
        restart(one)
        assert one.pool.usage().used == 0


def test_a_restart_keeps_a_prompt_warm(executor: Executor, tmp_path: Path) -> None:
    with on_disk(tmp_path) as store:
        warmed(executor, store, WARM)
        assert count(store, "written_total") >= 4
    with on_disk(tmp_path) as store:
        engine = engine_over(executor, store)
        said, cached = say(engine, WARM)
        assert said == WARM.alone(executor)
        assert cached == 4 * SIZE
        assert engine.metrics.snapshot()[RESTORED.name]["series"][0]["value"] == 4 * SIZE
        assert count(store, "hits_total", tier="disk", kind="prefix") == 4
        # What came back is known like any other prefix: nobody asks the store again.
        asked = count(store, "lookups_total")
        assert say(engine, WARM) == (said, 4 * SIZE)
        assert count(store, "lookups_total") == asked


def test_what_was_drawn_is_warm_too(executor: Executor, tmp_path: Path) -> None:
    """The next turn of a conversation begins with the answer before."""
    long = Ask(WARM.prompt, SamplingParams(max_tokens=60, temperature=0.0))
    with on_disk(tmp_path) as store:
        warmed(executor, store, long)
        turn = Ask((*WARM.prompt, *long.alone(executor), 3, 4, 5), GREEDY)
        engine = engine_over(executor, store)
        assert say(engine, turn) == (turn.alone(executor), 6 * SIZE)


@pytest.mark.parametrize("pages", range(1, 5))
def test_only_what_is_not_in_memory_is_looked_for(full: Executor, tmp_path: Path, pages: int) -> None:
    part = Ask(WARM.prompt[: pages * SIZE], GREEDY)
    with on_disk(tmp_path) as store:
        warmed(full, store, WARM)
        engine = engine_over(full, store, stored_prefix_tokens=1)
        say(engine, Ask((*part.prompt, 1), GREEDY))
        before = count(store, "lookups_total", kind="prefix")
        assert say(engine, WARM) == (WARM.alone(full), 4 * SIZE)
        assert count(store, "lookups_total", kind="prefix") - before == 4 - pages


def test_a_prompt_of_whole_pages_leaves_one_token_to_compute(full: Executor, tmp_path: Path) -> None:
    whole = Ask(WARM.prompt[: 3 * SIZE], GREEDY)
    with on_disk(tmp_path) as store:
        warmed(full, store, whole)
        assert say(engine_over(full, store), whole) == (whole.alone(full), 3 * SIZE - 1)


def test_a_page_that_the_pool_had_no_room_for_comes_back(tmp_path: Path) -> None:
    """Two prompts that do not fit together, over and over: each finds its own again."""
    executor = load_small(tmp_path / "model", 8, None, "native")
    with on_disk(tmp_path / "store") as store:
        engine = engine_over(executor, store)
        found = []
        for ask in (WARM, OTHER) * 3:
            said, cached = say(engine, ask)
            assert said == ask.alone(executor)
            found.append(cached)
            assert store.flush(300)
        assert found[:2] == [0, 0]
        assert all(cached == 4 * SIZE for cached in found[2:])
        assert executor.pool.usage().used == 0


def test_nobody_else_finds_it(executor: Executor, tmp_path: Path) -> None:
    """Another tenant, and a model with the same shapes and other weights."""
    with on_disk(tmp_path / "store") as store:
        warmed(executor, store, WARM, tenant="alice")
        engine = engine_over(executor, store)
        assert say(engine, WARM, tenant="bob") == (WARM.alone(executor), 0)
        assert say(engine, WARM) == (WARM.alone(executor), 0)
        assert say(engine, WARM, tenant="alice") == (WARM.alone(executor), 4 * SIZE)
        write_tiny(tmp_path / "model", max_position_embeddings=512, rope_theta=500.0)
        other = load_executor(tmp_path / "model", RunConfig(kv_memory=1 << 22, backend="native", threads=1))
        assert say(engine_over(other, store), WARM) == (WARM.alone(other), 0)
        assert count(store, "misses_total", reason="absent") >= 3


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-20] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("damage", [cut, flip, Path.unlink])
@pytest.mark.parametrize("victim", range(4))
def test_a_damaged_page_is_computed(
    full: Executor, tmp_path: Path, damage: Callable[[Path], None], victim: int
) -> None:
    with on_disk(tmp_path) as store:
        warmed(full, store, WARM)
    records = sorted((tmp_path / "records").rglob("*.kv"), key=lambda path: path.stat().st_size)  # tokens make the size
    damage(records[victim])
    with on_disk(tmp_path) as store:
        assert say(engine_over(full, store), WARM) == (WARM.alone(full), victim * SIZE)
        assert count(store, "misses_total") >= 1


def test_blended_kv_never_goes_there(full: Executor, tmp_path: Path) -> None:
    parts = [WARM.prompt[:70], OTHER.prompt[:60], (1, 2, 3)]
    blend_prompt = BlendPrompt.of(parts, [False, True, False])
    with on_disk(tmp_path) as store:
        engine = Engine(full, chunks=always(ChunkCache(full, store)), store=store)
        ear = Ear()
        recipe = Recipe(0.3, "head", min_gain=0.0)
        engine.add(
            engine.prepare(Request(blend_prompt.ids, GREEDY, documents=blend_prompt.documents, recipe=recipe), ear)
        )
        run(engine, lambda: ear.over)
        engine.close()
        assert store.flush(300)
        restart(full)
        plain = Ask(blend_prompt.ids, GREEDY)
        assert say(engine_over(full, store), plain) == (plain.alone(full), 2 * SIZE)


def test_each_adapter_finds_its_own(tmp_path: Path) -> None:
    """Also one that is switched on by tokens: what stands before them is the base model's."""
    executor = load_small(tmp_path / "base", PAGES, backend="native")
    ask = Ask((*WARM.prompt[:70], 60, *WARM.prompt[71:]), GREEDY)
    executor.load_lora(write_lora(tmp_path / "one", 4, seed=1))
    executor.load_lora(write_lora(tmp_path / "late", 4, seed=2, alora_invocation_tokens=[60]))
    late = executor.adapters.choose("late", ids=ask.prompt)
    assert isinstance(late, Adapted)
    assert late.begins == 70
    choices = [executor.adapters.choose("one"), executor.adapters.choose("one", 0.5), late, Base()]
    with on_disk(tmp_path / "store") as store:
        said = []
        for adapter in choices:
            engine = engine_over(executor, store)
            tokens, cached = say(engine, ask, adapter=adapter)
            assert cached == (2 * SIZE if adapter == Base() else 0)
            said.append(tokens)
            engine.close()
            restart(executor)
            assert store.flush(300)
        engine = engine_over(executor, store)
        for adapter, tokens in zip(choices, said, strict=True):
            assert say(engine, ask, adapter=adapter) == (tokens, 4 * SIZE)


def test_kv_that_no_logits_come_of_is_forgotten_there_too(full: Executor, tmp_path: Path) -> None:
    with on_disk(tmp_path) as store:
        warmed(full, store, WARM)
        engine, sample = engine_over(full, store), full.sample

        def broken(*_given: object, **_more: object) -> object:
            raise NumericsError([0])

        full.sample = broken  # type: ignore[method-assign, assignment]
        try:
            ear = start(engine, WARM)
            run(engine, lambda: ear.over)
        finally:
            full.sample = sample  # type: ignore[method-assign]
        assert isinstance(ear.error, NumericsError)
        assert store.flush(300)
        assert store.usage()["disk"].records == 0
        assert say(engine, WARM) == (WARM.alone(full), 0)


# Time.


@pytest.fixture
def tier(executor: Executor) -> Iterator[Shelfware]:
    """A tier that holds a warm prompt, and whose reads a test may hold up."""
    made = Shelfware()
    with Store(None, [made], limits=PATIENT) as store:
        warmed(executor, store, WARM)
    yield made
    made.reads.set()


def test_others_go_on_while_a_prompt_is_looked_for(executor: Executor, tier: Shelfware) -> None:
    tier.reads.clear()
    with Store(None, [tier], limits=PATIENT) as store:
        engine = engine_over(executor, store)
        slow, short = start(engine, WARM), Ask(OTHER.prompt[:40], GREEDY)
        plain = start(engine, short)
        run(engine, lambda: plain.over)
        assert plain.tokens[0] == short.alone(executor)
        assert not slow.tokens[0]
        assert not engine.ready
        assert engine.wait_timeout_s is not None
        tier.reads.set()
        run(engine, lambda: slow.over)
        assert slow.tokens[0] == WARM.alone(executor)
        assert slow.ends[0] is not None
        assert slow.ends[0].cached == 4 * SIZE


@pytest.mark.parametrize("reads", [0, 1, 3, 9])
def test_a_store_that_does_not_answer_costs_a_plain_prefill(executor: Executor, tier: Shelfware, reads: int) -> None:
    gate = threading.Semaphore(reads)
    tier.each_read = gate.acquire
    with Store(None, [tier], limits=HASTY) as store:
        said, cached = say(engine_over(executor, store), WARM)
        assert said == WARM.alone(executor)
        assert cached in range(0, 4 * SIZE, SIZE)
        gate.release(1000)


def test_whoever_wants_the_same_waits_for_whoever_looks(executor: Executor, tier: Shelfware) -> None:
    tier.reads.clear()
    with Store(None, [tier], limits=PATIENT) as store:
        engine = engine_over(executor, store)
        ears = [start(engine, WARM) for _ in range(6)]
        while engine.ready:
            engine.step()
        tier.reads.set()
        run(engine, lambda: all(ear.over for ear in ears))
        assert [ear.tokens[0] for ear in ears] == [WARM.alone(executor)] * 6
        assert [ear.ends[0] and ear.ends[0].cached for ear in ears] == [4 * SIZE] * 6
        assert count(store, "lookups_total") == 4


def test_more_prompts_than_are_loaded_at_once(executor: Executor, tmp_path: Path) -> None:
    many = [Ask((first, *WARM.prompt[1:100]), GREEDY) for first in range(9)]
    with on_disk(tmp_path) as store:
        warmed(executor, store, *many)
        engine = engine_over(executor, store)
        ears = [start(engine, ask) for ask in many]
        run(engine, lambda: all(ear.over for ear in ears))
        assert [ear.tokens[0] for ear in ears] == [ask.alone(executor) for ask in many]
        assert all(ear.ends[0] is not None and ear.ends[0].cached == 3 * SIZE for ear in ears)


def test_whoever_has_no_room_beside_one_that_looks_waits_for_it(tmp_path: Path) -> None:
    """Nobody runs yet, so nobody could give way; but nobody is out of room either."""
    executor, made = load_small(tmp_path, 8, None, "native"), Shelfware()
    with Store(None, [made], limits=PATIENT) as store:
        warmed(executor, store, WARM)
    made.reads.clear()
    with Store(None, [made], limits=PATIENT) as store:
        engine = engine_over(executor, store)
        ears = [start(engine, ask) for ask in (WARM, OTHER)]
        while engine.ready:
            engine.step()
        assert [ear.error for ear in ears] == [None, None]
        made.reads.set()
        run(engine, lambda: all(ear.over for ear in ears))
        assert [ear.tokens[0] for ear in ears] == [WARM.alone(executor), OTHER.alone(executor)]
        assert executor.pool.usage().used == 0


def test_an_abort_while_looking_lets_others_go_on(executor: Executor, tier: Shelfware) -> None:
    tier.reads.clear()
    with Store(None, [tier], limits=PATIENT) as store:
        engine = engine_over(executor, store)
        first, second = start(engine, WARM, id="first"), start(engine, WARM)
        while engine.ready:
            engine.step()
        engine.abort("first")
        while engine.ready:
            engine.step()
        assert first.reasons == ["cancelled"]
        assert engine.wait_timeout_s is not None  # the second looks for itself now
        tier.reads.set()
        run(engine, lambda: second.over)
        assert second.tokens[0] == WARM.alone(executor)
        assert second.ends[0] is not None
        assert second.ends[0].cached == 4 * SIZE


# What is worth it.


def test_without_a_tier_that_outlives_the_process_nothing_is_kept(full: Executor) -> None:
    with Store(Budget(1 << 28)) as store:
        warmed(full, store, WARM)
        assert store.usage()["memory"].records == 0
        assert say(engine_over(full, store), WARM) == (WARM.alone(full), 0)


def test_it_can_be_turned_off(full: Executor, tmp_path: Path) -> None:
    with on_disk(tmp_path) as store:
        engine = engine_over(full, store, stored_prefix_tokens=None)
        say(engine, WARM)
        engine.close()
        assert store.usage()["disk"].records == 0


def test_a_short_stretch_is_computed(full: Executor, tmp_path: Path) -> None:
    with on_disk(tmp_path) as store:
        warmed(full, store, WARM)
        before = count(store, "lookups_total", kind="prefix")
        engine = engine_over(full, store, stored_prefix_tokens=3 * SIZE)
        short = Ask(WARM.prompt[: 3 * SIZE - 1], GREEDY)
        assert say(engine, short) == (short.alone(full), 0)
        assert count(store, "lookups_total", kind="prefix") == before
        long = Ask(WARM.prompt[20 : 20 + 4 * SIZE], GREEDY)
        assert say(engine, long) == (long.alone(full), 0)
        # Nobody asks for the second page where there is no first.
        assert count(store, "lookups_total", kind="prefix") == before + 1


@pytest.mark.parametrize("tokens", [0, -1, 1.5, True, "64"])
def test_a_least_that_is_none(tokens: object) -> None:
    with pytest.raises(ParamError, match="stored_prefix_tokens"):
        EngineConfig(stored_prefix_tokens=tokens)  # type: ignore[arg-type]


def test_scored_prompts_are_computed(full: Executor, tmp_path: Path) -> None:
    with on_disk(tmp_path) as store:
        warmed(full, store, WARM)
        scored = Ask(WARM.prompt, replace(GREEDY, prompt_logprobs=0))
        engine = engine_over(full, store)
        ear = start(engine, scored)
        run(engine, lambda: ear.over)
        assert sum(len(one.logprobs) for one in ear.scored) == len(WARM.prompt) - 1


# The end.


def test_with_little_room_the_latest_used_is_kept(full: Executor, tmp_path: Path) -> None:
    with on_disk(tmp_path) as store:
        warmed(full, store, WARM)
        page_bytes = store.usage()["disk"].nbytes // 4
    tight = on_disk(tmp_path / "tight", total_bytes=6 * page_bytes)
    with tight as store:
        warmed(full, store, OTHER, WARM)
        assert count(store, "evicted_total") == 0
        engine = engine_over(full, store)
        assert say(engine, WARM) == (WARM.alone(full), 4 * SIZE)
        said, cached = say(engine, OTHER)
        assert said == OTHER.alone(full)
        assert cached <= 2 * SIZE


def test_a_tier_that_does_not_take_anything_does_not_keep_a_close_from_ending(full: Executor) -> None:
    stuck = Shelfware()
    stuck.writes.clear()
    limits = StoreLimits(lookup_s=300, layer_s=300, close_s=0.05, queue_records=2)
    store = Store(None, [stuck], limits=limits)
    engine = engine_over(full, store)
    say(engine, WARM)
    engine.close()
    stuck.writes.set()
    store.close()
    assert len(stuck.records) < 4


def test_a_close_in_the_middle_of_a_lookup(executor: Executor, tier: Shelfware) -> None:
    tier.reads.clear()
    with Store(None, [tier], limits=PATIENT) as store:
        engine = engine_over(executor, store)
        ear = start(engine, WARM)
        while engine.ready:
            engine.step()
        engine.fail_all(RuntimeError("over"))
        engine.close()
        assert ear.reasons == ["error"]
        assert engine.wait_timeout_s is None
        tier.reads.set()
        until(lambda: store.flush(1))


# Everything at once.


def day(engine: Engine, crowd: list[Ask], alone: list[list[int]], dice: random.Random) -> None:
    """Requests come whenever they like, and some leave."""
    waiting = dice.choices(range(len(crowd)), k=20)
    ears: dict[str, tuple[int, Ear]] = {}

    def done() -> bool:
        over = all(ear.over for _, ear in ears.values())
        if waiting and (over or dice.random() < 0.3):
            at, name = waiting.pop(), str(len(ears))
            ears[name] = (at, start(engine, crowd[at], id=name, tenant=dice.choice(["", "", "b"])))
            return False
        if dice.random() < 0.03 and ears:
            engine.abort(dice.choice(list(ears)))
        return over

    run(engine, done)
    for at, ear in ears.values():
        assert ear.error is None
        said = ear.tokens[0]
        assert said == (alone[at] if ear.reasons == ["length"] else alone[at][: len(said)])


@pytest.mark.parametrize("seed", range(6))
def test_whatever_happens_everybody_says_what_they_say_alone(executor: Executor, tmp_path: Path, seed: int) -> None:
    """Random days with few pages, aborts, restarts, a store that loses records, and prompts that begin alike."""
    dice, crowd, restored = random.Random(seed), asks(12, seed, longest=140), 0
    alone = [ask.alone(executor) for ask in crowd]
    for _ in range(4):
        restart(executor)
        taken = executor.pool.take([dice.choice([0, 20, 26])] * len(executor.layout.groups))
        try:
            with on_disk(tmp_path) as store:
                engine = engine_over(executor, store, stored_prefix_tokens=dice.choice([1, 64]))
                day(engine, crowd, alone, dice)
                restored += sum(one["value"] for one in engine.metrics.snapshot()[RESTORED.name]["series"])
                engine.close()
        finally:
            for group, pages in enumerate(taken):
                executor.pool.drop(group, pages)
        for path in sorted((tmp_path / "records").rglob("*.kv")):
            if dice.random() < 0.1:
                path.unlink()
    assert restored > 0
