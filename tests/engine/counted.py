"""Pages as counts: a pool with a prefix index in which text stands for KV, to drive a scheduler without a model."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Mapping, Sequence

from kvilt.engine.scheduling.plan import GroupPages, PrefixHit, Sample, StepPlan, Work
from kvilt.engine.scheduling.schedule_state import StepLimits
from kvilt.engine.scheduling.scheduler import Advance, Scheduler


def keys_of(text: Sequence[int], size: int) -> list[bytes]:
    """One key for each whole page, made of everything up to its end."""
    ends = range(size, len(text) + 1, size)
    return [hashlib.blake2b(repr(list(text[:end])).encode(), digest_size=8).digest() for end in ends]


def next_token(text: Sequence[int], index: int) -> int:
    """What the model of these tests says: a function of the text and of which sample it is."""
    return hashlib.blake2b(repr((list(text), index)).encode(), digest_size=1).digest()[0]


class Pages:
    """Counted pages, shared and copied on write; whole ones stay known until their room is needed, tails first."""

    def __init__(self, pages: int, size: int) -> None:
        self.size, self.total = size, pages
        self.free = list(range(pages))
        self.refs = [0] * pages
        self.known: dict[bytes, int] = {}
        self.names: dict[int, bytes] = {}
        self.idle: OrderedDict[int, None] = OrderedDict()
        self.tables: dict[Sample, list[int]] = {}
        self.evictions = 0

    @property
    def takeable(self) -> int:
        return len(self.free) + len(self.idle)

    def probe(self, keys: Sequence[bytes], most: int) -> PrefixHit:
        pages = self._found(keys)[: -(-most // self.size)]
        return PrefixHit(min(len(pages) * self.size, most), sum(page in self.idle for page in pages))

    def begin(self, sample: Sample, keys: Sequence[bytes], most: int) -> int:
        hit = self.probe(keys, most)
        table = self._found(keys)[: -(-hit.tokens // self.size)]
        self._share(table)
        self.tables[sample] = table
        return hit.tokens

    def write(self, sample: Sample, start: int, stop: int) -> None:
        """Take what positions [start, stop) need; the caller has promised that it is there."""
        table = self.tables[sample]
        for at in range(start // self.size, -(-stop // self.size)):
            if at == len(table):
                table.append(self._take())
            elif self.refs[table[at]] > 1 or table[at] in self.names:
                copy = self._take()
                self._drop([table[at]])
                table[at] = copy

    def name(self, sample: Sample, keys: Sequence[bytes], start: int, stop: int) -> None:
        """Whole pages become known, or give way to those that are."""
        table = self.tables[sample]
        for at in range(start // self.size, stop // self.size):
            page, key = table[at], keys[at]
            if key in self.known and self.known[key] != page:
                self._share([self.known[key]])
                self._drop([page])
                table[at] = self.known[key]
            elif key not in self.known:
                self.known[key], self.names[page] = page, key

    def fork(self, parent: Sample, child: Sample) -> None:
        self.tables[child] = list(self.tables[parent])
        self._share(self.tables[child])

    def release(self, sample: Sample) -> None:
        self._drop(reversed(self.tables.pop(sample)))

    def check(self) -> None:
        """No page is lost or held twice."""
        held = [page for table in self.tables.values() for page in table]
        assert [held.count(page) for page in range(self.total)] == self.refs
        rest = {page for page in range(self.total) if self.refs[page] == 0}
        assert len(self.free) + len(self.idle) == len({*self.free, *self.idle})
        assert {*self.free, *self.idle} <= rest

    def _found(self, keys: Sequence[bytes]) -> list[int]:
        pages: list[int] = []
        for key in keys:
            if key not in self.known:
                break
            pages.append(self.known[key])
        return pages

    def _take(self) -> int:
        if not self.free:
            page, _ = self.idle.popitem(last=False)
            del self.known[self.names.pop(page)]
            self.evictions += 1
            self.free.append(page)
        page = self.free.pop()
        self.refs[page] = 1
        return page

    def _share(self, pages: Sequence[int]) -> None:
        for page in pages:
            self.idle.pop(page, None)
            self.refs[page] += 1

    def _drop(self, pages: Sequence[int]) -> None:
        for page in pages:
            self.refs[page] -= 1
            if self.refs[page] == 0 and page in self.names:
                self.idle[page] = None
            elif self.refs[page] == 0:
                self.free.append(page)


class Kitchen:
    """An engine of counts: it does what plans say, and finds every lie in them."""

    def __init__(
        self, pages: int, limits: StepLimits, index: bool = True, weights: Mapping[str, float] | None = None
    ) -> None:
        self.limits, self.index = limits, index
        self.pages = Pages(pages, limits.page_tokens)
        self.scheduler = Scheduler(limits, self, weights)
        self.texts: dict[Sample, list[int]] = {}
        self.live: list[Sample] = []
        self.ended: dict[tuple[str, int], tuple[str, list[int]]] = {}
        self.unforked: dict[str, int] = {}
        self.log: list[str] = []
        self.computed_tokens = self.preemptions = self.steps = 0
        self.most_running = 0
        self.kept: list[list[int]] = []  # pages that somebody only keeps for later
        self.scores: dict[Sample, int] = {}  # of a scored sample, how many tokens were computed by itself

    def add(
        self,
        name: str,
        text: Sequence[int],
        new: int,
        priority: int = 0,
        n: int = 1,
        scored: bool = False,
        owner: str = "",
    ) -> Sample:
        ends, limit = frozenset({7}), len(text) + new
        sample = Sample(name, len(text), limit, owner=owner, priority=priority, width=n, end_ids=ends)
        sample.scored = len(text) - 1 if scored else 0
        self.scores[sample] = 0
        sample.keys = keys_of(text, self.limits.page_tokens) if self.index else ()
        self.texts[sample] = list(text)
        self.live.append(sample)
        self.unforked[name] = n - 1
        self.scheduler.add(sample)
        return sample

    def abort(self, name: str) -> None:
        for sample in [one for one in self.live if one.request == name]:
            self.scheduler.drop(sample)
            self.end(sample, "cancelled")

    def end(self, sample: Sample, reason: str) -> None:
        key = (sample.request, sample.index)
        if reason != "cancelled":
            assert self.scores.pop(sample, 0) >= sample.scored
        assert key not in self.ended, "a sample ends once"
        self.ended[key] = (reason, self.texts.pop(sample)[sample.prompt :])
        self.live.remove(sample)
        if sample in self.pages.tables:
            self.pages.release(sample)
        if sample.index == 0:
            for index in range(1, self.unforked.pop(sample.request) + 1):
                self.ended[sample.request, index] = (reason, [])

    def step(self) -> StepPlan:
        plan = self.scheduler.plan()
        self.steps += 1
        self._check(plan)
        for gone in plan.preempted:
            self.preemptions += 1
            if gone.sample in self.pages.tables:
                self.pages.release(gone.sample)
        for new in plan.admitted:
            assert new.sample not in self.pages.tables, "a sample gets one cache"
            assert new.sample in self.scheduler._state.running, "who is admitted runs"
            most = new.sample.known - 1 if new.hit.tokens % self.limits.page_tokens else new.hit.tokens
            found = self.pages.begin(new.sample, self._keys(new.sample), most) if self.index else 0
            if not self.index:
                self.pages.tables[new.sample] = []
            assert found == new.hit.tokens
        drawn = [self._work(work) for work in plan.work]
        advances = self.scheduler.commit(plan, drawn)
        for one in advances:
            self._hear(one)
        for one in advances:
            if one.end is not None:
                self.end(one.sample, one.end)
        self.log.append(repr([(w.sample.request, w.sample.index, w.start, w.count) for w in plan.work]))
        self.most_running = max(self.most_running, self.scheduler.running)
        self.pages.check()
        return plan

    def run(self, most: int = 10_000) -> None:
        for _ in range(most):
            if not self.scheduler.ready:
                return
            self.step()
        raise AssertionError(f"not done after {most} steps: {self.scheduler.running} running")

    # What the scheduler asks.

    def groups(self) -> tuple[GroupPages, ...]:
        return (GroupPages(self.pages.total),)

    def free(self) -> tuple[int, ...]:
        return (self.pages.takeable,)

    def reclaim(self) -> bool:
        if not self.kept:
            return False
        self.pages.free += self.kept.pop()
        return True

    def hit(self, sample: Sample, most: int) -> PrefixHit:
        if (scored := self.scores.get(sample, 0)) < sample.scored:
            most = min(most, scored - scored % self.limits.page_tokens)
        return self.pages.probe(self._keys(sample), most) if self.index else PrefixHit()

    def loads_prefix(self, sample: Sample, hit: PrefixHit) -> bool:
        return False

    def startable(self) -> int | None:
        return None

    def lacks_states(self) -> bool:
        return False

    def shares_tail(self, sample: Sample) -> bool:
        page = self.pages.tables[sample][-1]
        return self.pages.refs[page] > 1 or page in self.pages.names

    def _keys(self, sample: Sample) -> list[bytes]:
        return keys_of(self.texts[sample], self.limits.page_tokens)

    def _check(self, plan: StepPlan) -> None:
        assert sum(work.count for work in plan.work) <= self.limits.step_tokens
        assert len(plan.work) <= self.limits.max_rows
        assert all(work.count > 0 for work in plan.work)
        samples = [work.sample for work in plan.work]
        assert len({id(sample) for sample in samples}) == len(samples)
        assert not any(sample.held for sample in samples)
        assert not {id(gone.sample) for gone in plan.preempted} & {id(sample) for sample in samples}

    def _work(self, work: Work) -> list[int]:
        sample, stop = work.sample, work.start + work.count
        assert work.start == sample.computed
        assert not work.start < sample.scored < stop, "logits are for drawing or for scoring"
        if work.start < sample.scored:
            assert work.start <= self.scores[sample], "what is scored is not skipped"
            self.scores[sample] = max(self.scores[sample], stop)
        self.pages.write(sample, work.start, stop)
        if self.index:
            self.pages.name(sample, self._keys(sample), work.start, stop)
        self.computed_tokens += work.count
        text = self.texts[sample]
        assert work.draws == (stop == len(text) and sample.draws)
        return [next_token(text, i) for i in range(sample.index, sample.index + 1 + work.forks)] if work.draws else []

    def _hear(self, one: Advance) -> None:
        if one.parent is not None:
            self.texts[one.sample] = self.texts[one.parent][: one.sample.prompt]
            self.pages.fork(one.parent, one.sample)
            self.live.append(one.sample)
            self.unforked[one.sample.request] -= 1
        if one.token is not None:
            self.texts[one.sample].append(one.token)
