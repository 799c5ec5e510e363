"""The engine on a tiny model: ends, bad rows, forks, holds and reuse, each against what a request says alone."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest
import torch
from small import CONTEXT, PAGES, Ask, Ear, asks, finish, start, together

from kvilt import Inputs
from kvilt.batch import Batch, Logits
from kvilt.config import EngineConfig
from kvilt.engine import counters
from kvilt.engine.admission import BorrowedKV
from kvilt.engine.counters import ENGINE_METRICS
from kvilt.engine.engine import Engine
from kvilt.engine.event import Event
from kvilt.engine.request import Request
from kvilt.errors import (
    Cancelled,
    ContextOverflow,
    InputError,
    ModelClosed,
    NoTokenLeft,
    NumericsError,
    ParamError,
    PoolExhausted,
)
from kvilt.executor.counters import TOKENS
from kvilt.executor.protocol import Executor
from kvilt.kv.cache import KVCache
from kvilt.sampling.params import SamplingParams

LONG = Ask(tuple(i * 7 % 61 for i in range(90)), SamplingParams(max_tokens=12))

pytestmark = pytest.mark.usefixtures("nothing_left")


def computed(executor: Executor) -> int:
    return int(sum(point["value"] for point in executor.metrics.snapshot()[TOKENS.name]["series"]))


def value(engine: Engine, declaration: Any, **labels: str) -> float:
    series = engine.metrics.snapshot()[declaration.name]["series"]
    return sum(
        point.get("value", point.get("count", 0)) for point in series if labels.items() <= point["labels"].items()
    )


# Ends.


def test_an_abort_at_every_step_frees_pages_at_once_and_touches_nobody(executor: Executor) -> None:
    doomed, neighbours = LONG, asks(3, seed=4)
    expected, others = doomed.alone(executor), [ask.alone(executor) for ask in neighbours]
    steps = 0
    for stop in range(100):
        executor.prefixes.clear()
        engine = Engine(executor, EngineConfig(step_tokens=32, max_rows=8))
        victim = start(engine, doomed, id="doomed")
        ears = [start(engine, ask) for ask in neighbours]
        for _ in range(stop):
            engine.step()
        before = executor.pool.usage().used
        ended = victim.over
        engine.abort("doomed")
        engine.drain_inbox()
        assert victim.over
        if not ended:
            assert victim.reasons == ["cancelled"]
            assert stop == 0 or executor.pool.usage().used < before
        assert victim.tokens[0] == expected[: len(victim.tokens[0])]
        finish(engine)
        assert [ear.tokens[0] for ear in ears] == others
        again = start(engine, doomed)  # on whatever the aborted one left in the index
        finish(engine)
        assert again.tokens[0] == expected
        assert executor.pool.usage().used == 0
        steps = stop
        if ended:
            break
    assert steps > 12


def test_an_abort_of_something_unknown_or_over_is_fine(engine: Engine) -> None:
    ear = start(engine, LONG, id="a")
    finish(engine)
    engine.abort("a")
    engine.abort("never")
    engine.drain_inbox()
    assert ear.reasons == ["length"]


def test_a_listener_that_has_enough_ends_its_request_with_that_token(executor: Executor, engine: Engine) -> None:
    expected = LONG.alone(executor)
    ear = start(engine, LONG, ear=Ear(enough=5))
    finish(engine)
    assert (ear.tokens[0], ear.reasons) == (expected[:5], ["stop"])


def test_stop_tokens_end_a_sample_and_are_told(executor: Executor, engine: Engine) -> None:
    expected = LONG.alone(executor)
    at = expected.index(expected[4])
    ears = [
        start(engine, Ask(LONG.prompt, SamplingParams(max_tokens=12, stop_token_ids=[expected[4]]))),
        start(engine, LONG, end_ids=frozenset({expected[4]})),
    ]
    finish(engine)
    for ear in ears:
        assert (ear.tokens[0], ear.reasons) == (expected[: at + 1], ["stop"])


def test_the_end_of_the_context_is_a_clean_end(executor: Executor, engine: Engine) -> None:
    ear = start(engine, Ask(tuple([5] * (CONTEXT - 3)), SamplingParams()))
    finish(engine)
    assert ear.reasons == ["length"]
    assert len(ear.tokens[0]) == 4


@pytest.mark.parametrize(
    ("request_", "error"),
    [
        (Request([]), InputError),
        (Request([5] * (CONTEXT + 1)), ContextOverflow),
        (Request([5], SamplingParams(logit_bias={99: 1.0})), ParamError),
    ],
)
def test_what_can_never_run_is_refused_before_any_work(engine: Engine, request_: Request, error: type) -> None:
    with pytest.raises(error):
        engine.prepare(request_, Ear())
    assert not engine.ready


def test_a_second_request_of_the_same_id_fails_and_the_first_goes_on(executor: Executor, engine: Engine) -> None:
    first, second = start(engine, LONG, id="a"), start(engine, LONG, id="a")
    finish(engine)
    assert first.tokens[0] == LONG.alone(executor)
    assert isinstance(second.error, InputError)


def test_everything_can_be_ended_with_one_error(engine: Engine) -> None:
    ears = [start(engine, ask) for ask in asks(5, seed=2)]
    engine.step()
    late = start(engine, LONG)
    engine.fail_all(ModelClosed())
    assert all(isinstance(ear.error, ModelClosed) for ear in (*ears, late))
    assert not engine.ready


# Bad rows.

POISON = 60


def poisoned(ask: Ask) -> Ask:
    return Ask((*ask.prompt[:-1], POISON), ask.params)


def clean(count: int, seed: int) -> list[Ask]:
    return [ask for ask in asks(4 * count, seed) if POISON not in ask.prompt][:count]


@pytest.fixture
def raising(executor: Executor, monkeypatch: pytest.MonkeyPatch) -> None:
    """A forward that breaks wherever a row has a certain token."""
    honest = executor.run

    def run(batch: Batch) -> Logits:
        if any(POISON in row.source.ids for row in batch.rows):  # type: ignore[union-attr]
            raise RuntimeError("broken")
        return honest(batch)

    monkeypatch.setattr(executor, "run", run)


@pytest.fixture
def no_numbers(executor: Executor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits that are no numbers wherever a row has a certain token."""
    honest = executor.run

    def run(batch: Batch) -> Logits:
        logits = honest(batch)
        for index, row in enumerate(batch.rows):
            if POISON in row.source.ids:  # type: ignore[union-attr]
                logits.of_row(index).fill_(float("nan"))
        return logits

    monkeypatch.setattr(executor, "run", run)


@pytest.mark.parametrize(("how", "error"), [("raising", RuntimeError), ("no_numbers", NumericsError)])
def test_one_bad_row_fails_alone(
    executor: Executor, engine: Engine, request: pytest.FixtureRequest, how: str, error: type[Exception]
) -> None:
    good = clean(4, seed=9)
    expected = [ask.alone(executor) for ask in good]
    request.getfixturevalue(how)
    bad = [start(engine, poisoned(good[0])), *[start(engine, poisoned(ask), ear=None) for ask in good[1:2]]]
    ears = [start(engine, ask) for ask in good]
    finish(engine)
    assert all(isinstance(ear.error, error) and ear.reasons == ["error"] for ear in bad)
    assert [(ear.tokens[0], ear.reasons) for ear in ears] == [(one, ["length"]) for one in expected]


def test_an_error_that_is_nobodys_input_leaves_its_place_in_the_log(
    engine: Engine, raising: None, caplog: pytest.LogCaptureFixture
) -> None:
    start(engine, poisoned(LONG))
    finish(engine)
    (record,) = [record for record in caplog.records if record.exc_info]
    assert "in run" in logging.Formatter().formatException(record.exc_info)  # type: ignore[arg-type]


def test_kv_behind_logits_that_are_no_numbers_is_found_by_nobody(
    executor: Executor, engine: Engine, no_numbers: None
) -> None:
    bad = Ask((*[3] * 64, POISON), SamplingParams(max_tokens=3))
    start(engine, bad)
    finish(engine)
    after = Ask((*[3] * 64, 4), SamplingParams(max_tokens=3))
    ear = start(engine, after)
    finish(engine)
    assert ear.ends[0] is not None
    assert ear.ends[0].cached == 0


def test_a_row_that_may_draw_nothing_fails_alone(executor: Executor, engine: Engine) -> None:
    nothing = SamplingParams(max_tokens=3, bad_words_ids=[[i] for i in range(61)])
    bad = start(engine, Ask(LONG.prompt, nothing))
    wide = start(engine, Ask(LONG.prompt, replace(nothing, n=3)))
    ears = [start(engine, ask) for ask in asks(3, seed=5)]
    finish(engine)
    assert isinstance(bad.error, NoTokenLeft)
    assert wide.reasons == ["error"] * 3
    assert [ear.tokens[0] for ear in ears] == [ask.alone(executor) for ask in asks(3, seed=5)]


def test_a_listener_that_raises_ends_its_own_request_alone(executor: Executor, engine: Engine) -> None:
    class Deaf(Ear):
        def on_event(self, event: Event) -> bool:
            super().on_event(event)
            raise ValueError("deaf")

    deaf, ear = start(engine, LONG, ear=Deaf()), start(engine, LONG)
    finish(engine)
    assert isinstance(deaf.error, ValueError)
    assert ear.tokens[0] == LONG.alone(executor)


def test_a_cancelled_step_changes_nothing(executor: Executor, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = [ask.alone(executor) for ask in asks(4, seed=6)]
    ears = [start(engine, ask) for ask in asks(4, seed=6)]
    honest, calls = executor.run, iter(range(10**6))

    def often_cancelled(batch: Batch) -> Logits:
        if next(calls) % 2:
            raise Cancelled()
        return honest(batch)

    monkeypatch.setattr(executor, "run", often_cancelled)
    while engine.ready:
        try:
            engine.step()
        except Cancelled:
            continue
    assert [ear.tokens[0] for ear in ears] == expected


def test_an_interrupt_ends_the_rows_of_its_step_and_nothing_else(
    executor: Executor, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    ear = start(engine, LONG, id="a")
    engine.step()
    waiting = start(engine, asks(1, seed=7)[0], id="held")
    engine.hold("held")

    def interrupted(_batch: Batch) -> Logits:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(executor, "run", interrupted)
        engine.step()
    assert isinstance(ear.error, KeyboardInterrupt)
    engine.resume("held")
    finish(engine)
    assert waiting.tokens[0] == asks(1, seed=7)[0].alone(executor)


# Room.


def test_without_room_a_request_fails_with_a_name_and_the_next_one_runs(executor: Executor, engine: Engine) -> None:
    taken = executor.pool.take([PAGES - 1] * len(executor.layout.groups))
    ear = start(engine, LONG)
    finish(engine)
    assert isinstance(ear.error, PoolExhausted)
    for group, pages in enumerate(taken):
        executor.pool.drop(group, pages)
    ear = start(engine, LONG)
    finish(engine)
    assert ear.tokens[0] == LONG.alone(executor)


def test_whoever_can_free_pages_is_asked_before_a_request_fails(executor: Executor) -> None:
    taken = [executor.pool.take([PAGES - 1] * len(executor.layout.groups))]

    def reclaim(_pinned: bool) -> bool:
        if not taken:
            return False
        for group, pages in enumerate(taken.pop()):
            executor.pool.drop(group, pages)
        return True

    engine = Engine(executor, EngineConfig(step_tokens=32, max_rows=8), reclaim=reclaim)
    ear = start(engine, LONG)
    finish(engine)
    assert ear.tokens[0] == LONG.alone(executor)


def test_pages_taken_by_others_between_plan_and_step_cost_a_step_at_most(
    executor: Executor, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = LONG.alone(executor)
    honest, thefts = KVCache.reserve, iter([0, 1, 0, 0, 1, 1, *[0] * 10**4])

    def robbed(self: KVCache, extra: Any) -> None:
        if next(thefts):
            raise PoolExhausted(1, 0, PAGES)
        honest(self, extra)

    monkeypatch.setattr(KVCache, "reserve", robbed)
    ear = start(engine, LONG)
    while engine.ready:
        engine.step()
    assert ear.tokens[0] == expected


def test_hits_evicted_between_plan_and_step_are_computed(
    executor: Executor, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    start(engine, LONG)
    finish(engine)
    honest = executor.prefixes.fork

    def robbed(*given: Any) -> KVCache:
        executor.prefixes.clear()
        return honest(*given)

    monkeypatch.setattr(executor.prefixes, "fork", robbed)
    ear = start(engine, LONG)
    finish(engine)
    assert ear.tokens[0] == LONG.alone(executor)
    assert ear.ends[0] is not None
    assert ear.ends[0].cached == 0


# A prompt being read.


def test_progress_tells_what_is_there_after_each_step(executor: Executor, engine: Engine) -> None:
    first = start(engine, LONG, progress=True)
    finish(engine)
    assert [(one.tokens, one.cached) for one in first.progress] == [(32, 0), (64, 0), (90, 0)]
    again, silent = start(engine, LONG, progress=True), start(engine, LONG)
    finish(engine)
    found = again.ends[0].cached if again.ends[0] else 0
    assert found >= 64
    assert [(one.tokens, one.cached) for one in again.progress] == [(90, found)]
    assert silent.progress == []


def test_progress_never_goes_back_also_where_a_prompt_is_computed_again(executor: Executor) -> None:
    engine = Engine(executor, EngineConfig(step_tokens=32, max_rows=8))
    taken = executor.pool.take([PAGES - 7] * len(executor.layout.groups))
    many = [Ask(tuple((i * k + 3) % 61 for i in range(70)), SamplingParams(max_tokens=40)) for k in (5, 7)]
    ears = [start(engine, ask, progress=True) for ask in many]
    finish(engine)
    for group, pages in enumerate(taken):
        executor.pool.drop(group, pages)
    assert value(engine, counters.PREEMPTIONS) > 0
    for ear in ears:
        told = [one.tokens for one in ear.progress]
        assert told == sorted(set(told)) and told[-1] == 70


def test_counts_of_a_prompt_are_what_was_done_of_it(executor: Executor, engine: Engine) -> None:
    """Computed and found together are the prompt, unless it ended before all of it was read."""
    whole, queued = start(engine, LONG), start(engine, LONG, id="queued")
    engine.abort("queued")
    finish(engine)
    early = start(engine, Ask(LONG.prompt[::-1], LONG.params), id="early")
    engine.step()
    engine.abort("early")
    finish(engine)
    again = start(engine, Ask(LONG.prompt, SamplingParams(max_tokens=2, n=2)))
    finish(engine)
    counts = [[(end.computed, end.cached) for end in ear.ends if end] for ear in (whole, queued, early, again)]
    found = counts[3][0][1]
    assert counts == [[(90, 0)], [(0, 0)], [(32, 0)], [(90 - found, found), (0, 90)]]


# Reuse.


def test_a_prompt_computed_before_is_not_computed_again(executor: Executor, engine: Engine) -> None:
    first = start(engine, LONG)
    finish(engine)
    before = computed(executor)
    again = start(engine, LONG)
    finish(engine)
    assert computed(executor) - before == 90 - 64 + 11, "two whole pages were there; the last token is never an input"
    assert again.tokens == first.tokens
    assert [end.cached for ear in (first, again) if (end := ear.ends[0])] == [0, 64]
    assert value(engine, counters.PREFIX_QUERIES) == 180
    assert value(engine, counters.PREFIX_HITS) == 64


def test_what_was_generated_is_found_too(executor: Executor, engine: Engine) -> None:
    first = start(engine, Ask(LONG.prompt, SamplingParams(max_tokens=12)))
    finish(engine)
    longer = Ask((*LONG.prompt, *first.tokens[0], 5), SamplingParams(max_tokens=3))
    ear = start(engine, longer)
    finish(engine)
    assert ear.ends[0] is not None
    assert ear.ends[0].cached == 96, "three whole pages of 90 prompt tokens and 12 generated ones"
    assert ear.tokens[0] == longer.alone(executor)


def test_a_whole_prompt_that_is_there_costs_one_token(executor: Executor, engine: Engine) -> None:
    even = Ask(LONG.prompt[:64], SamplingParams(max_tokens=1))
    first = start(engine, even)
    finish(engine)
    before = computed(executor)
    again = start(engine, even)
    finish(engine)
    assert computed(executor) - before == 1
    assert again.tokens == first.tokens


def test_the_same_prompts_at_once_are_computed_once(executor: Executor, engine: Engine) -> None:
    before = computed(executor)
    ears = [start(engine, LONG) for _ in range(6)]
    finish(engine)
    assert computed(executor) - before == 64 + 6 * (90 - 64 + 11)
    assert {tuple(ear.tokens[0]) for ear in ears} == {tuple(LONG.alone(executor))}


def test_tenants_find_nothing_of_each_other(executor: Executor, engine: Engine) -> None:
    for tenant in ("a", "b", ""):
        ear = start(engine, LONG, tenant=tenant)
        finish(engine)
        assert ear.ends[0] is not None
        assert ear.ends[0].cached == 0
    ear = start(engine, LONG, tenant="b")
    finish(engine)
    assert ear.ends[0] is not None
    assert ear.ends[0].cached == 64


def test_a_request_may_decline_reuse(executor: Executor, engine: Engine) -> None:
    for _ in range(2):
        ear = start(engine, LONG, reuse=False)
        finish(engine)
        assert ear.ends[0] is not None
        assert ear.ends[0].cached == 0
    assert len(executor.prefixes) == 0


# Borrowed and kept caches.


def test_a_lent_cache_is_the_beginning_also_after_preemption(executor: Executor) -> None:
    """A lent cache may hold what cannot be computed again: here an embedding row."""
    inputs = Inputs([7, *LONG.prompt[:50]], [0], torch.ones(1, executor.spec.hidden_size))
    ask = Ask((0, *LONG.prompt[:50], 9, 8), SamplingParams(max_tokens=60))
    with executor.create_kv_cache() as kv:
        executor.prefill(inputs, kv)
        with kv.fork() as own:
            expected = executor.sample_tokens(60, [9, 8], own)[0]
        engine = Engine(executor, EngineConfig(step_tokens=64, max_rows=8))
        first = [start(engine, one, reuse=False) for one in asks(8, seed=3, longest=120)]
        ear = start(engine, ask, borrowed=BorrowedKV(kv.fork()), priority=1)
        for _ in range(4):
            engine.step()
        taken = executor.pool.take([min(executor.pool.free_pages())] * len(executor.layout.groups))
        finish(engine)
        assert value(engine, counters.PREEMPTIONS) > 0
        for group, pages in enumerate(taken):
            executor.pool.drop(group, pages)
        assert ear.tokens[0] == expected
        assert ear.ends[0] is not None
        assert ear.ends[0].cached == 51
        assert all(one.reasons == ["length"] for one in first)
        assert kv.num_entries == 51
    assert len(executor.prefixes) == 0, "nobody vouches for it, so nobody finds it"


def test_a_lent_cache_must_fit(executor: Executor, engine: Engine) -> None:
    with executor.create_kv_cache(2) as two, executor.create_kv_cache() as one:
        executor.prefill([1, 2, 3], one)
        with pytest.raises(InputError, match="one row"):
            engine.prepare(Request([1, 2, 3], SamplingParams()), Ear(), BorrowedKV(two.fork()))
        with pytest.raises(InputError, match="whole prompt"):
            engine.prepare(Request([1, 2, 3], SamplingParams()), Ear(), BorrowedKV(one.fork()))


def test_kept_kv_holds_all_but_the_last_token_however_a_request_ends(executor: Executor, engine: Engine) -> None:
    expected = LONG.alone(executor)
    for stop in (0, 2, 5, 100):
        ear = start(engine, LONG, id="a", keep_kv=True)
        for _ in range(stop):
            engine.step()
        engine.abort("a")
        engine.drain_inbox()
        assert ear.ends[0] is not None
        kv = ear.ends[0].kv
        assert kv is not None
        with kv:
            said = [*LONG.prompt, *ear.tokens[0]]
            assert kv.tokens() == said[: kv.num_entries]
            assert kv.num_entries == len(said) - 1 or not ear.tokens[0]
            rest = executor.sample_tokens(3, said[kv.num_entries :], kv)[0]
        if ear.tokens[0]:
            assert [*ear.tokens[0], *rest][:12] == expected[: len(ear.tokens[0]) + 3]


def test_kv_alone_is_computed_without_a_token(executor: Executor, engine: Engine) -> None:
    ear = Ear()
    engine.add(engine.prepare(Request(LONG.prompt, keep_kv=True), ear))
    finish(engine)
    assert ear.ends[0] is not None
    assert ear.ends[0].kv is not None
    assert (ear.tokens[0], ear.reasons) == ([], ["length"])
    with ear.ends[0].kv as kv:
        assert kv.tokens() == list(LONG.prompt)


# Samples.


def test_samples_fork_one_prompt_and_each_is_its_own(executor: Executor, engine: Engine) -> None:
    params = SamplingParams(max_tokens=8, temperature=1.0, seed=5)
    before = computed(executor)
    ear = start(engine, Ask(LONG.prompt, replace(params, n=5)))
    finish(engine)
    assert computed(executor) - before == 90 + 5 * 7
    assert len({tuple(tokens) for tokens in ear.tokens}) == 5
    assert ear.tokens[0] == Ask(LONG.prompt, params).alone(executor)
    assert [end.cached for end in ear.ends if end] == [0, 90, 90, 90, 90]
    assert value(engine, counters.FORKS) == 4


def test_samples_that_do_not_fit_together_come_one_after_the_other(executor: Executor) -> None:
    params = SamplingParams(max_tokens=100, temperature=1.0, seed=5, n=4)
    wide = together(executor, [Ask(LONG.prompt, params)])[0]
    executor.prefixes.clear()
    taken = executor.pool.take([PAGES - 7] * len(executor.layout.groups))
    engine = Engine(executor)
    ear = start(engine, Ask(LONG.prompt, params))
    finish(engine)
    assert ear.tokens == wide.tokens
    assert value(engine, counters.PREEMPTIONS) > 0
    for group, pages in enumerate(taken):
        executor.pool.drop(group, pages)


@pytest.mark.parametrize("stop", [0, 1, 4, 8])
def test_an_abort_ends_every_sample_once(engine: Engine, stop: int) -> None:
    ear = start(engine, Ask(LONG.prompt, SamplingParams(max_tokens=50, n=4)), id="a")
    for _ in range(stop):
        engine.step()
    engine.abort("a")
    engine.abort("a")
    engine.drain_inbox()
    assert ear.reasons == ["cancelled"] * 4
    assert not engine.ready


# Holding.


def test_a_held_request_gets_no_row_and_gives_way(executor: Executor) -> None:
    engine = Engine(executor)
    held = start(engine, Ask(LONG.prompt, SamplingParams(max_tokens=30)), id="held")
    for _ in range(3):
        engine.step()
    engine.hold("held")
    said = list(held.tokens[0])
    taken = executor.pool.take([PAGES - 5] * len(executor.layout.groups))
    other = start(engine, asks(1, seed=8)[0])
    finish(engine)
    assert other.reasons == ["length"]
    assert held.tokens[0] == said
    assert value(engine, counters.PREEMPTIONS) == 1
    for group, pages in enumerate(taken):
        executor.pool.drop(group, pages)
    engine.resume("held")
    finish(engine)
    assert held.tokens[0] == Ask(LONG.prompt, SamplingParams(max_tokens=30)).alone(executor)


def test_a_request_may_arrive_held(engine: Engine) -> None:
    ear = Ear()
    engine.add(engine.prepare(Request(LONG.prompt, LONG.params, id="a"), ear), held=True)
    assert not engine.step()
    engine.resume("a")
    finish(engine)
    assert ear.reasons == ["length"]


# Numbers.


def test_what_happens_is_counted_under_known_names(executor: Executor, engine: Engine) -> None:
    names = {declaration.name for declaration in ENGINE_METRICS}
    assert {f"kvilt_{name}" for name in NAMES} <= names
    for ask in (LONG, LONG):
        start(engine, ask)
    start(engine, LONG, id="gone")
    engine.step()
    assert value(engine, counters.RUNNING) == 1
    assert value(engine, counters.WAITING) == 2
    assert 0 < value(engine, counters.KV_USAGE) <= 1
    assert value(engine, counters.KV_BYTES, tier="memory") == executor.pool.usage().used_bytes
    engine.abort("gone")
    finish(engine)
    assert value(engine, counters.GENERATED) == 24
    assert value(engine, counters.PROMPT_TOKENS) == 180
    assert value(engine, counters.SUCCESS, finished_reason="length") == 2
    assert value(engine, counters.SUCCESS, finished_reason="cancelled") == 1
    assert value(engine, counters.FIRST_TOKEN) == 2
    assert value(engine, counters.NEXT_TOKEN) == 22
    assert value(engine, counters.WHOLE) == 3
    assert value(engine, counters.QUEUED) == 2


def test_gauges_are_true_where_no_step_follows(executor: Executor, engine: Engine) -> None:
    """Whatever ends the last request ends what is shown of it: an abort between two steps, or an end of everything."""
    for leave in (
        lambda: (engine.abort("a"), engine.abort("b"), engine.drain_inbox()),
        lambda: engine.fail_all(InputError("the end")),
    ):
        for name in "ab":
            start(engine, LONG, id=name)
        engine.step()
        assert value(engine, counters.RUNNING) + value(engine, counters.WAITING) == 2
        leave()
        assert (value(engine, counters.RUNNING), value(engine, counters.WAITING)) == (0, 0)
        assert value(engine, counters.KV_USAGE) == 0
        assert value(engine, counters.KV_BYTES, tier="memory") == 0


NAMES = (
    "num_requests_running",
    "num_requests_waiting",
    "kv_cache_usage_perc",
    "prefix_cache_queries_total",
    "prefix_cache_hits_total",
    "prompt_tokens_total",
    "generation_tokens_total",
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
    "e2e_request_latency_seconds",
    "request_queue_time_seconds",
    "request_success_total",
    "num_preemptions_total",
    "kv_forks_total",
    "kv_handles",
    "kv_bytes",
)


def test_a_log_line_names_its_request_and_stays_one_line(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "kvilt.engine"):
        start(engine, LONG, id="a\r\nforged line")
        finish(engine)
    (record,) = [record for record in caplog.records if "ended" in record.message]
    assert record.request_id == "a\r\nforged line"  # type: ignore[attr-defined]
    assert record.finished_reason == "length"  # type: ignore[attr-defined]
    assert len(record.getMessage().splitlines()) == 1


@pytest.mark.parametrize(("error", "level"), [(RuntimeError("broken"), "WARNING"), (InputError("yours"), "INFO")])
def test_a_log_line_says_why_a_request_failed_and_not_what_it_said(
    engine: Engine, caplog: pytest.LogCaptureFixture, error: Exception, level: str
) -> None:
    with caplog.at_level(logging.INFO, "kvilt.engine"):
        start(engine, LONG, id="a")
        engine.step()
        engine.fail_all(error)
    (record,) = [record for record in caplog.records if "ended" in record.message]
    assert (record.levelname, record.error, record.request_id) == (level, type(error).__name__, "a")  # type: ignore[attr-defined]
    assert f"ended (error: {type(error).__name__})" in record.getMessage()
    assert str(error) not in record.getMessage()
