"""The scheduler against counted pages: nobody starves, no budget is passed, no page is lost, everybody ends once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from counted import Kitchen, next_token
from effort import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvilt.engine.scheduling import scheduler as module
from kvilt.engine.scheduling.plan import GroupPages, PrefixHit, Sample
from kvilt.engine.scheduling.proposals import HoldRows
from kvilt.engine.scheduling.schedule_state import StepLimits
from kvilt.engine.scheduling.scheduler import Scheduler
from kvilt.errors import ParamError

SETTINGS = settings(
    max_examples=examples(250),
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
SIZE = 4


def alone(text: Sequence[int], new: int, index: int = 0) -> tuple[str, list[int]]:
    """What a sample says when nothing else is there."""
    said, reason = list(text), "length"
    while len(said) < len(text) + new:
        said.append(next_token(said if len(said) > len(text) else list(text), index))
        if said[-1] == 7:
            reason = "stop"
            break
    return reason, said[len(text) :]


# Random days.


@dataclass(frozen=True)
class Caller:
    at: int
    text: list[int]
    new: int
    priority: int
    n: int
    leaves: int | None  # steps after it came
    pause: tuple[int, int] | None  # not reading between these steps after it came
    scored: bool  # it wants the log-probabilities of its prompt


texts = st.lists(st.sampled_from([1, 1, 1, 2]), min_size=1, max_size=30)
callers = st.builds(
    Caller,
    at=st.integers(0, 25),
    text=texts,
    new=st.integers(1, 9),
    priority=st.integers(-1, 2),
    n=st.sampled_from([1, 1, 1, 2, 3]),
    leaves=st.one_of(st.none(), st.none(), st.integers(0, 20)),
    pause=st.one_of(st.none(), st.none(), st.tuples(st.integers(0, 10), st.integers(0, 15))),
    scored=st.sampled_from([False, False, True]),
)
days = st.lists(callers, min_size=1, max_size=12)
limits = st.builds(
    lambda rows, more: StepLimits(step_tokens=rows + more, max_rows=rows, page_tokens=SIZE),
    st.integers(1, 6),
    st.integers(0, 12),
)


def spend(day: list[Caller], pages: int, limit: StepLimits, index: bool) -> Kitchen:
    """A day from its first caller until everybody is gone."""
    kitchen = Kitchen(pages, limit, index)
    samples: dict[int, Sample] = {}
    for now in range(10_000):
        for i, caller in enumerate(day):
            if caller.at == now:
                samples[i] = kitchen.add(str(i), caller.text, caller.new, caller.priority, caller.n, caller.scored)
            if caller.leaves is not None and caller.at + caller.leaves == now:
                kitchen.abort(str(i))
            if caller.pause is not None:
                start, stop = (caller.at + caller.pause[0], caller.at + sum(caller.pause))
                for sample in [one for one in kitchen.live if one.request == str(i)]:
                    sample.held = start <= now < stop
        plan = kitchen.step()
        assert plan.starved is None, "a sample that fits the pool alone never starves"
        if now > 60 and not kitchen.scheduler.ready:
            break
    return kitchen


@SETTINGS
@given(day=days, more=st.integers(0, 12), limit=limits, index=st.booleans())
def test_every_sample_ends_once_with_what_it_says_alone(
    day: list[Caller], more: int, limit: StepLimits, index: bool
) -> None:
    pages = more + max(-(-(len(caller.text) + caller.new - 1) // SIZE) for caller in day)
    kitchen = spend(day, pages, limit, index)
    assert sorted(kitchen.ended) == sorted((str(i), k) for i, caller in enumerate(day) for k in range(caller.n))
    assert kitchen.pages.takeable == pages, "no page is lost"
    assert (kitchen.scheduler.running, kitchen.scheduler.waiting) == (0, 0)
    for (name, k), (reason, said) in kitchen.ended.items():
        caller = day[int(name)]
        expected = alone(caller.text, caller.new, k)
        if reason == "cancelled":
            assert caller.leaves is not None
            assert said == expected[1][: len(said)]
        else:
            assert (reason, said) == expected


@SETTINGS
@given(day=days, pages=st.integers(10, 24), limit=limits)
def test_the_same_day_goes_the_same_way(day: list[Caller], pages: int, limit: StepLimits) -> None:
    assert spend(day, pages, limit, True).log == spend(day, pages, limit, True).log


# Budgets and order.


def kitchen(pages: int = 64, step_tokens: int = 16, max_rows: int = 8, index: bool = True) -> Kitchen:
    return Kitchen(pages, StepLimits(step_tokens, max_rows, SIZE), index)


def test_decodes_come_first_and_prompts_share_what_is_left() -> None:
    here = kitchen(step_tokens=10)
    here.add("a", [1] * 4, 9)
    here.step()
    here.add("b", [2] * 20, 9)
    here.add("c", [3] * 5, 9)
    plans = [[(w.sample.request, w.count) for w in here.step().work] for _ in range(3)]
    assert plans == [[("a", 1), ("b", 9)], [("a", 1), ("b", 9)], [("a", 1), ("b", 2), ("c", 5)]]


def test_priority_goes_first_and_arrival_settles_the_rest() -> None:
    here = kitchen(max_rows=1)
    for name, priority in (("a", 1), ("b", 0), ("c", 1), ("d", -1)):
        here.add(name, [1], 1, priority)
    order = [work.sample.request for _ in range(4) for work in here.step().work]
    assert order == ["d", "b", "a", "c"]


def test_nobody_waits_forever_behind_the_important(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PRIORITY_STEPS", 20)
    here = kitchen(max_rows=1)
    here.add("patient", [1, 2, 3], 1, priority=2)
    for i in range(100):
        here.add(f"{i}", [1, 2], 1, priority=0)
        here.step()
        if ("patient", 0) in here.ended:
            break
    assert i <= 2 * 20 + 2


def test_a_large_prompt_is_not_overtaken_forever_by_small_ones() -> None:
    here = kitchen(pages=10, index=False)
    here.add("a", [1] * 16, 8)
    here.step()
    here.add("large", [2] * 32, 4)
    for i in range(60):
        here.add(f"small {i}", [3] * 4, 4)
        here.step()
        if ("large", 0) in here.ended:
            break
    assert ("large", 0) in here.ended
    assert sum(name.startswith("small") for name, _ in here.ended) <= i


def test_more_forks_than_rows_take_turns() -> None:
    here = kitchen(max_rows=2, step_tokens=8)
    here.add("a", [1, 2, 3], 6, n=5)
    plans = []
    while here.scheduler.ready:
        plans.append([work.sample.index for work in here.step().work])
    assert max(map(len, plans)) == 2
    assert plans[:4] == [[0], [1, 2], [3, 4], [0, 1]], "the parent had a row before any of its forks"
    assert len(here.ended) == 5


def test_a_request_waits_while_the_samples_of_another_will_take_its_rows() -> None:
    here = kitchen(max_rows=4, step_tokens=16)
    here.add("a", [1, 2, 3], 6, n=3)
    here.add("b", [4, 5, 6], 6, n=3)
    here.add("c", [7, 8, 9], 6)
    assert [new.sample.request for new in here.step().admitted] == ["a"], "and none overtakes it"
    here.run()
    assert len(here.ended) == 7


def test_as_many_decodes_as_rows_stay_in_their_order() -> None:
    """They need not take turns, so a pause of one of them changes nothing."""
    here = kitchen(max_rows=2, step_tokens=8)
    here.add("a", [1] * 4, 20)
    second = here.add("b", [2] * 4, 20)
    assert len(here.step().work) == 2
    here.scheduler.apply(HoldRows(second, True))
    assert [work.sample.request for work in here.step().work] == ["a"]
    here.scheduler.apply(HoldRows(second, False))
    assert [work.sample.request for work in here.step().work] == ["a", "b"]


@pytest.mark.parametrize(("rows", "tokens"), [(0, 8), (9, 8), (-1, 8)])
def test_limits_that_cannot_work_are_refused(rows: int, tokens: int) -> None:
    with pytest.raises(ParamError, match="max_rows"):
        StepLimits(tokens, rows, SIZE)


# Pages.


def test_admission_promises_no_page_twice() -> None:
    here = kitchen(pages=4, index=False)
    here.add("a", [1] * 7, 5)
    here.step()
    here.add("b", [2] * 7, 1)
    assert not here.step().admitted, "two pages are free, but one of them is the next page of the other"
    here.run()
    assert here.preemptions == 0


def test_forks_in_a_pool_that_holds_only_one_of_them_come_one_after_the_other() -> None:
    here = kitchen(pages=2)
    here.add("a", [1] * 6, 3, n=3)
    here.run()
    assert here.preemptions > 0
    assert [here.ended["a", i] for i in range(3)] == [alone([1] * 6, 3, i) for i in range(3)]


def test_hits_raise_the_number_of_requests_that_run() -> None:
    def most(index: bool) -> int:
        here = kitchen(pages=16, step_tokens=64, index=index)
        here.add("first", [1] * 24, 1)
        here.run()
        for i in range(6):
            here.add(f"{i}", [1] * 24 + [2, i], 3)
        here.run()
        assert len(here.ended) == 7
        return here.most_running

    assert most(index=False) == 2
    assert most(index=True) == 6


def test_idle_pages_that_are_hit_are_not_promised_to_others() -> None:
    here = kitchen(pages=8, step_tokens=64)
    here.add("first", [1] * 24, 1)
    here.run()
    assert here.pages.takeable == 8
    here.add("again", [1] * 25, 4)  # 6 idle pages and one more
    here.add("other", [3] * 8, 4)
    plan = here.step()
    assert [(new.sample.request, new.hit) for new in plan.admitted] == [("again", PrefixHit(24, 6))]
    here.run()


def test_a_prompt_waits_for_one_that_computes_its_beginning() -> None:
    here = kitchen(step_tokens=10)
    here.add("a", [1] * 24 + [5], 2)
    here.step()
    here.add("b", [1] * 24 + [6], 2)
    here.add("c", [4] * 8, 2)
    admitted = []
    while here.scheduler.ready:
        admitted += [(here.steps, new.sample.request, new.hit.tokens) for new in here.step().admitted]
    assert ("b", 24) in [(name, tokens) for _, name, tokens in admitted]
    assert here.computed_tokens == 25 + 1 + 8 + 2 * 3 - 3, "each page of the common beginning once"
    assert [name for _, name, _ in admitted] == ["c", "b"], "and who does not wait for it goes first"


@pytest.mark.parametrize("why", ["aborted", "held"])
def test_who_waits_for_a_beginning_goes_on_alone_when_it_does_not_come(why: str) -> None:
    here = kitchen(step_tokens=8)
    leader = here.add("a", [1] * 24, 2)
    here.step()
    here.add("b", [1] * 24, 2)
    here.step()
    assert here.scheduler.waiting == 1
    if why == "aborted":
        here.abort("a")
    else:
        leader.held = True
    plan = here.step()
    assert [new.sample.request for new in plan.admitted] == ["b"]
    leader.held = False
    here.run()
    assert len(here.ended) == 2


def test_who_waits_for_a_beginning_waits_for_nobody_who_gave_way() -> None:
    here = kitchen(pages=6, step_tokens=4, max_rows=3)
    here.add("z", [9], 16)
    here.step()
    here.step()
    here.add("a", [1] * 16, 2)
    here.step()
    waiter = here.add("b", [1] * 16, 2)
    gone: list[tuple[str, bool]] = []
    while here.scheduler.ready:
        waited = waiter.awaited_page is not None
        gone += [(one.sample.request, waited) for one in here.step().preempted]
    assert ("a", True) in gone, "the one that computed it gave way meanwhile"
    assert here.ended == {
        (name, 0): alone(text, new) for name, text, new in (("z", [9], 16), ("a", [1] * 16, 2), ("b", [1] * 16, 2))
    }


def test_the_last_in_order_gives_its_pages_up_and_comes_back() -> None:
    here = kitchen(pages=6, index=False)
    here.add("a", [1] * 8, 8)
    here.add("b", [2] * 8, 8)
    seen = []
    while here.scheduler.ready:
        seen += [(gone.sample.request, gone.back_by) for gone in here.step().preempted]
    assert seen == [("b", "recompute")]
    assert here.ended["b", 0] == alone([2] * 8, 8)


def test_who_is_not_read_gives_way_first() -> None:
    here = kitchen(pages=6, index=False)
    unread = here.add("a", [1] * 8, 8)
    here.step()
    unread.held = True
    here.add("b", [2] * 16, 8)
    gone = [one.sample.request for _ in range(3) for one in here.step().preempted]
    assert gone == ["a"]
    assert here.live[1].computed > 0
    unread.held = False
    here.run()
    assert len(here.ended) == 2


class Some:
    """So many pages, and nothing found."""

    def __init__(self, pages: int = 8) -> None:
        self.pages = pages

    def groups(self) -> tuple[GroupPages, ...]:
        return (GroupPages(self.pages),)

    def free(self) -> tuple[int, ...]:
        return (self.pages,)

    def reclaim(self) -> bool:
        return False

    def hit(self, sample: Sample, most: int) -> PrefixHit:
        return PrefixHit()

    def loads_prefix(self, sample: Sample, hit: PrefixHit) -> bool:
        return False

    def startable(self) -> int | None:
        return None

    def lacks_states(self) -> bool:
        return False

    def shares_tail(self, sample: Sample) -> bool:
        return True


def test_pages_that_are_only_kept_come_before_anybody_waits_or_gives_way() -> None:
    here = kitchen(pages=12, index=False)
    here.kept = [[here.pages.free.pop()], [], [here.pages.free.pop() for _ in range(5)]]
    here.add("a", [1] * 20, 5)
    assert [new.sample.request for new in here.step().admitted] == ["a"]
    assert len(here.kept) == 3, "no more than is needed"
    here.add("b", [2] * 20, 5)
    assert [new.sample.request for new in here.step().admitted] == ["b"]
    assert not here.kept
    here.run()
    assert here.preemptions == 0


def test_without_anybody_to_give_way_a_plan_names_who_starves() -> None:
    pages = Some(2)
    short, sample = Scheduler(StepLimits(16, 4, SIZE), pages), Sample("a", 8, 12)
    short.add(sample)
    assert short.plan().starved is sample, "two pages, and a third to grow into"
    pages.pages = 3
    assert short.plan().starved is None
    sample.computed, sample.known, pages.pages = 8, 9, 0
    assert short.plan().starved is sample


def test_nothing_starts_beside_a_sample_that_starves() -> None:
    """Its owner hears of it before the pages that it waits for go to others."""
    short, large = Scheduler(StepLimits(16, 4, SIZE), Some(2)), Sample("a", 8, 12, owner="a")
    short.add(large)
    short.add(Sample("b", 1, 3, owner="b"))
    plan = short.plan()
    assert plan.starved is large
    assert not plan.admitted


def test_a_prompt_as_large_as_the_pool_runs_even_where_all_of_it_is_known() -> None:
    here = kitchen(pages=4, step_tokens=16)
    for name in ("a", "b"):
        here.add(name, [1] * 16, 1)
        here.run()
    assert len(here.ended) == 2


def test_a_request_for_kv_alone_ends_without_a_token() -> None:
    here = Scheduler(StepLimits(4, 2, SIZE), Some())
    here.add(Sample("a", 6, 7, draws=False))
    for expected in ([], ["length"]):
        plan = here.plan()
        assert not plan.work[0].draws
        advances = here.commit(plan, [[]])
        assert [one.end for one in advances] == expected
        assert all(one.token is None for one in advances)
    assert not here.ready


def test_work_that_was_not_done_is_planned_again() -> None:
    here = Scheduler(StepLimits(4, 2, SIZE), Some())
    here.add(Sample("a", 3, 9))
    first = here.plan()
    assert here.commit(first, [None]) == []
    second = here.plan()
    assert second.work == first.work
