"""The engine: plan, run, sample, commit, notify. One step computes the rows of all scheduled sequences.

`step` belongs to one thread at a time; requests come and go from any. Refuses to know text and threads.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from ..blend.certificate import Certificate
from ..blend.chunk import ChunkCache
from ..blend.quality_gate import QualityGate
from ..config import EngineConfig
from ..errors import Cancelled, PoolExhausted
from ..executor.protocol import Executor
from ..metrics import Metrics
from ..store.store import Store
from .active import ActiveRequests, LoadQueue
from .admission import BorrowedKV, make_job
from .blending import BlendQueue
from .counters import ENGINE_METRICS, Counters
from .discovery import wants_discovery
from .drafting import Drafting
from .event import Listener
from .forward import Result, RowDone, RowFailed, RowTask, forward
from .handles import HandleInfo
from .isolation import quietly
from .notify import notify
from .plan import Admission, Sample, StepPlan, Work
from .prefix_restore import PrefixRestore
from .quality_checks import QualityChecks
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
        drafting: Drafting | None = None,
        chunks: Callable[[], ChunkCache] | None = None,
        gate: QualityGate | None = None,
        store: Store | None = None,
        reclaim: ReclaimPages | None = None,
    ) -> None:
        """`chunks` gives what documents of prompts are found in; without it such requests are refused.

        `reclaim` is asked for pages before a request is preempted or fails.

        `store`, if it has a tier that outlives the process, keeps prefixes that this executor has no room for. Closing
        the engine puts all of them there.
        """
        config = config or EngineConfig()
        limits = StepLimits(config.step_tokens, config.max_rows, executor.layout.page_tokens, config.shared_step_tokens)
        self._executor, self._clock = executor, clock
        self._drafting, self._chunks, self._discover = drafting, chunks, config.discover
        self.metrics = metrics or Metrics(ENGINE_METRICS)
        self.wakeup = threading.Event()  # set, from any thread, when there may be something to do
        self._inbox: deque[Callable[[], None]] = deque()  # calls from other threads, until the next step
        self._arriving: dict[Job, None] = {}  # jobs in there
        self._seqs: dict[Sample, SequenceState] = {}
        self._blends = BlendQueue(self.wakeup.set, self._requeue, self._fail)
        self._prefix_restore = _prefix_restore(executor, store, config, self.metrics, self.wakeup.set)
        restore = self._prefix_restore
        self._load_queues: tuple[LoadQueue, ...] = (self._blends,) if restore is None else (self._blends, restore)
        load_prefix = None if restore is None else restore.load_prefix
        self._accounting = PoolAccounting(executor, self._seqs, reclaim or _nothing_to_reclaim, load_prefix)
        self._scheduler = Scheduler(limits, self._accounting, config.owner_weights)
        self._counters = Counters(self.metrics, executor.pool, self._scheduler, clock)
        self._active = ActiveRequests(
            executor, self._scheduler, self._counters, clock, self._seqs, self._load_queues, drafting, restore
        )
        self._quality_checks = QualityChecks(gate, executor, self.metrics, self._seqs) if gate is not None else None

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
            if self._drafting is not None:
                self._drafting.propose(plan, self._seqs, self._executor.spec.vocab_size)
            tasks = [self._task(work) for work in plan.work]
            results = self._forward(tasks)
            if self._drafting is not None:
                quietly(partial(self._drafting.record_step, plan, tasks, results), None)
            drawn = [self._commit(work, result) for work, result in zip(plan.work, results, strict=True)]
            advances = self._scheduler.commit(plan, drawn)
            done = [result for result, tokens in zip(results, drawn, strict=True) if tokens is not None]
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

    def prepare(self, request: Request, listener: Listener, borrowed: BorrowedKV | None = None) -> Job:
        """Check a request and make the job to add; raises for everything that is wrong with the request.

        The engine owns the borrowed cache from here on, also if this raises.
        """
        checks = self._quality_checks
        if request.discover is None and self._discover:
            request = replace(request, discover=True)
        try:
            job = make_job(
                self._executor, request, listener, borrowed, self.chunks_for(request), checks.gate if checks else None
            )
        except BaseException:
            if borrowed is not None:
                borrowed.kv.close()
            raise
        if checks is not None:
            checks.watch(job)
        return job

    def add(self, job: Job, held: bool = False) -> None:
        """Admit a request at the next step; if `held`, it gets no row until `resume`."""
        job.first.sample.held = held
        job.arrived_s = self._clock()
        self._arriving[job] = None
        self._inbox.append(partial(self.admit_now, job))

    def abort(self, which: Job | str) -> None:
        """End a request before the next step, unless it has ended already; a job also if it was never added."""
        self._inbox.append(partial(self._active.abort, which))

    def hold(self, which: Job | str) -> None:
        """Give a request no row until `resume`: its reader is behind."""
        self._inbox.append(partial(self._hold, which, True))

    def resume(self, which: Job | str) -> None:
        """Give a request rows again."""
        self._inbox.append(partial(self._hold, which, False))

    def chunks_for(self, request: Request) -> ChunkCache | None:
        """What the documents of a request are found in; None where it has none and looks for none."""
        if self._chunks is None or not (request.documents or wants_discovery(request)):
            return None
        return self._chunks()

    def view(self, tenant: str, handles: Sequence[HandleInfo] = (), most: int | None = None) -> EngineView:
        """What a tenant has here at this moment; its handles are given, since they are kept elsewhere."""
        seqs = [*self._seqs.values(), *[job.first for job in list(self._arriving)]]
        return look(self._executor, [one for one in seqs if not one.job.request.background], tenant, handles, most)

    def certificates(self) -> list[Certificate]:
        """What a quality gate has learnt of blending, if there is one."""
        return self._quality_checks.gate.certificates() if self._quality_checks is not None else []

    @property
    def requests(self) -> int:
        """Requests in progress, those not yet admitted included."""
        own = self._quality_checks.running if self._quality_checks is not None else 0
        return len(self._active.jobs) + len(self._arriving) - own

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
        compares = self._quality_checks is not None and self._quality_checks.has_work
        return self.has_inbox or self._scheduler.ready or compares or any(one.has_ready for one in self._load_queues)

    @property
    def wait_timeout_s(self) -> float | None:
        """Seconds after which the driver asks again, if nothing wakes it; None where no sequence waits for a store."""
        timeouts = [timeout_s for one in self._load_queues if (timeout_s := one.wait_timeout_s) is not None]
        return min(timeouts, default=None)

    def fail_all(self, error: BaseException) -> None:
        """End all requests."""
        self.drain_inbox()
        if self._quality_checks is not None:
            self._quality_checks.close(self)
        for job in list(self._active.jobs.values()):
            for seq in list(job.live):
                self._active.end(seq, "error", error)

    def close(self) -> None:
        """Put all known prefixes into the store, if there is one that outlives the process."""
        if self._prefix_restore is not None:
            self._prefix_restore.close()

    # For quality checks, in the thread that steps.

    def admit_now(self, job: Job) -> None:
        """Admit a request without waiting for the next step."""
        self._arriving.pop(job, None)
        self._active.add(job)

    def abort_now(self, job: Job) -> None:
        """End a request without waiting for the next step."""
        self._active.abort(job)

    def _hold(self, which: Job | str, held: bool) -> None:
        job = self._active.find(which)
        for seq in job.live if job is not None else ():
            seq.sample.held = held

    def _requeue(self, seq: SequenceState, error: PoolExhausted) -> None:
        self._active.requeue(seq, error)

    def _fail(self, seq: SequenceState, error: Exception) -> None:
        self._active.fail(seq, error)

    # Planning.

    def _plan(self) -> StepPlan:
        """A plan that has work, if there is any; plans before it may only make room."""
        try:
            self.drain_inbox()
            while True:
                if self._quality_checks is not None:
                    self._quality_checks.before_plan(self)
                for one in self._load_queues:
                    one.before_plan()
                if self._drafting is not None:
                    self._drafting.request_drafts(self._seqs)
                plan = self._scheduler.plan()
                self._accounting.end_failed(self._fail)
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
        if seq.blending is not None:
            seq.blending.open()
        seq.kv = cache_for(seq, new.hit.tokens, self._executor)
        found = seq.kv.num_entries
        self._scheduler.set_cached(new.sample, found)  # another thread may have taken pages since they were counted
        if new.sample.is_blending:
            self._blends.add(seq)
        if seq.cached is None:
            seq.cached = min(found, new.sample.prompt)
            if not seq.job.request.background:
                self._counters.sample_started(seq)

    # Running.

    def _task(self, work: Work) -> RowTask | None:
        seq = self._seqs[work.sample]
        return self._active.guarded(seq, partial(row_task, seq, work), None)

    def _forward(self, tasks: Sequence[RowTask | None]) -> list[Result | None]:
        there = [i for i, task in enumerate(tasks) if task is not None]
        results = forward(self._executor, [task for task in tasks if task is not None]) if there else []
        by_place = dict(zip(there, results, strict=True))
        return [by_place.get(i) for i in range(len(tasks))]

    def _commit(self, work: Work, result: Result | None) -> Sequence[int] | None:
        """Advance a sample's cache; the tokens it drew, or None if its row was not done."""
        if result is None or (seq := self._seqs.get(work.sample)) is None:
            return None
        match result:
            case RowFailed(PoolExhausted() as error) if work.sample.is_blending:  # a document is not there after all
                self._requeue(seq, error)
                return None
            case RowFailed(error):
                self._fail(seq, error)
                return None
            case RowDone():
                return self._active.guarded(seq, partial(self._row_done, seq, work, result), None)

    def _row_done(self, seq: SequenceState, work: Work, result: RowDone) -> Sequence[int] | None:
        """A row was computed: its cache grows, and the features and the listener are notified."""
        tokens, scores = result.tokens, result.scores
        assert seq.kv is not None
        if work.sample.is_blending:
            if (ready := self._blends.row_done(seq)) is not None:
                self._active.prompt_progress(seq, ready)
            return tokens
        accepted = tokens[:-1] if work.drafts else ()
        stop, size, filled = work.start + work.count + len(accepted), self._executor.layout.page_tokens, None
        leaves = None if seq.job.request.background else seq.prefix_keys
        if leaves is not None and work.start // size < stop // size:
            filled = partial(self._executor.prefixes.insert, prefix_keys=leaves)
        seq.kv.commit([[*seq.ids[work.start : stop], *accepted]], filled=filled)
        if seq.draft_state is not None and self._drafting is not None:
            self._drafting.record_accepted(seq.draft_state, len(accepted), self.metrics)
            if seq.kv.row(0).reserved - stop >= size:  # pages of drafts that were not accepted
                seq.kv.truncate(stop)
        if work.sample.blend_progress is not None and stop == work.sample.blend_progress.start:
            self._blends.add(seq)
        if work.start < work.sample.prompt:
            self._active.prompt_progress(seq, min(stop, work.sample.prompt))
        if scores is not None and seq.scoring is not None:
            notify(seq.job, seq.scoring.event(seq.ids, work.start, scores))
        return tokens


def _prefix_restore(
    executor: Executor, store: Store | None, config: EngineConfig, metrics: Metrics, wake: Callable[[], None]
) -> PrefixRestore | None:
    """Prefixes in a store; None without a store that outlives the process."""
    if store is None or store.least_budget is None or config.stored_prefix_tokens is None:
        return None
    return PrefixRestore(executor, store, config.stored_prefix_tokens, metrics, wake)


def _nothing_to_reclaim(_pinned: bool) -> bool:
    return False
