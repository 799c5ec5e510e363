"""What the parts of the scheduler share: the queues, the counts of pages, and the plan that is being built.

Counts tokens, rows and pages, and knows nothing else.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from operator import add, lt, sub

from ...errors import ParamError
from .fairness import Owners, Share
from .page_counts import PageCounts, is_last
from .plan import Admission, PageAccounting, Pages, Preemption, Sample, StepPlan, Work


@dataclass(frozen=True, slots=True)
class StepLimits:
    """What a step may hold."""

    step_tokens: int
    max_rows: int
    page_tokens: int
    shared_tokens: int = 128  # of a step in which one owner draws beside others: each of its tokens waits for a step

    def __post_init__(self) -> None:
        if not 0 < self.max_rows <= self.step_tokens:
            raise ParamError("max_rows", f"must be between 1 and step_tokens, which is {self.step_tokens}")


@dataclass(slots=True)
class PlanBuilder:
    """A plan that is being built, and the tokens, rows and pages that are left for it."""

    tokens: int
    rows: int
    pages: list[int]  # of each layer group
    shares: dict[str, Share]  # of tokens and rows, for each owner
    work: list[Work] = field(default_factory=list)
    admitted: list[Admission] = field(default_factory=list)
    preempted: list[Preemption] = field(default_factory=list)
    short: Sample | None = None  # the first in order that found too few pages
    starved: Sample | None = None

    def build(self) -> StepPlan:
        return StepPlan(tuple(self.work), tuple(self.admitted), tuple(self.preempted), self.starved)


class ScheduleState:
    """Waiting and running samples, their owners, and the pages they need. The scheduler and its parts write it."""

    def __init__(self, limits: StepLimits, pages: PageAccounting, weights: Mapping[str, float]) -> None:
        self.limits = limits
        self.pages = pages
        self.owners = Owners(weights)
        self.counts = PageCounts(limits.page_tokens, limits.step_tokens, pages.groups())
        self.waiting: list[Sample] = []  # by rank
        self.running: list[Sample] = []  # by rank
        self.computing: dict[bytes, Sample] = {}  # pages that a running sample is going to compute, by key
        self.drafts: Mapping[Sample, int] = {}  # tokens that samples would like to have drafted in the next step
        self.plan_number = 0

    # Queues.

    def enqueue(self, sample: Sample) -> None:
        """A sample waits."""
        sample.awaited_page = None
        insort(self.waiting, sample, key=rank_of)

    def start(self, sample: Sample) -> None:
        """A sample runs."""
        insort(self.running, sample, key=rank_of)

    def requeue(self, sample: Sample) -> None:
        """A running sample gives its pages up and waits; it starts again from nothing."""
        self.running.remove(sample)
        self.stop_computing(sample)
        sample.computed, sample.waits_for_store = 0, False
        if sample.blend_progress is not None:
            sample.blend_progress = sample.blend_progress.restarted
        self.enqueue(sample)

    def preempt(self, builder: PlanBuilder, victim: Sample) -> None:
        """The plan takes all pages of a running sample, which it may have admitted itself."""
        builder.work = [work for work in builder.work if work.sample is not victim]
        builder.admitted = [new for new in builder.admitted if new.sample is not victim]
        self.requeue(victim)
        builder.preempted.append(Preemption(victim))

    def preemption_order(self, sample: Sample, held: Mapping[str, int]) -> tuple[bool, float, tuple[int, int, int]]:
        """The sample with the largest value is preempted first."""
        pages = held[sample.owner] / self.owners.accounts[sample.owner].weight
        return sample.protected_until < self.plan_number, pages, sample.rank

    def schedulable(self) -> Iterable[Sample]:
        """Running samples that can have a row: decodes, then prompts in order."""
        rows = [sample for sample in self.running if not sample.held and not sample.waits_for_store]
        decodes = [sample for sample in rows if sample.uncomputed == 1]
        if len(decodes) > self.limits.max_rows or len(self.owners.accounts) > 1:  # more than rows: they take turns
            decodes = sorted(decodes, key=lambda sample: (sample.last_planned, sample.rank))
        return (*decodes, *(sample for sample in rows if sample.uncomputed > 1))

    # Pages.

    def reclaim(self, builder: PlanBuilder, missing: Pages) -> Pages:
        """Free pages that no sample computes with, until `missing` are found; returns how many were found."""
        found = [0] * len(builder.pages)
        while any(map(lt, found, missing)):
            before = self.pages.free()
            if not self.pages.reclaim():
                break
            found = [*map(add, found, map(sub, self.pages.free(), before))]
        builder.pages = [*map(add, builder.pages, found)]
        return found

    def unpromised_pages(self, builder: PlanBuilder) -> list[int]:
        """Pages that no running sample needs to compute what it knows, and one token more."""
        taken, left = {work.sample: work.count for work in builder.work}, list(builder.pages)
        for sample in self.running:
            if not sample.held:
                planned = self.counts.need(sample, taken.get(sample, 0))  # the builder has taken these
                left = [n - more + planned for n, more in zip(left, self.counts.promised(sample), strict=True)]
        return left

    def held_pages(self) -> dict[str, int]:
        """Pages that the running samples of each owner have or are promised; a shared page counts for each sample.

        They are counted as a share of the group of which a sample holds the largest.
        """
        held = dict.fromkeys(self.owners.accounts, 0)
        for sample in self.running:
            held[sample.owner] += self.counts.share(self.counts.all(sample))
        return held

    def set_computed(self, sample: Sample, stop: int) -> None:
        """The KV of the first `stop` tokens of a sample is there."""
        size = self.limits.page_tokens
        for key in sample.keys[sample.computed // size : stop // size]:
            if self.computing.get(key) is sample:
                del self.computing[key]
        sample.computed, sample.shared_tail = stop, False

    def stop_computing(self, sample: Sample) -> None:
        """A sample computes no more of its pages; samples that wait for them compute these themselves."""
        for key in sample.keys[sample.computed // self.limits.page_tokens :]:
            if self.computing.get(key) is sample:
                del self.computing[key]

    # Rows.

    def add_work(self, builder: PlanBuilder, sample: Sample, count: int, had: int = 0) -> Work:
        """Plan `count` tokens of a sample, after `had` that are planned already."""
        draws = is_last(sample, had + count) and sample.draws
        forks = sample.width - 1 if draws else 0
        work = Work(sample, sample.computed, had + count, draws, forks)
        builder.work.append(work)
        if taken := self.counts.need(sample, had + count) - self.counts.need(sample, had):
            builder.pages = [n - taken for n in builder.pages]
        share = builder.shares[sample.owner]
        builder.tokens, share.tokens = builder.tokens - count, share.tokens - count
        self.owners.serve(sample.owner, count)
        if not had:
            builder.rows, share.rows = builder.rows - 1, share.rows - 1
        sample.last_planned = self.plan_number
        return work


def rank_of(sample: Sample) -> tuple[int, int, int]:
    """The order inside one owner: the smallest goes first."""
    return sample.rank
