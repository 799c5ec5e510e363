"""The engine: plan, run, sample, commit, tell. One step serves everybody who has a row, wherever each of them stands.

`step` belongs to one thread at a time; requests come and go from any. Refuses to know text and threads.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import zip_longest
from typing import TypeVar

from ..blend.certificate import Certificate
from ..blend.chunk import ChunkCache
from ..blend.quality_gate import QualityGate
from ..config import EngineConfig
from ..errors import Cancelled, InputError, NumericsError, PoolExhausted
from ..executor.executor import Executor
from ..metrics import Metrics
from ..store.store import Store
from .admission import BorrowedKV, make_job
from .blending import BlendQueue
from .counters import ENGINE_METRICS, Counters
from .discovery import wants_discovery
from .drafting import Drafting
from .event import DraftCounts, Ended, Listener, PromptProgress, Reason, TokenEvent
from .forward import Result, RowDone, RowFailed, RowTask, forward
from .handles import HandleInfo
from .isolation import contained, quietly
from .notify import blend_report, detach_kv, notify
from .plan import Admission, Sample, StepPlan, Work
from .prefix_restore import PrefixRestore
from .quality_checks import QualityChecks
from .request import Request
from .rows import row_task
from .scheduler import Advance, Scheduler, StepLimits
from .sequence import Job, PoolAccounting, Relief, SequenceState
from .sequence_kv import cache_for, fork_sequence, out_of_pages
from .view import EngineView, look

T = TypeVar("T")


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
        relieve: Relief | None = None,
    ) -> None:
        """`chunks` gives what documents of prompts are found in; without it such requests are refused.

        `relieve` is asked for pages before a request is preempted or fails.

        `store`, if it has a tier that outlives the process, keeps prefixes that this executor has no room for. Close
        the engine, and it keeps them all.
        """
        config = config or EngineConfig()
        self._chunks = chunks
        self._discover = config.discover
        self.wakeup = threading.Event()  # set, from any thread, when there may be something to do
        self._blends = BlendQueue(self.wakeup.set, self._give_back, self._fail)
        self.metrics = metrics or Metrics(ENGINE_METRICS)
        self._executor = executor
        self._clock = clock
        self._drafting = drafting
        self._seqs: dict[Sample, SequenceState] = {}
        self._jobs: dict[str, Job] = {}
        self._inbox: deque[Callable[[], None]] = deque()  # what other threads want, until the next step
        self._arriving: dict[Job, None] = {}  # jobs in there
        limits = StepLimits(config.step_tokens, config.max_rows, executor.layout.page_tokens, config.shared_step_tokens)
        self._quality_checks = QualityChecks(gate, executor, self.metrics, self._seqs) if gate is not None else None
        self._prefix_restore = None
        if store is not None and store.least_budget is not None and config.stored_prefix_tokens is not None:
            self._prefix_restore = PrefixRestore(
                executor, store, config.stored_prefix_tokens, self.metrics, self.wakeup.set
            )
        self._waits = (self._blends,) if self._prefix_restore is None else (self._blends, self._prefix_restore)
        self._accounting = PoolAccounting(
            executor,
            self._seqs,
            relieve or _no_relief,
            None if self._prefix_restore is None else self._prefix_restore.load_prefix,
        )
        self._scheduler = Scheduler(limits, self._accounting, config.owner_weights)
        self._counters = Counters(self.metrics, executor.pool, self._scheduler, clock)

    # The spine.

    def step(self) -> bool:
        """One forward for everybody who has a row; False if nobody wants one.

        Raises what only concerns the call itself: a cancel, after which everything stands where it stood, and our own
        mistakes, with which the rows of the step end.
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
                quietly(partial(self._drafting.stepped, plan, tasks, results), None)
            drawn = [self._commit(work, result) for work, result in zip(plan.work, results, strict=True)]
            advances = self._scheduler.commit(plan, drawn)
            done = [result for result, tokens in zip(results, drawn, strict=True) if tokens is not None]
            self._tell(advances, done)
        except Cancelled:
            raise
        except BaseException as error:
            self._break_off(plan, error)
            raise
        self._counters.stepped()
        return True

    # From any thread.

    def prepare(self, request: Request, listener: Listener, borrowed: BorrowedKV | None = None) -> Job:
        """A request that can be added; anything wrong with it is said here, before any work.

        What is lent belongs to the engine from here on, also if this raises.
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
        """Let a request in at the next step; if `held`, it waits until somebody resumes it."""
        job.first.sample.held = held
        job.arrived_s = self._clock()
        self._arriving[job] = None
        self._inbox.append(partial(self.enter, job))

    def abort(self, which: Job | str) -> None:
        """End a request before the next step, unless it has ended already; a job also if it was never added."""
        self._inbox.append(partial(self._abort, which))

    def hold(self, which: Job | str) -> None:
        """Give a request no row until it is resumed: nobody reads what it draws."""
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
        """Requests in progress, those not yet let in included."""
        own = self._quality_checks.jobs if self._quality_checks is not None else 0
        return len(self._jobs) + len(self._arriving) - own

    @property
    def waiting(self) -> int:
        """Samples that wait for their first row, or for the next one after a preemption."""
        return self._scheduler.waiting + len(self._arriving)

    def waiting_by_owner(self) -> Counter[str]:
        """The same for each owner."""
        return self._scheduler.waiting_by_owner() + Counter(job.request.owner for job in list(self._arriving))

    # Between two steps.

    def drain_inbox(self) -> None:
        """Do what other threads asked for."""
        while self._inbox:
            self._inbox.popleft()()

    @property
    def asked(self) -> bool:
        """Whether other threads want something that is not done yet."""
        return bool(self._inbox)

    @property
    def ready(self) -> bool:
        """Whether a step would have something to do."""
        compares = self._quality_checks is not None and self._quality_checks.wants
        return self.asked or self._scheduler.ready or compares or any(one.due for one in self._waits)

    @property
    def patience_s(self) -> float | None:
        """Seconds after which it is worth asking again, though nobody wakes us; None where nobody waits for a store."""
        return min((one.patience_s for one in self._waits if one.patience_s is not None), default=None)

    def fail_all(self, error: BaseException) -> None:
        """End everything."""
        self.drain_inbox()
        if self._quality_checks is not None:
            self._quality_checks.close(self)
        for job in list(self._jobs.values()):
            for seq in list(job.live):
                self._end(seq, "error", error)

    def close(self) -> None:
        """Nothing more is asked: what is known of prompts goes to the store, if there is one that outlives us."""
        if self._prefix_restore is not None:
            self._prefix_restore.close()

    # Coming.

    def enter(self, job: Job) -> None:
        """Let a request in, now."""
        self._arriving.pop(job, None)
        if job.request.id in self._jobs:
            error = InputError(f"a request {job.request.id!r} is in progress; give each its own id")
            job.live.append(job.first)
            self._end(job.first, "error", error)
            return
        self._jobs[job.request.id] = job
        self._seqs[job.first.sample] = job.first
        job.live.append(job.first)
        self._scheduler.add(job.first.sample)

    def _hold(self, which: Job | str, held: bool) -> None:
        job = self._jobs.get(which) if isinstance(which, str) else which
        for seq in job.live if job is not None else ():
            seq.sample.held = held

    # Planning.

    def _plan(self) -> StepPlan:
        """A plan that has work, if anybody wants some; those before it only make room."""
        try:
            self.drain_inbox()
            while True:
                if self._quality_checks is not None:
                    self._quality_checks.before_plan(self)
                for one in self._waits:
                    one.before_plan()
                if self._drafting is not None:
                    self._drafting.request_drafts(self._seqs)
                plan = self._scheduler.plan()
                self._accounting.end_failed(self._fail)
                plan = self._arrange(plan)
                if plan.work or not (plan.preempted or plan.admitted or plan.starved is not None):
                    return plan
        except BaseException as error:  # our mistake, or an interrupt: nobody's state can be trusted
            self.fail_all(error)
            raise

    def _arrange(self, plan: StepPlan) -> StepPlan:
        """Carry out what a plan needs before its work; returns the plan without requests that failed on the way."""
        for gone in plan.preempted:
            if (seq := self._seqs.get(gone.sample)) is not None:
                self._guarded(seq, partial(self._preempt, seq), None)
        for new in plan.admitted:
            if (seq := self._seqs.get(new.sample)) is not None:
                self._guarded(seq, partial(self._place, seq, new), None)
        if plan.starved in self._seqs and not self._accounting.free_kept_pages(True):
            starved = self._seqs[plan.starved]
            self._end(starved, "error", out_of_pages(starved, self._executor))
        if all(work.sample in self._seqs for work in plan.work):
            return plan
        return replace(plan, work=tuple(work for work in plan.work if work.sample in self._seqs))

    def _guarded(self, seq: SequenceState, action: Callable[[], T], otherwise: T) -> T:
        """The result of a request's own part of a step; what that raises ends this request and no other."""
        try:
            return action()
        except BaseException as error:
            self._fail(seq, contained(error))
            return otherwise

    def _give_back(self, seq: SequenceState, error: PoolExhausted) -> None:
        """A sample without room for what it was promised waits for it again, unless nobody is left to wait for."""
        if self._scheduler.running == 1:
            self._fail(seq, error)
            return
        self._scheduler.give_back(seq.sample)
        self._preempt(seq)

    def _forget(self, seq: SequenceState) -> None:
        """It waits for no store any more."""
        for one in self._waits:
            one.forget(seq)

    def _preempt(self, seq: SequenceState) -> None:
        self._forget(seq)
        if seq.blending is not None:
            seq.blending.close()
        if not seq.job.request.background:
            self._counters.preempted(seq)
        if seq.kv is not None:
            seq.kv.close()
        seq.kv = None
        if seq.prefix_keys is not None:
            seq.prefix_keys.rewind()

    def _place(self, seq: SequenceState, new: Admission) -> None:
        """Give a sample the cache it begins with."""
        if seq.blending is not None:
            seq.blending.open()
        seq.kv = cache_for(seq, new.hit.tokens, self._executor)
        found = seq.kv.num_entries
        self._scheduler.placed(new.sample, found)  # another thread may have taken pages since they were counted
        if new.sample.blends:
            self._blends.expect(seq)
        if seq.cached is None:
            seq.cached = min(found, new.sample.prompt)
            if not seq.job.request.background:
                self._counters.began(seq)

    # Running.

    def _task(self, work: Work) -> RowTask | None:
        seq = self._seqs[work.sample]
        return self._guarded(seq, partial(row_task, seq, work), None)

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
            case RowFailed(PoolExhausted() as error) if work.sample.blends:  # a document is not there after all
                self._give_back(seq, error)
                return None
            case RowFailed(error):
                self._fail(seq, error)
                return None
            case RowDone():
                return self._guarded(seq, partial(self._done, seq, work, result), None)

    def _done(self, seq: SequenceState, work: Work, result: RowDone) -> Sequence[int] | None:
        """A row was computed: its cache grows by it, and features and listener are told."""
        tokens, scores = result.tokens, result.scores
        assert seq.kv is not None
        if work.sample.blends:
            if (there := self._blends.took(seq)) is not None:
                self._read(seq, there)
            return tokens
        accepted = tokens[:-1] if work.drafts else ()
        stop, size, filled = work.start + work.count + len(accepted), self._executor.layout.page_tokens, None
        leaves = None if seq.job.request.background else seq.prefix_keys
        if leaves is not None and work.start // size < stop // size:
            filled = partial(self._executor.prefixes.insert, prefix_keys=leaves)
        seq.kv.commit([[*seq.ids[work.start : stop], *accepted]], filled=filled)
        if seq.draft_state is not None and self._drafting is not None:
            self._drafting.took(seq.draft_state, len(accepted), self.metrics)
            if seq.kv.row(0).reserved - stop >= size:  # pages of drafts that were not accepted
                seq.kv.truncate(stop)
        if work.sample.blend_progress is not None and stop == work.sample.blend_progress.start:
            self._blends.expect(seq)
        if work.start < work.sample.prompt:
            self._read(seq, min(stop, work.sample.prompt))
        if scores is not None and seq.scoring is not None:
            notify(seq.job, seq.scoring.tell(seq.ids, work.start, scores))
        return tokens

    def _read(self, seq: SequenceState, tokens: int) -> None:
        """So many tokens of a prompt are there; after a preemption this is no news until it goes beyond what was."""
        if tokens > seq.read:
            seq.read = tokens
            if seq.job.request.progress:
                blended = seq.blending.report() if seq.blending is not None and seq.blending.done else None
                notify(seq.job, PromptProgress(seq.sample.index, tokens, seq.cached or 0, blended))

    def _fail(self, seq: SequenceState, error: Exception) -> None:
        if isinstance(error, NumericsError) and seq.prefix_keys is not None:
            self._executor.prefixes.forget(seq.prefix_keys)  # the KV behind such logits may be no better
            if self._prefix_restore is not None:
                quietly(partial(self._prefix_restore.doubt, seq), None)
        self._end(seq, "error", error)

    # Telling.

    def _tell(self, advances: Sequence[Advance], results: Sequence[Result | None]) -> None:
        logprobs = iter([one for result in results if isinstance(result, RowDone) for one in result.logprobs])
        for one in advances:
            if one.parent is not None:
                self._try_fork(one.parent, one.sample)
        self._counters.told(sum(one.token is not None for one in advances))
        now_s = self._clock()
        for one, after in zip_longest(advances, advances[1:]):
            seq, over = self._seqs.get(one.sample), False
            event = None
            if one.token is not None:
                drafted = after is not None and after.sample is one.sample
                event = TokenEvent(one.sample.index, one.token, next(logprobs), drafted)
            if seq is None:  # it was content before the last of several tokens
                continue
            if event is not None:
                over = self._guarded(seq, partial(self._drew, seq, event, now_s), False)
            if one.end is not None:
                self._end(seq, one.end)
            elif over:
                self._end(seq, "stop")

    def _try_fork(self, parent: Sample, sample: Sample) -> None:
        """Another sample behind a prompt; where that fails, the whole request does."""
        seq = self._seqs.get(parent)
        if seq is not None:
            self._guarded(seq, partial(self._fork, seq, sample), None)
        if sample not in self._seqs:
            self._scheduler.drop(sample)
            error = InputError("another sample of this request failed")
            for other in list(seq.job.live) if seq is not None else ():
                self._end(other, "error", error)

    def _fork(self, parent: SequenceState, sample: Sample) -> None:
        """Another sample behind the prompt that `parent` has computed."""
        seq = fork_sequence(parent, sample, self._executor)
        seq.job.live.append(seq)
        seq.job.unforked -= 1
        self._seqs[sample] = seq
        self._counters.forked()

    def _drew(self, seq: SequenceState, event: TokenEvent, now_s: float) -> bool:
        """Take a token in, and let the listener notify it; True if it is content, or not to be talked to."""
        assert seq.state is not None
        seq.ids.append(event.token)
        seq.state.advance(event.token)
        self._counters.drew(seq, now_s)
        return seq.job.listener.on_event(event)

    # Going.

    def leave(self, job: Job) -> None:
        """End a request, now."""
        self._abort(job)

    def _abort(self, which: Job | str) -> None:
        job = self._jobs.get(which) if isinstance(which, str) else which
        for seq in list(job.live) if job is not None else ():
            self._end(seq, "cancelled")
        if job is not None:
            job.release_resources()

    def _break_off(self, plan: StepPlan, error: BaseException) -> None:
        """A mistake of ours, or an interrupt, left the rows of a step half done: they end."""
        for work in plan.work:
            if (seq := self._seqs.get(work.sample)) is not None:
                self._end(seq, "error", error)

    def _end(self, seq: SequenceState, reason: Reason, error: BaseException | None = None) -> None:
        """A sample is over: its pages go back, or over to whoever wanted to keep them. Exactly once."""
        job = seq.job
        if seq not in job.live:
            return
        job.live.remove(seq)
        self._seqs.pop(seq.sample, None)
        self._scheduler.drop(seq.sample)
        quietly(partial(self._forget, seq), None)
        blended = quietly(partial(blend_report, seq), None) if seq.sample.index == 0 else None
        if seq.blending is not None:
            quietly(seq.blending.close, None)
        keeps = job.request.keep_kv and reason != "error"
        kv = quietly(partial(detach_kv, seq, self._executor), None) if keeps else None
        if kv is None and seq.kv is not None:
            seq.kv.close()
        seq.kv = None
        unforked, job.unforked = (job.unforked, 0) if seq.sample.index == 0 else (0, job.unforked)
        cached, drafts = seq.cached or 0, DraftCounts()
        if seq.draft_state is not None and self._drafting is not None:
            drafts = seq.draft_state.counts
            self._drafting.forget(seq.draft_state)
        computed = max(0, seq.read - cached)
        notify(job, Ended(seq.sample.index, reason, cached, computed, error, kv, drafts, blended))
        for index in range(job.request.samples - unforked, job.request.samples):
            notify(job, Ended(index, reason, error=error))
        if not job.live:
            self._close(job, seq, reason, error)

    def _close(self, job: Job, last: SequenceState, reason: Reason, error: BaseException | None) -> None:
        job.release_resources()
        if self._jobs.get(job.request.id) is job:
            del self._jobs[job.request.id]
        if not job.request.background:
            self._counters.ended(job, last, reason, error)
        self._counters.stepped()  # no step may follow: gauges must not say that it is still there


def _no_relief(_pinned: bool) -> bool:
    return False
