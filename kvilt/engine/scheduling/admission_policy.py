"""Which waiting samples start in a plan, and which running ones are preempted for them.

A part of the scheduler: counts tokens, rows and pages, and knows nothing else.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from operator import add, gt, sub
from typing import Literal

from .page_counts import usable
from .plan import Admission, Pages, PrefixHit, Sample
from .schedule_state import PlanBuilder, ScheduleState, rank_of

# A sample that alone needs more than its owner's share of pages waits this many plans for room. Then the scheduler
# preempts others for it, and protects it for as many plans. The plans that recomputing it takes come on top of both.
PATIENCE_STEPS = 50

# Of one sample: it started or waits for a page; its owner gets no more; the plan preempts or starves a sample.
Outcome = Literal["done", "full", "preempted"]


@dataclass(slots=True)
class _Round:
    """What the admissions of one plan have left."""

    room: Pages  # free pages that are not promised
    held: dict[str, int]  # shares of pages, by owner
    rights: dict[str, int]  # shares of pages, by owner
    startable: int | None  # samples that have slots for recurrent states; None: no limit
    tight: bool = False  # a sample did not fit: from here on no owner gets more than its share
    loads_prefix: bool = False  # an admitted sample waits for its prefix from a store


class AdmissionPolicy:
    """Starts waiting samples while there are rows, tokens and pages for them."""

    def __init__(self, state: ScheduleState) -> None:
        self._state = state

    def admit(self, builder: PlanBuilder) -> None:
        """Start samples. The next one is always the first of the owner that holds the fewest pages."""
        state = self._state
        queues: dict[str, deque[Sample]] = {}
        for sample in state.waiting:
            queues.setdefault(sample.owner, deque()).append(sample)
        if not queues:
            return
        held, rights = state.held_pages(), state.owners.rights(state.counts.largest)
        left = _Round(state.unpromised_pages(builder), held, rights, state.pages.startable())
        while queues:
            owner = min(queues, key=lambda one: self._order(queues[one][0], held[one]))
            sample, share = queues[owner].popleft(), builder.shares[owner]
            if not share.rows or not share.tokens or self._is_too_wide(sample):
                del queues[owner]
                continue
            if not queues[owner]:
                del queues[owner]
            if self.cannot_start(sample):
                continue
            outcome = self._try_start(builder, sample, left)
            if outcome == "preempted":
                return
            if outcome == "full":
                queues.pop(owner, None)  # no other sample of its owner goes first, or this one might wait forever

    def _try_start(self, builder: PlanBuilder, sample: Sample, left: _Round) -> Outcome:
        """Start a sample if its pages fit."""
        state, owner = self._state, sample.owner
        if left.startable is not None and not self._has_states(builder, sample, left):
            return "preempted" if builder.starved is not None else "full"
        hit = self._hit(sample, left.room)
        if self._awaits_page(sample):
            return "done"
        need = state.counts.whole(sample, hit, alone=not state.running)
        share = state.counts.share(need)
        if left.tight and left.held[owner] + share > left.rights[owner]:
            return "full"
        left.room = [*map(add, left.room, state.reclaim(builder, [*map(sub, need, left.room)]))]
        missing = [*map(sub, need, left.room)]
        if max(missing) > 0:
            # Room that is kept for a sample whose prefix is being loaded is not lost.
            if not left.loads_prefix and self._make_room(builder, sample, missing, left.held, left.rights):
                return "preempted"
            left.tight = True
            return "full"
        left.room = [*map(sub, left.room, need)]
        left.held[owner] += share
        left.startable = None if left.startable is None else left.startable - sample.width
        if state.pages.loads_prefix(sample, hit):
            left.loads_prefix = sample.waits_for_store = True
        else:
            self._start(builder, sample, hit)
        return "done"

    def _has_states(self, builder: PlanBuilder, sample: Sample, left: _Round) -> bool:
        """Whether there are slots for the recurrent states of a sample and its forks; a sample alone shares some."""
        state = self._state
        needed = sample.width if state.running else 1
        while left.startable is not None and left.startable < needed and state.pages.reclaim():
            left.startable = state.pages.startable()
        if left.startable is None or left.startable >= needed:
            return True
        if not state.running:
            builder.starved = sample
        return False

    def cannot_start(self, sample: Sample) -> bool:
        """Whether a waiting sample waits for something other than room."""
        return sample.held or sample.waits_for_store or self._awaits_page(sample)

    def _is_too_wide(self, sample: Sample) -> bool:
        """Whether so many samples run that this one has to wait; its owner's share of rows is kept free for it."""
        state = self._state
        widths: dict[str, int] = {}
        for one in state.running:
            if not one.held:
                widths[one.owner] = widths.get(one.owner, 0) + one.width
        most, own, total = state.limits.max_rows, widths.get(sample.owner, 0), sum(widths.values())
        if not own or total + sample.width <= most:
            return False
        return own + sample.width > state.owners.rights(most)[sample.owner]

    def _start(self, builder: PlanBuilder, sample: Sample, hit: PrefixHit) -> None:
        state = self._state
        state.waiting.remove(sample)
        state.start(sample)
        if sample.blocked_since:
            recompute = 2 * -(-sample.known // state.limits.step_tokens)
            sample.protected_until, sample.blocked_since = state.plan_number + PATIENCE_STEPS + recompute, 0
        sample.computed, sample.shared_tail = hit.tokens, True
        for key in sample.keys[hit.tokens // state.limits.page_tokens :]:
            state.computing.setdefault(key, sample)
        builder.admitted.append(Admission(sample, hit))
        if count := usable(sample, builder.shares[sample.owner].tokens):
            state.add_work(builder, sample, count)

    def _hit(self, sample: Sample, room: Pages) -> PrefixHit:
        """The longest hit; where its last, partly filled page would be one too many, the longest of whole pages.

        If another sample computes the page after the hit, `awaited_page` is set to it.
        """
        state = self._state
        size, most = state.limits.page_tokens, sample.known - 1
        if sample.blend_progress is not None:
            most = min(most, sample.blend_progress.start)
        hit = state.pages.hit(sample, most)
        if hit.tokens % size and any(map(gt, state.counts.whole(sample, hit, alone=not state.running), room)):
            hit = state.pages.hit(sample, most - most % size)
        page = hit.tokens // size
        if (
            not sample.scored
            and page < len(sample.keys)
            and state.computing.get(sample.keys[page]) not in (None, sample)
        ):
            sample.awaited_page = sample.keys[page]
        return hit

    def _awaits_page(self, sample: Sample) -> bool:
        """Whether a running sample computes the page that this one needs next."""
        computing = None if sample.awaited_page is None else self._state.computing.get(sample.awaited_page)
        if computing is None or computing.held:
            sample.awaited_page = None
        return sample.awaited_page is not None

    def _make_room(
        self, builder: PlanBuilder, sample: Sample, missing: Pages, held: Mapping[str, int], rights: Mapping[str, int]
    ) -> bool:
        """The first sample of an owner does not fit. True: another one is preempted, or none is left, so it starves.

        Samples without a reader are preempted for every other one. Samples of an owner that holds more than its share
        are preempted for an owner that asks for no more than its own.
        """
        state = self._state
        unread = [one for one in state.running if one.held]
        if unread:
            state.preempt(builder, max(unread, key=rank_of))
            return True
        if not state.running:
            builder.starved = sample
            return True
        others = [one for one in state.running if one.owner != sample.owner and one.protected_until < state.plan_number]
        if held[sample.owner] + state.counts.share(state.counts.all(sample)) <= rights[sample.owner]:
            others = [one for one in others if held[one.owner] > rights[one.owner]]
        elif held[sample.owner]:
            return False
        elif not self._is_impatient(sample):
            sample.blocked_since = sample.blocked_since or state.plan_number
            return False
        for one in sorted(others, key=lambda one: state.preemption_order(one, held), reverse=True):
            missing = [*map(sub, missing, state.counts.taken(one))]  # at most: some of its pages may be shared
            state.preempt(builder, one)
            if max(missing) <= 0:
                break
        return bool(others)

    def _order(self, sample: Sample, held: int) -> tuple[bool, float, tuple[int, int, int]]:
        """The first sample of an owner that holds `held` pages; the smallest value starts first."""
        return not self._is_impatient(sample), held / self._state.owners.accounts[sample.owner].weight, sample.rank

    def _is_impatient(self, sample: Sample) -> bool:
        """Whether a sample larger than its owner's share has waited long enough for others to be preempted."""
        return 0 < sample.blocked_since <= self._state.plan_number - PATIENCE_STEPS
