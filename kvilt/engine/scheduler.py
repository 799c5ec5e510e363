"""Who gets a row of the next step, and who gives pages up. Counts tokens, rows and pages, and knows nothing else.

Owners (API keys) share rows, tokens and pages by max-min fairness. Inside an owner's share decodes come first, then
prompts in order, cut to the step's budget; admission promises no page twice.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from ..errors import ParamError
from .fairness import Owners, Share
from .page_counts import PageCounts, is_last, reached, usable
from .plan import Admission, PageAccounting, Preemption, PrefixHit, Sample, StepPlan, Work

# One level of priority is worth arriving this many steps earlier: whoever waits longer than that goes first.
PRIORITY_STEPS = 1000
# A sample that alone needs more than its owner's share of pages waits so many plans for room. Then others give way, and
# it runs for as many plans before it has to; both beside the plans that computing it again takes.
PATIENCE_STEPS = 50

End = Literal["stop", "length"]


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
    shares: dict[str, Share]  # of tokens and rows, for each owner
    short: Sample | None = None  # the first in order that found too few pages
    starved: Sample | None = None


class Scheduler:
    """The order is deterministic: between owners by what they hold and were served, and inside one by priority and
    arrival, as a time that was settled when a sample arrived."""

    def __init__(self, limits: StepLimits, pages: PageAccounting, weights: Mapping[str, float] | None = None) -> None:
        """`weights` of owners; one that is not named weighs 1."""
        self._limits = limits
        self._pages = pages
        self._owners = Owners(weights or {})
        self._counts = PageCounts(limits.page_tokens)
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

    def waiting_by_owner(self) -> Counter[str]:
        """Samples of each owner that wait; from any thread."""
        return Counter(sample.owner for sample in list(self._waiting))

    @property
    def ready(self) -> bool:
        """Whether somebody wants a row, and waits for nothing but that."""
        everybody = (*self._running, *self._waiting)
        return any(not sample.held and not sample.waits for sample in everybody)

    # Coming and going.

    def add(self, sample: Sample) -> None:
        """A new sample; it waits."""
        self._owners.enter(sample.owner)
        self._arrivals += 1
        sample.rank = (sample.priority * PRIORITY_STEPS + self._plans, self._arrivals, sample.index)
        self._wait(sample)

    def drop(self, sample: Sample) -> None:
        """A sample that ended for reasons of its own: aborted, failed, or its text is over."""
        self._stop_computing(sample)
        for samples in (self._running, self._waiting):
            if sample in samples:
                samples.remove(sample)
                self._owners.leave(sample.owner)

    def placed(self, sample: Sample, tokens: int) -> None:
        """What an admitted sample really found."""
        sample.computed = tokens
        sample.shared_tail = True

    # A step.

    def plan(self) -> StepPlan:
        """The next step. Whom it admits runs, whom it preempts waits."""
        self._plans += 1
        tokens, rows = self._step_tokens(), self._limits.max_rows
        shares = self._owners.shares(rows, tokens, self._wants)
        draft = _Draft(tokens, rows, self._pages.free(), [], [], [], shares)
        self._go_on(draft)
        if draft.short is not None:
            self._give_way(draft, draft.short)
        else:
            self._admit(draft)
            self._use_up(draft)
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
                self._computed(work.sample, reached(work) + accepted)
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
            self._owners.enter(twin.owner)
            insort(self._running, twin, key=_rank)
        return twins

    # Shares of a step.

    def _step_tokens(self) -> int:
        """Tokens of the next step: fewer where the prompts of one owner would hold up what another one draws."""
        limits = self._limits
        if len(self._owners.accounts) > 1 and any(sample.left == 1 and not sample.held for sample in self._running):
            return min(limits.step_tokens, max(limits.shared_tokens, limits.max_rows))
        return limits.step_tokens

    def _wants(self) -> dict[str, list[int]]:
        """For each owner the tokens of each row it could use, in the order in which it would."""
        limits = self._limits
        wants: dict[str, list[int]] = {owner: [] for owner in self._owners.accounts}
        for sample in self._in_turn():
            if count := usable(sample, limits.step_tokens):
                wants[sample.owner].append(count)
        for sample in self._waiting:
            if len(wants[sample.owner]) < limits.max_rows and not self._cannot_begin(sample):
                wants[sample.owner].append(min(sample.left, limits.step_tokens))
        return wants

    def _use_up(self, draft: _Draft) -> None:
        """What owners could not use of their shares, for want of pages, goes to the others."""
        if len(draft.shares) <= 1 or not draft.tokens:
            return
        at = {work.sample: place for place, work in enumerate(draft.work)}
        for sample in sorted(self._in_turn(), key=lambda one: self._owners.accounts[one.owner].served):
            place = at.get(sample)
            had = draft.work[place].count if place is not None else 0
            more = usable(sample, had + draft.tokens) - had
            grows = self._counts.need(sample, had + more) - self._counts.need(sample, had)
            if more <= 0 or grows > draft.pages or (place is None and not draft.rows):
                continue
            work = self._take(draft, sample, more, had)
            if place is not None:
                draft.work.pop()
                draft.work[place] = work

    # Those that run.

    def _in_turn(self) -> Iterable[Sample]:
        """Those that can have a row: decodes, then prompts in order."""
        rows = [sample for sample in self._running if not sample.held and not sample.waits]
        decodes = [sample for sample in rows if sample.left == 1]
        if len(decodes) > self._limits.max_rows or len(self._owners.accounts) > 1:  # more than rows: they take turns
            decodes = sorted(decodes, key=lambda sample: (sample.planned, sample.rank))
        return (*decodes, *(sample for sample in rows if sample.left > 1))

    def _go_on(self, draft: _Draft) -> None:
        for sample in self._in_turn():
            share = draft.shares[sample.owner]
            count = usable(sample, share.tokens) if share.rows else 0
            if not count:
                continue  # its owner has had its share, or it waits for its blending to begin
            if self._fits(draft, sample, count):
                self._take(draft, sample, count)
            elif draft.short is None or sample.rank < draft.short.rank:
                draft.short = sample

    def _fits(self, draft: _Draft, sample: Sample, count: int) -> bool:
        if self._counts.need(sample, count) <= draft.pages:
            return True
        if sample.shared_tail:
            sample.shared_tail = self._pages.shares_tail(sample)
        self._find(draft, self._counts.need(sample, count) - draft.pages)
        return self._counts.need(sample, count) <= draft.pages

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
        """One sample gives its pages up: one without a reader first, then the last of the owner that holds the most.

        What that frees is known only when it is done, since pages are shared; so no more than one, and the next plan
        sees the truth.
        """
        if len(self._running) == 1:
            draft.starved = short
            return
        held = self._held_pages()
        self._preempt(draft, max(self._running, key=lambda sample: (sample.held, *self._yields(sample, held))))

    def _yields(self, sample: Sample, held: Mapping[str, int]) -> tuple[bool, float, tuple[int, int, int]]:
        """The larger, the sooner a sample gives way."""
        pages = held[sample.owner] / self._owners.accounts[sample.owner].weight
        return sample.protected < self._plans, pages, sample.rank

    def _preempt(self, draft: _Draft, victim: Sample) -> None:
        draft.work = [work for work in draft.work if work.sample is not victim]
        self.give_back(victim)
        draft.preempted.append(Preemption(victim))

    def give_back(self, victim: Sample) -> None:
        """A sample that runs begins again from nothing, when there is room for it."""
        self._running.remove(victim)
        self._stop_computing(victim)
        victim.computed, victim.waits = 0, False
        if victim.blend_progress is not None:
            victim.blend_progress.begun, victim.blend_progress.left, victim.blend_progress.ends = False, 0, False
        self._wait(victim)

    # Those that wait.

    def _admit(self, draft: _Draft) -> None:
        """Let samples begin, always the first of the owner that holds the fewest pages."""
        queues: dict[str, deque[Sample]] = {}
        for sample in self._waiting:
            queues.setdefault(sample.owner, deque()).append(sample)
        if not queues:
            return
        held, rights = self._held_pages(), self._owners.rights(self._pages.total())
        room = draft.pages - self._promised(draft)
        tight = loads_prefix = False
        while queues:
            owner = min(queues, key=lambda one: self._turn(queues[one][0], held[one]))
            sample, share = queues[owner].popleft(), draft.shares[owner]
            if not share.rows or not share.tokens or self._is_too_wide(sample):
                del queues[owner]
                continue
            if not queues[owner]:
                del queues[owner]
            if self._cannot_begin(sample):
                continue
            hit = self._hit(sample, room)
            if self._awaits(sample):
                continue
            need = self._counts.whole(sample, hit, alone=not self._running)
            if tight and held[owner] + need > rights[owner]:
                queues.pop(owner, None)
                continue
            room += self._find(draft, need - room)
            if need > room:
                # Room that is kept for a sample that looks elsewhere first is not lost.
                if not loads_prefix and self._make_room(draft, sample, need - room, held, rights):
                    return
                queues.pop(owner, None)  # no other sample of its owner goes first, or it might wait forever
                tight = True
                continue
            room -= need
            held[owner] += need
            if self._pages.loads_prefix(sample, hit):
                loads_prefix = True
            else:
                self._begin(draft, sample, hit)

    def _cannot_begin(self, sample: Sample) -> bool:
        """Whether a waiting sample waits for something else than room."""
        return sample.held or sample.waits or self._awaits(sample)

    def _is_too_wide(self, sample: Sample) -> bool:
        """Whether so many samples run that this one has to wait; its owner's share of rows is kept free for it."""
        widths: dict[str, int] = {}
        for one in self._running:
            if not one.held:
                widths[one.owner] = widths.get(one.owner, 0) + one.width
        most, own, total = self._limits.max_rows, widths.get(sample.owner, 0), sum(widths.values())
        if not own or total + sample.width <= most:
            return False
        return own + sample.width > self._owners.rights(most)[sample.owner]

    def _begin(self, draft: _Draft, sample: Sample, hit: PrefixHit) -> None:
        self._waiting.remove(sample)
        insort(self._running, sample, key=_rank)
        if sample.blocked:
            again = 2 * -(-sample.known // self._limits.step_tokens)
            sample.protected, sample.blocked = self._plans + PATIENCE_STEPS + again, 0
        self.placed(sample, hit.tokens)
        for key in sample.keys[hit.tokens // self._limits.page_tokens :]:
            self._computing.setdefault(key, sample)
        draft.admitted.append(Admission(sample, hit))
        if count := usable(sample, draft.shares[sample.owner].tokens):
            self._take(draft, sample, count)

    def _hit(self, sample: Sample, room: int) -> PrefixHit:
        """The longest hit, or where its last, begun page would be one too many, the longest of whole pages.

        Leaves a note where the page behind the hit is being computed by somebody else.
        """
        size, most = self._limits.page_tokens, sample.known - 1
        if sample.blend_progress is not None:
            most = min(most, sample.blend_progress.start)
        hit = self._pages.hit(sample, most)
        if hit.tokens % size and self._counts.whole(sample, hit, alone=not self._running) > room:
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

    def _make_room(
        self, draft: _Draft, sample: Sample, missing: int, held: Mapping[str, int], rights: Mapping[str, int]
    ) -> bool:
        """The first sample of an owner does not fit. True: another one gives way, or none is left to, so it starves.

        Samples without a reader give way to every other one; those of an owner that holds more than its share to an
        owner that asks for no more than its own.
        """
        unread = [one for one in self._running if one.held]
        if unread:
            self._preempt(draft, max(unread, key=_rank))
            return True
        if not self._running:
            draft.starved = sample
            return True
        others = [one for one in self._running if one.owner != sample.owner and one.protected < self._plans]
        if held[sample.owner] + self._counts.all(sample) <= rights[sample.owner]:
            others = [one for one in others if held[one.owner] > rights[one.owner]]
        elif held[sample.owner]:
            return False
        elif not self._is_impatient(sample):
            sample.blocked = sample.blocked or self._plans
            return False
        for one in sorted(others, key=lambda one: self._yields(one, held), reverse=True):
            missing -= self._counts.taken(one)  # at the most: some of its pages may be shared
            self._preempt(draft, one)
            if missing <= 0:
                break
        return bool(others)

    def _turn(self, sample: Sample, held: int) -> tuple[bool, float, tuple[int, int, int]]:
        """The smaller, the sooner a sample begins, which is the first one of an owner that holds so many pages."""
        return not self._is_impatient(sample), held / self._owners.accounts[sample.owner].weight, sample.rank

    def _is_impatient(self, sample: Sample) -> bool:
        """Whether a sample larger than its owner's share has waited long enough for the others to give way."""
        return 0 < sample.blocked <= self._plans - PATIENCE_STEPS

    # Drafts.

    def _spread(self, draft: _Draft) -> None:
        """Give what is left of a step to drafts: nobody gives way to them, or waits for them."""
        bids = [at for at, work in enumerate(draft.work) if work.sample.drafts and work.draws and not work.forks]
        if not bids:
            return
        room = draft.pages - self._promised(draft)
        for at in bids:
            work, sample = draft.work[at], draft.work[at].sample
            count = min(sample.drafts, draft.tokens, sample.limit - sample.known - 1)
            need = self._counts.need(sample, work.count)
            while count > 0 and self._counts.need(sample, work.count + count) - need > room:
                count -= 1
            if count > 0:
                room -= self._counts.need(sample, work.count + count) - need
                draft.tokens -= count
                draft.work[at] = replace(work, drafts=count)

    # Counting.

    def _promised(self, draft: _Draft) -> int:
        """Pages that those who run need to compute what they know, and one token more, beyond this step's."""
        taken = {work.sample: work.count for work in draft.work}
        return sum(
            self._counts.rest(sample) - self._counts.need(sample, taken.get(sample, 0)) + self._counts.beside(sample)
            for sample in self._running
            if not sample.held
        )

    def _held_pages(self) -> dict[str, int]:
        """Pages that the running samples of each owner have or are promised; those they share count for each."""
        held = dict.fromkeys(self._owners.accounts, 0)
        for sample in self._running:
            held[sample.owner] += self._counts.all(sample)
        return held

    def _take(self, draft: _Draft, sample: Sample, count: int, had: int = 0) -> Work:
        """Plan `count` tokens of a sample, behind `had` that are planned already."""
        draws = is_last(sample, had + count) and sample.draws
        forks = sample.width - 1 if draws else 0
        work = Work(sample, sample.computed, had + count, draws, forks)
        draft.work.append(work)
        draft.pages -= self._counts.need(sample, had + count) - self._counts.need(sample, had)
        share = draft.shares[sample.owner]
        draft.tokens, share.tokens = draft.tokens - count, share.tokens - count
        self._owners.serve(sample.owner, count)
        if not had:
            draft.rows, share.rows = draft.rows - 1, share.rows - 1
        sample.planned = self._plans
        return work

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


def _twin(parent: Sample, index: int) -> Sample:
    twin = Sample(
        request=parent.request,
        prompt=parent.prompt,
        limit=parent.limit,
        index=index,
        owner=parent.owner,
        priority=parent.priority,
        end_ids=parent.end_ids,
    )
    twin.known, twin.computed = parent.known, parent.computed
    twin.rank = (*parent.rank[:2], index)
    return twin
