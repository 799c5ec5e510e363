"""Who gets a row of the next step, and who gives pages up. Counts tokens, rows and pages, and knows nothing else.

Decodes first, then prompts in order, cut to the step's budget; admission promises no page twice.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from ..errors import ParamError
from .plan import Admission, Hit, Pages, Preemption, Sample, StepPlan, Work

# One level of priority is worth arriving this many steps earlier: whoever waits longer than that goes first.
PRIORITY_STEPS = 1000

End = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class Limits:
    """What a step may hold."""

    step_tokens: int
    max_rows: int
    page_tokens: int

    def __post_init__(self) -> None:
        if not 0 < self.max_rows <= self.step_tokens:
            raise ParamError("max_rows", f"must be between 1 and step_tokens, which is {self.step_tokens}")


@dataclass(frozen=True, slots=True)
class Advance:
    """What a step brought to a sample: a token, unless only KV was wanted, and perhaps its end."""

    sample: Sample
    token: int | None
    end: End | None
    parent: Sample | None = None  # it was forked off this one just now


@dataclass(slots=True)
class _Draft:
    """A plan in the making, and what is left to give."""

    tokens: int
    rows: int
    pages: int
    work: list[Work]
    admitted: list[Admission]
    preempted: list[Preemption]
    short: Sample | None = None  # the first in order that found too few pages
    starved: Sample | None = None


class Scheduler:
    """The order is deterministic: by priority and arrival, as a time that was settled when a sample arrived."""

    def __init__(self, limits: Limits, pages: Pages) -> None:
        self._limits = limits
        self._pages = pages
        self._waiting: list[Sample] = []  # by rank, as the next one
        self._running: list[Sample] = []
        self._computing: dict[bytes, Sample] = {}  # pages on their way, by key
        self._plans = self._arrivals = 0

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def ready(self) -> bool:
        """Whether somebody wants a row, and waits for nothing but that."""
        everybody = (*self._running, *self._waiting)
        return any(not sample.held and not sample.waits for sample in everybody)

    # Coming and going.

    def add(self, sample: Sample) -> None:
        """A new sample; it waits."""
        self._arrivals += 1
        sample.rank = (sample.priority * PRIORITY_STEPS + self._plans, self._arrivals, sample.index)
        self._wait(sample)

    def drop(self, sample: Sample) -> None:
        """A sample that ended for reasons of its own: aborted, failed, or its text is over."""
        self._stop_computing(sample)
        for samples in (self._running, self._waiting):
            if sample in samples:
                samples.remove(sample)

    def placed(self, sample: Sample, tokens: int) -> None:
        """What an admitted sample really found."""
        sample.computed = tokens
        sample.shared_tail = True

    # A step.

    def plan(self) -> StepPlan:
        """The next step. Whom it admits runs, whom it preempts waits."""
        self._plans += 1
        draft = _Draft(self._limits.step_tokens, self._limits.max_rows, self._pages.free(), [], [], [])
        self._go_on(draft)
        if draft.short is not None:
            self._give_way(draft, draft.short)
        else:
            self._admit(draft)
            self._spread(draft)
        return StepPlan(tuple(draft.work), tuple(draft.admitted), tuple(draft.preempted), draft.starved)

    def commit(self, plan: StepPlan, drawn: Sequence[Sequence[int] | None]) -> list[Advance]:
        """A step was done: for each work its new tokens, None if it was not done.

        One for each sample that draws; or where there are no forks, accepted drafts and one token more. Samples that
        are over leave.
        """
        advances = []
        for work, tokens in zip(plan.work, drawn, strict=True):
            if tokens is not None:
                accepted = max(0, len(tokens) - 1 - work.forks)
                self._computed(work.sample, _reached(work) + accepted)
                advances += self._advance(work, tokens)
        for one in advances:
            if one.end is not None:
                self.drop(one.sample)
        return advances

    def _advance(self, work: Work, tokens: Sequence[int]) -> list[Advance]:
        sample = work.sample
        if not work.draws:
            over = not sample.draws and sample.left == 0
            return [Advance(sample, None, "length")] if over else []
        twins = self._fork(sample) if work.forks else []
        advances = []
        for one, token in zip((sample, *twins) if twins else (sample,) * len(tokens), tokens, strict=True):
            one.known += 1
            end: End | None = "stop" if token in one.end_ids else "length" if one.known >= one.limit else None
            advances.append(Advance(one, token, end, None if one is sample else sample))
        return advances

    def _fork(self, parent: Sample) -> list[Sample]:
        """The other samples behind a prompt that is computed; they run from now on."""
        twins = [_twin(parent, index) for index in range(1, parent.width)]
        parent.width = 1
        for sample in (parent, *twins):
            sample.shared_tail = True
        for twin in twins:
            insort(self._running, twin, key=_rank)
        return twins

    # Those that run.

    def _go_on(self, draft: _Draft) -> None:
        rows = [sample for sample in self._running if not sample.held and not sample.waits]
        decodes = [sample for sample in rows if sample.left == 1]
        if len(decodes) > draft.rows:  # forks can outnumber the rows: then they take turns
            decodes = sorted(decodes, key=lambda sample: (sample.planned, sample.rank))
        for sample in (*decodes, *(sample for sample in rows if sample.left > 1)):
            if not draft.rows or not draft.tokens:
                break
            count = _share(sample, draft.tokens)
            if not count:
                continue  # it waits for its blending to begin
            if self._fits(draft, sample, count):
                self._take(draft, sample, count)
            elif draft.short is None or sample.rank < draft.short.rank:
                draft.short = sample

    def _fits(self, draft: _Draft, sample: Sample, count: int) -> bool:
        if self._need(sample, count) <= draft.pages:
            return True
        if sample.shared_tail:
            sample.shared_tail = self._pages.shares_tail(sample)
        self._find(draft, self._need(sample, count) - draft.pages)
        return self._need(sample, count) <= draft.pages

    def _find(self, draft: _Draft, missing: int) -> int:
        """Ask for pages that nobody computes with, until as many were found as are missing; how many there were."""
        found = 0
        while found < missing:
            before = self._pages.free()
            if not self._pages.relieve():
                break
            found += self._pages.free() - before
        draft.pages += found
        return found

    def _give_way(self, draft: _Draft, short: Sample) -> None:
        """One sample gives its pages up: nobody's reader first, then the last in order.

        What that frees is known only when it is done, since pages are shared; so no more than one, and the next plan
        sees the truth.
        """
        victim = max(self._running, key=lambda sample: (sample.held, sample.rank))
        if len(self._running) == 1:
            draft.starved = short
            return
        draft.work = [work for work in draft.work if work.sample is not victim]
        self._preempt(draft, victim)

    def _preempt(self, draft: _Draft, victim: Sample) -> None:
        self.give_back(victim)
        draft.preempted.append(Preemption(victim))

    def give_back(self, victim: Sample) -> None:
        """A sample that runs begins again from nothing, when there is room for it."""
        self._running.remove(victim)
        self._stop_computing(victim)
        victim.computed, victim.waits = 0, False
        if victim.detour is not None:
            victim.detour.begun, victim.detour.left, victim.detour.ends = False, 0, False
        self._wait(victim)

    # Those that wait.

    def _admit(self, draft: _Draft) -> None:
        if not self._waiting:
            return
        room = draft.pages - self._promised(draft)
        width = sum(sample.width for sample in self._running if not sample.held)
        seeks = False
        for sample in list(self._waiting):
            if not draft.rows or not draft.tokens or (width and width + sample.width > self._limits.max_rows):
                return
            if sample.held or sample.waits or self._awaits(sample):
                continue
            hit = self._hit(sample, room)
            if self._awaits(sample):
                continue
            need = self._whole_need(sample, hit)
            room += self._find(draft, need - room)
            if need > room:
                if not seeks:  # room that is kept for somebody who looks elsewhere first is not lost
                    self._make_room(draft, sample)
                return  # nobody behind it goes first, or it might wait forever
            room -= need
            width += sample.width
            if self._pages.seeks(sample, hit):
                seeks = True
            else:
                self._begin(draft, sample, hit)

    def _begin(self, draft: _Draft, sample: Sample, hit: Hit) -> None:
        self._waiting.remove(sample)
        insort(self._running, sample, key=_rank)
        self.placed(sample, hit.tokens)
        for key in sample.keys[hit.tokens // self._limits.page_tokens :]:
            self._computing.setdefault(key, sample)
        draft.admitted.append(Admission(sample, hit))
        if count := _share(sample, draft.tokens):
            self._take(draft, sample, count)

    def _hit(self, sample: Sample, room: int) -> Hit:
        """The longest hit, or where its last, begun page would be one too many, the longest of whole pages.

        Leaves a note where the page behind the hit is being computed by somebody else.
        """
        size, most = self._limits.page_tokens, sample.known - 1
        if sample.detour is not None:
            most = min(most, sample.detour.start)
        hit = self._pages.hit(sample, most)
        if hit.tokens % size and self._whole_need(sample, hit) > room:
            hit = self._pages.hit(sample, most - most % size)
        behind = hit.tokens // size
        if (
            not sample.scored
            and behind < len(sample.keys)
            and self._computing.get(sample.keys[behind]) not in (None, sample)
        ):
            sample.awaits = sample.keys[behind]
        return hit

    def _awaits(self, sample: Sample) -> bool:
        """Whether somebody who goes on is computing what this sample needs next."""
        leader = None if sample.awaits is None else self._computing.get(sample.awaits)
        if leader is None or leader.held:
            sample.awaits = None
        return sample.awaits is not None

    def _make_room(self, draft: _Draft, sample: Sample) -> None:
        """The first in order does not fit: those that nobody reads give way, and without anybody else it starves."""
        unread = [one for one in self._running if one.held]
        if unread:
            self._preempt(draft, max(unread, key=_rank))
        elif not self._running:
            draft.starved = sample

    # Drafts.

    def _spread(self, draft: _Draft) -> None:
        """Give what is left of a step to drafts: nobody gives way to them, or waits for them."""
        wishes = [at for at, work in enumerate(draft.work) if work.sample.drafts and work.draws and not work.forks]
        if not wishes:
            return
        room = draft.pages - self._promised(draft)
        for at in wishes:
            work, sample = draft.work[at], draft.work[at].sample
            count = min(sample.drafts, draft.tokens, sample.limit - sample.known - 1)
            need = self._need(sample, work.count)
            while count > 0 and self._need(sample, work.count + count) - need > room:
                count -= 1
            if count > 0:
                room -= self._need(sample, work.count + count) - need
                draft.tokens -= count
                draft.work[at] = replace(work, drafts=count)

    # Counting.

    def _promised(self, draft: _Draft) -> int:
        """Pages that those who run need to compute what they know, and one token more, beyond this step's."""
        taken = {work.sample: work.count for work in draft.work}
        return sum(
            self._need(sample, self._target(sample) - sample.computed)
            - self._need(sample, taken.get(sample, 0))
            + self._beside(sample)
            for sample in self._running
            if not sample.held
        )

    def _target(self, sample: Sample) -> int:
        return min(sample.known + 1, sample.limit - 1)

    def _need(self, sample: Sample, count: int) -> int:
        """Pages to take before `count` more tokens can be computed."""
        if not count:
            return 0
        if sample.detour is not None and sample.detour.begun and sample.blends:  # it has room for all of its prompt
            return max(0, self._grown(sample.detour.stop, max(sample.computed + count, sample.detour.stop), False))
        return self._grown(sample.computed, sample.computed + count, sample.shared_tail)

    def _beside(self, sample: Sample) -> int:
        """Pages that a blending may need for documents that nobody has stored, before it has begun."""
        detour = sample.detour
        return -(-detour.scratch // self._limits.page_tokens) if detour is not None and not detour.begun else 0

    def _whole_need(self, sample: Sample, hit: Hit) -> int:
        """Pages until a waiting sample has computed all it knows; its forks need one each, if they are not alone."""
        forks = sample.width - 1 if self._running else 0
        return hit.idle + self._grown(hit.tokens, self._target(sample), True) + forks + self._beside(sample)

    def _grown(self, start: int, stop: int, shared_tail: bool) -> int:
        size = self._limits.page_tokens
        return -(-stop // size) + (start // -size) + (shared_tail and start % size != 0)

    def _take(self, draft: _Draft, sample: Sample, count: int) -> None:
        draws = _is_last(sample, count) and sample.draws
        forks = sample.width - 1 if draws else 0
        draft.work.append(Work(sample, sample.computed, count, draws, forks))
        draft.pages -= self._need(sample, count)
        draft.tokens -= count
        draft.rows -= 1
        sample.planned = self._plans

    def _computed(self, sample: Sample, stop: int) -> None:
        size = self._limits.page_tokens
        for key in sample.keys[sample.computed // size : stop // size]:
            if self._computing.get(key) is sample:
                del self._computing[key]
        sample.computed, sample.shared_tail = stop, False

    def _stop_computing(self, sample: Sample) -> None:
        for key in sample.keys[sample.computed // self._limits.page_tokens :]:
            if self._computing.get(key) is sample:
                del self._computing[key]

    def _wait(self, sample: Sample) -> None:
        sample.awaits = None
        insort(self._waiting, sample, key=_rank)


def _rank(sample: Sample) -> tuple[int, int, int]:
    return sample.rank


def _share(sample: Sample, tokens: int) -> int:
    """How many of a step's tokens a sample can use."""
    tokens = min(sample.stride or tokens, tokens)
    if sample.detour is not None and sample.blends:
        return min(sample.detour.left, tokens)
    count = min(sample.left, tokens)
    if sample.detour is not None and sample.computed < sample.detour.start:
        count = min(count, sample.detour.start - sample.computed)
    return min(count, sample.scored - sample.computed) if sample.computed < sample.scored else count


def _is_last(sample: Sample, count: int) -> bool:
    """Whether the logits of so many tokens choose the next one."""
    detour = sample.detour
    if detour is not None and sample.blends:
        return detour.ends and count == detour.left and sample.known == detour.stop
    return count == sample.left


def _reached(work: Work) -> int:
    """How many tokens of a sample are computed after a step; a blended stretch is so as a whole, at its end."""
    sample, detour = work.sample, work.sample.detour
    if detour is not None and sample.blends and work.start == sample.computed:
        return sample.computed if detour.left else detour.stop
    return work.start + work.count


def _twin(parent: Sample, index: int) -> Sample:
    twin = Sample(
        request=parent.request,
        prompt=parent.prompt,
        limit=parent.limit,
        index=index,
        priority=parent.priority,
        end_ids=parent.end_ids,
    )
    twin.known, twin.computed = parent.known, parent.computed
    twin.rank = (*parent.rank[:2], index)
    return twin
