"""Owners share steps and pages: whatever the others do, each gets the smaller of its demand and half its fair share."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

import pytest
from counted import Kitchen
from effort import examples
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st

from kvilt.engine.scheduling.admission_policy import PATIENCE_STEPS
from kvilt.engine.scheduling.fairness import Account, Owners, Share, max_min
from kvilt.engine.scheduling.plan import Sample
from kvilt.engine.scheduling.proposals import HoldRows
from kvilt.engine.scheduling.schedule_state import StepLimits

SETTINGS = settings(
    max_examples=examples(120), derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow]
)
SIZE, WINDOW = 4, 50


# Dividing.


@SETTINGS
@given(
    total=st.integers(0, 300),
    owners=st.lists(st.tuples(st.integers(0, 200), st.sampled_from([0.5, 1.0, 1.0, 3.0])), min_size=1, max_size=9),
)
@example(total=2, owners=[(1, 1.0), (5, 0.5), (5, 0.5)])  # what cannot be divided goes to an owner that wants it
def test_max_min_wastes_nothing_and_gives_each_its_part(total: int, owners: list[tuple[int, float]]) -> None:
    demands = {str(i): demand for i, (demand, _) in enumerate(owners)}
    accounts = {str(i): Account(weight) for i, (_, weight) in enumerate(owners)}
    given_ = max_min(total, demands, accounts, list(demands))
    assert sum(given_.values()) == min(total, sum(demands.values()))
    hungry = Owners({owner: account.weight for owner, account in accounts.items()})
    for owner in demands:
        if demands[owner]:
            hungry.add_sample(owner)
    rights = hungry.rights(total)
    for owner, units in given_.items():
        assert min(demands[owner], rights.get(owner, 0)) <= units <= demands[owner]


def test_an_owner_that_is_alone_may_take_everything() -> None:
    owners = Owners({})
    owners.add_sample("a")
    assert owners.shares(8, 64, lambda: {"a": [1]}) == {"a": Share(8, 64)}
    owners.add_sample("b")
    assert owners.shares(8, 64, lambda: {"a": [1], "b": [9, 90]}) == {"a": Share(1, 1), "b": Share(2, 63)}


def test_an_owner_without_samples_has_no_part_of_anything() -> None:
    owners = Owners({"a": 3.0})
    for owner in ("a", "a", "b"):
        owners.add_sample(owner)
    assert owners.rights(8) == {"a": 6, "b": 2}
    owners.remove_sample("a")
    assert owners.rights(8) == {"a": 6, "b": 2}, "one sample is left"
    owners.remove_sample("a")
    assert owners.rights(8) == {"b": 8}


# Windows.


@dataclass(frozen=True)
class Caller:
    """One request of an owner."""

    at: int
    owner: int
    text: int  # tokens
    new: int
    n: int
    priority: int


@dataclass
class Ledger:
    """What each owner was given in each step, and what it had a right to."""

    kitchen: Kitchen
    weights: dict[str, float]
    given: list[Counter[str]] = field(default_factory=list)
    owed: list[Counter[str]] = field(default_factory=list)

    def step(self) -> None:
        owed = self._owed()
        plan = self.kitchen.step()
        assert plan.starved is None
        given_: Counter[str] = Counter()
        for work in plan.work:
            given_[work.sample.owner] += work.count
        self.owed.append(owed)
        self.given.append(given_)

    def _owed(self) -> Counter[str]:
        """The smaller of demand and fair share of each owner, in tokens of the next step."""
        limits, live = self.kitchen.limits, self.kitchen.live
        owners = sorted({sample.owner for sample in live})
        weight = sum(self.weights[owner] for owner in owners)
        owed: Counter[str] = Counter()
        for owner in owners:
            part = self.weights[owner] / weight
            own = sorted((one for one in live if one.owner == owner), key=lambda one: (one.uncomputed > 1, one.rank))
            demand = self._demand(own, limits.max_rows * part, int(self.kitchen.pages.total * part))
            owed[owner] = min(demand, limits.step_tokens * part)  # type: ignore[assignment]
        return owed

    def _demand(self, own: list[Sample], rows: float, pages: int) -> float:
        """Tokens that fit into an owner's share of rows, and into its share of pages."""
        tokens, used, width = 0.0, 0, 0
        for sample in own:
            used, width = used + -(-(sample.limit + SIZE) // SIZE), width + sample.width
            if used > pages or (tokens and width > rows):
                break  # what comes next waits for it, as its owner's own order wants it
            tokens += sample.uncomputed
        return tokens * min(1.0, rows)

    def check(self) -> int:
        """Hold every window in which an owner wants something all the time against half of what it was owed."""
        windows = 0
        for owner in self.weights:
            given_ = [step[owner] for step in self.given]
            owed = [step[owner] for step in self.owed]
            for start in range(len(given_) - WINDOW + 1):
                window = slice(start, start + WINDOW)
                if all(owed[window]):
                    windows += 1
                    assert sum(given_[window]) >= sum(owed[window]) / 2, (owner, start, given_[window], owed[window])
        return windows


greedy = st.builds(
    Caller,
    at=st.integers(0, 30),
    owner=st.just(0),
    text=st.integers(1, 60),
    new=st.integers(1, 80),
    n=st.sampled_from([1, 2, 5]),
    priority=st.sampled_from([-2, 0]),
)
others = st.builds(
    Caller,
    at=st.integers(0, 120),
    owner=st.integers(1, 3),
    text=st.integers(1, 40),
    new=st.integers(1, 30),
    n=st.sampled_from([1, 1, 2]),
    priority=st.integers(-1, 1),
)


@settings(SETTINGS, max_examples=examples(60), phases=[Phase.generate])
@given(
    crowd=st.lists(greedy, min_size=8, max_size=40),
    rest=st.lists(others, min_size=1, max_size=10),
    weights=st.tuples(*[st.sampled_from([1.0, 1.0, 2.0])] * 4),
    rows=st.integers(4, 10),
    more=st.integers(0, 40),
    pages=st.integers(200, 400),
)
def test_every_window_gives_each_owner_its_due_whatever_the_others_do(
    crowd: list[Caller], rest: list[Caller], weights: tuple[float, ...], rows: int, more: int, pages: int
) -> None:
    spend([*crowd, *rest], dict(zip("0123", weights, strict=True)), StepLimits(rows + more, rows, SIZE), pages).check()


def spend(callers: list[Caller], weights: dict[str, float], limits: StepLimits, pages: int) -> Ledger:
    """A day from its first caller until all are gone."""
    kitchen = Kitchen(pages, limits, index=False, weights=weights)
    ledger = Ledger(kitchen, weights)
    for now in range(5_000):
        for i, caller in enumerate(callers):
            if caller.at == now:
                text = [10 + caller.owner] * caller.text
                kitchen.add(str(i), text, caller.new, caller.priority, caller.n, owner=str(caller.owner))
        if now > 120 and not kitchen.live:
            return ledger
        ledger.step()
    raise AssertionError("the day does not end")


@pytest.mark.parametrize("seed", range(4))
def test_owners_that_always_want_more_get_their_due_beside_a_crowd(seed: int) -> None:
    dice = random.Random(seed)
    crowd = [Caller(dice.randrange(30), 0, dice.randrange(1, 60), 60, dice.choice([1, 5]), -2) for _ in range(80)]
    rest = [Caller(dice.randrange(200), 1 + i % 3, dice.randrange(1, 60), 30, 1, 0) for i in range(60)]
    weights = {"0": 1.0, "1": 1.0, "2": 2.0, "3": 0.5}
    ledger = spend([*crowd, *rest], weights, StepLimits(24, 8, SIZE), 150)
    assert ledger.check() > 300
    assert ledger.kitchen.preemptions > 0


def shared(pages: int = 400, step_tokens: int = 32, max_rows: int = 8, **weights: float) -> Kitchen:
    return Kitchen(pages, StepLimits(step_tokens, max_rows, SIZE), index=False, weights=weights)


def served(kitchen: Kitchen, steps: int) -> Counter[str]:
    """Tokens that each owner was given in the next steps."""
    tokens: Counter[str] = Counter()
    for _ in range(steps):
        for work in kitchen.step().work:
            tokens[work.sample.owner] += work.count
    return tokens


def test_a_newcomer_does_not_wait_behind_a_thousand_requests_of_another_owner() -> None:
    here = shared()
    for i in range(1000):
        here.add(f"crowd {i}", [1] * 30, 40, priority=-5, owner="crowd")
    served(here, 20)
    assert here.scheduler.running >= 8, "all rows are taken"
    here.add("one", [2] * 10, 5, owner="one")
    for _ in range(6):
        here.step()
    assert ("one", 0) in here.ended


def test_a_newcomer_gets_pages_of_an_owner_that_holds_more_than_its_share() -> None:
    here = shared(pages=40)
    for i in range(20):
        here.add(f"crowd {i}", [1] * 8, 60, owner="crowd")
    served(here, 30)
    assert here.pages.takeable < 10
    here.add("one", [2] * 40, 8, owner="one")
    for _ in range(12):
        here.step()
    assert ("one", 0) in here.ended
    assert here.preemptions > 0
    here.run()
    assert len(here.ended) == 21


def test_no_more_samples_are_preempted_than_a_newcomer_needs() -> None:
    here = shared(pages=8)
    for i in range(3):
        here.add(f"crowd {i}", [1] * 5, 3, owner="crowd")  # two pages each, six of eight
    here.step()
    here.add("one", [2] * 12, 4, owner="one")  # four pages: the two that are free, and those of one sample
    assert [gone.sample.request for gone in here.step().preempted] == ["crowd 2"]
    assert [new.sample.request for new in here.step().admitted] == ["one"]


def test_where_a_sample_does_not_fit_no_other_owner_goes_past_its_share() -> None:
    """Otherwise small requests of one owner would take every page that the large one waits for."""
    here = shared(pages=8)
    here.add("first", [2] * 9, 3, owner="small")  # three pages of the four that are its owner's
    here.step()
    here.add("large", [1] * 20, 4, owner="large")
    here.add("second", [2] * 5, 3, owner="small")  # two pages, and five are free
    assert not here.step().admitted
    here.run()
    assert len(here.ended) == 3


def test_an_owner_within_its_share_of_pages_is_not_preempted_for_another() -> None:
    here = shared(pages=40)
    here.add("steady", [2] * 40, 36, owner="one")  # 19 pages at its end, of 20 that are its own
    here.step()
    for i in range(20):
        here.add(f"crowd {i}", [1] * 8, 60, priority=-5, owner="crowd")
    gone: list[str] = []
    while ("steady", 0) not in here.ended:
        gone += [one.sample.owner for one in here.step().preempted]
    assert "crowd" in gone
    assert "one" not in gone


@pytest.mark.parametrize(("weight", "low", "high"), [(1.0, 0.45, 0.55), (3.0, 0.7, 0.8)])
def test_weights_divide_what_all_want(weight: float, low: float, high: float) -> None:
    here = shared(pages=4000, a=weight, b=1.0)
    for i in range(60):
        here.add(f"a {i}", [1] * 100, 1, owner="a")
        here.add(f"b {i}", [2] * 100, 1, owner="b")
    tokens = served(here, 60)
    assert low <= tokens["a"] / tokens.total() <= high
    assert tokens.total() == 60 * 32, "nothing is wasted"


def test_what_an_owner_cannot_use_goes_to_the_others() -> None:
    here = shared(pages=60)
    here.add("running", [1] * 100, 120, owner="a")  # 26 pages, and more as it grows
    here.step()
    here.add("large", [2] * 200, 4, owner="b")  # 51 pages: not before the other is done, or has had its time
    tokens = served(here, 10)
    assert tokens["a"] == 68 + 7, "the rest of the prompt by whole steps, then decodes"


def test_a_decode_gets_the_row_that_another_owner_has_no_pages_for() -> None:
    here = shared(pages=12, max_rows=2, step_tokens=8)
    for name in ("one", "two"):
        here.add(name, [1] * 4, 12, owner="a")
    served(here, 2)
    here.add("large", [2] * 36, 4, owner="b")  # it waits for pages, and one of the two rows is kept for it
    assert served(here, 5) == {"a": 10}


def test_an_owner_whose_samples_wait_for_something_else_keeps_no_row_free() -> None:
    here = shared(max_rows=4)
    sample = here.add("away", [2] * 4, 4, owner="b")
    here.scheduler.apply(HoldRows(sample, True))
    for i in range(4):
        here.add(f"{i}", [1] * 4, 4, owner="a")
    assert [new.sample.owner for new in here.step().admitted] == ["a"] * 4


def test_the_prompts_of_one_owner_do_not_make_steps_long_for_what_another_draws() -> None:
    here = Kitchen(4000, StepLimits(200, 8, SIZE, shared_tokens=20), index=False)
    for i in range(10):
        here.add(f"prompts {i}", [1] * 400, 1, owner="prompts")
    assert sum(work.count for work in here.step().work) == 200, "an owner that is alone has whole steps"
    here.add("draws", [2] * 4, 5, owner="draws")
    here.step()
    while ("draws", 0) not in here.ended:
        assert sum(work.count for work in here.step().work) == 20
    assert sum(work.count for work in here.step().work) == 200


def test_prompts_of_several_owners_have_whole_steps_while_none_of_them_draws() -> None:
    here = Kitchen(4000, StepLimits(200, 8, SIZE, shared_tokens=20), index=False)
    for owner in ("a", "b"):
        here.add(owner, [1] * 400, 1, owner=owner)
    for _ in range(3):
        assert sum(work.count for work in here.step().work) == 200


def test_priorities_count_inside_an_owner_only() -> None:
    here = shared(max_rows=2, step_tokens=8)
    for i in range(10):
        here.add(f"loud {i}", [1] * 8, 20, priority=-9, owner="loud")
        here.add(f"calm {i}", [2] * 8, 20, priority=9, owner="calm")
    tokens = served(here, 200)
    assert 0.8 <= tokens["loud"] / tokens["calm"] <= 1.25


def test_samples_larger_than_a_share_take_turns_and_come_to_an_end() -> None:
    here = shared(pages=60)
    for owner in ("a", "b"):
        here.add(owner, [1] * 120, 110, owner=owner)  # 58 pages of 60
    here.add("c", [3] * 4, 30, owner="c")
    ends: dict[str, int] = {}
    gone: Counter[str] = Counter()
    protected: dict[str, int] = {}
    for now in range(3000):
        if not here.live:
            break
        plan = here.step()
        gone.update(one.sample.request for one in plan.preempted)
        for sample in [new.sample for new in plan.admitted if new.sample.protected_until]:
            protected[sample.request] = sample.protected_until - here.steps
            assert protected[sample.request] == PATIENCE_STEPS + 2 * -(-sample.known // here.limits.step_tokens)
        ends |= {name: ends.get(name, now) for name, _ in here.ended}
    assert sorted(ends) == ["a", "b", "c"]
    assert ends["c"] < 3 * PATIENCE_STEPS
    assert protected, "a large sample that waited long keeps its pages for a while, and until it is computed again"
    assert gone.total() <= 2 * 230 / PATIENCE_STEPS + 4, "each turn is long enough to get on"
