"""The scheduler: which samples get rows in the next step, and which give their pages up.

Owners (API keys) share rows, tokens and pages by max-min fairness. Inside an owner's share decodes come first, then
prompts in order, cut to the step's budget. No page is promised twice. Counts tokens, rows and pages, and knows nothing
else.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from .admission_policy import AdmissionPolicy
from .page_counts import reached, usable
from .plan import PageAccounting, Sample, StepPlan, Work
from .proposals import AdvanceBlend, HoldRows, ScheduleProposal, WaitForStore, WantDrafts
from .schedule_state import PlanBuilder, ScheduleState, StepLimits

# One level of priority is worth arriving this many steps earlier. A sample that waits longer than that goes first.
PRIORITY_STEPS = 1000

UNREAD = -1  # a token that was drawn and is still on the device

End = Literal["stop", "length"]


@dataclass(slots=True)  # not frozen: see docs/decisions.md, "Records of a row"
class Advance:
    """What a step brought to a sample: a token, unless only KV was wanted, and perhaps its end."""

    sample: Sample
    token: int | None
    end: End | None
    parent: Sample | None = None  # it was forked off this one in this step


class Scheduler:
    """The order is deterministic. Between owners it follows what they hold and were served. Inside one owner it follows
    priority and arrival, as a rank that is fixed when a sample arrives."""

    def __init__(self, limits: StepLimits, pages: PageAccounting, weights: Mapping[str, float] | None = None) -> None:
        """`weights` of owners; an owner that is not named has weight 1."""
        self._state = ScheduleState(limits, pages, weights or {})
        self._admission = AdmissionPolicy(self._state)
        self._arrivals = 0

    @property
    def running(self) -> int:
        return len(self._state.running)

    @property
    def waiting(self) -> int:
        return len(self._state.waiting)

    def waiting_by_owner(self) -> Counter[str]:
        """Samples of each owner that wait; from any thread."""
        return Counter(sample.owner for sample in list(self._state.waiting))

    @property
    def ready(self) -> bool:
        """Whether a sample wants a row, and waits for nothing else."""
        samples = (*self._state.running, *self._state.waiting)
        return any(not sample.held and not sample.waits_for_store for sample in samples)

    # Samples come and go.

    def add(self, sample: Sample) -> None:
        """A new sample; it waits."""
        self._state.owners.add_sample(sample.owner)
        self._arrivals += 1
        sample.rank = (sample.priority * PRIORITY_STEPS + self._state.plan_number, self._arrivals, sample.index)
        self._state.enqueue(sample)

    def drop(self, sample: Sample) -> None:
        """A sample ended outside of the scheduler: it was aborted, it failed, or a stop string was found."""
        self._state.stop_computing(sample)
        for samples in (self._state.running, self._state.waiting):
            if sample in samples:
                samples.remove(sample)
                self._state.owners.remove_sample(sample.owner)

    def set_cached(self, sample: Sample, tokens: int) -> None:
        """How many tokens of KV an admitted sample really found."""
        sample.computed = tokens
        sample.shared_tail = True

    def requeue(self, sample: Sample) -> None:
        """A running sample gives its pages up and waits; it starts again from nothing."""
        self._state.requeue(sample)

    def set_keys(self, sample: Sample, keys: Sequence[bytes]) -> None:
        """What the prefix index knows the pages of a forked sample by."""
        sample.keys = keys

    def apply(self, proposal: ScheduleProposal) -> None:
        """Write what a feature proposes."""
        match proposal:
            case WantDrafts(counts):
                self._state.drafts = counts
            case WaitForStore(sample, waits):
                sample.waits_for_store = waits
            case AdvanceBlend(sample, progress):
                sample.blend_progress = progress
            case HoldRows(sample, held):
                sample.held = held

    # A step.

    def plan(self) -> StepPlan:
        """The next step. The samples it admits run from now on, those it preempts wait."""
        state = self._state
        state.plan_number += 1
        tokens, rows = self._step_tokens(), state.limits.max_rows
        shares = state.owners.shares(rows, tokens, self._demands)
        builder = PlanBuilder(tokens, rows, list(state.pages.free()), shares)
        self._continue_running(builder)
        if builder.short is None and builder.work and state.pages.lacks_states() and not state.pages.reclaim():
            builder.short = builder.work[-1].sample
        if builder.short is not None:
            self._preempt_one(builder, builder.short)
        else:
            self._admission.admit(builder)
            self._spend_leftovers(builder)
            self._add_drafts(builder)
        return builder.build()

    def commit(self, plan: StepPlan, drawn: Sequence[Sequence[int] | None]) -> list[Advance]:
        """A step was done: for each work its new tokens, None if it was not done.

        There is one token for each sample that draws. Without forks there may be several: accepted drafts and one token
        more. Samples that ended are removed.
        """
        advances = []
        for work, tokens in zip(plan.work, drawn, strict=True):
            if tokens is not None:
                accepted = max(0, len(tokens) - 1 - work.forks)
                self._state.set_computed(work.sample, reached(work) + accepted)
                advances += self._advance(work, tokens)
        for one in advances:
            if one.end is not None:
                self.drop(one.sample)
        return advances

    def read(self, advances: Sequence[Advance], plan: StepPlan, drawn: Sequence[Sequence[int] | None]) -> list[Advance]:
        """The unread tokens of a step that was committed are known now; some of them end their samples."""
        tokens = {work.sample: own for work, own in zip(plan.work, drawn, strict=True) if own is not None}
        known = []
        for one in advances:
            if (own := tokens.get(one.sample)) is None:  # it failed, or has ended meanwhile
                continue
            token = own[0] if one.token == UNREAD else None
            ends = token in one.sample.end_ids
            if ends and one.end is None:
                self.drop(one.sample)
            known.append(Advance(one.sample, token, "stop" if ends else one.end))
        return known

    def _advance(self, work: Work, tokens: Sequence[int]) -> list[Advance]:
        sample = work.sample
        if not work.draws:
            over = not sample.draws and sample.uncomputed == 0
            return [Advance(sample, None, "length")] if over else []
        forks = self._fork(sample) if work.forks else []
        advances = []
        for one, token in zip((sample, *forks) if forks else (sample,) * len(tokens), tokens, strict=True):
            one.known += 1
            end: End | None = "stop" if token in one.end_ids else "length" if one.known >= one.limit else None
            advances.append(Advance(one, token, end, None if one is sample else sample))
        return advances

    def _fork(self, parent: Sample) -> list[Sample]:
        """The other samples of a request whose prompt is computed; they run from now on."""
        forks = [_forked(parent, index) for index in range(1, parent.width)]
        parent.width = 1
        for sample in (parent, *forks):
            sample.shared_tail = True
        for fork in forks:
            self._state.owners.add_sample(fork.owner)
            self._state.start(fork)
        return forks

    # Shares of a step.

    def _step_tokens(self) -> int:
        """Tokens of the next step: fewer where the prompts of one owner would delay the decodes of another one."""
        state, limits = self._state, self._state.limits
        decodes = (sample.uncomputed == 1 and not sample.held for sample in state.running)
        if len(state.owners.accounts) > 1 and any(decodes):
            return min(limits.step_tokens, max(limits.shared_tokens, limits.max_rows))
        return limits.step_tokens

    def _demands(self) -> dict[str, list[int]]:
        """For each owner the tokens of each row it could use, in the order in which it would."""
        state, limits = self._state, self._state.limits
        demands: dict[str, list[int]] = {owner: [] for owner in state.owners.accounts}
        for sample in state.schedulable():
            if count := usable(sample, limits.step_tokens):
                demands[sample.owner].append(count)
        for sample in state.waiting:
            if len(demands[sample.owner]) < limits.max_rows and not self._admission.cannot_start(sample):
                demands[sample.owner].append(min(sample.uncomputed, limits.step_tokens))
        return demands

    def _spend_leftovers(self, builder: PlanBuilder) -> None:
        """What owners could not use of their shares, for lack of pages, goes to the others."""
        state = self._state
        if len(builder.shares) <= 1 or not builder.tokens:
            return
        places = {work.sample: place for place, work in enumerate(builder.work)}
        for sample in sorted(state.schedulable(), key=lambda one: state.owners.accounts[one.owner].served):
            place = places.get(sample)
            had = builder.work[place].count if place is not None else 0
            more = usable(sample, had + builder.tokens) - had
            new_pages = state.counts.need(sample, had + more) - state.counts.need(sample, had)
            if more <= 0 or new_pages > min(builder.pages) or (place is None and not builder.rows):
                continue
            work = state.add_work(builder, sample, more, had)
            if place is not None:
                builder.work.pop()
                builder.work[place] = work

    # Running samples.

    def _continue_running(self, builder: PlanBuilder) -> None:
        for sample in self._state.schedulable():
            share = builder.shares[sample.owner]
            count = usable(sample, share.tokens) if share.rows else 0
            if not count:
                continue  # its owner has used its share, or its blending has not begun
            if self._fits(builder, sample, count):
                self._state.add_work(builder, sample, count)
            elif builder.short is None or sample.rank < builder.short.rank:
                builder.short = sample

    def _fits(self, builder: PlanBuilder, sample: Sample, count: int) -> bool:
        state = self._state
        if (need := state.counts.need(sample, count)) <= min(builder.pages):
            return True
        if sample.shared_tail:
            sample.shared_tail = state.pages.shares_tail(sample)
            need = state.counts.need(sample, count)
        state.reclaim(builder, [need - n for n in builder.pages])
        return need <= min(builder.pages)

    def _preempt_one(self, builder: PlanBuilder, short: Sample) -> None:
        """Preempt one sample: one without a reader first, then the last of the owner that holds the most pages.

        Pages are shared, so what a preemption frees is known only after it. One plan therefore preempts one sample, and
        the next plan sees the free pages.
        """
        state = self._state
        if len(state.running) == 1:
            builder.starved = short
            return
        held = state.held_pages()
        state.preempt(
            builder, max(state.running, key=lambda sample: (sample.held, *state.preemption_order(sample, held)))
        )

    # Drafts.

    def _add_drafts(self, builder: PlanBuilder) -> None:
        """Give what is left of a step to drafts. No sample is preempted for drafts, or waits for them."""
        counts, asked = self._state.counts, self._state.drafts
        if not asked:
            return
        places = [at for at, work in enumerate(builder.work) if work.draws and not work.forks and work.sample in asked]
        if not places:
            return
        room = min(self._state.unpromised_pages(builder))
        for at in places:
            work, sample = builder.work[at], builder.work[at].sample
            count = min(asked[sample], builder.tokens, sample.limit - sample.known - 1)
            need = counts.need(sample, work.count)
            while count > 0 and counts.need(sample, work.count + count) - need > room:
                count -= 1
            if count > 0:
                room -= counts.need(sample, work.count + count) - need
                builder.tokens -= count
                builder.work[at] = replace(work, drafts=count)


def _forked(parent: Sample, index: int) -> Sample:
    fork = Sample(
        request=parent.request,
        prompt=parent.prompt,
        limit=parent.limit,
        index=index,
        owner=parent.owner,
        priority=parent.priority,
        end_ids=parent.end_ids,
        max_step_tokens=parent.max_step_tokens,
    )
    fork.known, fork.computed = parent.known, parent.computed
    fork.rank = (*parent.rank[:2], index)
    if parent.blend_progress is not None:  # in case it is preempted and starts again
        fork.blend_progress = parent.blend_progress.restarted
    return fork
