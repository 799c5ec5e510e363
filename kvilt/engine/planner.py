"""From the scheduler's plan to sequences that can run: those it admits get caches, those it preempts give theirs back.

Refuses to know rows and results.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

from ..executor.protocol import Executor
from .active import ActiveRequests
from .counters import Counters
from .features.feature_set import FeatureSet
from .scheduling.plan import Admission, Sample, StepPlan
from .scheduling.scheduler import Scheduler
from .sequence import PoolAccounting, SequenceState
from .sequence_kv import cache_for, out_of_pages


class Planner:
    """Makes the plan of the next step, and applies it."""

    def __init__(
        self,
        executor: Executor,
        seqs: Mapping[Sample, SequenceState],
        scheduler: Scheduler,
        accounting: PoolAccounting,
        active: ActiveRequests,
        counters: Counters,
        features: FeatureSet,
        settle: Callable[[], bool],
    ) -> None:
        """`settle` finishes the step that is still computed; False if there is none."""
        self._executor = executor
        self._seqs = seqs
        self._scheduler = scheduler
        self._accounting = accounting
        self._active = active
        self._counters = counters
        self._features = features
        self._settle = settle

    def plan(self) -> StepPlan:
        """A plan that has work, if there is any; plans before it may only make room.

        A preempted sequence computes its tokens again, so that they must be read before.
        """
        while True:
            self._features.before_plan()
            plan = self._scheduler.plan()
            if (plan.preempted or plan.starved is not None) and self._settle() and plan.starved is not None:
                continue  # sequences that ended there have given their pages back
            self._accounting.end_failed(self._active.fail)
            plan = self._apply(plan)
            if plan.work or not (plan.preempted or plan.admitted or plan.starved is not None):
                return plan

    def _apply(self, plan: StepPlan) -> StepPlan:
        """Preempt and admit as a plan says; returns the plan without the requests that failed meanwhile."""
        for gone in plan.preempted:
            if (seq := self._seqs.get(gone.sample)) is not None:
                self._active.guarded(seq, partial(self._active.preempt, seq), None)
        for new in plan.admitted:
            if (seq := self._seqs.get(new.sample)) is not None:
                self._active.guarded(seq, partial(self._begin, seq, new), None)
        starved = None if plan.starved is None else self._seqs.get(plan.starved)
        if starved is not None and not self._accounting.free_kept_pages(True):
            self._active.end(starved, "error", out_of_pages(starved, self._executor))
        if all(work.sample in self._seqs for work in plan.work):
            return plan
        return replace(plan, work=tuple(work for work in plan.work if work.sample in self._seqs))

    def _begin(self, seq: SequenceState, new: Admission) -> None:
        """Give a sample the cache it starts with."""
        seq.kv = cache_for(seq, new.hit.tokens, self._executor)
        found = seq.kv.row(0).resumes_at
        page_tokens = self._executor.layout.page_tokens
        # The next turn, or another answer to this prompt, begins here.
        seq.kv.want_checkpoints([(new.sample.prompt - 1) // page_tokens * page_tokens])
        self._scheduler.set_cached(new.sample, found)  # another thread may have taken pages since they were counted
        self._features.begin(seq)
        if seq.cached is None:
            seq.cached = min(found, new.sample.prompt)
            if not seq.job.request.background:
                self._counters.sample_started(seq)
