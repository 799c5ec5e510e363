"""Engines on pools whose window group has few pages: pages are counted by group, and nobody waits for ever."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from effort import examples
from hypothesis import example, given, settings
from hypothesis import strategies as st
from small import Ask, Ear, asks, finish, load_mixed, run, start, together
from tiny import VOCAB, write_tiny_mixed

from kvilt.blend.chunk import ChunkCache
from kvilt.blend.recipe import BlendPrompt, Recipe
from kvilt.config import EngineConfig, RunConfig
from kvilt.engine import counters, rows
from kvilt.engine.admission import BorrowedKV
from kvilt.engine.engine import Engine
from kvilt.engine.handles.handles import Handles
from kvilt.engine.request import Request
from kvilt.engine.scheduling.page_counts import PageCounts
from kvilt.engine.scheduling.plan import BlendProgress, GroupPages, PrefixHit, Sample
from kvilt.errors import PoolExhausted
from kvilt.executor.executor import ModelExecutor
from kvilt.executor.load import load_executor
from kvilt.kv.sizing import split_memory
from kvilt.sampling.params import SamplingParams
from kvilt.store.disk import Disk
from kvilt.store.store import Store, StoreLimits
from kvilt.store.tier import Budget

FEW = (40, 12)
PATIENT = StoreLimits(lookup_s=300, layer_s=300, close_s=300)
CONFIG = EngineConfig(step_tokens=64, max_rows=8)
LONG = Ask(tuple((i * 17 + i // 7) % VOCAB for i in range(400)), SamplingParams(max_tokens=60, temperature=0.0))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("mixed")


@pytest.fixture(scope="module")
def roomy(folder: Path) -> ModelExecutor:
    """What every request says: an executor that runs out of nothing."""
    return load_mixed(folder, (200, 200), backend="native")


@pytest.fixture
def few(folder: Path) -> Iterator[ModelExecutor]:
    executor = load_mixed(folder, FEW, backend="native")
    yield executor
    executor.prefixes.clear()
    assert executor.pool.free_pages() == FEW


@pytest.fixture(autouse=True)
def every_plan_keeps_its_word(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planned row finds its pages: nobody else takes any here."""
    reserve = rows._reserve

    def checked(*args: Any) -> bool:
        assert reserve(*args), "a plan promised pages that are not there"
        return True

    monkeypatch.setattr(rows, "_reserve", checked)


def preemptions(engine: Engine) -> int:
    return int(engine.metrics.snapshot()[counters.PREEMPTIONS.name]["series"][0]["value"])


# Counting.

GROUPS = (GroupPages(100), GroupPages(20, window=4))


def test_a_window_group_needs_a_window_and_a_step() -> None:
    counts = PageCounts(32, 64, GROUPS)
    sample = Sample("a", prompt=1000, limit=1100)
    assert counts.need(sample, 64) == 2, "of each group, before any is given back"
    assert counts.whole(sample, PrefixHit(), alone=True) == [32, 6]
    assert counts.whole(sample, PrefixHit(640, idle=20), alone=True) == [32, 6]
    assert counts.promised(sample) == [32, 6]
    sample.computed = 640
    assert (counts.taken(sample), counts.all(sample), counts.promised(sample)) == ([20, 6], [32, 6], [12, 4])
    sample.known, sample.computed = 1000, 999
    assert (counts.taken(sample), counts.all(sample), counts.promised(sample)) == ([32, 4], [32, 4], [0, 0])
    sample.known, sample.computed = 1025, 1024
    assert counts.promised(sample) == [1, 1]
    for most, pages in ((0, 6), (32, 5), (33, 6), (1000, 6)):
        sample = Sample("a", prompt=1000, limit=1100, max_step_tokens=most)
        assert counts.whole(sample, PrefixHit(), alone=True) == [32, pages], "a step is the smaller of both limits"
    short = Sample("b", prompt=40, limit=60)
    assert counts.whole(short, PrefixHit(), alone=True) == [2, 2]


def test_a_blended_stretch_is_held_as_a_whole() -> None:
    counts = PageCounts(32, 64, GROUPS)
    progress = BlendProgress(64, 512, 40)
    sample = Sample("a", prompt=512, limit=600, blend_progress=progress)
    assert counts.whole(sample, PrefixHit(), alone=True) == [17 + 2] * 2
    sample.computed, sample.known = 512, 513
    sample.blend_progress = BlendProgress(64, 512, 40, begun=True)
    assert counts.all(sample) == [17, 4], "its windows have given the rest back"


def test_a_share_is_that_of_the_scarcest_group() -> None:
    counts = PageCounts(32, 64, GROUPS)
    assert counts.share([10, 1]) == 10
    assert counts.share([10, 4]) == 20
    assert PageCounts(32, 64, (GroupPages(7),)).share([5]) == 5


# Running.


def test_longer_sequences_fit_the_same_memory(folder: Path, roomy: ModelExecutor) -> None:
    """In the memory of 14 pages of each group there is room for 24 and 9."""
    shapes = [group.shape.page_bytes for group in roomy.layout.groups]
    assert 24 * shapes[0] + 9 * shapes[1] == 14 * sum(shapes)
    expected = LONG.alone(roomy)
    equal, few = (together(load_mixed(folder, n, backend="native"), [LONG], CONFIG)[0] for n in ((14, 14), (24, 9)))
    assert equal.tokens[0] == expected[: 14 * 32 + 1 - len(LONG.prompt)], "its KV memory is full"
    assert few.tokens[0] == expected


def test_answers_are_the_same_while_the_window_group_runs_out(few: ModelExecutor, roomy: ModelExecutor) -> None:
    many = [LONG, *asks(12, seed=4, longest=200)]
    engine = Engine(few, CONFIG)
    ears = [start(engine, ask) for ask in many]
    finish(engine)
    assert [ear.tokens[0] for ear in ears] == [ask.alone(roomy) for ask in many]
    assert preemptions(engine) > 0, "their windows do not fit side by side to the end"
    assert few.pool.free_pages() == FEW


def test_forks_of_a_prompt(few: ModelExecutor, roomy: ModelExecutor) -> None:
    ask = Ask(LONG.prompt[:150], SamplingParams(max_tokens=70, n=4, temperature=0.9, seed=5))
    ears = [together(executor, [ask], CONFIG)[0] for executor in (roomy, few)]
    assert ears[0].tokens == ears[1].tokens
    assert ears[1].reasons == ["length"] * 4


@example(64476, 18, 11, 9)  # a plan admits a sample and preempts it for another owner, so it must not get a cache
@example(854475, 35, 10, 10)
@given(st.integers(0, 10**6), st.integers(16, 40), st.integers(9, 20), st.integers(1, 10))
@settings(max_examples=examples(12), deadline=None)
def test_every_mix_of_requests_ends_with_its_own_answer(
    folder: Path, roomy: ModelExecutor, seed: int, pages: int, window: int, count: int
) -> None:
    dice = random.Random(seed)
    executor = load_mixed(folder, (pages, min(pages, window)), backend="native")
    config = EngineConfig(step_tokens=dice.choice([16, 64, 200]), max_rows=dice.choice([2, 8]))
    many = asks(count, seed, longest=350)
    engine = Engine(executor, config)
    ears = [start(engine, ask, owner=dice.choice("ab"), priority=dice.randrange(2)) for ask in many]
    finish(engine)
    assert [ear.tokens[0] for ear in ears] == [ask.alone(roomy) for ask in many]
    executor.prefixes.clear()
    assert executor.pool.free_pages() == executor.pool.group_pages


def test_a_prompt_finds_its_prefix(few: ModelExecutor, roomy: ModelExecutor) -> None:
    engine = Engine(few, CONFIG)
    for _ in range(2):
        ear = start(engine, LONG)
        finish(engine)
        assert ear.tokens[0] == LONG.alone(roomy)
    assert ear.ends[0] is not None
    assert ear.ends[0].cached == 384, "its windows are still known"
    more = Ask((*LONG.prompt, *ear.tokens[0], 5), SamplingParams(max_tokens=9, temperature=0.0))
    ear = start(engine, more)
    finish(engine)
    assert ear.tokens[0] == more.alone(roomy)
    assert ear.ends[0] is not None
    assert ear.ends[0].cached == 448, "the whole pages of the conversation so far"


def test_a_lent_cache_is_continued(few: ModelExecutor, roomy: ModelExecutor) -> None:
    """What is lent is held beside what continues it: two windows, and a step."""
    with few.create_kv_cache() as kv:
        few.prefill(LONG.prompt[:300], kv)
        engine = Engine(few, CONFIG)
        ear = start(engine, LONG, borrowed=BorrowedKV(kv.fork()))
        finish(engine)
        assert ear.tokens[0] == LONG.alone(roomy)
        assert kv.lengths == (300,)


def test_handles_give_way_to_requests(few: ModelExecutor, roomy: ModelExecutor) -> None:
    handles = Handles(few, EngineConfig(handle_share=0.6))
    for n in range(3):
        kv = few.create_kv_cache()
        few.prefill([n, *LONG.prompt[:150]], kv)
        handles.keep("", kv)
    assert [one.resident for one in handles.owned("")].count(True) == 2, "three windows are more than its share"
    engine = Engine(few, CONFIG, reclaim=handles.evict_one)
    ear = start(engine, LONG)
    finish(engine)
    assert ear.tokens[0] == LONG.alone(roomy)
    handles.close()


def test_an_owner_of_many_short_samples_leaves_others_their_share(few: ModelExecutor, roomy: ModelExecutor) -> None:
    """They fill the window group and little of the other: it is the share of the window group that counts."""
    crowd = [Ask((n, *LONG.prompt[:60]), SamplingParams(max_tokens=80, temperature=0.0)) for n in range(8)]
    other = Ask(LONG.prompt[:70], SamplingParams(max_tokens=4, temperature=0.0))
    engine = Engine(few, CONFIG)
    ears = [start(engine, ask, owner="crowd") for ask in crowd]
    for _ in range(6):
        engine.step()
    assert min(few.pool.free_pages()) < 3
    ear, steps = start(engine, other, owner="other"), 0
    while not ear.over:
        engine.step()
        steps += 1
    assert steps < 12
    finish(engine)
    assert [one.tokens[0] for one in (*ears, ear)] == [one.alone(roomy) for one in (*crowd, other)]


def test_stored_prefixes_longer_than_the_window_group_come_back(
    folder: Path, tmp_path: Path, roomy: ModelExecutor
) -> None:
    prompt = Ask((*LONG.prompt, 1), SamplingParams(max_tokens=5, temperature=0.0))
    for cached in (0, 384):
        executor = load_mixed(folder, (40, 9), backend="native")
        with Store(None, [Disk(tmp_path, Budget(1 << 28))], limits=PATIENT) as store:
            engine = Engine(executor, CONFIG, store=store)
            ear = start(engine, prompt)
            run(engine, lambda ear=ear: ear.over)  # type: ignore[misc]
            assert ear.tokens[0] == prompt.alone(roomy)
            assert ear.ends[0] is not None
            assert ear.ends[0].cached == cached
            engine.close()
            assert store.flush(300)


def test_a_prompt_that_windows_cannot_hold_is_computed_instead_of_blended(few: ModelExecutor) -> None:
    recipe = Recipe(0.3, "head", check_layer=0, min_gain=0.0)
    with Store(Budget(1 << 24)) as store:
        chunks = ChunkCache(few, store)
        for size, blended in ((60, True), (300, False)):
            segments = [[7] * 5, [n % VOCAB for n in range(size)], [1, 2, 3]]
            made = BlendPrompt.of(segments, [False, True, False])
            engine, ear = Engine(few, CONFIG, chunks=lambda: chunks), Ear()
            asked = Request(
                made.ids, SamplingParams(max_tokens=4, temperature=0.0), documents=made.documents, recipe=recipe
            )
            job = engine.prepare(asked, ear)
            assert (job.first.blending is not None) == blended
            engine.add(job)
            run(engine, lambda ear=ear: ear.over)  # type: ignore[misc]
            assert ear.reasons == ["length"]


# Loading.


def test_a_loaded_pool_is_split(tmp_path: Path) -> None:
    folder, memory = write_tiny_mixed(tmp_path, 40, context=1 << 16), 1 << 21
    loaded = load_executor(folder, RunConfig(kv_memory=memory, threads=1, backend="native"))
    pool = loaded.pool
    assert pool.group_pages == split_memory(pool.layout, memory, 1 << 16) == (1149, 107)
    assert (pool.small_groups, memory // pool.layout.page_bytes) == ((1,), 455)
    assert pool.nbytes <= memory
    assert pool.step_tokens is not None
    with loaded.create_kv_cache() as kv, loaded.create_kv_cache() as other:
        loaded.prefill(LONG.prompt * 20, kv)  # 8,000 tokens: more than twice what the window group has
        assert [len(pages) for pages in kv.pages()] == [250, 3]
        loaded.prefill(LONG.prompt, other)
    short = load_executor(folder, RunConfig(kv_memory=memory, threads=1, max_context=512))
    assert short.pool.group_pages == (455, 455), "no sequence is longer than two windows and a step"


def test_gauges_count_all_groups(few: ModelExecutor) -> None:
    engine = Engine(few, CONFIG)
    ear = start(engine, Ask(LONG.prompt[:200], SamplingParams(max_tokens=3)))
    while few.pool.free_pages()[0] > 34:
        engine.step()
    used = [n - free for n, free in zip(FEW, few.pool.free_pages(), strict=True)]
    usage = engine.metrics.snapshot()[counters.KV_USAGE.name]["series"][0]["value"]
    assert usage == pytest.approx(sum(used) / sum(FEW))
    finish(engine)
    assert ear.over


def test_what_starves_names_the_scarcest_group(folder: Path) -> None:
    executor = load_mixed(folder, (40, 9), backend="native")
    taken = executor.pool.take([0, 8])
    (ear,) = together(executor, [LONG], CONFIG)
    assert isinstance(ear.error, PoolExhausted)
    assert (ear.error.free, ear.error.total) == (1, 9)
    executor.pool.drop(1, taken[1])
