"""The engine: plan, run, sample, commit, notify. One step computes the rows of all scheduled sequences.

`step` belongs to one thread at a time; requests come and go from any. Refuses to know text and threads.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from ..blend.chunk import ChunkCache
from ..config import EngineConfig
from ..errors import Cancelled, PoolExhausted
from ..executor.protocol import Executor
from ..metrics import Metrics
from ..store.store import Store
from .active import ActiveRequests
from .admission import BorrowedKV, make_job
from .blend_decision import BlendJudge, OnLogits
from .counters import ENGINE_METRICS, Counters
from .discovery import wants_discovery
from .event import Ended, Listener
from .features.blending import BlendQueue
from .features.feature import Abort, Fail, Feature, FinishedStep, MakeRow, Proposal, Requeue, Submit
from .features.prefix_restore import PrefixRestore
from .forward import Result, RowDone, RowFailed, RowTask, forward
from .handles import HandleInfo
from .isolation import contained
from .notify import notify
from .page_counts import reached
from .plan import Admission, Sample, StepPlan, Work
from .proposals import HoldRows
from .request import Request
from .rows import row_task
from .schedule_state import StepLimits
from .scheduler import Scheduler
from .sequence import Job, PoolAccounting, ReclaimPages, SequenceState
from .sequence_kv import cache_for, out_of_pages
from .view import EngineView, look


class Engine:
    """Requests over one executor."""

    def __init__(
        self,
        executor: Executor,
        config: EngineConfig | None = None,
        metrics: Metrics | None = None,
        clock: Callable[[], float] = time.monotonic,
        features: Sequence[Feature] = (),
        judge: BlendJudge | None = None,
        chunks: Callable[[], ChunkCache] | None = None,
        store: Store | None = None,
        reclaim: ReclaimPages | None = None,
    ) -> None:
        """`features` plug in beside blending and stored prefixes; `judge` decides how documents are blended.

        `chunks` gives what documents of prompts are found in; without it such requests are refused.

        `reclaim` is asked for pages before a request is preempted or fails.

        `store`, if it has a tier that outlives the process, keeps prefixes that this executor has no room for. Closing
        the engine puts all of them there.
        """
        config = config or EngineConfig()
        limits = StepLimits(config.step_tokens, config.max_rows, executor.layout.page_tokens, config.shared_step_tokens)
        self._executor, self._clock = executor, clock
        self._judge, self._chunks, self._discover = judge, chunks, config.discover
        self.metrics = metrics or Metrics(ENGINE_METRICS)
        self.wakeup = threading.Event()  # set, from any thread, when there may be something to do
        self._inbox: deque[Callable[[], None]] = deque()  # calls from other threads, until the next step
        self._arriving: dict[Job, None] = {}  # jobs in there
        self._seqs: dict[Sample, SequenceState] = {}
        restore = self._prefix_restore = _prefix_restore(executor, store, config, self.metrics, self.wakeup.set)
        own = (BlendQueue(self.wakeup.set), *(() if restore is None else (restore,)))
        self._features: tuple[Feature, ...] = (*features, *own)
        self._on_evict = None if restore is None else restore.store_page  # of prefixes that this engine computes
        load_prefix = None if restore is None else restore.load_prefix
        self._accounting = PoolAccounting(executor, self._seqs, reclaim or _nothing_to_reclaim, load_prefix)
        self._scheduler = Scheduler(limits, self._accounting, config.owner_weights)
        self._counters = Counters(self.metrics, executor.pool, self._scheduler, clock)
        self._active = ActiveRequests(executor, self._scheduler, self._counters, clock, self._seqs, self._features)

    # The spine.

    def step(self) -> bool:
        """One forward for all scheduled rows; False if there is none.

        Raises what concerns the call itself. After a cancel all sequences are where they were before. After an internal
        error the rows of the step end.
        """
        plan = self._plan()
        if not plan.work:
            return False
        try:
            step = self._forward(plan, self._tasks(plan))
            for feature in self._features:
                self._apply(feature.after_step(step, self._seqs))
            drawn = [self._commit(*row) for row in zip(plan.work, step.tasks, step.results, strict=True)]
            advances = self._scheduler.commit(plan, drawn)
            done = [result for result, tokens in zip(step.results, drawn, strict=True) if tokens is not None]
            self._active.notify_advances(advances, done)
        except Cancelled:
            raise
        except BaseException as error:
            for work in plan.work:  # their state is half done
                if (seq := self._seqs.get(work.sample)) is not None:
                    self._active.end(seq, "error", error)
            raise
        self._counters.update_gauges()
        return True

    # From any thread.

    def prepare(
        self,
        request: Request,
        listener: Listener,
        borrowed: BorrowedKV | None = None,
        on_first_logits: OnLogits | None = None,
    ) -> Job:
        """Check a request and make the job to add; raises for everything that is wrong with the request.

        The engine owns the borrowed cache from here on, also if this raises.
        """
        if request.discover is None and self._discover:
            request = replace(request, discover=True)
        try:
            chunks = self._chunks_for(request)
            return make_job(self._executor, request, listener, borrowed, chunks, self._judge, on_first_logits)
        except BaseException:
            if borrowed is not None:
                borrowed.kv.close()
            raise

    def add(self, job: Job, held: bool = False) -> None:
        """Admit a request at the next step; if `held`, it gets no row until `resume`."""
        self._scheduler.apply(HoldRows(job.first.sample, held))
        job.arrived_s = self._clock()
        self._arriving[job] = None
        self._inbox.append(partial(self._admit, job))

    def abort(self, which: Job | str) -> None:
        """End a request before the next step, unless it has ended already; a job also if it was never added."""
        self._inbox.append(partial(self._active.abort, which))

    def hold(self, which: Job | str) -> None:
        """Give a request no row until `resume`: its reader is behind."""
        self._inbox.append(partial(self._hold, which, True))

    def resume(self, which: Job | str) -> None:
        """Give a request rows again."""
        self._inbox.append(partial(self._hold, which, False))

    def view(self, tenant: str, handles: Sequence[HandleInfo] = (), most: int | None = None) -> EngineView:
        """What a tenant has here at this moment; its handles are given, since they are kept elsewhere."""
        seqs = [*self._seqs.values(), *[job.first for job in list(self._arriving)]]
        return look(self._executor, [one for one in seqs if not one.job.request.background], tenant, handles, most)

    @property
    def requests(self) -> int:
        """Requests in progress for which callers wait, those not yet admitted included."""
        return sum(not job.request.background for job in (*list(self._active.jobs.values()), *list(self._arriving)))

    @property
    def waiting(self) -> int:
        """Samples that wait for their first row, or for the next one after a preemption."""
        return self._scheduler.waiting + len(self._arriving)

    def waiting_by_owner(self) -> Counter[str]:
        """The same for each owner."""
        return self._scheduler.waiting_by_owner() + Counter(job.request.owner for job in list(self._arriving))

    # Between two steps.

    def drain_inbox(self) -> None:
        """Carry out the calls of other threads."""
        while self._inbox:
            self._inbox.popleft()()

    @property
    def has_inbox(self) -> bool:
        """Whether calls of other threads wait to be carried out."""
        return bool(self._inbox)

    @property
    def ready(self) -> bool:
        """Whether a step would have something to do."""
        return self.has_inbox or self._scheduler.ready or any(feature.has_ready for feature in self._features)

    @property
    def wait_timeout_s(self) -> float | None:
        """Seconds after which the driver asks again, if nothing wakes it; None where no sequence waits for a store."""
        timeouts = [feature.wait_timeout_s for feature in self._features]
        return min((timeout_s for timeout_s in timeouts if timeout_s is not None), default=None)

    def fail_all(self, error: BaseException) -> None:
        """End all requests."""
        self.drain_inbox()
        for feature in self._features:
            self._apply(feature.stop())
        for job in list(self._active.jobs.values()):
            for seq in list(job.live):
                self._active.end(seq, "error", error)

    def close(self) -> None:
        """Put all known prefixes into the store, if there is one that outlives the process."""
        if self._prefix_restore is not None:
            self._prefix_restore.close()

    # What other threads and features ask for.

    def _admit(self, job: Job) -> None:
        self._arriving.pop(job, None)
        self._active.add(job)

    def _hold(self, which: Job | str, held: bool) -> None:
        job = self._active.find(which)
        for seq in job.live if job is not None else ():
            self._scheduler.apply(HoldRows(seq.sample, held))

    def _apply(self, proposals: Iterable[Proposal]) -> None:
        """Carry out what a feature proposes."""
        for proposal in proposals:
            match proposal:
                case Requeue(seq, error):
                    self._active.requeue(seq, error)
                case Fail(seq, failure):
                    self._active.fail(seq, failure)
                case Submit():
                    self._submit(proposal)
                case Abort(request):
                    self._active.abort(request)
                case _:
                    self._scheduler.apply(proposal)

    def _submit(self, own: Submit) -> None:
        """Admit a request of a feature, or tell its listener why not."""
        try:
            job = self.prepare(own.request, own.listener, on_first_logits=own.on_first_logits)
        except BaseException as error:
            own.listener.on_event(Ended(0, "error", error=contained(error)))
        else:
            self._active.add(job)

    def _chunks_for(self, request: Request) -> ChunkCache | None:
        """What the documents of a request are found in; None where it has none and looks for none."""
        if self._chunks is None or not (request.documents or wants_discovery(request)):
            return None
        return self._chunks()

    # Planning.

    def _plan(self) -> StepPlan:
        """A plan that has work, if there is any; plans before it may only make room."""
        try:
            self.drain_inbox()
            while True:
                for feature in self._features:
                    self._apply(feature.before_plan(self._seqs))
                plan = self._scheduler.plan()
                self._accounting.end_failed(self._active.fail)
                plan = self._apply_plan(plan)
                if plan.work or not (plan.preempted or plan.admitted or plan.starved is not None):
                    return plan
        except BaseException as error:  # an internal error, or an interrupt: no sequence's state can be trusted
            self.fail_all(error)
            raise

    def _apply_plan(self, plan: StepPlan) -> StepPlan:
        """Preempt and admit as a plan says; returns the plan without the requests that failed meanwhile."""
        for gone in plan.preempted:
            if (seq := self._seqs.get(gone.sample)) is not None:
                self._active.guarded(seq, partial(self._active.preempt, seq), None)
        for new in plan.admitted:
            if (seq := self._seqs.get(new.sample)) is not None:
                self._active.guarded(seq, partial(self._place, seq, new), None)
        if plan.starved in self._seqs and not self._accounting.free_kept_pages(True):
            starved = self._seqs[plan.starved]
            self._active.end(starved, "error", out_of_pages(starved, self._executor))
        if all(work.sample in self._seqs for work in plan.work):
            return plan
        return replace(plan, work=tuple(work for work in plan.work if work.sample in self._seqs))

    def _place(self, seq: SequenceState, new: Admission) -> None:
        """Give a sample the cache it starts with."""
        seq.kv = cache_for(seq, new.hit.tokens, self._executor)
        found = seq.kv.num_entries
        self._scheduler.set_cached(new.sample, found)  # another thread may have taken pages since they were counted
        for feature in self._features:
            self._apply(feature.begin(seq))
        if seq.cached is None:
            seq.cached = min(found, new.sample.prompt)
            if not seq.job.request.background:
                self._counters.sample_started(seq)

    # Running.

    def _tasks(self, plan: StepPlan) -> list[RowTask | None]:
        """The rows of a plan: those that features make, and the next tokens of all other samples."""
        makers: dict[Sample, MakeRow] = {}
        for feature in self._features:
            makers.update(feature.rows(plan, self._seqs))
        return [self._task(work, makers) for work in plan.work]

    def _task(self, work: Work, makers: Mapping[Sample, MakeRow]) -> RowTask | None:
        seq = self._seqs[work.sample]
        if work.start != work.sample.computed:  # it found fewer tokens than it was promised
            return None
        return self._active.guarded(seq, makers.get(work.sample) or partial(row_task, seq, work), None)

    def _forward(self, plan: StepPlan, tasks: Sequence[RowTask | None]) -> FinishedStep:
        there = [i for i, task in enumerate(tasks) if task is not None]
        results = forward(self._executor, [task for task in tasks if task is not None]) if there else []
        by_place = dict(zip(there, results, strict=True))
        return FinishedStep(plan, tasks, [by_place.get(i) for i in range(len(tasks))])

    def _commit(self, work: Work, task: RowTask | None, result: Result | None) -> Sequence[int] | None:
        """Advance a sample's cache; the tokens it drew, or None if its row was not done."""
        if task is None or result is None or (seq := self._seqs.get(work.sample)) is None:
            return None
        match result:
            case RowFailed(PoolExhausted() as error) if work.sample.is_blending:  # a document is not there after all
                self._active.requeue(seq, error)
                return None
            case RowFailed(error):
                self._active.fail(seq, error)
                return None
            case RowDone():
                return self._active.guarded(seq, partial(self._row_done, seq, work, task, result), None)

    def _row_done(self, seq: SequenceState, work: Work, task: RowTask, result: RowDone) -> Sequence[int]:
        """A row was computed: its cache grows, and its listener is notified."""
        accepted = result.tokens[:-1] if work.drafts else ()
        stop = reached(work) + len(accepted)
        if stop > work.start:
            self._grow(seq, work.start, stop, accepted)
        if task.drafts:
            self._verified(seq, stop, len(task.drafts), len(accepted))
        if stop > work.start and work.start < work.sample.prompt:
            self._active.prompt_progress(seq, min(stop, work.sample.prompt))
        if result.scores is not None and seq.scoring is not None:
            notify(seq.job, seq.scoring.event(seq.ids, work.start, result.scores))
        return result.tokens

    def _grow(self, seq: SequenceState, start: int, stop: int, accepted: Sequence[int]) -> None:
        """Positions [start, stop) of a cache are computed, the last of them from accepted drafts."""
        assert seq.kv is not None
        size, filled = self._executor.layout.page_tokens, None
        keys = None if seq.job.request.background else seq.prefix_keys
        if keys is not None and start // size < stop // size:
            filled = partial(self._executor.prefixes.insert, prefix_keys=keys, on_evict=self._on_evict)
        seq.kv.commit([[*seq.tokens(start, stop), *accepted]], filled=filled)

    def _verified(self, seq: SequenceState, stop: int, drafted: int, accepted: int) -> None:
        """Count the drafts of a row, and free the pages of those that were not accepted."""
        assert seq.kv is not None
        seq.drafts = seq.drafts.plus(drafted, accepted)
        self._counters.verified(drafted, accepted)
        if seq.kv.row(0).reserved - stop >= self._executor.layout.page_tokens:
            seq.kv.truncate(stop)


def _prefix_restore(
    executor: Executor, store: Store | None, config: EngineConfig, metrics: Metrics, wake: Callable[[], None]
) -> PrefixRestore | None:
    """Prefixes in a store; None without a store that outlives the process."""
    if store is None or store.least_budget is None or config.stored_prefix_tokens is None:
        return None
    return PrefixRestore(executor, store, config.stored_prefix_tokens, metrics, wake)


def _nothing_to_reclaim(_pinned: bool) -> bool:
    return False
